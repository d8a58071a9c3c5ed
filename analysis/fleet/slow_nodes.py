"""Judges every node of a fleet as good, bad or inconclusive over all metrics, at a given false-alarm rate.

A node's value of a metric is the median logarithm of its repetitions. Nodes of one hardware are compared with each
other, and with earlier values of the same hardware. A bad node is surely slower than ``effect``. ``rate`` is per node
and over all metrics, each of which gets an equal part of it. It holds for nodes that differ normally and repetitions
with the tails that were seen, continued no heavier than Student's t with 3 degrees of freedom. The same tails are
assumed from node to node where nodes have fewer than three repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from analysis.fleet.samples import Metric
from suite.machine.node_samples import END
from suite.statistics.outliers import (
    Outliers,
    chance_of_median,
    critical,
    critical_beside,
    find_outliers,
    power,
    spread_of_one,
)

RATE = 1e-3  # of false alarms per node, over all metrics
EFFECT = 0.05  # the slowdown that a good node must not have
SURE = 0.95  # confidence that a good node is not slower than that
LIKELY = 0.9  # power at which the smallest slowdown that would be found is stated
FEW_NODES = 8  # below this many, the repetitions' spread is used, as the nodes cannot tell theirs
FEW_REPETITIONS = 3  # from this many on, repetitions tell their own spread
FARTHEST = 700.0  # of logarithms: exp is still finite
MANY = 10.0  # times: larger differences are printed as factors
Word = Literal["good", "bad", "inconclusive"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MetricVerdict:
    """One node and metric. ``slower``: the part of the others' speed that it lacks, negative if it is faster."""

    node: str
    metric: str
    word: Word
    slower: float | None
    reason: str


@dataclass(frozen=True)
class MetricReport:
    """A metric of one hardware. ``found``: the slowdown that is found with a probability of `LIKELY`; None if none is.

    ``repeats``: the coefficient of variation between nodes. ``clusters``: the numbers of slow outliers, of nodes in the
    middle and of fast outliers. ``warning`` is one line or "".
    """

    metric: Metric
    verdicts: tuple[MetricVerdict, ...]
    repeats: float | None
    found: float | None
    power: float | None
    clusters: tuple[int, int, int]
    warning: str


@dataclass(frozen=True)
class FleetVerdict:
    """All metrics, and the word on every node with its reasons: that of its worst metric."""

    metrics: tuple[MetricReport, ...]
    words: Mapping[str, Word]
    reasons: Mapping[str, tuple[str, ...]]
    rate: float
    effect: float
    warnings: tuple[str, ...]
    bad: frozenset[tuple[str, str]] = frozenset()  # (node, metric); without metric: not by comparison
    alike: bool = False  # no node differs, and nothing from outside the fleet was there to compare with


def judge(
    metrics: Sequence[Metric],
    *,
    rate: float = RATE,
    effect: float = EFFECT,
    history: Mapping[tuple[str, str], Sequence[float]] | None = None,
    bounds: Mapping[str, float] | None = None,
    nodes: Sequence[str] = (),
) -> FleetVerdict:
    """Judge every node. ``history``: earlier node values by (hardware, metric); ``bounds``: the worst allowed values.

    A metric with a bound of its own is judged by that alone. A metric that a node lacks and others of its hardware have
    makes it inconclusive. One that failed on it and not on others makes it bad. ``nodes`` without a sample are bad if
    others have one.
    """
    history, bounds = history or {}, bounds or {}
    compared = [metric for metric in metrics if metric.samples and metric.bound is None]
    tests = max(1, len({metric.name for metric in compared}))
    each = -math.expm1(math.log1p(-rate) / tests)  # Sidak's correction: all tests together alarm at ``rate``
    reports = []
    for metric in compared:
        past = history.get((metric.hardware, metric.name), ())
        reports.append(_report(metric, each, effect, past, bounds.get(metric.name)))
    found = [verdict for report in reports for verdict in report.verdicts] + _missing(metrics)
    for metric in metrics:
        found += [*_bounded(metric), *_failed(metric)]
    found += _without_samples(metrics, found, nodes)
    words, reasons = _worst_words(found)
    warnings = [f"{report.metric.name}: {report.warning}" for report in reports if report.warning]
    for metric in metrics:
        if metric.failed and not metric.samples:
            warnings.append(f"{metric.name}: failed on every node: {next(iter(metric.failed.values()))}")
    bad = frozenset((each.node, each.metric if each.slower is not None else "") for each in found if each.word == "bad")
    asked = any(len(history.get((each.hardware, each.name), ())) > 2 or each.name in bounds for each in compared)
    alike = any(report.repeats is not None for report in reports) and "bad" not in words.values() and not asked
    return FleetVerdict(tuple(reports), words, reasons, rate, effect, tuple(warnings), bad, alike)


