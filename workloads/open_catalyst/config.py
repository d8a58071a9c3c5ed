"""Hyperparameters of DimeNet++ and its training on S2EF. No torch."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Self

from pydantic import Field, model_validator

from suite.config import Hyperparameters
from suite.errors import InputError

ELEMENTS = 95  # rows of the embedding; atomic numbers are 1..94
OUTPUT_SCALE_STD = 2.887317180633545  # eV: standard deviation of the energies of the OC20-2M training split
OUTPUT_SCALE_MEAN = -0.7554450631141663  # eV: their mean


class OpenCatalystConfig(Hyperparameters):
    """Model, graph, loss and schedule. Defaults are those of the MLPerf HPC reference.

    The learning rate rises from ``warmup_factor`` * ``learning_rate`` to ``learning_rate`` over ``warmup_steps`` and is
    multiplied by ``decay_factor`` at every boundary. Steps are of the global batch.
    """

    hidden_channels: int = Field(192, ge=1)
    output_channels: int = Field(192, ge=1)
    blocks: int = Field(3, ge=1, description="interaction blocks; there is one output block more")
    triplet_channels: int = Field(64, ge=1, description="int_emb: width of an edge inside the sum over triplets")
    basis_channels: int = Field(8, ge=1, description="basis_emb: width to which the bases are projected first")
    num_spherical: int = Field(7, ge=1, le=12, description="angular functions, l = 0..n-1")
    num_radial: int = Field(6, ge=1, le=32)
    cutoff_angstrom: float = Field(6.0, gt=0)
    max_neighbours: int = Field(50, ge=1, description="nearest neighbours kept per atom")
    envelope_exponent: int = Field(5, ge=1)
    before_skip: int = Field(1, ge=0)
    after_skip: int = Field(2, ge=0)
    output_layers: int = Field(3, ge=0)
    exact_angles: bool = Field(
        False, description="false: angles carry no gradient, as in the reference; true: forces are exactly -dE/dx"
    )
    force_coefficient: float = Field(50.0, gt=0)
    energy_coefficient: float = Field(0.0, ge=0)
    target_mean_ev: float = OUTPUT_SCALE_MEAN
    target_std_ev: float = Field(OUTPUT_SCALE_STD, gt=0, description="scale of energies and, per angstrom, of forces")
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(0.01, ge=0, description="AdamW's default in torch, as in the reference")
    warmup_steps: int = Field(0, ge=0)
    warmup_factor: float = Field(0.2, ge=0, le=1)
    decay_boundary_steps: tuple[Annotated[int, Field(ge=0)], ...] = ()
    decay_factor: float = Field(0.1, gt=0, le=1)
    balanced_batches: bool = Field(
        False, description="split each global batch over the ranks by triplets instead of evenly by samples"
    )
    mean_atoms: float = Field(gt=0, description="per sample; with the two below for the closed forms of work")
    mean_edges: float = Field(gt=0)
    mean_triplets: float = Field(gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        boundaries = list(self.decay_boundary_steps)
        if boundaries != sorted(set(boundaries)):
            raise InputError("decay_boundary_steps must increase")
        return self


def learning_rate(config: OpenCatalystConfig, step: int) -> float:
    """Compute the reference's rate of a 0-based global step: linear warm-up, then one factor per boundary reached."""
    base = config.learning_rate
    if step <= config.warmup_steps and config.warmup_steps:
        progress = step / config.warmup_steps
        return base * (config.warmup_factor * (1 - progress) + progress)
    return base * config.decay_factor ** bisect_right(config.decay_boundary_steps, step)
