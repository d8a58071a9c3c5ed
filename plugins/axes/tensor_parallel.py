"""Splits the products of a model over ranks that share samples with torch's `parallelize_module`: the tensor axis.

A region is a module whose matrices are split: each rank has some columns of the first and the rows of the last that
belong to them, as DTensors. A rank has a part of the input's sequence: the parts are gathered. The output is a partial
sum: each rank gets its part of the sequence summed. Forward: an all-gather and a reduce-scatter; backward: the
same two. Between regions (norms, residuals) a rank computes on its part alone. Or nothing lies in parts between
regions: their input is whole on every rank, their output is the sum.

The loss of a step is the sum over ranks, and a gradient of a whole parameter is this rank's part of it. So the output
that is whole at the end has its gradient once for each rank (`_add_gradients`). docs/engines.md says which regions
torch's styles do not take.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.exchange import Axis, Note
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.layout import SLICES, Slice, slices
from mlhpc.suite.training.parallel.mesh import TENSOR, part_of
from mlhpc.suite.training.parallel.plan import SAMPLE, Cut, Region, TensorPlan


def split_products(
    model: nn.Module,
    plan: TensorPlan,
    cuts: Mapping[str, Cut],
    extents: Mapping[str, int],
    axis: Axis,
    twin: int,
    device_mesh: DeviceMesh,
) -> None:
    """Put this rank's parts in the place of parameters and torch's styles on regions. The ranks' models must be equal
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
            # Not distribute_tensor: each rank's part of a fused weight (q, k and v) has rows of every group
            mine = DTensor.from_local(
                part.of(parameter.detach()).clone(), device_mesh, [Shard(part.dimension)], run_check=False
            )
            module._parameters[name] = nn.Parameter(mine, parameter.requires_grad)
    _check_sums(model, plan, axis.size)
    _check_regions(model, plan)
    positions = extents[plan.along] if plan.along else 0
    if positions % axis.size:
        fitting = [d for d in range(1, min(positions, 64) + 1) if positions % d == 0]
        raise InputError(
            f"plan: tensor: {positions} positions of {plan.along!r} on {TENSOR}={axis.size}: expected one of {fitting}"
        )
    for path, style in list(_styles(model, plan, positions)):
        parallelize_module(model.get_submodule(path), device_mesh, style)
    for pattern, dims in plan.begins.items():
        for _, module in _matching(model, pattern):
            module.register_forward_pre_hook(partial(_check_positions, dims.index(plan.along), positions), prepend=True)
    for pattern in plan.ends:
        for _, module in _matching(model, pattern):
            module.register_forward_hook(partial(_add_gradients, axis.size))


def _styles(model: nn.Module, plan: TensorPlan, positions: int) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the style of each module that a plan names, and of the products of its regions."""
    for pattern, dims in plan.begins.items():
        part = Shard(dims.index(plan.along))
        style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=part, use_local_output=True)
        yield from ((path, style) for path, _ in _matching(model, pattern))
    for pattern, region in plan.regions.items():
        for path, module in _matching(model, pattern):
            if plan.along and _has_products_alone(module):
                yield from _styles_of_products(path, module, Shard(region.dims.index(plan.along)))
            else:
                yield path, _Region(region, region.dims.index(plan.along) if plan.along else None, positions)
    for pattern, dims in plan.ends.items():
        part = Shard(dims.index(plan.along))
        for path, _ in _matching(model, pattern):
            yield path, PrepareModuleOutput(output_layouts=part, desired_output_layouts=Replicate())


def _styles_of_products(path: str, region: nn.Module, outside: Shard) -> Iterator[tuple[str, ParallelStyle]]:
    yield path, PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
    for name, module in region.named_modules():
        if isinstance(module, nn.Linear):
            first = vars(module)[SLICES]["weight"].dimension == 0
            yield f"{path}.{name}", ColwiseParallel() if first else RowwiseParallel(output_layouts=outside)


def _has_products_alone(region: nn.Module) -> bool:
    """Return True if all parameters of a region are split weights, or biases of split columns, of its linear layers."""
    for module in region.modules():
        parts = vars(module).get(SLICES, {})
        names = {name for name, each in module._parameters.items() if each is not None}
        if names and not (isinstance(module, nn.Linear) and module is not region and names == parts.keys()):
            return False
        if any(part.after_sum for part in parts.values()):
            return False
    return True


def _check_positions(at: int, positions: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """InputError for an input of other length than the plan says: torch would cut it into unequal parts."""
    if inputs[0].shape[at] != positions:
        raise InputError(f"plan: tensor: {inputs[0].shape[at]} positions of the sequence: expected {positions}")


def _add_gradients(ranks: int, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Let the output, which all ranks use in the same way, get the gradients of all of their losses."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * ranks)  # type: ignore[no-untyped-call]


def _read_own_parts(module: nn.Module) -> None:
    """Let a module read its split parameters as this rank's parts."""
    parts = vars(module).get(SLICES, {})
    if parts:
        kind = type(module)
        module.__class__ = type(
            kind.__name__, (kind,), {name: property(_Own(name, part)) for name, part in parts.items()}
        )


