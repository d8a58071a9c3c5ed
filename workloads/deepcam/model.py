"""The DeepCAM network: DeepLabv3+ on a modified Aligned Xception. No data, no optimizer, no ranks.

Shapes: N samples, H W pixels, C channels. Inputs have channels last (NHWC), as stored. Layers, order and
initialisation are those of mlcommons/hpc deepcam/src/deepCam/architecture/deeplab_xception.py at output stride 16.

Groups of ranks whose batches are normalised as one: the layout of the reference's ``batchnorm_group_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam.config import CHANNELS, CLASSES, DeepCamConfig


class DeepLabV3Plus(nn.Module):
    """Maps fields (N, H, W, C) to logits (N, classes, H, W). H and W must be multiples of 16."""

    def __init__(self, config: DeepCamConfig, *, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        low_level, deep, width = (config.channels(c) for c in (128, 2048, 256))
        squeezed = config.channels(48)
        self.encoder = Xception(config)
        self.bottleneck = Bottleneck(deep, width, config.aspp_rates)
        self.low_level = _add_normalisation(nn.Conv2d(low_level, squeezed, 1, bias=False))
        self.decoder = Decoder(width, squeezed)
        if channels_last:
            self.lay_out(channels_last)

    def lay_out(self, channels_last: bool) -> None:
        """Convert the kernels, and from now on the input, to a memory format."""
        self.channels_last = channels_last
        wanted = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=wanted)  # type: ignore[call-overload]  # a keyword torch does not type

    def forward(self, x_NHWC: Tensor) -> Tensor:
        """Compute logits from normalised fields."""
        x_NCHW = x_NHWC.permute(0, 3, 1, 2)
        if not self.channels_last:
            x_NCHW = x_NCHW.contiguous()
        deep, low_level = self.encoder(x_NCHW)
        logits: Tensor = self.decoder(self.bottleneck(deep), self.low_level(low_level))
        return logits


class Xception(nn.Module):
    """Entry, middle and exit flow: features at 1/16 of the resolution and, from the first block, at 1/4."""

    def __init__(self, config: DeepCamConfig) -> None:
        super().__init__()
        c32, c64, c128, c256, c728, c1024, c1536, c2048 = (
            config.channels(c) for c in (32, 64, 128, 256, 728, 1024, 1536, 2048)
        )
        self.stem = nn.Sequential(
            _add_normalisation(nn.Conv2d(len(CHANNELS), c32, 3, stride=2, padding=1, bias=False)),
            _add_normalisation(nn.Conv2d(c32, c64, 3, padding=1, bias=False)),
        )
        self.low_level = Block((c64, c128, c128), stride=2, bare=True)
        self.entry = nn.Sequential(
            Block((c128, c256, c256), stride=2, bare=True),
            nn.ReLU(inplace=True),
            Block((c256, c728, c728), stride=2, bare=True),
            nn.ReLU(inplace=True),
        )
        self.middle = nn.Sequential()
        for _ in range(config.middle_blocks):
            self.middle.append(Block((c728,) * 4))
            self.middle.append(nn.ReLU(inplace=True))
        self.exit = nn.Sequential(
            Block((c728, c728, c1024), bare=True),
            _add_normalisation(Separable(c1024, c1536, dilation=2)),
            _add_normalisation(Separable(c1536, c1536, dilation=2)),
            _add_normalisation(Separable(c1536, c2048, dilation=2)),
        )
        _kaiming_normal(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (N, 2048, H/16, W/16) and (N, 128, H/4, W/4), both after ReLU.

        The reference applies an in-place ReLU to the low-level features it returned, so its decoder sees them
        rectified.
        """
        low_level = torch.relu(self.low_level(self.stem(x)))
        return self.exit(self.middle(self.entry(low_level))), low_level


