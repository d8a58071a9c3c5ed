"""Splits the products of a model over ranks that share samples: the tensor axis, with the sequence in parts between
products.

A region is a module whose matrices are split: each rank has some columns of the first and the rows of the last that
belong to them. Its input, of which a rank has a part of the sequence, is gathered; its output is a partial sum, of
which each rank gets its part of the sequence summed. Forward: an all-gather and a reduce-scatter; backward: the same
two. Between regions (norms, residuals) a rank computes on its part alone. Or nothing lies in parts between regions:
their input is whole on every rank, their output is the sum. All hooks; no name or forward pass changes. Not DTensor:
docs/plans.md.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suite.errors import InputError
from suite.training.parallel.exchange import Axis, Note, add_up, gather
from suite.training.parallel.mesh import TENSOR, part_of
from suite.training.parallel.places import Place
from suite.training.parallel.plan import SAMPLE, Cut, TensorPlan

SLICES = "_mlhpc_slices"  # what a module with split parameters has beside its own attributes


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
        every = self.axis.gather_flat(mine.reshape(-1)).view(self.axis.size, self.outer, -1, self.inner)
        return every.transpose(0, 1).reshape(self.shape)


def split_products(
    model: nn.Module,
    plan: TensorPlan,
    cuts: Mapping[str, Cut],
    extents: Mapping[str, int],
    axis: Axis,
    twin: int,
) -> None:
    """Put this rank's parts in the place of parameters and the hooks on regions. The ranks' models must be equal
    before.

    ``cuts``: by the names of the parameters. ``twin``: this rank's number among those that get the same parts.
    InputError for what cannot be divided, or a pattern that matches no module.
    """
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            cut = cuts.get(f"{path}.{name}" if path else name)
            if cut is None or parameter is None:
                continue
            part = _slice(f"{path}.{name}" if path else name, parameter.shape, cut, extents, axis, twin)
            vars(module).setdefault(SLICES, {})[name] = part
            module._parameters[name] = nn.Parameter(part.of(parameter.detach()).clone(), parameter.requires_grad)
    _check_sums(model, plan, axis.size)
    _add_own_parts(model)
    if not plan.along:
        for pattern, region in plan.regions.items():
            for module in _matching(model, pattern):
                module.register_forward_hook(_Total(axis, region.field).leave)
        return
    along = extents[plan.along]
    for pattern, dims in plan.begins.items():
        for module in _matching(model, pattern):
            module.register_forward_pre_hook(_Sequence(along, dims, plan.along, axis).begin)
    for pattern, region in plan.regions.items():
        for module in _matching(model, pattern):
            hooks = _Sequence(along, region.dims, plan.along, axis, region.field)
            module.register_forward_pre_hook(hooks.enter)
            module.register_forward_hook(hooks.leave)
    for pattern, dims in plan.ends.items():
        for module in _matching(model, pattern):
            module.register_forward_hook(_Sequence(along, dims, plan.along, axis).end)


def _add_own_parts(model: nn.Module) -> None:
    """Let each rank of the axis add its own part of parameters that come after a sum: elsewhere it reads zeros."""
    for module in model.modules():
        own = {name: part for name, part in vars(module).get(SLICES, {}).items() if part.after_sum}
        if own:
            kind = type(module)
            read = {name: property(_Padded(name, part)) for name, part in own.items()}
            module.__class__ = type(kind.__name__, (kind,), read)


@dataclass(frozen=True, eq=False)
class _Padded:
    """Reads a module's part of a parameter, with zeros where the parts of other ranks are."""

    name: str
    part: Slice

    def __call__(self, module: nn.Module) -> Tensor:
        mine = module._parameters[self.name]
        assert mine is not None
        return F.pad(mine, (self.part.low, self.part.extent - self.part.high))


def sum_over_twins(model: nn.Module, twins: Axis, ranks: int, but: Sequence[nn.Parameter]) -> None:
    """Let gradients of split products be means over the losses of all ``ranks``: sums over those with the same part."""
    alone = {id(each) for each in but}
    total = _TwinSum(twins, ranks)
    for _, part, _ in slices(model):
        if id(part) not in alone:
            part.register_hook(partial(total.keep, part))  # type: ignore[no-untyped-call]


class _TwinSum:
    """Keeps the gradients of a backward pass until its end, and then sums all of them in one exchange."""

    def __init__(self, twins: Axis, ranks: int) -> None:
        self._twins, self._ranks = twins, ranks
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def __deepcopy__(self, memo: object) -> _TwinSum:
        return self

    def keep(self, part: nn.Parameter, gradient: Tensor) -> Tensor:
        """Keep a gradient; the parameter gets zeros first."""
        if not self._kept:
            torch.autograd.Variable._execution_engine.queue_callback(self._add)
        self._kept.append((part, gradient))
        return torch.zeros_like(gradient)

    def _add(self) -> None:
        kept, self._kept = self._kept, []
        flat = torch.cat([gradient.reshape(-1) for _, gradient in kept])
        mean = (self._twins.sum(flat) if self._twins.size > 1 else flat) / self._ranks
        for (part, gradient), mine in zip(kept, torch.split(mean, [each.numel() for _, each in kept]), strict=True):
            assert part.grad is not None
            part.grad += mine.view(gradient.shape)


