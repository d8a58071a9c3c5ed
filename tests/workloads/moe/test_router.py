"""Scores, selection and the balancing losses have the values their papers give."""

import pytest
import torch

from mlhpc.suite.documents import convert
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.router import Router, compute_gshard_loss, compute_importance_load_loss, compute_z_loss


def config(**settings: object) -> MoEConfig:
    return convert({"experts": 4, "hidden": 8, "balance": "none"} | settings, MoEConfig)


@pytest.fixture
def x_TD() -> torch.Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def test_weights_of_two_choices_sum_to_one_before_anything_drops(x_TD: torch.Tensor) -> None:
    torch.manual_seed(0)
    routing = Router(6, config())(x_TD)
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(16))
    assert (routing.weights_TK[:, 0] >= routing.weights_TK[:, 1]).all()


def test_a_single_choice_keeps_its_score(x_TD: torch.Tensor) -> None:
    torch.manual_seed(0)
    router = Router(6, config(top_k=1))
    expected = router.gate(x_TD).softmax(1).amax(1, keepdim=True)
    assert torch.equal(router(x_TD).weights_TK, expected)


def test_cosine_scores_do_not_depend_on_the_length_of_a_token(x_TD: torch.Tensor) -> None:
    torch.manual_seed(0)
    router = Router(6, config(router="cosine"))
    torch.testing.assert_close(router(x_TD).weights_TK, router(7 * x_TD).weights_TK)


def test_cosine_temperature_is_bounded(x_TD: torch.Tensor) -> None:
    torch.manual_seed(0)
    router = Router(6, config(router="cosine"))
    with torch.no_grad():
        router.log_scale.fill_(50.0)
    assert router._logits(x_TD).abs().max() <= 100.0 * (1 + 1e-6)


def test_gshard_loss_is_one_if_balanced_and_e_if_collapsed() -> None:
    even = torch.full((8, 4), 0.25)
    assert float(compute_gshard_loss(even, torch.arange(8) % 4)) == pytest.approx(1.0)
    collapsed = torch.nn.functional.one_hot(torch.zeros(8, dtype=torch.int64), 4).float()
    assert float(compute_gshard_loss(collapsed, torch.zeros(8, dtype=torch.int64))) == pytest.approx(4.0)


def test_importance_and_load_loss_is_zero_if_balanced() -> None:
    logits = torch.eye(4).repeat(4, 1)
    assert float(compute_importance_load_loss(logits, logits, 1, 0.5)) == pytest.approx(0.0, abs=1e-12)
    skewed = logits.clone()
    skewed[:, 0] += 2
    assert float(compute_importance_load_loss(skewed, skewed, 1, 0.5)) > 0.5


def test_load_is_the_chance_of_being_chosen_under_the_noise() -> None:
    """Two experts, k = 1: the loser of (0, -1) with noise 1 has the chance P(N(0, 1) > 1) to pass the threshold 0."""
    logits = torch.tensor([[0.0, -1.0]], dtype=torch.float64)
    load = torch.tensor([0.5, 0.15865525], dtype=torch.float64)
    importance = logits.softmax(1)[0]
    expected = sum(v.var() / v.mean() ** 2 for v in (load, importance)) / 2
    assert float(compute_importance_load_loss(logits, logits, 1, 1.0)) == pytest.approx(float(expected), rel=1e-6)


def test_z_loss_of_uniform_logits() -> None:
    assert float(compute_z_loss(torch.zeros(5, 8))) == pytest.approx(float(torch.tensor(8.0).log() ** 2))


def test_the_bias_selects_but_does_not_weigh(x_TD: torch.Tensor) -> None:
    torch.manual_seed(0)
    router = Router(6, config(top_k=1, balance="bias"))
    scores = router.gate(x_TD).softmax(1)
    router.bias_E[2] = 10.0
    routing = router(x_TD)
    assert (routing.experts_TK == 2).all()
    assert torch.equal(routing.weights_TK[:, 0], scores[:, 2])


def test_the_bias_moves_against_the_load_and_keeps_its_mean() -> None:
    router = Router(6, config(balance="bias", balance_coefficient=0.001))
    router.update_bias(torch.tensor([9, 1, 1, 1]), None)
    assert router.bias_E.tolist() == pytest.approx([-0.0015, 0.0005, 0.0005, 0.0005])


def test_noise_only_in_training(x_TD: torch.Tensor) -> None:
    torch.manual_seed(0)
    router = Router(6, config(gate_noise=5.0, balance="importance_load"))
    first, second = router(x_TD), router(x_TD)
    assert not torch.equal(first.weights_TK, second.weights_TK)
    assert first.auxiliary_loss.item() > 0
    router.eval()
    assert torch.equal(router(x_TD).weights_TK, router(x_TD).weights_TK)


def test_no_tokens_no_loss() -> None:
    router = Router(6, config(balance="gshard", z_coefficient=0.1))
    routing = router(torch.zeros(0, 6))
    assert routing.auxiliary_loss.item() == 0.0
    assert routing.experts_TK.shape == (0, 2)


def test_bad_combinations_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k is 5, expected at most the number of experts, 4"):
        config(top_k=5)
    with pytest.raises(ValueError, match="gate_noise"):
        config(balance="importance_load")
    with pytest.raises(ValueError, match="no capacity"):
        config(capacity_factor=1.0)


@pytest.mark.parametrize("kind", ["softmax", "cosine"])
@pytest.mark.parametrize("convert", ["to", "bfloat16", "half"])
def test_a_router_stays_in_float32_when_a_layer_is_shortened(kind: str, convert: str) -> None:
    """Else one token in 35 goes to other experts. Of the same tokens it makes the same decisions, to the bit."""
    torch.manual_seed(0)
    layer = MoELayer(32, MoEConfig(experts=16, hidden=8, router=kind))
    tokens = torch.randn(200, 32).bfloat16()
    before = layer.router(tokens.float())
    shortened = layer.to(torch.bfloat16) if convert == "to" else getattr(layer, convert)()
    assert {each.dtype for each in shortened.router.parameters()} == {torch.float32}
    assert {each.dtype for each in shortened.experts.parameters()} != {torch.float32}
    found = shortened.router(tokens)
    assert torch.equal(found.experts_TK, before.experts_TK)
    assert torch.equal(found.weights_TK, before.weights_TK)


def test_a_router_follows_to_float64_and_to_another_device() -> None:
    router = Router(8, MoEConfig(experts=4, hidden=8))
    assert next(router.double().parameters()).dtype == torch.float64
    assert next(router.bfloat16().parameters()).dtype == torch.float64  # kept as it is, not made shorter
    assert next(router.float().parameters()).dtype == torch.float32
    moved = router.to("meta", torch.bfloat16)
    assert {(each.device.type, each.dtype) for each in moved.parameters()} == {("meta", torch.float32)}


def test_the_bias_moves_by_the_load_of_all_parts_of_a_step() -> None:
    """Two passes before one update count as one pass over both batches."""

    def moved(parts: int) -> torch.Tensor:
        torch.manual_seed(4)
        layer = MoELayer(8, MoEConfig(experts=4, top_k=1, hidden=8, balance="bias")).train()
        for part in torch.randn(16, 8).chunk(parts):
            layer(part)
        layer.update_bias(None)
        return layer.router.bias_E

    assert moved(1).abs().max() > 0
    assert torch.equal(moved(2), moved(1))
