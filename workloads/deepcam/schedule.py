"""The schedule of the learning rate."""

from __future__ import annotations

import math

from mlhpc.workloads.deepcam.config import DeepCamConfig


def learning_rate(config: DeepCamConfig, step: int) -> float:
    """Compute the rate of a 0-based optimizer step. Cosine annealing rises again after t_max, as in the reference."""
    peak = config.learning_rate * config.warmup_factor
    if step < config.warmup_steps:
        start = 0.0 if config.warmup_factor == 1 else config.learning_rate
        return start + (peak - start) * (step + 1) / config.warmup_steps
    since = step - config.warmup_steps
    if config.schedule == "multistep":
        return peak * config.decay_rate ** sum(since >= milestone for milestone in config.milestones)
    assert config.t_max is not None
    return config.eta_min + (peak - config.eta_min) * (1 + math.cos(math.pi * since / config.t_max)) / 2
