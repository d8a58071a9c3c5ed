"""The model: Tutel's parameter counts, attention against loops, the mask of the seam, the position bias at other windows."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mlhpc.suite.config import load_config
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.counts.flops import FORMULAS
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.swinv2_moe import DESCRIPTOR
from mlhpc.workloads.swinv2_moe.config import SwinV2MoEConfig, compute_work, forward_flops, parameter_count
from mlhpc.workloads.swinv2_moe.model import (
    MAX_SCALE,
    PatchMerging,
    PositionBias,
    SwinBlock,
    SwinV2MoE,
    WindowAttention,
    compute_log_offsets,
    compute_shift_mask,
    join_windows,
    split_windows,
)

SIZES = ("smoke", "mini", "small", "full")
TUTEL_MILLIONS = {  # parameters by experts, 0: dense; arXiv:2206.03382, with the head of ImageNet-22K
    "S": {0: 65.8, 8: 173, 16: 296, 32: 542, 64: 1033, 128: 2016},
    "B": {0: 109.3, 8: 300, 16: 519, 32: 955},
}
TUTEL_GFLOPS = {"S": 6.76, "B": 11.78}  # multiply-adds of inference
TUTEL_SHAPES = {"S": (96, (3, 6, 12, 24)), "B": (128, (4, 8, 16, 32))}


def tutel(model: str, experts: int) -> SwinV2MoEConfig:
    embed, heads = TUTEL_SHAPES[model]
    return SwinV2MoEConfig(
        pixels=192, window=12, embed=embed, depths=(2, 2, 18, 2), heads=heads, channels=3,
        classes=tuple(map(str, range(21_841))), dense=experts == 0,
        moe=MoEConfig(experts=max(1, experts), top_k=1, hidden=16 * embed, activation="gelu", bias=True),
        learning_rate=1e-4, schedule_steps=1,
    )  # fmt: skip


def own(name: str, *overrides: str) -> SwinV2MoEConfig:
    return load_config(DESCRIPTOR, name, overrides).hyperparameters  # type: ignore[return-value]


def count(settings: SwinV2MoEConfig) -> int:
    with torch.device("meta"):
        model = SwinV2MoE(settings)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("model", "experts"), [(m, e) for m, sizes in TUTEL_MILLIONS.items() for e in sizes])
def test_the_parameters_are_tutels(model: str, experts: int) -> None:
    found = count(tutel(model, experts))
    assert found == parameter_count(tutel(model, experts))
    assert found / 1e6 == pytest.approx(TUTEL_MILLIONS[model][experts], rel=0.005)


@pytest.mark.parametrize("model", ["S", "B"])
def test_the_flops_are_tutels(model: str) -> None:
    """Their count is of one model for any number of experts; a router of 128 is 1 % of S."""
    for experts in TUTEL_MILLIONS[model]:
        assert forward_flops(tutel(model, experts)) / 2e9 == pytest.approx(TUTEL_GFLOPS[model], rel=0.01)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["", "dense=true", "moe.router=cosine", "moe.activation=swiglu", "moe.bias=false"])
def test_the_closed_form_counts_the_parameters(size: str, form: str) -> None:
    settings = own(size, *([f"hyperparameters.{form}"] if form else []))
    assert count(settings) == parameter_count(settings)


@pytest.mark.parametrize("size", SIZES)
def test_experts_sit_in_every_second_block_of_their_stages(size: str) -> None:
    with torch.device("meta"):
        layers = SwinV2MoE(own(size)).moe_layers()
    expected = {
        "smoke": ["stages.1.1.ffn"],
        "mini": ["stages.0.1.ffn", "stages.1.1.ffn", "stages.1.3.ffn"],
        "small": [*(f"stages.2.{block}.ffn" for block in (1, 3, 5)), "stages.3.1.ffn"],
        "full": [*(f"stages.2.{block}.ffn" for block in range(1, 18, 2)), "stages.3.1.ffn"],
    }
    assert list(layers) == expected[size]
    if size == "full":
        assert [layer.config.hidden for layer in layers.values()] == [2048] * 9 + [4096]


@pytest.mark.parametrize("form", ["dense=true", "moe.dispatch=dropless", "moe.dispatch=capacity"])
def test_a_training_step_does_the_flops_of_the_closed_form(form: str) -> None:
    """Counted on the loop back end, which is made of plain products; capacity 1.25 of 4 x 16 tokens is 20 per expert."""
    capacity = ["hyperparameters.moe.capacity_factor=null"] if form.endswith("dropless") else []
    settings = own("smoke", f"hyperparameters.{form}", "hyperparameters.moe.backend=loop", *capacity)
    model = SwinV2MoE(settings)
    images = torch.randint(0, 256, (4, 32, 32), dtype=torch.uint8)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        logits, auxiliary = model(images)
        (logits.sum() + auxiliary).backward()
    expected = compute_work(settings, global_batch_size=4, element_bytes=4).executed_flops * 4
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


@torch.no_grad()
def slow_attention(attention: WindowAttention, x_RRC: Tensor) -> Tensor:
    """The same by its definition, one query at a time: gather the window's tokens, cosines, bias, softmax."""
    resolution, width = x_RRC.shape[0], x_RRC.shape[2]
    heads, window, shift = len(attention.log_scale_A11), attention.window, attention.shift
    bias = torch.cat((attention.q_bias, torch.zeros(width, dtype=x_RRC.dtype), attention.v_bias))
    q, k, v = (x_RRC @ attention.qkv.weight.t() + bias).view(resolution, resolution, 3, heads, -1).unbind(2)
    offsets = attention.position_bias

    def pair_bias(dy: int, dx: int) -> Tensor:
        scaled = torch.tensor([dy, dx], dtype=x_RRC.dtype) * 8 / (window - 1)
        logs = scaled.sign() * (1 + scaled.abs()).log2() / 3
        return 16 * offsets.out(offsets.hidden(logs).relu()).sigmoid()

    def windowed(place: int) -> int:
        """Windows of the shifted grid along one axis; the two part windows at the edges are windows of their own."""
        return (place - shift) // window if shift else place // window

    result = torch.zeros_like(x_RRC)
    places = [(y, x) for y in range(resolution) for x in range(resolution)]
    for y, x in places:
        near = [(a, b) for a, b in places if windowed(a) == windowed(y) and windowed(b) == windowed(x)]
        out = []
        for head in range(heads):
            scale = math.exp(min(float(attention.log_scale_A11[head]), math.log(MAX_SCALE)))
            scores = torch.stack(
                [
                    scale * torch.cosine_similarity(q[y, x, head], k[a, b, head], dim=0) + pair_bias(y - a, x - b)[head]
                    for a, b in near
                ]
            ).softmax(0)
            out.append(sum(score * v[a, b, head] for score, (a, b) in zip(scores, near, strict=True)))
        result[y, x] = attention.out(torch.cat(out))
    return result


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("resolution", "window", "shift"), [(4, 4, 0), (8, 4, 0), (8, 4, 2), (6, 3, 1)])
def test_window_attention_is_its_definition(resolution: int, window: int, shift: int) -> None:
    torch.manual_seed(0)
    attention = WindowAttention(8, 2, resolution, window, shift).double()
    attention.position_bias.offsets_O2 = compute_log_offsets(window, window)  # the module keeps them in float32
    with torch.no_grad():
        attention.log_scale_A11.copy_(torch.tensor([math.log(3.0), 9.0])[:, None, None])  # the second beyond the bound
        for bias in (attention.q_bias, attention.v_bias):
            bias.normal_()
    x = torch.randn(2, resolution, resolution, 8, dtype=torch.float64)
    attended = attention(x)
    for sample in range(2):
        torch.testing.assert_close(attended[sample], slow_attention(attention, x[sample]), rtol=1e-10, atol=1e-12)


