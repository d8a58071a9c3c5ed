"""Says where a rank's values lie in a whole tensor, and the parts of split parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mlhpc.suite.training.parallel.exchange import Axis

# Where a share begins in the whole tensor, in each dimension, and the shape of the whole
SharePlace = tuple[Sequence[int], Sequence[int]]
SLICES = "_mlhpc_slices"  # what a module with split parameters has beside its own attributes
STAGES = "_mlhpc_stages"  # the attribute of a model of which this rank has stages
AWAY = "_mlhpc_away"  # the attribute of a tensor without memory: the `Away` that has its values


class Away(Protocol):
    """Has the values of a tensor that has a shape and no memory (docs/offload.md)."""

    def read(self) -> Tensor:
        """Return the values."""
        ...

    def write(self, values: Tensor) -> None:
        """Replace the values."""
        ...

    def pin(self) -> Tensor:
        """Return a tensor without memory whose values stay as they are now."""
        ...

    def make_moment(self, key: str) -> Tensor:
        """Return a tensor without memory for a state of the optimizer that has a parameter's shape."""
        ...

    def gradient_norm(self) -> Tensor | None:
        """Return the L2 norm of a parameter's gradient, a number. None without a gradient."""
        ...

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply a parameter's gradient."""
        ...


def find_away(tensor: Tensor) -> Away | None:
    """Return what has a tensor's values; None for a tensor with memory."""
    return getattr(tensor, AWAY, None)


def _copy_to_host(part: Tensor) -> Tensor:
    away = find_away(part)
    return part.detach().to("cpu", copy=True) if away is None else away.pin()


Offsets = torch.Size  # of the first value of a box, in each dimension


@dataclass(frozen=True)
class Layout:
    """Where a rank's values lie in a tensor of shape ``whole``: in boxes of one size, one behind the other here.

    ``dimension``: along which they are behind each other. ``written``: this rank saves them.
    """

    whole: torch.Size
    boxes: tuple[Offsets, ...]
    written: bool
    dimension: int = 0

    @staticmethod
    def of_whole(shape: torch.Size, *, written: bool) -> Layout:
        """Return the layout of a tensor that a rank has all values of."""
        return Layout(shape, (torch.Size([0] * len(shape)),), written)

    def hold(self, mine: Tensor) -> Held:
        """Return this rank's values as a checkpoint knows them."""
        parts = mine.chunk(len(self.boxes), self.dimension) if len(self.boxes) > 1 else (mine,)
        found = {offsets: part for offsets, part in zip(self.boxes, parts, strict=True) if part.numel()}
        return Held(self.whole, found, self.written)


@dataclass(frozen=True, eq=False)
class Held:
    """This rank's values of a tensor of shape ``whole``, by the place of their boxes. Views, not copies."""

    whole: torch.Size
    parts: Mapping[Offsets, Tensor]
    written: bool = True

    def copied(self) -> Held:
        """Copy the values to host memory."""
        return Held(self.whole, {at: _copy_to_host(part) for at, part in self.parts.items()})


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

    def layout(self, share: SharePlace | None, *, written: bool) -> Layout:
        """Return where these values lie. ``share``: the parameter is itself a part, which begins there."""
        begin, whole = share or ((0,) * len(self.shape), self.shape)
        boxes = []
        for group in range(self.shape[self.dimension] // self.extent):
            offsets = list(begin)
            offsets[self.dimension] += group * self.extent + self.low
            boxes.append(torch.Size(offsets))
        return Layout(torch.Size(whole), tuple(boxes), written, self.dimension)

    def whole(self, mine: Tensor) -> Tensor:
        """Gather all ranks' parts; every rank of the axis calls it."""
        every = torch.cat(self.axis.all_gather(mine.reshape(-1))).view(self.axis.size, self.outer, -1, self.inner)
        return every.transpose(0, 1).reshape(self.shape)


def stages_of(model: nn.Module) -> Any:  # Stages of the wing axes
    """The stages of a model that is divided; None if every rank has all blocks."""
    return getattr(model, STAGES, None)


def slices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Slice]]:
    """Name, this rank's part and its slice of each split parameter, in the model's order."""
    for path, module in model.named_modules():
        for name, part in vars(module).get(SLICES, {}).items():
            parameter = module._parameters[name]
            assert parameter is not None
            yield f"{path}.{name}" if path else name, parameter, part