def _without_samples(
    metrics: Sequence[Metric], found: Sequence[MetricVerdict], nodes: Sequence[str]
) -> list[MetricVerdict]:
    """Judge the nodes of which nothing was measured."""
    # `preflight node` ends with this metric. A node that only another node's measurement of links names has none
    ended = {node for metric in metrics if metric.name == END for node in (*metric.samples, *metric.failed)}
    measured = ended or {verdict.node for verdict in found}
    word: Word = "bad" if measured else "inconclusive"
    why = "left no samples: nothing was measured there"
    return [MetricVerdict(node, "", word, None, why) for node in nodes if node not in measured]


def _worst_words(found: Sequence[MetricVerdict]) -> tuple[dict[str, Word], dict[str, tuple[str, ...]]]:
    """Find the word of every node, which is that of its worst metric, and the reasons for it."""
    words: dict[str, Word] = {}
    for verdict in found:
        known = words.get(verdict.node, "good")
        words[verdict.node] = min(known, verdict.word, key=("bad", "inconclusive", "good").index)
    reasons: dict[str, dict[str, None]] = {node: {} for node in words}  # a dict keeps the order, and each reason once
    for verdict in found:
        if verdict.word == words[verdict.node] != "good":
            reasons[verdict.node][verdict.reason] = None
    return words, {node: tuple(each) for node, each in reasons.items()}


def look_again(first: FleetVerdict, second: FleetVerdict) -> FleetVerdict:
    """Join the verdicts of two looks. A node is bad if it is so in one metric in both: a disturbance accuses no node.

    A node that is bad in the first look only gets the word of the second, and the reasons of both. A node that is bad
    in different metrics is inconclusive.
    """
    twice = {node for node, _ in first.bad & second.bad}
    words = dict(first.words)
    reasons = dict(first.reasons)
    for node, word in first.words.items():
        again = second.words.get(node, word)
        if word == "bad" and (node in twice or node not in second.words):
            reasons[node] = tuple(f"{reason} (second look)" for reason in second.reasons.get(node, reasons[node]))
        elif word == "bad":
            words[node] = "inconclusive" if again == "bad" else again
            reasons[node] = (*(f"{reason} (first look only)" for reason in first.reasons[node]), *second.reasons[node])
    return replace(second, words=words, reasons=reasons, warnings=(*first.warnings, *second.warnings))


def node_value(values: Sequence[float], better: str) -> float:
    """Compute the median logarithm, with the sign that makes more worse."""
    middle = float(np.median(np.log(values)))
    return -middle if better == "more" else middle


def missing_speed(distance: float) -> float:
    """Compute the part of the speed that is missing from the difference of logarithms."""
    return -math.expm1(-max(distance, -FARTHEST))


