"""What a layer promises of a GPU, where there is one: equal bits, no waiting, a CUDA graph (without one: `layer_worker.py`)."""

import warnings

import pytest
import torch
from torch import Tensor

from mlhpc.suite.documents import convert
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.layer import MoELayer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

# dispatch, back end, type, how often the host may wait in a step
FORMS = [
    ("dropless", "grouped_mm", torch.bfloat16, 0), ("dropless", "auto", torch.bfloat16, 0),
    ("dropless", "auto", torch.float32, 1), ("dropless", "loop", torch.float32, 1),
    ("capacity", "grouped_mm", torch.bfloat16, 0), ("capacity", "auto", torch.float32, 0),
    ("capacity", "bmm", torch.bfloat16, 0), ("capacity", "loop", torch.float32, 0),
]  # fmt: skip


def made(dispatch: str, backend: str, dtype: torch.dtype) -> tuple[MoELayer, Tensor, Tensor]:
    torch.manual_seed(0)
    settings = {"experts": 16, "top_k": 4, "hidden": 256, "dispatch": dispatch, "backend": backend}
    layer = MoELayer(256, convert(settings, MoEConfig)).to("cuda", dtype)
    return layer, torch.randn(1024, 256, device="cuda").to(dtype), torch.randn(1024, 256, device="cuda").to(dtype)


def passes(layer: MoELayer, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x)
    torch.autograd.backward([out.y_TD, out.auxiliary_loss], [gradient, torch.ones_like(out.auxiliary_loss)])
    found = [out.y_TD.detach(), x.grad, *(each.grad for each in layer.parameters())]
    layer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(("dispatch", "backend", "dtype", "waits"), FORMS)
def test_a_layer_repeats_bit_for_bit(dispatch: str, backend: str, dtype: torch.dtype, waits: int) -> None:
    layer, x, gradient = made(dispatch, backend, dtype)
    first, second = passes(layer, x, gradient), passes(layer, x, gradient)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(("dispatch", "backend", "dtype", "waits"), FORMS)
def test_the_host_waits_at_most_once(dispatch: str, backend: str, dtype: torch.dtype, waits: int) -> None:
    layer, x, gradient = made(dispatch, backend, dtype)
    passes(layer, x, gradient)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            passes(layer, x, gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(each.message) for each in told) == waits


@pytest.mark.parametrize(("dispatch", "backend", "dtype", "waits"), [form for form in FORMS if form[3] == 0])
def test_a_step_without_waiting_becomes_a_graph(dispatch: str, backend: str, dtype: torch.dtype, waits: int) -> None:
    layer, x, _ = made(dispatch, backend, dtype)
    x.requires_grad_()

    def step() -> Tensor:
        y_TD: Tensor = layer(x).y_TD
        y_TD.float().square().sum().backward()  # type: ignore[no-untyped-call]
        return y_TD

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TD = step()
    x.data.copy_(torch.randn_like(x))  # other tokens for other experts
    graph.replay()
    found = y_TD.detach().clone()
    assert torch.equal(found, step())
