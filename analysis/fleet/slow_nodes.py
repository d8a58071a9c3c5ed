"""Judges every node of a fleet as good, bad or inconclusive over all metrics, at a given false-alarm rate.

Nodes of one hardware are compared with each other, and with earlier values of the same hardware, metric by metric
(`mlhpc.analysis.fleet.one_metric`). A bad node is surely slower than ``effect``. ``rate`` is per healthy node and over all
metrics. Each metric gets an equal part of it. The rate holds if repetitions are independent and late no more often than
was seen, and if nodes differ normally. Few nodes do not show whether they do. For them, and for heavier tails, it holds
up to the tails of Student's t with 3 degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlhpc.analysis.fleet.one_metric import (
    Criteria,
    MetricReport,
    MetricVerdict,
    NodeValues,
    Verdict,
    is_beyond,
    judge_metric,
)
from mlhpc.analysis.fleet.samples import Metric
from mlhpc.suite.machine.facts import END_METRIC
from mlhpc.suite.statistics.lateness import DelayDistribution
from mlhpc.suite.statistics.outliers import find_outliers, has_heavy_tails

FALSE_ALARM_RATE = 1e-3  # of false alarms per node, over all metrics
EFFECT = 0.05  # the slowdown that a good node must not have


@dataclass(frozen=True)
class FleetVerdict:
    """Holds the reports of all metrics, and the verdict on every node with its reasons: that of its worst metric.

    ``chance`` is how often a healthy node is called bad, for the tails seen; at most ``rate``. ``bad`` has pairs (node,
    metric). The metric is empty if the node is bad for another reason than a comparison.
    """

    metrics: tuple[MetricReport, ...]
    words: Mapping[str, Verdict]
    reasons: Mapping[str, tuple[str, ...]]
    rate: float
    effect: float
    warnings: tuple[str, ...]
    chance: float = 0.0
    bad: frozenset[tuple[str, str]] = frozenset()

    @property
    def compared(self) -> list[MetricReport]:
        """Return the metrics in which nodes were compared with each other."""
        return [report for report in self.metrics if report.repeats is not None]

    @property
    def heavy(self) -> bool:
        """Return True if node values of a metric may have heavy tails."""
        return not self.compared or any(report.heavy for report in self.compared)

    @property
    def are_equal(self) -> bool:
        """Return True if no node is slower than the others. All may be slow all the same."""
        return bool(self.compared) and set(self.words.values()) == {"good"}


def judge(
    metrics: Sequence[Metric],
    *,
    rate: float = FALSE_ALARM_RATE,
    effect: float = EFFECT,
    history: Mapping[tuple[str, str], Sequence[Sequence[float]]] | None = None,
    bounds: Mapping[str, float] | None = None,
    ceilings: Mapping[tuple[str, str], float] | None = None,
    nodes: Sequence[str] = (),
) -> FleetVerdict:
    """Judge every node.

    ``history`` has earlier node values by (hardware, metric), one list for each measurement. ``bounds`` has the worst
    allowed values by metric. ``ceilings`` has the rates that the hardware reached, by (hardware, metric).

    A metric with a bound of its own is judged by that alone. A node is inconclusive if it lacks a metric that others of
    its hardware have. It is bad if a metric failed on it and not on others. ``nodes`` without a sample are bad if
    others have one.
    """
    history, bounds, ceilings = history or {}, bounds or {}, ceilings or {}
    compared = [NodeValues(metric) for metric in metrics if metric.samples and metric.bound is None]
    # Metric names and not hardwares: one node takes part in the tests of its own hardware only
    tests = max(1, len({values.metric.name for values in compared}))
    each = -math.expm1(math.log1p(-rate) / tests)  # Sidak's correction: all tests together alarm at ``rate``
    of_kind: dict[str, list[NodeValues]] = {}
    for one in compared:
        of_kind.setdefault(one.metric.hardware, []).append(one)
    # Tails are judged over all metrics of a hardware: a single one has too few values
    heavy = {hardware: _has_heavy_tails(kind, each) for hardware, kind in of_kind.items()}
    lateness = {hardware: _join_repetitions(kind) for hardware, kind in of_kind.items()}
    reports = []
    for values in compared:
        key = values.metric.hardware, values.metric.name
        # effect as a logarithm: slower by 5 % is 1 / 0.95 times the time
        criteria = Criteria(
            each,
            -math.log1p(-effect),
            heavy[key[0]],
            bounds.get(key[1]),
            ceilings.get(key),
            history.get(key, ()),
            lateness[key[0]],
        )
        reports.append(judge_metric(values, criteria))
    found = [verdict for report in reports for verdict in report.verdicts] + _missing(metrics)
    for metric in metrics:
        found += [*_judge_by_bound(metric), *_failed(metric)]
    # After all others: a node with any verdict was measured
    found += _judge_unmeasured(metrics, found, nodes)
    words, reasons = _find_worst_verdicts(found)
    warnings = [f"{report.metric.name}: {report.warning}" for report in reports if report.warning]
    for metric in metrics:
        if metric.failed and not metric.samples:
            warnings.append(f"{metric.name}: failed on every node: {next(iter(metric.failed.values()))}")
    bad = frozenset((each.node, each.metric if each.slower is not None else "") for each in found if each.word == "bad")
    # A node has one hardware, so the chances of its metrics add up and the worst hardware counts
    chance = max((sum(one.chance for one in reports if one.metric.hardware == kind) for kind in heavy), default=0.0)
    return FleetVerdict(tuple(reports), words, reasons, rate, effect, tuple(warnings), chance, bad)


def _join_repetitions(compared: Sequence[NodeValues]) -> DelayDistribution | None:
    """Join the repetitions of all metrics of one hardware; None if there are only single ones."""
    late = [one.late / one.late_unit for one in compared if one.fewest > 1]
    return DelayDistribution(np.concatenate(late), extrapolated=False) if late else None


def _has_heavy_tails(compared: Sequence[NodeValues], rate: float) -> bool:
    """Say whether node values of one hardware have heavy tails. Slow outliers are left out: they are in question."""
    groups = []
    for one in compared:
        outliers = find_outliers(one.values, rate)
        group = np.sort(one.values)[: outliers.rest] if outliers is not None else one.values
        if outliers is not None and outliers.deviation > one.floor:  # else rounding hides the tails
            groups.append(group)
    return has_heavy_tails(groups)


def _judge_unmeasured(
    metrics: Sequence[Metric], found: Sequence[MetricVerdict], nodes: Sequence[str]
) -> list[MetricVerdict]:
    """Judge the nodes without any measurement."""
    # `preflight node` ends with this metric. A node that only another node's measurement of links names has none
    ended = {node for metric in metrics if metric.name == END_METRIC for node in (*metric.samples, *metric.failed)}
    measured = ended or {verdict.node for verdict in found}
    word: Verdict = "bad" if measured else "inconclusive"
    why = "left no samples: nothing was measured there"
    return [MetricVerdict(node, "", word, None, why) for node in nodes if node not in measured]


def _find_worst_verdicts(found: Sequence[MetricVerdict]) -> tuple[dict[str, Verdict], dict[str, tuple[str, ...]]]:
    """Find the word of every node, which is that of its worst metric, and the reasons for it."""
    words: dict[str, Verdict] = {}
    for verdict in found:
        known = words.get(verdict.node, "good")
        # The index in this tuple orders verdicts from worst to best
        words[verdict.node] = min(known, verdict.word, key=("bad", "inconclusive", "good").index)
    reasons: dict[str, dict[str, None]] = {node: {} for node in words}  # a dict keeps the order, and each reason once
    for verdict in found:
        if verdict.word == words[verdict.node] != "good":
            reasons[verdict.node][verdict.reason] = None
    return words, {node: tuple(each) for node, each in reasons.items()}


def merge_verdicts(first: FleetVerdict, second: FleetVerdict) -> FleetVerdict:
    """Join the verdicts of two looks. A node is bad if it is so in one metric in both: a disturbance accuses no node.

    A node that is bad in the first look only gets the word of the second, and the reasons of both. A node that is bad
    in different metrics is inconclusive.
    """
    twice = {node for node, _ in first.bad & second.bad}
    words = dict(first.words)
    reasons = dict(first.reasons)
    for node, word in first.words.items():
        again = second.words.get(node, word)
        # A node without samples in the second look stays bad: nothing has cleared it
        if word == "bad" and (node in twice or node not in second.words):
            reasons[node] = tuple(f"{reason} (second look)" for reason in second.reasons.get(node, reasons[node]))
        elif word == "bad":
            # Bad in another metric each time: a disturbance, or a node that fails in several ways
            words[node] = "inconclusive" if again == "bad" else again
            reasons[node] = (*(f"{reason} (first look only)" for reason in first.reasons[node]), *second.reasons[node])
    return replace(second, words=words, reasons=reasons, warnings=(*first.warnings, *second.warnings))


def _judge_by_bound(metric: Metric) -> Iterator[MetricVerdict]:
    """Judge nodes by the metric's own bound."""
    if metric.bound is None:
        return
    for node in sorted(metric.samples):
        beyond = is_beyond(metric, node, metric.bound)
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
