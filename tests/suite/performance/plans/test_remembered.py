"""What is remembered of an operator is what torch's fake tensors give: sizes, strides, types, memory that is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from mlhpc.suite.performance.plans.remembered import MAX_LIST_TENSORS, CachingFakeTensorMode

OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(4, 6),
    "other view": lambda x: x.view(6, 4),
    "slice": lambda x: x[1:, :3],
    "slice of a slice": lambda x: x[1:, 1:][1:],
    "transpose": lambda x: x.t(),
    "copy in another layout": lambda x: x.t().contiguous(),
    "what lies so already": lambda x: x.contiguous(),
    "reshape that copies": lambda x: x.t().reshape(-1),
    "expand": lambda x: x[:1].expand(5, 6),
    "as_strided": lambda x: x[1].as_strided((2, 2), (1, 2), 3),
    "as_strided from elsewhere": lambda x: x[2].as_strided((2, 2), (1, 2)),
    "several views": lambda x: x.split(2),
    "several copies": lambda x: torch.split_with_sizes_copy(x, [1, 3], 0),
    "unbind": lambda x: x.unbind(1),
    "sum": lambda x: x + x.t()[:1].t(),
    "sum with an integer": lambda x: x + 1,
    "sum with a fraction": lambda x: x.long() + 1.0,
    "sum with an integer, of integers": lambda x: x.long() + 1,
    "in place": lambda x: x.add_(1),
    "in place, of a part": lambda x: x[1].mul_(2),
    "sum of two types": lambda x: x + x.long(),
    "product with a number that is a tensor": lambda x: x.bfloat16() * x.sum(),
    "difference, spread": lambda x: x.t() - x[:, :1].t(),
    "difference of a layout and another": lambda x: x[:4, :4].t() - x[:4, :4],
    "quotient of integers": lambda x: x.long() / 2,
    "quotient of the same": lambda x: x / x,
    "sum with itself in place": lambda x: x.add_(x),
    "copied into": lambda x: x.copy_(x.t()[:1].t().long()),
    "rows with a bias": lambda x: torch.addmm(x[0, :4], x, x.t()[:, :4]),
    "products of a batch": lambda x: torch.bmm(x.expand(2, 4, 6), x.t().expand(2, 6, 4)),
    "sum of a dimension": lambda x: x.t().sum(0),
    "sum of dimensions that stay": lambda x: x.expand(2, 4, 6).sum((0, 2), keepdim=True),
    "sum of integers": lambda x: x.int().sum(1),
    "sigmoid of integers": lambda x: x.long().sigmoid(),
    "sigmoid of the transpose": lambda x: x.t().sigmoid(),
    "relu of a part": lambda x: x[1:, :3].relu(),
    "gradient of relu": lambda x: torch.ops.aten.threshold_backward(x.t().contiguous().t(), x, 0),
    "some after another": lambda x: torch.cat([x, x[:2].double()]),
    "nothing after something": lambda x: torch.cat([x.t(), x.new_empty(0)]),
    "filled": lambda x: x[1:].fill_(2),
    "cast": lambda x: x.to(torch.bfloat16),
    "cast to what it is": lambda x: x.to(torch.float32),
    "product": lambda x: x @ x.t(),
    "two results": lambda x: x.max(1),
    "padding": lambda x: F.pad(x, (0, 3)),
    "many": lambda x: torch.cat([x] * (MAX_LIST_TENSORS + 1)),
    "lists": lambda x: torch._foreach_norm([x, x[0]]),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 6)] * 3),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "new": lambda x: x.new_zeros(3, 2),
    "empty": lambda x: torch.empty(7, dtype=torch.int64),
    "known value": lambda x: torch.tensor(3.0) * 2,
    "resized": lambda x: x.clone().resize_(2, 2),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).real,
}


def looks(found: Any, x: Tensor) -> Any:
    if isinstance(found, tuple | list):
        return [looks(each, x) for each in found]
    own = found.untyped_storage() is x.untyped_storage()
    size = found.untyped_storage().nbytes()
    return found.shape, found.stride(), found.dtype, found.storage_offset(), found.requires_grad, own, size, found is x


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_all_look_as_those_of_torch(precision: torch.dtype) -> None:
    def all_of(mode: FakeTensorMode) -> list[Any]:
        with mode:
            plain = [torch.empty(4, 6, dtype=precision) for _ in OPERATORS]
            other = [torch.empty(9, 6, dtype=precision)[5:] for _ in OPERATORS]
            return [
                looks(run(x), x) for each in (plain, other) for run, x in zip(OPERATORS.values(), each, strict=True)
            ]

    remembering = CachingFakeTensorMode()
    expected = all_of(FakeTensorMode(allow_non_fake_inputs=True))
    assert all_of(remembering) == expected
    assert all_of(remembering) == expected  # from memory


def test_gradients_and_values_that_do_not_exist() -> None:
    with CachingFakeTensorMode():
        for _ in range(2):
            weight = torch.empty(6, 6, requires_grad=True)
            x = torch.empty(4, 6)
            F.dropout(x @ weight, 0.5).relu().sum().backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            assert weight.grad.shape == (6, 6)
            assert not x.requires_grad
            with pytest.raises(DataDependentOutputException):
                x.sum().item()
            assert torch.tensor(3.0).item() == 3
