"""Splits parameters, gradients and optimizer state over ranks: each holds a piece of every tensor, and gathers it for
its use.

A piece is a range of a tensor's values in storage order, of ceil(n / pieces) values, fewer at the end; it keeps the
tensor's number of dimensions. `shard_states` puts pieces in the place of a finished model's parameters, under their
names, so that optimizer, moving average and clipping see pieces. A module that reads its parameter gets the whole. Not
FSDP2: docs/plans.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from suite.errors import InputError
from suite.training.parallel.exchange import Axis
from suite.training.parallel.mesh import Interval

UNITS, OPEN = "_mlhpc_units", "_mlhpc_open"  # what a module of a sharded model has beside its own attributes
BUCKET_BYTES = 25 << 20  # of whole tensors that are gathered together under ``step``
Gather = Literal["layer", "step"]


def piece_of(n: int, pieces: int, index: int) -> Interval:
    """The values of piece ``index`` of a tensor of ``n`` values."""
    each = -(-n // pieces)
    return min(index * each, n), min((index + 1) * each, n)


@dataclass(frozen=True)
class Holders:
    """The axes over which a parameter's pieces lie and its gradients are summed. None: only this rank. ``ranks``: of
    the run.

    ``ahead``: while a layer computes, the next one's pieces are gathered.
    """

    shard: Axis | None
    replicas: Axis | None
    ranks: int
    ahead: bool = False

    @property
    def pieces(self) -> int:
        """Number of pieces of a tensor."""
        return 1 if self.shard is None else self.shard.size


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered together: their names in their modules, and their shapes as a whole."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    holders: Holders

    def __deepcopy__(self, memo: object) -> Unit:
        return self

    def columns(self) -> list[Interval]:
        """Where each parameter's piece lies in what one rank gives."""
        end, found = 0, []
        for shape in self.shapes:
            begin, end = end, end - (-shape.numel() // self.holders.pieces)
            found.append((begin, end))
        return found

    def of(self, name: str) -> Unit:
        """The unit of one of its parameters alone."""
        return Unit((name,), (self.shapes[self.names.index(name)],), self.holders)

    def whole(self, pieces: Sequence[Tensor], ready: Future[tuple[Tensor, ...]] | None = None) -> list[Tensor]:
        """Gather the parameters; differentiable.

        All ranks of the axis call it, in the same order. ``ready``: gathered already.
        """
        return list(_Gathered.apply(self, ready, *pieces))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def gather(self, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather the parameters. All ranks of the axis call it, in the same order."""
        axis, columns = self.holders.shard, self.columns()
        if axis is None:
            return tuple(piece.view_as(piece) for piece in pieces)
        given = []
        for piece, (low, high) in zip(pieces, columns, strict=True):
            given.append(piece if piece.dim() == 1 else piece.reshape(-1))
            if piece.numel() < high - low:
                given.append(piece.new_zeros(high - low - piece.numel()))
        every = axis.gather_flat(torch.cat(given)).view(axis.size, -1)
        rows = torch.split(every, [high - low for low, high in columns], 1)
        return tuple(_shaped(row.reshape(-1), shape) for row, shape in zip(rows, self.shapes, strict=True))


class _Gathered(torch.autograd.Function):
    """Pieces to whole tensors.

    The backward pass gives each rank its piece of the mean gradient over all ranks of the run.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, ready: Future[tuple[Tensor, ...]] | None, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.how = unit, [piece.shape for piece in pieces], Recall.current()
        ctx.set_materialize_grads(False)
        return unit.gather(pieces) if ready is None else ready.result()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        unit, shapes, recall = ctx.how
        if recall is not None:
            recall.drop()
        first = next((gradient for gradient in gradients if gradient is not None), None)
        if first is None:
            return (None, None, *gradients)
        holders, columns, rows = unit.holders, unit.columns(), []
        for gradient, (low, high), shape in zip(gradients, columns, unit.shapes, strict=True):
            n = (high - low) * holders.pieces
            row = first.new_zeros(n) if gradient is None else gradient
            if row.numel() < n:
                row = F.pad(row.reshape(-1), (0, n - shape.numel()))
            rows.append(row.reshape(holders.pieces, -1))
        mine = (torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]).reshape(-1)
        mine = mine if holders.shard is None else holders.shard.scatter_sum(mine)
        mine = (mine if holders.replicas is None else holders.replicas.sum(mine)) / holders.ranks
        parts = torch.split(mine, [high - low for low, high in columns])
        found = (
            None if gradient is None else _shaped(part, shape)
            for gradient, part, shape in zip(gradients, parts, shapes, strict=True)
        )
        return (None, None, *found)


def _shaped(values: Tensor, shape: torch.Size) -> Tensor:
    """The first values of a vector in a shape; what follows is padding."""
    n = shape.numel()
    return (values if values.numel() == n else values[:n]).view(shape)


def shard_states(
    model: nn.Module,
    placements: Mapping[str, str],
    holders: Holders,
    everyone: Axis,
    *,
    gather: Gather,
    but: Sequence[nn.Parameter],
    split: Holders | None = None,
) -> None:
    """Put pieces in the place of the parameters that are placed ``shard``. The ranks' models must be equal before.

    Those placed ``replicate`` stay whole, with gradients averaged over ``everyone``; those placed ``split`` are parts
    already, with gradients averaged over their holders; those in ``but`` are left alone. ``layer``: a module with
    parameters gathers them for each of its calls and again in the backward pass. ``step``: all are gathered at the
    beginning of the model's forward pass and live until its backward pass has used them.
    """
    alone, seen = {id(parameter) for parameter in but}, set[int]()
    ways = {"shard": holders, "replicate": Holders(None, everyone, holders.ranks), "split": split or holders}
    for path, module in model.named_modules():
        units = []
        for way, where in ways.items():
            own = {
                name: parameter
                for name, parameter in module._parameters.items()
                if parameter is not None and id(parameter) not in alone and placements[_dotted(path, name)] == way
            }
            if seen & {id(parameter) for parameter in own.values()}:
                raise InputError(f"plan: {path!r} shares a parameter with another module: its states cannot be split")
            seen |= {id(parameter) for parameter in own.values()}
            if own:
                units.append(Unit(tuple(own), tuple(parameter.shape for parameter in own.values()), where))
            for name, parameter in own.items() if where.shard is not None else ():
                module._parameters[name] = _piece(_dotted(path, name), parameter, where)
        if units:
            _whole_on_access(module, units, gather)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _piece(name: str, parameter: nn.Parameter, holders: Holders) -> nn.Parameter:
    if parameter.dim() == 0:
        raise InputError(f"plan: parameter {name!r} is a single number: expected 'replicate'")
    assert holders.shard is not None
    low, high = piece_of(parameter.numel(), holders.pieces, holders.shard.rank)
    values = parameter.detach().reshape(-1)[low:high].clone().view(-1, *[1] * (parameter.dim() - 1))
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _whole_on_access(module: nn.Module, units: Sequence[Unit], gather: Gather) -> None:
    """Let a module's attributes be the whole parameters. Its class becomes a subclass of the same name."""
    kind = type(module)
    names = [name for unit in units for name in unit.names]
    module.__class__ = type(kind.__name__, (kind,), {name: property(_Reader(name)) for name in names})
    setattr(module, UNITS, tuple(units))
    setattr(module, OPEN, None)
    if gather == "layer":
        module.register_forward_pre_hook(_open, prepend=True)
        module.register_forward_hook(_close, always_call=True)


@dataclass(frozen=True)
class _Reader:
    """Reads one parameter of a module as a whole: what was gathered while the module is open, else gathered for this
    use.
    """

    name: str

    def __call__(self, module: nn.Module) -> Tensor:
        opened = getattr(module, OPEN)
        if opened is not None:
            return opened[self.name]  # type: ignore[no-any-return]
        unit = next(unit for unit in getattr(module, UNITS) if self.name in unit.names)
        return _gathered(module, unit.of(self.name))[self.name]


def _gathered(module: nn.Module, unit: Unit) -> dict[str, Tensor]:
    """The whole parameters of a unit, which the backward pass may gather again."""
    recall = Recall.current() if unit.holders.shard is not None else None
    ready = None if recall is None else recall.order.next(module, unit)
    whole = dict(zip(unit.names, unit.whole(_held(module, unit), ready), strict=True))
    if recall is not None:
        recall.know(module, unit, whole)
        recall.order.begin_next()
    return whole


def _held(module: nn.Module, unit: Unit) -> list[nn.Parameter]:
    """This rank's pieces of a unit."""
    pieces = [module._parameters[name] for name in unit.names]
    assert all(piece is not None for piece in pieces)
    return [piece for piece in pieces if piece is not None]


def _open(module: nn.Module, *_: object) -> None:
    if getattr(module, OPEN) is None:
        whole = [_gathered(module, unit) for unit in getattr(module, UNITS)]
        setattr(module, OPEN, {name: tensor for each in whole for name, tensor in each.items()})


def _close(module: nn.Module, *_: object) -> None:
    setattr(module, OPEN, None)


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose states are split, in order."""
    return [module for module in model.modules() if hasattr(module, UNITS)]


def names_of(module: nn.Module) -> list[str]:
    """The names of a module's parameters that are gathered."""
    return [name for unit in getattr(module, UNITS, ()) for name in unit.names]


def pieces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, torch.Size, Holders]]:
    """Name, piece, whole shape and holders of each parameter of which a rank has a piece, in the model's order."""
    for path, module in model.named_modules():
        for unit in getattr(module, UNITS, ()):
            for name, shape in zip(unit.names, unit.shapes, strict=True):
                piece = module._parameters[name]
                if unit.holders.shard is not None and piece is not None:
                    yield _dotted(path, name), piece, shape, unit.holders


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of the whole parameters that are there at once, padding included: of all per step, or of the largest layer.

    Of a `ShardedStates` that gathers the next layer ahead and knows their order: of the largest two that follow each
    other.
    """
    modules = sharded_modules(model)
    sizes = [_whole_bytes(module, unit) for module in modules for unit in getattr(module, UNITS)]
    if not any(_open in module._forward_pre_hooks.values() for module in modules):
        return sum(sizes)
    for order in model.recall.orders if isinstance(model, ShardedStates) else ():
        sizes += [
            _whole_bytes(*one) + _whole_bytes(*other) for one, other in pairwise(order.before) if other[1].holders.ahead
        ]
    return max(sizes, default=0)


def _whole_bytes(module: nn.Module, unit: Unit) -> int:
    """Bytes of a unit that is gathered; 0 if it lies whole on every rank."""
    each = next(iter(module.parameters(recurse=False))).element_size()
    return 0 if unit.holders.shard is None else unit.columns()[-1][1] * unit.holders.pieces * each


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Within the body the whole model is there, gathered in buckets. All ranks enter it."""
    bucket: list[tuple[nn.Module, Unit]] = []
    closed = [module for module in sharded_modules(model) if getattr(module, OPEN) is None]
    found: dict[int, dict[str, Tensor]] = {id(module): {} for module in closed}
    try:
        for holders, items in _by_holders(closed):
            size = 0
            for module, unit in items:
                bucket.append((module, unit))
                size += sum(shape.numel() for shape in unit.shapes) * 4
                if size >= BUCKET_BYTES:
                    _fill(bucket, holders, found)
                    bucket, size = [], 0
            if bucket:
                _fill(bucket, holders, found)
                bucket = []
        for module in closed:
            setattr(module, OPEN, found[id(module)])
        yield
    finally:
        for module in closed:
            _close(module)