def _check_sums(model: nn.Module, plan: TensorPlan, parts: int) -> None:
    """InputError for what a region would add up once per rank: an output without split parameters, a bias after the
    sum.

    Parameters that are added after a sum must belong to products whose sum a region makes.
    """
    split = {name.rpartition(".")[0] for name, _, part in slices(model) if not part.after_sum}
    for name in [name for name, _, part in slices(model) if part.after_sum]:
        path, _, own = name.rpartition(".")
        weights = {other: each for other, each in vars(model.get_submodule(path))[SLICES].items() if not each.after_sum}
        ahead = [path[: at.start()] for at in re.finditer(r"\.|$", path)]
        if not any(fnmatchcase(each, pattern) for each in ahead for pattern in plan.regions):
            raise InputError(
                f"plan: parameter {name!r} is added after a sum, so it must be in a module of tensor.regions"
            )
        if not weights or (own == "bias" and ("weight" not in weights or weights["weight"].dimension == 0)):
            raise InputError(f"plan: parameter {name!r} has after: sum, but no weight of its module has its rows split")
    for path, module in model.named_modules():
        biases = {
            name for name in module._parameters if path in split and "bias" in name and name not in vars(module)[SLICES]
        }
        whole = sorted(name for name in biases if module._parameters[name] is not None)
        if whole:
            raise InputError(
                f"plan: parameter {f'{path}.{whole[0]}'!r} is whole but its weight is split: each of {parts} ranks would add it; "
                f"give it {{after: sum}}, or {{split: 0}} if the weight's columns are split"
            )
        is_region = path and any(fnmatchcase(path, pattern) for pattern in plan.regions)
        if is_region and not any(other == path or other.startswith(path + ".") for other in split):
            raise InputError(
                f"plan: tensor: region {path!r} has no split parameter: its output would count {parts} times"
            )


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    found = [module for path, module in model.named_modules() if path and fnmatchcase(path, pattern)]
    if not found:
        raise InputError(f"plan: pattern {pattern!r} of tensor matches no module: remove it, or correct it")
    return found


def _slice(name: str, shape: torch.Size, cut: Cut, extents: Mapping[str, int], axis: Axis, twin: int) -> Slice:
    late = cut.after is not None
    split = max(0, len(shape) - 1) if cut.split is None else cut.split
    if split >= len(shape):
        raise InputError(f"plan: parameter {name!r} has {len(shape)} dimensions: split {split} is not one of them")
    n, parts = shape[split], axis.size
    units = extents[cut.units] if cut.units else n // cut.groups
    if n % cut.groups or (n // cut.groups) % units:
        raise InputError(f"plan: parameter {name!r}: dimension {split} of {n} is not {cut.groups} groups of {units}")
    if units % parts:
        fitting = [d for d in range(1, min(units, 64) + 1) if units % d == 0]
        what = cut.units or f"positions of dimension {split}"
        raise InputError(f"plan: parameter {name!r}: {units} {what} on {TENSOR}={parts}: expected one of {fitting}")
    extent = n // cut.groups
    low, high = part_of(extent, parts, axis.rank)
    outer, inner = math.prod(shape[:split]) * cut.groups, math.prod(shape[split + 1 :])
    return Slice(shape, split, outer, extent, inner, low, high, axis, twin, late)


def slices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Slice]]:
    """Name, this rank's part and its slice of each split parameter, in the model's order."""
    for path, module in model.named_modules():
        for name, part in vars(module).get(SLICES, {}).items():
            parameter = module._parameters[name]
            assert parameter is not None
            yield f"{path}.{name}" if path else name, parameter, part


