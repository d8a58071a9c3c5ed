"""What each axis whose ranks share samples does to a model: the entry points of the group `mlhpc.axes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mlhpc.plugins.axes.axial import run_to_ends, split_axes
from mlhpc.plugins.axes.spatial import Split, Trace, check_extents, split_model, trace
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_error
from mlhpc.suite.training.parallel.apply import REPLICAS, make_axis
from mlhpc.suite.training.parallel.exchange import Axis, Note
from mlhpc.suite.training.parallel.mesh import AXIAL, PIPELINE, SPATIAL, TENSOR, Mesh
from mlhpc.suite.training.parallel.parallel_dims import Parallel, SampleAxis, placements
from mlhpc.suite.training.parallel.plan import SAMPLE
from mlhpc.suite.workload import Workload

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mlhpc.plugins.axes.pipeline import Pipeline
    from mlhpc.suite.training.loop import Trainer

TWINS = "twins"  # the ranks that hold the same parts of split products


class SpatialAxis(SampleAxis):
    """Each rank has a part of the split dimensions. ``traced``: the extents at the layers, if they are known."""

    def __init__(self, traced: Trace | None = None) -> None:
        self._traced = traced

    def apply(
        self,
        parallel: Parallel,
        model: nn.Module,
        workload: Workload,
        unsplit: Callable[[], nn.Module],
        note: Note | None,
    ) -> None:
        """Give layers the positions that they need from other ranks."""
        plan = parallel.plan
        assert plan is not None
        with explained():
            found = self._traced or trace_unsplit(parallel, unsplit())
        check_extents(found, parallel.mesh.spatial, plan.split)
        if note is None:
            _check_forward(parallel, unsplit(), found)
        split_model(model, found, _split(parallel, note), plan.boundaries)


class AxialAxis(SampleAxis):
    """Each rank has some rows of the model's maps."""

    def apply(
        self,
        parallel: Parallel,
        model: nn.Module,
        workload: Workload,
        unsplit: Callable[[], nn.Module],
        note: Note | None,
    ) -> None:
        """Let operands be turned, gathered and cut."""
        assert parallel.plan is not None
        assert parallel.plan.axial is not None
        if note is None:
            _check_rows(parallel, unsplit())
        axis = make_axis(parallel.mesh, AXIAL, lambda each: each.group, note)
        split_axes(model, parallel.plan.axial, parallel.extents, axis)


class TensorAxis(SampleAxis):
    """Each rank computes a part of the model's products."""

    def apply(
        self,
        parallel: Parallel,
        model: nn.Module,
        workload: Workload,
        unsplit: Callable[[], nn.Module],
        note: Note | None,
    ) -> None:
        """Put this rank's parts in the place of parameters."""
        # Loads torch's DTensors, in a second
        from mlhpc.plugins.axes.tensor_parallel import split_products, sum_over_twins

        plan, mesh = parallel.plan, parallel.mesh
        assert plan is not None
        assert plan.tensor is not None
        where = placements(plan, [name for name, _ in model.named_parameters()])
        cuts = {name: cut for name, cut in where.items() if not isinstance(cut, str)}
        axis, twins, tensor_mesh = make_tensor_axes(mesh, next(model.parameters()).device, note)
        split_products(model, plan.tensor, cuts, parallel.extents, axis, mesh.data_rank, tensor_mesh)
        sum_over_twins(model, twins, mesh.size, workload.sharded_parameters(model))


class PipelineAxis(SampleAxis):
    """Each rank has some blocks of the model."""

    def apply(
        self,
        parallel: Parallel,
        model: nn.Module,
        workload: Workload,
        unsplit: Callable[[], nn.Module],
        note: Note | None,
    ) -> None:
        """Take from the model what is of other ranks."""
        from mlhpc.plugins.axes.pipeline import divide  # loads torch's pipelines, in seconds

        axis = make_axis(parallel.mesh, PIPELINE, lambda each: each.group, note)
        replicas = make_axis(parallel.mesh, REPLICAS, lambda each: each.twins, note)
        divide(model, parallel, axis, replicas)
        workload.spread = replace(workload.spread, size=replicas.size, replicas=replicas.group)

    def make_passes(self, trainer: Trainer) -> Pipeline:
        """Return what runs the stages of this rank."""
        from mlhpc.plugins.axes.pipeline import Pipeline
        from mlhpc.suite.training.loop import make_autocast

        config, state = trainer.config, trainer.state
        if state.optimization.clip_norm is not None:
            raise InputError("plan: stages of a pipeline do not clip gradients: leave pipeline out of --mesh")
        autocast = partial(make_autocast, config, trainer.device)
        parts = config.gradient_accumulation_steps
        return Pipeline(trainer.workload, state.model, parts, trainer.device, autocast, trainer.ledger.add)


