"""The network is the reference's, parameter for parameter; it runs at any size, in both memory layouts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam import DESCRIPTOR
from mlhpc.workloads.deepcam.config import LOSS_WEIGHTS, DeepCamConfig
from mlhpc.workloads.deepcam.model import Block, DeepLabV3Plus
from mlhpc.workloads.deepcam.work import forward_flops, list_layers
from mlhpc.workloads.deepcam.workload import DeepCam

SIZES = list(DESCRIPTOR.card().sizes)


def config(size: str, *overrides: str) -> RunConfig:
    return load_config(DESCRIPTOR, size, overrides)


def tiny_model(*, channels_last: bool = True, seed: int = 0) -> DeepLabV3Plus:
    torch.manual_seed(seed)
    own = config("smoke", "hyperparameters.height=32", "hyperparameters.width=48").hyperparameters
    return DeepLabV3Plus(own, channels_last=channels_last)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_full_size_is_the_reference_part_by_part() -> None:
    with torch.device("meta"):
        model = DeepLabV3Plus(config("full").hyperparameters, channels_last=True)
    parts = [model.encoder, model.bottleneck, model.low_level, model.decoder]
    assert [parameters(part) for part in parts] == [37_778_400, 15_535_104, 6_240, 3_134_976]
    assert parameters(model) == 56_454_720
    # 728 -> 728, three times: depthwise, pointwise, normalisation
    assert parameters(model.encoder.middle[0]) == 3 * (9 * 728 + 728**2 + 2 * 728)
    assert len(model.encoder.middle) == 2 * 16


@pytest.mark.parametrize(("height", "width"), [(16, 16), (32, 80), (96, 144)])
def test_logits_have_the_size_of_the_fields(height: int, width: int) -> None:
    """The reference tiles its global branch to a fixed 48 x 72 and runs at 768 x 1152 only."""
    model = tiny_model().eval()
    with torch.no_grad():
        assert model(torch.rand(2, height, width, 16)).shape == (2, 3, height, width)


def test_full_size_gives_full_size_logits() -> None:
    with torch.device("meta"):
        model = DeepLabV3Plus(config("full").hyperparameters, channels_last=False).eval()
        assert model(torch.empty(2, 768, 1152, 16)).shape == (2, 3, 768, 1152)


@pytest.mark.parametrize("divisor", [1, 2, 4, 8, 16, 64, 1000])
def test_no_convolution_has_fewer_than_16_input_channels(divisor: int) -> None:
    own = DeepCamConfig(
        height=32, width=32, channel_divisor=divisor, optimizer="AdamW", learning_rate=1, schedule="multistep"
    )
    with torch.device("meta"):
        model = DeepLabV3Plus(own, channels_last=False)
    strided = [
        m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) and m.stride != (1, 1)
    ]
    assert len(strided) == 3
    assert all(m.in_channels >= 16 for m in strided)


def test_encoder_and_pyramid_start_kaiming_normal_and_the_rest_as_torch_does() -> None:
    torch.manual_seed(0)
    model = DeepLabV3Plus(config("small").hyperparameters, channels_last=False)
    kaiming = {id(m) for part in (model.encoder, model.bottleneck.branches) for m in part.modules()}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert not module.bias.any()
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and module.weight.numel() > 10_000:
            fan_in = module.weight[0].numel()
            expected = math.sqrt(2 / fan_in) if id(module) in kaiming else 1 / math.sqrt(3 * fan_in)
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05)
            # a uniform distribution has no tail, a normal one does
            assert (module.weight.abs().max() > 2.5 * expected) == (id(module) in kaiming)


def test_a_block_is_the_separable_convolutions_written_out() -> None:
    torch.manual_seed(3)
    block = Block((16, 24, 24), stride=2, bare=True)
    x = torch.randn(3, 16, 10, 12)

    def normalise(h: torch.Tensor) -> torch.Tensor:
        return (h - h.mean((0, 2, 3), keepdim=True)) / (h.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()

    def separable(h: torch.Tensor, depthwise: torch.Tensor, pointwise: torch.Tensor, stride: int) -> torch.Tensor:
        patches = F.unfold(h, 3, padding=1, stride=stride).view(*h.shape[:2], 9, -1)
        mixed = torch.einsum("nckp,ck,oc->nop", patches, depthwise.flatten(1), pointwise.flatten(1))
        return mixed.view(h.shape[0], -1, h.shape[2] // stride, h.shape[3] // stride)

    weights = [m.weight for m in block.main.modules() if isinstance(m, nn.Conv2d)]
    h = normalise(separable(x, weights[0], weights[1], 1)).relu()
    h = normalise(separable(h, weights[2], weights[3], 1))
    h = separable(h, weights[4], weights[5], 2)
    skip = normalise(torch.einsum("nchw,oc->nohw", x[:, :, ::2, ::2], block.skip[0].weight.flatten(1)))
    torch.testing.assert_close(block(x), h + skip, rtol=1e-4, atol=1e-5)


def test_the_decoder_sees_rectified_low_level_features() -> None:
    """In the reference the ReLU after block 1 works in place, on the tensor already kept for the decoder."""
    model = tiny_model().eval()
    with torch.no_grad():
        _, low_level = model.encoder(torch.rand(1, 16, 32, 48))
    assert low_level.shape == (1, 16, 8, 12)
    assert low_level.min() == 0


def test_every_normalisation_can_span_ranks() -> None:
    model = tiny_model()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == sum(isinstance(m, GroupBatchNorm2d) for m in norms) > 20


def test_the_loss_weighs_pixels_and_divides_by_their_number(world: World) -> None:
    assert pytest.approx((1.002, 2.615, 1.716), abs=1e-3) == LOSS_WEIGHTS
    workload = DeepCam(config("smoke"))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, generator=generator)
    y = torch.randint(3, (2, 4, 5), generator=generator, dtype=torch.uint8)
    slow = 0.0
    for n in range(2):
        for row in range(4):
            for column in range(5):
                values, label = logits[n, :, row, column].double(), int(y[n, row, column])
                slow += LOSS_WEIGHTS[label] * (values.exp().sum().log() - values[label]).item()
    fake = nn.Identity()
    assert workload.loss(fake, {"x": logits, "y": y}).item() == pytest.approx(slow / 40, rel=1e-6)


def test_forward_flops_are_what_torch_counts() -> None:
    own = config("smoke").hyperparameters
    model = DeepLabV3Plus(own, channels_last=False)
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(2, own.height, own.width, 16))
    assert counter.get_total_flops() == 2 * forward_flops(own)


def test_depthwise_convolutions_cost_nine_multiply_adds_per_value() -> None:
    depthwise = [layer for layer in list_layers(config("smoke").hyperparameters) if layer.groups > 1]
    assert depthwise
    assert all(layer.flops == 2 * 9 * layer.values_out for layer in depthwise)


def test_work_at_full_size() -> None:
    own = config("full").hyperparameters
    assert forward_flops(own) == pytest.approx(655.3e9, rel=1e-4)
    work = DeepCam(config("full")).work()
    assert work.model_flops == work.executed_flops == pytest.approx(1_964e9, rel=1e-4)
    assert sum(layer.flops for layer in list_layers(own) if layer.groups > 1) == pytest.approx(4.2e9, rel=0.01)
    outputs = sum(layer.values_out for layer in list_layers(own))
    assert outputs == pytest.approx(1.06e9, rel=0.01)  # of convolutions and normalisations, ReLU in place
    assert work.algorithmic_bytes > 2 * outputs * 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hyperparameters.height=72", "multiple of 16"),
        ("hyperparameters.t_max=null", "t_max is None with schedule cosine_annealing"),
        ("hyperparameters.milestones=[3]", "milestones is \\[3\\] with schedule cosine_annealing"),
        ("hyperparameters.eps=1e-8", "eps"),
        ("hyperparameters.optimizer=SGD", "'Adam', 'AdamW', 'LAMB'"),
        ("hyperparameters.warmup_factor=0.5", "warmup_factor"),
        ("hyperparameters.dropout=0.1", "dropout"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_in_one_line(override: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        config("smoke", override)
    assert "\n" not in str(caught.value)
