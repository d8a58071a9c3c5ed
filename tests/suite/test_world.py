"""Worlds: which launcher is believed, which node comes first, and what sums over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from suite.errors import InputError
from suite.transport import Alone
from suite.workload import average_buffers
from suite.world import Launch, World, detect


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the batch script itself, not a step
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, Launch("slurm", 3, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Launch("pmi", 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}, Launch("openmpi", 0, 8)),
        ({"RANK": "5", "WORLD_SIZE": "6", "PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("torchrun", 5, 6)),
        ({"RANK": "5"}, None),
    ],
)
def test_the_innermost_launcher_is_believed(environ: dict[str, str], launch: Launch | None) -> None:
    assert detect(environ) == launch


@pytest.mark.parametrize("environ", [{"PMI_RANK": "x", "PMI_SIZE": "2"}, {"PMI_RANK": "2", "PMI_SIZE": "2"}])
def test_impossible_ranks_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(InputError, match="PMI_RANK"):
        detect(environ)


def test_one_process_is_a_world_of_its_own() -> None:
    world = World.create(Launch("none", 0, 1))
    assert (world.size, world.nodes, world.local_size, world.is_first) == (1, 1, 1, True)
    assert world.sum({"a": 1.5, "b": 2.0}) == {"a": 1.5, "b": 2.0}
    assert world.summary(3.0) == {"min": 3.0, "median": 3.0, "max": 3.0}
    with pytest.raises(InputError, match="broken"):
        world.check_together(ValueError("broken"))


def test_running_statistics_become_means_over_ranks_and_counters_stay() -> None:
    torch = pytest.importorskip("torch")

    class Two(Alone):
        """The other rank has 3 wherever this one has 1."""

        size = 2

        def sum(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
            return values + 3.0

    model = torch.nn.BatchNorm1d(4)
    model.running_mean.fill_(1.0)
    model.num_batches_tracked.fill_(7)
    average_buffers(model, World("test", 0, 2, 0, 1, 0, 2, ("here",), Two(), Alone()))
    assert model.running_mean.tolist() == model.running_var.tolist() == [2.0] * 4
    assert model.num_batches_tracked == 7
