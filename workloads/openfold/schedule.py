"""The schedule of the learning rate."""

from __future__ import annotations

from mlhpc.workloads.openfold.config import OpenFoldConfig


def learning_rate(config: OpenFoldConfig, step: int) -> float:
    """Compute the rate of a 0-based step: linear warm-up from ``warmup_init``, then constant between decay steps.

    The last step of the warm-up has the base rate, as in the reference. A warm-up of one step has ``warmup_init``.
    """
    if step < config.warmup_steps:
        share = step / max(config.warmup_steps - 1, 1)
        return round(config.warmup_init + share * (config.learning_rate - config.warmup_init), 10)
    return config.learning_rate * config.decay_factor ** sum(step >= boundary for boundary in config.decay_steps)
