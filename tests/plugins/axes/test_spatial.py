"""A layer on parts of its input gives the parts of what it gives on the whole: forward, gradients of input and weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.plugins.axes.spatial import Split, Upsampled, check_extents, split_model, trace
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.suite.training.parallel.mesh import Mesh, part_of
from mlhpc.suite.training.parallel.plan import Boundary
from tests.fixtures.thread_ranks import on_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
NAMES = {2: ("h", "w"), 3: ("d", "h", "w")}


def cut(x: Tensor, mesh: Mesh) -> Tensor:
    for d, (parts, place) in enumerate(zip(mesh.spatial, mesh.place, strict=True)):
        low, high = part_of(x.shape[d + 2], parts, place)
        x = x.narrow(d + 2, low, high - low)
    return x


def compare(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    parts: tuple[int, ...],
    boundaries: dict[str, Boundary] | None = None,
) -> list[list[tuple[str, str, int]]]:
    """Compare the whole with the parts; returns what each rank exchanged."""
    torch.manual_seed(0)
    names, dimensions, boundaries = NAMES[len(parts)], len(parts), boundaries or {}
    model = build().double()
    x = torch.randn(shape, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    alone = copy.deepcopy(model)
    expected = alone(whole)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    meta = copy.deepcopy(model).to("meta")
    found = trace(meta, lambda each: each(x[:1].to("meta")), boundaries, names)
    check_extents(found, parts, names)
    joined = expected.dim() != dimensions + 2 or bool(boundaries)

    def run(mesh: Mesh, split: Split, log: list[tuple[str, str, int]]) -> tuple[Tensor, Tensor, nn.Module, object]:
        mine = copy.deepcopy(model)
        split_model(mine, found, split, boundaries)
        part = cut(x, mesh).clone().requires_grad_()
        out = mine(part)
        theirs = weight / mesh.parts if joined else cut(weight, mesh)  # ranks that go on alike share the loss
        (out * theirs).sum().backward()
        torch.testing.assert_close(out, expected if joined else cut(expected, mesh), **CLOSE)
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, cut(whole.grad, mesh), **CLOSE)
        return out, part, mine, log

    ranks = on_ranks(parts, names, run)
    for (name, theirs), *mine in zip(
        alone.named_parameters(), *(list(model.parameters()) for _, _, model, _ in ranks), strict=True
    ):
        total = torch.stack([each.grad for each in mine]).sum(dim=0)
        torch.testing.assert_close(total, theirs.grad, rtol=1e-12, atol=1e-11, msg=name)
    return [log for *_, log in ranks]  # type: ignore[misc]


def conv(k: int, s: int, d: int, p: int) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(2, 3, k, stride=s, dilation=d, padding=p)


WINDOWS = [
    (3, 2, 1, 0),
    (4, 2, 1, 1),
    (6, 3, 1, 2),
    (1, 1, 1, 0),
    (2, 1, 1, 0),
    (2, 2, 1, 0),
    (3, 1, 1, 1),
    (3, 2, 1, 1),
    (3, 1, 2, 2),
    (5, 1, 1, 2),
    (4, 3, 1, 2),
    (3, 2, 3, 3),
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("extent", "parts"), [((13, 9), (2, 1)), ((13, 12), (2, 2)), ((17, 16), (1, 3))])
def test_convolutions_of_any_window_are_those_of_the_whole(
    window: tuple[int, int, int, int], extent: tuple[int, int], parts: tuple[int, int]
) -> None:
    compare(conv(*window), (2, 2, *extent), parts)


class Mixed(nn.Module):
    """Odd and even strides, groups, pooling, a bias that is missing, and a layer whose kernel is larger than a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding="same"),
            nn.MaxPool3d(2),
            nn.Conv3d(4, 4, 3, stride=2, padding=1, groups=4, bias=False),
            nn.LeakyReLU(),
            nn.Conv3d(4, 3, (1, 3, 5), padding=(0, 1, 2), dilation=(1, 2, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("rate", [1, 4, 6])
def test_a_halo_may_reach_beyond_the_neighbour(rate: int) -> None:
    """Atrous rates of the size of the image: parts come from ranks that are not neighbours."""
    compare(conv(3, 1, rate, rate), (1, 2, 9, 8), (4, 1))


TRANSPOSED = [  # kernel, stride, padding, output padding
    (k, s, p, o)
    for k in (1, 2, 3, 4)
    for s in (1, 2, 3)
    for p, o in ((0, 0), (1, 1), (1, 0), (2, 1))
    if o < s and p < k
]


@pytest.mark.parametrize("window", TRANSPOSED)
def test_transposed_convolutions_are_those_of_the_whole(window: tuple[int, int, int, int]) -> None:
    kernel, stride, before, after = window
    compare(
        lambda: nn.ConvTranspose2d(2, 3, kernel, stride=stride, padding=before, output_padding=after),
        (1, 2, 7, 6),
        (2, 2),
    )


@pytest.mark.parametrize(
    "layer", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 1), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2)]
)
@pytest.mark.parametrize("parts", [(2, 2), (3, 1)])
def test_pooling_is_that_of_the_whole(layer: nn.Module, parts: tuple[int, int]) -> None:
    compare(lambda: nn.Sequential(conv(3, 1, 1, 1)(), layer), (2, 2, 11, 14), parts)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("size", [3, 4])  # the padding of an even kernel is one more on the right
