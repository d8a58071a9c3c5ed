"""Says what data could have shown: the smallest effect found in 8 of 10 cases, by the test that decides.

Silence is not absence: "nothing found" without this number says nothing. Every door simulates its own decision on noise
like that of its data, and `find_smallest_effect` searches the effect that it finds in 8 of 10 cases. Two results need
no search (`find_detectable_ratio`).

The spread of a few runs is itself uncertain: five runs of equal laws differ in their spread by a factor of two. So the
spread is drawn too, as far as the runs leave it open, and "8 of 10" holds over all of that. The noise is drawn as
normal: of noise with long tails less is found than is said, and the words say "normal noise".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mlhpc.suite.statistics import CONFIDENCE, LARGEST_LOG, compute_t_quantile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[Any]

POWER = 0.8
MATTERS = 0.05  # a difference that matters, if the user states no tolerance
FEW = 5  # below so many values of a side, the other side adds little to the degrees of freedom
MAX_PROPOSED_RUNS = 1000
DRAWS = 4000
SEED = 20261128
_DOFS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 25.0, 50.0, 100.0, 1e4)


class RunsNeeded(NamedTuple):
    """How many runs of each side show a ``difference`` (0.05: 5 %) in 8 of 10 cases.

    ``low`` and ``high`` bound it in 8 of 10 cases: the spread of the present runs is not known exactly. None: above
    1,000.
    """

    difference: float
    runs: int | None
    low: int
    high: int | None

    def render(self, unit: str = "runs") -> str:
        """Render as text: ``about 24 runs each (14 to 60) would show 5 % in 8 of 10 cases of normal noise``."""
        what = f"{100 * self.difference:.3g} % in 8 of 10 cases of normal noise"
        if self.runs is None:
            return f"more than {MAX_PROPOSED_RUNS} {unit} each would be needed to show {what}"
        most = f"{self.high}" if self.high else f"more than {MAX_PROPOSED_RUNS}"
        return f"about {self.runs} {unit} each ({self.low} to {most}) would show {what}"


def find_smallest_effect(find_share: Callable[[float], float], most: float) -> float | None:
    """Find the smallest effect that ``find_share`` finds in 8 of 10 cases, to 2 % of itself. None: above ``most``.

    The share must grow with the effect. It must be simulated from a fixed seed, so that the answer does not vary.
    """
    low, high = 0.0, most
    if find_share(most) < POWER:
        return None
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if find_share(middle) >= POWER else (middle, high)
    return high


def choose_dof(part_a: Any, part_b: Any, n_a: int, n_b: int) -> Any:
    """Choose the degrees of freedom of a difference of means, from the variance of each mean.

    Welch's. With fewer than `FEW` values on a side they are at most those of two such sides: Welch's t is wrong more
    often than stated for a few runs beside many. A side of one value has none of its own.
    """
    least = min(n for n in (n_a, n_b) if n > 1) - 1
    if min(n_a, n_b) == 1:
        return least + 0.0 * part_a
    welch = (part_a + part_b) ** 2 / (part_a**2 / (n_a - 1) + part_b**2 / (n_b - 1))
    return welch if min(n_a, n_b) >= FEW else welch + (2.0 * least - welch) * (welch > 2.0 * least)


def find_detectable_ratio(spread: float, dof: float, counts: tuple[int, int], confidence: float = CONFIDENCE) -> float:
    """Find the smallest ratio that `compare_times` shows in 8 of 10 cases.

    ``spread`` is the standard deviation of log time, known from the data by ``dof`` degrees of freedom. ``counts`` are
    the numbers of A and B.
    """
    return math.exp(min(spread * _find_effect(counts, round(dof, 1), confidence), LARGEST_LOG))


def estimate_runs_needed(spread: float, dof: float, difference: float, confidence: float = CONFIDENCE) -> RunsNeeded:
    """Estimate how many runs of each side show a difference (0.05: 5 %), with its range."""
    import numpy as np

    effect = math.log1p(difference) / spread
    known = dof / np.quantile(_draw_chi_square(round(dof, 1)), (0.9, 0.1))
    runs = _find_count(effect, round(dof, 1), confidence)
    low, high = (_find_count(effect / math.sqrt(factor), math.inf, confidence) for factor in known)
    return RunsNeeded(difference, runs, low or MAX_PROPOSED_RUNS, high)


def _find_count(effect: float, dof: float, confidence: float) -> int | None:
    """Find how many runs of each side show an effect. None above `MAX_PROPOSED_RUNS`."""
    low, high = 2, 3
    while _find_effect((high, high), dof, confidence) > effect:
        if high >= MAX_PROPOSED_RUNS:
            return None
        low, high = high, min(2 * high, MAX_PROPOSED_RUNS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _find_effect((middle, middle), dof, confidence) <= effect else (middle, high)
    return high


@lru_cache(maxsize=4096)
def _find_effect(counts: tuple[int, int], dof: float, confidence: float) -> float:
    """Find the effect, in units of the known spread, that is found in 8 of 10 cases."""
    import numpy as np

    # Two degrees more than the data have: without them the rare spreads far above the seen one would set the answer
    spreads = np.sqrt((dof + 2.0) / _draw_chi_square(dof + 2.0)) if math.isfinite(dof) else 1.0
    return float(np.quantile(spreads * _draw_needed_effects(counts, confidence), POWER))


@lru_cache(maxsize=64)
def _draw_chi_square(dof: float) -> Floats:
    import numpy as np

    return np.random.default_rng(SEED).chisquare(dof, DRAWS)


@lru_cache(maxsize=512)
def _draw_needed_effects(counts: tuple[int, int], confidence: float) -> Floats:
    """Draw normal samples of spread 1. For each, find how much B must be shifted to be called different."""
    import numpy as np

    chance = np.random.default_rng((SEED, *counts))
    sums, parts = [], []
    for n in counts:
        sums.append(chance.standard_normal(DRAWS) / math.sqrt(n))
        parts.append(chance.chisquare(n - 1, DRAWS) / (n - 1) / n if n > 1 else None)
    known = next(part for part in parts if part is not None)
    part_a, part_b = (part if part is not None else known * max(counts) for part in parts)
    dof = choose_dof(part_a, part_b, *counts)
    quantiles = [compute_t_quantile(0.5 + confidence / 2, each) for each in _DOFS]
    half = np.interp(1.0 / dof, [1.0 / each for each in reversed(_DOFS)], quantiles[::-1]) * np.sqrt(part_a + part_b)
    needed: Floats = half - (sums[1] - sums[0])
    return needed
