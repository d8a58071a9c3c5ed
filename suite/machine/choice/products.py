"""Chooses the library for large float32 products of dense layers on a processor, and computes them with it.

torch calls Intel's MKL. On other makers' processors that leaves half of the vector units unused; oneDNN does not.
Results differ only in rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.machine.choice.chooser import Candidate, Question
from mlhpc.suite.workload import ChooserProtocol

RULE, ONEDNN = "torch", "onednn"
MAX_TIMED_TOKENS = 4096  # of a product that is timed: more take longer, not other ways
MIN_MULTIPLY_ADDS = 1 << 21  # multiply-adds of a product; of a smaller one the call itself takes longer than is gained


class Dense(nn.Linear):
    """An nn.Linear whose product oneDNN computes if `choose_products` has found that to be faster."""

    onednn = False

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., inputs) to (..., outputs)."""
        return compute_linear(x, self.weight, self.bias, onednn=self.onednn)


def choose_products(
    chooser: ChooserProtocol, model: nn.Module, config: RunConfig, tokens: float, inputs: int, outputs: int
) -> None:
    """Choose whether oneDNN computes the large products of a model's `Dense` layers. Every rank calls it.

    The extents are those of the largest product. Nothing is measured if that is small, in another precision than
    float32, on a GPU, or if torch has no oneDNN.
    """
    if config.precision == "float32" and choose_product(chooser, min(int(tokens), MAX_TIMED_TOKENS), inputs, outputs):
        for module in model.modules():
            if isinstance(module, Dense):
                module.onednn = True


def choose_product(chooser: ChooserProtocol, tokens: int, inputs: int, outputs: int) -> bool:
    """Choose for a product of the given extents.

    False, without measuring, in the cases that `choose_products` names.
    """
    if chooser.device.type != "cpu" or tokens * inputs * outputs < MIN_MULTIPLY_ADDS or not has_onednn():
        return False

    def ways() -> Mapping[str, Candidate]:
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, inputs, generator=generator).requires_grad_() for n in (tokens, outputs))
        return {
            RULE: partial(_run_forward_backward, x, weight, False),
            ONEDNN: partial(_run_forward_backward, x, weight, True),
        }

    shape = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
    answer = chooser.choose(
        Question(name="product", shape=shape, rule=RULE, ways=ways, possible={RULE, ONEDNN}.__contains__)
    )
    return answer == ONEDNN


def compute_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> Tensor:
    """Compute ``F.linear``; with oneDNN if that is chosen and the product is large, in float32 and on a CPU."""
    if not onednn or x.numel() * len(weight) < MIN_MULTIPLY_ADDS or not is_float32_on_cpu(x):
        return F.linear(x, weight, bias)
    found: Tensor = _OneDnnLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    return found if x.dim() == 2 else found.view(*x.shape[:-1], len(weight))


def is_float32_on_cpu(x: Tensor) -> bool:
    """Return True if an operator on x computes in float32 on a processor."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


class _OneDnnLinear(torch.autograd.Function):
    """Computes x weight^T + bias. Its gradients are such products too, so it has second derivatives."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        context.save_for_backward(x, weight)
        return compute_onednn_product(x, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        of_x, of_weight, of_bias = context.needs_input_grad
        return (
            _OneDnnLinear.apply(gradient, weight.t(), None) if of_x else None,  # type: ignore[no-untyped-call]
            _OneDnnLinear.apply(gradient.t(), x.t(), None) if of_weight else None,  # type: ignore[no-untyped-call]
            gradient.sum(0) if of_bias else None,
        )


def compute_onednn_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute left right^T + bias of two float32 matrices on a processor. Each may be transposed in memory."""
    left, right = (
        each if each.is_contiguous() or each.t().is_contiguous() else each.contiguous() for each in (left, right)
    )
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")  # type: ignore[no-any-return]


def _run_forward_backward(x: Tensor, weight: Tensor, onednn: bool) -> object:
    """Run a forward and a backward pass."""
    with torch.enable_grad():
        found = compute_linear(x, weight, None, onednn=onednn)
    return torch.autograd.grad(found, (x, weight), torch.ones_like(found))


def has_onednn() -> bool:
    """Return True if this torch has oneDNN's product."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
