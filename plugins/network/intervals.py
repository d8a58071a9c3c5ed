"""Predicts beyond the measured ranks: each number with its interval, or the verdict that the data are inconclusive.

No sweep shows a switch level that begins beyond its largest grid, and networks do not get faster with size. So a lower
end of a time holds wherever it is stated. An upper end is stated up to twice the measured ranks, for networks without a
new level there. Beyond, a time is "not less than" its lower end, and a ratio of two times is inconclusive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mlhpc.plugins.network.fit import CONFIDENCE, PRIOR_ERROR, Errors, Fit, Quantity
from mlhpc.plugins.network.law import Points
from mlhpc.plugins.network.sweep import MIB
from mlhpc.suite.performance.cost_model import ALGORITHMS, Algorithm
from mlhpc.suite.statistics import compute_t_quantile

SUPPORTED_DOUBLINGS = 2  # the data carry 4 times the measured ranks, whatever the back tests say
ALLOWED_ERROR = 0.2  # to go beyond, nine in ten predictions over as many doublings err by at most this
LARGEST_INTERVAL_FACTOR = 4.0  # an interval whose ends differ by more than this factor is inconclusive
CROSSOVER_FACTOR = 1.4  # a crossover is stated if its ends are within this factor of it
BOUNDED_GROWTH = 2  # upper ends are stated up to this many times the measured ranks
CROSSOVER_SIZES = 200
WITHIN_DOUBLINGS = 0.5  # on measured ranks the error of the fit is that of half a doubling

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Holds a predicted value and the ends of its interval (`held_out.CONFIDENCE`).

    ``high`` is infinite if only the lower end is known, ``low`` is 0 if neither is.
    """

    value: float
    low: float
    high: float

    @property
    def tells(self) -> bool:
        """Return True if the interval is narrow enough for the value to mean something."""
        return self.high <= LARGEST_INTERVAL_FACTOR * self.low

    def data(self) -> dict[str, float | None]:
        """Render the value and its ends for JSON, which has no infinity: an unknown end is None."""
        return {
            "value": self.value,
            "low": self.low or None,
            "high": self.high if math.isfinite(self.high) else None,
        }

    def words(self, unit: str = "", scale: float = 1.0) -> str:
        """Render the value with the digits that the interval allows, and the interval: "1.3 ms (1.1 to 1.5)"."""
        if not self.low:
            return "inconclusive"
        # Two digits if the interval is 10 % wide or more, one more for each factor of ten that it is narrower
        is_bounded = math.isfinite(self.high)
        width = self.high / self.low if is_bounded else self.value / self.low
        # The limit of 1e-4 keeps the logarithm finite where both ends are equal
        digits = max(2, 1 - math.floor(math.log10(max(width - 1, 1e-4))))
        places = digits - 1 - math.floor(math.log10(scale * self.value))
        if not is_bounded:
            # Rounded down: a lower end must not rise by rounding
            return f"not less than {_round_down(scale * self.low, places)}{unit}"
        value, low, high = (
            f"{round(scale * number, places):,.{max(0, places)}f}" for number in (self.value, self.low, self.high)
        )
        return f"{value}{unit} ({low} to {high})" if self.tells else f"inconclusive ({low} to {high}{unit})"


@dataclass(frozen=True)
class Band:
    """Holds intervals of one quantity over message sizes: seconds, or linear over 2DH. Ends are those of `Interval`."""

    value: Floats
    low: Floats
    high: Floats

    def at(self, index: int) -> Interval:
        """Return the interval of one of the sizes."""
        return Interval(float(self.value[index]), float(self.low[index]), float(self.high[index]))


@dataclass(frozen=True)
class Crossover:
    """Holds the largest bytes per rank at which 2DH is faster, searched between ``sizes`` (smallest, largest).

    Verdict "at": it lies between ``low`` and ``high``. "never": 2DH is faster at no size. "always": it is still faster
    at the largest size.
    """

    verdict: Literal["at", "never", "always", "inconclusive"]
    sizes: tuple[float, float]
    value: float
    low: float
    high: float

    def words(self) -> str:
        """Render the verdict and its bounds."""
        if self.verdict == "inconclusive" and not self.low and self.high >= self.sizes[1]:
            return "inconclusive up to which size 2DH wins"
        smallest, largest = (f"{size / MIB:.3g} MiB" for size in self.sizes)
        if self.verdict == "never":
            return f"2DH never wins ({smallest} to {largest} per rank)"
        if self.verdict == "always":
            return f"2DH wins up to {largest} per rank, the largest size that the data carry, or further"
        if self.verdict == "at":
            return f"2DH wins up to {Interval(self.value, self.low, self.high).words(' MiB', 1 / MIB)} per rank"
        surely = f"it wins up to {self.low / MIB:,.3g} MiB" if self.low else "it may win at no size"
        perhaps = f"may win up to {self.high / MIB:,.3g} MiB" if self.high < self.sizes[1] else "may win at every size"
        return f"inconclusive up to which size 2DH wins ({surely}, {perhaps} per rank)"