def test_the_learned_scale_is_clamped() -> None:
    attention = WindowAttention(8, 2, 4, 4, 0)
    x = torch.randn(1, 4, 4, 8)
    with torch.no_grad():
        attention.log_scale_A11.fill_(math.log(MAX_SCALE))
        at_bound = attention(x)
        attention.log_scale_A11.fill_(20.0)
        beyond = attention(x)
    torch.testing.assert_close(at_bound, beyond)
    attention(x).sum().backward()
    assert attention.log_scale_A11.grad.abs().max() == 0


@pytest.mark.parametrize(("resolution", "window", "shift"), [(12, 6, 3), (48, 12, 6), (8, 4, 1)])
def test_the_mask_lets_tokens_see_those_that_were_near(resolution: int, window: int, shift: int) -> None:
    """Tokens of one window of the shifted grid may attend if they were less than a window apart before the shift."""
    side = torch.arange(resolution)
    place = torch.stack(torch.meshgrid(side, side, indexing="ij"), dim=-1)[None].float()
    place_WL2 = split_windows(place.roll((-shift, -shift), (1, 2)), window)[0]
    apart = (place_WL2[:, :, None] - place_WL2[:, None, :]).abs().amax(dim=-1)
    mask = compute_shift_mask(resolution, window, shift)
    assert torch.equal(mask == 0, apart < window)
    assert torch.equal(mask == -math.inf, apart >= window)
    assert (mask == -math.inf).any(dim=(1, 2)).sum() == 2 * (resolution // window) - 1  # the last row and column


def test_nothing_crosses_the_seam() -> None:
    """A changed pixel at one edge changes no token at the other, in shifted windows too."""
    torch.manual_seed(0)
    attention = WindowAttention(8, 2, 8, 4, 2)
    x = torch.randn(1, 8, 8, 8)
    changed = x.clone()
    changed[0, 0, 3] += 1
    differs = (attention(x) != attention(changed)).any(dim=-1)[0]
    assert differs[:2].any()
    assert not differs[2:].any()


def test_windows_come_back() -> None:
    x = torch.randn(2, 12, 12, 5)
    torch.testing.assert_close(join_windows(split_windows(x, 4), 12), x)
    assert torch.equal(split_windows(x, 4)[1, 5, 6], x[1, 4 + 1, 8 + 2])


def test_the_position_bias_goes_over_to_another_window() -> None:
    """Given the window it was trained at, equal offsets have equal biases in any window."""
    torch.manual_seed(0)
    small = PositionBias(3, 4)
    large = PositionBias(3, 7, trained_window=4)
    large.load_state_dict(small.state_dict())
    inside = torch.tensor([y * 7 + x for y in range(4) for x in range(4)])
    torch.testing.assert_close(large()[:, inside][:, :, inside], small())
    assert PositionBias(3, 7)()[:, 0, 1].ne(small()[:, 0, 1]).all()  # not told: offsets are scaled to its own edge


def test_offsets_are_spaced_by_the_logarithm_and_reach_one() -> None:
    logs = compute_log_offsets(5, 5)
    assert logs.shape == (81, 2)
    assert logs[40].tolist() == [0, 0]
    assert logs.abs().max() == pytest.approx(math.log2(9) / 3)
    assert logs[-1, 0] == -logs[0, 0]


def test_a_block_begins_as_the_identity_and_normalises_what_it_adds() -> None:
    settings = own("mini")
    block = SwinV2MoE(settings).stages[0][1]
    assert isinstance(block, SwinBlock)
    x = torch.randn(2, 12, 12, 32)
    torch.testing.assert_close(block(x)[0], x)
    with torch.no_grad():
        block.attention_norm.weight.fill_(1.0)
    added = block(1000 * x)[0] - 1000 * x  # whatever the size of the stream, what is added has variance 1
    torch.testing.assert_close(added.var(dim=-1, correction=0), torch.ones(2, 12, 12), rtol=1e-2, atol=1e-2)


def test_merging_gathers_squares() -> None:
    merging = PatchMerging(1)
    with torch.no_grad():
        merging.reduction.weight.copy_(torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0]]))
    x = torch.arange(16.0).view(1, 4, 4, 1)
    merging.norm = torch.nn.Identity()  # type: ignore[assignment]
    assert merging(x)[0, :, :, 0].tolist() == [[10, 18], [42, 50]]


