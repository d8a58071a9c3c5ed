"""Measures points and the default: jobs of `suite.performance.tune.job`, with a time limit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suite.performance.tune.candidates import Candidates
from suite.performance.tune.job import OBJECTIVES, Blocks, FailedJobError, run_job
from suite.performance.tune.search import DEFAULT, TUNED, Measured
from suite.performance.tune.space import Point
from suite.statistics.blocks import make_alternating_order

LIMIT_FACTOR, LEAST_LIMIT_S = 10.0, 60.0  # of the default's first job: what takes longer is ended


@dataclass
class Meter:
    """Measures pairs of the default and a point. ``limit_s`` None: `measure_default` sets it. ``turns``: pairs so far."""

    candidates: Candidates
    default: Point
    blocks: Blocks
    limit_s: float | None = None
    turns: int = 0

    def measure_default(self) -> float:
        """Measure the default alone. Returns seconds of its job, which set the time limit of the others.

        FailedJobError if it cannot run.
        """
        begun = time.monotonic()
        self._run([self.default], None)
        took = time.monotonic() - begun
        self.limit_s = self.limit_s or max(LEAST_LIMIT_S, LIMIT_FACTOR * took)
        return took

    def measure(self, point: Point) -> Measured:
        """Measure a point for the search. The order changes from point to point."""
        self.turns += 1
        begun = time.monotonic()
        try:
            blocks = self._run_pair(point, make_alternating_order(self.turns, (DEFAULT, TUNED)))
        except FailedJobError as error:
            return Measured(None, time.monotonic() - begun, str(error))
        ratios = (a / b for a, b in zip(blocks[TUNED], blocks[DEFAULT], strict=True))
        return Measured(statistics.geometric_mean(ratios), time.monotonic() - begun)

    def compare(self, point: Point, order: Sequence[str]) -> Mapping[str, float]:
        """Run one pair of the race. A pair that fails is lost by the point: the default is known to run."""
        begun = time.monotonic()
        try:
            blocks = self._run_pair(point, order)
            times = {name: statistics.geometric_mean(values) for name, values in blocks.items()}
        except FailedJobError:
            times = {TUNED: math.inf, DEFAULT: 1.0}  # any finite time
        return {**times, "took": time.monotonic() - begun}

    def _run_pair(self, point: Point, order: Sequence[str]) -> dict[str, list[float]]:
        """Run blocks of both: in one job if it can hold both, and they start alike; else in one job each."""
        points = {DEFAULT: self.default, TUNED: point}
        alike = self.candidates.launch(point) == self.candidates.launch(self.default)
        if alike and self.candidates.fits_twice(point, self.default):
            return dict(zip(order, self._run([points[name] for name in order], self.limit_s), strict=True))
        return {name: self._run([points[name]], self.limit_s)[0] for name in order}

    def _run(self, points: Sequence[Point], limit_s: float | None) -> list[list[float]]:
        configs = [self.candidates.config(point) for point in points]
        launch, quantity = self.candidates.launch(points[0]), OBJECTIVES[self.candidates.objective]
        sides = run_job(self.candidates.descriptor.name, configs, launch, self.blocks, limit_s)
        return [[block[quantity] for block in side] for side in sides]
