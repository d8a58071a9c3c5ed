"""Recomputation of a block within a memory budget: torch's min-cut partitioner chooses what its forward pass keeps.

A budget is a part of what the partitioner keeps where it computes no product again; 0 keeps inputs and drawn random
numbers.

The block is traced once for each kind of inputs, forward and backward pass. Both graphs are then run operator by
operator, so no C++ compiler is needed and the operators are those of the plain block. Random numbers (dropout) are
drawn once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_function,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_error
from mlhpc.suite.training.counts.flops import list_flop_formulas

LEAST = 1e-9
KINDS = 16  # kinds of inputs for which a block is traced
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class BudgetedForward:
    """Stands for a block's forward pass. ``again`` is told the FLOPs of what each backward pass computes again.

    InputError, at the first call with a kind of inputs, if the block cannot be traced.
    """

    def __init__(self, path: str, block: nn.Module, budget: float, again: Callable[[int], None]) -> None:
        self._path, self._block, self._budget, self._again = path, block, budget, again
        self._forward = block.forward
        self._traced: dict[Any, tuple[Callable[..., Any], list[Any]]] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The forward pass; outside of training as it was."""
        if not self._block.training or not torch.is_grad_enabled():
            return self._forward(*inputs, **named)
        values, tree = tree_flatten((inputs, named))
        given = [each for each in values if isinstance(each, Tensor)]
        own = [each for _, _, each in _own(self._block)]
        key = str(tree), *(self._kind(each) for each in (*values, *own)), _autocast()
        if key not in self._traced:
            self._traced[key] = self._trace(values, tree, given, own)
        run, result = self._traced[key]
        found = run(*given, *own)
        return tree_unflatten(list(found), result[0])

    def _kind(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.stride(), value.dtype, value.requires_grad
        if not isinstance(value, PLAIN):
            raise self._refused(f"it is called with a {type(value).__name__}")
        return type(value), value

    def _trace(self, values: list[Any], tree: Any, given: list[Tensor], own: list[Tensor]) -> Any:
        """The compiled pass, and how its results become those of the block.

        Nothing that is running counts or sees the trace.
        """
        if len(self._traced) >= KINDS:
            raise self._refused(f"it was called with more than {KINDS} kinds of inputs")
        result: list[Any] = []

        def plain(*tensors: Tensor) -> list[Tensor]:
            inputs = iter(tensors[: len(given)])
            args, named = tree_unflatten([next(inputs) if isinstance(each, Tensor) else each for each in values], tree)
            with _in_place_of(self._block, list(tensors[len(given) :])):
                found, how = tree_flatten(self._forward(*args, **named))
            if not all(isinstance(each, Tensor) for each in found):
                raise TypeError("it returns more than tensors")
            result[:] = [how]
            return found

        run = aot_function(
            plain, _as_it_is, self._counted, partition_fn=self._partition, keep_inference_input_mutations=False
        )
        before = _attributes(self._block)
        try:
            with _disable_current_modes(), torch.random.fork_rng(devices=[]):
                first = run(*(each.detach().requires_grad_(each.requires_grad) for each in (*given, *own)))
                del first
        except Exception as error:  # anything that a model does which a trace cannot follow
            raise self._refused(render_error(error)) from None
        if _attributes(self._block) != before:
            raise self._refused("its forward pass sets attributes")
        return run, result

    def _partition(self, joint: Any, inputs: Any, **more: Any) -> Any:
        for node in joint.graph.nodes:  # the partitioner would draw other random numbers in the backward pass
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        # At 0 it does not look at what must be kept
        with functorch.patch(activation_memory_budget=max(self._budget, LEAST)):
            return min_cut_rematerialization_partition(joint, inputs, **more)

    def _counted(self, graph: Any, _: object) -> Callable[..., Any]:
        """The backward pass, which says what it computes again each time."""
        known, flops = list_flop_formulas(), 0
        for node in graph.graph.nodes:
            formula = known.get(getattr(node.target, "overloadpacket", None))
            if formula is not None and node.meta.get("partitioner_tag") != "is_backward":
                args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
                flops += formula(*args, **kwargs, out_val=node.meta["val"])

        def run(*tensors: Any) -> Any:
            self._again(flops)
            return graph.forward(*tensors)

        return make_boxed_func(run)  # type: ignore[no-any-return]

    def _refused(self, reason: str) -> InputError:
        return InputError(
            f"plan: recompute: block {self._path!r} cannot have a budget: {reason}: expected full or selective"
        )


def _as_it_is(graph: Any, _: object) -> Any:
    return make_boxed_func(graph.forward)  # not a call of a module, which hooks of counters would see


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _own(block: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The tensors that a block computes with beside its inputs, and where they are: parameters and buffers."""
    return [
        (place, name, each)
        for module in block.modules()
        for place in (module._parameters, module._buffers)
        for name, each in place.items()
        if isinstance(each, Tensor)
    ]


@contextmanager
def _in_place_of(block: nn.Module, tensors: list[Tensor]) -> Iterator[None]:
    """Within the body a block computes with other tensors than its own."""
    places = _own(block)
    try:
        for (place, name, _), tensor in zip(places, tensors, strict=True):
            place[name] = tensor
        yield
    finally:
        for place, name, tensor in places:
            place[name] = tensor


def _attributes(block: nn.Module) -> list[Any]:
    """What would show that a forward pass leaves something in its modules."""
    return [
        (name, id(value))
        for module in block.modules()
        for name, value in vars(module).items()
        if not isinstance(value, dict)
    ]
