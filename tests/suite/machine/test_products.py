"""Products of dense layers by oneDNN: torch's values and gradients to rounding, and torch's own wherever it does not apply."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.machine.choice.chooser import ChoiceCache, Chooser
from mlhpc.suite.machine.choice.products import MIN_MULTIPLY_ADDS, Dense, choose_product, compute_linear, has_onednn
from mlhpc.suite.training.counts.flops import count
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World

LARGE = (2, 256, 64), 64  # x (2, 256, 128) and 128 outputs: just enough
pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN product")


def given(turned: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    (N, T, C), outputs = LARGE
    assert N * T * C * outputs >= MIN_MULTIPLY_ADDS
    torch.manual_seed(0)
    x = torch.randn(C, N * T).t() if turned else torch.randn(N, T, C)
    return x.requires_grad_(), torch.randn(outputs, C).requires_grad_(), torch.randn(outputs).requires_grad_()


def trained(x: Tensor, weight: Tensor, onednn: bool) -> object:
    return torch.autograd.grad(compute_linear(x, weight, None, onednn=onednn).sum(), (x, weight))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_values_gradients_and_flops_are_those_of_torch(turned: bool, biased: bool) -> None:
    x, weight, bias = given(turned)
    inputs = (x, weight, bias) if biased else (x, weight)
    found = [compute_linear(x, weight, bias if biased else None, onednn=way) for way in (True, False)]
    assert "OneDnnLinear" in type(found[0].grad_fn).__name__ + str(
        found[0].grad_fn.next_functions if found[0].grad_fn else ""
    )
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
    upstream = torch.ones(()).expand_as(found[0])  # lies in no memory of its own
    for one, other in zip(*(torch.autograd.grad(each, inputs, upstream) for each in found), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3)
    counted = [count(partial(trained, x, weight, way)) for way in (True, False)]
    assert counted[0].flops == counted[1].flops > 0
    assert counted[0].by_operator.keys() == {"mkldnn._linear_pointwise"}
    assert counted[0].uncovered == {}


def test_gradients_of_gradients_are_those_of_torch() -> None:
    x, weight, bias = given()
    found = []
    for way in (True, False):
        (of_x,) = torch.autograd.grad(
            compute_linear(x, weight, bias, onednn=way).square().sum() / 1e3, x, create_graph=True
        )
        found.append(torch.autograd.grad(of_x.square().sum() / 1e3, (x, weight, bias)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3 * float(other.abs().max()))


def test_other_types_and_small_products_are_torchs() -> None:
    x, weight, bias = given()
    small = compute_linear(x[:1, :8], weight, bias, onednn=True)
    assert torch.equal(small, torch.nn.functional.linear(x[:1, :8], weight, bias))
    double = compute_linear(x.double(), weight.double(), None, onednn=True)
    assert torch.equal(double, torch.nn.functional.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_linear(x, weight, None, onednn=True).dtype == torch.bfloat16
    assert compute_linear(x.to("meta"), weight.to("meta"), None, onednn=True).is_meta


def test_large_products_are_measured_and_small_ones_not_asked_of(tmp_path: Path) -> None:
    def chooser(**pinned: str) -> Chooser:
        return Chooser(
            World.create(None), torch.device("cpu"), measure=not pinned, store=ChoiceCache(tmp_path), pinned=pinned
        )

    measured = chooser()
    choose_product(measured, 512, 128, 128)
    assert measured.choices["product"].seconds.keys() == {"torch", "onednn"}
    assert choose_product(chooser(product="onednn"), 512, 128, 128)
    assert not choose_product(chooser(product="torch"), 512, 128, 128)
    asked = chooser(product="onednn")
    assert not choose_product(asked, 511, 64, 64)
    assert not asked.choices


def told(product: str) -> Chooser:
    return Chooser(
        World.create(None), torch.device("cpu"), measure=False, store=ChoiceCache(None), pinned={"product": product}
    )


@pytest.mark.parametrize(
    ("workload", "size", "large"),
    [
        *(("openfold", size, size != "smoke") for size in ("smoke", "mini", "small")),
        *(("open_catalyst", size, size == "small") for size in ("smoke", "mini", "small")),
        *(("moe_lm", size, True) for size in ("smoke", "mini", "middle")),
        *(("swinv2_moe", size, size != "smoke") for size in ("smoke", "mini", "small")),
    ],
)
def test_a_workload_follows_the_choice_where_its_products_are_large(workload: str, size: str, large: bool) -> None:
    chosen = load_descriptor(workload)
    built = load_workload(chosen)(load_config(chosen, size, ["device=cpu", "precision=float32"]))
    with torch.device("meta"):
        model = built.build_model(World.create(None))
    built.choose(model, told("onednn"))
    assert {module.onednn for module in model.modules() if isinstance(module, Dense)} == {large}


def test_in_bfloat16_nothing_is_asked() -> None:
    chosen = load_descriptor("moe_lm")
    built = load_workload(chosen)(load_config(chosen, "mini", ["device=cpu", "precision=bfloat16"]))
    with torch.device("meta"):
        model = built.build_model(World.create(None))
    asked = told("onednn")
    built.choose(model, asked)
    assert "product" not in asked.choices
    assert not any(module.onednn for module in model.modules() if isinstance(module, Dense))


def test_the_language_models_loss_and_gradients_by_onednn_are_those_of_torch() -> None:
    chosen = load_descriptor("moe_lm")
    config = load_config(chosen, "smoke", ["device=cpu", "precision=float32"])
    built = load_workload(chosen)(config)
    torch.manual_seed(0)
    model = built.build_model(World.create(None))
    batch = {"bytes": torch.randint(256, (8, config.hyperparameters.context + 1), dtype=torch.uint8)}
    found = []
    for way in (False, True):
        for module in model.modules():
            if isinstance(module, Dense):
                module.onednn = way
        loss = built.loss(model, batch)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)])
    assert any(not torch.equal(one, other) for one, other in zip(*found, strict=True) if one is not None)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