class Block(nn.Module):
    """Separable convolutions, each normalised, with ReLU between them and a skip connection around them.

    ``bare`` appends a separable convolution without normalisation; it is the only one with the stride.
    """

    def __init__(self, widths: Sequence[int], *, stride: int = 1, bare: bool = False) -> None:
        super().__init__()
        self.main = nn.Sequential()
        for position, (c_in, c_out) in enumerate(pairwise(widths)):
            if position:
                self.main.append(nn.ReLU(inplace=True))
            self.main.append(Separable(c_in, c_out))
            self.main.append(GroupBatchNorm2d(c_out))
        first, last = widths[0], widths[-1]
        if bare:
            self.main.append(Separable(last, last, stride=stride))
        self.skip: nn.Module = nn.Identity()
        if first != last or stride != 1:
            self.skip = nn.Sequential(nn.Conv2d(first, last, 1, stride=stride, bias=False), GroupBatchNorm2d(last))

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches; the caller applies the ReLU."""
        result: Tensor = self.main(x) + self.skip(x)
        return result


class Separable(nn.Sequential):
    """Depthwise 3x3 then pointwise 1x1 convolution, both without bias."""

    def __init__(self, c_in: int, c_out: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(
            nn.Conv2d(c_in, c_in, 3, stride, padding=dilation, dilation=dilation, groups=c_in, bias=False),
            nn.Conv2d(c_in, c_out, 1, bias=False),
        )


class Bottleneck(nn.Module):
    """Atrous spatial pyramid pooling: 1x1, three dilated 3x3 and a global branch, then 1x1."""

    def __init__(self, c_in: int, c_out: int, rates: tuple[int, int, int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList([_add_normalisation(nn.Conv2d(c_in, c_out, 1, bias=False))])
        for rate in rates:
            self.branches.append(_add_normalisation(nn.Conv2d(c_in, c_out, 3, padding=rate, dilation=rate, bias=False)))
        # before the global branch and the projection exist: the reference keeps torch's default for these
        _kaiming_normal(self.branches)
        self.global_branch = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(c_in, c_out, 1, bias=False), Affine(c_out), nn.ReLU()
        )
        self.project = _add_normalisation(nn.Conv2d(5 * c_out, c_out, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, c_in, h, w) to (N, c_out, h, w)."""
        everywhere = self.global_branch(x).expand(-1, -1, *x.shape[2:])
        projected: Tensor = self.project(torch.cat([*(branch(x) for branch in self.branches), everywhere], dim=1))
        return projected


class Affine(nn.Module):
    """A factor and an offset per channel. Replaces normalisation where a channel has one value per sample."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift (N, C, 1, 1)."""
        return self.weight * x + self.bias


class Decoder(nn.Module):
    """Transposed convolutions to full resolution; low-level features join at 1/4. Keeps torch's initialisation."""

    def __init__(self, width: int, low_level: int) -> None:
        super().__init__()
        self.to_quarter = nn.Sequential(
            _add_normalisation(_upsample(width, width)), _add_normalisation(_upsample(width, width))
        )
        self.refine = nn.Sequential(
            _add_normalisation(nn.Conv2d(width + low_level, width, 3, padding=1, bias=False)),
            _add_normalisation(nn.Conv2d(width, width, 3, padding=1, bias=False)),
            nn.Conv2d(width, width, 1),
        )
        self.to_full = nn.Sequential(_add_normalisation(_upsample(width, width)), _upsample(width, len(CLASSES)))

    def forward(self, x: Tensor, low_level: Tensor) -> Tensor:
        """Compute logits (N, classes, 16h, 16w) from (N, width, h, w) and (N, low_level, 4h, 4w)."""
        logits: Tensor = self.to_full(self.refine(torch.cat([self.to_quarter(x), low_level], dim=1)))
        return logits


def _add_normalisation(layer: nn.Module) -> nn.Sequential:
    """Append batch normalisation and ReLU to a layer."""
    last = layer[-1] if isinstance(layer, nn.Sequential) else layer
    assert isinstance(last, nn.Conv2d | nn.ConvTranspose2d)
    return nn.Sequential(layer, GroupBatchNorm2d(last.out_channels), nn.ReLU(inplace=True))


def _upsample(c_in: int, c_out: int) -> nn.ConvTranspose2d:
    # output_padding 1: the sides double exactly
    return nn.ConvTranspose2d(c_in, c_out, 3, stride=2, padding=1, output_padding=1, bias=False)


def _kaiming_normal(module: nn.Module) -> None:
    """Initialise convolutions of encoder and pyramid Kaiming-normal; elsewhere the reference keeps torch's default."""
    for each in module.modules():
        if isinstance(each, nn.Conv2d):
            nn.init.kaiming_normal_(each.weight)


def group_ranks(ranks: int, size: int) -> list[list[int]]:
    """Split all ranks into groups of ``size`` consecutive ones. InputError if size does not divide the ranks."""
    if ranks % size:
        raise InputError(f"batchnorm_group_size is {size}, expected a divisor of the {ranks} ranks of this run")
    return [list(range(begin, begin + size)) for begin in range(0, ranks, size)]


def join_groups(model: nn.Module, world: World, size: int) -> None:
    """Give every GroupBatchNorm2d a group of ``size`` consecutive ranks. All ranks of torch.distributed call."""
    members = group_ranks(world.size, size)
    if size == 1:
        return
    groups = [dist.new_group(ranks) for ranks in members]  # collective: every rank must create every group
    axis = Axis("batch norm", world.rank % size, size, groups[world.rank // size])
    for module in model.modules():
        if isinstance(module, GroupBatchNorm2d):
            module.axis = axis
