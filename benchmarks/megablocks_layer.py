"""MegaBlocks' dropless layer: its own Python code from a clone, with torch's operators for what would have to be compiled.

The clone (https://github.com/databricks/megablocks) gives the router, the order of tokens, the autograd functions and the layer
`dMoE` with grouped products. Its kernels need CUDA or Triton: sort, histogram and running sum of `megablocks_ops`, copies of rows
in `megablocks.backend.kernels`, and the products of the package `grouped_gemm`. They are replaced here, each by the operators of
torch that do the same; products by one product per expert (as the tests of grouped_gemm have them) or by torch's grouped_mm,
whichever the caller names. On a GPU its Triton kernels, which copy rows, stay what they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

REPOSITORY = "databricks/megablocks"


def layer(
    clone: Path,
    width: int,
    hidden: int,
    experts: int,
    top_k: int,
    products: str,
    activation: str = "relu",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> nn.Module:
    """Make its layer with ReLU or SwiGLU, weights of the chosen experts of sum 1, no bias and no balance loss.

    ``products``: ``loop`` or ``grouped_mm``, chosen when its modules are loaded: the first layer of a process decides.
    """
    if "megablocks" not in sys.modules:
        _replace_kernels(products, device)
    sys.path.insert(0, str(clone))
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    return dMoE(
        Arguments(
            hidden_size=width,
            ffn_hidden_size=hidden,
            moe_num_experts=experts,
            moe_top_k=top_k,
            moe_normalize_expert_weights=1,
            moe_loss_weight=0,
            activation_fn=functional.silu if activation == "swiglu" else functional.relu,
            mlp_type="glu" if activation == "swiglu" else "mlp",
            bias=False,
            fp16=False,
            bf16=dtype == torch.bfloat16,
            device=torch.device(device),
            mlp_impl="grouped",
        )
    )


def _replace_kernels(products: str, device: str) -> None:
    def module(name: str, **content: Any) -> ModuleType:
        made = sys.modules[name] = ModuleType(name)
        for key, value in content.items():
            setattr(made, key, value)
        return made

    backend = module("stk.backend", triton_kernels=module("stk.backend.triton_kernels"))
    module("stk", Matrix=object, ops=module("stk.ops"), backend=backend)  # of the sparse layer, which is another one
    module("stk.backend.autocast", custom_fwd=_as_it_is, custom_bwd=_as_it_is)
    module("megablocks_ops", sort=_sort, histogram=_histogram, inclusive_cumsum=_inclusive_cumsum)
    if device == "cpu":
        module("megablocks.backend.kernels", gather=_gather, scatter=_scatter, scatter_wgrad=_scatter_wgrad)
    products_of, gradients_of = {"loop": (_each, _gradient_of_each), "grouped_mm": (_grouped, _gradient_grouped)}[
        products
    ]

    def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        return _Products.apply(a, b, batch_sizes, trans_b, products_of, gradients_of)

    module("grouped_gemm", backend=None, ops=module("grouped_gemm.ops", gmm=gmm))


def _as_it_is(function: Any) -> Any:
    return function


def _sort(x: torch.Tensor, end_bit: int, sorted_out: torch.Tensor, order_out: torch.Tensor) -> None:
    values, order = torch.sort(x, stable=True)
    sorted_out.copy_(values)
    order_out.copy_(order)


def _histogram(x: torch.Tensor, bins: int) -> torch.Tensor:
    # bincount would make the host wait for a GPU
    return torch.zeros(bins, dtype=torch.int32, device=x.device).scatter_add_(0, x.long(), torch.ones_like(x).int())


def _inclusive_cumsum(x: torch.Tensor, dim: int, out: torch.Tensor) -> None:
    out.copy_(x.cumsum(dim))


def _gather(x_TD, order_N, bin_ids, weights_N, bins, top_k):
    rows_ND = x_TD.index_select(0, order_N // top_k)
    return rows_ND if weights_N is None else rows_ND.mul_(weights_N[order_N, None])


def _scatter(x_ND, order_N, bin_ids, weights_N, bins, top_k):
    scaled_ND = x_ND if weights_N is None else x_ND * weights_N[order_N, None]
    placed_ND = torch.empty_like(x_ND).index_copy_(0, order_N.long(), scaled_ND)
    return placed_ND.view(-1, top_k, x_ND.shape[1]).sum(1) if top_k > 1 else placed_ND


def _scatter_wgrad(x_ND, grad_TD, order_N, bin_ids, bins, top_k):
    products_N = torch.linalg.vecdot(x_ND, grad_TD.index_select(0, order_N // top_k))
    return torch.empty_like(products_N).index_copy_(0, order_N.long(), products_N)


class _Products(torch.autograd.Function):
    """The rows of each expert times its weights, which lie as (rows, columns) or transposed; their gradient lies as they do."""

    @staticmethod
    def forward(ctx: Any, x_NK, weights_EKM, rows_E, transposed: bool, products_of, gradients_of):
        ctx.save_for_backward(x_NK, weights_EKM, rows_E)
        ctx.transposed, ctx.products_of, ctx.gradients_of = transposed, products_of, gradients_of
        return products_of(x_NK, weights_EKM.mT if transposed else weights_EKM, rows_E)

    @staticmethod
    def backward(ctx: Any, grad_NM):
        x_NK, weights_EKM, rows_E = ctx.saved_tensors
        dx_NK = ctx.products_of(grad_NM, weights_EKM if ctx.transposed else weights_EKM.mT, rows_E)
        left, right = (grad_NM, x_NK) if ctx.transposed else (x_NK, grad_NM)
        return dx_NK, ctx.gradients_of(left, right, rows_E), None, None, None, None


def _each(x_NK, weights_EKM, rows_E):
    out_NM = x_NK.new_empty(len(x_NK), weights_EKM.shape[2])
    sizes = rows_E.tolist()
    for out, rows, weights in zip(out_NM.split(sizes), x_NK.split(sizes), weights_EKM, strict=True):
        torch.mm(rows, weights, out=out)
    return out_NM


def _gradient_of_each(left_NK, right_NM, rows_E):
    grad_EKM = left_NK.new_empty(len(rows_E), left_NK.shape[1], right_NM.shape[1])
    sizes = rows_E.tolist()
    for out, left, right in zip(grad_EKM, left_NK.split(sizes), right_NM.split(sizes), strict=True):
        torch.mm(left.t(), right, out=out)
    return grad_EKM


def _grouped(x_NK, weights_EKM, rows_E):
    return functional.grouped_mm(x_NK, weights_EKM, offs=rows_E.cumsum(0).int().to(x_NK.device))


def _gradient_grouped(left_NK, right_NM, rows_E):
    return functional.grouped_mm(left_NK.t(), right_NM, offs=rows_E.cumsum(0).int().to(left_NK.device))
