"""Good, bad or inconclusive: every node of a fleet, over all metrics, with a promised rate of false alarms.

A node's value of a metric is the mean logarithm of its repetitions; nodes of one hardware are compared with each other, or, where
they are fewer than four, with earlier values of the same hardware. The promise ``rate`` is per node and over all metrics, each of
which gets an equal part of it. It holds for values that are independent and normal from node to node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import optimize, stats

from analysis.fleet.samples import Metric
from suite.machine.node_samples import END
from suite.statistics.outliers import Outliers, critical, critical_beside, find_outliers, power, spread_of_one

RATE = 1e-3  # of false alarms per node, over all metrics
EFFECT = 0.05  # the slowdown that a good node must not have
SURE = 0.95  # that a node which is called good is not slower than that
LIKELY = 0.9  # chance with which the smallest slowdown that is told would be found
FARTHEST = 700.0  # of logarithms: exp is still finite
MANY = 10.0  # times: differences beyond are told as factors
Word = Literal["good", "bad", "inconclusive"]


@dataclass(frozen=True)
class MetricVerdict:
    """One node and metric. ``slower``: its part of the speed of the rest that is missing, negative if it is faster."""

    node: str
    metric: str
    word: Word
    slower: float | None
    reason: str


@dataclass(frozen=True)
class MetricReport:
    """A metric of one hardware. ``found``: the slowdown that is found with a probability of `LIKELY`; None if none can be.

    ``repeats``: the coefficient of variation between nodes; ``clusters``: how many nodes stand apart on the slow side, are in the
    middle, and stand apart on the fast side. ``warning`` is one line or "".
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
    """All metrics, and the word on every node with its reasons: bad if a metric is, inconclusive if one is and none is bad."""

    metrics: tuple[MetricReport, ...]
    words: Mapping[str, Word]
    reasons: Mapping[str, tuple[str, ...]]
    rate: float
    effect: float
    warnings: tuple[str, ...]


def judge(
    metrics: Sequence[Metric],
    *,
    rate: float = RATE,
    effect: float = EFFECT,
    history: Mapping[tuple[str, str], Sequence[float]] | None = None,
    bounds: Mapping[str, float] | None = None,
    nodes: Sequence[str] = (),
) -> FleetVerdict:
    """Judge every node. ``history``: earlier node values by (hardware, metric); ``bounds``: the worst value that is allowed.

    A metric with a bound of its own is judged by that alone. A metric that a node lacks and others of its hardware have makes
    it inconclusive; one that failed on it and not on others makes it bad. ``nodes`` without a sample are bad where others have one.
    """
    compared = [metric for metric in metrics if metric.samples and metric.bound is None]
    tests = max(1, len({metric.name for metric in compared}))
    each = -math.expm1(math.log1p(-rate) / tests)
    reports = tuple(
        _report(
            metric,
            each,
            effect,
            (history or {}).get((metric.hardware, metric.name), ()),
            (bounds or {}).get(metric.name),
        )
        for metric in compared
    )
    found = [verdict for report in reports for verdict in report.verdicts] + _missing(metrics)
    found += [verdict for metric in metrics for verdict in (*_bounded(metric), *_failed(metric))]
    ended = {node for metric in metrics if metric.name == END for node in (*metric.samples, *metric.failed)}
    measured = ended or {verdict.node for verdict in found}  # links say nothing of the node itself
    found += [
        MetricVerdict(
            node, "", "bad" if measured else "inconclusive", None, "left no samples: nothing was measured there"
        )
        for node in nodes
        if node not in measured
    ]
    words: dict[str, Word] = {}
    for verdict in found:
        known = words.get(verdict.node, "good")
        words[verdict.node] = min(known, verdict.word, key=("bad", "inconclusive", "good").index)
    reasons: dict[str, list[str]] = {node: [] for node in words}
    for verdict in found:
        told = reasons[verdict.node]
        if verdict.word == words[verdict.node] != "good" and verdict.reason not in told:
            told.append(verdict.reason)
    warnings = [f"{report.metric.name}: {report.warning}" for report in reports if report.warning]
    warnings += [
        f"{metric.name}: failed on every node: {next(iter(metric.failed.values()))}"
        for metric in metrics
        if metric.failed and not metric.samples
    ]
    return FleetVerdict(reports, words, {k: tuple(v) for k, v in reasons.items()}, rate, effect, tuple(warnings))


def look_again(first: FleetVerdict, second: FleetVerdict) -> FleetVerdict:
    """The verdict of two looks: bad is only what is bad in both, so that a passing disturbance names nobody.

    A node that is bad in the first only has the word of the second, and the first's reasons.
    """
    words = dict(first.words)
    reasons = dict(first.reasons)
    for node, word in first.words.items():
        again = second.words.get(node, word)
        if word == "bad" and again == "bad":
            reasons[node] = tuple(f"{reason} (second look)" for reason in second.reasons[node])
        elif word == "bad":
            words[node] = again
            reasons[node] = (*(f"{reason} (first look only)" for reason in first.reasons[node]), *second.reasons[node])
    return replace(second, words=words, reasons=reasons, warnings=(*first.warnings, *second.warnings))


