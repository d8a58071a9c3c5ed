"""Fits scaling models to times. Numbers in, numbers out.

Extrapolations are unreliable: all models look perfect on the data they were fitted to. So each has a bootstrap band
over runs, and all are shown. docs/report.md has the errors at scales that were left out. No model knows a
limit that begins beyond the largest size, such as a full switch or a largest batch. So a lower end of a time holds
wherever it is stated. An upper end holds only if the laws go on. It is stated up to twice the largest size.

A largest size that does not follow the smaller ones was a bad day or has met a limit. Then nothing is extrapolated
(`find_break`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from mlhpc.suite.errors import InputError

LEAST_SCALES = 5  # as Extra-P asks (Calotoiu et al., SC 2013)
SOLID_REACH, DASHED_REACH = 2.0, 4.0  # a model is drawn up to these multiples of the largest measured scale
# A largest size this much slower than the smaller ones foresee ends the extrapolation: in units of the spread, at least
BREAK_SPREADS, LEAST_BREAK = 3.0, 0.06
SLOPE_SCALES = 3  # the scales that a further speed-up is judged by
# Bootstrap samples behind a band: 10 of them lie beyond each of its ends
REPLICATES = 200
INTERVAL_QUANTILES = (0.05, 0.95)
# The terms that Extra-P tries (Calotoiu et al., SC 2013)
EXPONENTS = (0.0, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 1.0, 1.25, 1.5)
LOG_POWERS = (0, 1, 2)

Floats = npt.NDArray[np.float64]


class NotEnoughPointsError(InputError):
    """There are too few scales for any model. The message has the number of scales and the number needed."""


@dataclass(frozen=True)
class Term:
    """Holds the exponents of n^exponent · log2(n)^log_power, a term of units x time (PMNF's normal form)."""

    exponent: float
    log_power: int

    def __str__(self) -> str:
        power = f"n^{self.exponent:.3g}" if self.exponent not in (0.0, 1.0) else "n" if self.exponent else ""
        log = "log2(n)" + (f"^{self.log_power}" if self.log_power > 1 else "") if self.log_power else ""
        return "·".join(part for part in (power, log) if part)


@dataclass(frozen=True)
class Model:
    """Holds a fitted model of time over units. ``coefficients`` are >= 0, one per term of ``form``.

    ``loo_error`` is the mean symmetric error of predicting each scale from all others. ``band`` gives the 5th and 95th
    percentile over bootstrap replicates of the runs. ``earlier`` are the coefficients without the largest scale,
    ``largest``. ``last_miss`` is the log of its time over what they predict, ``last_error`` the symmetric error.
    """

    name: str
    form: str
    coefficients: tuple[float, ...]
    loo_error: float
    last_error: float
    last_miss: float
    largest: float
    earlier: Floats
    replicates: Floats
    basis: Callable[[Floats], Floats]

    def time_s(self, units: Sequence[float] | Floats) -> Floats:
        """Return the predicted time at these numbers of units."""
        return np.asarray(self.basis(np.asarray(units, float)) @ np.asarray(self.coefficients))

    def band(self, units: Sequence[float] | Floats) -> tuple[Floats, Floats]:
        """Return the lower and the upper end of the bootstrap band."""
        predicted = self.basis(np.asarray(units, float)) @ self.replicates.T
        low, high = np.quantile(predicted, INTERVAL_QUANTILES, axis=1)
        return low, high


def fit(runs: Mapping[float, Sequence[float]], least_scales: int = LEAST_SCALES) -> list[Model]:
    """Fit Amdahl, USL and PMNF to times of runs by units. Raises NotEnoughPointsError below ``least_scales`` scales."""
    # Sizes whose runs all failed have no times and must not count as scales
    units = np.array(sorted(n for n, times in runs.items() if len(times)), float)
    if len(units) < least_scales:
        raise NotEnoughPointsError(f"{least_scales} scales; there {'is' if len(units) == 1 else 'are'} {len(units)}")
    samples = [np.asarray(runs[n], float) for n in units]
    times = np.array([sample.mean() for sample in samples])
    # A fixed seed: the same logs give the same page
    chance = np.random.default_rng(0)
    # The same samples for every model, so that their bands differ by the models alone
    drawn = np.array([[chance.choice(sample, len(sample)).mean() for sample in samples] for _ in range(REPLICATES)])
    models = [
        _model("Amdahl", "T1·(s + (1 - s)/n)", _amdahl, units, times, drawn),
        _model("USL", "(1 + a(n - 1) + b·n(n - 1)) / (g·n)", _usl, units, times, drawn),
    ]
    terms = select_terms(units, times)
    form = f"(c0 + {' + '.join(f'c{i}·{term}' for i, term in enumerate(terms, start=1))}) / n"
    models.append(_model("PMNF", form, make_pmnf_basis(terms), units, times, drawn))
    return models


def find_break(runs: Mapping[float, Sequence[float]], models: Sequence[Model]) -> str:
    """Say that the largest size is slower than two thirds of the models foresee from the smaller ones; else "".

    It is so if they miss it by more than the spread of a size. That is the spread of its runs, or that of the smaller
    sizes around the laws if it is larger: one size is usually one session.
    """
    sizes = sorted(n for n, times in runs.items() if len(times))
    spreads = [float(np.var(np.log(runs[n]), ddof=1)) for n in sizes if len(runs[n]) > 1]
    measured = np.log([np.mean(runs[n]) for n in sizes[:-1]])
    around = []
    for model in models:
        misses = measured - np.log(model.basis(np.asarray(sizes[:-1])) @ model.earlier)
        around.append(float(misses @ misses) / max(1, len(misses) - int(np.count_nonzero(model.earlier))))
    spread = math.sqrt(max(statistics.fmean(spreads) if spreads else 0.0, min(around)))
    # The second largest of three: two thirds of the models miss by at least so much
    if statistics.median(model.last_miss for model in models) <= max(LEAST_BREAK, BREAK_SPREADS * spread):
        return ""
    return (
        f"{sizes[-1]:g} does not follow the smaller sizes: a bad day or a limit; measure {sizes[-1]:g} again, or"
        f" {1.5 * sizes[-1]:g}"
    )


def predict_time(
    runs: Mapping[float, Sequence[float]], models: Sequence[Model], units: float
) -> tuple[float, float, float]:
    """Predict the time at a scale with the model of the least left-out error, and the interval over all models.

    A bootstrap band has only the spread of runs in it. It is widened by the model's error on scales left out. This is
    done once for each doubling of the largest scale. The lower end is also below the time that `_predict_from_slope`
    gives, and below what each model foresees without the largest scale: that may have been a bad day.
    The upper end is infinite beyond `SOLID_REACH` times the largest scale.
    """
    best = min(models, key=lambda model: model.loo_error)
    # At least one: on measured sizes, too, the error of a left-out scale remains
    doublings = max(1.0, math.log2(units / best.largest))
    # With noise of 1.5 left-out errors, 95 % of lines through three scales are at most this far above the true time.
    # The least error of several models is below the noise, so the median counts
    slope_error = (1 + statistics.median(model.loo_error for model in models)) ** (2 * (1 + doublings))
    earlier = min(float((model.basis(np.asarray([units])) @ model.earlier)[0]) for model in models)
    low, high = min(_predict_from_slope(runs, units), earlier) / slope_error, -math.inf
    for model in models:
        least, most = (float(edge[0]) for edge in model.band([units]))
        wider = (1 + max(model.loo_error, model.last_error)) ** doublings
        low, high = min(low, least / wider), max(high, most * wider)
    return float(best.time_s([units])[0]), low, high if units <= SOLID_REACH * best.largest else math.inf


def _predict_from_slope(runs: Mapping[float, Sequence[float]], units: float) -> float:
    """Compute the time at a scale if the speed-up goes on as over the last `SLOPE_SCALES` scales.

    Efficiency falls with size, so times fall more slowly than this line in logarithms. The models cannot show it. None
    of their overheads grows as slowly as a power law that is nearly perfect.
    """
    scales = sorted(n for n, times in runs.items() if len(times))[-SLOPE_SCALES:]
    logs = np.log([np.mean(runs[n]) for n in scales])
    return float(np.exp(np.polynomial.Polynomial.fit(np.log(scales), logs, 1)(math.log(units))))


def make_pmnf_basis(terms: Sequence[Term]) -> Callable[[Floats], Floats]:
    """Return a function that computes the terms of a model: units x time = c0 + sum of terms."""

    def basis(n: Floats) -> Floats:
        columns = [np.ones_like(n), *(n**term.exponent * np.log2(n) ** term.log_power for term in terms)]
        # The form is one of units x time; divided by n it predicts times
        return np.asarray(np.stack(columns, axis=1) / n[:, None])

    return basis


def select_terms(units: Floats, times: Floats) -> tuple[Term, ...]:
    """Select one or two terms by leave-one-out error; a second term must reduce it by a tenth."""
    terms = [Term(i, j) for i in EXPONENTS for j in LOG_POWERS if (i, j) != (0.0, 0)]
    single = min(
        ((compute_leave_one_out(make_pmnf_basis([term]), units, times), (term,)) for term in terms),
        key=lambda candidate: candidate[0],
    )
    # With four scales, each fit to three of them would pass through all three with c0 and two terms
    if len(units) < LEAST_SCALES:
        return single[1]
    pairs = (
        (compute_leave_one_out(make_pmnf_basis(pair), units, times), pair)
        for pair in combinations(terms, 2)
        if pair[0].exponent <= 1.0 and pair[1].exponent <= 1.0
    )
    double = min(pairs, key=lambda candidate: candidate[0])
    # Of hundreds of pairs one is better by chance: the larger model must be clearly better
    return double[1] if double[0] < 0.9 * single[0] else single[1]


def compute_leave_one_out(basis: Callable[[Floats], Floats], units: Floats, times: Floats) -> float:
    """Return the mean symmetric relative error of each scale predicted from all others."""
    matrix = basis(units)
    return float(np.mean([_left_out_error(matrix, times, place) for place in range(len(units))]))


def _left_out_error(matrix: Floats, times: Floats, place: int) -> float:
    """Return the symmetric relative error of one scale predicted from all others."""
    others = np.arange(len(times)) != place
    predicted = float(matrix[place] @ _least_squares(matrix[others], times[others]))
    return float(2 * abs(predicted - times[place]) / (abs(predicted) + times[place]))


def _model(
    name: str, form: str, basis: Callable[[Floats], Floats], units: Floats, times: Floats, drawn: Floats
) -> Model:
    matrix = basis(units)
    earlier = _least_squares(matrix[:-1], times[:-1])
    return Model(
        name=name,
        form=form,
        coefficients=tuple(float(c) for c in _least_squares(matrix, times)),
        loo_error=compute_leave_one_out(basis, units, times),
        last_error=_left_out_error(matrix, times, len(units) - 1),
        last_miss=math.log(times[-1] / float(matrix[-1] @ earlier)),
        largest=float(units[-1]),
        earlier=earlier,
        replicates=np.array([_least_squares(matrix, replicate) for replicate in drawn]),
        basis=basis,
    )


def _amdahl(n: Floats) -> Floats:
    return np.stack([1.0 / n, np.ones_like(n)], axis=1)


def _usl(n: Floats) -> Floats:
    return np.stack([1.0 / n, (n - 1.0) / n, n - 1.0], axis=1)


def _least_squares(matrix: Floats, times: Floats) -> Floats:
    """Find the coefficients >= 0 with the least squared relative error."""
    from scipy.optimize import nnls

    weighted = matrix / times[:, None]
    # nnls has one tolerance for all columns, and their lengths differ by many powers of ten
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0.0] = 1.0  # n - 1 and log2(n) are 0 if the only size left is 1
    return np.asarray(nnls(weighted / scale, np.ones(len(times)), maxiter=100)[0] / scale)
