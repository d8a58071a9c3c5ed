"""The plan file: how tensors lie on a mesh of ranks. Reads and checks the file alone; loads no torch.

A plan says which dimensions of the inputs the spatial axis splits, where each parameter lies, at which boundaries of
the model parts are gathered, and what the loss of a rank is. The model knows nothing of it.
"""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import YamlSource, convert_to_plain_data
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.plugins import AXES_GROUP, find_plugins, load_axis

VERSION = 1
SAMPLE = "sample"
EXTENT = re.compile(r"(?P<name>\w+)(?P<each> \* samples)?(?: \+ (?P<more>[1-9]\d*))?")


Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
SINGLE_STAGE = ("GPipe", "1F1B")  # schedules of one stage per rank
V_SCHEDULE = "ZBVZeroBubble"  # the second half of the stages lies on the ranks in reverse order


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Input(_Part, frozen=True, kw_only=True):
    """One tensor of a batch: its dimensions by name, and its type."""

    dims: Annotated[tuple[str, ...], Meta(min_length=1)]
    dtype: Literal["int8", "int16", "uint8", "int64", "float32", "float64"]
    evaluation: Annotated[
        Literal["split", "whole"], Meta(description="whole: every rank has all of it in evaluations")
    ] = "split"


class Boundary(_Part, frozen=True, kw_only=True):
    """Where a module's input or output becomes whole again: all ranks of a group go on alike from there."""

    at: Literal["input", "output"] = "input"
    dims: Annotated[tuple[str, ...], Meta(min_length=1, description="dimensions by name; flattened ones one by one")]
    when: Literal["always", "evaluation"] = "always"


class Own(_Part, frozen=True, kw_only=True):
    """Collectives of one kind that a workload's loss makes itself, per part of a step."""

    calls: Annotated[int, Meta(gt=0)]
    bytes_per_rank: Annotated[
        int, Meta(gt=0, description="bytes that a rank gives in all of them, per rank of the run")
    ]


class Cut(_Part, frozen=True, kw_only=True, omit_defaults=True):
    """A parameter of which each rank of the tensor axis has a part of one dimension: of ``split``, or ``after`` a sum
    of the last.

    With ``after: sum`` a region adds the parameter to the sum of its ranks' products: each rank has and adds its part.
    """

    split: Annotated[int, Meta(ge=0, description="the dimension")] | None = None
    after: Literal["sum"] | None = None
    groups: Annotated[
        int, Meta(ge=1, description="equal parts of the dimension, each of which is split (q, k and v)")
    ] = 1
    units: Annotated[str, Meta(description="what is not divided, by its name under extents (heads); [positions]")] = ""
    expert: Annotated[bool, Meta(description="of the experts that a rank of the expert axis has")] = False

    def __post_init__(self) -> None:
        if (self.split is None) == (self.after is None):
            raise InputError("expected split: DIMENSION or after: sum")
        if self.after is not None and (self.groups > 1 or self.units):
            raise InputError("groups and units belong to split")


Placement = Literal["replicate", "shard", "expert"] | Cut


def is_spread(placement: Placement) -> bool:
    """True for a parameter of experts that lie on some ranks of the expert axis."""
    return placement == "expert" if isinstance(placement, str) else placement.expert


class Region(_Part, frozen=True, kw_only=True):
    """A module whose products the ranks of the tensor axis divide: its input is gathered, its output summed."""

    dims: Annotated[
        tuple[str, ...],
        Meta(description="dimensions of input and output by name; the first two may be one; none without ``along``"),
    ] = ()
    field: Annotated[str, Meta(description="of an output that is no tensor: the name of its tensor")] = ""


class TensorPlan(_Part, frozen=True, kw_only=True):
    """How the ranks of the tensor axis share a sample. Patterns are of modules; ``dims`` are dimensions by name."""

    along: Annotated[
        str,
        Meta(description="the dimension that lies in parts between regions, such as positions of a text; empty: none"),
    ] = ""
    begins: Annotated[dict[str, tuple[str, ...]], Meta(description="modules whose input is cut")] = {}
    regions: Annotated[dict[str, Region], Meta(min_length=1)]
    ends: Annotated[dict[str, tuple[str, ...]], Meta(description="modules whose output becomes whole")] = {}


class Operand(_Part, frozen=True, kw_only=True):
    """What becomes of one input or output of a module: exactly one of the five. ``dims``: its dimensions by name."""

    dims: Annotated[tuple[str, ...], Meta(min_length=1)]
    cut: Annotated[str, Meta(description="all ranks have the whole of this dimension: each keeps its part")] = ""
    gather: Annotated[
        str, Meta(description="each has a part of this dimension: all get the whole, and use it differently")
    ] = ""
    end: Annotated[str, Meta(description="the same, but all ranks go on alike from there")] = ""
    turn: Annotated[
        tuple[str, ...], Meta(max_length=2, description="from parts of the first dimension to parts of the second")
    ] = ()
    first: Annotated[
        str, Meta(description="taken from position 0 of this dimension, which the first rank has: all get it")
    ] = ""

    @property
    def way(self) -> str:
        """The one that is given."""
        return next(name for name in OPERAND_WAYS if getattr(self, name))

    @property
    def along(self) -> str:
        """The dimension that lies in parts: after a cut, before all else."""
        return self.turn[0] if self.turn else str(getattr(self, self.way))

    @property
    def to(self) -> str:
        """The dimension that lies in parts after a turn."""
        return self.turn[1]