def _by_holders(modules: Iterable[nn.Module]) -> list[tuple[Holders, list[tuple[nn.Module, Unit]]]]:
    found: dict[int, tuple[Holders, list[tuple[nn.Module, Unit]]]] = {}
    for module in modules:
        for unit in getattr(module, UNITS):
            found.setdefault(id(unit.holders), (unit.holders, []))[1].append((module, unit))
    return list(found.values())


def _fill(bucket: Sequence[tuple[nn.Module, Unit]], holders: Holders, found: dict[int, dict[str, Tensor]]) -> None:
    """Gather the parameters of several units at once."""
    places = [
        (module, name, shape) for module, unit in bucket for name, shape in zip(unit.names, unit.shapes, strict=True)
    ]
    unit = Unit(tuple(name for _, name, _ in places), tuple(shape for *_, shape in places), holders)
    parts = [module._parameters[name] for module, name, _ in places]
    for (module, name, _), tensor in zip(places, unit.whole([part for part in parts if part is not None]), strict=True):
        found[id(module)][name] = tensor


class Order:
    """In which order one pass gathers units. From the second pass on the next one is gathered while a layer computes
    (`Holders`).

    A pass in another order than the one before it gathers one unit in vain, and is in the order of the next.
    """

    def __init__(self) -> None:
        self.before: list[tuple[nn.Module, Unit]] = []
        self._now: list[tuple[nn.Module, Unit]] = []
        self._coming: tuple[nn.Module, Unit, Future[tuple[Tensor, ...]]] | None = None

    def begin(self) -> None:
        """A new pass."""
        self.before, self._now, self._coming = self._now or self.before, [], None

    def next(self, module: nn.Module, unit: Unit) -> Future[tuple[Tensor, ...]] | None:
        """A unit that is needed now: what comes of it if that is on its way."""
        self._now.append((module, unit))
        coming, self._coming = self._coming, None
        if coming is None:
            return None
        if coming[0] is module and coming[1].names == unit.names:
            return coming[2]
        self.before = []
        return None

    def begin_next(self) -> None:
        """Begin to gather the unit that comes next."""
        if len(self._now) < len(self.before):
            module, unit = self.before[len(self._now)]
            axis, pieces = unit.holders.shard, _held(module, unit)
            if unit.holders.ahead and axis is not None:
                self._coming = module, unit, axis.beside(lambda: unit.gather(pieces))


