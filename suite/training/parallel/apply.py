"""Applies a plan to a model, in this order: check, recompute, the axis whose ranks share samples, split states; `wrap`
comes last.

`mlhpc.suite.training.parallel.parallel_dims` has the plan of a configuration before anything is built; `build` makes
the model and `apply` changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.exchange import Axis, Note
from mlhpc.suite.training.parallel.fsdp import shard_states
from mlhpc.suite.training.parallel.layout import slices
from mlhpc.suite.training.parallel.mesh import EXPERT, PIPELINE, SHARD, Mesh
from mlhpc.suite.training.parallel.meta_init import build_deferred, build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel, SampleAxis, find_axis, placements
from mlhpc.suite.training.parallel.plan import ParallelPlan, Placement, is_spread
from mlhpc.suite.training.parallel.recompute import recompute_blocks
from mlhpc.suite.workload import ExpertSpread, Workload
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS = "replicas"  # the ranks that hold the same states


def check_model(parallel: Parallel, model: nn.Module, workload: Workload) -> None:
    """InputError if a plan does not fit a model: parameters, boundaries, blocks, the workload's own shares."""
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
    others = parallel.is_sharded or parallel.is_split or plan.recompute or plan.compress is not None
    if others and workload.offloads:
        raise InputError("plan: with hyperparameters.moe.offload it may have the axes data and expert alone")
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
    axis: SampleAxis | None = None,
) -> None:
    """Apply a plan to a model that is not wrapped yet. All ranks call it; torch.distributed must be set up, unless on
    meta.

    ``unsplit`` builds the same model on meta tensors; ``note`` gets what would be sent on meta; ``axis``: the one
    whose ranks share samples, if it is known.
    """
    plan = parallel.plan
    if plan is None:
        return
    check_model(parallel, model, workload)
    where = placements(plan, [name for name, _ in model.named_parameters()])
    recompute_blocks(model, plan.recompute)
    (axis or find_axis(parallel.mesh)).apply(parallel, model, workload, unsplit, note)
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
        shard = make_axis(mesh, SHARD, lambda each: each.holders, note)
        replicas = make_axis(mesh, REPLICAS, lambda each: each.replicas, note)
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


def make_axis(mesh: Mesh, name: str, members: Callable[[Mesh], Iterable[int]], note: Note | None) -> Axis:
    """One axis of this rank. Every rank makes every group, as torch.distributed wants it."""
    mine = tuple(members(mesh))
    if note is not None:
        return Axis(name, mine.index(mesh.rank), len(mine), None, note)
    every = sorted({tuple(members(replace(mesh, rank=rank))) for rank in range(mesh.size)})
    groups = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return Axis(name, mine.index(mesh.rank), len(mine), groups[mine])
