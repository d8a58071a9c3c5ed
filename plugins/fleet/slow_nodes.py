"""Judges every node of a fleet as good, bad or inconclusive over all metrics, at a given false-alarm rate.

Nodes of one hardware are compared with each other, and with earlier values of the same hardware, metric by metric.
A bad node is surely slower than ``effect``. ``rate`` is per healthy node and over all metrics. Each metric gets an
equal part of it. The rate holds if repetitions are independent and late no more often than was seen, and if nodes
differ normally. Few nodes do not show whether they do. For them, and for heavier tails, it holds up to the tails of
Student's t with 3 degrees of freedom.

In one metric, nodes are judged by each other, by earlier measurements, and by absolute bounds. A node's value is the
median logarithm of its repetitions, with the sign that makes more worse. A node is bad if both of two tests say so.

- Its value lies further from the rest of the nodes than nodes differ (`mlhpc.plugins.fleet.outliers`).
- Its repetitions are later than repetitions drawn at random from those seen. They are drawn from all nodes in this
  metric, and from all metrics in units of each metric's spread.

Both count what exceeds the effect, so that a bad node is surely slower than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from mlhpc.plugins.fleet.outliers import (
    MIN_FOR_SPREAD,
    MIN_REST,
    MIN_SAMPLE_FOR_TAILS,
    PARETO_EXPONENT,
    DelayDistribution,
    HealthyTails,
    Outliers,
    compute_late_median_chance,
    compute_pareto_factor,
    compute_prediction_std,
    find_outliers,
    has_heavy_tails,
)
from mlhpc.plugins.fleet.samples import Metric, compute_node_value
from mlhpc.suite.machine.facts import END_METRIC

GOOD_CONFIDENCE = 0.95  # confidence that a good node is not slower than the effect
DETECTION_POWER = 0.9  # share of slow nodes that are found, for which the smallest slowdown is stated
FEW_REPETITIONS = 3  # from this many on, repetitions show how late they are
# A mixed fleet and a broken third look the same from inside, so such nodes are inconclusive
MOST_BAD = 3  # if more than one of so many nodes is slow, they may be nodes of another kind
CEILING_FRACTION = 2.0 / 3.0  # of a ceiling: a rate below this is a finding
LARGEST_LOG = 700.0  # of logarithms: exp is still finite
SPREAD_STD_ERRORS = 4.0  # standard errors of the spread of N repetitions, each about 1 / sqrt(N) of it
LEAST_SPREAD = 1e-3  # of repetitions, in logarithms: smaller ones do not matter beside the effect
MOST_DECIMALS = -12  # digits: values with more are not rounded
LEAST_FACTOR = 10.0  # times: larger differences are printed as factors
Verdict = Literal["good", "bad", "inconclusive", "wrong"]
WORST_FIRST = ("wrong", "bad", "inconclusive", "good")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MetricVerdict:
    """Holds the verdict on one node in one metric.

    ``slower`` is the part of the others' speed that the node lacks: 0.1 is 10 % slower, negative is faster.
    """

    node: str
    metric: str
    word: Verdict
    slower: float | None
    reason: str


@dataclass(frozen=True)
class MetricReport:
    """Holds the verdicts on the nodes of one hardware in one metric.

    ``repeats`` is the coefficient of variation between nodes; None: there were too few to compare. ``found`` is the
    slowdown that is found with a probability of `DETECTION_POWER`; None: none is. ``chance`` is the probability of a
    healthy node to be called bad, for the tails seen. ``heavy``: node values may have heavy tails. ``clusters`` has the
    numbers of slow outliers, of nodes in the middle and of fast outliers. ``has_level``: the level of all nodes was
    compared with something. ``warning`` is one line or "".
    """

    metric: Metric
    verdicts: tuple[MetricVerdict, ...]
    repeats: float | None = None
    found: float | None = None
    chance: float = 0.0
    heavy: bool = True
    clusters: tuple[int, int, int] = (0, 0, 0)
    has_level: bool = False
    warning: str = ""


@dataclass(frozen=True)
class Reference:
    """Holds the values that nodes are compared with: those of the other nodes, or earlier ones. All are logarithms.

    A healthy node lies further than ``margin`` + ``limit`` above the mean with a probability of ``chance``, for the
    tails seen. ``limit_of_mean`` is the limit for the mean over the nodes. ``room`` is the upper end of a node's error.
    """

    name: str
    mean: float
    limit: float
    room: float
    chance: float
    limit_of_mean: float = math.inf


@dataclass(frozen=True)
class Criteria:
    """Holds the criteria of a verdict on one metric.

    ``rate`` is how often a healthy node may be called bad. ``margin`` is the logarithm of the slowdown that a good node
    must not have. ``heavy``: values of healthy nodes may have heavy tails. ``bound`` is the worst value allowed.
    ``ceiling`` is the rate that the hardware has reached. ``sessions`` has earlier node values, by measurement.
    ``lateness`` is that of the repetitions in all metrics, in units of their spread.
    """

    rate: float
    margin: float
    heavy: bool = True
    bound: float | None = None
    ceiling: float | None = None
    sessions: Sequence[Sequence[float]] = ()
    lateness: DelayDistribution | None = None


class NodeValues:
    """Holds the repetitions of all nodes in logarithms that grow with slowness, and the value of each node."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.nodes = sorted(metric.samples)
        # From here on larger is slower, whichever way the metric counts
        sign = -1.0 if metric.better == "more" else 1.0
        places: dict[int, list[int]] = {}
        for place, node in enumerate(self.nodes):
            places.setdefault(len(metric.samples[node]), []).append(place)
        # Nodes with equally many repetitions, (nodes, repetitions) each, the fastest repetition first
        self._groups = [
            (
                np.array(members),
                np.sort(sign * np.log([metric.samples[self.nodes[place]] for place in members]), axis=1),
            )
            for members in places.values()
        ]
        self.fewest = min(places)
        self.values = np.empty(len(self.nodes))
        for members, ordered in self._groups:
            count = ordered.shape[1]
            self.values[members] = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2.0

    @cached_property
    def late(self) -> Floats:
        """Compute how much later all repetitions are than the median of their node.

        Of an even number of repetitions the lower median counts.
        """
        return np.concatenate(
            [(ordered - ordered[:, (ordered.shape[1] - 1) // 2, None]).ravel() for _, ordered in self._groups]
        )

    @cached_property
    def late_unit(self) -> float:
        """Compute the spread of repetitions on one node: three of four lie no further from the median."""
        return max(self.floor, LEAST_SPREAD, float(np.quantile(np.abs(self.late), 0.75)))

    @cached_property
    def floor(self) -> float:
        """Compute the smallest difference that rounding leaves visible, in logarithms.

        It is the last digit of the values, at most the smallest difference between two of them.
        """
        values = sorted({value for values in self.metric.samples.values() for value in values})
        if len(values) < 2:
            return 0.0
        digit = 0 if len(values) == 2 else 308  # that two values are round says little
        for value in values:
            # repr is the shortest text of the float, so its last digit is the one that was written
            digit = min(digit, int(Decimal(repr(float(value))).normalize().as_tuple().exponent))
            # A value with that many digits was not rounded: the others need not be read
            if digit < MOST_DECIMALS:
                break
        return float(min(10.0**digit / values[len(values) // 2], np.diff(np.log(values)).min()))

    def still_needed(self, slowest: float, criteria: Criteria) -> Floats:
        """Compute how much later each node's repetitions must be to be no accident; below 0 they are late enough.

        ``slowest`` is the value that a healthy node may have. A node with a single repetition needs nothing, because
        one repetition shows nothing.
        """
        # Minus infinity: not needed
        needed = np.full(len(self.nodes), -math.inf)
        own = DelayDistribution(self.late, extrapolated=True)
        for members, ordered in self._groups:
            repetitions = ordered.shape[1]
            if repetitions == 1:
                continue
            limits = own.limits(repetitions, criteria.rate)
            if criteria.lateness is not None:
                # The unit is estimated too. Its upper end is taken, so that a unit that is too small accuses no node
                largest = self.late_unit * (1.0 + SPREAD_STD_ERRORS / math.sqrt(len(self.late) - len(self.nodes)))
                # Both distributions must call it late: the metric's own repetitions and those of all metrics
                limits = np.maximum(limits, largest * criteria.lateness.limits(repetitions, criteria.rate))
            needed[members] = (slowest + limits - ordered[:, : len(limits)]).min(axis=1)
        return needed

    def chance_of_late(self, distance: float, criteria: Criteria) -> float:
        """Compute how often the repetitions of a healthy node are so late that its value lies ``distance`` above the
        others.
        """
        if self.fewest == 1:
            return 0.0
        late = DelayDistribution(self.late, extrapolated=True).probability(distance)
        if criteria.lateness is not None:
            late = max(late, criteria.lateness.probability(distance / self.late_unit))
        return compute_late_median_chance(late, self.fewest)


def compute_slowdown(distance: float) -> float:
    """Compute the part of the speed that is missing from the difference of logarithms."""
    # 1 - exp(-d) without loss of digits near 0; the limit keeps exp finite for a node that is far too fast
    return -math.expm1(-max(distance, -LARGEST_LOG))


def judge_metric(values: NodeValues, criteria: Criteria) -> MetricReport:
    """Judge all nodes of one metric, by the other nodes and by earlier values."""
    count, margin = len(values.nodes), criteria.margin
    if criteria.sessions:  # three tests: a node with the others, a node with the history, all nodes with it
        criteria = replace(criteria, rate=criteria.rate / 3)
    rate = criteria.rate
    # With the divided rate: each of the three tests may alarm with a third of it
    past = _compare_with_history(values, criteria)
    tails = _tails(values, criteria)
    outliers = find_outliers(values.values, rate, margin=margin, tails=tails)
    if outliers is None and past is None:
        return _judge_alone(values, criteria)
    slow: dict[int, Reference] = {}
    kinds: set[int] = set()
    if past is not None:
        slow = dict.fromkeys(_find_slower(past, values, criteria), past)
    if outliers is None:
        assert past is not None
        verdicts = _judge_nodes(values, criteria, past, slow, kinds)
        return MetricReport(values.metric, verdicts, chance=past.chance, clusters=(0, count, 0), has_level=True)
    # The rest has no outliers: a mean with the slow nodes in it would hide them
    rest = _compare_with_others(outliers, tails, rate, margin)
    order = np.argsort(values.values)[::-1].tolist()
    named = outliers.count
    if named > count // MOST_BAD:  # only nodes that are slower than the others of this group are bad
        group = find_outliers(values.values[order[:named]], rate, margin=margin, tails=tails)
        named = group.count if group is not None else 0
    needed = values.still_needed(rest.mean + margin, criteria)
    chance = rest.chance + values.chance_of_late(margin + rest.limit, criteria)
    # Both tests of the module's first lines: far from the others, and late in their repetitions
    slow |= {place: rest for place in order[:named] if needed[place] < 0.0}
    kinds = set(order[named : outliers.count])
    # Fast outliers are no fault, but a sign that the others may all be slow
    faster = find_outliers(-values.values, rate, tails=tails)
    fast = faster.count if faster is not None else 0
    warning = (
        f"{fast} of {count} nodes are faster than the others, not slower: if these are the healthy ones, "
        "most are degraded; give absolute bounds"
    )
    found = _compute_detectable_slowdown(values, criteria, tails, rest, order[outliers.count :], needed)
    return MetricReport(
        values.metric,
        _judge_nodes(values, criteria, rest, slow, kinds),
        # The standard deviation of logarithms as a coefficient of variation
        math.expm1(min(outliers.deviation, LARGEST_LOG)),
        found,
        # The tests promise `rate`; for the tails seen the chance may be smaller
        min(rate, chance) + (past.chance if past is not None else 0.0),
        tails.heavy,
        (outliers.count, count - outliers.count - fast, fast),
        past is not None or criteria.bound is not None or criteria.ceiling is not None,
        warning if fast else "",
    )


def _tails(values: NodeValues, criteria: Criteria) -> HealthyTails:
    """Choose what is assumed of the values of healthy nodes."""
    if (
        len(values.nodes) < MIN_FOR_SPREAD
    ):  # they do not show their spread: assume that they differ by half of the effect
        return HealthyTails(heavy=True, floor=values.floor, least=criteria.margin / 2)
    # So few values do not show how heavy their tails are, so heavy ones are assumed
    unknown = len(values.nodes) < MIN_SAMPLE_FOR_TAILS or values.fewest < FEW_REPETITIONS
    return HealthyTails(heavy=criteria.heavy or unknown, floor=values.floor)


def _compare_with_others(outliers: Outliers, tails: HealthyTails, rate: float, margin: float) -> Reference:
    """Compare nodes with the rest of the nodes."""
    spread = compute_prediction_std(outliers.deviation, outliers.rest)
    distance = margin + outliers.limit
    if tails.heavy:
        furthest = outliers.limit / compute_pareto_factor(outliers.count + outliers.rest, rate)
        # One more value lies beyond the furthest of n with probability 1 / (n + 1); a Pareto tail extends that to
        # `distance`
        chance = (furthest / distance) ** PARETO_EXPONENT / (outliers.rest + 1)
    else:
        chance = float(special.stdtr(outliers.rest - 1, -distance / spread)) if spread else 0.0
    # One side only: a good node may be faster than the others
    room = float(special.stdtrit(outliers.rest - 1, GOOD_CONFIDENCE)) * spread
    return Reference("the rest", outliers.mean, outliers.limit, room, chance)


def _compare_with_history(values: NodeValues, criteria: Criteria) -> Reference | None:
    """Compare nodes with earlier values, by measurement; None if these are too few.

    The spread is that between measurements and that within. Few measurements do not show the first: it is assumed that
    healthy ones differ by less than half of the effect.
    """
    better, rate, margin = values.metric.better, criteria.rate, criteria.margin
    # History has plain values; here they get the sign that makes more worse
    past = [np.array([compute_node_value([value], better) for value in session]) for session in criteria.sessions]
    count = sum(map(len, past))
    if count < MIN_REST:
        return None
    means = np.array([session.mean() for session in past])
    freedom, allowed = count - len(means), 0.0
    within = sum(float(((session - session.mean()) ** 2).sum()) for session in past) / freedom if freedom else 0.0
    if len(means) >= MIN_FOR_SPREAD:
        freedom = len(means) - 1
        between = max(values.floor**2, float(means.var(ddof=1))) * (1.0 + 1.0 / len(means))
    else:
        allowed = margin / 2
        if not freedom:  # one value of each measurement: their spread is that of nodes, too
            freedom, within = count - 1, float(means.var(ddof=1))
        within = max(values.floor**2, within)
        # The error of the mean of all values, as if measurements did not differ. How they may differ is in `allowed`
        between = within / count
    spread = math.sqrt(between + within)
    factor = float(-special.stdtrit(freedom, rate))
    return Reference(
        f"{count} earlier values",
        float(means.mean()),
        allowed + factor * spread,
        float(special.stdtrit(freedom, GOOD_CONFIDENCE)) * spread,
        float(special.stdtr(freedom, -(margin / spread + factor))) if spread else 0.0,
        allowed + factor * math.sqrt(between + within / len(values.nodes)),
    )


def _find_slower(past: Reference, values: NodeValues, criteria: Criteria) -> list[int]:
    """Find the nodes that are surely slower than the history, each by itself or as all nodes are."""
    slowest = past.mean + criteria.margin
    away = values.values - slowest
    # If the median shows that all nodes are slower, a node needs only to lie beyond the margin
    all_are = float(np.median(away)) > past.limit_of_mean
    late = values.still_needed(slowest, criteria) < 0.0
    return np.flatnonzero(late & (away > (0.0 if all_are else past.limit))).tolist()


def _compute_detectable_slowdown(
    values: NodeValues, criteria: Criteria, tails: HealthyTails, rest: Reference, healthy: Sequence[int], late: Floats
) -> float | None:
    """Compute the slowdown that is found with probability `DETECTION_POWER` among this number of healthy nodes."""
    needed = []
    for place in healthy:
        mean, limit = rest.mean, rest.limit
        if tails.heavy:  # a single node may decide how far the furthest lies
            slowed = values.values.copy()
            # As if this node were slower than any other: how far must it lie in a sample without it?
            slowed[place] = LARGEST_LOG
            others = find_outliers(slowed, criteria.rate, tails=tails, most=1)
            assert others is not None
            mean, limit = others.mean, others.limit
        needed.append(max(mean + limit + criteria.margin - values.values[place], late[place]))
    # The quantile over the healthy nodes, each of which may become the slow one
    found = float(sorted(needed)[math.ceil(DETECTION_POWER * (len(needed) - 1))])
    return compute_slowdown(found) if found < LARGEST_LOG else None


def _judge_alone(values: NodeValues, criteria: Criteria) -> MetricReport:
    """Judge nodes that are too few to be compared: only by bounds."""
    count, past = len(values.nodes), sum(map(len, criteria.sessions))
    why = f"{count} node{'s' if count > 1 else ''} and {past} earlier values are too few to compare"
    verdicts = []
    for node in values.nodes:
        bound = _explain_bound(values, node, criteria)
        word: Verdict = "bad" if bound else "inconclusive"
        verdicts.append(MetricVerdict(node, values.metric.name, word, None, bound or why))
    return MetricReport(values.metric, tuple(verdicts), clusters=(0, count, 0))


def _judge_nodes(
    values: NodeValues, criteria: Criteria, main: Reference, slow: Mapping[int, Reference], kinds: set[int]
) -> tuple[MetricVerdict, ...]:
    """Judge every node.

    ``slow`` has the places of bad nodes, and what they are slower than. ``kinds`` has places in doubt.
    """
    name, verdicts = values.metric.name, []
    for place, node in enumerate(values.nodes):
        reference = slow.get(place, main)
        distance = float(values.values[place]) - reference.mean
        reason = f"{name}: {_difference(compute_slowdown(distance))} than {reference.name}"
        word: Verdict = "good"
        if bound := _explain_bound(values, node, criteria):
            word, reason = "bad", bound
        elif place in slow:
            word = "bad"
        elif place in kinds:
            word = "inconclusive"
            reason += f", as {len(kinds)} of {len(values.nodes)} nodes are: nodes of another kind, or slow ones"
        # Good needs the whole 95 % interval below the margin
        elif distance + main.room > criteria.margin:
            word = "inconclusive"
            reason += f", too noisy to say whether by {-math.expm1(-criteria.margin):.2g} or more"
        verdicts.append(MetricVerdict(node, name, word, compute_slowdown(distance), reason))
    return tuple(verdicts)


def _explain_bound(values: NodeValues, node: str, criteria: Criteria) -> str:
    """Say that a node is beyond the bound or far below the ceiling; "" if it is not."""
    metric = values.metric
    # A bound was stated by a person and comes first; it needs no other nodes
    if criteria.bound is not None and is_beyond(metric, node, criteria.bound):
        return f"{metric.name}: beyond the bound of {criteria.bound:g} {metric.unit}".rstrip()
    if criteria.ceiling is not None and is_beyond(metric, node, CEILING_FRACTION * criteria.ceiling):
        value = float(np.median(metric.samples[node]))
        return f"{metric.name}: {value:.3g} {metric.unit}, below two thirds of the ceiling of {criteria.ceiling:.3g}"
    return ""


def is_beyond(metric: Metric, node: str, bound: float) -> bool:
    """Say whether a node's median is worse than a bound."""
    middle = float(np.median(metric.samples[node]))
    return middle < bound if metric.better == "more" else middle > bound


def _difference(slower: float) -> str:
    if slower > 1.0 - 1.0 / LEAST_FACTOR:
        return f"{1.0 / max(1.0 - slower, math.exp(-LARGEST_LOG)):.3g} times slower"
    if slower < -LEAST_FACTOR:
        return f"{1.0 - slower:.3g} times faster"
    return f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"


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
        words[verdict.node] = min(known, verdict.word, key=WORST_FIRST.index)
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
        if "wrong" in (word, again):  # whatever the other look says: a fault need not show every time
            words[node] = "wrong"
            reasons[node] = (*reasons[node], *second.reasons.get(node, ()))
            continue
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
    """Judge nodes on which the metric failed: wrong if a check says so, bad if it worked on others."""
    for node, why in sorted(metric.failed.items()):
        severity = metric.severity.get(node)
        if severity:
            word: Verdict = "inconclusive" if severity == "watch" else "wrong"
            yield MetricVerdict(node, metric.name, word, None, f"{severity}: {metric.name}: {why}")
        elif metric.samples:
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
