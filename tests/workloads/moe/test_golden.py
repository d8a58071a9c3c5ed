"""Tutel's published losses of its helloworld example, reproduced without Tutel.

microsoft/tutel, tests/test_baseline.json: 2048 x 2048 FFN experts with ReLU, batch x 1024 tokens, SGD 1e-5, labels all 0. Its
encode and decode compute in float32, so its float64 series is reproduced to 2e-6 and its float32 ones to 1e-4.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.layer import MoELayer

WIDTH = 2048


def losses(steps: int, *, experts: int, top_k: int, batch: int, dtype: torch.dtype) -> list[float]:
    config = MoEConfig(
        experts=experts, top_k=min(top_k, experts), hidden=WIDTH, activation="relu", bias=True, balance="none",
        dispatch="capacity",
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        layer = MoELayer(WIDTH, config)
        tutel_weights(layer, experts)
    finally:
        torch.set_default_dtype(before)
    torch.manual_seed(0)
    x = torch.randn(batch, 1024, WIDTH, dtype=torch.float32).to(dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-5)
    series = []
    for _ in range(steps):
        y = layer(x.reshape(-1, WIDTH)).y_TD.view_as(x)
        loss = F.nll_loss(F.log_softmax(y.sum(2), dim=1), torch.zeros(batch, dtype=torch.int64))
        series.append(loss.item())
        if len(series) < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return series


@torch.no_grad()
def tutel_weights(layer: MoELayer, experts: int) -> None:
    """Seeds (1, rank + 1, 1): experts one by one from seed 1, then the gate from seed 1 again."""
    torch.manual_seed(1)
    for e in range(experts):
        up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        layer.experts.up_EHD[e] = up.weight
        layer.experts.up_bias_EH[e] = up.bias
        layer.experts.down_EHD[e] = down.weight.t()
        layer.experts.down_bias_ED[e] = down.bias
    torch.manual_seed(1)
    layer.router.gate.weight.copy_(nn.Linear(WIDTH, experts, bias=False).weight)


def test_the_first_losses_of_the_float64_series() -> None:
    found = losses(2, experts=2, top_k=2, batch=1, dtype=torch.float64)
    assert found == pytest.approx([27.448386457158, 16.62704052924519], abs=2e-6)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_float64_series_to_its_end() -> None:
    found = losses(100, experts=2, top_k=2, batch=1, dtype=torch.float64)
    published = {2: 7.467060806621459, 99: 0.001487254744157}
    print("float64, largest difference", max(abs(found[step] - loss) for step, loss in published.items()))
    assert {step: found[step] for step in published} == pytest.approx(published, abs=2e-6)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("experts", "top_k", "expected"),
    [
        (1, 1, [29.98500633, 28.76188469, 27.58047867]),
        (1, 2, [29.98500633, 28.76188469, 27.58047867]),
        (2, 1, [22.07648277, 21.38795090, 20.73025894]),  # drops tokens
        (2, 2, [24.08013153, 23.29282570, 22.53414345]),
    ],
)
def test_the_float32_series(experts: int, top_k: int, expected: list[float]) -> None:
    assert losses(3, experts=experts, top_k=top_k, batch=16, dtype=torch.float32) == pytest.approx(expected, abs=1e-4)


@pytest.mark.long
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize(
    ("experts", "top_k", "last"), [(1, 1, 0.02104663), (2, 1, 0.10930978), (2, 2, 0.04852567)], ids=str
)
def test_the_float32_series_to_its_end(experts: int, top_k: int, last: float) -> None:
    found = losses(100, experts=experts, top_k=top_k, batch=16, dtype=torch.float32)
    print(f"float32, {experts} experts, top {top_k}, step 99: difference", abs(found[99] - last))
    assert found[99] == pytest.approx(last, abs=1e-4)