def test_stochastic_depth_leaves_out_whole_samples_and_keeps_the_mean() -> None:
    settings = own("smoke", "hyperparameters.drop_path=0.5")
    block = SwinV2MoE(settings).stages[1][1]
    assert isinstance(block, SwinBlock)
    assert block.drop_path == 0.5
    torch.manual_seed(0)
    dropped = block._dropped(torch.ones(4000, 1, 1, 2))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert dropped.mean() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(dropped[..., 0], dropped[..., 1])
    block.eval()
    assert torch.equal(block._dropped(torch.ones(3, 1, 1, 2)), torch.ones(3, 1, 1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("heads=[2, 4, 8]", "heads has 3 numbers, depths has 2"),
        ("pixels=36", "pixels is 36, expected a multiple of 8"),
        ("pixels=40", "window is 4 tokens, expected a divisor of the 10 along a side of stage 1"),
        ("heads=[3, 4]", "heads: the width 16 of stage 1 is not a multiple of its 3 heads"),
        ("moe_stages=[3]", "gives no block experts"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        own("smoke", f"hyperparameters.{change}")


def test_one_choice_behind_a_norm_teaches_the_router_nothing_and_two_choices_do() -> None:
    """The FFN's output is normalised before it is added: the weight of a single expert is divided out again."""
    gradients = {}
    for top_k in (1, 2):
        settings = own(
            "smoke",
            *(f"hyperparameters.moe.{each}" for each in ("dispatch=dropless", "capacity_factor=null", "gate_noise=0")),
            *(f"hyperparameters.moe.{each}" for each in ("balance=none", f"top_k={top_k}", f"hidden={64 // top_k}")),
        )
        torch.manual_seed(0)
        model = SwinV2MoE(settings)
        for block in model.modules():
            if isinstance(block, SwinBlock):
                torch.nn.init.ones_(block.attention_norm.weight)
                torch.nn.init.ones_(block.ffn_norm.weight)
        images = torch.randint(0, 256, (20, 32, 32), generator=torch.Generator().manual_seed(0))
        logits, _ = model(images.byte())
        torch.nn.functional.cross_entropy(logits, torch.arange(20).remainder(2)).backward()
        (router,) = (p for name, p in model.named_parameters() if "router" in name)
        gradients[top_k] = float(router.grad.norm())
    assert gradients[1] < 0.02 * gradients[2]