@pytest.mark.parametrize("parts", [(2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 1, 4)])
def test_padding_same_in_three_dimensions(size: int, parts: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(2, 2, size, padding="same"), nn.MaxPool3d(2), nn.Conv3d(2, 2, size, padding="same")
        )

    compare(build, (1, 2, 8, 9, 10), parts)


def test_normalisation_and_global_pooling_are_over_all_parts() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            conv(3, 1, 1, 1)(), GroupBatchNorm2d(3), nn.ReLU(), conv2(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(2, 2, 1)
        )

    def conv2() -> nn.Module:
        return nn.Conv2d(3, 2, 3, stride=2)

    compare(
        build,
        (3, 2, 11, 9),
        (2, 2),
        {"5": Boundary(at="output", dims=("sample", "channel", "h", "w"), when="evaluation")},
    )


def test_a_flattened_tensor_is_joined_in_the_order_of_its_dimensions() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv3d(2, 3, 3, padding=1), nn.MaxPool3d(2)
            self.dense = nn.Linear(3 * 3 * 2 * 4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(self.pool(self.conv(x)).permute(0, 2, 3, 4, 1).flatten(1))  # type: ignore[no-any-return]

    boundary = {"dense": Boundary(dims=("sample", "d", "h", "w", "channel"))}
    for parts in ((2, 1, 1), (1, 2, 1), (2, 2, 2)):
        compare(Net, (2, 2, 7, 5, 8), parts, boundary)


def test_an_even_split_gives_two_planes_of_halo_and_pooling_none() -> None:
    """k = 3: one plane from each neighbour, forward and, except for the first input, backward."""
    build = lambda: nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.MaxPool3d(2), nn.Conv3d(4, 4, 3, padding=1))  # noqa: E731
    logs = compare(build, (2, 1, 16, 8, 8), (4, 1, 1))
    first, second = 2 * 1 * 8 * 8 * 8, 2 * 4 * 4 * 4 * 8  # bytes of a plane: samples, channels, h, w, float64
    inner = [(name, kind, 2 * size) for name, kind, size in [("d", "all_to_all", first), ("d", "all_to_all", second)]]
    assert logs[1] == [*inner, *reversed(inner)]  # the test's input needs a gradient
    assert logs[0] == [(name, kind, size // 2) for name, kind, size in [*inner, *reversed(inner)]]


UPSAMPLINGS = [
    *({"scale_factor": 2, "mode": "bilinear", "align_corners": corners} for corners in (True, False)),
    *({"size": (23, 29), "mode": "bilinear", "align_corners": corners} for corners in (True, False)),
    {"size": (5, 4), "mode": "bilinear"},
    {"scale_factor": (2.6, 1.7), "mode": "bilinear"},
    {"scale_factor": (2.6, 1.7), "mode": "bilinear", "recompute_scale_factor": True},
    *({"scale_factor": factor, "mode": "nearest"} for factor in (2, 3, 1.7)),
    {"size": (23, 29), "mode": "nearest"},
    {"size": (23, 29), "mode": "nearest-exact"},
]


@pytest.mark.parametrize("settings", UPSAMPLINGS)
@pytest.mark.parametrize("parts", [(2, 1), (2, 2), (1, 3)])
def test_upsampling_is_that_of_the_whole(settings: dict[str, Any], parts: tuple[int, int]) -> None:
    compare(lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Upsample(**settings)), (2, 2, 9, 11), parts)


@pytest.mark.parametrize(
    "settings", [{"mode": "trilinear", "align_corners": c} for c in (True, False)] + [{"mode": "nearest"}]
)
def test_upsampling_in_three_dimensions_is_that_of_the_whole(settings: dict[str, Any]) -> None:
    build = lambda: nn.Sequential(nn.Upsample(scale_factor=2, **settings), nn.Conv3d(2, 3, 3, padding=1))  # noqa: E731
    logs = compare(build, (1, 2, 5, 6, 7), (2, 1, 2))
    assert sum(size for log in logs for _, _, size in log[:2]) > 0


def test_upsampling_takes_the_positions_that_torch_takes() -> None:
    """Inputs that are their own position: torch's result is the position, over many extents and factors, single precision too."""
    for n, out in product((1, 2, 3, 7, 16, 33), (1, 2, 5, 7, 14, 31, 49)):
        for dtype in (torch.float32, torch.float64):
            ramp = torch.arange(n, dtype=dtype).view(1, 1, n)
            for mode in ("nearest", "nearest-exact"):
                there = F.interpolate(ramp, out, mode=mode).flatten().tolist()
                assert Upsampled.of(mode, n, out, factor=None, align_corners=False).first == tuple(map(int, there))
            for corners in (False, True):
                there = F.interpolate(ramp, out, mode="linear", align_corners=corners).flatten().tolist()
                found = Upsampled.of("linear", n, out, factor=None, align_corners=corners)
                mine = [a + w for a, w in zip(found.first, found.weight, strict=True)]
                assert mine == pytest.approx(there, rel=1e-5 if dtype == torch.float32 else 1e-14, abs=1e-5)
    for n, factor in product((3, 7, 10), (1.1, 1.7, 2.0, 2.6, 3.3)):
        ramp = torch.arange(n, dtype=torch.float64).view(1, 1, n)
        there = F.interpolate(ramp, scale_factor=factor, mode="nearest").flatten().tolist()
        found = Upsampled.of("nearest", n, len(there), factor=factor, align_corners=False)
        assert found.first == tuple(map(int, there))


REFUSED = {
    "ceil_mode": nn.MaxPool2d(2, ceil_mode=True),
    "GroupNorm": nn.GroupNorm(1, 2),
    "one rank alone": nn.BatchNorm2d(2),
    "circular": nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
    "pools to": nn.AdaptiveAvgPool2d(2),
    "count its padding": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "indices": nn.MaxPool2d(2, return_indices=True),
    "'bicubic'": nn.Upsample(scale_factor=2, mode="bicubic"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_layer_that_cannot_be_split_is_refused_by_its_path(reason: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), REFUSED[reason]).to("meta")
    with pytest.raises(InputError, match=rf"layer '1'.*{reason}"):
        trace(model, lambda each: each(torch.empty(1, 2, 8, 8, device="meta")), {}, ("h", "w"))


def test_a_layer_with_fewer_positions_than_parts_is_refused_by_its_path() -> None:
    model = nn.Sequential(nn.MaxPool2d(4), nn.Conv2d(1, 1, 1)).to("meta")
    found = trace(model, lambda each: each(torch.empty(1, 1, 8, 8, device="meta")), {}, ("h", "w"))
    check_extents(found, (2, 1), ("h", "w"))
    with pytest.raises(InputError, match="h has 2 positions at layer '0'.*at most h in 2 parts"):
        check_extents(found, (4, 1), ("h", "w"))
