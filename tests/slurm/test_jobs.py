"""Real jobs on a real two-node Slurm: the shipped scripts, throughput mode, a time limit, scancel, `mlhpc submit`."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from mlhpc.suite.commands.status import read_folder_status
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.foreign import foreign_folders

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "submissions" / "slurm"
NEVER_CONVERGES = "hyperparameters.base_learning_rate=1e-9 max_epochs=400 window_steps=20"

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]


class Cluster(Protocol):
    """What tests/slurm/conftest.py yields."""

    environment: dict[str, str]

    def call(self, *command: str, cwd: Path = ..., **variables: str) -> str: ...
    def sbatch(self, script: Path, *options: str, exports: dict[str, str], cwd: Path = ...) -> str: ...
    def state(self, job: str) -> str: ...
    def wait(self, job: str, *, timeout_s: float = ...) -> str: ...


def settings(smoke_data: Path, run: Path, **more: str) -> dict[str, str]:
    fixed = {
        "MLHPC_PYTHON": sys.executable,
        "MLHPC_SIZE": "smoke",
        "MLHPC_DATA": str(smoke_data),
        "MLHPC_RUN": str(run),
    }
    return fixed | more


def mlhpc(*arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "mlhpc", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def record(path: Path) -> RunRecord:
    """The record of a log without a single damaged line."""
    log = read_events(path)
    assert log.problems == ()
    return summarise_log(log)


def explain(folder: Path) -> str:
    """Everything the job and its ranks printed, for a failed assertion."""
    return "\n".join(
        f"== {path}\n{path.read_text()}" for path in [*folder.rglob("*.out"), *folder.glob("*/output/*.log")]
    )


def wait_for_text(path: Path, pattern: str, *, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and re.search(pattern, path.read_text()):
            return
        time.sleep(0.2)
    raise AssertionError(f"{path} has no {pattern!r} after {timeout_s} s: {path.read_text() if path.exists() else ''}")


def ranks_of(run: Path) -> list[int]:
    """Living processes whose command line names the run folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(run) in arguments and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def test_the_shipped_script_gives_a_package_that_is_checked_and_reported(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    exports = settings(
        smoke_data,
        run,
        MLHPC_RUNS="1",
        MLHPC_SEED="3",
        MLHPC_STAGING_DIRECTORY=f"{tmp_path}/stage/{{node}}",
        MLHPC_CACHE_DROP_COMMAND="exit 7",
    )
    cwd = foreign_folders(tmp_path / "cwd")  # the worker starts there and must not import what it finds
    job = cluster.sbatch(SCRIPTS / "cosmoflow-mini.sbatch", exports=exports, cwd=cwd)
    state = cluster.wait(job)
    assert state == "COMPLETED", explain(tmp_path)
    assert (run / "exit" / job).read_text() == "0\n"
    one = record(run / "result_0.txt")
    assert (one.status, one.nodes, one.ranks, one.seed) == ("success", 2, 2, 3)
    assert one.cache_state == "unverified"  # the command failed, and nobody claims otherwise
    assert one.staging_stats is not None
    assert one.staging_stats["nodes"] == 2
    assert sorted(path.stem for path in (run / "facts").iterdir()) == ["node1", "node2"]
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == ["node1", "node2"]
    assert [row.state for row in read_folder_status(RunFolder(run), now_s=time.time())] == ["finished"]
    mlhpc(
        *("package", str(run), "--system", "slurm-two-node", "--submitter", "ACME"),
        *("-o", str(tmp_path / "packages" / "ACME")),
        cwd=ROOT,
    )
    checked = mlhpc("check", str(tmp_path / "packages" / "ACME"), "--format", "json", cwd=ROOT, check=False)
    assert checked.returncode in {0, 1}  # one run is fewer than the size requires, and the checker says so
    mlhpc("report", str(tmp_path / "packages" / "ACME"), "-o", str(tmp_path / "report"), cwd=ROOT)
    assert "slurm-two-node" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.long
def test_throughput_mode_runs_its_instances_at_once_on_nodes_of_their_own(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    exports = settings(smoke_data, run, MLHPC_SET="max_epochs=2")
    job = cluster.sbatch(SCRIPTS / "cosmoflow-mini-throughput.sbatch", exports=exports, cwd=tmp_path)
    cluster.wait(job)
    first, second = (record(run / f"result_{instance}.txt") for instance in range(2))
    assert {first.mode, second.mode} == {"weak"}, explain(tmp_path)
    assert (first.nodes, first.ranks) == (second.nodes, second.ranks) == (1, 1)
    assert first.seed != second.seed
    assert first.run_start_s is not None
    assert second.run_start_s is not None
    assert first.run_stop_s is not None
    assert second.run_stop_s is not None
    assert max(first.run_start_s, second.run_start_s) < min(first.run_stop_s, second.run_stop_s)
    assert sorted(path.stem for path in (run / "facts").iterdir()) == ["node1", "node2"]
    assert json.loads((run / "run.json").read_text())["mode"] == "weak"


@pytest.mark.long
def test_sigterm_leaves_a_checkpoint_from_which_the_job_continues_and_goes_on(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    """The signal is that of `--signal=TERM`, sent by scancel: Slurm looks at time limits only every 30 s."""

    def stop(job: str) -> None:
        cluster.call("scancel", "--signal=TERM", job)

    check_continued(cluster, smoke_data, tmp_path, (), stop)


@pytest.mark.long
def test_a_time_limit_leaves_a_checkpoint_from_which_the_job_continues(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    """The signal comes 40 to 70 s after the start."""
    check_continued(cluster, smoke_data, tmp_path, ("--time=2", "--signal=TERM@50"), lambda job: None)


def check_continued(
    cluster: Cluster, smoke_data: Path, folder: Path, options: tuple[str, ...], stop: Callable[[str], None]
) -> None:
    """Submit a job that is stopped in its first trial, and submit it again: that trial resumes, the second one follows."""
    run = folder / "run"
    script = SCRIPTS / "cosmoflow-mini.sbatch"
    exports = settings(smoke_data, run, MLHPC_RUNS="2", MLHPC_SEED="1", MLHPC_SET=NEVER_CONVERGES)
    job = cluster.sbatch(script, *options, exports=exports, cwd=folder)
    wait_for_text(run / "result_0.txt", "epoch_start")  # a signal before that leaves nothing to resume
    stop(job)
    cluster.wait(job, timeout_s=300)
    wait_for_text(run / "exit" / job, "\n")  # the script's trap may end a moment after Slurm calls the job ended
    assert (run / "exit" / job).read_text() == "3\n", explain(folder)
    assert (run / "checkpoint" / "trial_0.pt").exists()
    stopped = record(run / "result_0.txt")
    assert stopped.status == "aborted"
    between = (
        "before step 0" in (run / "result_0.txt").read_text()
    )  # stopped after an evaluation: it goes on in the next epoch
    last_epoch = len(stopped.epochs) + between
    row = read_folder_status(RunFolder(run), now_s=time.time())[0]
    assert (row.state, row.note) == ("aborted", "can be resumed")
    again = exports | {"MLHPC_SET": NEVER_CONVERGES.replace("max_epochs=400", f"max_epochs={last_epoch}")}
    second = cluster.sbatch(script, exports=again, cwd=folder)
    cluster.wait(second, timeout_s=300)
    resumed = record(run / "resumed_0_1.txt")
    assert resumed.resumed, explain(folder)
    assert resumed.seed == stopped.seed == 1
    assert [epoch.number for epoch in resumed.epochs] == [float(last_epoch)]
    following = record(run / "result_1.txt")
    assert (following.seed, following.status, len(following.epochs)) == (2, "aborted", last_epoch)
    assert (run / "exit" / second).read_text() == "1\n"  # ended by max_epochs: no target, no success claimed


@pytest.mark.long
def test_a_job_submitted_again_runs_what_never_began_and_never_ends_0_while_a_run_is_missing(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "result_0.txt").write_text(':::MLLOG {"key": "init_start", "time_ms": 1}\n')  # killed in its initialisation
    exports = settings(smoke_data, run, MLHPC_RUNS="1", MLHPC_SET=NEVER_CONVERGES.replace("=400", "=1"))
    for attempt in ("started afresh", "left as it is"):
        job = cluster.sbatch(SCRIPTS / "cosmoflow-mini.sbatch", exports=exports, cwd=tmp_path)
        assert cluster.wait(job) == "FAILED", (attempt, explain(tmp_path))
        assert (run / "exit" / job).read_text() == (run / "exit" / "trial_0").read_text() == "1\n"
    assert sorted(path.name for path in run.glob("*_0*.txt")) == ["failed_0_1.txt", "result_0.txt"]
    assert record(run / "result_0.txt").status == "aborted"
    assert "earlier log kept as failed_0_1.txt" in (run / "output" / "trial_0.log").read_text()
    assert "began and failed (result_0.txt ended with status aborted)" in (run / "output" / "trial_0.log").read_text()


@pytest.mark.long
def test_data_that_the_ranks_refuse_end_the_job_with_2_after_one_trial(cluster: Cluster, tmp_path: Path) -> None:
    """With the script as a dry run prints it: nothing but the script is there before the job."""
    system = ROOT / "submissions" / "systems" / "slurm-two-node.yaml"
    words = ("--system", str(system), "--size", "smoke", "--nodes", "2", "--runs", "3", "--dry-run")
    printed = tmp_path / "printed.sbatch"
    printed.write_text(mlhpc("submit", "cosmoflow", *words, cwd=tmp_path).stdout)
    exports = {"MLHPC_PYTHON": sys.executable, "MLHPC_DATA": str(tmp_path / "nothing")}
    job = cluster.sbatch(printed, "--ntasks-per-node=1", exports=exports, cwd=tmp_path)
    assert cluster.wait(job) == "FAILED", explain(tmp_path)
    run = tmp_path / "runs" / f"cosmoflow-smoke-{job}"
    assert f"MLHPC_RUN=runs/cosmoflow-smoke-{job}" in (tmp_path / f"cosmoflow-smoke-{job}.out").read_text()
    assert sorted(path.name for path in (run / "exit").glob("trial_*")) == ["trial_0"]
    assert (run / "exit" / "trial_0").read_text() == (run / "exit" / job).read_text() == "2\n", explain(tmp_path)
    assert "nothing" in (run / "output" / "trial_0.log").read_text()


def test_scancel_leaves_a_log_that_parses_and_no_process(cluster: Cluster, smoke_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    exports = settings(smoke_data, run, MLHPC_SET=NEVER_CONVERGES)
    job = cluster.sbatch(SCRIPTS / "cosmoflow-mini.sbatch", exports=exports, cwd=tmp_path)
    wait_for_text(run / "result_0.txt", "epoch_start")
    assert len(ranks_of(run)) >= 2
    cluster.call("scancel", job)
    assert cluster.wait(job, timeout_s=300) == "CANCELLED"
    assert ranks_of(run) == []
    assert record(run / "result_0.txt").status != "success"
    assert not (run / "result_1.txt").exists()  # no further trial began
    assert read_folder_status(RunFolder(run), now_s=time.time())[0].state in {"aborted", "killed"}


def test_mlhpc_submit_gives_a_job_whose_status_is_known(cluster: Cluster, smoke_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["submit", "cosmoflow", "--system", "slurm-two-node", "--size", "smoke", "--nodes", "1", "--array"]
    command += ["--runs", "2", "--set", "max_epochs=1", "--set", "hyperparameters.base_learning_rate=1e-9"]
    variables = {"MLHPC_DATA": str(smoke_data)}
    said = cluster.call(sys.executable, "-m", "mlhpc", *command, "-o", str(run), cwd=tmp_path, **variables)
    job = json.loads((run / "job.json").read_text())["job_ids"][0]
    assert f"job {job}: cosmoflow smoke, 1 node x 1 rank, 2 runs" in said
    wait_for_text(run / "exit" / f"{job}_1", r"^\d+\n$", timeout_s=300)
    text = cluster.call(sys.executable, "-m", "mlhpc", "status", str(run), "--format", "json")
    assert [(row["trial"], row["state"], row["epoch"]) for row in json.loads(text)] == [
        (0, "aborted", 1),
        (1, "aborted", 1),
    ]


@pytest.mark.long
def test_a_requeued_task_of_an_array_starts_no_other_one(cluster: Cluster, smoke_data: Path, tmp_path: Path) -> None:
    """Of three tasks the first has ended. Of the two that run, that with the id of the array is stopped."""
    run, system = tmp_path / "run", tmp_path / "array.yaml"
    text = (ROOT / "submissions" / "systems" / "slurm-two-node.yaml").read_text()
    system.write_text(text.replace("site:\n", "site:\n  requeue: true\n").replace("slurm-two-node", "array"))
    command = ("submit", "cosmoflow", "--system", str(system), "--size", "smoke", "--nodes", "1", "--array")
    script = tmp_path / "array.sbatch"
    printed = mlhpc(*command, "--runs", "3", "-o", str(run), "--dry-run", cwd=tmp_path).stdout
    script.write_text(printed.replace("--array=0-2%1", "--array=0-2%2"))
    (run / "exit").mkdir(parents=True)
    (run / "exit" / "trial_0").write_text("0\n")
    (run / "result_0.txt").touch()
    job = cluster.sbatch(script, exports=settings(smoke_data, run, MLHPC_SET=NEVER_CONVERGES), cwd=tmp_path)
    for trial in (1, 2):
        wait_for_text(run / f"result_{trial}.txt", "epoch_start")
    said = {trial: (tmp_path / f"cosmoflow-smoke-{job}_{trial}.out").read_text() for trial in (1, 2)}
    (stopped,) = [trial for trial, text in said.items() if f"job {job} on" in text]
    other = 3 - stopped
    cluster.call("scancel", "--signal=TERM", f"{job}_{stopped}")
    deadline = time.monotonic() + 300
    while "Restarts=1" not in cluster.call("scontrol", "show", "job", f"{job}_{stopped}"):
        assert time.monotonic() < deadline, explain(tmp_path)
        time.sleep(0.3)
    shown = cluster.call("scontrol", "show", "job", f"{job}_{other}")
    assert "Restarts=0" in shown
    assert "JobState=RUNNING" in shown
    assert record(run / f"result_{other}.txt").run_stop_s is None
    assert [path.read_text() for path in (run / "exit").glob(f"{job}_0*")] == [
        "0\n"
    ]  # and its script did not begin again
    cluster.call("scancel", job)


@pytest.mark.long
def test_a_job_that_is_submitted_again_leaves_a_trial_alone_that_runs(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    script = SCRIPTS / "cosmoflow-mini.sbatch"
    exports = settings(smoke_data, run, MLHPC_RUNS="2", MLHPC_SET=NEVER_CONVERGES)
    first = cluster.sbatch(script, "--nodes=1", exports=exports, cwd=tmp_path)
    wait_for_text(run / "result_0.txt", "epoch_start")
    second = cluster.sbatch(script, "--nodes=1", exports=exports | {"MLHPC_REPLACE_FAILED": "1"}, cwd=tmp_path)
    assert cluster.wait(second) == "FAILED"
    wait_for_text(run / "exit" / second, "2")
    assert "trial 0: somebody else is running it, so left alone" in explain(tmp_path)
    assert not (run / "exit" / "trial_0").exists()
    assert sorted(path.name for path in run.glob("*.txt")) == ["result_0.txt"]
    assert "in use" not in (run / "output" / "trial_0.log").read_text()
    rows = json.loads(cluster.call(sys.executable, "-m", "mlhpc", "status", str(run), "--format", "json"))
    assert [row["state"] for row in rows] == ["running", "queued"]
    cluster.call("scancel", first)
    cluster.wait(first)


@pytest.mark.long
def test_an_environment_is_unpacked_on_every_node_before_the_ranks_start(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    """The recipe of CONTRIBUTING.md through `mlhpc submit`. Both nodes are this machine, so one waits for the other."""
    (tmp_path / "mlhpc-env" / "bin").mkdir(parents=True)
    python = tmp_path / "mlhpc-env" / "bin" / "python"
    python.write_text(f'#!/bin/bash\necho "$SLURMD_NODENAME" >> {tmp_path}/ranks\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    subprocess.run(["tar", "-C", str(tmp_path), "-cf", str(tmp_path / "mlhpc-env.tar"), "mlhpc-env"], check=True)
    python.unlink()
    system = tmp_path / "offline.yaml"
    system.write_text(
        f"""
name: offline
resources:
  exclusive: false
site:
  python: $TMPDIR/mlhpc-env/bin/python
  scratch: {tmp_path}/local-$SLURM_JOB_ID
  setup:
    - mkdir -p "$TMPDIR"
    - flock "$TMPDIR/lock" tar -C "$TMPDIR" -xf {tmp_path}/mlhpc-env.tar
    - echo "$SLURMD_NODENAME" >> {tmp_path}/nodes
"""
    )
    run = tmp_path / "run"
    command = ["submit", "cosmoflow", "--system", str(system), "--size", "smoke", "--nodes", "2"]
    command += ["--set", "max_epochs=1", "--set", "hyperparameters.base_learning_rate=1e-9", "-o", str(run)]
    cluster.call(sys.executable, "-P", "-m", "mlhpc", *command, cwd=tmp_path, MLHPC_DATA=str(smoke_data))
    job = json.loads((run / "job.json").read_text())["job_ids"][0]
    cluster.wait(job)
    assert (run / "exit" / "trial_0").read_text() == "1\n", explain(tmp_path)  # it ran; the target is out of its reach
    assert record(run / "result_0.txt").nodes == 2
    assert sorted((tmp_path / "nodes").read_text().split()) == sorted((tmp_path / "ranks").read_text().split())
    assert sorted((tmp_path / "nodes").read_text().split()) == ["node1", "node2"]


@pytest.mark.long
def test_the_network_of_two_nodes_is_swept_under_srun(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    small = ["--experts", "2", "--top-k", "1", "--tokens", "64", "--width", "16", "--hidden", "32", "--repeats", "2"]
    bench = [
        sys.executable,
        "-m",
        "mlhpc",
        "moe",
        "--sweep-network",
        *small,
        "--up-to-mib",
        "0.01",
        "-o",
        str(path),
    ]
    cluster.call("srun", "-N", "2", "-n", "2", "--mpi=pmi2", *bench)
    sweep = json.loads(path.read_text())
    assert (sweep["nodes"], sweep["ranks_per_node"], [grid["ranks"] for grid in sweep["grids"]]) == (2, 1, [2])
    printed = mlhpc("moe", "fit", str(path), cwd=tmp_path).stdout
    assert "nodes pretended" not in printed
    assert "more than 2 ranks: inconclusive" in printed  # one grid says nothing of larger ones


# MPICH's UCX publishes it beside its address: with this in it, the line is longer than what Slurm reads (docs/upstream.md)
DENSE_MEMORY = """
import os
blocks = [os.urandom(size) for size in range(520, 6000) for _ in range(6)]
del blocks[::2]
from mlhpc.suite.world import World
world = World.create()
assert type(world.transport).__name__ == "MpiTransport"
print(world.allgather(world.rank), flush=True)
"""


def test_mpi_starts_on_two_nodes_whatever_is_in_memory(cluster: Cluster) -> None:
    assert (
        cluster.call("srun", "-N", "2", "-n", "2", "--mpi=pmi2", sys.executable, "-c", DENSE_MEMORY) == "[0, 1]\n" * 2
    )
