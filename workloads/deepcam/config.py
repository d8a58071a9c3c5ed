"""Hyperparameters of DeepCAM: model, optimizer and learning-rate schedule. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta

from mlhpc.suite.config import Hyperparameters, RunConfig
from mlhpc.suite.errors import InputError

CHANNELS = (  # of a sample, in the order of the public data (CAM5 names)
    *("TMQ", "U850", "V850", "UBOT", "VBOT", "QREFHT", "PS", "PSL"),
    *("T200", "T500", "PRECT", "TS", "TREFHT", "Z1000", "Z200", "ZBOT"),
)
# labels 0, 1, 2; the reference's README swaps the last two
CLASSES = ("background", "tropical_cyclone", "atmospheric_river")
CLASS_FREQUENCIES = (0.986267818390377, 0.0004578708870701058, 0.01327431072255291)  # of the public data: train.py
LOSS_WEIGHTS = tuple(frequency**-0.125 for frequency in CLASS_FREQUENCIES)  # fixed by the benchmark
OUTPUT_STRIDE = 16
MIN_CHANNELS = 16  # oneDNN 3.12 crashes in the backward of strided, channels-last 1x1 convolutions below 16 channels
EPS = 1e-6  # of Adam, AdamW and LAMB; fixed by the benchmark
MAX_GRAD_NORM = 1.0  # of LAMB; fixed by the benchmark
BIAS_CORRECTION = GRAD_AVERAGING = True  # of LAMB; fixed by the benchmark

Rate = Annotated[int, Meta(ge=2)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


class DeepCamConfig(Hyperparameters, frozen=True, kw_only=True):
    """Model, optimizer and schedule. The reference has ``channel_divisor`` 1, 16 middle blocks and rates 6, 12, 18.

    The learning rate rises over ``warmup_steps``. If ``warmup_factor`` is 1, it rises from 0 to ``learning_rate``, else
    from ``learning_rate`` to factor times it. ``milestones`` and ``t_max`` count steps from the end of the warm-up.
    """

    height: Annotated[int, Meta(ge=OUTPUT_STRIDE, multiple_of=OUTPUT_STRIDE), "pixels of a sample, south to north"]
    width: Annotated[int, Meta(ge=OUTPUT_STRIDE, multiple_of=OUTPUT_STRIDE), "pixels of a sample, west to east"]
    channel_divisor: Annotated[int, Meta(ge=1), "the reference's channel numbers are divided by this"] = 1
    middle_blocks: Annotated[int, Meta(ge=0, le=1000)] = 16
    aspp_rates: Annotated[tuple[Rate, Rate, Rate], "dilations of the three 3x3 branches"] = (6, 12, 18)
    batchnorm_group_size: Annotated[int, Meta(ge=1), "consecutive ranks that normalise over one batch"] = 1
    optimizer: Literal["Adam", "AdamW", "LAMB"]
    learning_rate: Annotated[float, Meta(gt=0)]
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Meta(ge=EPS, le=EPS), "fixed by the benchmark"] = EPS
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    schedule: Literal["multistep", "cosine_annealing"]
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    warmup_factor: Annotated[float, Meta(ge=1)] = 1.0
    milestones: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    decay_rate: Annotated[float, Meta(gt=0, le=1), "multistep: factor at each milestone"] = 0.1
    t_max: Annotated[int, Meta(ge=1), "cosine_annealing: steps from the peak to eta_min"] | None = None
    eta_min: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if (self.schedule == "cosine_annealing") != (self.t_max is not None):
            raise InputError(
                f"t_max is {self.t_max} with schedule {self.schedule}; only cosine_annealing has it, and needs it"
            )
        if self.milestones and self.schedule != "multistep":
            raise InputError(
                f"milestones is {list(self.milestones)} with schedule {self.schedule}; only multistep has milestones"
            )
        if list(self.milestones) != sorted(set(self.milestones)):
            raise InputError(f"milestones is {list(self.milestones)}, expected increasing steps")

    def channels(self, reference: int) -> int:
        """Scale a channel count of the reference: a multiple of 8, at least `MIN_CHANNELS`."""
        return max(MIN_CHANNELS, 8 * math.ceil(reference / self.channel_divisor / 8))

    def collect_logged(self, config: RunConfig, ranks: int = 1) -> dict[str, Any]:
        """Collect what the log states.

        Keys are the reference's; ``opt_lr`` is the rate before multiplication by ``scheduler_lr_warmup_factor``.
        """
        logged: dict[str, Any] = {
            "global_batch_size": config.global_batch_size,
            "batchnorm_group_size": self.batchnorm_group_size,
            "gradient_accumulation_frequency": config.gradient_accumulation_steps,
            "opt_name": self.optimizer,
            "opt_lr": self.learning_rate,
            "opt_betas": list(self.betas),
            "opt_eps": self.eps,
            "opt_weight_decay": self.weight_decay,
        }
        if self.optimizer == "LAMB":
            logged["opt_bias_correction"] = BIAS_CORRECTION
            logged["opt_grad_averaging"] = GRAD_AVERAGING
            logged["opt_max_grad_norm"] = MAX_GRAD_NORM
        logged["scheduler_type"] = self.schedule
        logged["scheduler_lr_warmup_steps"] = self.warmup_steps
        logged["scheduler_lr_warmup_factor"] = self.warmup_factor
        if self.schedule == "multistep":
            logged["scheduler_milestones"] = list(self.milestones)
            logged["scheduler_decay_rate"] = self.decay_rate
        else:
            logged["scheduler_t_max"] = self.t_max
            logged["scheduler_eta_min"] = self.eta_min
        return logged
