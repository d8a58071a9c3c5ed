"""The schedule of the learning rate."""

from __future__ import annotations

from mlhpc.workloads.cosmoflow.config import CosmoFlowConfig


def learning_rate(config: CosmoFlowConfig, global_batch_size: int, epoch: int) -> float:
    """Compute the reference's learning rate of a 1-based epoch; it is constant within an epoch.

    A boundary of n epochs takes effect in epoch n + 2. The reference counts from 0 and tests boundary < epoch.
    """
    epochs_done = epoch - 1
    base = config.base_learning_rate
    peak = base * config.scale(global_batch_size)
    if epochs_done < config.warmup_epochs:
        return base + (peak - base) * epochs_done / config.warmup_epochs
    factor = 1.0
    for boundary, candidate in zip(config.decay_boundary_epochs, config.decay_factors, strict=True):
        if boundary < epochs_done:
            factor = candidate
    return peak * factor
