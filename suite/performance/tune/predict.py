"""Predicts the time of settings that were not measured, from earlier searches: `mlhpc tune --predict`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from mlhpc.suite.performance.tune.candidates import Candidates
from mlhpc.suite.performance.tune.proxy import Proxy
from mlhpc.suite.performance.tune.result import TuneResult
from mlhpc.suite.performance.tune.space import Point, Value, key_of_point

NORMAL_90 = 1.6449  # standard deviations on each side of 90 % of a normal distribution


class PredictedPoint(Struct, frozen=True, kw_only=True):
    """A point with its time over the default's, and the 90 % interval of a measurement. ``measured``: how often it was."""

    point: dict[str, Value]
    ratio: float
    low: float
    high: float
    measured: int


@dataclass
class Known:
    """The points that are predicted or measured, without doubles, and logs of measured ratios by position."""

    points: list[Point]
    logs: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._places = {key_of_point(point): place for place, point in enumerate(self.points)}

    def add(self, point: Point, ratio: float | None, offset: float, candidates: Candidates) -> None:
        """Add a measured ratio, if there is one and the point has a closed form here."""
        restricted = candidates.space.restrict(point)
        if ratio is not None and math.isfinite(candidates.closed_form_s(restricted)):
            self.logs.setdefault(self.find(restricted), []).append(math.log(ratio) + offset)

    def find(self, point: Point) -> int:
        """Return the position of a point, which is added if it is new."""
        place = self._places.setdefault(key_of_point(point), len(self.points))
        if place == len(self.points):
            self.points.append(point)
        return place


def predict_points(
    candidates: Candidates, pool: Sequence[Point], default: Point, results: Sequence[TuneResult]
) -> list[PredictedPoint]:
    """Predict every point of the pool, the fastest first. What ``results`` measured is learned from.

    A result with another default is tied to this one by the ratio of their closed forms.
    """
    known = Known(list(pool))
    own_s = candidates.closed_form_s(default)
    for result in results:
        their_s = candidates.closed_form_s(candidates.space.restrict(result.default))
        offset = math.log(their_s / own_s)
        if not math.isfinite(offset):
            continue  # its default cannot run here, so that nothing ties its times to this default
        known.add(result.default, 1.0, offset, candidates)
        for trial in result.trials:
            known.add(trial.point, trial.ratio, offset, candidates)
    prior = [math.log(candidates.closed_form_s(point) / own_s) for point in known.points]
    found = Proxy(candidates.space, known.points, prior).predict(known.logs)
    base = float(found.mean[known.find(default)])
    predicted = []
    for place, point in enumerate(pool):
        middle = float(found.mean[place]) - base
        half = NORMAL_90 * math.hypot(float(found.std[place]), found.noise)
        low, high = math.exp(middle - half), math.exp(middle + half)
        measured = len(known.logs.get(place, ()))
        predicted.append(
            PredictedPoint(point=dict(point), ratio=math.exp(middle), low=low, high=high, measured=measured)
        )
    return sorted(predicted, key=lambda each: each.ratio)
