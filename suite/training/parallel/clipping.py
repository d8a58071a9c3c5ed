"""Clips gradients by the norm of the whole model, also where ranks have parts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlhpc.suite.training.parallel.fsdp import local, states_of
from mlhpc.suite.training.parallel.layout import find_away, slices

EPS = 1e-6  # what torch adds to a norm before it divides by it
Norms = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


class Clipping:
    """Scales gradients down to an L2 norm over the whole model. A call is a collective if ranks have parts of it.

    ``copies``: ranks that hold each of ``sharded``, with equal gradients. The parameters are looked up once: to walk
    through hundreds of small modules takes longer than to scale what they hold.
    """

    def __init__(self, model: nn.Module, sharded: Sequence[nn.Parameter], clip_norm: float, *, copies: int = 1) -> None:
        self._model, self._sharded, self._clip_norm, self._copies = model, sharded, clip_norm, copies
        shares = {id(parameter) for parameter in sharded}
        self._parameters = list(model.parameters())
        self._whole = [each for each in self._parameters if id(each) not in shares]
        self._in_parts = has_parts(model)
        # torch takes all in one call on a CPU only if asked to, and cannot on meta tensors
        self._at_once = None if any(each.is_meta for each in self._parameters) else True

    def __call__(self) -> None:
        """Clip the gradients that there are now."""
        weights, gradients = [], []
        for weight in self._whole:
            if (gradient := _find_gradient(weight)) is not None:
                weights.append(weight)
                gradients.append(gradient)
        if self._in_parts:
            gradients = norms_of_whole(self._model)(gradients, weights)
        norm = nn.utils.get_total_norm(gradients, foreach=self._at_once)
        if self._sharded:
            square = nn.utils.get_total_norm(
                [local(each) for weight in self._sharded if (each := _find_gradient(weight)) is not None]
            ).square()
            if dist.is_initialized():
                dist.all_reduce(square)
                square /= self._copies
            norm = (norm.square() + square).sqrt()
        found = [local(each.grad) for each in self._parameters if each.grad is not None]
        factor = (self._clip_norm / (norm + EPS)).clamp(max=1.0)  # as torch's own; that takes no parts
        if self._at_once:
            torch._foreach_mul_(found, factor)
        for gradient in () if self._at_once else found:
            gradient.mul_(factor)
        for away in filter(None, map(find_away, self._parameters)):
            away.scale_gradient(factor)


def _find_gradient(weight: Tensor) -> Tensor | None:
    """Return a weight's gradient. Of one that is away its norm, which is a number and so its own norm."""
    away = find_away(weight)
    return weight.grad if away is None else away.gradient_norm()


def norms_of_whole(model: nn.Module) -> Norms:
    """The function that computes L2 norms of whole tensors from pieces. It takes tensors and the parameter that each
    belongs to.

    One collective per call and axis. Every rank calls it with the tensors of the same parameters.
    """
    states, axes = states_of(model), {id(part): slice_.axis for _, part, slice_ in slices(model)}
    if states is not None:
        axes |= {id(each): states.shard for name, each in model.named_parameters() if name in states.shapes}

    def norms(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        found = list(torch._foreach_norm([local(each) for each in tensors]))
        for axis in dict.fromkeys(axes[id(weight)] for weight in weights if id(weight) in axes):
            parts = [position for position, weight in enumerate(weights) if axes.get(id(weight)) is axis]
            squares = axis.sum(torch.stack([found[position] for position in parts]).square())
            for position, whole in zip(parts, squares.sqrt().unbind(), strict=True):
                found[position] = whole
        return found

    return norms


def has_parts(model: nn.Module) -> bool:
    """True if ranks hold parts of parameters: rows of states, or slices of split products."""
    return states_of(model) is not None or next(slices(model), None) is not None
