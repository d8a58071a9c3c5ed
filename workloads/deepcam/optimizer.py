"""LAMB (You et al. 2020, arXiv:1904.00962) as in apex's FusedLAMB, which the benchmark prescribes, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlhpc.workloads.deepcam.config import EPS, MAX_GRAD_NORM, DeepCamConfig


class Lamb(torch.optim.Optimizer):
    """Adam with decoupled weight decay and steps scaled per tensor by |w| / |step|. Clips the global gradient norm.

    Bias correction and gradient averaging (1 - beta1 in the first moment) are on. As in FusedLAMB, the step of a tensor
    without weight decay is not scaled, nor one with |w| or |step| zero. ``norms`` computes the norms of tensors that
    belong to weights. Where ranks hold pieces of them, the harness replaces it.
    """

    norms: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]] = staticmethod(
        lambda tensors, weights: list(torch._foreach_norm(list(tensors)))
    )

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = EPS,
        weight_decay: float = 0.01,
        max_grad_norm: float = MAX_GRAD_NORM,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        every = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        if not every:
            return
        norm = torch.stack(self.norms([weight.grad for weight in every], every)).norm()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                # the divisor of the gradients: at least 1, so that small ones are not scaled up
                self._update(weights, group, torch.clamp(norm / group["max_grad_norm"], min=1.0))

    def _update(self, weights: list[Tensor], group: dict[str, Any], clip: Tensor) -> None:
        first_beta, second_beta = group["betas"]
        states = [self._state(weight) for weight in weights]
        group["step"] = group.get("step", 0) + 1
        gradients = torch._foreach_div([weight.grad for weight in weights if weight.grad is not None], clip)
        means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        # lerp by 1 - beta1 is the moving average with factor beta1
        torch._foreach_lerp_(means, gradients, 1 - first_beta)
        torch._foreach_mul_(squares, second_beta)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second_beta)
        denominators = torch._foreach_div(squares, 1 - second_beta ** group["step"])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(means, 1 - first_beta ** group["step"]))
        torch._foreach_div_(updates, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            torch._foreach_mul_(updates, self._trust_ratios(weights, updates))
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _trust_ratios(self, weights: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        # one call for both: where ranks hold pieces, norms need a collective
        both = self.norms([*weights, *updates], [*weights, *weights])
        norms = zip(both[: len(weights)], both[len(weights) :], strict=True)
        return [torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w)) for w, u in norms]

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state


def build_optimizer(parameters: Iterable[Tensor], config: DeepCamConfig) -> torch.optim.Optimizer:
    """Build the optimizer that the config names. The caller sets its rate before each step."""
    choices: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "Adam": partial(torch.optim.Adam, fused=True),
        "AdamW": partial(torch.optim.AdamW, fused=True),
        "LAMB": Lamb,
    }
    optimizer = choices[config.optimizer](
        parameters, lr=config.learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    optimizer.register_load_state_dict_post_hook(_lay_out_state)
    return optimizer


def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Lay out loaded moments as their weights are: torch's fused kernels walk the memory of all in one order."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            for name, value in optimizer.state[weight].items():
                if torch.is_tensor(value) and value.shape == weight.shape and value.stride() != weight.stride():
                    optimizer.state[weight][name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
