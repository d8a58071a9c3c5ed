"""Recomputation of blocks in the backward pass, chosen by a plan.

``full``: a block keeps its input and nothing else. ``selective``: it also keeps the results of products with parameters
(linear layers, convolutions), so that what is computed again is cheap: attention's own products, normalisation,
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.counts.flops import FlopSum
from mlhpc.suite.training.parallel.plan import Recompute

RECOMPUTED = "_mlhpc_recomputed"  # of a model that has such blocks: what counts them
aten = torch.ops.aten
KEPT = {
    *(aten.mm, aten.addmm, aten.linear, aten.convolution, aten._convolution),
    *(getattr(aten, name) for name in ("_grouped_mm", "_scaled_grouped_mm") if hasattr(aten, name)),
}


class Recomputed:
    """FLOPs of what blocks of a model compute again, until they are taken: they are those of every step."""

    def __init__(self) -> None:
        self._flops: int | None = 0

    def __deepcopy__(self, memo: object) -> Recomputed:
        return self

    def take(self) -> int | None:
        """The FLOPs so far. Nothing is counted after that, and the next call gives None."""
        found, self._flops = self._flops, None
        return found

    def counted(self) -> AbstractContextManager[object]:
        """Within the body FLOPs are added, if they are still wanted."""
        return nullcontext() if self._flops is None else self._counting()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        counter = FlopSum()
        try:
            with counter:
                yield
        finally:  # what is computed again ends early, by an exception
            if self._flops is not None:
                self._flops += counter.flops

    def contexts(self, policy: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Those of a block's first and second forward pass."""
        first, again = nullcontext(), nullcontext()
        if policy != "full":
            first, again = create_selective_checkpoint_contexts(_choose)  # type: ignore[no-untyped-call]
        return first, self._second(again)

    @contextmanager
    def _second(self, again: AbstractContextManager[Any]) -> Iterator[None]:
        with self.counted(), again:  # what was kept is not computed, and not seen by the outer ones
            yield


def recompute_blocks(model: nn.Module, policies: Mapping[str, Recompute]) -> None:
    """Let the blocks whose paths match compute their forward pass again. Random numbers (dropout) are the same again.

    InputError if a block lies in another one that is recomputed, or has batch statistics, which would be counted twice.
    """
    chosen = [
        (path, module, policy)
        for path, module in model.named_modules()
        for policy in [next((policies[pattern] for pattern in policies if fnmatchcase(path, pattern)), None)]
        if path and policy is not None
    ]
    recomputed = Recomputed()
    for path, module, policy in chosen:
        inside = next((other for other, *_ in chosen if other.startswith(path + ".")), None)
        if inside:
            raise InputError(
                f"plan: recompute: block {inside!r} lies in block {path!r}: give a pattern for one of the two"
            )
        if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()):
            raise InputError(
                f"plan: recompute: block {path!r} has batch normalisation, whose statistics would count twice"
            )
        again = partial(recomputed.contexts, policy)
        module.forward = partial(_recomputed, module, module.forward, again)
    if chosen:
        setattr(model, RECOMPUTED, recomputed)


def recomputed_of(model: nn.Module) -> Recomputed | None:
    """What counts the FLOPs that blocks of a model compute again; None if none does."""
    return getattr(model, RECOMPUTED, None)


def is_computed_again() -> bool:
    """True in a forward pass that the backward pass repeats."""
    return bool(torch._C._current_graph_task_id() != -1)


def _recomputed(module: nn.Module, forward: Any, contexts: Callable[[], Any], *inputs: Any, **named: Any) -> Any:
    if not module.training:
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)


def _choose(context: object, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
    kept = operator.overloadpacket in KEPT and not operator._schema.is_mutable  # what others write into changes
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
