"""The network is the reference's, parameter for parameter; its optimizer, regulariser and schedule are those of Keras."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.errors import InputError
from mlhpc.workloads.cosmoflow import DESCRIPTOR
from mlhpc.workloads.cosmoflow.config import CosmoFlowConfig
from mlhpc.workloads.cosmoflow.model import (
    ONEDNN_ABOVE,
    Convolution,
    KerasSGD,
    forward_flops,
    list_regularised_weights,
)
from mlhpc.workloads.cosmoflow.schedule import learning_rate
from mlhpc.workloads.cosmoflow.workload import CosmoFlow

SIZES = list(DESCRIPTOR.card().sizes)


def config(size: str, *overrides: str) -> RunConfig:
    return load_config(DESCRIPTOR, size, overrides)


def batch(samples: int, side: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.poisson(torch.full((samples, side, side, side, 4), 8.0), generator=generator)
    return {"x": counts.to(torch.int16), "y": torch.rand(samples, 4, generator=generator) * 2 - 1}


def test_full_size_layers_are_those_of_the_reference() -> None:
    with torch.device("meta"):
        model = CosmoFlow(config("full")).build_model(None)
    layers = [
        sum(p.numel() for p in module.parameters()) for module in (*model.convolutions, *model.hidden, model.output)
    ]
    assert layers == [3_488, 55_360, 221_312, 884_992, 3_539_456, 4_194_432, 8_256, 260]


@pytest.mark.long  # the same step of meta tensors: tests/workloads/test_full_size.py
def test_one_training_step_at_full_shape() -> None:
    workload = CosmoFlow(config("full"))
    torch.manual_seed(0)
    model = workload.build_model(None)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = workload.build_optimizer(model, 1).optimizer
    loss = workload.loss(model, batch(1, 128))
    loss.backward()
    optimizer.step()
    assert math.isfinite(loss.item())
    assert all(
        torch.isfinite(p).all() and not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize("channels_last", [True, False])
def test_forward_is_the_reference_network_written_out(channels_last: bool) -> None:
    """Keras order: convolution, LeakyReLU(0.3), pooling; flatten with channels last; tanh times 1.2."""
    run = config("smoke", f"channels_last={channels_last}")
    torch.manual_seed(1)
    model = CosmoFlow(run).build_model(None).eval()
    for module in model.modules():
        if hasattr(module, "bias") and isinstance(module.bias, torch.Tensor):
            torch.nn.init.normal_(module.bias)
    x = batch(3, 16)["x"]
    own = run.hyperparameters
    h = (torch.log(x.float() + 1) - torch.tensor(own.input_mean)) / torch.tensor(own.input_std)
    h = h.permute(0, 4, 1, 2, 3).contiguous()
    for layer in model.convolutions:
        h = F.max_pool3d(F.leaky_relu(F.conv3d(h, layer.weight.contiguous(), layer.bias, padding=1), 0.3), 2)
    h = h.permute(0, 2, 3, 4, 1).reshape(3, -1)
    for layer in model.hidden:
        h = F.leaky_relu(layer(h), 0.3)
    expected = 1.2 * torch.tanh(model.output(h))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("samples", "channels", "side"),
    [(1, 4, 2), (1, 4, 16), (1, 3, 6), (1, 4, 3), (1, 320, 8), (1, 321, 8), (2, 4, 16), (3, 4, 5)],
)
def test_every_batch_is_convolved_by_onednn(samples: int, channels: int, side: int, channels_last: bool) -> None:
    """Also one sample, whose halves are convolved where torch would not ask oneDNN; if torch's rule changes, this fails."""
    generator = torch.Generator().manual_seed(0)
    layer = Convolution(channels, 8)
    if channels_last:
        layer.to(memory_format=torch.channels_last_3d)
    shape = (samples, channels, side, side, side)
    form = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.randn(shape, generator=generator).to(memory_format=form).requires_grad_()
    gradient = torch.randn(samples, 8, *shape[2:], generator=generator)
    with torch.profiler.profile() as trace:
        found = layer(x)
        found.backward(gradient)
    names = {each.key for each in trace.key_averages()}
    assert ("aten::mkldnn_convolution" in names) == (samples > 1 or side % 2 == 0 or channels * side**2 > ONEDNN_ABOVE)
    assert not any("slow_conv" in name for name in names) or side % 2
    assert side % 2 or found.is_contiguous(memory_format=form)
    exact = nn.Conv3d(channels, 8, 3, padding="same", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x64 = x.detach().double().requires_grad_()
    exact(x64).backward(gradient.double())
    pairs = [
        (found, exact(x64)),
        (x.grad, x64.grad),
        (layer.weight.grad, exact.weight.grad),
        (layer.bias.grad, exact.bias.grad),
    ]
    for ours, theirs in pairs:
        assert float((ours.double() - theirs).detach().norm() / theirs.detach().norm()) < 1e-5


@pytest.mark.parametrize("onednn", [False, True])
def test_halves_are_convolved_only_for_onednn_in_float32(onednn: bool) -> None:
    before, shapes = torch._C._get_mkldnn_enabled(), []
    layer, whole = Convolution(4, 8), (1, 4, 8, 8, 8)
    torch._C._set_mkldnn_enabled(onednn)
    try:
        for dtype in (torch.float32, torch.float64):
            with torch.profiler.profile(record_shapes=True) as trace:
                layer.to(dtype)(torch.ones(whole, dtype=dtype))
            shapes += [tuple(each.input_shapes[0]) for each in trace.events() if each.name == "aten::conv3d"]
    finally:
        torch._C._set_mkldnn_enabled(before)
    assert shapes == [(2, 4, 6, 8, 8) if onednn else whole, whole]


def test_kernels_start_glorot_uniform_and_biases_zero() -> None:
    torch.manual_seed(0)
    model = CosmoFlow(config("small")).build_model(None)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
            continue
        receptive = parameter[0, 0].numel()
        limit = math.sqrt(6 / ((parameter.shape[0] + parameter.shape[1]) * receptive))
        assert parameter.abs().max() <= limit
        assert parameter.abs().max() > 0.95 * limit
        assert parameter.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_momentum_is_keras_form_also_when_the_rate_changes() -> None:
    """v = m v - lr g; w += v: torch's own SGD agrees only until the first change of the rate."""
    rates = [0.1, 0.1, 0.01, 0.05]
    gradients = [np.random.default_rng(i).normal(size=5) for i in range(4)]
    w = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    theirs = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    mine, torch_sgd = KerasSGD([w], lr=0.1, momentum=0.9), torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    slow_w, slow_v = np.ones(5), np.zeros(5)
    for step, (rate, gradient) in enumerate(zip(rates, gradients, strict=True)):
        for parameter, optimizer in ((w, mine), (theirs, torch_sgd)):
            parameter.grad = torch.from_numpy(gradient)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        slow_v = 0.9 * slow_v - rate * gradient
        slow_w = slow_w + slow_v
        np.testing.assert_allclose(w.detach().numpy(), slow_w, rtol=1e-12)
        assert np.allclose(theirs.detach().numpy(), slow_w) == (step < 2)


def test_a_reloaded_optimizer_continues_with_its_velocity() -> None:
    def steps(optimizer: KerasSGD, w: torch.nn.Parameter, n: int) -> None:
        for _ in range(n):
            w.grad = w.detach().clone()
            optimizer.step()

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = KerasSGD([w], lr=0.1, momentum=0.9)
    steps(optimizer, w, 2)
    twin = torch.nn.Parameter(w.detach().clone())
    resumed = KerasSGD([twin], lr=0.1, momentum=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, w, 2)
    steps(resumed, twin, 2)
    assert torch.equal(w, twin)


def test_l2_adds_twice_lambda_w_to_the_two_hidden_kernels_only() -> None:
    gradients = {}
    for l2 in (0.0, 0.01):
        workload = CosmoFlow(config("smoke", f"hyperparameters.l2={l2}"))
        torch.manual_seed(2)
        model = workload.build_model(None)
        workload.loss(model, batch(2, 16)).backward()
        gradients[l2] = {name: p.grad.clone() for name, p in model.named_parameters()}
    hidden = {id(weight) for weight in list_regularised_weights(model)}
    assert len(hidden) == 2
    for name, parameter in model.named_parameters():
        expected = 2 * 0.01 * parameter.detach() if id(parameter) in hidden else torch.zeros_like(parameter)
        torch.testing.assert_close(gradients[0.01][name] - gradients[0.0][name], expected, rtol=1e-4, atol=1e-6)


def test_schedule_of_the_reference_convergence_point_at_batch_512() -> None:
    run = config("full")
    rates = {epoch: learning_rate(run.hyperparameters, 512, epoch) for epoch in range(1, 30)}
    assert rates[1] == pytest.approx(0.0015)  # the reference warms up from the unscaled rate, once per epoch
    assert rates[4] == pytest.approx(0.0015 + 3 / 6 * 0.0045)
    assert rates[7] == pytest.approx(0.006)
    assert rates[20] == pytest.approx(0.006)  # boundary 19 counts from 0 and must lie behind: epoch 21
    assert [rates[e] for e in (21, 22, 23, 24, 25, 29)] == pytest.approx(
        [0.003, 0.003, 0.0015, 0.00075, 0.000375, 0.000375]
    )


def test_linear_scaling_and_no_warm_up() -> None:
    own = CosmoFlowConfig(input_size=8, conv_channels=(4,), base_learning_rate=1e-3, scaling="linear")
    assert learning_rate(own, 64, 1) == 1e-3
    assert learning_rate(own, 256, 1) == 4e-3


def test_logged_hyperparameters_are_complete_and_in_the_units_of_the_reference() -> None:
    logged = CosmoFlow(config("full")).hyperparameters()
    assert logged["opt_base_learning_rate"] == pytest.approx(0.006)
    assert logged["opt_learning_rate_warmup_factor"] == pytest.approx(4.0)
    assert logged["opt_learning_rate_decay_factor"] == [0.5, 0.25, 0.125, 0.0625]
    assert logged["opt_weight_decay"] == 0.01


def test_work_at_full_size() -> None:
    run = config("full")
    assert forward_flops(run.hyperparameters) == pytest.approx(68.9e9, rel=1e-3)
    work = CosmoFlow(run).work()
    assert work.model_flops == work.executed_flops == pytest.approx(192.1e9, rel=1e-3)
    assert 0.8e9 < work.algorithmic_bytes < 2.5e9


@pytest.mark.parametrize("size", SIZES)
def test_the_card_states_the_bytes_of_a_sample(size: str) -> None:
    assert DESCRIPTOR.card().size(size).sample_bytes == config(size).hyperparameters.input_size ** 3 * 4 * 2 + 4 * 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hyperparameters.input_size=20", "input_size is 20, expected a multiple of 8"),
        ("hyperparameters.decay_boundary_epochs=[3, 5]", "one for each of the . decay_factors"),
        ("hyperparameters.input_norm=log1p", "log1p_standard needs input_mean"),
        ("hyperparameters.momentum=0.8", "momentum"),
        ("hyperparameters.dropuot=0.1", "dropout"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_in_one_line(override: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as caught:
        config("smoke", override)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", [16, 8])
def test_whole_rows_are_standardised_to_the_bits_of_each_voxels_channels(side: int) -> None:
    means, deviations = [2.1, 1.9, 2.3, 2.0], [0.4, 0.5, 0.6, 0.7]
    words = [f"hyperparameters.input_mean={means}", f"hyperparameters.input_std={deviations}"]
    torch.manual_seed(0)
    net = CosmoFlow(config("smoke", "channels_last=true", f"hyperparameters.input_size={side}", *words)).build_model(
        None
    )  # type: ignore[arg-type]
    seen: list[torch.Tensor] = []
    net.convolutions[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))  # type: ignore[index, union-attr]
    counts = batch(3, side)["x"]
    before = counts.clone()
    net(counts)
    plain = (torch.log1p(counts.float()) - torch.tensor(means)) * (1 / torch.tensor(deviations))
    assert torch.equal(seen[0].permute(0, 2, 3, 4, 1), plain)
    assert torch.equal(counts, before)
