"""Exchanges between the ranks of an axis. One without a process group sends nothing: what it would send is noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

Note = Callable[[str, str, int, int], None]  # axis, kind of collective, bytes that this rank gives, ranks

# torch 2.13 renamed this function and warns about the old name; torch 2.11 has only the old one. Looked up by name at
# each call, because the harness counts calls by replacing the functions of torch.distributed
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass(eq=False)
class Axis:
    """Ranks that exchange with each other, and this rank's number among them. Without ``group`` nothing is sent."""

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    note: Note = field(default=lambda *_: None)

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # a copy of a model (moving average) is on the same ranks

    def all_to_all(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Give each rank a tensor and get one of each, of the shapes that are known."""
        flat = torch.cat([each.reshape(-1) for each in given])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        got = flat.new_empty(sum(sizes))
        if self.group is None:
            self.note(self.name, "all_to_all", flat.nbytes, self.size)
        else:
            dist.all_to_all_single(got, flat, sizes, [each.numel() for each in given], group=self.group)
        return [part.view(*shape) for part, shape in zip(torch.split(got, sizes), shapes, strict=True)]

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have one shape."""
        got = [torch.empty_like(mine) for _ in range(self.size)]
        if self.group is None:
            self.note(self.name, "all_gather", mine.nbytes, self.size)
        else:
            dist.all_gather(got, mine, group=self.group)
        return got

    def scatter_sum(self, every: Tensor) -> Tensor:
        """This rank's part of the sum over ranks of a vector, which has a part for each rank."""
        mine = every.new_empty(len(every) // self.size)
        if self.group is None:
            self.note(self.name, "reduce_scatter", every.nbytes, self.size)
        else:
            getattr(dist, _REDUCE_SCATTER)(mine, every, group=self.group)
        return mine

    def sum(self, mine: Tensor) -> Tensor:
        """The sum over ranks, in a new tensor."""
        total = mine.clone(memory_format=torch.contiguous_format)
        if self.group is None:
            self.note(self.name, "all_reduce", mine.nbytes, self.size)
        else:
            dist.all_reduce(total, group=self.group)
        return total
