"""Applies a plan to a model, in this order: check, split samples, products or rows, recompute, split states; `wrap`
comes last.

`mlhpc.suite.training.parallel.parallel_dims` has the plan of a configuration before anything is built; `build` makes
the model and `apply` changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_error
from mlhpc.suite.training.parallel.axial import run_to_ends, split_axes
from mlhpc.suite.training.parallel.exchange import Axis, Note
from mlhpc.suite.training.parallel.fsdp import shard_states
from mlhpc.suite.training.parallel.layout import slices
from mlhpc.suite.training.parallel.mesh import AXIAL, EXPERT, PIPELINE, SHARD, SPATIAL, TENSOR, Mesh
from mlhpc.suite.training.parallel.meta_init import batch_on_meta, build_deferred, build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel, placements
from mlhpc.suite.training.parallel.plan import ParallelPlan, Placement, is_spread
from mlhpc.suite.training.parallel.recompute import recompute_blocks
from mlhpc.suite.training.parallel.spatial import Split, Trace, check_extents, split_model, trace
from mlhpc.suite.workload import ExpertSpread, Workload
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS = "replicas"  # the ranks that hold the same states
TWINS = "twins"  # the ranks that hold the same parts of split products


def check_model(parallel: Parallel, model: nn.Module, workload: Workload) -> None:
    """InputError if a plan does not fit a model: parameters, boundaries, blocks, shares that the workload makes itself."""
    plan = parallel.plan
    assert plan is not None
    placements(plan, [name for name, _ in model.named_parameters()])
    modules = [path for path, _ in model.named_modules()]
    for path, boundary in plan.boundaries.items():
        if path not in modules:
            raise InputError(f"plan: boundary {path!r} is no module of the model: correct its path")
        lacking = [name for name in plan.split if name not in boundary.dims]
        if lacking:
            raise InputError(f"plan: boundary {path!r} does not name dimension {lacking[0]!r}: add it to its dims")
    for pattern in plan.recompute:
        if not any(path and fnmatchcase(path, pattern) for path in modules):
            raise InputError(f"plan: pattern {pattern!r} of recompute matches no module: remove it, or correct it")
    shares = {id(parameter) for parameter in workload.sharded_parameters(model)}
    if parallel.is_split and shares and not (parallel.mesh.tensor > 1 and parallel.mesh.expert):
        raise InputError(
            "plan: ranks share samples, and the workload spreads experts over all ranks: add expert=N to --mesh"
            if parallel.mesh.tensor > 1
            else (
                "plan: a workload that spreads experts over ranks cannot share samples: "
                "leave spatial, axial and pipeline out of --mesh"
            )
        )
    if parallel.mesh.expert > 1:
        _check_experts(plan, {name for name, parameter in model.named_parameters() if id(parameter) in shares}, model)


def _check_experts(plan: ParallelPlan, spread: set[str], model: nn.Module) -> None:
    """InputError unless the parameters that a plan places on the expert axis are the ones the workload spreads."""
    where = placements(plan, [name for name, _ in model.named_parameters()])
    for name, way in where.items():
        if is_spread(way) and name not in spread:
            raise InputError(
                f"plan: parameter {name!r} is placed on {EXPERT} but belongs to no expert: place it otherwise"
            )
        if not is_spread(way) and name in spread:
            raise InputError(
                f"plan: parameter {name!r} is spread over the ranks of {EXPERT}: expected the placement expert"
                + (", or expert: true beside split or after" if not isinstance(way, str) else "")
            )


def build(
    parallel: Parallel,
    workload: Workload,
    descriptor: Descriptor,
    world: World,
    device: torch.device,
    seed: int,
    look: Callable[[nn.Module], None] = lambda _: None,
) -> nn.Module:
    """Build a workload's model on a device from a seed, with the plan applied. All ranks call it.

    ``look`` gets the model before that: whole, or without memory if a rank will keep rows only.
    """
    torch.manual_seed(seed)
    workload.spread = ExpertSpread(parallel.mesh.expert, world.size, parallel.mesh.tensor)
    if parallel.is_sharded and parallel.mesh.tensor == 1 and workload.initialises_by_operators:
        model, recipe = build_deferred(lambda: workload.build_model(world))
    else:
        model, recipe = workload.build_model(world), None
    model = model if recipe else model.to(device)
    look(model)
    apply(parallel, model, workload, lambda: build_on_meta(descriptor, workload.config)[1])
    if recipe is not None:
        torch.manual_seed(seed)
        recipe.fill(model, device)
    return model


def apply(
    parallel: Parallel,
    model: nn.Module,
    workload: Workload,
    unsplit: Callable[[], nn.Module],
    *,
    note: Note | None = None,
    traced: Trace | None = None,
) -> None:
    """Apply a plan to a model that is not wrapped yet. All ranks call it; torch.distributed must be set up, unless on
    meta.

    ``unsplit`` builds the same model on meta tensors; ``note`` gets what would be sent on meta; ``traced``: the
    extents at its layers, if they are known.
    """
    plan = parallel.plan
    if plan is None:
        return
    check_model(parallel, model, workload)
    if parallel.mesh.spatial and parallel.is_split:
        with explained():
            found = traced or trace_unsplit(parallel, unsplit())
        check_extents(found, parallel.mesh.spatial, plan.split)
        if note is None:
            _check_forward(parallel, unsplit(), found)
        split_model(model, found, _split(parallel, note), plan.boundaries)
    where = placements(plan, [name for name, _ in model.named_parameters()])
    if parallel.mesh.tensor > 1:
        from mlhpc.suite.training.parallel.tensor_parallel import split_products  # loads torch's DTensors, in a second

        assert plan.tensor is not None
        cuts = {name: cut for name, cut in where.items() if not isinstance(cut, str)}
        axis, twins, tensor_mesh = _tensor_axes(parallel.mesh, next(model.parameters()).device, note)
        split_products(model, plan.tensor, cuts, parallel.extents, axis, parallel.mesh.data_rank, tensor_mesh)
    if parallel.mesh.axial > 1:
        assert plan.axial is not None
        if note is None:
            _check_rows(parallel, unsplit())
        axis = _axis(parallel.mesh, AXIAL, lambda each: each.group, note)
        split_axes(model, plan.axial, parallel.extents, axis)
    recompute_blocks(model, plan.recompute)
    if parallel.mesh.pipeline > 1:
        from mlhpc.suite.training.parallel.pipeline import divide  # loads torch's pipelines, in seconds

        axis = _axis(parallel.mesh, PIPELINE, lambda each: each.group, note)
        replicas = _axis(parallel.mesh, REPLICAS, lambda each: each.twins, note)
        divide(model, parallel, axis, replicas)
        workload.spread = replace(workload.spread, size=replicas.size, replicas=replicas.group)
    if parallel.mesh.tensor > 1:
        from mlhpc.suite.training.parallel.tensor_parallel import sum_over_twins

        sum_over_twins(model, twins, parallel.mesh.size, workload.sharded_parameters(model))
    if parallel.is_sharded:
        _shard(parallel, model, workload, where, note)


def _shard(
    parallel: Parallel, model: nn.Module, workload: Workload, where: Mapping[str, Placement], note: Note | None
) -> None:
    """Split the states of parameters that are placed ``shard``, and of experts that the workload does not spread."""
    mesh, plan = parallel.mesh, parallel.plan
    assert plan is not None
    spread = {id(each) for each in workload.sharded_parameters(model)} | {id(part) for _, part, _ in slices(model)}
    parameters = dict(model.named_parameters())  # in a pipeline, of this rank's stage
    names = [name for name, each in parameters.items() if where[name] != "replicate" and id(each) not in spread]
    device_mesh = None if note is not None else _device_mesh(mesh, next(iter(parameters.values())).device)
    if device_mesh is None:
        shard = _axis(mesh, SHARD, lambda each: each.holders, note)
        replicas = _axis(mesh, REPLICAS, lambda each: each.replicas, note)
    else:
        shard = Axis(SHARD, mesh.piece, mesh.shard, device_mesh.get_group(SHARD))
        replicas = Axis(REPLICAS, mesh.replicas.index(mesh.rank), len(mesh.replicas))
    shard_states(
        model,  # also of a pipeline: with shards a rank has one stage
        names,
        plan.fully_shard,
        (shard, replicas if replicas.size > 1 else None),
        reshard=plan.reshard_after_forward,
        device_mesh=device_mesh,
        sums=_sum_type(plan),
    )


def _sum_type(plan: ParallelPlan) -> torch.dtype | None:
    """The type in which FSDP2 sums gradients; None: their own."""
    if plan.compress is None:
        return None
    return torch.float16 if plan.compress.kind == "fp16" else torch.bfloat16


def _tensor_axes(mesh: Mesh, device: torch.device, note: Note | None) -> tuple[Axis, Axis, DeviceMesh]:
    """The ranks that share samples, those that hold the same parts of products, and torch's mesh of the former.

    With ``note`` torch.distributed has the ranks of the former alone, which send nothing (`pretended_ranks`).
    """
    from torch.distributed.device_mesh import DeviceMesh

    if note is not None:
        with unset_fake_temporarily():
            device_mesh = DeviceMesh("cpu", list(range(mesh.tensor)), mesh_dim_names=(TENSOR,))
        tensor = _axis(mesh, TENSOR, lambda each: each.group, note)
        return tensor, _axis(mesh, TWINS, lambda each: each.twins, note), device_mesh
    groups = [list(replace(mesh, rank=first).group) for first in range(0, mesh.size, mesh.parts)]
    device_mesh = DeviceMesh(device.type, groups, mesh_dim_names=(TWINS, TENSOR))
    return (
        Axis(TENSOR, mesh.part, mesh.tensor, device_mesh.get_group(TENSOR)),
        Axis(TWINS, mesh.data_rank, mesh.data_size, device_mesh.get_group(TWINS)),
        device_mesh[TENSOR],
    )


def _device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The mesh of FSDP2: the ranks that hold states together, and those that hold the same ones."""
    from torch.distributed.device_mesh import DeviceMesh

    # A model on meta is built there first; its ranks train on the GPU if there is one.
    kind = device.type if device.type != "meta" else "cuda" if torch.cuda.is_available() else "cpu"
    ranks = sorted({tuple(replace(mesh, rank=rank).holders) for rank in range(mesh.size)})
    if len(mesh.replicas) == 1 and mesh.pipeline == 1:
        return DeviceMesh(kind, list(ranks[0]), mesh_dim_names=(SHARD,))
    if mesh.pipeline == 1:
        return DeviceMesh(kind, ranks, mesh_dim_names=(REPLICAS, SHARD))
    grid = torch.tensor(sorted(ranks, key=lambda each: (each[0] % mesh.parts, each)))
    every = DeviceMesh(kind, grid.view(mesh.pipeline, -1, mesh.shard), mesh_dim_names=(PIPELINE, REPLICAS, SHARD))
    return every[REPLICAS, SHARD] if len(mesh.replicas) > 1 else every[SHARD]


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
    batch = batch_on_meta(parallel, 1, split=True)
    with explained():
        model.eval()(batch[next(iter(plan.inputs))])


