"""The harness's interface to OpenCatalyst: data, model, optimizer, loss, metric, logged hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.workload import Optimization, Work, Workload
from mlhpc.suite.world import World
from mlhpc.workloads.open_catalyst.config import OpenCatalystConfig
from mlhpc.workloads.open_catalyst.data import OpenCatalystData
from mlhpc.workloads.open_catalyst.model import DimeNetPlusPlus, compute_work
from mlhpc.workloads.open_catalyst.schedule import learning_rate

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


class OpenCatalyst(Workload):
    """Implements `mlhpc.suite.workload.Workload` for OpenCatalyst."""

    def __init__(self, config: RunConfig) -> None:
        if config.compile:
            raise InputError(
                "compile is true, but open_catalyst expects false: torch.compile cannot differentiate twice, "
                "and forces need that"
            )
        self.config = config
        self._settings = cast(OpenCatalystConfig, config.hyperparameters)
        self._imbalance: Tensor | None = None  # sum over steps of largest / mean triplets of a rank
        self._steps = 0

    def dataset(self, split: str, root: Path) -> OpenCatalystData:
        """Open one split. InputError if the data are damaged or have other arrays."""
        return OpenCatalystData(root, split, self.config, self._settings)

    def build_model(self, world: World) -> nn.Module:
        """Build the network, initialised from torch's current seed."""
        return DimeNetPlusPlus(self._settings)

    def find_graph_problem(self, model: nn.Module) -> str | None:
        """Name the reason: every batch has another number of atoms and edges."""
        return "batches of atoms and edges have another shape in each step"

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Build AdamW with torch's defaults. The schedule counts steps of the global batch, as the rules do."""
        settings = self._settings
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        return Optimization(optimizer, lambda step, epoch: learning_rate(settings, step))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the absolute error of scaled forces, summed over components, averaged over the global batch's free
        atoms.

        Ranks and accumulation steps have different numbers of free atoms. The harness averages over both. So the local
        sum is multiplied by ranks and steps, and divided by the global count. One small collective exchanges the
        counts.
        """
        settings = self._settings
        energy_N, force_A3 = model(batch)
        error_A = (force_A3 - batch["force"] / settings.target_std_ev).abs().sum(dim=1)
        counts_R3 = self._counts(batch["counts"])
        # the harness divides by ranks and parts; this loss is divided by free atoms instead
        shares = len(counts_R3) * self.config.gradient_accumulation_steps
        loss = settings.force_coefficient * shares * (error_A * batch["free"]).sum() / counts_R3[:, 2].sum().float()
        if settings.energy_coefficient:
            energies = self._energy_error(energy_N, batch).abs().sum()
            loss = loss + settings.energy_coefficient * shares * energies / self.config.global_batch_size
        return cast(Tensor, loss)

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum absolute and squared errors of force components on free atoms, in eV/angstrom, and count them."""
        energy_N, force_A3 = model(batch)
        error_A3 = self._settings.target_std_ev * force_A3.double() - batch["force"].double()
        free_A1 = batch["free"].double()[:, None]
        stats = {
            "absolute": (error_A3.abs() * free_A1).sum(),
            "squared": (error_A3.square() * free_A1).sum(),
            "components": 3 * batch["counts"][0],
        }
        if self._settings.energy_coefficient:
            energy = self._settings.target_std_ev * self._energy_error(energy_N, batch).double().abs().sum()
            stats |= {"energy": energy, "samples": torch.ones_like(energy) * len(energy_N)}
        return stats

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Compute ``eval_error``, the mean absolute error of force components on free atoms, and the root mean square.

        An energy error is reported only if energies are trained.
        """
        components = totals["components"]
        metrics = {
            "eval_error": totals["absolute"] / components,
            "force_rmse": (totals["squared"] / components) ** 0.5,
        }
        if "samples" in totals:
            metrics["energy_mae"] = totals["energy"] / totals["samples"]
        return metrics

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the configuration says."""
        return self._settings.collect_logged(self.config)

    def work(self) -> Work:
        """Compute the closed forms for a sample of mean size, with activations stored at the run's precision."""
        return self._work(self._settings)

    def work_of(self, batch: Batch) -> Work:
        """Compute the closed forms for structures of the mean size of this batch."""
        rows = {"mean_atoms": "number", "mean_edges": "source", "mean_triplets": "into"}
        sizes = {name: len(batch[array]) / len(batch["energy"]) for name, array in rows.items()}
        return self._work(structs.replace(self._settings, **sizes))

    def _work(self, settings: OpenCatalystConfig) -> Work:
        element_bytes = 2 if self.config.precision == "bfloat16" else 4
        return compute_work(settings, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes)

    def window_stats(self, world: World) -> dict[str, Any]:
        """Return the largest / mean triplets of a rank, averaged over the window's steps. 1 is perfect balance."""
        if self._imbalance is None:
            return {}
        mean = float(self._imbalance) / self._steps
        self._imbalance, self._steps = None, 0
        return {"imbalance": mean}

    def _counts(self, own_3: Tensor) -> Tensor:
        """Gather the ``counts`` of every rank's batch, (ranks, 3). Every rank calls."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return own_3[None]
        # one all-reduce of a table with a row per rank, zero but for the own row
        counts_R3 = own_3.new_zeros(dist.get_world_size(), 3)
        counts_R3[dist.get_rank()] = own_3
        dist.all_reduce(counts_R3)
        share_R = counts_R3[:, 1].float()
        imbalance = share_R.max() / share_R.mean()
        self._imbalance = imbalance if self._imbalance is None else self._imbalance + imbalance
        self._steps += 1
        return counts_R3

    def _energy_error(self, energy_N: Tensor, batch: Batch) -> Tensor:
        target_N = (batch["energy"] - self._settings.target_mean_ev) / self._settings.target_std_ev
        return energy_N - target_N.float()
