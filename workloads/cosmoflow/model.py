"""The CosmoFlow network, its optimizer (SGD as in Keras) and the closed forms of its work. No data, no schedule.

Shapes: N samples, D H W voxels, C channels, F features, T = 4 targets. Counts are int16 with channels last (NDHWC), as
stored. Reference: mlcommons/hpc cosmoflow/models/cosmoflow.py (v1.0 and later: kernel 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.workload import GRADIENT_BYTES, UPDATE_FLOPS, Work
from mlhpc.workloads.cosmoflow.config import REDSHIFTS, TARGETS, CosmoFlowConfig

KERNEL = 3
# channels * depth * height of one sample above which torch takes oneDNN (aten/src/ATen/native/Convolution.cpp)
ONEDNN_ABOVE = 20_480
HIDDEN_UNITS = (128, 64)
LEAKY_SLOPE = 0.3  # the default of Keras, not of torch
OUTPUT_SCALE = 1.2  # tanh reaches the targets' interval [-1, 1] well before it saturates
CHANNELS = len(REDSHIFTS)


class Convolution(nn.Conv3d):
    """A convolution of 3^3 voxels that keeps the extents.

    On a processor torch computes a small convolution of a single sample by code of its own. For two samples or more it
    uses oneDNN, which is several times faster. So a single sample is cut into two halves along its depth. Each half
    also gets the plane of voxels on the other side of the cut. The results are joined again.
    """

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(c_in, c_out, KERNEL, padding="same")

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Map (N, inputs, D, H, W) to (N, outputs, D, H, W)."""
        samples, channels, depth, height, _ = x_NCDHW.shape
        if samples != 1 or depth % 2 or channels * depth * height > ONEDNN_ABOVE or not _uses_onednn(x_NCDHW):
            return super().forward(x_NCDHW)
        half, reach = depth // 2, KERNEL // 2
        padded = F.pad(x_NCDHW, (0, 0, 0, 0, reach, reach))
        halves = torch.cat([padded[:, :, : half + 2 * reach], padded[:, :, half:]])
        found = F.conv3d(halves, self.weight, self.bias, padding=(0, reach, reach))
        return torch.cat([found[:1], found[1:]], dim=2)


def _uses_onednn(x: Tensor) -> bool:
    """Return whether torch asks oneDNN for convolutions in float32 of x, if they are large."""
    wanted = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()  # type: ignore[no-untyped-call]
    return wanted and x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


class CosmoFlowNet(nn.Module):
    """Convolution, LeakyReLU and 2^3 max pooling per stage, then two hidden dense layers and a scaled tanh.

    Pooling runs before the LeakyReLU, which then has 1/8 of the values. LeakyReLU is monotone, so both orders give the
    same bits.
    """

    def __init__(self, config: CosmoFlowConfig, *, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        widths = (CHANNELS, *config.conv_channels)
        self.convolutions = nn.ModuleList(Convolution(c_in, c_out) for c_in, c_out in pairwise(widths))
        self.pool = nn.MaxPool3d(2)
        self.activation = nn.LeakyReLU(LEAKY_SLOPE)
        features = (count_flat_features(config), *HIDDEN_UNITS)
        self.hidden = nn.ModuleList(nn.Linear(f_in, f_out) for f_in, f_out in pairwise(features))
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(HIDDEN_UNITS[-1], len(TARGETS))
        mean, std = config.input_mean or (0.0,) * CHANNELS, config.input_std or (1.0,) * CHANNELS
        self.standardise = config.input_norm == "log1p_standard"
        self.input_mean_C: Tensor
        self.input_factor_C: Tensor
        # they come from the config, so a checkpoint need not hold them
        self.register_buffer("input_mean_C", torch.tensor(mean), persistent=False)
        self.register_buffer("input_factor_C", 1 / torch.tensor(std), persistent=False)
        self.reset_parameters()
        if channels_last:
            self.lay_out(channels_last)

    def lay_out(self, channels_last: bool) -> None:
        """Convert the kernels, and from now on the input, to a memory format."""
        self.channels_last = channels_last
        wanted = torch.channels_last_3d if channels_last else torch.contiguous_format
        self.to(memory_format=wanted)  # type: ignore[call-overload]  # a keyword torch does not type

    def reset_parameters(self) -> None:
        """Initialise kernels Glorot-uniform and biases to zero, the defaults of Keras."""
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, counts_NDHWC: Tensor) -> Tensor:
        """Predict targets (N, T) in [-1.2, 1.2] from int16 counts."""
        x_NDHWC = torch.log1p(counts_NDHWC.float())
        if self.standardise:  # whole rows at once: along four numbers a processor's vector instructions do not help
            side = counts_NDHWC.shape[3]
            rows_NDHR = (x_NDHWC.flatten(3) - self.input_mean_C.repeat(side)).mul_(self.input_factor_C.repeat(side))
            x_NDHWC = rows_NDHR.view(counts_NDHWC.shape)
        x_NCDHW = x_NDHWC.permute(0, 4, 1, 2, 3)
        if not self.channels_last:
            x_NCDHW = x_NCDHW.contiguous()
        for convolution in self.convolutions:
            x_NCDHW = self.activation(self.pool(convolution(x_NCDHW)))
        x_NF = x_NCDHW.permute(0, 2, 3, 4, 1).flatten(1)  # the reference flattens channels last
        for dense in self.hidden:
            x_NF = self.dropout(self.activation(dense(x_NF)))
        return OUTPUT_SCALE * torch.tanh(self.output(x_NF).float())


