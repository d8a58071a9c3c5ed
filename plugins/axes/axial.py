"""Splits rows and columns of a model's maps over ranks that share samples: the axial axis.

Of a map (an alignment, a pair map) each rank has some rows. What works along rows needs nothing; what works along
columns gets its operand turned: rows whole, columns in parts, by an all-to-all. What needs an operand of all ranks gets
it gathered. A plan says so for operands of modules; hooks do it, and no name or forward pass changes. Extents are those
of the tensors, so evaluations may have others than training. Each backward pass is the exact transpose of its forward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlhpc.plugins.axes.collectives import Whole, gather
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.mesh import AXIAL, Interval, part_of
from mlhpc.suite.training.parallel.plan import AxialPlan, Operand


@dataclass(eq=False)
class Parts:
    """Which positions a rank has.

    ``extents``: the whole of each dimension, by name, as this forward pass has seen it.
    """

    axis: Axis
    extents: dict[str, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> Parts:
        return self

    def forget(self, *_: object) -> None:
        """Begin a forward pass: samples may have another length than before."""
        self.extents.clear()

    def own(self, name: str) -> Interval:
        """This rank's positions of a dimension."""
        return part_of(self.extents[name], self.axis.size, self.axis.rank)

    def know(self, name: str, n: int, where: str, *, training: bool) -> None:
        """Note the whole of a dimension. InputError if it was another one, or if ranks are left without a position."""
        known = self.extents.setdefault(name, n)
        if known != n:
            raise InputError(
                f"plan: axial: {where} has {n} positions of {name!r}, other inputs have {known}: the plan may split it"
                " twice"
            )
        if training and n < self.axis.size:
            raise InputError(f"plan: axial: {where} has {n} positions of {name!r}: expected {AXIAL}={n} or less")


def split_axes(model: nn.Module, plan: AxialPlan, extents: Mapping[str, int], axis: Axis) -> None:
    """Put the hooks of a plan on a model, whose ranks must be equal before.

    ``extents``: those that the plan states; an operand with a dimension of 0 positions is not there. InputError for a
    pattern that matches no module, or a module that two patterns match.
    """
    parts = Parts(axis)
    model.register_forward_pre_hook(parts.forget)
    taken: dict[str, str] = {}
    for pattern, ways in plan.modules.items():
        there = {**ways.inputs, **{len(ways.inputs) + key: each for key, each in ways.outputs.items()}}
        may_lack = any(extents.get(name) == 0 for each in there.values() for name in each.dims)
        for path, module in _matching(model, pattern, may_lack=may_lack, taken=taken):
            hooks = _Operands(path, parts, ways.inputs, ways.outputs)
            if ways.inputs:
                module.register_forward_pre_hook(hooks.before)
            if ways.outputs:
                module.register_forward_hook(hooks.after)
    for pattern, drawn in plan.draws.items():
        for path, module in _matching(model, pattern, may_lack=False, taken=taken):
            draw = _Draw(path, parts, drawn.dims, drawn.along)
            module.register_forward_pre_hook(draw.widen)
            module.register_forward_hook(draw.narrow)


def _matching(
    model: nn.Module, pattern: str, *, may_lack: bool, taken: dict[str, str]
) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each that a pattern matches; ``taken`` has the pattern of each module so far."""
    found = [(path, module) for path, module in model.named_modules() if path and fnmatchcase(path, pattern)]
    if not found and not may_lack:
        raise InputError(f"plan: pattern {pattern!r} of axial matches no module: remove it, or correct it")
    for path, module in found:
        if path in taken:
            raise InputError(f"plan: axial: {path!r} is matched by {taken[path]!r} and {pattern!r}: narrow one of them")
        taken[path] = pattern
        yield path, module


class _Ended(Exception):
    """All tensors are whole again."""


def run_to_ends(model: nn.Module, plan: AxialPlan, batch: Mapping[str, Tensor]) -> None:
    """Run a model whose rows are split up to where the first pass has made all its ends whole.

    What follows is not split.
    """
    patterns = [pattern for pattern, ways in plan.modules.items() if any(each.end for each in ways.outputs.values())]
    left = {
        path for path, _ in model.named_modules() if path and any(fnmatchcase(path, pattern) for pattern in patterns)
    }

    def end(path: str, *_: object) -> None:
        left.discard(path)
        if not left:
            raise _Ended

    for path, module in model.named_modules():
        if path in left:
            module.register_forward_hook(partial(end, path))
    with torch.no_grad(), suppress(_Ended):
        model(batch)
        if left:
            raise InputError(
                f"plan: axial: {min(left)!r} ends parts, and the model does not call it: correct its pattern"
            )


class _Operands:
    """The hooks of one module: what becomes of its inputs and outputs."""

    def __init__(self, path: str, parts: Parts, inputs: Mapping[int, Operand], outputs: Mapping[int, Operand]) -> None:
        self._path, self._parts, self._inputs, self._outputs = path, parts, inputs, outputs

    def __deepcopy__(self, memo: object) -> _Operands:
        return self

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Lay the inputs out."""
        return self._laid(inputs, self._inputs, "input", module.training)

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Lay the outputs out."""
        if isinstance(output, tuple):
            return self._laid(output, self._outputs, "output", module.training)
        return self._laid((output,), self._outputs, "output", module.training)[0]

    def _laid(self, given: tuple[Any, ...], ways: Mapping[int, Operand], kind: str, training: bool) -> tuple[Any, ...]:
        found = list(given)
        for number, way in ways.items():
            where = f"{kind} {number} of {self._path!r}"
            if number >= len(found) or not isinstance(found[number], Tensor):
                raise InputError(f"plan: axial: {where} is no tensor: correct its number")
            if found[number].dim() != len(way.dims):
                raise InputError(
                    f"plan: axial: {where} has {found[number].dim()} dimensions: its dims are {', '.join(way.dims)}"
                )
            found[number] = WAYS[way.way](self._parts, found[number], way, where, training)
        return tuple(found)


def _cut(parts: Parts, x: Tensor, way: Operand, where: str, training: bool) -> Tensor:
    """Keep this rank's part of what all ranks have."""
    at = way.dims.index(way.along)
    parts.know(way.along, x.shape[at], where, training=training)
    low, high = parts.own(way.along)
    return x.narrow(at, low, high - low).clone()  # a view would keep the whole alive


