"""Counted FLOPs against arithmetic done by hand, where torch's own counter is wrong or silent; what no formula covers is named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlhpc.suite.training.counts.flops import count


@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (2, False), (8, False), (1, True), (4, True)])
def test_a_grouped_convolution_costs_its_own_channels_forward_and_backward(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 8, 3, padding=1, groups=groups, bias=False)
    x = torch.randn(2, 8, 5, 6, requires_grad=True)
    once = 2 * 2 * 5 * 6 * 9 * 8 * 8 // groups
    assert count(lambda: layer(x)).flops == once
    assert count(lambda: layer(x).sum().backward()).flops == 3 * once
    x = x.detach()
    assert count(lambda: layer(x).sum().backward()).flops == 2 * once, "an input without gradient costs none"


def test_grouped_products_count_every_row_once() -> None:
    rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(4, 16, 24, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([8, 16, 20, 32], dtype=torch.int32)
    counted = count(lambda: torch._grouped_mm(rows, experts, offs=ends).float().square().sum().backward())
    assert counted.flops == 3 * 2 * 32 * 16 * 24
    assert counted.uncovered == {}


def test_attention_counts_all_pairs_and_the_scores_again_backward() -> None:
    q, k, v = (torch.randn(2, 3, 32, 8, requires_grad=True) for _ in range(3))
    pairs = 2 * 3 * 32 * 32 * 8 * 2
    counted = count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert counted.flops == pairs * (2 + 5)


def test_sparse_products_count_stored_values() -> None:
    with pytest.warns(UserWarning, match="CSR"):
        matrix = torch.eye(50).to_sparse_csr()
    dense = torch.randn(50, 7)
    assert count(lambda: matrix @ dense).flops == 2 * 50 * 7
    assert count(lambda: torch.eye(50).to_sparse() @ dense).flops == 2 * 50 * 7
    rows, index, begins = torch.randn(9, 4), torch.tensor([1, 8, 3]), torch.tensor([0, 2])
    weighted = count(lambda: F.embedding_bag(index, rows, begins, mode="sum", per_sample_weights=torch.ones(3)))
    assert weighted.flops == 2 * 3 * 4
    assert count(lambda: F.embedding_bag(index, rows, begins, mode="sum")).flops == 0


def test_vectors_count_too() -> None:
    matrix, vector = torch.randn(5, 7), torch.randn(7)
    assert count(lambda: matrix @ vector).flops == 70
    assert count(lambda: vector @ vector).flops == 14


def test_what_has_no_formula_is_named_and_what_counts_nothing_is_not() -> None:
    lstm = nn.LSTM(8, 8)
    counted = count(lambda: lstm(torch.randn(3, 1, 8))[0].sum().backward())
    assert counted.flops == 0
    assert set(counted.uncovered) == {"aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"}
    assert "mkldnn_rnn_layer (1 calls)" in counted.lines()[-1]
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(16)
    )
    counted = count(lambda: plain(torch.randn(2, 2, 6, 6)).softmax(-1).mean().backward())
    assert counted.uncovered == {}
    assert set(counted.by_operator) == {"convolution", "convolution_backward"}


def test_a_custom_operator_is_named() -> None:
    @torch.library.custom_op("mlhpc_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert count(lambda: double(torch.ones(2))).uncovered == {"mlhpc_test.double": 1}


def test_an_optimizer_s_step_counts_nothing_and_leaves_nothing_unnamed() -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        counted = count(kind(model.parameters(), lr=0.1).step)
        assert (counted.flops, dict(counted.uncovered)) == (0, {})


def test_modules_are_charged_with_what_their_calls_do() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2)))
    counted = count(lambda: model(torch.ones(3, 4)).sum().backward(), model)
    first, second, third = 2 * 3 * 4 * 8, 2 * 3 * 8 * 2, 2 * 3 * 2 * 2
    parts = {"": first + second + third, "0": first, "1": 0, "2": second + third, "2.0": second, "2.1": third}
    assert counted.by_module == parts
    assert counted.flops == 3 * sum((first, second, third)) - first  # the input needs no gradient


def test_every_form_of_a_pointwise_operator_is_left_out() -> None:
    x = torch.ones(4)
    counted = count(lambda: [torch.ops.aten.gelu.out(x, out=torch.empty(4)), F.gelu(x), x.clone().relu_()])
    assert counted.uncovered == {}
