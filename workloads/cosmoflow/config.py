"""Hyperparameters of CosmoFlow: model, training and learning-rate schedule. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta

from mlhpc.suite.config import Hyperparameters, RunConfig
from mlhpc.suite.errors import InputError

REDSHIFTS = (3.0, 1.5, 0.5, 0.0)  # the four channels of a sample, in the order of the public data
TARGETS = ("omega_m", "sigma_8", "n_s", "h_0")

Factor = Annotated[float, Meta(gt=0, lt=1)]
PerChannel = tuple[float, float, float, float]


class CosmoFlowConfig(Hyperparameters, frozen=True, kw_only=True):
    """Model, regularisation, input and schedule, with the names of the MLPerf HPC reference.

    The learning rate rises from ``base_learning_rate`` to base * scaling factor over ``warmup_epochs``. It is then
    multiplied by the factor of the last of ``decay_boundary_epochs`` that has passed.
    """

    input_size: Annotated[int, Meta(ge=2), "voxels along one side of a sample"]
    conv_channels: Annotated[tuple[int, ...], Meta(min_length=1), "output channels of the convolutions, in order"]
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    l2: Annotated[float, Meta(ge=0), "the loss gains l2 * sum(w^2) of the two hidden dense kernels"] = 0.0
    base_learning_rate: Annotated[float, Meta(gt=0)]
    base_batch_size: Annotated[int, Meta(ge=1), "batch size at which base_learning_rate needs no scaling"] = 64
    scaling: Literal["none", "linear", "sqrt"] = "none"
    warmup_epochs: Annotated[int, Meta(ge=0)] = 0
    decay_boundary_epochs: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    decay_factors: Annotated[tuple[Factor, ...], "factors of the scaled rate, one per boundary"] = ()
    momentum: Annotated[float, Meta(ge=0.9, le=0.9), "fixed by the benchmark"] = 0.9
    input_norm: Literal["log1p", "log1p_standard"] = "log1p"
    input_mean: Annotated[PerChannel | None, "log1p_standard: mean of log1p(counts) per channel"] = None
    input_std: Annotated[PerChannel | None, "log1p_standard: standard deviation of log1p(counts)"] = None
    augmentation: Annotated[bool, "cube symmetries and periodic shifts; needs periodic samples"] = False

    def __post_init__(self) -> None:
        # every convolution is followed by a pooling that halves the sides
        if self.input_size % 2 ** len(self.conv_channels):
            raise InputError(
                f"input_size is {self.input_size}, expected a multiple of {2 ** len(self.conv_channels)}: "
                f"each of the {len(self.conv_channels)} conv_channels halves it"
            )
        boundaries = list(self.decay_boundary_epochs)
        if len(boundaries) != len(self.decay_factors) or boundaries != sorted(set(boundaries)):
            raise InputError(
                f"decay_boundary_epochs is {boundaries}, expected increasing epochs, one for each of the "
                f"{len(self.decay_factors)} decay_factors"
            )
        has_constants = self.input_mean is not None and self.input_std is not None and min(self.input_std) > 0
        if (self.input_norm == "log1p_standard") != has_constants:
            raise InputError(
                f"input_norm is {self.input_norm}: log1p_standard needs input_mean and a positive input_std, log1p"
                " neither"
            )

    def scale(self, global_batch_size: int) -> float:
        """Compute the factor from the base learning rate to the rate after warm-up."""
        ratio = global_batch_size / self.base_batch_size
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.scaling]

    def collect_logged(self, config: RunConfig, ranks: int = 1) -> dict[str, Any]:
        """Collect what the log states.

        Keys and units are the reference's: ``opt_base_learning_rate`` is the rate after warm-up.

        ``opt_weight_decay`` is l2; a torch weight decay of the same strength is 2 * l2. All decay factors are logged,
        not only the largest.
        """
        scale = self.scale(config.global_batch_size)
        return {
            "global_batch_size": config.global_batch_size,
            "opt_name": "SGD",
            "opt_base_learning_rate": self.base_learning_rate * scale,
            "opt_learning_rate_warmup_epochs": self.warmup_epochs,
            "opt_learning_rate_warmup_factor": scale,
            "opt_learning_rate_decay_boundary_epochs": list(self.decay_boundary_epochs),
            "opt_learning_rate_decay_factor": list(self.decay_factors),
            "sgd_opt_momentum": self.momentum,
            "opt_weight_decay": self.l2,
            "dropout": self.dropout,
            "input_norm": self.input_norm,
            "augmentation": self.augmentation,
        }
