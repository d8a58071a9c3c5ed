"""Runs a few of a model's equal blocks and repeats what they did for the others, so that a step of many layers takes little time.

Children of one list or sequence with the same class, attributes and shapes do the same to tensors of the same shape. The first
two and the last of them run. Those between give outputs without values and keep as many bytes for the backward pass as the
second one does; its FLOPs and collectives count again for each. What lives while block i runs is a straight line in i, so the
most of it is found in the blocks that run. Without gradients nothing is kept, so of equal blocks, and of a part of the model that
is called again, one call stands for all: its most is added to what lives then. Only for tensors without memory.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from suite.training.counts.memory import LiveBytes
from suite.training.parallel.recompute import is_computed_again, is_recomputed
from suite.training.parallel.states import OPEN, ShardedStates, names_of

LEAST = 4  # equal blocks of a parent; of fewer all run
PATTERN = 1  # which of them the others repeat
PLAIN = (int, str, bool, type(None))
BACKWARD = "backward"

Sent = Counter[tuple[str, str, int, int]]  # axis, kind, bytes and ranks of collectives


class Notes:
    """Collectives that would have been: how many of each."""

    def __init__(self) -> None:
        self.found: Sent = Counter()

    def __call__(self, axis: str, kind: str, given: int, ranks: int) -> None:
        """Note one."""
        self.found[axis, kind, given, ranks] += 1


class NotSeenError(Exception):
    """A block was repeated whose pattern did not run in the same way."""


@dataclass
class _Work:
    """FLOPs and collectives."""

    flops: int = 0
    sent: Sent = field(default_factory=Counter)

    def add(self, other: _Work, times: int = 1) -> None:
        self.flops += other.flops * times
        for what, calls in other.sent.items():
            self.sent[what] += calls * times

    def less(self, other: _Work) -> _Work:
        return _Work(self.flops - other.flops, self.sent - other.sent)


@dataclass(frozen=True)
class _Output:
    """A tensor that a block gives."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class _Call:
    """What a block gives and keeps: bytes of its own tensors, which inputs (parameters among them), which outputs."""

    kind: type | None  # of a result that is a dataclass
    tree: Any
    outputs: tuple[object, ...]  # an `_Output`, or the value itself
    kept: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    rise: int = 0  # the most bytes of tensors that it makes and that live at once

    def found(self, values: list[Any]) -> Any:
        """The result that has these values."""
        found = tree_unflatten(values, self.tree)
        return found if self.kind is None else self.kind(**found)


