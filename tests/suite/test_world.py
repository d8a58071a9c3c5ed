"""Worlds: which launcher is believed, which node comes first, and what sums over ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlhpc.suite.errors import InputError
from mlhpc.suite.launcher import Launch
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.workload import set_mean_buffers
from mlhpc.suite.world import World
from tests.fixtures.warm import warm_python


def test_one_process_is_a_world_of_its_own() -> None:
    world = World.create(Launch("none", 0, 1))
    assert (world.size, world.nodes, world.local_size, world.is_first) == (1, 1, 1, True)
    assert world.sum({"a": 1.5, "b": 2.0}) == {"a": 1.5, "b": 2.0}
    assert world.summary(3.0) == {"min": 3.0, "median": 3.0, "max": 3.0}
    with pytest.raises(InputError, match="broken"):
        world.check_together(ValueError("broken"))


MEETING = """
import sys
import torch.distributed as dist
from mlhpc.suite.world import World
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
world = World.create()
print(world.rank, world.size, world.nodes, world.sum({"rank": world.rank + 1.0})["rank"])
"""


def test_a_group_that_met_at_a_file_on_one_node_is_a_world_and_needs_no_key(tmp_path: Path) -> None:
    words = [*warm_python(), "-c", MEETING, str(tmp_path / "meet")]
    ranks = [
        subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = [rank.communicate(timeout=300) for rank in ranks]
    assert [out for out, _ in found] == ["0 2 1 3.0\n", "1 2 1 3.0\n"], found


def test_running_statistics_become_means_over_ranks_and_counters_stay() -> None:
    torch = pytest.importorskip("torch")

    class Two(SingleProcessTransport):
        """The other rank has 3 wherever this one has 1."""

        size = 2

        def sum(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
            return values + 3.0

    model = torch.nn.BatchNorm1d(4)
    model.running_mean.fill_(1.0)
    model.num_batches_tracked.fill_(7)
    set_mean_buffers(model, World("test", 0, 2, 0, 1, 0, 2, ("here",), Two(), SingleProcessTransport()))
    assert model.running_mean.tolist() == model.running_var.tolist() == [2.0] * 4
    assert model.num_batches_tracked == 7
