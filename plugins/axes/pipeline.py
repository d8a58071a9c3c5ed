"""Divides a chain of blocks into stages over ranks and runs them with torch.distributed.pipelining.

A rank keeps the modules of its stages; the others become None, under the names that they had. So names of parameters
are those of the whole model. The microbatches of a step are its parts under gradient accumulation: each rank of the
unsplit run would compute them one after another.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule, get_schedule_class

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.layout import STAGES, stages_of
from mlhpc.suite.training.parallel.mesh import part_of
from mlhpc.suite.training.parallel.meta_init import has_values
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import SAMPLE, SINGLE_STAGE, PipelinePlan
from mlhpc.suite.workload import Workload

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

Autocast = Callable[[], AbstractContextManager[Any]]
Add = Callable[[str, int], None]  # kind of an exchange, and the bytes that this rank gives


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of one rank, and what a stage takes from the one before: shapes and type, for one sample.

    ``axis``: the ranks of the pipeline. ``replicas``: the ranks that have the same stages.
    """

    plan: PipelinePlan
    modules: Mapping[int, nn.Module]
    total: int
    shapes: Sequence[Sequence[int | None]]  # None: the samples of a microbatch
    dtype: torch.dtype
    axis: Axis
    replicas: Axis

    def __deepcopy__(self, memo: object) -> Stages:
        return self

    def between(self, samples: int, device: str | torch.device = "meta") -> tuple[Tensor, ...]:
        """Make tensors like the ones a stage gives to the next."""
        sizes = ([samples if n is None else n for n in shape] for shape in self.shapes)
        return tuple(torch.empty(size, dtype=self.dtype, device=device, requires_grad=True) for size in sizes)

    def note_sends(self, samples: int) -> None:
        """Note what this rank sends for a microbatch: tensors to the next stage, gradients to the one before."""
        for stage in self.modules:
            for other in (stage - 1, stage + 1):
                if 0 <= other < self.total and other not in self.modules:
                    for each in self.between(samples):
                        self.axis.note(self.axis.name, "send", each.nbytes, self.axis.size)

    def buffer_bytes(self, samples: int, microbatches: int) -> int:
        """Bytes of the buffers into which torch receives the tensors and gradients of all microbatches."""
        given = sum(each.nbytes for each in self.between(samples)) * microbatches
        return given * sum((stage > 0) + (stage < self.total - 1) for stage in self.modules)


def divide(model: nn.Module, parallel: Parallel, axis: Axis, replicas: Axis) -> None:
    """Take from a model what is of other ranks' stages. InputError if the plan names no blocks, or too few."""
    plan = parallel.plan.pipeline if parallel.plan is not None else None
    assert plan is not None
    modules, total = dict(model.named_modules()), parallel.all_stages
    blocks = modules.get(plan.blocks)
    if not isinstance(blocks, nn.ModuleList):
        raise InputError(f"plan: pipeline: blocks: {plan.blocks!r} is no list of modules: correct its path")
    if len(blocks) < total:
        raise InputError(
            f"plan: {total} stages, and {plan.blocks!r} has {len(blocks)} blocks: lower pipeline or stages"
        )
    for path in (*plan.first, *plan.last):
        if path not in modules:
            raise InputError(f"plan: pipeline: {path!r} is no module of the model: correct its path")
    staged = tuple(f"{path}." for path in (plan.blocks, *plan.first, *plan.last))
    for name, _ in model.named_parameters():
        if not name.startswith(staged):
            raise InputError(f"plan: pipeline: parameter {name!r} is of no stage: add its module to first or last")
    lacking: dict[int, set[str]] = {}  # of each stage of this rank: modules of other stages
    for stage in parallel.stages:
        begin, end = part_of(len(blocks), total, stage)
        lacking[stage] = {f"{plan.blocks}.{i}" for i in range(len(blocks)) if not begin <= i < end}
        lacking[stage] |= set(plan.first if stage > 0 else ()) | set(plan.last if stage < total - 1 else ())
    dtype = next(model.parameters()).dtype
    for path in set.intersection(*lacking.values()):
        if has_values(next(model.parameters())):
            modules[path].to("meta")  # frees its memory, also where a monitor still refers to it
        _remove(model, path)
    parts = {stage: model if len(lacking) == 1 else _copy_without(model, paths) for stage, paths in lacking.items()}
    shapes = [[None if name == SAMPLE else parallel.extents[name] for name in dims] for dims in plan.between]
    setattr(model, STAGES, Stages(plan, parts, total, shapes, dtype, axis, replicas))


