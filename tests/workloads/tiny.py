"""The smallest data set of each workload whose generator numbers its items: a fraction of a second to make."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow import generate as cosmoflow
from mlhpc.workloads.cosmoflow.cosmology import Simulation
from mlhpc.workloads.deepcam import generate as deepcam
from mlhpc.workloads.deepcam.climate import Domain
from mlhpc.workloads.open_catalyst import generate as open_catalyst
from mlhpc.workloads.open_catalyst.structures import Neighbourhood, Surfaces
from mlhpc.workloads.openfold import generate as openfold
from mlhpc.workloads.openfold.proteins import Families
from mlhpc.workloads.swinv2_moe import generate as swinv2_moe

SEED = 3


@dataclass(frozen=True)
class Tiny:
    """What the size ``smoke`` is made to mean: ``items`` of a split, of which each gives ``samples_each``.

    ``overrides`` fit the smoke config to it, given the attributes of its manifest.
    """

    settings: Any
    items: dict[str, int]
    per_shard: int
    samples_each: int = 1
    needs: str | None = None
    overrides: Callable[[Mapping[str, Any]], Sequence[str]] = lambda attributes: ()


TINY = {
    "cosmoflow": Tiny(
        cosmoflow.DataSize(Simulation(16, 8, 128.0, "2lpt"), 8, 12, 5, 4),
        {"train": 12, "validation": 5},
        4,
        overrides=lambda found: [
            "hyperparameters.input_size=8",
            f"hyperparameters.input_mean={found['log1p_mean']}",
            f"hyperparameters.input_std={found['log1p_std']}",
        ],
    ),
    "deepcam": Tiny(
        deepcam.DataSize(Domain(32, 48, 4, 52, 72, 1.2, 1.5, 1.5, 1.2, 1.5, 1.2), 12, 5, 4),
        {"train": 12, "validation": 5},
        4,
        overrides=lambda found: ["hyperparameters.height=32", "hyperparameters.width=48"],
    ),
    "open_catalyst": Tiny(
        open_catalyst.DataSize(
            Surfaces(("Cu", "Pt"), ("H", "CO"), ((2, 2, 2),), 1, steps=4), Neighbourhood(4.5, 20), 4, 2, 2
        ),
        {"train": 4, "validation": 2},
        2,
        samples_each=4,
        needs="ase",
    ),
    "openfold": Tiny(openfold.DataSize(Families(8, 12, 6, 2), 6, 4, 2), {"train": 6, "validation": 4}, 2),
    "swinv2_moe": Tiny(
        swinv2_moe.DataSize(16, 40, 20, 15),
        {"train": 40, "validation": 20},
        15,
        overrides=lambda found: [
            "hyperparameters.pixels=16",
            "hyperparameters.window=2",
            "hyperparameters.moe.backend=grouped_mm",  # the loop of a CPU asks how many rows an expert has: it waits
        ],
    ),
}


def generator(workload: str) -> Any:
    """The workload's module with ``generate`` and ``SIZES``. Skips the test if what it needs is not installed."""
    needs = TINY[workload].needs
    if needs is not None:
        pytest.importorskip(needs)
    return importlib.import_module(f"mlhpc.workloads.{workload}.generate")


def make(
    workload: str, root: Path, world: World, *, seed: int = SEED, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Generate the tiny data set of a workload, as its size ``smoke``."""
    with pytest.MonkeyPatch.context() as patch:
        module = generator(workload)
        patch.setitem(module.SIZES, "smoke", TINY[workload].settings)
        module.generate(root, "smoke", seed=seed, world=world, progress=progress)
    return root
