"""FLOPs and compulsory bytes of one DeepCAM sample, computed from the shapes of the layers.

The shapes come from one pass of the model on torch's meta device, which computes and stores no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn

from mlhpc.suite.workload import GRADIENT_BYTES, UPDATE_FLOPS, Work
from mlhpc.workloads.deepcam.config import CHANNELS, DeepCamConfig
from mlhpc.workloads.deepcam.model import DeepLabV3Plus

STATE_TENSORS = 2  # of Adam, AdamW and LAMB


@dataclass(frozen=True)
class Layer:
    """A convolution (``flops`` > 0) or a batch normalisation with its ReLU: values read and written for one sample.

    ``groups`` is 1, or the number of channels of a depthwise convolution.
    """

    flops: float
    values_in: int
    values_out: int
    groups: int


def compute_work(config: DeepCamConfig, *, global_batch_size: int, element_bytes: int) -> Work:
    """Compute the work of training on one sample (docs/deepcam.md lists what is counted).

    FLOPs: forward, gradient by weights, gradient by inputs except the first. Bytes: every layer reads its inputs and
    writes its outputs once, forward and backward. The traffic of parameters, gradients and moments is divided by the
    batch size.
    """
    all_layers = list_layers(config)
    forward = sum(layer.flops for layer in all_layers)
    training = 3 * forward - all_layers[0].flops
    values = forward_values = 0
    for position, layer in enumerate(all_layers):
        once = layer.values_in + layer.values_out
        forward_values += once
        if layer.flops:
            values += once + (once if position else 0)  # gradient by weights, gradient by inputs
        else:
            values += once + layer.values_in  # backward reads gradient and input, writes gradient
    pixels = config.height * config.width
    # float32 fields and uint8 labels
    inputs = 4 * len(CHANNELS) * pixels + pixels
    parameters = parameter_count(config)
    # read weights twice; read gradient, weight and state; write weight and state
    optimizer = 4 * parameters * (2 + (2 + STATE_TENSORS) + (1 + STATE_TENSORS))
    passes = element_bytes * (forward_values + values)
    return Work(
        model_flops=training,
        executed_flops=training,
        algorithmic_bytes=inputs + passes + optimizer / global_batch_size,
        forward_flops=forward,
        forward_bytes=inputs + element_bytes * forward_values,
        optimizer_flops_per_step=UPDATE_FLOPS[config.optimizer] * parameters,
        optimizer_bytes_per_step=optimizer,
        all_reduce_bytes_per_step=GRADIENT_BYTES * parameters,
    )


def forward_flops(config: DeepCamConfig) -> float:
    """Compute the FLOPs of the forward pass of one sample, 2 per multiply-add of convolutions."""
    return sum(layer.flops for layer in list_layers(config))


def parameter_count(config: DeepCamConfig) -> int:
    """Count trainable parameters from the shapes alone."""
    with torch.device("meta"):
        model = DeepLabV3Plus(config, channels_last=False)
    return sum(parameter.numel() for parameter in model.parameters())


@lru_cache(maxsize=4)
def list_layers(config: DeepCamConfig) -> tuple[Layer, ...]:
    """List convolutions and normalisations in the order they run. A ReLU counts with the normalisation before it."""
    result: list[Layer] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        flops, groups = 0.0, 1
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            # a transposed convolution uses each weight once per pixel of its input
            pixels = (inputs[0] if isinstance(module, nn.ConvTranspose2d) else output).shape[2:]
            flops = 2.0 * module.weight.numel() * prod(pixels)  # each weight is used once per pixel
            groups = module.groups
        result.append(Layer(flops, inputs[0].numel(), output.numel(), groups))

    with torch.device("meta"):
        model = DeepLabV3Plus(config, channels_last=False).eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
                module.register_forward_hook(record)
        with torch.no_grad():
            model(torch.empty(1, config.height, config.width, len(CHANNELS)))
    return tuple(result)
