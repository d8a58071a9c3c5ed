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
from enum import StrEnum

from mlhpc.suite.statistics import student_t
from mlhpc.suite.statistics.comparison import holm

SLACK = 4.0
LEAST_SPREAD = 0.1  # of the logarithm: fewer digits of it are luck
WIDEST = 100.0  # largest over smallest error of a tensor that can be judged: more is a jump, not rounding
JUMP = 10.0  # times the largest such error: what is above is no jump
ERROR_RATE = 0.001  # chance that an honest step is called not rounding
FEWEST_RUNS = 20
UNITS = {"float32": 2.0**-23, "tf32": 2.0**-10, "bfloat16": 2.0**-7, "float16": 2.0**-10}


class Origin(StrEnum):
    """Where a difference from float64 comes from."""

    ROUNDING = "rounding"
    FAULT = "not rounding"
    INCONCLUSIVE = "inconclusive"


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
        if error == 0.0:
            return 1.0
        if not math.isfinite(error) or (self.jumps and error > JUMP * self.most):
            return 0.0
        apart = math.log(error / SLACK) - self.mean
        return student_t.compute_cdf(-apart / (self.spread * math.sqrt(1 + 1 / self.n)), self.n - 1)

    def compute_factor(self, error: float, error_rate: float) -> float:
        """Compute the error over the largest one that a test at this rate calls rounding."""
        if self.jumps:
            return error / (JUMP * self.most)
        t = student_t.compute_quantile(1 - error_rate, self.n - 1)
        most = math.exp(self.mean + t * self.spread * math.sqrt(1 + 1 / self.n)) * SLACK
        return error / most


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


@dataclass(frozen=True)
class Finding:
    """The origin of a step's difference. ``first`` is the first tensor that rounding does not explain.

    ``factor`` is its error over its bound, or the largest such factor of all tensors. ``undecided`` counts tensors
    whose perturbed runs jump, as at a tie of a router: an error above their median is not judged.
    """

    origin: Origin
    first: str
    factor: float
    tensors: int
    beyond: int
    undecided: int


def judge(errors: Mapping[str, float], bounds: Mapping[str, Bound], error_rate: float = ERROR_RATE) -> Finding:
    """Judge the errors of a step, in the order of its computation."""
    names = [name for name in errors if name in bounds]
    each = error_rate / max(1, len(names))
    steady = [name for name in names if not bounds[name].jumps or errors[name] > JUMP * bounds[name].most]
    rest = [name for name in names if name not in steady]
    jumping = [name for name in rest if errors[name] > math.exp(bounds[name].mean) * SLACK]
    chances = holm([bounds[name].compute_p(errors[name]) for name in steady])
    beyond = [name for name, p in zip(steady, chances, strict=True) if p < error_rate]
    factors = {name: bounds[name].compute_factor(errors[name], each) for name in steady}
    counts = len(names), len(beyond), len(jumping)
    if beyond:
        return Finding(Origin.FAULT, beyond[0], factors[beyond[0]], *counts)
    largest = max(factors, key=lambda name: factors[name], default="")
    factor = factors.get(largest, math.nan)
    if jumping or not steady:
        return Finding(Origin.INCONCLUSIVE, (jumping or [""])[0], factor, *counts)
    return Finding(Origin.ROUNDING, largest, factor, *counts)
