"""The schedule of the learning rate."""

from __future__ import annotations

import math

from mlhpc.workloads.moe.config import Training


def learning_rate(config: Training, step: int) -> float:
    """Compute the rate of a 0-based step: linear warm-up, then cosine, then constant."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    # a schedule that ends with its warm-up would divide by zero
    span = max(1, config.schedule_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    low = config.final_fraction
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
