"""Whose context is it: commands are ranks of a launcher, or a person's commands in a shell that a launcher started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlhpc.suite.commands.machine.doctor import check_launch
from mlhpc.suite.errors import InputError
from mlhpc.suite.launcher import (
    LAUNCHERS,
    Launch,
    describe_launcher,
    drop_launcher_variables,
    explain_unconnected,
    find_launch,
    find_world,
    list_interfaces,
    refuse_several_ranks,
)
from tests.fixtures.cli import mlhpc
from tests.fixtures.warm import warm_python

ALONE = [{rank: "0", size: "1"} for _, rank, size in LAUNCHERS]
ONE_OF_FOUR = [{rank: "2", size: "4"} for _, rank, size in LAUNCHERS]
RANKS = [
    ["run", "cosmoflow"],
    ["data", "generate", "cosmoflow"],
    ["data", "convert", "cosmoflow", "."],
    ["moe"],
    ["ceilings"],
    ["profile", "cosmoflow"],
]


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
    assert find_launch(environ) == launch


def variables(launcher: str, rank: int, size: int) -> dict[str, str]:
    """What a launcher sets of a rank."""
    by_name = {name: (rank_name, size_name) for name, rank_name, size_name in LAUNCHERS}
    more = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"} if launcher == "torchrun" else {}
    return dict(zip(by_name[launcher], (str(rank), str(size)), strict=True)) | more


NAMES = [name for name, _, _ in LAUNCHERS]


@pytest.mark.parametrize("real", NAMES)
@pytest.mark.parametrize("kept", NAMES)
def test_variables_of_one_rank_that_a_shell_kept_give_way_to_the_ranks_that_run(kept: str, real: str) -> None:
    """Without the marks of torchrun: a shell that exports RANK=0 WORLD_SIZE=1 by hand has none."""
    left = {name: value for name, value in variables(kept, 0, 1).items() if name != "TORCHELASTIC_RUN_ID"}
    environ = left | variables(real, 2, 4)
    assert find_launch(environ) == find_world(None, environ) == Launch(real, 2, 4)
    assert describe_launcher(environ).startswith(f"{real} started this process as rank 2 of 4 ranks")
    if kept != real:
        assert f"not counted: {next(iter(left))}=0)" in describe_launcher(environ)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (variables("torchrun", 5, 8), variables("slurm", 1, 2)),  # an agent per node
        (variables("torchrun", 5, 8), variables("pmi", 1, 2)),
        (variables("torchrun", 5, 8), variables("openmpi", 1, 2)),
        (variables("torchrun", 0, 1), variables("slurm", 1, 2)),  # torchrun --standalone in each of two tasks
        (variables("pmi", 5, 8), variables("slurm", 1, 2)),  # mpiexec starts a proxy per node through srun
        (variables("openmpi", 5, 8), variables("slurm", 1, 2)),
        (variables("pmi", 1, 4), variables("slurm", 1, 4)),  # srun --mpi=pmi2
        ({"RANK": "1", "WORLD_SIZE": "4"}, variables("slurm", 1, 4)),  # set in the job script from Slurm's
    ],
)
def test_a_launcher_inside_another_counts(inner: dict[str, str], outer: dict[str, str]) -> None:
    assert find_launch(inner | outer) == find_launch(inner)


def test_an_mpiexec_of_one_rank_whose_socket_is_open_counts_inside_a_step_of_several() -> None:
    step = variables("slurm", 0, 4)
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null") as null:  # noqa: PTH123
        live = variables("pmi", 0, 1) | {"PMI_FD": str(ours.fileno())}
        assert find_launch(live | step) == Launch("pmi", 0, 1)
        for number in (str(null.fileno()), "9999", "x", "-1", "9" * 30):
            assert find_launch(live | step | {"PMI_FD": number}) == Launch("slurm", 0, 4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, variables("pmi", 0, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, variables("slurm", 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "4"}, variables("openmpi", 1, 2)),
        (variables("openmpi", 0, 4), variables("pmi", 0, 2)),
    ],
)
def test_launchers_of_several_ranks_that_contradict_each_other_are_refused(
    first: dict[str, str], second: dict[str, str]
) -> None:
    with pytest.raises(InputError, match="contradict each other") as refused:
        find_launch(first | second)
    for environ in (first, second):
        assert all(f"{name}={value}" in str(refused.value) for name, value in environ.items())
        assert f"env -u {next(iter(environ))}" in str(refused.value)
    [check] = check_launch(first | second)
    assert not check.ok


KEPT = {
    "WORLD_SIZE": {"WORLD_SIZE": "1"},
    "RANK and WORLD_SIZE": {"RANK": "0", "WORLD_SIZE": "1"},
    "all of torch": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    "Open MPI": variables("openmpi", 0, 1),
    "an interactive step": variables("slurm", 0, 1),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_mpiexec_makes_one_world_of_two_whatever_the_shell_kept(kept: dict[str, str]) -> None:
    program = "from mlhpc.suite.world import World; w = World.create(); print(f'{w.launcher} {w.size}\\n', end='', flush=True)"
    words = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", *warm_python(), "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | kept, check=True)
    assert done.stdout.split() == ["pmi", "2", "pmi", "2"]


def test_a_step_of_two_ranks_is_one_world_where_the_shell_kept_an_mpiexec_of_one() -> None:
    """The library would look for that mpiexec, and end the process."""
    program = "from mlhpc.suite.world import World; w = World.create(); print(w.launcher, w.size)"
    kept = variables("pmi", 0, 1) | {"PMI_FD": "99"}
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    ranks = [
        subprocess.Popen(
            [*warm_python(), "-c", program],
            stdout=subprocess.PIPE,
            env=os.environ | kept | step | variables("slurm", rank, 2),
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=300)[0] for rank in ranks] == ["slurm 2\n"] * 2


@pytest.mark.parametrize("environ", [{"PMI_RANK": "x", "PMI_SIZE": "2"}, {"PMI_RANK": "2", "PMI_SIZE": "2"}])
def test_impossible_ranks_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(InputError, match="PMI_RANK"):
        find_launch(environ)


@pytest.mark.parametrize("environ", ALONE)
def test_a_world_of_one_starts_the_ranks_that_are_asked_for(environ: dict[str, str]) -> None:
    assert find_world(2, environ) is None
    for ranks in (1, None):
        assert find_world(ranks, environ) == find_launch(environ) is not None
    refuse_several_ranks("each would do it", environ)
    [check] = check_launch(environ)
    assert check.ok
    assert all(f"{name}={value}" in check.found for name, value in environ.items())
    assert "--ranks N starts N ranks here" in check.found


@pytest.mark.parametrize("environ", ONE_OF_FOUR)
def test_several_ranks_of_a_launcher_are_used_and_no_others_are_started(environ: dict[str, str]) -> None:
    for ranks in (None, 1, 4):
        assert find_world(ranks, environ) == find_launch(environ)
    rank = next(iter(environ))
    for refusing in (lambda: find_world(2, environ), lambda: refuse_several_ranks("each would do it", environ)):
        with pytest.raises(InputError) as refused:
            refusing()
        assert all(f"{name}={value}" in str(refused.value) for name, value in environ.items())
        assert f"env -u {rank} mlhpc" in str(refused.value)
    assert "rank 2 of 4 ranks" in check_launch(environ)[0].found


def test_a_shell_is_no_launcher() -> None:
    assert find_world(8, {"SLURM_JOB_ID": "7"}) is None
    assert describe_launcher({}) == check_launch({})[0].found == "no launcher: a command in a shell"


def test_variables_that_cannot_be_are_shown_with_the_way_out() -> None:
    environ = {"RANK": "4", "WORLD_SIZE": "x", "PMI_RANK": "0", "PMI_SIZE": "1"}
    with pytest.raises(InputError, match=r"RANK='4' and WORLD_SIZE='x'.*env -u RANK -u PMI_RANK mlhpc"):
        find_launch(environ)
    [check] = check_launch(environ)
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
    assert drop_launcher_variables(of_launchers | own) == own


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
        [*warm_python(), "-P", "-m", "mlhpc", *words, "--format", "json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}, "flux"),
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "8", "PMI_RANK": "3", "PMI_SIZE": "8"}, "pmi"),
        ({"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "3", "PMI_SIZE": "8"}, "pmi"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "JSM_NAMESPACE_RANK": "3"}, "openmpi"),  # jsrun
        ({"PMIX_RANK": "3", "PJM_MPI_PROC": "8", "PLE_RANK_ON_NODE": "1"}, "pjm"),
    ],
)
def test_a_rank_of_each_schedulers_launcher_is_known(variables: dict[str, str], launcher: str) -> None:
    assert find_launch(variables) == Launch(launcher, 3, 8)
    assert drop_launcher_variables(variables) == {}


SAID = {  # what a library says, and the variables that choose how it connects
    "Unable to find address for: {0}; gloo/transport/tcp/device.cc:84": ("GLOO_SOCKET_IFNAME",),
    "[mpiexec@vm] APPLICATION TIMED OUT, TIMEOUT = 3s": ("MPIEXEC_TIMEOUT",),
    "MPIDI_OFI_find_provider(84): OFI call getinfo failed": ("FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD"),
    "sys.c:1545 UCX  ERROR no usable transport": ("UCX_TLS",),
    "NCCL error: unhandled system error": ("NCCL_NET",),
    "EXIT STRING: Segmentation fault (signal 11)": ("TORCH_DISTRIBUTED_DEBUG",),
    "PML ucx cannot be selected; Open MPI": ("OMPI_MCA_pml",),
    "Fatal error in internal_Init: Other MPI error; MPIDI_init": ("MPIR_CVAR_CH4_NETMOD",),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("own", [True, False])
def test_ranks_that_cannot_be_connected_are_answered_with_the_variable_that_is_set(said: str, own: bool) -> None:
    """No other variable is named, and the launcher's own never while one is set that chooses the network."""
    other = {"HOME": "/h", "UCX_NET_DEVICES": "lo", "PMI_RANK": "0", "PMI_SIZE": "2"}
    launched = {"MLHPC_LAUNCH": "token"} if own else {}
    named = dict.fromkeys(SAID[said], "strange")
    way = explain_unconnected(said, named | launched | other)
    assert way.endswith(f": env {' '.join(f'-u {name}' for name in sorted(named))} mlhpc …")
    assert way.startswith(", ".join(f"{name}=strange" for name in sorted(named)))
    assert "PMI_RANK" not in way
    left = explain_unconnected("some other words", other | launched)
    assert ("env -u PMI_RANK" in left) != own, "variables of the mpiexec of this suite are not left over"


@pytest.mark.parametrize(
    "name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "MPIR_CVAR_OFI_IFACE", "MLHPC_INTERFACE"]
)
def test_an_interface_that_this_machine_lacks_is_named_and_one_that_it_has_is_not(name: str) -> None:
    here = sorted(list_interfaces())
    assert here
    for value in ("hsn0", "mlx5_0:1", "hsn0,hsn1"):
        way = explain_unconnected("timed out", {name: value, "PMI_RANK": "0", "PMI_SIZE": "2"})
        assert way.startswith(
            f"{name}={value}: no interface of this machine has that name ({', '.join(here)}); without it: "
        )
        assert way.endswith(f"env -u {name} mlhpc …")
    for value in (here[0], f"hsn0,{here[-1]}", "^docker0", "all", "10.0.0.0/8", f"={here[0]}", ""):
        assert name not in explain_unconnected("timed out", {name: value, "PMI_RANK": "0", "PMI_SIZE": "2"})
