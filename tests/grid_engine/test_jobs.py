"""Real jobs on a real Grid Engine: an array, a requeue of one element, a time limit, qdel, a node that fails, odd names."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlhpc.suite.commands.status import read_folder_status
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.hosts import write_hosts
from tests.grid_engine.conftest import SUBMIT, GridEngine, running_grid_engine
from tests.slurm.test_jobs import NEVER_CONVERGES, ranks_of, record, wait_for_text

pytestmark = [pytest.mark.grid_engine, pytest.mark.timeout(1500)]
NO_END = [word for each in NEVER_CONVERGES.split() for word in ("--set", each)]
ONE_EPOCH = [word.replace("=400", "=1") for word in NO_END]


def submit(engine: GridEngine, data: Path, run: Path, *options: str) -> str:
    """Submit CosmoFlow smoke; the job's id."""
    words = [*SUBMIT, *options, "-o", str(run)]
    engine.call(sys.executable, "-P", "-m", "mlhpc", *words, cwd=run.parent, MLHPC_DATA=str(data))
    job = json.loads((run / "job.json").read_text())
    assert (job["kind"], job["command"]) == ("grid_engine", "qsub")
    return str(job["job_ids"][0])


def states(engine: GridEngine, run: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    for name, value in engine.environment.items():
        monkeypatch.setenv(name, value)
    return [(row.state, row.job_state) for row in read_folder_status(RunFolder(run), now_s=time.time())]


@pytest.mark.long
def test_an_array_runs_in_a_folder_of_any_name_and_its_state_is_known(
    grid_engine: GridEngine, smoke_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a $1:b,c %j 'x' \"y\" #z"  # the name of a variable is refused
    job = submit(grid_engine, smoke_data, run, "--runs", "2", "--array", "--ranks-per-node", "1", *ONE_EPOCH)
    assert states(grid_engine, run, monkeypatch)[1] == ("queued", "PENDING")
    grid_engine.wait_until_gone(job)
    assert {path.name: path.read_text() for path in (run / "exit").iterdir()} == dict.fromkeys(
        (f"{job}_0", f"{job}_1", "trial_0", "trial_1"), "1\n"
    )
    assert [record(run / f"result_{trial}.txt").status for trial in range(2)] == ["aborted"] * 2
    assert states(grid_engine, run, monkeypatch) == [("aborted", "exit 1")] * 2
    assert not json.loads((run / "run.json").read_text())["same_allocation"]


@pytest.mark.long
def test_before_its_limit_an_element_saves_and_is_requeued_alone(
    grid_engine: GridEngine, smoke_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    job = submit(grid_engine, smoke_data, run, "--runs", "2", "--array", "--time-limit", "1:40", *NO_END)
    wait_for_text(run / "output" / f"job_{job}_0.log", "stopped with a checkpoint: requeued")
    assert (run / "exit" / "trial_0").read_text() == "3\n"
    assert record(run / "result_0.txt").status == "aborted"
    wait_for_text(run / "output" / f"job_{job}_0.log", r"(?s)requeued.*job \d+ on ")
    found = states(grid_engine, run, monkeypatch)
    assert [state for state, _ in found][1:] == ["queued"]  # its turn has not come
    wait_for_text(run / "resumed_0_1.txt", "epoch_start")
    assert not (run / "result_1.txt").exists()
    grid_engine.call("qdel", job)
    grid_engine.wait_until_gone(job)
    assert record(run / "resumed_0_1.txt").resumed


@pytest.mark.long
def test_qdel_leaves_a_log_that_parses_and_no_process(
    grid_engine: GridEngine, smoke_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    job = submit(grid_engine, smoke_data, run, *NO_END)
    wait_for_text(run / "result_0.txt", "epoch_start")
    assert len(ranks_of(run)) >= 2
    assert states(grid_engine, run, monkeypatch) == [("running", "RUNNING")]
    grid_engine.call("qdel", job)
    grid_engine.wait_until_gone(job)
    deadline = time.monotonic() + 60
    while ranks_of(run):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert record(run / "result_0.txt").status != "success"
    assert states(grid_engine, run, monkeypatch)[0][0] in {"aborted", "killed"}


@pytest.mark.long
def test_a_job_whose_node_failed_begins_again_and_goes_on(
    grid_engine: GridEngine, smoke_data: Path, tmp_path: Path
) -> None:
    """Every process of the job dies at once: the shepherd, the script, mpiexec and the ranks."""
    run = tmp_path / "run"
    job = submit(grid_engine, smoke_data, run, "--seed", "1", "--set", "checkpoint.interval_s=3", *NO_END)
    wait_for_text(run / "result_0.txt", r"epoch_stop(?s:.*)checkpoint_saved", timeout_s=400)
    for pid in (*shepherds(job), *ranks_of(run)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for_text(run / "resumed_0_1.txt", "epoch_start", timeout_s=400)
    grid_engine.call("qdel", job)
    grid_engine.wait_until_gone(job)
    killed, resumed = record(run / "result_0.txt"), record(run / "resumed_0_1.txt")
    assert killed.status != "success"
    assert (resumed.resumed, resumed.seed) == (True, 1)
    assert not (run / "exit" / "trial_0").exists() or (run / "exit" / "trial_0").read_text() != "0\n"


@pytest.mark.long
def test_two_nodes_train_under_one_mpiexec(
    two_hosts: tuple[list[str], list[str]], smoke_data: Path, tmp_path: Path
) -> None:
    """Two execds with their own host names and addresses; mpiexec starts the second node's rank by qrsh -inherit."""
    names = ("nodea", "nodeb")
    for command in two_hosts:
        write_hosts(command, "10.77.0.1 nodea\n10.77.0.2 nodeb\n")
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    commands = {name: [*command, *named, name] for name, command in zip(names, two_hosts, strict=True)}
    with running_grid_engine(commands) as engine:
        run = tmp_path / "run"
        job = submit(engine, smoke_data, run, "--nodes", "2", "--ranks-per-node", "1", *ONE_EPOCH)
        engine.wait_until_gone(job)
    found = record(run / "result_0.txt")
    assert (found.nodes, found.ranks, found.status) == (2, 2, "aborted"), (
        run / "output" / f"job_{job}.log"
    ).read_text()
    assert {path.stem for path in (run / "facts").iterdir()} == set(names)


def shepherds(job: str) -> list[int]:
    """The shepherd of a job, its script, and what that started."""
    parents, found = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if f"/job_scripts/{job}" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    (script,) = found
    found.insert(0, parents[script])
    for pid in found[1:]:
        found += [child for child, parent in parents.items() if parent == pid]
    return found