def _report(metric: Metric, rate: float, effect: float, history: Sequence[float], bound: float | None) -> MetricReport:
    """Judge all nodes of one metric by the outlier test, and those beyond ``bound``."""
    nodes = sorted(metric.samples)
    values = np.array([node_value(metric.samples[node], metric.better) for node in nodes])
    beyond = {node for node in nodes if bound is not None and _beyond(metric, node, bound)}
    past = np.array([node_value([value], metric.better) for value in history])
    margin, repetitions = -math.log1p(-effect), min(len(metric.samples[node]) for node in nodes)
    own, floor = _own_deviations(metric), _resolution(metric)
    known = 0.0
    if len(nodes) < FEW_NODES and repetitions >= FEW_REPETITIONS:
        known = max(margin / 2, float(own.max(initial=0.0)))  # healthy nodes differ by less than half of the effect
    tailed = repetitions < FEW_REPETITIONS
    outliers = find_outliers(values, rate, margin=margin, floor=floor, tailed=tailed, known=known)
    limit, base = _compared_with(outliers, len(nodes), past, rate, floor)
    if base is None:
        why = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} and {len(past)} earlier values are too few to compare"
        unsure = tuple(_verdict(metric, node, beyond, bound, "inconclusive", None, why) for node in nodes)
        return MetricReport(metric, unsure, None, None, None, (0, len(nodes), 0), "")
    spread = spread_of_one(base.deviation, base.rest)
    # A few late repetitions, of the node or of others, are no slow node
    unlucky = {
        place
        for place, node in enumerate(nodes)
        if (far := float(values[place]) - base.mean - margin) > 0.0
        and repetitions > 1
        and chance_of_median(far, own, len(metric.samples[node])) > rate
    }
    worst = set(np.argsort(values)[::-1][: base.count].tolist())
    before = _compared_with(None, 0, past, rate, floor) if outliers is not None else (limit, base)
    # The upper end of a node's slowdown, which must be below ``effect`` for the node to be good
    room = float(stats.t.isf(1.0 - SURE, base.rest - 1)) * spread
    verdicts: list[MetricVerdict] = []
    for place, node in enumerate(nodes):
        distance = float(values[place]) - base.mean
        word: Word = "inconclusive"
        if place not in unlucky and (place in worst or _slow_beside(float(values[place]), margin, *before)):
            word = "bad"
        elif missing_speed(distance + room) < effect:
            word = "good"
        verdicts.append(_verdict(metric, node, beyond, bound, word, distance, ""))
    faster = find_outliers(-values, rate, floor=floor, tailed=tailed)
    fast = faster.count if faster is not None else 0
    warning = (
        f"{fast} of {len(nodes)} nodes are faster than the others, not slower: if these are the healthy ones, "
        "most are degraded; give absolute bounds"
    )
    return MetricReport(
        metric,
        tuple(verdicts),
        math.expm1(min(base.deviation, FARTHEST)),
        _found(base, limit + margin / spread) if spread else effect,
        power(margin, base.deviation, base.rest, limit + margin / spread) if spread else 1.0,
        (base.count, len(nodes) - base.count - fast, fast),
        warning if fast else "",
    )


def _slow_beside(value: float, margin: float, limit: float, history: Outliers | None) -> bool:
    """Say whether a value is surely worse than the history by more than ``margin``."""
    if history is None:
        return False
    return value - history.mean - margin > limit * spread_of_one(history.deviation, history.rest)


def _own_deviations(metric: Metric) -> Floats:
    """Compute how far the repetitions of all nodes lie from their node's median, in logarithms.

    The repetition that is the median is left out.
    """
    found: list[float] = []
    for values in metric.samples.values():
        away = np.sort(np.abs(np.log(values) - np.median(np.log(values))))
        found += away[len(away) % 2 :].tolist()
    return np.array(found)


