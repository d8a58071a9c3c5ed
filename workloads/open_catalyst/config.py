"""Hyperparameters of DimeNet++ and its training on S2EF. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from mlhpc.suite.config import Hyperparameters, RunConfig
from mlhpc.suite.errors import InputError

ELEMENTS = 95  # rows of the embedding; atomic numbers are 1..94
OUTPUT_SCALE_STD = 2.887317180633545  # eV: standard deviation of the energies of the OC20-2M training split
OUTPUT_SCALE_MEAN = -0.7554450631141663  # eV: their mean


class OpenCatalystConfig(Hyperparameters, frozen=True, kw_only=True):
    """Model, graph, loss and schedule. Defaults are those of the MLPerf HPC reference.

    The learning rate rises from ``warmup_factor`` * ``learning_rate`` to ``learning_rate`` over ``warmup_steps``. At
    every boundary it is multiplied by ``decay_factor``. Steps are of the global batch.
    """

    hidden_channels: Annotated[int, Meta(ge=1)] = 192
    output_channels: Annotated[int, Meta(ge=1)] = 192
    blocks: Annotated[int, Meta(ge=1, le=1000), "interaction blocks; there is one output block more"] = 3
    triplet_channels: Annotated[int, Meta(ge=1), "int_emb: width of an edge inside the sum over triplets"] = 64
    basis_channels: Annotated[int, Meta(ge=1), "basis_emb: width to which the bases are projected first"] = 8
    num_spherical: Annotated[int, Meta(ge=1, le=12), "angular functions, l = 0..n-1"] = 7
    num_radial: Annotated[int, Meta(ge=1, le=32)] = 6
    cutoff_angstrom: Annotated[float, Meta(gt=0)] = 6.0
    max_neighbours: Annotated[int, Meta(ge=1), "nearest neighbours kept per atom"] = 50
    envelope_exponent: Annotated[int, Meta(ge=1)] = 5
    before_skip: Annotated[int, Meta(ge=0, le=100)] = 1
    after_skip: Annotated[int, Meta(ge=0, le=100)] = 2
    output_layers: Annotated[int, Meta(ge=0, le=100)] = 3
    exact_angles: Annotated[
        bool, "false: angles carry no gradient, as in the reference; true: forces are exactly -dE/dx"
    ] = False
    force_coefficient: Annotated[float, Meta(gt=0)] = 50.0
    energy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    target_mean_ev: float = OUTPUT_SCALE_MEAN
    target_std_ev: Annotated[float, Meta(gt=0), "scale of energies and, per angstrom, of forces"] = OUTPUT_SCALE_STD
    learning_rate: Annotated[float, Meta(gt=0)]
    weight_decay: Annotated[float, Meta(ge=0), "AdamW's default in torch, as in the reference"] = 0.01
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    warmup_factor: Annotated[float, Meta(ge=0, le=1)] = 0.2
    decay_boundary_steps: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    decay_factor: Annotated[float, Meta(gt=0, le=1)] = 0.1
    balanced_batches: Annotated[
        bool, "split each global batch over the ranks by triplets instead of evenly by samples"
    ] = False
    mean_atoms: Annotated[float, Meta(gt=0), "per sample; with the two below for the closed forms of work"]
    mean_edges: Annotated[float, Meta(gt=0)]
    mean_triplets: Annotated[float, Meta(gt=0)]

    def __post_init__(self) -> None:
        boundaries = list(self.decay_boundary_steps)
        if boundaries != sorted(set(boundaries)):
            raise InputError(f"decay_boundary_steps is {boundaries}, expected increasing steps")

    def collect_logged(self, config: RunConfig, ranks: int = 1) -> dict[str, Any]:
        """Collect what the log states.

        Keys are the reference's; ``opt_base_learning_rate`` is the rate after warm-up.
        """
        return {
            "global_batch_size": config.global_batch_size,
            "opt_name": "AdamW",
            "opt_base_learning_rate": self.learning_rate,
            "opt_learning_rate_warmup_steps": self.warmup_steps,
            "opt_learning_rate_warmup_factor": self.warmup_factor,
            "opt_learning_rate_decay_boundary_steps": list(self.decay_boundary_steps),
            "opt_learning_rate_decay_factor": self.decay_factor,
            "opt_weight_decay": self.weight_decay,
            "force_coefficient": self.force_coefficient,
            "energy_coefficient": self.energy_coefficient,
            "target_std": self.target_std_ev,
            "cutoff": self.cutoff_angstrom,
            "max_neighbours": self.max_neighbours,
            "exact_angles": self.exact_angles,
            "balanced_batches": self.balanced_batches,
        }