class Repeated:
    """The equal blocks of a model that runs under ``live``; ``notes`` gets what they would send."""

    def __init__(self, model: nn.Module, live: LiveBytes, notes: Notes) -> None:
        self._live, self._notes = live, notes
        self._model = model.module if isinstance(model, ShardedStates) else model
        self._calls: dict[Any, _Call | None] = {}  # None: cannot be repeated
        self._work: dict[Any, _Work] = {}
        self._repeated: Counter[Any] = Counter()
        self._stood_in: set[nn.Module] = set()
        self._window: tuple[object, Any, _Work] | None = (
            None  # the pattern whose backward pass runs, and the work before it
        )
        self._again = _Work()  # what was computed again in it
        self._called = _Work()  # the work before the call of a pattern, whose hooks run for every block
        self._stacks = list(stacks(model))
        self._forwards = dict(self._stand_ins())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the body blocks are repeated; FLOPs and collectives are complete after it. NotSeenError if they cannot be."""
        before = {module: vars(module).get("forward") for module in self._forwards}
        for module, forward in self._forwards.items():
            module.forward = forward
        hooks = [blocks[PATTERN].register_forward_pre_hook(self._note_call, prepend=True) for blocks in self._stacks]
        try:
            yield
        finally:
            for module, own in before.items():
                if own is None:
                    del module.forward
                else:
                    module.forward = own
            for hook in hooks:
                hook.remove()
        self._close()
        for key, times in self._repeated.items():
            if key not in self._work:
                raise NotSeenError
            self._live.flops += self._work[key].flops * times
            for what, calls in self._work[key].sent.items():
                self._notes.found[what] += calls * times

    def _note_call(self, *_: object) -> None:
        self._called = self._so_far()

    def _stand_ins(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Blocks and what stands for their forward passes."""
        for blocks in self._stacks:
            ways: list[Callable[..., Any] | None]
            ways = [None, partial(self._observe, blocks[PATTERN].forward, blocks[PATTERN])]
            ways += [partial(self._repeat, block, block.forward, blocks[PATTERN]) for block in blocks[PATTERN + 1 : -1]]
            for block, way in zip(blocks, (*ways, blocks[-1].forward), strict=True):
                yield block, partial(self._once, way, block.forward, blocks[0])
        stacked = {block for blocks in self._stacks for block in blocks}
        for part in (each for each in self._model.children() if stacked.isdisjoint(each.modules())):
            yield part, partial(self._once, None, part.forward, part)

    def _once(
        self,
        way: Callable[..., Any] | None,
        forward: Callable[..., Any],
        pattern: nn.Module,
        *inputs: Any,
        **named: Any,
    ) -> Any:
        """Without gradients do what the pattern did, where that kept nothing. Else go the other way, None: be the pattern.

        What keeps something are first calls under autocast: parameters in its type.
        """
        live, key = self._live, _key(pattern, inputs, named)
        call, plain = self._calls.get(key), torch.is_grad_enabled() or is_computed_again()
        if plain or (call is None and way is not None):
            return (way or forward)(*inputs, **named)
        if call is not None:
            self._repeated[key] += 1
            live.rise(call.rise)
            device = next(each for each in tree_flatten((inputs, named))[0] if isinstance(each, Tensor)).device
            with live.quiet():
                return call.found([_made(each, device) for each in call.outputs])
        before, now = self._so_far(), live.now
        saved = _Saved([each for each in tree_flatten((inputs, named))[0] if isinstance(each, Tensor)], 0)
        with live.alone() as most:
            found = forward(*inputs, **named)
        grown = live.now - now
        call = saved.call(found, grown) if saved.inputs else None
        if call is not None and not call.kept:
            self._work[key] = self._so_far().less(before)
            self._calls[key] = replace(call, rise=most() - now)
        return found

    def _observe(self, forward: Callable[..., Any], pattern: nn.Module, *inputs: Any, **named: Any) -> Any:
        """Run a pattern, and note what it does."""
        key, before, now = _key(pattern, inputs, named), self._so_far(), self._live.now
        tensors = [each for each in tree_flatten((inputs, named))[0] if isinstance(each, Tensor)]
        saved = _Saved([*tensors, *_parameters(pattern)], len(tensors) if is_recomputed(forward) else 0)
        try:
            with saved.active():
                found = forward(*inputs, **named)
        finally:  # what is computed again ends early, by an exception
            self._work[key] = self._so_far().less(before)
            if is_computed_again():
                self._again.add(self._so_far().less(self._called))
        if not is_computed_again():
            self._calls[key] = saved.call(found, self._live.now - now)
            token = object()
            for each in tree_flatten(found)[0]:
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(partial(self._begin, token, key))  # type: ignore[no-untyped-call]
            for each in tensors:
                if each.requires_grad:
                    each.register_hook(partial(self._end, token))  # type: ignore[no-untyped-call]
        return found

    def _repeat(
        self, block: nn.Module, forward: Callable[..., Any], pattern: nn.Module, *inputs: Any, **named: Any
    ) -> Any:
        """Do what the pattern did."""
        key = _key(pattern, inputs, named)
        call = self._calls.get((*key[:-1], False))
        if call is None or (is_computed_again() and block not in self._stood_in):
            return forward(*inputs, **named)
        self._stood_in.add(block)
        self._repeated[key] += 1
        tensors = [each for each in tree_flatten((inputs, named))[0] if isinstance(each, Tensor)]
        with self._live.quiet():
            made = iter(_Again.apply(self, key, call, *tensors, *_parameters(block)))  # type: ignore[no-untyped-call]
        return call.found([next(made) if isinstance(each, _Output) else each for each in call.outputs])

    def backward_of(self, key: Any) -> Any:
        """Count the backward pass of a repeated block, whose peak is none."""
        self._repeated[key, BACKWARD] += 1
        return self._live.quiet()

    def _begin(self, token: object, key: Any, _: Tensor) -> None:
        """The backward pass of a pattern begins."""
        if self._window is None or self._window[0] is not token:
            self._close()
            self._window, self._again = (token, key, self._so_far()), _Work()

    def _end(self, token: object, _: Tensor) -> None:
        if self._window is not None and self._window[0] is token:
            self._close()

    def _close(self) -> None:
        if self._window is not None:
            _, key, before = self._window
            self._work[key, BACKWARD] = self._so_far().less(before).less(self._again)
            self._window = None

    def _so_far(self) -> _Work:
        return _Work(self._live.flops, Counter(self._notes.found))


