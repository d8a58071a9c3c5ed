"""The schedule of the learning rate."""

from __future__ import annotations

from bisect import bisect_right

from mlhpc.workloads.open_catalyst.config import OpenCatalystConfig


def learning_rate(config: OpenCatalystConfig, step: int) -> float:
    """Compute the reference's rate of a 0-based global step: linear warm-up, then one factor per boundary reached."""
    base = config.learning_rate
    if step <= config.warmup_steps and config.warmup_steps:
        progress = step / config.warmup_steps
        return base * (config.warmup_factor * (1 - progress) + progress)
    return base * config.decay_factor ** bisect_right(config.decay_boundary_steps, step)
