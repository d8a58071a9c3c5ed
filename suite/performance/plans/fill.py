"""Plans K-FAC's work into the idle time of a pipeline (PipeFisher, arXiv 2211.14133).

K-FAC needs, of each linear layer, A = E[a aᵀ] of its inputs a and B = E[g gᵀ] of the gradients g of its outputs, and
the inverses of both. A rank computes them for its own stages, where its schedule leaves a gap. They are of the
microbatches of one step, and may take the gaps of several steps; so the inverses are renewed every few steps.

Times are in FLOPs: K-FAC is taken to compute at the rate of the passes.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.plans.bubbles import BACKWARD, FORWARD, INPUT, Timeline, plan_timeline
from mlhpc.suite.performance.plans.predict import make_batch
from mlhpc.suite.performance.plans.rehearsal import NEEDS_VALUES
from mlhpc.suite.performance.plans.remembered import CachingFakeTensorMode
from mlhpc.suite.training.parallel.mesh import part_of
from mlhpc.suite.training.parallel.sharing import Parallel
from mlhpc.suite.training.parallel.skeleton import build_without_memory
from mlhpc.suite.workload import Workload, load_workload

FACTORS = {"A": (FORWARD,), "B": (INPUT, BACKWARD)}  # the actions of a microbatch after which a factor can be computed


@dataclass(frozen=True)
class Layer:
    """A linear layer. ``rows``: the vectors that it takes of a microbatch."""

    path: str
    rows: int
    inputs: int
    outputs: int

    @property
    def precondition_flops(self) -> int:
        """FLOPs of B⁻¹ G A⁻¹ for its gradient G."""
        return 2 * self.outputs * self.inputs * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Job:
    """One piece of work: a factor of one microbatch, or (``part`` None) the inverse of a factor of all of them."""

    layer: str
    factor: str
    stage: int
    part: int | None
    length: int


@dataclass(frozen=True)
class Placed:
    """A job and when it runs. Times count on over the steps."""

    job: Job
    begin: Fraction

    @property
    def end(self) -> Fraction:
        """When the job ends."""
        return self.begin + self.job.length


@dataclass(frozen=True)
class Filled:
    """The jobs of each rank, in ``steps`` steps of a pipeline. ``left``: jobs longer than every gap.

    ``preconditioning``: what K-FAC adds to each step outside of gaps, over the step's time.
    """

    timeline: Timeline
    placed: tuple[tuple[Placed, ...], ...]
    left: tuple[Job, ...]
    steps: int
    preconditioning: Fraction

    @property
    def utilisation_before(self) -> Fraction:
        """Busy time of the ranks over all time, without K-FAC."""
        return sum(self.timeline.busy, Fraction(0)) / (len(self.timeline.busy) * self.timeline.total)

    @property
    def utilisation(self) -> Fraction:
        """Busy time of the ranks over all time, with the jobs in the gaps."""
        added = sum(each.job.length for mine in self.placed for each in mine)
        return self.utilisation_before + added / (len(self.placed) * self.steps * self.timeline.total)

    def describe(self) -> str:
        """Describe the result in one line."""
        jobs = sum(map(len, self.placed)) + len(self.left)
        text = (
            f"inverses every {self.steps} steps; ranks compute {float(self.utilisation_before):.1%} of the time without, "
            f"{float(self.utilisation):.1%} with; preconditioning adds {float(self.preconditioning):.1%} to a step"
        )
        return text + (f"; {len(self.left)} of {jobs} pieces are longer than every gap" if self.left else "")


def predict_fill(descriptor: Descriptor, config: RunConfig, parallel: Parallel, step_flops: float) -> Filled:
    """Plan K-FAC's work into the gaps of a plan's pipeline. InputError without a pipeline or a linear layer.

    ``step_flops``: of the slowest rank in a step.
    """
    plan, mesh = parallel.plan, parallel.mesh
    if plan is None or plan.pipeline is None or mesh.pipeline == 1:
        raise InputError("--fill kfac: the plan has no pipeline, so no gaps: give --plan pipeline --mesh pipeline=N")
    config = parallel.with_microbatches(config)
    parts = config.gradient_accumulation_steps
    blocks, layers = _list_layers(descriptor, config, parallel)
    timeline = plan_timeline(plan.pipeline, mesh.pipeline, parts, Fraction(round(step_flops), parts))
    placed, left, preconditioning = [], [], Fraction(0)
    for rank in range(mesh.pipeline):
        stages = replace(parallel, mesh=replace(mesh, rank=rank)).stages
        mine = {stage: _layers_of(parallel, layers, blocks, stage) for stage in stages}
        found, longer = place_jobs(timeline, rank, mine, parts)
        placed.append(found)
        left += longer
        flops = sum(each.precondition_flops for these in mine.values() for each in these)
        preconditioning = max(preconditioning, flops / timeline.total)
    last = max((each.end for mine in placed for each in mine), default=Fraction(0))
    steps = max(1, -(-last // timeline.total))
    return Filled(timeline, tuple(placed), tuple(left), int(steps), preconditioning)


def _list_layers(descriptor: Descriptor, config: RunConfig, parallel: Parallel) -> tuple[int, list[Layer]]:
    """Return the number of blocks, and the linear layers of the whole model in the order of their first calls."""
    assert parallel.plan is not None
    assert parallel.plan.pipeline is not None
    workload: Workload = load_workload(descriptor)(config)
    samples = config.global_batch_size // parallel.mesh.data_size // config.gradient_accumulation_steps
    rows: dict[str, int] = {}
    with CachingFakeTensorMode(), torch.no_grad():
        model = build_without_memory(workload)
        linear = {path: each for path, each in model.named_modules() if isinstance(each, nn.Linear)}
        for path, module in linear.items():

            def count_rows(module: Any, inputs: tuple[Tensor, ...], *, path: str = path) -> None:
                rows[path] = rows.get(path, 0) + inputs[0].numel() // module.in_features

            module.register_forward_pre_hook(count_rows)
        batch = make_batch(parallel, samples)
        try:
            workload.loss(model.train(), batch)
        except (*NEEDS_VALUES, KeyError):
            rows.clear()
    if not rows:
        raise InputError("--fill kfac: no linear layer was found, or the loss depends on values: leave --fill out")
    blocks = len(list(model.get_submodule(parallel.plan.pipeline.blocks).children()))
    return blocks, [Layer(path, n, linear[path].in_features, linear[path].out_features) for path, n in rows.items()]


def _layers_of(parallel: Parallel, layers: Sequence[Layer], blocks: int, stage: int) -> list[Layer]:
    """Return the layers of a stage."""
    assert parallel.plan is not None
    assert parallel.plan.pipeline is not None
    pipeline, total = parallel.plan.pipeline, parallel.all_stages
    begin, end = part_of(blocks, total, stage)
    paths = [f"{pipeline.blocks}.{number}" for number in range(begin, end)]
    paths += [*(pipeline.first if stage == 0 else ()), *(pipeline.last if stage == total - 1 else ())]
    return [each for each in layers if any(each.path == path or each.path.startswith(f"{path}.") for path in paths)]


def place_jobs(
    timeline: Timeline, rank: int, layers: Mapping[int, Sequence[Layer]], parts: int
) -> tuple[tuple[Placed, ...], list[Job]]:
    """Place the jobs of a rank's ``layers`` (by stage) into its gaps, each in the first that is long enough.

    Factors come first, in the order of their readiness; then inverses. Also returns the jobs that
    are longer than every gap or need such a job.
    """
    spans = timeline.spans[rank]
    ends = {(each.action.kind, each.action.stage, each.action.part): each.end for each in spans}
    gaps = _Gaps([(each.begin, each.end) for each in spans], timeline.total)
    placed: list[Placed] = []
    left: list[Job] = []

    def place(jobs: list[tuple[Fraction, Job]]) -> None:
        """Place jobs in the order of their readiness, long ones first."""
        for ready, job in sorted(jobs, key=lambda each: (each[0], -each[1].length)):
            begin = gaps.take(ready, job.length)
            if begin is None:
                left.append(job)
            else:
                placed.append(Placed(job, begin))

    sizes = [
        (stage, layer, factor, size)
        for stage, these in layers.items()
        for layer in these
        for factor, size in (("A", layer.inputs), ("B", layer.outputs))
    ]
    factors: list[tuple[Fraction, Job]] = []
    for stage, layer, factor, size in sizes:
        length = layer.rows * size * (size + 1)  # a symmetric product: half of the values
        for part in range(parts):
            ready = next(ends[kind, stage, part] for kind in FACTORS[factor] if (kind, stage, part) in ends)
            factors.append((ready, Job(layer.path, factor, stage, part, length)))
    place(factors)
    lacking = {(job.layer, job.factor) for job in left}
    made: dict[tuple[str, str], Fraction] = {}  # when all parts of a factor are there
    for each in placed:
        key = each.job.layer, each.job.factor
        made[key] = max(made.get(key, each.end), each.end)
    inverses: list[tuple[Fraction, Job]] = []
    for stage, layer, factor, size in sizes:
        job = Job(layer.path, factor, stage, None, size**3)  # Cholesky, then the inverse from it
        if (layer.path, factor) in lacking:
            left.append(job)
        else:
            inverses.append((made[layer.path, factor], job))
    place(inverses)
    return tuple(sorted(placed, key=lambda each: each.begin)), left


class _Gaps:
    """The free time of a rank, step after step without end."""

    def __init__(self, busy: Sequence[tuple[Fraction, Fraction]], total: Fraction) -> None:
        begins, ends = [Fraction(0), *(end for _, end in busy)], [*(begin for begin, _ in busy), total]
        self._of_step = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        self._longest = max((end - begin for begin, end in self._of_step), default=Fraction(0))
        self._total, self._steps, self._free = total, count(), list[tuple[Fraction, Fraction]]()

    def take(self, ready: Fraction, length: int) -> Fraction | None:
        """Take the first free time of this length that begins at ``ready`` or later; None if no gap is so long."""
        if length > self._longest:
            return None
        for number in count(bisect(self._free, ready, key=lambda gap: gap[1])):
            if number == len(self._free):
                step = next(self._steps)
                self._free += [(begin + step * self._total, end + step * self._total) for begin, end in self._of_step]
            low, high = self._free[number]
            begin = max(low, ready)
            if begin + length <= high:
                rest = [(low, begin), (begin + length, high)]
                self._free[number : number + 1] = [(first, last) for first, last in rest if first < last]
                return begin
        raise AssertionError