def count_supported_doublings(fit: Fit) -> int:
    """Count the doublings beyond the largest grid that the data carry; 0 if no back test was possible.

    These are `SUPPORTED_DOUBLINGS`, or more if back tests over more doublings erred by at most `ALLOWED_ERROR`.
    """
    # A quantity without a back test: nothing shows how its error grows
    if len(fit.errors) < len(PRIOR_ERROR):
        return 0
    errors = [fit.errors[name] for name in ALGORITHMS]
    carried = SUPPORTED_DOUBLINGS
    # 1e-9, because log2 of a ratio of ranks may lie just below a whole number
    farthest = int(min(own.doublings.max() for own in errors) + 1e-9)
    for doublings in range(carried + 1, farthest + 1):
        # Half a doubling less counts too: grids are seldom exact powers of two apart
        far = [np.abs(own.error[own.doublings >= doublings - 0.5]) for own in errors]
        if max(float(np.quantile(own, 0.9)) for own in far) > math.log1p(ALLOWED_ERROR):
            break
        carried = doublings
    return carried


def list_supported_ranks(fit: Fit) -> tuple[int, ...]:
    """List the measured ranks doubled once, twice ... as often as the data carry."""
    return tuple(fit.sweep.ranks * 2**i for i in range(1, count_supported_doublings(fit) + 1))


def list_bounded_ranks(fit: Fit) -> tuple[int, ...]:
    """List those of `list_supported_ranks` on which upper ends and ratios are stated."""
    return tuple(ranks for ranks in list_supported_ranks(fit) if ranks <= BOUNDED_GROWTH * fit.sweep.ranks)


def predict_all_to_all_band(fit: Fit, ranks: int, sizes: Floats, quantity: Algorithm | Literal["ratio"]) -> Band:
    """Predict seconds by one algorithm, or linear over 2DH, on ``ranks`` ranks for each size in bytes per rank.

    Without back tests the interval comes from the parameters' errors and the residuals. Only measured ranks are then
    asked for.
    """
    names: tuple[Algorithm, ...] = ("linear", "2dh") if quantity == "ratio" else (quantity,)
    columns = [_points(fit, ranks, sizes, name) for name in names]
    logs = [np.log(fit.law.seconds(at)) for at in columns]
    slopes = [fit.law.slopes(at) for at in columns]
    # The difference of logs is the log of the ratio, and its parameter errors partly cancel
    log, slope = (logs[0] - logs[1], slopes[0] - slopes[1]) if quantity == "ratio" else (logs[0], slopes[0])
    down, up = _distances(fit, quantity, ranks, sizes / ranks, fit.law.variance(slope))
    return Band(np.exp(log), np.exp(log - down), np.exp(log + up))


def compute_layer_interval(fit: Fit, ranks: int, seconds: float) -> Interval:
    """Compute the interval of predicted seconds of the layer from the errors of the layer on held-out grids.

    The parameters' part is that of a linear all-to-all of the layer's bytes. It is an upper bound: the layer also
    computes.
    """
    # All-to-all bytes of one rank in the layer's dispatch
    size = np.array([fit.layer_shape(ranks).dispatch_bytes])
    variance = fit.law.variance(fit.law.slopes(_points(fit, ranks, size, "linear")))
    down, up = (float(each[0]) for each in _distances(fit, "layer", ranks, size / ranks, variance))
    return Interval(seconds, seconds * math.exp(-down), seconds * math.exp(up))


