"""Computes from reference convergence points how fast a submission may converge, in closed form. Reads no files.

mlperf_logging 4.1.68 rcp_checker finds the same limit by bisection of a one-sided t test. Solved for the mean it is
``minimum = mean - t(p, n_ref + n_sub - 2) * std * sqrt(1/n_ref + 1/n_sub)``. Here p is 0.95. ``mean`` leaves out the
best and the worst reference run. ``std`` is the population standard deviation of all of them. n_ref and n_sub are two
less than the runs.

rcp_checker prunes the reference points in one pass and may miss the lower convex hull (mlcommons/logging#368).
Published rounds are judged by that pass, as they were; our own results by the hull.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlhpc.suite.statistics import compute_t_quantile

_NEAR = 1.1  # times what endless reference runs would leave unseen


@dataclass(frozen=True)
class RcpLimit:
    """The reference at a batch size.

    ``kind`` is exact, interpolated, or smallest if the batch is below all points. ``mean``, ``std`` and ``minimum`` are
    epochs to the target. A submission with a mean below ``minimum`` is too fast. ``runs`` counts the runs of the point.
    """

    global_batch_size: int
    mean: float
    std: float
    minimum: float
    kind: str
    runs: int = 0

    @property
    def unseen(self) -> float:
        """The epochs that may be cut from the mean of a submission without a finding."""
        return self.mean - self.minimum


@dataclass(frozen=True)
class _Point:
    batch: int
    mean: float
    std: float
    runs: int


def compute_trimmed_mean(epochs: Sequence[float]) -> float:
    """Compute the mean without the smallest and the largest value."""
    return statistics.fmean(sorted(epochs)[1:-1])


def compute_minimum_mean(
    mean: float, std: float, n_reference: int, n_submission: int, confidence: float = 0.95
) -> float:
    """Compute the smallest mean of a submission that is not significantly below the reference's."""
    # All reference runs are equal: the t test would divide by zero.
    if std == 0.0:
        return mean
    t = compute_t_quantile(confidence, n_reference + n_submission - 2)
    return max(0.0, mean - t * std * math.sqrt(1.0 / n_reference + 1.0 / n_submission))


def compute_limit(
    points: Mapping[int, Sequence[float]],
    batch: int,
    required_runs: int,
    confidence: float = 0.95,
    *,
    hull: bool = True,
    between_evals: float = 0.0,
) -> RcpLimit | None:
    """Compute the limit at a batch size. None if the batch is above all points.

    ``points`` maps batch size to epochs to target. Without ``hull`` they are pruned in one pass. ``between_evals`` is
    the distance of two evaluations in the unit of the points. A run notices the target only at an evaluation. So the
    deviation is at least that of this rounding, even if all reference runs are equal.
    """
    rounding = between_evals / math.sqrt(12.0)  # the standard deviation of a uniform distribution of this width
    known = compute_lower_hull(points) if hull else drop_concave_points(points)
    n_submission = required_runs - 2
    if not known or batch > known[-1].batch:
        return None
    exact = next((point for point in known if point.batch == batch), None)
    if exact is None and batch < known[0].batch:
        # Below all points rcp_checker takes the smallest point, too.
        exact = known[0]
    if exact is not None:
        std = max(exact.std, rounding)
        minimum = compute_minimum_mean(exact.mean, std, exact.runs - 2, n_submission, confidence)
        kind = "exact" if exact.batch == batch else "smallest"
        return RcpLimit(exact.batch, exact.mean, std, minimum, kind, exact.runs)
    below = [point for point in known if point.batch < batch][-1]  # `known` ascends in batch size
    above = next(point for point in known if point.batch > batch)
    share = (batch - below.batch) / (above.batch - below.batch)
    mean = below.mean + share * (above.mean - below.mean)
    std = max(below.std + share * (above.std - below.std), rounding)
    # rcp_checker's rule for interpolated points: as if the reference had twice the required runs.
    minimum = compute_minimum_mean(mean, std, 2 * required_runs, n_submission, confidence)
    return RcpLimit(batch, mean, std, minimum, "interpolated", min(below.runs, above.runs))


def count_useful_runs(required_runs: int, confidence: float) -> int:
    """Count the reference runs after which more hardly help: they leave ``_NEAR`` times what endless runs leave unseen.

    The spread of the submission's own runs stays, however many the reference has.
    """
    n_submission = required_runs - 2
    least = statistics.NormalDist().inv_cdf(confidence) / math.sqrt(n_submission)
    runs = 4  # fewer leave no spread once the best and the worst are dropped
    while 1.0 - compute_minimum_mean(1.0, 1e-3, runs - 2, n_submission, confidence) > _NEAR * least * 1e-3:
        runs += 1
    return runs


def compute_lower_hull(points: Mapping[int, Sequence[float]]) -> list[_Point]:
    """Return the lower convex hull of mean over batch size, from the fastest mean upwards."""
    known = _compute_means(points)
    if not known:
        return []
    fastest = min(known, key=lambda point: (point.mean, -point.batch))
    hull: list[_Point] = []
    for point in known[known.index(fastest) :]:
        while len(hull) > 1 and not _is_below_line(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def drop_concave_points(points: Mapping[int, Sequence[float]]) -> list[_Point]:
    """Return the points from the fastest mean upwards. One pass drops points above the line of their neighbours."""
    kept = _compute_means(points)
    if kept:
        kept = kept[kept.index(min(kept, key=lambda point: point.mean)) :]
    index = 1
    while index < len(kept) - 1:
        if _is_below_line(kept[index - 1], kept[index], kept[index + 1]):
            index += 1
        else:
            del kept[index]
    return kept


def _compute_means(points: Mapping[int, Sequence[float]]) -> list[_Point]:
    return [
        _Point(batch, compute_trimmed_mean(epochs), statistics.pstdev(epochs), len(epochs))
        for batch, epochs in sorted(points.items())
        if len(epochs) > 3  # fewer leave no spread once the best and the worst are dropped
    ]


def _is_below_line(left: _Point, middle: _Point, right: _Point) -> bool:
    """Return True if ``middle`` lies on or below the line through its neighbours."""
    share = (middle.batch - left.batch) / (right.batch - left.batch)
    return middle.mean <= left.mean + share * (right.mean - left.mean)