@dataclass(frozen=True)
class _Place:
    """What stands for a gathered tensor, or a view of it, in what is kept for the backward pass."""

    module: nn.Module
    unit: Unit
    name: str
    view: tuple[Any, Any, int]


class Recall:
    """Keeps no gathered parameter for the backward pass: it is gathered again there."""

    _active = threading.local()

    def __init__(self) -> None:
        self._known: MutableMapping[Any, tuple[nn.Module, Unit, str]] = WeakIdKeyDictionary()
        self._last: tuple[nn.Module, Unit, dict[str, Tensor]] | None = None
        self.orders = Order(), Order()  # of the forward and of the backward pass
        self.order = self.orders[0]

    @staticmethod
    def current() -> Recall | None:
        """The one that is active in this thread."""
        return getattr(Recall._active, "recall", None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the body what is kept for the backward pass is replaced by where it comes from."""
        before, Recall._active.recall = Recall.current(), self
        self._turn_to(0)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            Recall._active.recall = before
            self._turn_to(1)

    def _turn_to(self, pass_: int) -> None:
        self.order = self.orders[pass_]
        self.order.begin()

    def know(self, module: nn.Module, unit: Unit, whole: Mapping[str, Tensor]) -> None:
        """Note what is gathered; it is forgotten when it is freed."""
        for name, tensor in whole.items():
            self._known[tensor.untyped_storage()] = (module, unit, name)

    def drop(self) -> None:
        """Free what the backward pass gathered last."""
        self._last = None

    def _pack(self, tensor: Tensor) -> Tensor | _Place:
        known = self._known.get(tensor.untyped_storage())
        return (
            tensor if known is None else _Place(*known, (tensor.shape, tensor.stride(), int(tensor.storage_offset())))
        )

    def _unpack(self, kept: Tensor | _Place) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._last is None or self._last[0] is not kept.module or self._last[1] is not kept.unit:
            self._last = None
            ready = self.order.next(kept.module, kept.unit)
            pieces = _held(kept.module, kept.unit)
            whole = kept.unit.gather(pieces) if ready is None else ready.result()
            self._last = kept.module, kept.unit, dict(zip(kept.unit.names, whole, strict=True))
            self.know(*self._last)
            self.order.begin_next()
        return self._last[2][kept.name].as_strided(*kept.view)


class ShardedStates(nn.Module):
    """A model whose states are split, for training: its forward pass, and what of it is kept for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self.recall = model, Recall()
        self.by_layer = any(_open in module._forward_pre_hooks.values() for module in sharded_modules(model))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward pass."""
        with self.recall.active() if self.by_layer else opened(self.module):
            return self.module(*inputs, **named)
