"""Chooses the experts and weights of each token, and computes the losses that balance the experts. Moves no token.

T tokens of this rank, D model width, E experts. K choices per token, P width of the cosine projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.mesh import DryRunGroup, Group

COSINE_WIDTH = 256  # Tutel's proj_dim, initial temperature and bound of 1 / temperature
COSINE_TEMPERATURE = 0.5
COSINE_MAX_SCALE = 100.0


@dataclass(frozen=True)
class Routing:
    """The router's decision: ``experts_TK`` in order of choice; ``priority_T`` if queues are served by score."""

    experts_TK: Tensor
    weights_TK: Tensor
    auxiliary_loss: Tensor
    priority_T: Tensor | None = None


class Router(nn.Module):
    """Scores, selection and auxiliary loss, in float32 at least: bfloat16 gives one token in 35 other experts.

    Its parameters stay in float32 when the module is converted to a shorter type.
    """

    bias_E: Tensor

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        if config.router == "cosine":
            self.projection = nn.Linear(width, COSINE_WIDTH, bias=False)
            self.centroids_EP = nn.Parameter(torch.randn(config.experts, COSINE_WIDTH) * 0.01)
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / COSINE_TEMPERATURE)))
        else:
            self.gate = nn.Linear(width, config.experts, bias=False)
        self.register_buffer("bias_E", torch.zeros(config.experts))

    # torch calls this for .to(), .half() and .bfloat16()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        def keep_long(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            shortened = tensor.dtype.is_floating_point and found.dtype.itemsize < min(tensor.dtype.itemsize, 4)
            return tensor.to(found.device) if shortened else found

        return super()._apply(keep_long, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, x_TD: Tensor) -> Routing:
        """Route tokens."""
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._route(self._logits(x_TD))

    def _logits(self, x_TD: Tensor) -> Tensor:
        weight = next(self.parameters())
        x_TD = x_TD.to(weight.dtype)
        if self.config.router == "softmax":
            result: Tensor = self.gate(x_TD)
            return result
        x_TP = F.normalize(self.projection(x_TD), dim=1)
        scale = self.log_scale.clamp(max=math.log(COSINE_MAX_SCALE)).exp()
        return x_TP @ F.normalize(self.centroids_EP, dim=1).t() * scale

    def _route(self, clean_TE: Tensor) -> Routing:
        config = self.config
        noise = config.gate_noise / config.experts if self.training else 0.0
        logits_TE = clean_TE + noise * torch.randn_like(clean_TE) if noise else clean_TE
        scores_TE = logits_TE.softmax(dim=1)
        experts_TK = self._select(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.top_k > 1 and config.normalise_gates:
            weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights_TK.dtype).eps)
        loss = torch.zeros((), dtype=scores_TE.dtype, device=scores_TE.device)
        if len(scores_TE):  # the mean over no tokens would be NaN
            if config.balance == "gshard":
                loss = loss + config.balance_coefficient * compute_gshard_loss(scores_TE, experts_TK[:, 0])
            elif config.balance == "importance_load" and noise:
                balance = compute_importance_load_loss(clean_TE, logits_TE, config.top_k, noise)
                loss = loss + config.balance_coefficient * balance
            if config.z_coefficient:
                loss = loss + config.z_coefficient * compute_z_loss(logits_TE)
        priority_T = scores_TE.detach().amax(dim=1) if config.batch_prioritised else None
        return Routing(experts_TK, weights_TK, loss, priority_T)

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.config.balance == "bias":
            # the bias moves the choice only; the weights are those of the scores without it
            scores_TE = scores_TE + self.bias_E
        return scores_TE.topk(self.config.top_k, dim=1).indices

    @torch.no_grad()
    def update_bias(self, assigned_E: Tensor, group: Group | None) -> None:
        """Raise the selection bias of experts below the mean load, lower the others; after an optimizer step.

        ``assigned_E`` is this rank's load of the step and is summed over the group. arXiv:2408.15664.
        """
        load_E = assigned_E.to(self.bias_E.dtype)
        if isinstance(group, DryRunGroup):
            group("all_reduce", load_E.nbytes)
        elif group is not None:
            dist.all_reduce(load_E, group=group)
        step_E = self.config.balance_coefficient * torch.sign(load_E.mean() - load_E)
        # a shift of all experts would change no choice and let the bias drift
        self.bias_E += step_E - step_E.mean()


def count_experts(ids: Tensor, experts: int) -> Tensor:
    """Count how often each expert occurs. bincount would make the host wait for a GPU."""
    return ids.new_zeros(experts).scatter_add(0, ids, torch.ones_like(ids))


def compute_gshard_loss(scores_TE: Tensor, first_T: Tensor) -> Tensor:
    """Compute E * sum over experts of (mean score) * (share of first choices): 1 if balanced. arXiv:2006.16668."""
    tokens, experts = scores_TE.shape
    share_E = count_experts(first_T, experts).to(scores_TE.dtype) / tokens
    return experts * (scores_TE.mean(dim=0) * share_E).sum()


def compute_importance_load_loss(clean_TE: Tensor, noisy_TE: Tensor, top_k: int, noise: float) -> Tensor:
    """Compute the mean of the squared coefficients of variation of importance and load. arXiv:2106.05974, appendix A.

    The load is the probability that an expert is chosen if only its noise were drawn again. Tutel compares *scores*
    with the threshold on *logits* here; in the paper and below both are logits.
    """
    threshold_T1 = noisy_TE.topk(top_k, dim=1).values[:, -1:]
    load_E = torch.special.ndtr((clean_TE - threshold_T1) / noise).sum(dim=0)
    return 0.5 * (_squared_variation(clean_TE.softmax(dim=1).sum(dim=0)) + _squared_variation(load_E))


def compute_z_loss(logits_TE: Tensor) -> Tensor:
    """Compute the mean squared logsumexp, which keeps logits small. arXiv:2202.08906."""
    return logits_TE.logsumexp(dim=1).square().mean()


def _squared_variation(value_E: Tensor) -> Tensor:
    # the variance of a single value is NaN
    if len(value_E) == 1:
        return value_E.sum() * 0.0
    return value_E.var() / (value_E.mean().square() + 1e-10)