def stacks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Equal blocks, `LEAST` or more. Those that lie in others of them, or gather parameters of their own, are left alone."""
    inside: set[nn.Module] = set()
    for parent in model.modules():
        groups: dict[Any, list[nn.Module]] = {}
        stacked = isinstance(parent, (nn.ModuleList, nn.Sequential)) and parent not in inside
        for child in parent.children() if stacked else ():
            groups.setdefault(_signature(child), []).append(child)
        for blocks in (each for each in groups.values() if len(each) >= LEAST and not names_of(each[0])):
            inside.update(module for block in blocks for module in block.modules())
            yield blocks


def repeated_parameters(model: nn.Module) -> dict[Tensor, int]:
    """How many equal parameters stand for each other: of the first of them their number, of the others 0."""
    counts: dict[Tensor, int] = {}
    for blocks in stacks(model):
        for equal in zip(*(block.parameters() for block in blocks), strict=True):
            counts.update(dict.fromkeys(equal, 0))
            counts[equal[0]] = len(equal)
    return counts


class _Again(torch.autograd.Function):
    """A block without its operators: outputs, what is kept until the backward pass, gradients of inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, blocks: Repeated, key: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how = blocks, key
        ctx.gradients = [(each.shape, each.dtype) if each.requires_grad else None for each in tensors]
        device = tensors[0].device
        outputs = [each for each in call.outputs if isinstance(each, _Output)]
        made = tuple(_made(each, device) for each in outputs)
        # Of no extent, whatever it holds: what is kept in a checkpointed block has the same shape when it is computed again.
        own = torch.empty(0 if is_computed_again() else call.kept, dtype=torch.uint8, device=device)[:0]
        ctx.save_for_backward(own, *(tensors[i] for i in call.kept_inputs), *(made[i] for i in call.kept_outputs))
        ctx.mark_non_differentiable(
            *(tensor for tensor, each in zip(made, outputs, strict=True) if not each.differentiable)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        blocks, key = ctx.how
        if torch.is_grad_enabled():
            raise NotSeenError  # a backward pass that is differentiated itself
        with blocks.backward_of(key):
            device = ctx.saved_tensors[0].device  # computes a checkpointed block again
            gradients = (each and torch.empty(each[0], dtype=each[1], device=device) for each in ctx.gradients)
            return (None, None, None, *gradients)


class _Saved:
    """What a block keeps for the backward pass of its inputs, parameters among them, and of its outputs.

    ``recomputed``: so many of the first are kept by a block that is computed again, which saves them elsewhere.
    """

    def __init__(self, inputs: Sequence[Tensor], recomputed: int) -> None:
        self.inputs, self._recomputed = inputs, recomputed
        self._packed: dict[int, Any] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the body what is saved is noted, and saved as it would be."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_same, _same)

        packed = self._packed  # what is saved holds `pack`, which must hold no tensor

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            packed[id(storage)] = weakref.ref(storage)
            return outer[0](tensor)

        with saved_tensors_hooks(pack, outer[1]):
            yield

    def call(self, found: Any, grown: int) -> _Call | None:
        """What the others repeat. None if they cannot: outputs that lie in inputs or in each other, or that are no tensors."""
        kind = type(found) if dataclasses.is_dataclass(found) else None
        values, tree = tree_flatten(found if kind is None else vars(found))
        tensors = [each for each in values if isinstance(each, Tensor)]
        storages = [each.untyped_storage() for each in (*self.inputs, *tensors)]
        outputs = storages[len(self.inputs) :]
        if len({id(each) for each in outputs} - {id(each) for each in storages[: len(self.inputs)]}) < len(outputs):
            return None
        if not all(isinstance(each, (Tensor, float, *PLAIN)) for each in values):
            return None
        kept = [id(each) in self._packed and self._packed[id(each)]() is each for each in storages]
        grad = torch.is_grad_enabled()
        return _Call(
            kind,
            tree,
            tuple(
                _Output(each.shape, each.stride(), each.dtype, each.requires_grad) if isinstance(each, Tensor) else each
                for each in values
            ),
            max(0, grown - sum(each.nbytes() for each in outputs)),
            tuple(i for i in range(len(self.inputs)) if kept[i] or (i < self._recomputed and grad)),
            tuple(i for i in range(len(tensors)) if kept[len(self.inputs) + i]),
        )


def _made(output: object, device: torch.device) -> Any:
    if not isinstance(output, _Output):
        return output
    return torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=device)


def _same(tensor: Any) -> Any:
    return tensor


def _key(pattern: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The pattern, what it is called with, and whether it is called for gradients and in the backward pass."""
    values, tree = tree_flatten((inputs, named))
    called = tuple(
        (each.shape, each.stride(), each.dtype, each.requires_grad) if isinstance(each, Tensor) else _plain(each)
        for each in values
    )
    cast = torch.is_autocast_enabled("cpu")
    return pattern, str(tree), called, cast, torch.is_grad_enabled(), is_computed_again()


def _parameters(block: nn.Module) -> Iterator[Tensor]:
    """The parameters that a block computes with: whole ones that were gathered, else its own."""
    for module in block.modules():
        opened = getattr(module, OPEN, None) or {}
        pieces = set(names_of(module)) if opened else set()
        yield from opened.values()
        yield from (each for name, each in module._parameters.items() if each is not None and name not in pieces)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """What equal blocks have in common: classes, attributes, shapes. Numbers with a fraction count as zero or not."""
    own = vars(module)
    tensors = ((name, each) for kind in ("_parameters", "_buffers") for name, each in own[kind].items())
    return (
        type(module).__qualname__,
        tuple(
            sorted((name, _plain(each)) for name, each in own.items() if not name.startswith("_") and name != "forward")
        ),
        tuple((name, each is not None and (each.shape, each.dtype, each.requires_grad)) for name, each in tensors),
        tuple((name, _signature(child)) for name, child in module.named_children()),
    )


def _plain(value: Any) -> str:
    if isinstance(value, PLAIN) or dataclasses.is_dataclass(value):
        return repr(value)
    if isinstance(value, tuple | list):
        return repr([_plain(each) for each in value])
    return repr(bool(value)) if isinstance(value, float) else type(value).__qualname__
