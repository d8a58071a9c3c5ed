"""Measures settings in one job: each becomes a side of `mlhpc.plugins.tune.sides`, and their blocks take turns.

`run_job` starts the ranks and ends them after a time limit. `measure_sides` runs on every rank. A `Meter` measures
points of a space beside the default by such jobs.
"""

from __future__ import annotations

import math
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from mlhpc.plugins.tune.candidates import CPU_TIME, JOULES, STEP_TIME, TIME_TO_QUALITY, Candidates, Launch
from mlhpc.plugins.tune.race import Turn, make_alternating_order, run_block
from mlhpc.plugins.tune.space import Point, StepError, TunedTrial
from mlhpc.suite.config import RunConfig, choose_default_data_root, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.documents import convert_to_plain_data, read_json_document
from mlhpc.suite.files import make_folder, render_duration, write_file_atomically
from mlhpc.suite.launch.command_on_ranks import start_ranks
from mlhpc.suite.world import World

VERSION = 1
WARMUP_STEPS = 2
TUNED, DEFAULT = "tuned", "default"  # the two sides of a pair
GRADIENT, BOUND = "gradient error", "gradient bound"  # of a setting, if it was judged: from float64 (`tune.error`)
ENERGY = "energy"  # joules per step of the whole machine; absent where no counter can be read
OBJECTIVES = {  # the name of the measured quantity: `ENERGY`, or one of `BlockCost.by_quantity`
    STEP_TIME: "step time",
    CPU_TIME: "CPU time",
    TIME_TO_QUALITY: "step time",
    JOULES: ENERGY,
}


@dataclass(frozen=True)
class Blocks:
    """The blocks that a job runs of each setting: their number, timed steps in each, and the seed of the samples.

    ``judged``: the numbers of settings of which a step is compared with float64.
    """

    number: int
    steps: int
    seed: int
    judged: tuple[int, ...] = ()


class Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ranks read: files of settings to measure, and where the result goes."""

    version: Literal[1] = 1
    settings: Annotated[tuple[Path, ...], Meta(min_length=1)]
    blocks: Annotated[int, Meta(ge=1)]
    steps: Annotated[int, Meta(ge=1)]
    seed: Annotated[int, Meta(ge=0)]
    judged: tuple[int, ...] = ()
    output: Path


class JobResult(Struct, frozen=True, kw_only=True):
    """The result of a job: of each setting in order, the quantities of each of its blocks."""

    version: Literal[1] = 1
    sides: tuple[tuple[dict[str, float], ...], ...]


class FailedJobError(Exception):
    """A job ended without a result. The text is the reason in one line."""


def run_job(
    workload: str, configs: Sequence[RunConfig], launch: Launch, blocks: Blocks, limit_s: float | None
) -> list[list[dict[str, float]]]:
    """Measure settings in turn in one job of this machine. Returns each setting's blocks, quantity by quantity.

    FailedJobError if the ranks failed or were ended after ``limit_s`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="mlhpc-tune-") as name:
        folder, said, begun = Path(name), list[str](), time.monotonic()
        paths = [folder / f"{number}.yaml" for number in range(len(configs))]
        for path, config in zip(paths, configs, strict=True):
            path.write_text(yaml.safe_dump(convert_to_plain_data(config, without_none=True), sort_keys=False))
        job = Job(
            settings=tuple(paths),
            blocks=blocks.number,
            steps=blocks.steps,
            seed=blocks.seed,
            judged=blocks.judged,
            output=folder / "result.json",
        )
        (folder / "job.json").write_bytes(msgspec.json.encode(job, enc_hook=str))
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(launch.threads)  # the ranks of this job inherit it
        try:
            code = start_ranks(
                ["tune", workload, "--job", str(folder / "job.json")],
                launch.ranks,
                limit_s=limit_s,
                echo=said.append,
                complain=said.append,
            )
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        if job.output.exists():
            result = read_json_document(job.output, JobResult, "result of a job", VERSION)
            return [list(side) for side in result.sides]
        if limit_s is not None and time.monotonic() - begun >= limit_s:
            raise FailedJobError(f"was ended after its time limit of {render_duration(limit_s)}")
        raise FailedJobError(said[-1].removeprefix("mlhpc: ") if said else f"ended with exit code {code}")


def read_job(path: Path) -> Job:
    """Read the job of `run_job`."""
    return read_json_document(path, Job, "job of mlhpc tune", VERSION)


def measure_sides(world: World, job: Job, workload: str) -> None:
    """Run every setting's blocks in turn on all ranks. Rank 0 writes the result.

    Of each setting, a block of warm-up comes first. Nothing is loaded from a checkpoint: each side trains on.
    """
    from mlhpc.plugins.tune.error import measure_error
    from mlhpc.plugins.tune.sides import COUNTED_STEPS, Side
    from mlhpc.suite.data.build import find_data
    from mlhpc.suite.training.devices import set_up_rank

    descriptor = load_descriptor(workload)
    configs = [load_config(descriptor, str(path)) for path in job.settings]
    first = configs[0]
    device, _ = set_up_rank(first, world)
    world.init_torch(device)
    root = first.data or choose_default_data_root(first.workload, first.size)
    manifest = find_data(root, first.workload, first.size)
    sides = {
        str(number): _create_side(Side, descriptor, config, job, world, device, root, manifest.sha256)
        for number, config in enumerate(configs)
    }
    errors: list[dict[str, float]] = []
    if job.judged and world.is_first:
        make_folder(sides["0"].checkpoint.path.parent)
    world.barrier()
    for number, side in enumerate(sides.values()):
        memory = side.block(0, WARMUP_STEPS, restored=False).memory
        found = measure_error(side, 0, memory) if number in job.judged else StepError()
        errors.append({} if found.error is None else {GRADIENT: found.error, BOUND: found.bound or 0.0})
    begin, each = WARMUP_STEPS + COUNTED_STEPS, job.steps + COUNTED_STEPS

    # Any side's: it counts the whole machine.
    energy = sides["0"].trainer.instruments.energy

    def run(turn: Turn) -> dict[str, float]:
        energy.restart()
        cost = sides[turn.entry].block(begin + (turn.block - 1) * each, job.steps, restored=False)
        joules = energy.take().sum_widest()
        measured: dict[str, float] = cost.by_quantity()
        return measured if joules is None else {**measured, ENERGY: joules / each}

    blocks = [
        run_block(number, make_alternating_order(number, tuple(sides)), run) for number in range(1, job.blocks + 1)
    ]
    if world.is_first:
        rows = [tuple(block[name] | error for block in blocks) for name, error in zip(sides, errors, strict=True)]
        result = JobResult(sides=tuple(rows))
        write_file_atomically(job.output, msgspec.json.encode(result))


def _create_side(kind: Any, descriptor: Descriptor, config: RunConfig, job: Job, world: World, *where: Any) -> Any:
    from mlhpc.suite.log.run_folder import RunFolder
    from mlhpc.suite.training.statement import TrialPlan

    device, root, manifest = where
    run = RunFolder(job.output.parent)
    plan = TrialPlan(descriptor, config, run, 0, base_seed=job.seed)
    return kind.create(plan, world, device, root, run.checkpoint(0), manifest, choosing=config.plan is None)


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
    error: float | None = None  # of the setting that was judged last

    def measure_default(self) -> float:
        """Measure the default alone. Returns seconds of its job, which set the time limit of the others.

        FailedJobError if it cannot run.
        """
        begun = time.monotonic()
        (sides,) = self._run_job([self.default], None, judged=(0,))
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
            blocks = self._run_pair(point, make_alternating_order(self.turns, (DEFAULT, TUNED)), judged=True)
            ratio, why = statistics.geometric_mean(map(operator.truediv, blocks[TUNED], blocks[DEFAULT])), ""
        except FailedJobError as failed:
            ratio, why = None, str(failed)
        seconds = time.monotonic() - begun
        return TunedTrial(point=dict(point), ratio=ratio, seconds=seconds, error=self.error, why=why)

    def compare(self, point: Point, order: Sequence[str]) -> Mapping[str, float]:
        """Run one pair of the race. A pair that fails is lost by the point: the default is known to run."""
        begun = time.monotonic()
        try:
            blocks = self._run_pair(point, order)
            times = {name: statistics.geometric_mean(values) for name, values in blocks.items()}
        except FailedJobError:
            times = {TUNED: math.inf, DEFAULT: 1.0}  # any finite time
        return {**times, "took": time.monotonic() - begun}

    def _run_pair(self, point: Point, order: Sequence[str], *, judged: bool = False) -> dict[str, list[float]]:
        """Run blocks of both: in one job if it can hold both, and they start alike; else in one job each.

        ``judged``: FailedJobError if rounding does not explain a gradient of the point.
        """
        self.error = None
        points = {DEFAULT: self.default, TUNED: point}
        alike = self.candidates.launch(point) == self.candidates.launch(self.default)
        if alike and self.candidates.fits_twice(point, self.default):
            numbers = (order.index(TUNED),) if judged else ()
            return dict(zip(order, self._run([points[name] for name in order], numbers), strict=True))
        return {name: self._run([points[name]], (0,) if judged and name == TUNED else ())[0] for name in order}

    def _run(self, points: Sequence[Point], judged: tuple[int, ...]) -> list[list[float]]:
        quantity = OBJECTIVES[self.candidates.objective]
        steps = [self.candidates.count_steps(point) for point in points]
        sides = self._run_job(points, self.limit_s, judged)
        return [[block[quantity] * count for block in side] for side, count in zip(sides, steps, strict=True)]

    def _run_job(
        self, points: Sequence[Point], limit_s: float | None, judged: tuple[int, ...]
    ) -> list[list[dict[str, float]]]:
        configs = [self.candidates.config(point) for point in points]
        launch, blocks = self.candidates.launch(points[0]), replace(self.blocks, judged=judged)
        sides = run_job(self.candidates.descriptor.name, configs, launch, blocks, limit_s)
        for number in judged:
            found = StepError(sides[number][0].get(GRADIENT), sides[number][0].get(BOUND))
            self.error = found.error
            if found.is_wrong:
                raise FailedJobError(found.render())
        if any(OBJECTIVES[self.candidates.objective] not in block for side in sides for block in side):
            raise FailedJobError("no counter of energy can be read here (docs/energy.md says which there are)")
        return sides