@dataclass(frozen=True, eq=False)
class _Own:
    """Reads this rank's part of a module's parameter. What comes after a sum has zeros where other ranks' parts are."""

    name: str
    part: Slice

    def __call__(self, module: nn.Module) -> Tensor:
        whole = module._parameters[self.name]
        assert isinstance(whole, DTensor)
        mine = whole.to_local()
        return F.pad(mine, (self.part.low, self.part.extent - self.part.high)) if self.part.after_sum else mine


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
        flat = torch.cat([local(gradient).reshape(-1) for _, gradient in kept])
        mean = (self._twins.sum(flat) if self._twins.size > 1 else flat) / self._ranks
        for (part, gradient), mine in zip(
            kept, torch.split(mean, [local(each).numel() for _, each in kept]), strict=True
        ):
            assert part.grad is not None
            local(part.grad).add_(mine.view_as(local(gradient)))


def _check_sums(model: nn.Module, plan: TensorPlan, parts: int) -> None:
    """InputError for what a region would add up once per rank: an output without split parameters, a bias after the
    sum.

    Parameters that are added after a sum must belong to products whose sum a region makes.
    """
    split = {name.rpartition(".")[0] for name, _, part in slices(model) if not part.after_sum}
    for name in [name for name, _, part in slices(model) if part.after_sum]:
        path, _, own = name.rpartition(".")
        weights = {other: each for other, each in vars(model.get_submodule(path))[SLICES].items() if not each.after_sum}
        if not _is_in_region(path, plan):
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
                f"plan: parameter {f'{path}.{whole[0]}'!r} is whole but its weight is split: each of {parts} ranks"
                " would add it; give it {after: sum}, or {split: 0} if the weight's columns are split"
            )
        is_region = path and any(fnmatchcase(path, pattern) for pattern in plan.regions)
        if is_region and not any(other == path or other.startswith(path + ".") for other in split):
            raise InputError(
                f"plan: tensor: region {path!r} has no split parameter: its output would count {parts} times"
            )


def _check_regions(model: nn.Module, plan: TensorPlan) -> None:
    """InputError for a pattern that matches no module, or a split parameter outside of regions."""
    for pattern in (*plan.begins, *plan.regions, *plan.ends):
        _matching(model, pattern)
    for name, _, _ in slices(model):
        if not _is_in_region(name.rpartition(".")[0], plan):
            raise InputError(f"plan: parameter {name!r} is split, so it must be in a module of tensor.regions")


def _is_in_region(path: str, plan: TensorPlan) -> bool:
    ahead = [path[: at.start()] for at in re.finditer(r"\.|$", path)]
    return any(fnmatchcase(each, pattern) for each in ahead for pattern in plan.regions)


def _matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    found = [(path, module) for path, module in model.named_modules() if path and fnmatchcase(path, pattern)]
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


class _Region(ParallelStyle):
    """The style of a region with parameters that torch's styles do not take, such as those of experts.

    They are read as this rank's parts. ``at``: the dimension of the input and output that lies in parts outside; None:
    none does. A tensor with one dimension less has the first two, samples and positions, as one.
    """

    def __init__(self, region: Region, at: int | None, positions: int) -> None:
        super().__init__()
        self._region, self._at, self._positions = region, at, positions

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for each in module.modules():
            _read_own_parts(each)
        outside = Replicate() if self._at is None else Shard(self._at)

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self._moved(inputs[0], device_mesh, outside, Replicate()), *inputs[1:])

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            return _replaced(
                module, output, self._region.field, lambda mine: self._moved(mine, device_mesh, Partial(), outside)
            )

        if self._at is not None:
            module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module

    def _moved(self, x: Tensor, device_mesh: DeviceMesh, now: Placement, then: Placement) -> Tensor:
        """Return a tensor in another layout. What was whole on each rank gets gradients that are parts of a sum."""
        flat = self._at is not None and x.dim() == len(self._region.dims) - 1
        if flat:
            held = self._positions // (device_mesh.size() if isinstance(now, Shard) else 1)
            x = x.reshape(-1, held, *x.shape[1:])
        moved = DTensor.from_local(x, device_mesh, [now], run_check=False).redistribute(placements=[then])
        found = moved.to_local(grad_placements=[Partial() if isinstance(then, Replicate) else then])
        return found.flatten(0, 1) if flat else found


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
