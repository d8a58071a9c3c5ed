"""How the ranks of a run share its work under a plan: integers and names, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import load_axis
from mlhpc.suite.training.parallel.mesh import (
    AXIAL,
    DATA,
    EXPERT,
    PIPELINE,
    SHARD,
    SPATIAL,
    TENSOR,
    Interval,
    Mesh,
    parse_mesh,
    part_of,
)
from mlhpc.suite.training.parallel.plan import (
    V_SCHEDULE,
    ParallelPlan,
    Placement,
    extents_of,
    find_plan,
    growing_extents_of,
    is_spread,
    read_plan,
)
from mlhpc.suite.workload import Dataset, Slab, SlabDataset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from mlhpc.suite.training.parallel.exchange import Note
    from mlhpc.suite.workload import Batch, Workload

Slabs = Mapping[str, tuple[Interval, ...]]


@dataclass(frozen=True)
class Parallel:
    """How a run's ranks share its work. ``plan`` None: every rank trains on samples of its own."""

    mesh: Mesh
    plan: ParallelPlan | None = None
    name: str = ""
    sha256: str = ""
    extents: Mapping[str, int] = field(default_factory=dict)
    growing: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # of dimensions that grow with the samples

    @staticmethod
    def of(config: RunConfig, descriptor: Descriptor, rank: int, ranks: int) -> Parallel:
        """Read the plan of a configuration.

        InputError if it is damaged, or does not fit the configuration or the ranks.
        """
        if config.plan is None:
            if config.mesh is not None:
                raise InputError(f"--mesh {config.mesh}: a mesh needs a plan: give --plan NAME too")
            return Parallel(Mesh(rank, ranks))
        path = find_plan(descriptor, config.plan)
        plan, sha256 = read_plan(path)
        mesh = parse_mesh(config.mesh or plan.mesh, plan.split, rank=rank, ranks=ranks)
        if mesh.parts > 1 and config.compile:
            raise InputError("plan: torch.compile does not support split samples: give --set compile=false")
        if mesh.shard > 1 and config.compile:
            raise InputError("plan: torch.compile does not support sharded parameters: give --set compile=false")
        if mesh.shard > 1 and "shard" not in plan.parameters.values():
            raise InputError(f"--mesh {mesh.text()}: plan {path.stem!r} shards no parameter: leave shard out")
        if mesh.expert > 1 and not any(map(is_spread, plan.parameters.values())):
            raise InputError(
                f"--mesh {mesh.text()}: plan {path.stem!r} places no parameter on {EXPERT}: leave {EXPERT} out"
            )
        if mesh.sample_axis or plan.compress is not None:
            asked = f"--mesh {mesh.text()}" if mesh.sample_axis else "plan: compress"
            load_axis("check_mesh", asked)(plan, mesh, path.stem, descriptor)
        if mesh.parts > 1 and getattr(config.hyperparameters, "balanced_batches", False):
            raise InputError(
                "plan: batches cannot be balanced if ranks share samples: give --set"
                " hyperparameters.balanced_batches=false"
            )
        extents, growing = extents_of(plan, config), growing_extents_of(plan, config)
        return Parallel(mesh, plan, path.stem, sha256, extents, growing)

    @property
    def is_split(self) -> bool:
        """True if several ranks share a sample."""
        return self.mesh.parts > 1

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold the states of the model together."""
        return self.mesh.shard > 1

    @property
    def in_step(self) -> bool:
        """True if these ranks must take every forward pass together, evaluations too: it gathers parameters."""
        if not self.is_sharded or self.plan is None:
            return False
        reshard = self.plan.reshard_after_forward
        return bool(self.plan.fully_shard) if reshard is None else reshard

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the pipeline that this rank has. Without one there is one stage."""
        ranks, pipeline = self.mesh.pipeline, self.plan.pipeline if self.plan is not None else None
        if ranks == 1 or pipeline is None:
            return (0,)
        mine = [self.mesh.part + turn * ranks for turn in range(pipeline.stages_per_rank)]
        return (mine[0], 2 * ranks - 1 - mine[0]) if pipeline.schedule == V_SCHEDULE else tuple(mine)

    @property
    def all_stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.mesh.pipeline * len(self.stages)

    @property
    def counts(self) -> bool:
        """True on the one rank of a group whose evaluation counts: in a pipeline the one that computes the loss."""
        return self.all_stages - 1 in self.stages if self.mesh.pipeline > 1 else self.mesh.part == 0

    def with_microbatches(self, config: RunConfig) -> RunConfig:
        """The configuration in which the microbatches of a pipeline are the parts of a step.

        InputError if plan and configuration state different numbers.
        """
        pipeline = self.plan.pipeline if self.plan is not None and self.mesh.pipeline > 1 else None
        parts = config.gradient_accumulation_steps
        if pipeline is None:
            return config
        if pipeline.microbatches and parts not in (1, pipeline.microbatches):
            raise InputError(
                f"plan: {pipeline.microbatches} microbatches and gradient_accumulation_steps={parts}: both divide a"
                " step: give one of them"
            )
        parts, ranks, schedule = pipeline.microbatches or parts, self.mesh.pipeline, pipeline.schedule
        if schedule == "1F1B" and parts < ranks:
            raise InputError(
                f"plan: 1F1B of {ranks} stages needs at least {ranks} microbatches, not {parts}: raise them"
            )
        if schedule.startswith("Interleaved") and parts % max(1, parts // ranks):
            raise InputError(
                f"plan: {schedule} does not divide {parts} microbatches over {ranks} ranks: expected a multiple of"
                f" {ranks}"
            )
        return structs.replace(config, gradient_accumulation_steps=parts)

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

    def logged(self) -> dict[str, Any]:
        """The plan as the log has it."""
        assert self.plan is not None
        content = {
            key: value
            for key, value in convert_to_plain_data(self.plan).items()
            if key not in ("description", "version", "mesh")
        }
        sizes = {
            DATA: self.mesh.copies,
            SHARD: self.mesh.shard,
            TENSOR: self.mesh.tensor,
            SPATIAL: list(self.mesh.spatial),
        }
        sizes |= {EXPERT: self.mesh.expert} if self.mesh.expert else {}
        sizes |= {AXIAL: self.mesh.axial} if self.mesh.axial > 1 else {}
        sizes |= {PIPELINE: self.mesh.pipeline} if self.mesh.pipeline > 1 else {}
        engines = {SHARD: "fully_shard", TENSOR: "parallelize_module", PIPELINE: "torch.distributed.pipelining"}
        used = [name for axis, name in engines.items() if sizes.get(axis, 1) != 1]
        engine = {"engine": {"torch": version("torch"), "used": used}}
        return {"name": self.name, "sha256": self.sha256, "mesh": sizes, **engine, **content}

    def _parts(self) -> list[Interval]:
        assert self.plan is not None
        shares = zip(self.plan.split, self.mesh.spatial, self.mesh.place, strict=True)
        return [part_of(self.extents[name], parts, place) for name, parts, place in shares]


class Passes(Protocol):
    """Runs all passes of a step in place of the trainer, which wraps no model then."""

    def step(self, batch: Batch) -> tuple[Tensor, float]:
        """Return the loss, and the seconds in which this rank waited for others."""
        ...

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Return the workload's statistics of a batch; empty on ranks that have none."""
        ...


class SampleAxis:
    """What an axis whose ranks share samples does. This one does nothing: each rank has samples of its own."""

    def apply(
        self,
        parallel: Parallel,
        model: nn.Module,
        workload: Workload,
        unsplit: Callable[[], nn.Module],
        note: Note | None,
    ) -> None:
        """Change a model that is not wrapped yet; `mlhpc.suite.training.parallel.apply.apply` says how."""

    def make_passes(self, trainer: Any) -> Passes | None:
        """Return what runs the passes of a `Trainer`; None: the trainer itself."""


def find_axis(mesh: Mesh) -> SampleAxis:
    """Return the axis of a mesh whose ranks share samples: there is one at most."""
    return load_axis(mesh.sample_axis, "--mesh")() if mesh.sample_axis else SampleAxis()


def placements(plan: ParallelPlan, names: list[str]) -> dict[str, Placement]:
    """The placement of each parameter.

    InputError unless each is matched by exactly one pattern, and each pattern matches one. It says what to write.
    """
    patterns = plan.parameters
    found: dict[str, Placement] = {}
    for name in names:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if not matching:
            raise InputError(f"plan: parameter {name!r} is matched by no pattern: {_entry_for(name, plan)}")
        if len(matching) > 1:
            raise InputError(
                f"plan: parameter {name!r} is matched by {' and '.join(map(repr, matching))}: narrow one of the "
                "patterns"
            )
        found[name] = patterns[matching[0]]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"plan: pattern {pattern!r} of parameters matches no parameter: remove it, or correct it")
    return found