class _Sequence:
    """The hooks of one module: what becomes of the dimension that lies in parts. ``dims``: those of its tensor, by
    name.

    A tensor with one dimension less has the first two, samples and sequence, as one.
    """

    def __init__(self, length: int, dims: Sequence[str], along: str, axis: Axis, field: str = "") -> None:
        self._length, self._dims, self._axis, self._field = length, len(dims), axis, field
        self._at = dims.index(along)

    def __deepcopy__(self, memo: object) -> _Sequence:
        return self

    def begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep this rank's part of the input, which all ranks have."""
        x = inputs[0]
        if x.shape[self._at] != self._length:
            raise InputError(f"plan: tensor: {x.shape[self._at]} positions of the sequence: expected {self._length}")
        low, high = part_of(self._length, self._axis.size, self._axis.rank)
        return (x.narrow(self._at, low, high - low), *inputs[1:])

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather the input."""
        low, high = part_of(self._length, self._axis.size, self._axis.rank)
        return (self._unfolded(inputs[0], high - low, Whole), *inputs[1:])

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Sum the output; keep this rank's part."""
        return _replaced(module, output, self._field, lambda whole: self._unfolded(whole, self._length, _Sum))

    def end(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Make the output whole on every rank; all go on alike."""
        return gather(output, (self._at,), (self._length,), (self._axis.size,), self._axis)

    def _unfolded(self, x: Tensor, length: int, exchange: Any) -> Tensor:
        flat = x.dim() == self._dims - 1
        if flat:
            x = x.reshape(-1, length, *x.shape[1:])
        found: Tensor = exchange.apply(x, self._at, self._length, self._axis)
        return found.flatten(0, 1) if flat else found


@dataclass(frozen=True)
class _Total:
    """The hook of a region between which nothing lies in parts: its output is the sum over ranks, whole on each."""

    axis: Axis
    field: str

    def __deepcopy__(self, memo: object) -> _Total:
        return self

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Sum the output."""
        return _replaced(module, output, self.field, lambda mine: add_up(mine, self.axis))


def _replaced(module: nn.Module, output: Any, field: str, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output with its tensor changed. InputError if there is none."""
    if isinstance(output, Tensor):
        return change(output)
    if not field or not hasattr(output, field):
        raise InputError(
            f"plan: tensor: {type(module).__name__} returns {type(output).__name__}: expected field: the name of its "
            "tensor"
        )
    return dataclasses.replace(output, **{field: change(getattr(output, field))})


def _gathered(mine: Tensor, dimension: int, length: int, axis: Axis) -> Tensor:
    """The parts of all ranks along a dimension, one after another."""
    lengths = [high - low for low, high in (part_of(length, axis.size, rank) for rank in range(axis.size))]
    rest = math.prod(mine.shape[:dimension]) * math.prod(mine.shape[dimension + 1 :])  # a part may be empty
    flat = F.pad(mine.reshape(-1), (0, max(lengths) * rest - mine.numel()))
    shape = list(mine.shape)
    parts = []
    for each, got in zip(lengths, axis.gather_flat(flat).view(axis.size, -1), strict=True):
        shape[dimension] = each
        parts.append(got[: each * rest].view(shape))
    return torch.cat(parts, dimension)


def _summed(whole: Tensor, dimension: int, length: int, axis: Axis) -> Tensor:
    """This rank's part of the sum over ranks of a tensor, along a dimension."""
    places = [part_of(length, axis.size, rank) for rank in range(axis.size)]
    rest = whole.numel() // length
    most = max(high - low for low, high in places) * rest
    rows = [whole.narrow(dimension, low, high - low).reshape(-1) for low, high in places]
    mine = axis.scatter_sum(torch.cat([F.pad(row, (0, most - row.numel())) for row in rows]))
    shape = list(whole.shape)
    low, high = places[axis.rank]
    shape[dimension] = high - low
    return mine[: (high - low) * rest].view(shape)


class Whole(torch.autograd.Function):
    """The parts of all ranks of an axis, of which each uses the whole for its own part.

    The gradients of all are summed.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, dimension: int, length: int, axis: Axis) -> Tensor:
        """All-gather."""
        ctx.how = dimension, length, axis
        return _gathered(mine, dimension, length, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Reduce-scatter."""
        return _summed(gradient, *ctx.how), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dimension: int, length: int, axis: Axis) -> Tensor:
        ctx.how = dimension, length, axis
        return _summed(whole, dimension, length, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(gradient, *ctx.how), None, None, None


def note_exchanges(
    model: nn.Module, plan: TensorPlan, extents: Mapping[str, int], samples: int, size: int, note: Note
) -> None:
    """Note what the hooks of one training pass exchange over ``size`` ranks: the closed form of a plan, in torch's
    default type.
    """
    width = torch.get_default_dtype().itemsize
    longest = -(-extents[plan.along] // size)

    def given(dims: Sequence[str]) -> int:
        return samples * longest * width * math.prod(extents[each] for each in dims if each not in (SAMPLE, plan.along))

    for pattern, region in plan.regions.items():
        part = given(region.dims)
        for _ in _matching(model, pattern):
            for kind, count in (("all_gather", part), ("reduce_scatter", part * size)) * 2:  # forward, backward
                note(TENSOR, kind, count, size)
    for pattern, dims in plan.ends.items():
        for _ in _matching(model, pattern):
            note(TENSOR, "all_gather", given(dims), size)