def compute_gain_interval(fit: Fit, ranks: int, slow: float, fast: float) -> Interval:
    """Compute the interval of ``slow / fast``: predicted seconds of the layer executed in two ways.

    The errors of the two are taken as independent. Both are of one law on the same ranks, so this is an upper bound.
    """
    # A new switch level may slow one of the two ways more than the other
    if ranks > BOUNDED_GROWTH * fit.sweep.ranks:
        return Interval(slow / fast, 0.0, math.inf)
    halves = [
        math.log(own.high / own.low) / 2 for own in (compute_layer_interval(fit, ranks, each) for each in (slow, fast))
    ]
    # If both are the same execution, the gain is exactly 1
    factor = math.exp(math.hypot(*halves)) if slow != fast else 1.0
    return Interval(slow / fast, slow / fast / factor, slow / fast * factor)


def find_crossover(fit: Fit, ranks: int) -> Crossover:
    """Find the size up to which 2DH is faster, from the interval of the ratio.

    The search ends at the largest size whose messages were measured. On more ranks a message of as many bytes belongs
    to a larger all-to-all.
    """
    measured = [m.size_bytes for m in fit.sweep.measurements]
    sizes = np.geomspace(min(measured), max(measured) * max(1.0, ranks / fit.sweep.ranks), CROSSOVER_SIZES)
    band = predict_all_to_all_band(fit, ranks, sizes, "ratio")
    ends = (float(sizes[0]), float(sizes[-1]))
    nan = float("nan")
    if (band.high < 1).all():
        return Crossover("never", ends, nan, nan, nan)
    if band.low[-1] > 1:
        return Crossover("always", ends, nan, nan, nan)
    # 2DH wins where linear / 2DH is above 1: surely by the lower end, perhaps by the upper one
    surely, expected, perhaps = (sizes[curve > 1] for curve in (band.low, band.value, band.high))
    low, value, high = (float(own.max()) if len(own) else 0.0 for own in (surely, expected, perhaps))
    # If 2DH may still win at the largest size, the upper end is not known
    is_narrow = band.high[-1] < 1 and value > 0 and high <= CROSSOVER_FACTOR * value and value <= CROSSOVER_FACTOR * low
    return Crossover("at" if is_narrow else "inconclusive", ends, value, low, high)


def _points(fit: Fit, ranks: int, sizes: Floats, algorithm: Algorithm) -> Points:
    per_node = min(fit.sweep.ranks_per_node, ranks)
    return Points.of([(ranks, per_node, float(size), algorithm) for size in sizes])


def _distances(fit: Fit, quantity: Quantity, ranks: int, message: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Compute the distances of the lower and the upper end from the prediction, in log seconds."""
    if quantity not in fit.errors:
        free = max(1, fit.law.count - len(fit.law.values_P))
        # A ratio has the residuals of two times
        residuals = fit.law.squares / free * (2 if quantity == "ratio" else 1)
        half = np.asarray(compute_t_quantile(0.5 + CONFIDENCE / 2, free) * np.sqrt(variance + residuals))
        return half, half
    return compute_distances(fit.errors[quantity], quantity, fit.sweep.ranks, ranks, message, variance)


def compute_distances(
    errors: Errors, quantity: Quantity, measured: int, ranks: int, message: Floats, variance: Floats
) -> tuple[Floats, Floats]:
    """Compute the distances from a prediction for ``ranks`` ranks, of which at most ``measured`` were measured.

    If the newest back test erred in one direction, the end on that side moves away by this error per doubling. If the
    largest grid was slower than foreseen, that may have been a bad day: the lower end moves by this error once. Beyond
    `BOUNDED_GROWTH` the upper end is infinite, and so is the lower one of a ratio.
    """
    beyond = math.log2(ranks / measured)
    # On measured ranks the doublings are 0, and the error of the fit would vanish
    half = errors.half_width(quantity, max(beyond, WITHIN_DOUBLINGS), message, variance)
    trend = errors.trend(message)
    fall, rise = np.maximum(-trend, 0.0), np.maximum(trend, 0.0)
    down = half + max(beyond, 0.0) * fall + min(max(beyond, 0.0), 1.0) * rise
    up = half + max(beyond, 0.0) * rise
    if ranks <= BOUNDED_GROWTH * measured:
        return down, up
    # Networks do not get faster with size, so the lower end of a time stays; a ratio loses both ends
    unknown = np.full_like(half, np.inf)
    return (unknown if quantity == "ratio" else down), unknown


def _round_down(number: float, places: int) -> str:
    return f"{math.floor(number * 10.0**places) / 10.0**places:,.{max(0, places)}f}"