def _resolution(metric: Metric) -> float:
    """Compute what rounding can tell, in logarithms: the last digit of the values, at most their least difference."""
    values = sorted({value for values in metric.samples.values() for value in values})
    digit = min(int(Decimal(repr(float(value))).normalize().as_tuple().exponent) for value in values)
    if len(values) < 3:
        digit = min(digit, 0)  # that two values are round says little
    steps = np.diff(np.log(values))
    return min(10.0**digit / values[len(values) // 2], float(steps.min())) if len(steps) else 0.0


def _compared_with(
    outliers: Outliers | None, nodes: int, past: Floats, rate: float, floor: float
) -> tuple[float, Outliers | None]:
    """Choose what nodes are compared with: the rest of the nodes, else the healthy history; None if both are too few.

    Returns the critical distance too, in units of `spread_of_one`.
    """
    if outliers is not None:
        return critical(nodes, 1, rate), outliers
    if len(past) > 2:
        history = Outliers(0, len(past), float(past.mean()), max(floor, float(past.std(ddof=1))))
        return critical_beside(len(past), rate), history
    return math.nan, None


def _verdict(
    metric: Metric, node: str, beyond: set[str], bound: float | None, word: Word, distance: float | None, why: str
) -> MetricVerdict:
    slower = None if distance is None else missing_speed(distance)
    if node in beyond:
        text = f"{metric.name}: beyond the bound of {bound:g} {metric.unit}".rstrip()
        return MetricVerdict(node, metric.name, "bad", slower, text)
    if slower is not None:
        text = f"{metric.name}: {_difference(slower)} than the rest"
        why = text if word != "inconclusive" else f"{text}, and cannot be told from slow"
    return MetricVerdict(node, metric.name, word, slower, why)


def _difference(slower: float) -> str:
    if slower > 1.0 - 1.0 / MANY:
        return f"{1.0 / max(1.0 - slower, math.exp(-FARTHEST)):.3g} times slower"
    if slower < -MANY:
        return f"{1.0 - slower:.3g} times faster"
    return f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"


def _beyond(metric: Metric, node: str, bound: float) -> bool:
    middle = float(np.median(metric.samples[node]))
    return middle < bound if metric.better == "more" else middle > bound


def _found(base: Outliers, limit: float) -> float | None:
    """Compute the slowdown that is found with probability `LIKELY`; None if there is none."""
    if base.deviation == 0.0:
        return 0.0
    most = 20.0  # of the logarithm: a factor of 5e8
    if power(most, base.deviation, base.rest, limit) < LIKELY:
        return None
    found = optimize.brentq(lambda d: power(d, base.deviation, base.rest, limit) - LIKELY, 0.0, most, xtol=1e-6)
    return missing_speed(float(found))


def _bounded(metric: Metric) -> Iterator[MetricVerdict]:
    """Judge nodes by the metric's own bound."""
    if metric.bound is None:
        return
    for node in sorted(metric.samples):
        beyond = _beyond(metric, node, metric.bound)
        value = float(np.median(metric.samples[node]))
        side = "at least" if metric.better == "more" else "at most"
        text = f"{metric.name}: {value:.3g} {metric.unit}, expected {side} {metric.bound:.3g}"
        yield MetricVerdict(node, metric.name, "bad" if beyond else "good", None, text)


def _failed(metric: Metric) -> Iterator[MetricVerdict]:
    """Judge nodes on which the metric failed: bad if it worked on others."""
    for node, why in sorted(metric.failed.items()):
        if metric.samples:
            yield MetricVerdict(node, metric.name, "bad", None, f"{metric.name}: failed, but not on others: {why}")
        else:
            yield MetricVerdict(node, metric.name, "inconclusive", None, f"{metric.name}: failed: {why}")


def _missing(metrics: Sequence[Metric]) -> list[MetricVerdict]:
    """Judge nodes that lack a metric that others of their hardware have."""
    nodes: dict[str, set[str]] = {}
    for metric in metrics:
        nodes.setdefault(metric.hardware, set()).update(metric.samples, metric.failed)
    return [
        MetricVerdict(node, metric.name, "inconclusive", None, f"{metric.name}: not measured on this node")
        for metric in metrics
        for node in sorted(nodes[metric.hardware] - set(metric.samples) - set(metric.failed))
    ]
