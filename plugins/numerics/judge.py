"""Judges whether a step differs from float64 by rounding alone. The bound comes from perturbed runs of a reference.

Each tensor's error is compared with those of runs whose inputs and weights differ by one unit in the last place. Their
logarithms are taken as normal, and Student's t gives the chance of an error as large; Holm's correction is for the
number of tensors. `SLACK` allows for what such runs do not sample: another order of the sums inside of an operator.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlhpc.plugins.numerics.results import Finding, Origin
from mlhpc.suite.statistics import compute_t_cdf, compute_t_quantile
from mlhpc.suite.statistics.comparison import holm

SLACK = 4.0
LEAST_SPREAD = 0.1  # of the logarithm: fewer digits of it are luck
WIDEST = 100.0  # largest over smallest error of a tensor that can be judged: more is a jump, not rounding
JUMP = 10.0  # times the largest such error: what is above is no jump
ERROR_RATE = 0.001  # chance that an honest step is called not rounding
FEWEST_RUNS = 20
UNITS = {"float32": 2.0**-23, "tf32": 2.0**-10, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass(frozen=True)
class Bound:
    """Errors of one tensor in ``n`` perturbed runs: mean and deviation of their logarithm, and the largest.

    If they ``jump``, as at a tie, they are not normal: an error is no rounding if it is far above the largest.
    """

    mean: float
    spread: float
    n: int
    most: float = 0.0
    jumps: bool = False

    def compute_p(self, error: float) -> float:
        """Compute the chance that rounding alone gives an error as large."""
        if self.jumps or error == 0.0:
            return float(error <= JUMP * self.most)
        if not math.isfinite(error):
            return 0.0
        return compute_t_cdf((self.mean - math.log(error / SLACK)) / self._scale, self.n - 1)

    def compute_factor(self, error: float, error_rate: float) -> float:
        """Compute the error over the largest one that a test at this rate calls rounding."""
        if self.jumps:
            return error / (JUMP * self.most)
        t = compute_t_quantile(1 - error_rate, self.n - 1)
        return error / math.exp(self.mean + t * self._scale) / SLACK

    @property
    def _scale(self) -> float:
        """The deviation of a new run from the mean of ``n``."""
        return self.spread * math.sqrt(1 + 1 / self.n)


def make_bounds(runs: Sequence[Mapping[str, float]], unit: float) -> dict[str, Bound]:
    """Make the bounds of all tensors from the errors of perturbed runs. No error counts as less than unit / 8."""
    assert len(runs) >= FEWEST_RUNS
    found = {}
    for name in runs[0]:
        errors = [max(run[name], unit / 8) for run in runs]
        if not all(map(math.isfinite, errors)):  # a gradient of 0 in float64 alone
            found[name] = Bound(0.0, LEAST_SPREAD, len(runs), math.inf, jumps=True)
            continue
        logs = [math.log(error) for error in errors]
        spread = max(statistics.stdev(logs), LEAST_SPREAD)
        most = max(errors)
        found[name] = Bound(statistics.fmean(logs), spread, len(runs), most, most > WIDEST * min(errors))
    return found


def judge(errors: Mapping[str, float], bounds: Mapping[str, Bound], error_rate: float = ERROR_RATE) -> Finding:
    """Judge the errors of a step, in the order of its computation."""
    names = [name for name in errors if name in bounds]
    chances = holm([bounds[name].compute_p(errors[name]) for name in names])
    beyond = [name for name, p in zip(names, chances, strict=True) if p < error_rate]
    jumping = [name for name in names if bounds[name].jumps]
    undecided = [name for name in jumping if errors[name] > math.exp(bounds[name].mean) * SLACK and name not in beyond]
    compared = beyond[:1] or [name for name in names if name not in jumping]
    factors = [bounds[name].compute_factor(errors[name], error_rate / len(names)) for name in compared]
    factor, first = max(zip(factors, compared, strict=True), default=(math.nan, ""))
    outcome: Origin = "not rounding" if beyond else "rounding"
    if not beyond and (undecided or not compared):
        outcome, first = "inconclusive", (undecided or [""])[0]
    return Finding(
        outcome=outcome,
        first=first,
        factor=factor if factor < math.inf else None,
        tensors=len(names),
        beyond=len(beyond),
        undecided=len(undecided),
    )
