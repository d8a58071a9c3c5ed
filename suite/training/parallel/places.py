"""Says where a rank's values lie in a whole tensor, what two such places share, and the parts of split parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from suite.training.parallel.exchange import Axis

SLICES = "_mlhpc_slices"  # what a module with split parameters has beside its own attributes


@dataclass(frozen=True)
class Place:
    """``count`` runs of ``run`` values in storage order, the first at ``first``, each ``stride`` after the one before."""

    first: int
    run: int
    stride: int
    count: int

    @staticmethod
    def of_range(begin: int, end: int) -> Place:
        """A range of values."""
        return Place(begin, end - begin, max(1, end - begin), 1)

    @property
    def values(self) -> int:
        """How many there are."""
        return self.run * self.count

    def of(self, whole: Tensor) -> Tensor:
        """These values of a whole tensor, as a vector."""
        flat = whole.reshape(-1)
        return flat.as_strided((self.count, self.run), (self.stride, 1), flat.storage_offset() + self.first).reshape(-1)

    def copy(self, mine: Tensor, there: Place, theirs: Tensor) -> int:
        """Copy into ``mine``, the values here, those of ``theirs``, the values there, that are the same.

        Returns how many.
        """
        if (self.stride, self.count) == (there.stride, there.count) and self.count > 1 and self._aligned(there):
            low, high = max(self.first, there.first), min(self.first + self.run, there.first + there.run)
            if high <= low:
                return 0
            rows, columns = mine.view(self.count, -1), theirs.view(self.count, -1)
            rows[:, low - self.first : high - self.first] = columns[:, low - there.first : high - there.first]
            return (high - low) * self.count
        copied = 0
        for i in range(self.count):
            begin = self.first + i * self.stride
            j = max(0, (begin - there.first - there.run) // there.stride)
            while j < there.count and (other := there.first + j * there.stride) < begin + self.run:
                low, high = max(begin, other), min(begin + self.run, other + there.run)
                if high > low:
                    at, source = i * self.run - begin, j * there.run - other
                    mine[at + low : at + high] = theirs[source + low : source + high]
                    copied += high - low
                j += 1
        return copied

    def _aligned(self, other: Place) -> bool:
        """True if the runs of both lie in the same rows of ``stride`` values."""
        return max(self.first + self.run, other.first + other.run) <= self.stride


@dataclass(frozen=True, eq=False)
class Slice:
    """This rank's part of a parameter of ``shape``: ``low`` to ``high`` of dimension 1 of its view (outer, extent,
    inner).

    ``after_sum``: what is read is the whole with zeros in place of other ranks' parts.
    """

    shape: torch.Size
    dimension: int
    outer: int
    extent: int
    inner: int
    low: int
    high: int
    axis: Axis
    twin: int  # this rank's number among those with the same part
    after_sum: bool = False

    def __deepcopy__(self, memo: object) -> Slice:
        return self

    def of(self, whole: Tensor) -> Tensor:
        """These values of the whole parameter."""
        shape = list(self.shape)
        shape[self.dimension] = shape[self.dimension] // self.extent * (self.high - self.low)
        return whole.reshape(self.outer, self.extent, self.inner)[:, self.low : self.high].reshape(shape)

    @property
    def place(self) -> Place:
        """Return where these values lie in the whole parameter."""
        run, stride = (self.high - self.low) * self.inner, self.extent * self.inner
        return Place(self.low * self.inner, run, stride, self.outer)

    def whole(self, mine: Tensor) -> Tensor:
        """Gather all ranks' parts; every rank of the axis calls it."""
        every = torch.cat(self.axis.all_gather(mine.reshape(-1))).view(self.axis.size, self.outer, -1, self.inner)
        return every.transpose(0, 1).reshape(self.shape)


def slices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Slice]]:
    """Name, this rank's part and its slice of each split parameter, in the model's order."""
    for path, module in model.named_modules():
        for name, part in vars(module).get(SLICES, {}).items():
            parameter = module._parameters[name]
            assert parameter is not None
            yield f"{path}.{name}" if path else name, parameter, part
