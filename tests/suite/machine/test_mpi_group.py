"""Torch's collectives by MPI: each equal to gloo's, and offered only where MPI connects all ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlhpc.suite.launch.local import make_mpiexec_command
from mlhpc.suite.machine.choice.collectives import GLOO, MPI, _decide
from mlhpc.suite.machine.choice.mpi_group import find_mpi_communicator
from mlhpc.suite.world import World
from tests.fixtures.warm import warm_python

WORKER = Path(__file__).parent / "mpi_group_worker.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_what_gloos_gives(tmp_path: Path, ranks: int) -> None:
    command = [*make_mpiexec_command(ranks), *warm_python(), str(WORKER), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    checked = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(ranks)]
    assert all(count > 150 for count in checked)  # those of a group are in it together


def pretended(size: int, threads: int) -> Any:
    return SimpleNamespace(
        Query_thread=lambda: threads, THREAD_MULTIPLE=3, COMM_WORLD=SimpleNamespace(Get_size=lambda: size)
    )


@pytest.mark.parametrize(
    ("ranks", "mpi", "there"),
    [
        (2, pretended(2, 3), True),
        (2, pretended(2, 1), False),  # only one thread may call it
        (2, pretended(1, 3), False),  # of another launcher: it sees a world of one
        (1, pretended(1, 3), False),
        (2, None, False),  # torchrun
    ],
)
def test_mpi_is_offered_where_it_connects_all_ranks(
    ranks: int, mpi: Any, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace() if mpi is None else SimpleNamespace(MPI=mpi))
    assert (find_mpi_communicator(cast("World", SimpleNamespace(size=ranks))) is not None) is there


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({GLOO: 1e-3, MPI: 1e-4}, MPI),
        ({GLOO: 1e-3, MPI: 5e-4}, MPI),
        ({GLOO: 1e-3, MPI: 6e-4}, GLOO),  # gloo's may hide behind the backward pass
        ({GLOO: 1e-3, MPI: 2e-3}, GLOO),
        ({MPI: 1e-3}, MPI),
        ({GLOO: 1e-3}, GLOO),
    ],
)
def test_mpi_has_to_be_twice_as_fast(seconds: dict[str, float], chosen: str) -> None:
    assert _decide(seconds) == chosen
