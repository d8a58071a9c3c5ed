"""Applies a plan to a model, in this order: check, split samples, recompute. Data parallelism comes last (`data.wrap`).

`read_setting` finds the plan of a configuration before anything is built; `apply` changes the model. Without a plan every rank
is a group of its own and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.config import RunConfig
from suite.descriptor import Descriptor
from suite.errors import InputError
from suite.training.parallel.exchange import Axis, Note
from suite.training.parallel.mesh import SPATIAL, Interval, Mesh, parse_mesh, part_of
from suite.training.parallel.plan import SAMPLE, ParallelPlan, extents_of, find_plan, read_plan
from suite.training.parallel.recompute import recompute_blocks
from suite.training.parallel.spatial import Split, Trace, check_extents, split_model, trace
from suite.workload import Workload, load_workload
from suite.world import World

DTYPES = {"int16": torch.int16, "uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32}
Slabs = Mapping[str, tuple[Interval, ...]]


@dataclass(frozen=True)
class Parallel:
    """How a run's ranks share its work. ``plan`` None: every rank trains on samples of its own."""

    mesh: Mesh
    plan: ParallelPlan | None = None
    name: str = ""
    sha256: str = ""
    extents: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(config: RunConfig, descriptor: Descriptor, rank: int, ranks: int) -> Parallel:
        """Read the plan of a configuration. InputError if it is damaged, or does not fit the configuration or the ranks."""
        if config.plan is None:
            if config.mesh is not None:
                raise InputError(f"--mesh {config.mesh}: a mesh needs a plan: expected --plan NAME")
            return Parallel(Mesh(rank, ranks))
        path = find_plan(descriptor, config.plan)
        plan, sha256 = read_plan(path)
        mesh = parse_mesh(config.mesh or plan.mesh, plan.split, rank=rank, ranks=ranks)
        if mesh.parts > 1 and config.compile:
            raise InputError("plan: a split sample cannot be compiled: expected compile=false")
        return Parallel(mesh, plan, path.stem, sha256, extents_of(plan, config))

    @property
    def is_split(self) -> bool:
        """True if several ranks share a sample."""
        return self.mesh.parts > 1

    @property
    def counts(self) -> bool:
        """True on the one rank of a group whose evaluation counts."""
        return self.mesh.part == 0

    @property
    def loss_factor(self) -> float:
        """The factor of this rank's loss, so that the mean over all ranks is the loss of the whole batch."""
        if self.plan is None or self.plan.loss == "whole" or not self.is_split:
            return 1.0
        held = whole = 1
        for (low, high), name in zip(self._parts(), self.plan.split, strict=True):
            held, whole = held * (high - low), whole * self.extents[name]
        return held * self.mesh.parts / whole

    def slabs(self, *, evaluation: bool) -> Slabs:
        """Of each input that is split, the positions of this rank in every dimension but the sample's."""
        if self.plan is None or not self.is_split:
            return {}
        parts = dict(zip(self.plan.split, self._parts(), strict=True))
        return {
            name: tuple(parts.get(each, (0, self.extents[each])) for each in given.dims[1:])
            for name, given in self.plan.inputs.items()
            if parts.keys() & set(given.dims) and not (evaluation and given.evaluation == "whole")
        }

    def shapes(self, samples: int, *, split: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each input of a batch: of this rank, or of the whole sample."""
        assert self.plan is not None
        slabs = self.slabs(evaluation=False) if split else {}
        found = {}
        for name, given in self.plan.inputs.items():
            whole = tuple(samples if each == SAMPLE else self.extents[each] for each in given.dims)
            shape = (samples, *(high - low for low, high in slabs[name])) if name in slabs else whole
            found[name] = (shape, DTYPES[given.dtype])
        return found

    def logged(self) -> dict[str, Any]:
        """The plan as the log has it."""
        assert self.plan is not None
        content = self.plan.model_dump(mode="json", exclude={"description", "version", "mesh"})
        sizes = {"data": self.mesh.data_size, SPATIAL: list(self.mesh.spatial)}
        return {"name": self.name, "sha256": self.sha256, "mesh": sizes, **content}

    def _parts(self) -> list[Interval]:
        assert self.plan is not None
        shares = zip(self.plan.split, self.mesh.spatial, self.mesh.place, strict=True)
        return [part_of(self.extents[name], parts, place) for name, parts, place in shares]


def check_parameters_placed(plan: ParallelPlan, names: list[str]) -> None:
    """InputError unless each parameter is matched by exactly one pattern, and each pattern matches one. It says what to write."""
    patterns = plan.parameters
    for name in names:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if not matching:
            head = name.rpartition(".")[0]
            raise InputError(
                f"plan: parameter {name!r} is matched by no pattern: add '{head}.*: replicate' to parameters"
            )
        if len(matching) > 1:
            raise InputError(
                f"plan: parameter {name!r} is matched by {' and '.join(map(repr, matching))}: narrow one of the patterns"
            )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"plan: pattern {pattern!r} of parameters matches no parameter: remove it, or correct it")


def check_model(parallel: Parallel, model: nn.Module, workload: Workload) -> None:
    """InputError if a plan does not fit a model: parameters, boundaries, blocks, shares that the workload makes itself."""
    plan = parallel.plan
    assert plan is not None
    check_parameters_placed(plan, [name for name, _ in model.named_parameters()])
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
    if parallel.is_split and workload.sharded_parameters(model):
        raise InputError(
            "plan: a workload that spreads experts over ranks cannot split samples: leave spatial out of --mesh"
        )


def build_on_meta(descriptor: Descriptor, config: RunConfig) -> tuple[Workload, nn.Module]:
    """The workload and its unsplit model on meta tensors. Draws no random number and allocates nothing."""
    from suite.transport import Alone

    workload: Workload = load_workload(descriptor)(config)
    alone = World("plan", 0, 1, 0, 1, 0, 1, ("plan",), Alone(), Alone())
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return workload, workload.build_model(alone)


def batch_on_meta(parallel: Parallel, samples: int, *, split: bool) -> dict[str, Tensor]:
    """A batch of meta tensors."""
    shapes = parallel.shapes(samples, split=split)
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}


def apply(
    parallel: Parallel,
    model: nn.Module,
    workload: Workload,
    unsplit: Callable[[], nn.Module],
    *,
    note: Note | None = None,
) -> None:
    """Apply a plan to a model that is not wrapped yet. All ranks call it; torch.distributed must be set up, unless on meta.

    ``unsplit`` builds the same model on meta tensors; ``note`` gets what would be sent on meta.
    """
    plan = parallel.plan
    if plan is None:
        return
    check_model(parallel, model, workload)
    if parallel.is_split:
        found = trace_unsplit(parallel, unsplit())
        check_extents(found, parallel.mesh.spatial, plan.split)
        split_model(model, found, _split(parallel, note), plan.boundaries)
    recompute_blocks(model, plan.recompute)


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
    every = sorted({tuple(members(Mesh(rank, mesh.size, mesh.spatial))) for rank in range(mesh.size)})
    groups = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return Axis(name, mine.index(mesh.rank), len(mine), groups[mine])