def _gather(parts: Parts, x: Tensor, way: Operand, where: str, training: bool) -> Tensor:
    """Make an operand whole that ranks use differently: the backward pass sums what they say."""
    at = _check_part(parts, x, way, where)
    whole: Tensor = Whole.apply(x, at, parts.extents[way.along], parts.axis)  # type: ignore[no-untyped-call]
    return whole


def _end(parts: Parts, x: Tensor, way: Operand, where: str, training: bool) -> Tensor:
    """Make a tensor whole with which all ranks go on alike."""
    at = _check_part(parts, x, way, where)
    return gather(x, (at,), (parts.extents[way.along],), (parts.axis.size,), parts.axis)


def _turn(parts: Parts, x: Tensor, way: Operand, where: str, training: bool) -> Tensor:
    """Make one dimension whole and leave parts of another."""
    at, to = _check_part(parts, x, way, where), way.dims.index(way.to)
    parts.know(way.to, x.shape[to], where, training=training)
    turned: Tensor = _Turned.apply(x, at, to, parts.extents[way.along], parts.axis)  # type: ignore[no-untyped-call]
    return turned


def _first(parts: Parts, x: Tensor, way: Operand, where: str, training: bool) -> Tensor:
    """Give all ranks what the first one has taken from position 0 of its part; they go on alike."""
    if way.along not in parts.extents:
        raise InputError(
            f"plan: axial: {where} needs an input that is split along {way.along!r}; no earlier operand is"
        )
    first: Tensor = _First.apply(x, parts.axis)  # type: ignore[no-untyped-call]
    return first


Way = Callable[[Parts, Tensor, Operand, str, bool], Tensor]
WAYS: Mapping[str, Way] = {"cut": _cut, "gather": _gather, "end": _end, "turn": _turn, "first": _first}


def _check_part(parts: Parts, x: Tensor, way: Operand, where: str) -> int:
    """The dimension that lies in parts. InputError if it does not."""
    at = way.dims.index(way.along)
    if way.along not in parts.extents:
        raise InputError(
            f"plan: axial: {where} needs an input that is split along {way.along!r}; no earlier operand is"
        )
    low, high = parts.own(way.along)
    if x.shape[at] != high - low:
        raise InputError(
            f"plan: axial: {where} has {x.shape[at]} positions of {way.along!r}: this rank's part has {high - low}"
        )
    return at


class _Draw:
    """The hooks of a module that draws random numbers of its input's shape: those of the whole, of which a rank takes
    its part.
    """

    def __init__(self, path: str, parts: Parts, dims: Sequence[str], along: str) -> None:
        self._path, self._parts, self._dims, self._along = path, parts, dims, along

    def __deepcopy__(self, memo: object) -> _Draw:
        return self

    def widen(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give the module ones of the whole shape."""
        x = inputs[0]
        where = f"input 0 of {self._path!r}"
        if x.dim() != len(self._dims):
            raise InputError(f"plan: axial: {where} has {x.dim()} dimensions: its dims are {', '.join(self._dims)}")
        if self._along not in self._parts.extents:
            raise InputError(
                f"plan: axial: {where} needs an input that is split along {self._along!r}; no earlier operand is"
            )
        shape = list(x.shape)
        shape[self._dims.index(self._along)] = self._parts.extents[self._along]
        return (x.new_ones(shape), *inputs[1:])

    def narrow(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Keep this rank's part."""
        low, high = self._parts.own(self._along)
        return output.narrow(self._dims.index(self._along), low, high - low)


def _turned(x: Tensor, along: int, to: int, extent: int, axis: Axis) -> Tensor:
    """Parts of ``along``, whole in ``to``, become the whole of ``along``, in parts of ``to``."""
    ends = [part_of(x.shape[to], axis.size, rank) for rank in range(axis.size)]
    given = [x.narrow(to, low, high - low) for low, high in ends]
    low, high = ends[axis.rank]
    shapes = []
    for rank in range(axis.size):
        shape = list(x.shape)
        begin, end = part_of(extent, axis.size, rank)
        shape[to], shape[along] = high - low, end - begin
        shapes.append(shape)
    own = given[axis.rank]
    given[axis.rank] = own.narrow(along, 0, 0)  # what stays here is not sent
    shapes[axis.rank][along] = 0
    got = axis.all_to_all(given, shapes)
    got[axis.rank] = own
    return torch.cat(got, along)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, along: int, to: int, extent: int, axis: Axis) -> Tensor:
        ctx.how = along, to, x.shape[to], axis
        return _turned(x, along, to, extent, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        along, to, whole, axis = ctx.how
        return _turned(gradient, to, along, whole, axis), None, None, None, None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.sum(x if axis.rank == 0 else torch.zeros_like(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        return gradient * axis.size if axis.rank == 0 else torch.zeros_like(gradient), None