def make_tensor_axes(mesh: Mesh, device: torch.device, note: Note | None) -> tuple[Axis, Axis, DeviceMesh]:
    """The ranks that share samples, those that hold the same parts of products, and torch's mesh of the former.

    With ``note`` torch.distributed has the ranks of the former alone, which send nothing (`pretended_ranks`).
    """
    from torch.distributed.device_mesh import DeviceMesh

    if note is not None:
        with unset_fake_temporarily():
            device_mesh = DeviceMesh("cpu", list(range(mesh.tensor)), mesh_dim_names=(TENSOR,))
        tensor = make_axis(mesh, TENSOR, lambda each: each.group, note)
        return tensor, make_axis(mesh, TWINS, lambda each: each.twins, note), device_mesh
    groups = [list(replace(mesh, rank=first).group) for first in range(0, mesh.size, mesh.parts)]
    device_mesh = DeviceMesh(device.type, groups, mesh_dim_names=(TWINS, TENSOR))
    return (
        Axis(TENSOR, mesh.part, mesh.tensor, device_mesh.get_group(TENSOR)),
        Axis(TWINS, mesh.data_rank, mesh.data_size, device_mesh.get_group(TWINS)),
        device_mesh[TENSOR],
    )


@contextmanager
def explained() -> Iterator[None]:
    """Turn an error of the model on tensors that a plan describes into InputError."""
    try:
        yield
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(
            f"plan: the model cannot take what extents, dims and boundaries describe: {render_error(error)}"
        ) from None


def _check_forward(parallel: Parallel, model: nn.Module, found: Trace) -> None:
    """Run a split model on meta tensors, before anything is sent. InputError if its parts do not fit together."""
    plan = parallel.plan
    assert plan is not None
    split_model(model, found, _split(parallel, lambda *_: None), plan.boundaries)
    batch = make_batch(parallel, 1, split=True, device="meta")
    with explained():
        model.eval()(batch[next(iter(plan.inputs))])


def _check_rows(parallel: Parallel, model: nn.Module) -> None:
    """Run a model with split rows on meta tensors, before anything is sent.

    InputError if operands do not lie as the plan says.
    """
    plan = parallel.plan
    assert plan is not None
    assert plan.axial is not None
    axis = make_axis(parallel.mesh, AXIAL, lambda each: each.group, lambda *_: None)
    split_axes(model, plan.axial, parallel.extents, axis)
    with explained():
        run_to_ends(model.train(), plan.axial, make_batch(parallel, 1, split=True, device="meta"))


def trace_unsplit(parallel: Parallel, model: nn.Module) -> Trace:
    """The extents at the layers of a model on meta tensors."""
    plan = parallel.plan
    assert plan is not None
    first = next(iter(plan.inputs))
    batch = make_batch(parallel, 1, split=False, device="meta")
    return trace(model.eval(), lambda whole: whole(batch[first]), plan.boundaries, plan.split)


def _split(parallel: Parallel, note: Note | None) -> Split:
    """Make the axes of this rank. With ``note`` no process groups: for meta tensors."""
    mesh, plan = parallel.mesh, parallel.plan
    assert plan is not None
    lines: list[Axis | None] = []
    for d, (name, parts) in enumerate(zip(plan.split, mesh.spatial, strict=True)):
        lines.append(None if parts == 1 else make_axis(mesh, name, partial(Mesh.line, dimension=d), note))
    group = make_axis(mesh, SPATIAL, lambda each: each.group, note)
    return Split(mesh.spatial, mesh.place, tuple(lines), group, plan.split)


def compute_shapes(parallel: Parallel, samples: int, *, split: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type, by its name in torch, of each input of a batch: of this rank, or of the whole sample.

    Where the positions of samples differ they are those of samples of the mean size.
    """
    assert parallel.plan is not None
    slabs = parallel.slabs(evaluation=False) if split else {}
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    known = {**parallel.extents, SAMPLE: samples}
    known |= {name: round(samples * each) + more for name, (each, more) in parallel.growing.items()}
    for name, given in parallel.plan.inputs.items():
        whole = tuple(known[each] for each in given.dims)
        if 0 in whole:
            continue
        shape = (samples, *(high - low for low, high in slabs[name])) if name in slabs else whole
        found[name] = (shape, given.dtype)
    return found


def make_batch(parallel: Parallel, samples: int, *, split: bool, device: str | None = None) -> dict[str, Tensor]:
    """Make a batch without values; empty if the plan does not describe one. float32 means torch's default type."""
    default = torch.get_default_dtype()
    return {
        name: torch.empty(shape, dtype=default if dtype == "float32" else getattr(torch, dtype), device=device)
        for name, (shape, dtype) in compute_shapes(parallel, samples, split=split).items()
    }