def node_value(values: Sequence[float], better: str) -> float:
    """Mean logarithm, with the sign that makes more worse."""
    mean = math.fsum(math.log(value) for value in values) / len(values)
    return -mean if better == "more" else mean


def missing_speed(distance: float) -> float:
    """The part of the speed that is missing, from the difference of logarithms."""
    return -math.expm1(-max(distance, -FARTHEST))


def _report(metric: Metric, rate: float, effect: float, history: Sequence[float], bound: float | None) -> MetricReport:
    nodes = sorted(metric.samples)
    values = np.array([node_value(metric.samples[node], metric.better) for node in nodes])
    beyond = {node for node in nodes if bound is not None and _beyond(metric, node, bound)}
    past = np.array([node_value([value], metric.better) for value in history])
    apart = find_outliers(values, rate)
    if apart is None and len(past) > 2:
        limit = critical_beside(len(past), rate)
        base = Outliers(0, len(past), float(past.mean()), float(past.std(ddof=1)))
    elif apart is not None:
        limit, base = critical(len(nodes), 1, rate), apart
    else:
        why = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} and {len(past)} earlier values are too few to compare"
        unsure = tuple(_verdict(metric, node, beyond, bound, "inconclusive", None, why) for node in nodes)
        return MetricReport(metric, unsure, None, None, None, (0, len(nodes), 0), "")
    spread = spread_of_one(base.deviation, base.rest)
    worst = set(np.argsort(values)[::-1][: base.count].tolist())
    room = float(stats.t.isf(1.0 - SURE, base.rest - 1)) * spread
    verdicts: list[MetricVerdict] = []
    for place, node in enumerate(nodes):
        distance = float(values[place]) - base.mean
        slow = place in worst or (apart is None and distance > limit * spread)
        word: Word = "bad" if slow else "good" if missing_speed(distance + room) < effect else "inconclusive"
        verdicts.append(_verdict(metric, node, beyond, bound, word, distance, ""))
    faster = find_outliers(-values, rate)
    fast = faster.count if faster is not None else 0
    warning = ""
    if fast:
        warning = (
            f"{fast} of {len(nodes)} nodes are faster than the others, not slower: if these are the healthy ones, "
            "most are degraded; give absolute bounds"
        )
    return MetricReport(
        metric,
        tuple(verdicts),
        math.expm1(min(base.deviation, FARTHEST)),
        _found(base, limit),
        power(-math.log1p(-effect), base.deviation, base.rest, limit) if base.deviation > 0.0 else 1.0,
        (base.count, len(nodes) - base.count - fast, fast),
        warning,
    )


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
    """The slowdown that is found with probability `LIKELY`."""
    if base.deviation == 0.0:
        return 0.0
    most = 20.0  # of the logarithm: a factor of 5e8
    if power(most, base.deviation, base.rest, limit) < LIKELY:
        return None
    found = optimize.brentq(lambda d: power(d, base.deviation, base.rest, limit) - LIKELY, 0.0, most, xtol=1e-6)
    return missing_speed(float(found))


def _bounded(metric: Metric) -> Iterator[MetricVerdict]:
    """The verdicts by the metric's own bound."""
    if metric.bound is None:
        return
    for node in sorted(metric.samples):
        beyond = _beyond(metric, node, metric.bound)
        value = float(np.median(metric.samples[node]))
        side = "at least" if metric.better == "more" else "at most"
        text = f"{metric.name}: {value:.3g} {metric.unit}, expected {side} {metric.bound:.3g}"
        yield MetricVerdict(node, metric.name, "bad" if beyond else "good", None, text)


def _failed(metric: Metric) -> Iterator[MetricVerdict]:
    """What failed on some nodes and not on others."""
    for node, why in sorted(metric.failed.items()):
        if metric.samples:
            yield MetricVerdict(node, metric.name, "bad", None, f"{metric.name}: failed, but not on others: {why}")
        else:
            yield MetricVerdict(node, metric.name, "inconclusive", None, f"{metric.name}: failed: {why}")


def _missing(metrics: Sequence[Metric]) -> list[MetricVerdict]:
    nodes: dict[str, set[str]] = {}
    for metric in metrics:
        nodes.setdefault(metric.hardware, set()).update(metric.samples, metric.failed)
    return [
        MetricVerdict(node, metric.name, "inconclusive", None, f"{metric.name}: not measured on this node")
        for metric in metrics
        for node in sorted(nodes[metric.hardware] - set(metric.samples) - set(metric.failed))
    ]