def _entry_for(name: str, plan: ParallelPlan) -> str:
    """The entry that a parameter lacks.

    Whole in a region whose outputs are summed, its product would count once per rank.
    """
    head = name.rpartition(".")[0]
    parents = [head[: len(head) - at] for at in range(len(head) + 1) if at == 0 or head[len(head) - at] == "."]
    for pattern in plan.tensor.regions if plan.tensor is not None else ():
        if any(fnmatchcase(parent, pattern) for parent in parents):
            return (
                f"it lies in region {pattern!r} of tensor: add '{name}: {{split: 0}}' to parameters for rows that "
                "each rank "
                "computes a part of, {split: 1} for columns that are summed, or replicate if no output of the "
                "region adds it up"
            )
    return f"add '{head}.*: replicate' to parameters"


def cut(data: Dataset, slabs: Mapping[str, Slab]) -> Dataset:
    """The data set with only these positions of its tensors. One that cannot read parts is read whole and cut."""
    return _Cut(data, slabs) if slabs else data


@dataclass(frozen=True)
class _Cut:
    data: Dataset
    slabs: Mapping[str, Slab]

    def __len__(self) -> int:
        return len(self.data)

    def load(self, indices: Sequence[int] | NDArray[np.int64], *, seed: int, epoch: int) -> Batch:
        """Load this rank's part of samples."""
        if isinstance(self.data, SlabDataset):
            return self.data.load_slab(indices, self.slabs, seed=seed, epoch=epoch)
        batch = self.data.load(indices, seed=seed, epoch=epoch)
        return {
            name: x[(slice(None), *(slice(*each) for each in self.slabs.get(name, ())))] for name, x in batch.items()
        }
