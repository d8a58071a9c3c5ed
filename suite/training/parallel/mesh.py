"""The mesh of ranks and who holds which part of a dimension: integers only, no torch and no communication.

Ranks are numbered with the data axis outermost, then the shard and the expert axis; innermost are the pipeline, the
tensor or the axial axis, or the spatial dimensions, the last one first. So the ranks that share a sample are
consecutive, and those that share experts have one number in consecutive groups of such ranks. Part i of n positions
over p ranks is [i n / p, (i + 1) n / p), rounded down: parts differ by at most one position.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from mlhpc.suite.errors import InputError, explain_unknown_name

Interval = tuple[int, int]  # first position, one past the last
DATA, SHARD, EXPERT, TENSOR, SPATIAL, AXIAL = "data", "shard", "expert", "tensor", "spatial", "axial"
PIPELINE = "pipeline"
AXES = (DATA, SHARD, EXPERT, TENSOR, SPATIAL, AXIAL, PIPELINE)


@dataclass(frozen=True)
class Mesh:
    """The place of one rank of ``size``. ``spatial``: parts of each split dimension; empty if samples are not split.

    ``shard``: ranks with different samples that hold the states of the model together; 1 if each has all. ``tensor``:
    ranks that share samples and divide the products of the model; ``axial``: that have some rows of the model's maps
    each. ``expert``: ranks with different samples that share the experts, or their parts of one number; 0: the axis is
    not named, and the workload says. ``pipeline``: ranks that share samples and have stages of the model each.
    """

    rank: int
    size: int
    spatial: tuple[int, ...] = ()
    shard: int = 1
    tensor: int = 1
    expert: int = 0
    axial: int = 1
    pipeline: int = 1

    @property
    def parts(self) -> int:
        """Ranks that share one sample."""
        return math.prod(self.spatial) * self.tensor * self.axial * self.pipeline

    @property
    def sample_axis(self) -> str:
        """The axis whose ranks share samples; empty if none do."""
        sizes = {SPATIAL: math.prod(self.spatial), TENSOR: self.tensor, AXIAL: self.axial, PIPELINE: self.pipeline}
        return next((name for name, n in sizes.items() if n > 1), "")

    @property
    def data_size(self) -> int:
        """Groups of ranks that train on different samples."""
        return self.size // self.parts

    @property
    def copies(self) -> int:
        """The size of the data axis: groups of ranks that hold the whole model."""
        return self.data_size // self.shard // max(1, self.expert)

    @property
    def data_rank(self) -> int:
        """The number of this rank's group."""
        return self.rank // self.parts

    @property
    def piece(self) -> int:
        """This rank's number among the ranks that hold the states together."""
        return self.data_rank // max(1, self.expert) % self.shard

    @property
    def holders(self) -> list[int]:
        """The ranks that hold the states together with this one, by piece."""
        stride = self.parts * max(1, self.expert)
        first = self.rank - self.piece * stride
        return [first + piece * stride for piece in range(self.shard)]

    @property
    def replicas(self) -> list[int]:
        """The ranks that hold the same piece of the states as this one: of a pipeline those with the same stages."""
        stride = self.parts * max(1, self.expert)
        alike = range(self.part, self.size, self.parts) if self.pipeline > 1 else range(self.size)
        return [rank for rank in alike if rank // stride % self.shard == self.piece]

    @property
    def twins(self) -> range:
        """The ranks that hold the same parts of split products as this one."""
        return range(self.part, self.size, self.parts)

    @property
    def part(self) -> int:
        """This rank's number among the ranks that share its samples."""
        return self.rank % self.parts

    @property
    def place(self) -> tuple[int, ...]:
        """This rank's part of each split dimension."""
        return list(product(*map(range, self.spatial)))[self.part // (self.tensor * self.axial * self.pipeline)]

    @property
    def group(self) -> range:
        """The ranks that share this rank's samples."""
        return range(self.data_rank * self.parts, (self.data_rank + 1) * self.parts)

    def line(self, dimension: int) -> list[int]:
        """The ranks that differ from this one in their part of one split dimension only, by part."""
        stride = math.prod(self.spatial[dimension + 1 :])
        first = self.rank - self.place[dimension] * stride
        return [first + part * stride for part in range(self.spatial[dimension])]

    def text(self) -> str:
        """The mesh as `parse_mesh` reads it."""
        shard = f",{SHARD}={self.shard}" if self.shard > 1 else ""
        expert = f",{EXPERT}={self.expert}" if self.expert else ""
        tensor = f",{TENSOR}={self.tensor}" if self.tensor > 1 else ""
        spatial = f",{SPATIAL}={'x'.join(map(str, self.spatial))}" if self.spatial else ""
        axial = f",{AXIAL}={self.axial}" if self.axial > 1 else ""
        pipeline = f",{PIPELINE}={self.pipeline}" if self.pipeline > 1 else ""
        return f"{DATA}={self.copies}{shard}{expert}{pipeline}{tensor}{spatial}{axial}"


def parse_mesh(text: str, split: Sequence[str], *, rank: int, ranks: int) -> Mesh:
    """Parse ``data=2,spatial=2x2x1`` for ``ranks`` ranks whose plan splits these dimensions. An axis that is left out
    has the rest.

    InputError says what does not fit.
    """
    sizes = _sizes(text)
    spatial: tuple[int, ...] = ()
    if SPATIAL in sizes:
        if len(sizes[SPATIAL]) != len(split):
            names = "x".join(name.upper() for name in split) or "none"
            raise InputError(
                f"--mesh {text}: spatial has {len(sizes[SPATIAL])} numbers, the plan splits {len(split)} dimensions: "
                f"expected {names}"
                if split
                else f"--mesh {text}: the plan splits no dimension: leave spatial out"
            )
        spatial = sizes[SPATIAL]
    for name in (DATA, SHARD, EXPERT, PIPELINE, TENSOR, AXIAL):
        if len(sizes.get(name, (1,))) != 1:
            raise InputError(f"--mesh {text}: {name} is one number, for example {name}=2")
    shard = sizes.get(SHARD, (1,))[0]
    tensor = sizes.get(TENSOR, (1,))[0]
    axial = sizes.get(AXIAL, (1,))[0]
    expert = sizes.get(EXPERT, (0,))[0]
    pipeline = sizes.get(PIPELINE, (1,))[0]
    divided = ((TENSOR, tensor), (AXIAL, axial), (SPATIAL, math.prod(spatial)), (PIPELINE, pipeline))
    ways = [name for name, n in divided if n > 1]
    if len(ways) > 1:
        raise InputError(f"--mesh {text}: {' and '.join(ways[:2])} cannot be combined: give one of them")
    if expert > 1 and ways and tensor == 1:
        raise InputError(f"--mesh {text}: {EXPERT} and {ways[0]} cannot be combined: give one of them")
    parts = math.prod(spatial) * shard * tensor * axial * pipeline * max(1, expert)
    data = sizes[DATA][0] if DATA in sizes else ranks // parts
    if data * parts != ranks:
        fitting = f"data={ranks // parts}" if ranks % parts == 0 else f"a multiple of {parts} ranks"
        raise InputError(f"--mesh {text}: {max(data, 1) * parts} ranks, the run has {ranks}; expected {fitting}")
    return Mesh(rank, ranks, spatial, shard, tensor, expert, axial, pipeline)


def ranks_of(text: str, *, rest: int) -> int:
    """The ranks that a mesh names, with a data axis of ``rest`` if it names none."""
    sizes = {DATA: (rest,)} | _sizes(text)
    return math.prod(math.prod(each) for each in sizes.values())


def _sizes(text: str) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.strip().partition("=")
        if not equals:
            raise InputError(
                f"--mesh {text}: {item!r}: expected AXIS=N, separated by commas, for example data=2,spatial=2x2x1; "
                f"axes: {', '.join(AXES)}"
            )
        if name not in AXES:
            raise InputError(f"--mesh {text}: {explain_unknown_name('axis', name, AXES)}")
        if name in sizes:
            raise InputError(f"--mesh {text}: axis {name!r} is given twice")
        if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6})*", value):
            raise InputError(
                f"--mesh {text}: {name}={value}: expected positive numbers, for example data=2,spatial=2x2x1"
            )
        sizes[name] = tuple(map(int, value.split("x")))
    return sizes


def part_of(n: int, parts: int, index: int) -> Interval:
    """The positions of part ``index`` of ``n`` positions."""
    return index * n // parts, (index + 1) * n // parts