def count_flat_features(config: CosmoFlowConfig) -> int:
    """Compute the number of features after the last pooling."""
    return config.conv_channels[-1] * (config.input_size >> len(config.conv_channels)) ** 3


def list_regularised_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the kernels with L2 regularisation, the two hidden dense ones, also of a wrapped model (DDP, compiled)."""
    return (layer.weight for name, layer in model.named_modules() if "hidden." in name and isinstance(layer, nn.Linear))


class KerasSGD(torch.optim.Optimizer):
    """Momentum SGD as in Keras: v = momentum * v - lr * g; w = w + v.

    torch.optim.SGD keeps the learning rate outside the velocity, so the two differ as soon as the rate changes.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            velocities = [self._velocity(weight) for weight in weights]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, [weight.grad for weight in weights], alpha=-group["lr"])
            torch._foreach_add_(weights, velocities)

    def _velocity(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["velocity"] = torch.zeros_like(weight)
        velocity: Tensor = state["velocity"]
        return velocity


def compute_work(config: CosmoFlowConfig, *, global_batch_size: int, element_bytes: int) -> Work:
    """Compute FLOPs and compulsory bytes of training on one sample (docs/cosmoflow.md lists what is counted).

    Bytes: every operator reads its inputs and writes its outputs once, forward and backward. Pooling and LeakyReLU
    count as one operator. The traffic of parameters, gradients and velocities is divided by the batch size.
    """
    layers = list(_layers(config))
    forward = sum(flops for flops, _, _ in layers)
    training = 3 * forward - layers[0][0]  # backward by weights and by inputs, except by the first input
    counts_bytes = 2 * CHANNELS * config.input_size**3
    activations = forward_values = 0.0
    for position, (_, values_in, values_out) in enumerate(layers):
        is_convolution = position < len(config.conv_channels)
        # only convolutions are followed by a pooling of 2^3 voxels
        pooled = values_out / 8 if is_convolution else values_out
        forward_values += values_in + values_out  # the layer
        forward_values += values_out + pooled  # pooling and activation
        activations += pooled + values_out + values_out  # their backward: read both, write one
        activations += values_out + values_in  # gradient by the weights
        activations += (values_out + values_in) if position else 0  # gradient by the input
    parameters = parameter_count(config)
    optimizer = parameters * 4 * (2 + 3 + 2)  # read weights twice; read g, v, w; write v, w
    passes = element_bytes * (forward_values + activations)
    return Work(
        model_flops=training,
        executed_flops=training,
        algorithmic_bytes=counts_bytes + passes + optimizer / global_batch_size,
        forward_flops=forward,
        forward_bytes=counts_bytes + element_bytes * forward_values,
        optimizer_flops_per_step=UPDATE_FLOPS["SGD"] * parameters,
        optimizer_bytes_per_step=optimizer,
        all_reduce_bytes_per_step=GRADIENT_BYTES * parameters,
    )


def forward_flops(config: CosmoFlowConfig) -> float:
    """Compute the FLOPs of the forward pass of one sample, 2 per multiply-add of convolutions and dense layers."""
    return sum(flops for flops, _, _ in _layers(config))


def parameter_count(config: CosmoFlowConfig) -> int:
    """Count trainable parameters from the shapes alone."""
    widths = (CHANNELS, *config.conv_channels)
    convolutions = sum((KERNEL**3 * a + 1) * b for a, b in pairwise(widths))
    features = (count_flat_features(config), *HIDDEN_UNITS, len(TARGETS))
    return convolutions + sum((a + 1) * b for a, b in pairwise(features))


def _layers(config: CosmoFlowConfig) -> Iterator[tuple[float, float, float]]:
    """Yield (FLOPs, input values, output values) of each convolution and dense layer for one sample."""
    widths = (CHANNELS, *config.conv_channels)
    side = config.input_size
    for c_in, c_out in pairwise(widths):
        yield 2.0 * KERNEL**3 * c_in * c_out * side**3, float(c_in * side**3), float(c_out * side**3)
        side //= 2
    features = (count_flat_features(config), *HIDDEN_UNITS, len(TARGETS))
    for f_in, f_out in pairwise(features):
        yield 2.0 * f_in * f_out, float(f_in), float(f_out)