def _remove(model: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = None


def _copy_without(model: nn.Module, paths: set[str]) -> nn.Module:
    """Copy a model without some modules. The copy has the same parameters in its other modules."""
    part = copy.copy(model)
    part._modules = dict(part._modules)
    for parent in {path.rpartition(".")[0] for path in paths} - {""}:
        container = copy.copy(part.get_submodule(parent))
        container._modules = dict(container._modules)
        above, _, name = parent.rpartition(".")
        part.get_submodule(above)._modules[name] = container
    for path in paths:
        _remove(part, path)
    return part


class _TimedStage(PipelineStage):
    """A stage that sums the time in which it computes, by the host's clock, and counts what it sends."""

    autocast: Autocast = nullcontext
    add: Add = staticmethod(lambda kind, size: None)
    busy_s = 0.0

    def forward_one_chunk(self, *args: Any, **keywords: Any) -> Any:
        with self._busy(), self.autocast():
            return super().forward_one_chunk(*args, **keywords)

    def backward_one_chunk(self, *args: Any, **keywords: Any) -> None:
        with self._busy():
            super().backward_one_chunk(*args, **keywords)

    def backward_weight_one_chunk(self, *args: Any, **keywords: Any) -> None:
        with self._busy():
            super().backward_weight_one_chunk(*args, **keywords)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # In evaluations torch 2.13 asks for gradients, and refuses them, where two neighbours lie on one rank.
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._count(super().get_fwd_send_ops(*args))

    def get_bwd_send_ops(self, *args: Any) -> list[dist.P2POp]:
        return self._count(super().get_bwd_send_ops(*args))

    def _count(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for each in sends:
            self.add("send", each.tensor.nbytes)
        return sends

    @contextmanager
    def _busy(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.busy_s += time.perf_counter() - begin


class Rehearsed:
    """A workload whose loss is that of this rank's stages alone: the sum of what a stage returns, if it is not the last.

    It is for one pass on tensors without memory, with the same received tensors for all stages.
    """

    def __init__(self, workload: Workload, stages: Stages, samples: int) -> None:
        self._workload, self._stages, self._received = workload, stages, stages.between(samples, "cpu")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run a microbatch through each stage."""
        total = torch.zeros(())
        for stage, module in self._stages.modules.items():
            output = module(*((self._workload.model_input(batch),) if stage == 0 else self._received))
            if stage == self._stages.total - 1:
                total = total + self._workload.loss(_Output(output, training=True), batch)
            else:
                total = total + sum(each.sum() for each in output)
        return total


class _Output(nn.Module):
    """Stands for the whole model in a workload's loss, where the last stage has computed the output already."""

    def __init__(self, output: Any, *, training: bool) -> None:
        super().__init__()
        self._output = output
        self.train(training)

    def forward(self, _: Tensor) -> Any:
        return self._output


class Pipeline:
    """Trains and evaluates with the stages of this rank, by torch's schedules. All ranks of the pipeline call it."""

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        microbatches: int,
        device: torch.device,
        autocast: Autocast = nullcontext,
        add: Add = lambda kind, size: None,
    ) -> None:
        stages = stages_of(model)
        assert stages is not None
        self._workload, self._stages, self._microbatches, self._device = workload, stages, microbatches, device
        self._autocast, self._add = autocast, add
        self._made: dict[tuple[int, bool], tuple[_PipelineSchedule, list[_TimedStage]]] = {}
        self._parts: list[Batch] = []  # the microbatches of the current batch
        self._found: list[dict[str, Tensor]] = []  # statistics of an evaluation

    def step(self, batch: Batch) -> tuple[Tensor, float]:
        """Run forward and backward passes of all microbatches.

        Returns the loss, so that its mean over all ranks is that of the batch: 0 on ranks without the last stage. Also
        returns the seconds in which this rank did not compute.
        """
        schedule, stages = self._schedule(batch, training=True)
        losses: list[Tensor] = []
        begin, busy = time.perf_counter(), sum(stage.busy_s for stage in stages)
        self._run(schedule, stages, batch, losses)
        waited = time.perf_counter() - begin - (sum(stage.busy_s for stage in stages) - busy)
        self._average_gradients()
        total = sum((each.detach() for each in losses), torch.zeros((), device=self._device))
        return total * self._stages.axis.size, waited

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the workload's statistics of a batch; empty on ranks without the last stage."""
        self._found = []
        self._run(*self._schedule(batch, training=False), batch, None)
        names = self._found[0] if self._found else {}
        return {name: torch.stack([each[name] for each in self._found]).sum() for name in names}

    def _run(
        self, schedule: _PipelineSchedule, stages: list[_TimedStage], batch: Batch, losses: list[Tensor] | None
    ) -> None:
        count = schedule._n_microbatches
        chunks = {name: torch.tensor_split(values, count) for name, values in batch.items()}
        self._parts = [{name: values[part] for name, values in chunks.items()} for part in range(count)]
        given = (self._workload.model_input(batch),) if any(stage.is_first for stage in stages) else ()
        run = schedule.step if losses is not None else schedule.eval
        run(*given, target=torch.arange(count), losses=losses, return_outputs=False)

    def _finish(self, output: Any, part: Tensor, *, training: bool) -> Tensor:
        """Compute the loss of a microbatch, or in an evaluation its statistics. Called by torch for the last stage."""
        model, batch = _Output(output, training=training), self._parts[int(part)]
        if training:
            with self._autocast():
                return self._workload.loss(model, batch) / len(self._parts)
        self._found.append(self._workload.eval_stats(model, batch))
        return torch.zeros(())

    def _average_gradients(self) -> None:
        """Average the gradients over the ranks that have the same stages, in one all-reduce per stage.

        Those of shards are averages already.
        """
        replicas = self._stages.replicas
        for module in self._stages.modules.values() if replicas.size > 1 else ():
            gradients = [each.grad for each in module.parameters() if each.grad is not None and each is local(each)]
            if not gradients:
                continue
            flat = torch.cat([each.reshape(-1) for each in gradients])
            dist.all_reduce(flat, group=replicas.group)
            parts = torch.split(flat / replicas.size, [each.numel() for each in gradients])
            for each, mean in zip(gradients, parts, strict=True):
                each.copy_(mean.view_as(each))

    def _schedule(self, batch: Batch, *, training: bool) -> tuple[_PipelineSchedule, list[_TimedStage]]:
        """Return torch's schedule for batches of this size: it fixes the shapes of what stages send."""
        samples, name = len(next(iter(batch.values()))), self._stages.plan.schedule
        if (samples, training) in self._made:
            return self._made[samples, training]
        parts = self._microbatches
        if not training:  # as many as there are ranks, or fewer: every schedule takes these
            parts = max(n for n in range(1, min(samples, self._stages.axis.size) + 1) if samples % n == 0)
            name = "GPipe" if name in SINGLE_STAGE else name
        given = self._stages.between(samples // parts)
        stages = []
        for stage, module in self._stages.modules.items():
            group = self._stages.axis.group
            taken = given if stage > 0 else self._workload.model_input(batch)[: samples // parts].to("meta")
            stages.append(_TimedStage(module, stage, self._stages.total, self._device, taken, given, group=group))
            stages[-1].autocast, stages[-1].add = self._autocast, self._add
        schedule = get_schedule_class(name)(
            stages[0] if name in SINGLE_STAGE else stages,
            parts,
            partial(self._finish, training=training),
            scale_grads=False,
        )
        self._made[samples, training] = schedule, stages
        return schedule, stages