OPERAND_WAYS = ("cut", "gather", "end", "turn", "first")


class Operands(_Part, frozen=True, kw_only=True):
    """Inputs (positional) and outputs of a module that change, by number."""

    inputs: dict[int, Operand] = {}
    outputs: dict[int, Operand] = {}


class Draw(_Part, frozen=True, kw_only=True):
    """A module that draws random numbers of its input's shape, which all ranks draw whole."""

    dims: Annotated[tuple[str, ...], Meta(min_length=1)]
    along: str


class AxialPlan(_Part, frozen=True, kw_only=True):
    """How the ranks of the axial axis share a sample. Patterns are of modules."""

    modules: Annotated[dict[str, Operands], Meta(min_length=1)]
    draws: dict[str, Draw] = {}


class PipelinePlan(_Part, frozen=True, kw_only=True):
    """How a chain of blocks is divided into stages, for torch.distributed.pipelining. Modules are named by path."""

    blocks: Annotated[str, Meta(description="the list of blocks, of which each stage has an equal, consecutive part")]
    first: Annotated[tuple[str, ...], Meta(description="modules that the first stage alone has")] = ()
    last: Annotated[tuple[str, ...], Meta(description="modules that the last stage alone has")] = ()
    between: Annotated[
        tuple[tuple[str, ...], ...],
        Meta(min_length=1, description="dimensions of each tensor that a stage gives to the next; [] for one number"),
    ]
    schedule: Annotated[Schedule, Meta(description="torch's name of the schedule")] = "1F1B"
    stages: Annotated[int, Meta(ge=1, description="stages per rank; default: 1, or 2 of an interleaved schedule")] = 0
    microbatches: Annotated[
        int, Meta(ge=1, description="parts of a step's samples; default: gradient_accumulation_steps")
    ] = 0

    @property
    def stages_per_rank(self) -> int:
        """Stages that each rank has."""
        return self.stages or (1 if self.schedule in SINGLE_STAGE else 2)


class Compression(_Part, frozen=True, kw_only=True):
    """How gradients are compressed before ranks exchange them. It changes the training: for the open division."""

    kind: Literal["fp16", "bf16", "powersgd", "top_k"]
    rank: Annotated[int, Meta(ge=1, description="powersgd: columns of the two factors of each matrix")] = 1
    part: Annotated[float, Meta(gt=0, le=1, description="top_k: part of the values that is sent")] = 0.01


Recompute = Literal["full", "selective"]


class ParallelPlan(_Part, frozen=True, kw_only=True):
    """A plan file.

    ``mesh`` is the default of ``--mesh``; ``split`` names the dimensions of ``spatial=AxBxC``, in order.
    """

    version: Literal[1]
    description: Annotated[str, Meta(min_length=1)]
    mesh: str = ""
    split: tuple[str, ...] = ()
    extents: Annotated[
        dict[str, int | str],
        Meta(
            description="positions of each dimension, or HYPERPARAMETER[ * samples][ + N]; of a list: what divides all"
        ),
    ] = {}
    inputs: Annotated[dict[str, Input], Meta(description="tensors of a batch; the model's first")] = {}
    parameters: Annotated[dict[str, Placement], Meta(min_length=1, description="path pattern to placement")]
    tensor: Annotated[TensorPlan | None, Meta(description="how products are split")] = None
    axial: Annotated[AxialPlan | None, Meta(description="how rows and columns are split")] = None
    pipeline: Annotated[PipelinePlan | None, Meta(description="how blocks are divided into stages")] = None
    fully_shard: Annotated[
        tuple[str, ...],
        Meta(description="patterns of modules whose sharded parameters are gathered together; the model has the rest"),
    ] = ()
    reshard_after_forward: Annotated[
        bool | None,
        Meta(description="free gathered parameters after the forward pass; default: those of fully_shard's modules"),
    ] = None
    boundaries: dict[str, Boundary] = {}
    loss: Annotated[
        Literal["whole", "part"], Meta(description="part: a rank's loss is the mean over its positions")
    ] = "whole"
    exchanges: Annotated[
        dict[Literal["all_reduce"], Own], Meta(description="what the loss itself exchanges, by kind")
    ] = {}
    compress: Annotated[Compression | None, Meta(description="how gradients are compressed; open division only")] = None
    recompute: Annotated[dict[str, Recompute], Meta(description="path pattern of blocks to policy")] = {}


