"""Whose context is it: commands are ranks of a launcher, or a person's commands in a shell that a launcher started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from suite.commands.machine.doctor import launch_checks
from suite.errors import InputError
from suite.launcher import LAUNCHERS, Launch, detect, explain, find_world, refuse_several, without_launchers
from tests.fixtures.cli import mlhpc

ALONE = [{rank: "0", size: "1"} for _, rank, size in LAUNCHERS]
ONE_OF_FOUR = [{rank: "2", size: "4"} for _, rank, size in LAUNCHERS]
RANKS = [
    ["run", "cosmoflow"],
    ["data", "generate", "cosmoflow"],
    ["data", "convert", "cosmoflow", "."],
    ["moe"],
    ["ceilings"],
]
RANKS += [["ab", "steps", "cosmoflow", "--b", "sharded"], ["profile", "cosmoflow"]]


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


@pytest.mark.parametrize("environ", ALONE)
def test_a_world_of_one_starts_the_ranks_that_are_asked_for(environ: dict[str, str]) -> None:
    assert find_world(2, environ) is None
    for ranks in (1, None):
        assert find_world(ranks, environ) == detect(environ) is not None
    refuse_several("each would do it", environ)
    [check] = launch_checks(environ)
    assert check.ok
    assert all(f"{name}={value}" in check.found for name, value in environ.items())
    assert "--ranks N starts N ranks here" in check.found


@pytest.mark.parametrize("environ", ONE_OF_FOUR)
def test_several_ranks_of_a_launcher_are_used_and_no_others_are_started(environ: dict[str, str]) -> None:
    for ranks in (None, 1, 4):
        assert find_world(ranks, environ) == detect(environ)
    rank = next(iter(environ))
    for refusing in (lambda: find_world(2, environ), lambda: refuse_several("each would do it", environ)):
        with pytest.raises(InputError) as refused:
            refusing()
        assert all(f"{name}={value}" in str(refused.value) for name, value in environ.items())
        assert f"env -u {rank} mlhpc" in str(refused.value)
    assert "rank 2 of 4 ranks" in launch_checks(environ)[0].found


def test_a_shell_is_no_launcher() -> None:
    assert find_world(8, {"SLURM_JOB_ID": "7"}) is None
    assert explain({}) == launch_checks({})[0].found == "no launcher: a command in a shell"


def test_variables_that_cannot_be_are_shown_with_the_way_out() -> None:
    environ = {"RANK": "4", "WORLD_SIZE": "x", "PMI_RANK": "0", "PMI_SIZE": "1"}
    with pytest.raises(InputError, match=r"RANK='4' and WORLD_SIZE='x'.*env -u RANK -u PMI_RANK mlhpc"):
        detect(environ)
    [check] = launch_checks(environ)
    assert (check.ok, check.fix) == (False, "in a shell of your own: env -u RANK -u PMI_RANK mlhpc …")


def test_the_ranks_of_a_command_know_nothing_of_the_launcher_around_it() -> None:
    of_launchers = {
        **{name: "1" for _, rank, size in LAUNCHERS for name in (rank, size)},
        **dict.fromkeys(("SLURM_JOB_ID", "PMI_FD", "PMIX_RANK", "OMPI_MCA_orte_hnp_uri", "OMPI_UNIVERSE_SIZE"), "1"),
        **dict.fromkeys(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"), "1"),
        **dict.fromkeys(("TORCHELASTIC_RUN_ID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PBS_NODEFILE"), "1"),
    }
    own = dict.fromkeys(
        ("PATH", "SLURMD_NODENAME", "OMPI_MCA_btl", "MPICH_OFI", "HYDRA_IFACE", "MLHPC_DATA", "RANKS"), "1"
    )
    assert without_launchers(of_launchers | own) == own


@pytest.mark.parametrize("words", RANKS, ids=lambda words: " ".join(words[:2]))
def test_every_command_refuses_other_ranks_than_a_launcher_started(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    refused = mlhpc(*words, "--ranks", "2")
    assert refused.returncode == 2, refused.stderr
    assert "PMI_RANK=0 PMI_SIZE=3" in refused.stderr
    assert "env -u PMI_RANK mlhpc" in refused.stderr


@pytest.mark.parametrize("environ", ALONE, ids=lambda environ: next(iter(environ)))
def test_two_ranks_start_in_a_world_of_one(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = [
        "moe",
        "--ranks",
        "2",
        "--tokens",
        "8",
        "--width",
        "8",
        "--hidden",
        "8",
        "--experts",
        "2",
        "--repeats",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "suite", *words, "--format", "json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
