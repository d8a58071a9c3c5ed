"""Recomputation of blocks in the backward pass, chosen by a plan: the block keeps its input and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from suite.errors import InputError


def recompute_blocks(model: nn.Module, policies: Mapping[str, str]) -> None:
    """Let the blocks whose paths match compute their forward pass again. Random numbers (dropout) are the same again.

    InputError if a block lies in another one that is recomputed, or has batch statistics, which would be counted twice.
    """
    chosen = [
        (path, module)
        for path, module in model.named_modules()
        if path and any(fnmatchcase(path, pattern) for pattern in policies)
    ]
    for path, module in chosen:
        inside = next((other for other, _ in chosen if other.startswith(path + ".")), None)
        if inside:
            raise InputError(
                f"plan: recompute: block {inside!r} lies in block {path!r}: expected patterns of one level"
            )
        if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()):
            raise InputError(
                f"plan: recompute: block {path!r} has batch normalisation, whose statistics would count twice"
            )
        module.forward = partial(_recomputed, module, module.forward)


def _recomputed(module: nn.Module, forward: Any, *inputs: Any, **named: Any) -> Any:
    if not module.training:
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, **named)
