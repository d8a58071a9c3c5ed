"""Keeps the experts of MoE layers in a tier: loads what a pass needs, takes gradients away, and updates the weights.

The parameters stay those of the model, with shapes and without memory. A layer's get memory when its router has chosen,
and again when its gradient arrives. Gradients leave at the end of a layer's backward pass. The optimizer finds none,
and so leaves these parameters out; `Keeper.step` then does the same arithmetic, expert by expert.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from mlhpc.plugins.offload.cache import Cache
from mlhpc.plugins.offload.tier import (
    Entry,
    FileTier,
    HostTier,
    Key,
    Tier,
    copy,
    make_tensors,
    map_memory,
    return_freed_memory,
)
from mlhpc.suite.data.lock import LockedError
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import check_ownership, render_bytes
from mlhpc.suite.training.parallel.layout import AWAY
from mlhpc.suite.training.parallel.meta_init import has_values
from mlhpc.suite.world import World
from mlhpc.workloads.moe.config import Offload
from mlhpc.workloads.moe.layer import MoELayer, Output
from mlhpc.workloads.moe.router import Routing

WEIGHTS, STATES, GRADIENTS = "weights", "states", "gradients"
MOMENTS = ("exp_avg", "exp_avg_sq")
# The optimizer's arithmetic on a part of a tensor is that on the whole, if no part ends within a vector of the processor
VECTOR = 16
_numbers = count()


class Keeper:
    """Has the experts of a model's layers. ``parts``: backward passes of a step."""

    def __init__(self, settings: Offload, world: World, parts: int) -> None:
        self.settings, self.world, self.parts = settings, world, parts
        self.layers: list[OffloadedLayer] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._cache: Cache | None = None

    def __call__(self, layer: MoELayer) -> None:
        """Take the experts of a layer. A layer without memory, of a dry run, keeps what it has."""
        if has_values(layer.experts.up_EHD):
            self.layers.append(OffloadedLayer(self, layer, len(self.layers)))

    @property
    def cache(self) -> Cache:
        """The cache, which is made with the first layer. InputError on every rank if another run has the folder."""
        if self._cache is None:
            tier: Tier | None = None
            error: Exception | None = None
            try:
                tier = _make_tier(self.settings, self.world.rank)
            except LockedError as caught:  # not the trial's own, which ends a process without a word to its launcher
                error = InputError(str(caught))
            except (ValueError, OSError) as caught:
                error = caught
            self.world.check_together(error)
            assert tier is not None
            self.tier = tier
            self._cache = Cache(tier, self.settings.cache or sys.maxsize)
            # Also at the end of the process. What is called must not keep this object.
            self.close = weakref.finalize(self, _close, self._cache, tier)
        return self._cache

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the experts after each step of an optimizer, an AdamW. InputError if the budget is too small."""
        if not self.layers:  # of a dry run, or dense
            return
        needed = max(layer.needed_bytes for layer in self.layers)
        if needed > self.cache.budget:
            self.close()
            raise InputError(
                f"hyperparameters.moe.offload.cache is {render_bytes(self.cache.budget)}, and one layer needs "
                f"{render_bytes(needed)}: give at least {needed}"
            )
        self.optimizer = optimizer
        optimizer.register_step_post_hook(lambda *_: self.step())

    @torch.no_grad()
    def step(self) -> None:
        """Update all experts that have gradients. The index is written while the next step begins."""
        # Here, before the step's writes: in a thread it could meet a lock of this process that is just given up
        check_ownership()
        order = [(layer, chunk) for layer in self.layers if layer.has_gradient for chunk in layer.chunks]
        ahead = [layer.list_keys(chunk, GRADIENTS, WEIGHTS, STATES) for layer, chunk in order]
        for position, (layer, chunk) in enumerate(order):
            for keys in ahead[position + 1 : position + 1 + self.settings.depth]:
                self.cache.prefetch(keys)
            layer.update(chunk)
        self.cache.commit()
        if self.settings.cache is not None:
            return_freed_memory(self.settings.cache)

    def ask_ahead(self, numbers: Iterable[int]) -> None:
        """Load experts of other layers ahead: those that the layers used last."""
        for number in numbers:
            if 0 <= number < len(self.layers):
                layer = self.layers[number]
                self.cache.prefetch(layer.list_keys(layer.used, WEIGHTS))

    def flush(self, world: World) -> dict[str, Any]:
        """Return the statistics since the last call: sums over ranks, and the most that a rank held in memory."""
        if not self.layers:
            return {}
        self.cache.settle()
        mine = self.cache.flush()
        if isinstance(self.tier, FileTier):
            mine |= {"bytes_read": self.tier.bytes_read, "bytes_written": self.tier.bytes_written}
            self.tier.bytes_read = self.tier.bytes_written = 0
        peak = world.summary(float(mine.pop("peak_bytes")))["max"]
        sums = world.sum({name: float(value) for name, value in mine.items()})
        return {"tier": self.settings.tier, **sums, "peak_bytes": peak}


def _make_tier(settings: Offload, rank: int) -> Tier:
    if settings.folder is None:
        return HostTier()
    lock = settings.folder / f"rank{rank}.lock"
    return FileTier(settings.folder / f"rank{rank}-{next(_numbers)}", Path(lock))


def _close(cache: Cache, tier: Tier) -> None:
    cache.close()
    tier.close()


class OffloadedLayer:
    """One MoE layer of which the experts are away. ``used``: the experts that the last forward pass loaded."""

    def __init__(self, keeper: Keeper, layer: MoELayer, number: int) -> None:
        self.keeper, self.number, self.cache = keeper, number, keeper.cache
        self.whole = layer.mesh is None  # this rank has all experts, and knows after the router which get tokens
        self.weights: dict[str, nn.Parameter] = dict(layer.experts.named_parameters())
        self.experts = len(layer.experts.up_EHD)
        self.used: Sequence[int] = range(self.experts)
        self._loaded: set[int] = set()
        self._arrived, self._part = 0, 0
        self._factor: Tensor | None = None
        self._norms: dict[str, Tensor] = {}
        sizes = [weight[0].numel() for weight in self.weights.values()]
        self.bytes = sum(weight.nbytes for weight in self.weights.values())
        alone = all(size % VECTOR == 0 for size in sizes)
        self.chunks = [[expert] for expert in range(self.experts)] if alone else [list(range(self.experts))]
        for expert in range(self.experts):
            entry = {name: weight.data[expert] for name, weight in self.weights.items()}
            self.cache.put(Key(number, expert, WEIGHTS), copy(entry))
        self._memory: mmap.mmap | None = map_memory(self.bytes)  # of the weights on a CPU: pages that are used
        mapped = make_tensors(self._memory, {name: weight.shape for name, weight in self.weights.items()})
        for name, weight in self.weights.items():
            setattr(weight, AWAY, _Away(self, WEIGHTS, name, weight))
            weight.data = mapped[name]
            weight.register_post_accumulate_grad_hook(self.take_gradient)  # type: ignore[no-untyped-call]
        layer.experts._apply = self._move  # type: ignore[method-assign]
        layer.router.register_forward_hook(self._load_routed)
        layer.register_forward_hook(self._end_forward, always_call=True)
        self._train, layer.train = layer.train, self._enter  # type: ignore[method-assign]
        self._module = weakref.ref(layer)
        return_freed_memory()

    @property
    def needed_bytes(self) -> int:
        """The memory that this layer needs at least.

        A backward pass has weights, gradients and entries of two experts. An update has a chunk's gradients, and its
        old and new values. A checkpoint may have one weight beside.
        """
        expert = self.bytes // self.experts
        needed = max(2 * self.bytes + 2 * expert, 11 * expert * len(self.chunks[0]))
        return needed + max(weight.nbytes for weight in self.weights.values())

    @property
    def has_gradient(self) -> bool:
        """True after a backward pass, until the update."""
        return self.cache.has(Key(self.number, 0, GRADIENTS))

    def list_keys(self, experts: Iterable[int], *kinds: str) -> list[Key]:
        """List the entries of experts that the tier has."""
        keys = [Key(self.number, expert, kind) for expert in experts for kind in kinds]
        return [key for key in keys if self.cache.has(key)]

    def load(self, experts: Sequence[int]) -> None:
        """Give the weights memory, with the values of these experts, and zeros in place of others."""
        if not self._loaded:
            self.cache.reserve(self.bytes)
            for weight in self.weights.values() if self._memory is None else ():
                weight.untyped_storage().resize_(weight.nbytes)
                weight.data.zero_()
        for expert in experts:
            if expert not in self._loaded:
                entry = self.cache.get(Key(self.number, expert, WEIGHTS))
                for name, weight in self.weights.items():
                    weight.data[expert].copy_(entry[name], non_blocking=True)
                self._loaded.add(expert)

    def release(self) -> None:
        """Take the weights' memory away."""
        if self._loaded:
            self._loaded.clear()
            if self._memory is not None:
                self._memory.madvise(mmap.MADV_DONTNEED)  # they read as zeros again
            for weight in self.weights.values() if self._memory is None else ():
                weight.untyped_storage().resize_(0)
            self.cache.reserve(-self.bytes)

    def _load_routed(self, router: nn.Module, inputs: Any, routing: Routing) -> None:
        layer = self._module()
        assert layer is not None
        if layer._all_weights is not None:  # an evaluation over a mesh, which has gathered them
            return
        self.begin_forward(torch.unique(routing.experts_TK).tolist() if self.whole else range(self.experts))

    def begin_forward(self, used: Sequence[int]) -> None:
        """Load the experts that the router chose, and begin with those of the next layers."""
        self.used = used
        self.load(used)
        depth = self.keeper.settings.depth
        self.keeper.ask_ahead(range(self.number + 1, self.number + 1 + depth))

    def _end_forward(self, layer: nn.Module, inputs: Any, output: Output | None) -> None:
        self.release()
        if output is not None and output.y_TD.requires_grad:
            output.y_TD.register_hook(self.begin_backward)  # type: ignore[no-untyped-call]

    def begin_backward(self, gradient: Tensor | None = None) -> None:
        """Load the experts of the forward pass again."""
        self.load(self.used)
        self.cache.reserve(self.bytes)  # of the gradients
        depth = self.keeper.settings.depth
        self.keeper.ask_ahead(range(self.number - 1, self.number - 1 - depth, -1))

    def _enter(self, mode: bool = True) -> MoELayer:
        """Enter training or evaluation; over a mesh evaluation begins with gathering all weights."""
        if not mode and not self.whole:
            self.load(range(self.experts))
        layer = self._train(mode)
        self.release()
        return layer

    def _move(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move the parameters to a device, without memory. Their type stays."""
        layer = self._module()
        assert layer is not None
        for weight in self.weights.values():
            device = function(weight.data.new_empty(0)).device
            if device != weight.device:
                weight.data, self._memory = _make_without_memory(weight, device), None
        return layer.experts

    @torch.no_grad()
    def take_gradient(self, weight: Tensor) -> None:
        """Take the gradients away once all weights have theirs: the backward pass needs the weights no more."""
        self._arrived += 1
        if self._arrived < len(self.weights):
            return
        self._arrived = 0
        self.release()
        gradients: dict[str, Tensor] = {}
        keys = [Key(self.number, expert, GRADIENTS) for expert in range(self.experts)]
        for name, each in self.weights.items():
            assert each.grad is not None
            gradients[name], each.grad = each.grad, None
        for expert, key in enumerate(keys) if self._part else ():
            former = self.cache.get(key)
            for name, gradient in gradients.items():
                gradient[expert].add_(former[name].to(gradient.device))
        self._part = (self._part + 1) % self.keeper.parts
        if not self._part:
            if self.whole and dist.is_initialized() and dist.get_world_size() > 1:
                for gradient in gradients.values():
                    dist.all_reduce(gradient.mul_(1 / dist.get_world_size()))
            self._norms = {name: torch._foreach_norm([gradient])[0] for name, gradient in gradients.items()}
        self.cache.reserve(-self.bytes)
        for expert, key in enumerate(keys):
            entry = copy({name: gradient[expert] for name, gradient in gradients.items()})
            self.cache.put(key, entry, spare=2 * self.bytes)  # the next layer's weights and gradients
        del gradients
        if self.keeper.settings.cache is not None:
            return_freed_memory(self.keeper.settings.cache)

    def update(self, chunk: Sequence[int]) -> None:
        """Update some experts by their gradients, which then go."""
        assert self.keeper.optimizer is not None
        size = self.bytes // self.experts * len(chunk)
        entries = {kind: [self._read(kind, expert) for expert in chunk] for kind in (GRADIENTS, WEIGHTS, STATES)}
        self.cache.reserve(3 * size)
        new = {kind: [copy(entry) for entry in entries[kind]] for kind in (WEIGHTS, STATES)}
        for name, weight in self.weights.items():
            (group,) = (each for each in self.keeper.optimizer.param_groups if any(weight is p for p in each["params"]))
            state = self._make_state(weight, group)
            gradient = _join([entry[name] for entry in entries[GRADIENTS]]).to(weight.device)
            gradient = gradient if self._factor is None else gradient * self._factor
            names = {name: WEIGHTS} | {f"{name}.{moment}": STATES for moment in MOMENTS}
            parts = [[entry[each] for entry in new[kind]] for each, kind in names.items()]
            values = [_join(each).to(weight.device) for each in parts]
            first, second = group["betas"]
            adamw(
                [values[0]],
                [gradient],
                [values[1]],
                [values[2]],
                [],
                [state["step"] + 0.0],
                fused=True,
                amsgrad=False,
                beta1=first,
                beta2=second,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for each, value in zip(parts, values, strict=True):
                for part, found in zip(each, value, strict=True):
                    if found.data_ptr() != part.data_ptr():  # otherwise it was changed in place
                        part.copy_(found)
            if chunk[-1] == self.experts - 1:
                state["step"] += 1
        self.cache.reserve(-3 * size)
        for kind, every in new.items():
            for expert, entry in zip(chunk, every, strict=True):
                self.cache.put(Key(self.number, expert, kind), entry)
        for expert in chunk:
            self.cache.drop(Key(self.number, expert, GRADIENTS))
        if chunk[-1] == self.experts - 1:
            self._factor, self._norms = None, {}

    def _make_state(self, weight: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state of a weight, which it would make with the first gradient."""
        assert self.keeper.optimizer is not None
        state: dict[str, Any] = self.keeper.optimizer.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state |= {moment: getattr(weight, AWAY).make_moment(moment) for moment in MOMENTS}
        return state

    def _read(self, kind: str, expert: int) -> Entry:
        """Return an entry. States that are not there yet are zeros."""
        key = Key(self.number, expert, kind)
        if self.cache.has(key):
            return self.cache.get(key)
        each = self.weights.items()
        return {f"{name}.{moment}": torch.zeros(weight.shape[1:]) for name, weight in each for moment in MOMENTS}

    def set_factor(self, factor: Tensor) -> None:
        """Multiply the gradient, when it is used."""
        self._factor = factor

    def find_norm(self, name: str) -> Tensor | None:
        """Return the norm of a weight's gradient."""
        return self._norms.get(name)


class _Away:
    """The values of a parameter, or of a state of the optimizer that has its shape. ``name``: in entries."""

    def __init__(self, layer: OffloadedLayer, kind: str, name: str, weight: nn.Parameter) -> None:
        self._layer, self._kind, self._name, self._weight = layer, kind, name, weight

    def read(self) -> Tensor:
        """Return the values of all experts."""
        layer = self._layer
        return self._stack(lambda expert: layer._read(self._kind, expert))

    def write(self, values: Tensor) -> None:
        """Replace the values."""
        for expert, value in enumerate(values):
            entry = dict(self._layer._read(self._kind, expert)) | {self._name: value}
            self._layer.cache.put(Key(self._layer.number, expert, self._kind), copy(entry))

    def pin(self) -> Tensor:
        """Return a tensor without memory whose values stay as they are."""
        layer, number, kind = self._layer, self._layer.number, self._kind
        layer.cache.settle()
        read, end = layer.keeper.tier.pin(layer.list_keys(range(layer.experts), kind))
        found = _make_without_memory(self._weight, torch.device("cpu"))
        setattr(found, AWAY, _Pinned(lambda: self._stack(lambda expert: read(Key(number, expert, kind)))))
        weakref.finalize(found, end)
        return found

    def make_moment(self, key: str) -> Tensor:
        """Return a tensor without memory for one of the weight's moments."""
        found = _make_without_memory(self._weight, self._weight.device)
        setattr(found, AWAY, _Away(self._layer, STATES, f"{self._name}.{key}", self._weight))
        return found

    def gradient_norm(self) -> Tensor | None:
        """Return the norm of the weight's gradient."""
        return self._layer.find_norm(self._name)

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the weight's gradient."""
        self._layer.set_factor(factor)

    def _stack(self, read: Callable[[int], Entry]) -> Tensor:
        """Read all experts into one tensor, whose memory is counted as long as it is there."""
        size, cache = self._weight.nbytes, self._layer.cache
        cache.reserve(size)
        values = torch.empty(self._weight.shape)
        weakref.finalize(values, cache.reserve, -size)
        for expert in range(self._layer.experts):
            values[expert] = read(expert)[self._name]
        return values


class _Pinned:
    """What a checkpoint reads later."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors. Of one alone the result has its memory."""
    return torch.stack([*tensors]) if tensors[1:] else tensors[0][None]


def _make_without_memory(weight: Tensor, device: torch.device) -> Tensor:
    found = torch.empty_like(weight.data, device=device)
    found.untyped_storage().resize_(0)
    return found
