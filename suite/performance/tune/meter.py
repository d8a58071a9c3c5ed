"""Measures points and the default: jobs of `mlhpc.suite.performance.tune.job`, with a time limit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlhpc.suite.performance.tune.candidates import Candidates
from mlhpc.suite.performance.tune.job import OBJECTIVES, STEP_TIME, Blocks, FailedJobError, run_job
from mlhpc.suite.performance.tune.result import TunedTrial
from mlhpc.suite.performance.tune.search import DEFAULT, TUNED
from mlhpc.suite.performance.tune.space import Point
from mlhpc.suite.statistics.blocks import make_alternating_order

LIMIT_FACTOR, LEAST_LIMIT_S = 10.0, 60.0  # of the default's first job: what takes longer is ended
BLOCK_S, MOST_STEPS = 0.5, 100  # a shorter block is noisier than what is looked for


@dataclass
class Meter:
    """Measures pairs of the default and a point. ``turns``: pairs so far.

    `measure_default` sets ``limit_s`` if it is None, and raises the steps of a block if they are not ``fixed``.
    """

    candidates: Candidates
    default: Point
    blocks: Blocks
    limit_s: float | None = None
    turns: int = 0
    fixed: bool = False

    def measure_default(self) -> float:
        """Measure the default alone. Returns seconds of its job, which set the time limit of the others.

        FailedJobError if it cannot run.
        """
        begun = time.monotonic()
        (sides,) = self._run_job([self.default], None)
        took = time.monotonic() - begun
        if not self.fixed:
            step_s = statistics.median(block[OBJECTIVES[STEP_TIME]] for block in sides)
            steps = min(MOST_STEPS, max(self.blocks.steps, math.ceil(BLOCK_S / step_s)))
            self.blocks = replace(self.blocks, steps=steps)
        self.limit_s = self.limit_s or max(LEAST_LIMIT_S, LIMIT_FACTOR * took)
        return took

    def measure(self, point: Point) -> TunedTrial:
        """Measure a point for the search. The order changes from point to point."""
        self.turns += 1
        begun = time.monotonic()
        try:
            blocks = self._run_pair(point, make_alternating_order(self.turns, (DEFAULT, TUNED)))
        except FailedJobError as error:
            return TunedTrial(point=dict(point), ratio=None, seconds=time.monotonic() - begun, why=str(error))
        ratios = (a / b for a, b in zip(blocks[TUNED], blocks[DEFAULT], strict=True))
        return TunedTrial(point=dict(point), ratio=statistics.geometric_mean(ratios), seconds=time.monotonic() - begun)

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
        quantity = OBJECTIVES[self.candidates.objective]
        steps = [self.candidates.count_steps(point) for point in points]
        sides = self._run_job(points, limit_s)
        return [[block[quantity] * count for block in side] for side, count in zip(sides, steps, strict=True)]

    def _run_job(self, points: Sequence[Point], limit_s: float | None) -> list[list[dict[str, float]]]:
        configs = [self.candidates.config(point) for point in points]
        launch = self.candidates.launch(points[0])
        sides = run_job(self.candidates.descriptor.name, configs, launch, self.blocks, limit_s)
        if any(OBJECTIVES[self.candidates.objective] not in block for side in sides for block in side):
            raise FailedJobError("no counter of energy can be read here (docs/energy.md says which there are)")
        return sides
