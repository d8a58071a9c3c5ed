"""Splits parameters, gradients and optimizer state over ranks with torch's FSDP2 (`fully_shard`).

A rank holds some rows of each parameter, as a DTensor. Before a block computes, the rows of all ranks are gathered;
after its backward pass the gradients are summed and scattered. `shard_states` calls `fully_shard` for each block that a
plan names, from the inside out, and then for the model. Without process groups (a prediction) it only notes the groups
of parameters, from which the wing axes says what FSDP2 would exchange and hold.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.mesh import Interval
from mlhpc.suite.training.parallel.plan import match_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


STATES = "_mlhpc_states"  # the attribute of a model whose states are split


def part_of_rows(rows: int, ranks: int, rank: int) -> Interval:
    """The rows of one rank: ceil(rows / ranks), fewer at the end."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is. Not differentiable."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Group:
    """The parameters of one call of ``fully_shard``: gathered together, and their gradients scattered together.

    ``resharded``: the gathered parameters are freed after the forward pass and gathered again for the backward pass.
    """

    module: nn.Module
    shapes: Mapping[str, torch.Size]  # by the parameters' names in the model
    value_bytes: int
    resharded: bool
    sum_bytes: int  # of one value of a gradient, when it is summed


@dataclass(frozen=True, eq=False)
class States:
    """How a model's states are split: the groups of parameters, and the ranks that hold them together."""

    groups: tuple[Group, ...]
    shard: Axis
    replicas: Axis | None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the whole parameters that are split, by name."""
        return {name: shape for group in self.groups for name, shape in group.shapes.items()}

    def rows(self, name: str) -> Interval:
        """The rows of a parameter that this rank holds."""
        return part_of_rows(self.shapes[name][0], self.shard.size, self.shard.rank)


def states_of(model: nn.Module) -> States | None:
    """How a model's states are split; None if every rank holds all of them."""
    return getattr(model, STATES, None)


def shard_states(
    model: nn.Module,
    names: Sequence[str],
    blocks: Sequence[str],
    axes: tuple[Axis, Axis | None],
    *,
    reshard: bool | None = None,
    device_mesh: DeviceMesh | None = None,
    sums: torch.dtype | None = None,
) -> None:
    """Split the parameters of these names over the first of ``axes``; sum gradients over the second too, if any.

    ``blocks``: patterns of modules that are gathered alone. ``reshard``: whether gathered parameters are freed after
    the forward pass; None: those of blocks, not those of the model. The ranks' models must be equal before. Without
    ``device_mesh`` the parameters stay whole. ``sums``: the type in which gradients are summed, if not their own. All
    other parameters are left alone.
    """
    chosen = dict.fromkeys(names)
    _check(model, names)
    ignored = {each for name, each in model.named_parameters() if name not in chosen}
    groups: list[Group] = []
    for path, module in [*reversed(_matching(model, blocks)), ("", model)]:
        prefix = f"{path}." if path else ""
        own = {f"{prefix}{name}": each for name, each in module.named_parameters() if f"{prefix}{name}" in chosen}
        taken = {name for group in groups for name in group.shapes}
        shapes = {name: each.shape for name, each in own.items() if name not in taken}
        resharded = bool(path) if reshard is None else reshard
        if shapes:
            # FSDP2 takes one type of a group's gradients
            value_bytes = max(own[name].element_size() for name in shapes)
            groups.append(Group(module, shapes, value_bytes, resharded, sums.itemsize if sums else value_bytes))
        if device_mesh is not None and (shapes or not path):
            _fully_shard(module, device_mesh, resharded, ignored, sums)
    setattr(model, STATES, States(tuple(reversed(groups)), *axes))


def _check(model: nn.Module, names: Sequence[str]) -> None:
    """InputError for parameters that FSDP2 cannot split."""
    every = dict(model.named_parameters(remove_duplicate=False))
    seen: dict[int, str] = {}
    for name, parameter in every.items():
        if id(parameter) in seen and (name in names or seen[id(parameter)] in names):
            raise InputError(
                f"plan: parameter {name!r} is also {seen[id(parameter)]!r}: its states cannot be split: "
                "expected 'replicate'"
            )
        seen[id(parameter)] = name
        if name in names and parameter.dim() == 0:
            raise InputError(f"plan: parameter {name!r} is a single number: expected 'replicate'")
        if name in names and not parameter.is_contiguous():  # channels last: FSDP2 takes contiguous weights only
            parameter.data = parameter.data.contiguous()


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules that patterns match, parents first. InputError for a pattern without a module."""
    found = [(path, module) for path, module in model.named_modules() if path]
    for pattern in patterns:
        if not any(match_module(path, pattern) for path, _ in found):
            raise InputError(f"plan: pattern {pattern!r} of fully_shard matches no module: remove it, or correct it")
    chosen = [(path, module) for path, module in found if any(match_module(path, pattern) for pattern in patterns)]
    for path, module in chosen:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise InputError(f"plan: fully_shard: {path!r} is a list of modules: expected {f'{path}.*'!r}")
    return chosen


def _fully_shard(
    module: nn.Module, mesh: DeviceMesh, resharded: bool, ignored: set[nn.Parameter], sums: torch.dtype | None
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=sums)
    sharded = fully_shard(module, mesh=mesh, reshard_after_forward=resharded, ignored_params=ignored, mp_policy=policy)
    if not resharded:  # its views need no all-gather in the backward pass, which is what the warning is about
        message = rf"FSDP2-wrapped module \({type(module).__name__}\) returned a view tensor"
        warnings.filterwarnings("ignore", message, UserWarning)
    if mesh.device_type == "cpu":
        sharded.set_force_sum_reduction_for_comms(True)  # MPI and gloo have no mean


def _sharded_modules(model: nn.Module) -> list[Any]:
    if states_of(model) is None:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def evaluating(model: nn.Module, *, gathered: bool) -> Iterator[None]:
    """Let the body evaluate a model. ``gathered``: all parameters are gathered once, before it; all ranks enter it.

    Afterwards no gathered parameter stays, since weights may change before the next forward pass.
    """
    modules = _sharded_modules(model)
    try:
        for module in modules if gathered else ():
            module.unshard()
        yield
    finally:
        for module in modules:
            module.reshard()
