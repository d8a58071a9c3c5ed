"""`mlhpc doctor`: what two ranks print tells which MPI is wrong; what is missing comes with the line that fixes it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from suite.commands import doctor
from suite.commands.doctor import Answer, Check, can_run, judge_mpi, lines, parse_mpi_types


def test_two_ranks_of_one_world_are_the_same_mpi() -> None:
    check = judge_mpi("mpiexec", Answer(0, "RANKS 2 MPICH Version: 5.0.2\n"))
    assert (check.ok, check.found) == (True, "mpiexec: 2 ranks, MPICH Version: 5.0.2")


def test_two_worlds_of_one_are_two_mpis() -> None:
    check = judge_mpi("/usr/bin/mpiexec", Answer(0, "RANKS 1 MPICH Version: 5.0.2\nRANKS 1 MPICH Version: 5.0.2\n"))
    assert not check.ok
    assert "do not see each other: mpi4py belongs to MPICH Version: 5.0.2" in check.found
    assert check.fix.endswith("-m pip install --force-reinstall mpich mpi4py")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(1, "Traceback\nModuleNotFoundError: No module named 'mpi4py'\n"), "No module named 'mpi4py'"),
        (Answer(124, "no answer in 60 s"), "no answer in 60 s"),
        (Answer(5, ""), "exit code 5"),
    ],
)
def test_a_failed_try_says_its_last_line(answer: Answer, found: str) -> None:
    check = judge_mpi("mpiexec", answer)
    assert not check.ok
    assert check.found.endswith(found)


@pytest.mark.parametrize(
    "text",
    [
        "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n",
        "srun: MPI types are...\nsrun: pmix\nsrun: none\nsrun: pmi2\n",
    ],
)
def test_mpi_types_are_read_from_old_and_new_slurm(text: str) -> None:
    assert parse_mpi_types(text) == ["pmix", "pmi2"]


def test_the_screen_shows_the_fix_of_what_is_missing() -> None:
    checks = [
        Check("torch", False, "not installed", "local", "pip install torch"),
        Check("commands", True, "sbatch", "slurm", "apt-get install slurm-wlm"),
    ]
    text = "\n".join(lines(checks))
    assert "Local runs: something is missing\n  MISSING  torch" in text
    assert "fix: pip install torch" in text
    assert "Slurm runs: ready" in text
    assert "apt-get" not in text
    assert not can_run(checks, "local")
    assert can_run(checks, "slurm")


def test_a_folder_that_cannot_be_written_or_is_full_is_missing(tmp_path: Path) -> None:
    assert doctor._space("here", tmp_path, 1, "fix").ok
    assert not doctor._space("here", tmp_path, 1 << 62, "fix").ok
    assert not doctor._space("here", tmp_path / "absent", 1, "fix").ok


def test_the_command_names_every_part_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "suite", "doctor", "--json"], capture_output=True, text=True, timeout=120
    )
    checks = {item["name"]: item for item in json.loads(done.stdout)}
    assert {"python", "torch", "mpi4py", "mpiexec", "cores", "memory", "/dev/shm", "quota", "commands"} <= set(checks)
    assert all(item["fix"] for item in checks.values() if not item["ok"])
    missing = [item for item in checks.values() if item["purpose"] == "local" and not item["ok"]]
    assert done.returncode == (1 if missing else 0)