def match_module(path: str, pattern: str) -> bool:
    """True if a pattern matches a module's path. A ``*`` stands for one name between dots."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def find_plan(descriptor: Descriptor, name: str | Path) -> Path:
    """The path of a shipped plan of a workload, or of a YAML file. InputError names the shipped ones."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        return path
    shipped = sorted((descriptor.folder / "plans").glob("*.yaml"))
    for candidate in shipped:
        if candidate.stem == str(name):
            return candidate
    names = [candidate.stem for candidate in shipped]
    if not names:
        raise InputError(
            f"{descriptor.name} has no plan; expected --plan FILE.yaml with one of your own (docs/plans.md)"
        )
    raise InputError(
        f"{descriptor.name}: {explain_unknown_name('plan', str(name), names, 'or the path of a .yaml file')}"
    )


def read_plan(path: Path) -> tuple[ParallelPlan, str]:
    """Read a plan file and its SHA-256. InputError is one line with file and line."""
    source = YamlSource.read(path)
    plan = source.convert(ParallelPlan)
    for name, given in plan.inputs.items():
        lacking = [each for each in given.dims if each != SAMPLE and each not in plan.extents]
        if lacking:
            raise InputError(f"{source.where('inputs', name)}: dimension {lacking[0]!r} has no entry under extents")
        if plan.split and given.dims[0] != SAMPLE:
            raise InputError(
                f"{source.where('inputs', name)}: the first dimension is {given.dims[0]!r}: expected sample"
            )
    growing = [name for name, value in plan.extents.items() if isinstance(value, str) and "* samples" in value]
    if plan.split and growing:
        raise InputError(
            f"{source.where('extents', growing[0])}: {growing[0]!r} grows with the samples, "
            f"which a plan with split does not support: remove it"
        )
    for name in plan.split:
        if name not in plan.extents:
            raise InputError(f"{source.where('split')}: dimension {name!r} has no entry under extents")
    if len(set(plan.split)) != len(plan.split):
        raise InputError(f"{source.where('split')}: a dimension is named twice")
    if plan.split and not plan.inputs:
        raise InputError(f"{source.where('split')}: split needs a description of the inputs: add inputs")
    if (plan.fully_shard or plan.reshard_after_forward is not None) and "shard" not in plan.parameters.values():
        name = "fully_shard" if plan.fully_shard else "reshard_after_forward"
        raise InputError(f"{source.where(name)}: {name} needs a parameter placed shard: add it, or remove {name}")
    if (plan.tensor or plan.axial or plan.pipeline) and "check_plan" in find_plugins(AXES_GROUP):
        load_axis("check_plan", str(path))(plan, source)
    return plan, source.sha256


def extents_of(plan: ParallelPlan, config: RunConfig) -> dict[str, int]:
    """The positions of each dimension at the config's size, but of those that grow with the samples of a batch.

    Inputs with a dimension of no positions are in no batch. InputError for a hyperparameter that does not exist.
    """
    found = {name: _extent(plan, config, name) for name in plan.extents}
    return {name: int(number) + more for name, (number, each, more) in found.items() if not each}


def growing_extents_of(plan: ParallelPlan, config: RunConfig) -> dict[str, tuple[float, int]]:
    """Of each dimension that grows with the samples of a batch: positions per sample, the mean over samples, and how
    many more.
    """
    found = {name: _extent(plan, config, name) for name in plan.extents}
    return {name: (number, more) for name, (number, each, more) in found.items() if each}


def _extent(plan: ParallelPlan, config: RunConfig, name: str) -> tuple[float, bool, int]:
    """Positions of a dimension, whether they are those of each sample, and how many more there are."""
    value = plan.extents[name]
    number: float
    if isinstance(value, int):
        number, each, more = value, False, 0
    else:
        match = EXTENT.fullmatch(value)
        if match is None:
            raise InputError(
                f"plan: extents.{name}: {value!r}: expected a number or HYPERPARAMETER[ * samples][ + N], such as "
                "width + 1"
            )
        each, more = match["each"] is not None, int(match["more"] or 0)
        known = convert_to_plain_data(config.hyperparameters)
        known |= {key: math.gcd(*n) for key, n in known.items() if _are_integers(n)}
        kinds = (int, float) if each else (int,)
        numbers = {key: n for key, n in known.items() if isinstance(n, kinds) and not isinstance(n, bool)}
        if match["name"] not in numbers:
            raise InputError(
                f"plan: extents.{name}: {explain_unknown_name('hyperparameter', match['name'], list(numbers))}"
            )
        number = numbers[match["name"]]
    if number + more < (1 if name in plan.split else 0):
        raise InputError(f"plan: extents.{name}: {value} is {number + more}: expected at least 1")
    return number, each, more


def _are_integers(value: object) -> bool:
    """True for a list of numbers of positions, one for each stage of a model."""
    return isinstance(value, tuple | list) and bool(value) and all(type(each) is int for each in value)
