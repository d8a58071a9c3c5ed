"""Back ends agree, their traps are guarded, and gradients are right by finite differences."""

import pytest
import torch

from mlhpc.suite.errors import InputError
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.experts import Experts, explain_grouped_problem, run_experts
from mlhpc.workloads.moe.layer import Dispatched, MoELayer
from mlhpc.workloads.moe.router import Routing


def make(width: int = 8, hidden: int = 12, bias: bool = True, activation: str = "gelu") -> Experts:
    torch.manual_seed(0)
    return Experts(3, width, hidden, activation, bias=bias)


@pytest.mark.parametrize("counts", [[4, 4, 4], [0, 7, 2], [0, 0, 9], [8, 0, 16], [3, 20, 14]])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("backend", ["onednn", "bmm", "grouped_mm"])
def test_back_ends_equal_the_loop(counts: list[int], activation: str, backend: str) -> None:
    experts = make(activation=activation)
    rows = torch.randn(sum(counts), 8)
    found, wanted = [], []
    for into, name in ((wanted, "loop"), (found, backend)):
        x = rows.clone().requires_grad_()
        y = run_experts(x, torch.tensor(counts), experts.weights(), activation, name)
        gradients = torch.autograd.grad(y.sum(), [x, *experts.parameters()])  # of a sum: an expanded gradient
        into += [y, *gradients]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("backend", ["loop", "onednn", "bmm", "grouped_mm"])
@pytest.mark.parametrize("counts", [[4, 4, 4], [3, 7, 2]])
def test_gradients_of_weights_lie_as_the_weights_do(backend: str, activation: str, counts: list[int]) -> None:
    """torch copies others into place before the optimizer takes them."""
    experts = make(activation=activation)
    y = run_experts(torch.randn(sum(counts), 8), torch.tensor(counts), experts.weights(), activation, backend)
    gradients = torch.autograd.grad(y, list(experts.parameters()), torch.randn_like(y))
    assert [each.stride() for each in gradients] == [each.stride() for each in experts.parameters()]


def test_no_rows_at_all() -> None:
    experts = make()
    for backend in ("loop", "onednn", "bmm"):
        x = torch.zeros(0, 8, requires_grad=True)
        y = run_experts(x, torch.zeros(3, dtype=torch.int64), experts.weights(), "gelu", backend)
        y.sum().backward()
        assert y.shape == (0, 8)


def test_grouped_mm_says_why_it_cannot() -> None:
    assert "float64" in str(explain_grouped_problem(torch.zeros(1, 8, dtype=torch.float64), make().weights()))
    odd = make(width=6)
    assert "16 bytes" in str(explain_grouped_problem(torch.zeros(1, 6), odd.weights()))
    with pytest.raises(InputError, match="choose loop or bmm"):
        run_experts(torch.zeros(3, 6), torch.ones(3, dtype=torch.int64), odd.weights(), "gelu", "grouped_mm")


@pytest.mark.parametrize(("counts", "taken"), [([2, 2, 2], "bmm"), ([1, 2, 3], "grouped_mm")])
def test_onednn_says_why_it_cannot_and_auto_takes_what_is_fast_for_the_load(counts: list[int], taken: str) -> None:
    rows, rows_E, experts = torch.randn(6, 8), torch.tensor(counts), make()
    with pytest.raises(InputError, match="float32 on a CPU, not torch.float64 on cpu"):
        run_experts(rows.double(), rows_E, experts.double().weights(), "gelu", "onednn")
    wanted = "loop" if explain_grouped_problem(rows, experts.weights()) else taken
    weights = make().weights()
    assert run_experts(rows, rows_E, weights, "gelu", "auto").equal(run_experts(rows, rows_E, weights, "gelu", wanted))


def test_a_slice_of_the_hidden_width_is_a_part_of_the_sum() -> None:
    """What r > 1 rests on: the FFN is the sum of the FFNs of its hidden slices."""
    rows, counts = torch.randn(6, 8), torch.tensor([2, 2, 2])
    whole = make(bias=False)
    parts = []
    for part in range(3):
        piece = make(bias=False)
        piece.keep(slice(0, 3), part, 3)
        parts.append(run_experts(rows, counts, piece.weights(), "gelu", "loop"))
    torch.testing.assert_close(sum(parts), run_experts(rows, counts, whole.weights(), "gelu", "loop"))


def test_a_width_that_cannot_be_sliced_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be divided among 5"):
        make().keep(slice(0, 3), 0, 5)


def test_gradients_by_finite_differences_through_the_renormalised_gate() -> None:
    torch.manual_seed(1)
    config = MoEConfig(experts=3, hidden=5, activation="swiglu", bias=True, balance="none", z_coefficient=0.1)
    layer = MoELayer(4, config).double()
    x_TD = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def through(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        return out.y_TD, out.auxiliary_loss

    assert torch.autograd.gradcheck(through, (x_TD, *values), atol=1e-6)


def one_token_at_a_time(layer: MoELayer, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
    """The simplest dispatcher: each choice of each token is one row for one expert."""
    experts = layer.config.experts
    y_T = []
    for x_D, experts_K, weights_K in zip(x_TD, routing.experts_TK.tolist(), routing.weights_TK, strict=True):
        rows_E = [torch.tensor([int(e == expert) for e in range(experts)]) for expert in experts_K]
        outputs = [layer.run_experts(x_D[None], one_E, layer.weights())[0] for one_E in rows_E]
        y_T.append(sum(weight * output for weight, output in zip(weights_K, outputs, strict=True)))
    assigned_E = torch.bincount(routing.experts_TK.flatten(), minlength=experts)
    return Dispatched(torch.stack(y_T), assigned_E, assigned_E.sum(), routing.experts_TK.numel())


def test_a_layer_runs_with_a_dispatcher_of_the_callers_own() -> None:
    """Output, gradients and counted load are those of the built-in dispatcher, in training and in evaluation."""
    config = MoEConfig(experts=3, hidden=5, bias=True, backend="loop")
    torch.manual_seed(2)
    built_in = MoELayer(4, config).double()
    passed = MoELayer(4, config, dispatcher=one_token_at_a_time).double()
    passed.load_state_dict(built_in.state_dict())
    x_TD = torch.randn(7, 4, dtype=torch.float64)
    for training in (True, False):
        results = []
        for layer in (built_in, passed):
            layer.train(training)
            x = x_TD.clone().requires_grad_()
            out = layer(x)
            loss = out.y_TD.square().sum() + out.auxiliary_loss
            results.append([out.y_TD, *torch.autograd.grad(loss, [x, *layer.parameters()])])
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert passed.load.read().report() == built_in.load.read().report()


def test_the_dispatcher_decides_how_tokens_reach_experts() -> None:
    """Without any expert, only zeros come out: nothing but the dispatcher passed in runs the experts."""

    def nothing(layer: MoELayer, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        assigned_E = torch.bincount(routing.experts_TK.flatten(), minlength=layer.config.experts)
        return Dispatched(torch.zeros_like(x_TD), assigned_E, torch.tensor(0), 0)

    layer = MoELayer(4, MoEConfig(experts=3, hidden=5), dispatcher=nothing)
    assert not layer(torch.randn(6, 4)).y_TD.any()
    assert layer.load.read().report()["drop_rate"] == 1.0
