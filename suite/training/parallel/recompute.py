"""Recomputation of blocks in the backward pass, chosen by a plan.

``full``: a block keeps its input and nothing else. ``selective``: it also keeps the results of products with parameters (linear
layers, convolutions), so that what is computed again is cheap: attention's own products, normalisation, activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from suite.errors import InputError

aten = torch.ops.aten
KEPT = {
    *(aten.mm, aten.addmm, aten.linear, aten.convolution, aten._convolution),
    *(getattr(aten, name) for name in ("_grouped_mm", "_scaled_grouped_mm") if hasattr(aten, name)),
}


def recompute_blocks(model: nn.Module, policies: Mapping[str, str]) -> None:
    """Let the blocks whose paths match compute their forward pass again. Random numbers (dropout) are the same again.

    InputError if a block lies in another one that is recomputed, or has batch statistics, which would be counted twice.
    """
    chosen = [
        (path, module, policy)
        for path, module in model.named_modules()
        for policy in [next((policies[pattern] for pattern in policies if fnmatchcase(path, pattern)), None)]
        if path and policy is not None
    ]
    for path, module, policy in chosen:
        inside = next((other for other, *_ in chosen if other.startswith(path + ".")), None)
        if inside:
            raise InputError(
                f"plan: recompute: block {inside!r} lies in block {path!r}: expected patterns of one level"
            )
        if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()):
            raise InputError(
                f"plan: recompute: block {path!r} has batch normalisation, whose statistics would count twice"
            )
        module.forward = partial(_recomputed, module, module.forward, policy)


def is_recomputed(forward: Any) -> bool:
    """True for the forward pass of a block that a plan lets compute again."""
    return isinstance(forward, partial) and forward.func is _recomputed


def _recomputed(module: nn.Module, forward: Any, policy: str, *inputs: Any, **named: Any) -> Any:
    if not module.training:
        return forward(*inputs, **named)
    if policy == "full":
        return checkpoint(forward, *inputs, use_reentrant=False, **named)
    contexts = partial(create_selective_checkpoint_contexts, _choose)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


def _choose(context: object, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
    kept = operator.overloadpacket in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