def _check_rows(parallel: Parallel, model: nn.Module) -> None:
    """Run a model with split rows on meta tensors, before anything is sent.

    InputError if operands do not lie as the plan says.
    """
    plan = parallel.plan
    assert plan is not None
    assert plan.axial is not None
    axis = _axis(parallel.mesh, AXIAL, lambda each: each.group, lambda *_: None)
    split_axes(model, plan.axial, parallel.extents, axis)
    with explained():
        run_to_ends(model.train(), plan.axial, batch_on_meta(parallel, 1, split=True))


def trace_unsplit(parallel: Parallel, model: nn.Module) -> Trace:
    """The extents at the layers of a model on meta tensors."""
    plan = parallel.plan
    assert plan is not None
    first = next(iter(plan.inputs))
    batch = batch_on_meta(parallel, 1, split=False)
    return trace(model.eval(), lambda whole: whole(batch[first]), plan.boundaries, plan.split)


def _split(parallel: Parallel, note: Note | None) -> Split:
    """Make the axes of this rank. With ``note`` no process groups: for meta tensors."""
    mesh, plan = parallel.mesh, parallel.plan
    assert plan is not None
    lines: list[Axis | None] = []
    for d, (name, parts) in enumerate(zip(plan.split, mesh.spatial, strict=True)):
        lines.append(None if parts == 1 else _axis(mesh, name, partial(Mesh.line, dimension=d), note))
    group = _axis(mesh, SPATIAL, lambda each: each.group, note)
    return Split(mesh.spatial, mesh.place, tuple(lines), group, plan.split)


def _axis(mesh: Mesh, name: str, members: Callable[[Mesh], Iterable[int]], note: Note | None) -> Axis:
    """One axis of this rank. Every rank makes every group, as torch.distributed wants it."""
    mine = tuple(members(mesh))
    if note is not None:
        return Axis(name, mine.index(mesh.rank), len(mine), None, note)
    every = sorted({tuple(members(replace(mesh, rank=rank))) for rank in range(mesh.size)})
    groups = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return Axis(name, mine.index(mesh.rank), len(mine), groups[mine])
