"""`mlhpc run` as a person uses it: CosmoFlow smoke on this machine, stopped, killed, refused, resumed, under torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlhpc.suite.commands.run import _render_summary
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.launch.local import make_suite_command
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.foreign import foreign_folders
from tests.fixtures.runs import run_folder
from tests.fixtures.warm import warm_python

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parent.parent
MLHPC = str(Path(sys.executable).with_name("mlhpc"))


@pytest.fixture(autouse=True)
def _foreign_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of this file is started where the user has folders called suite/, workloads/ and analysis/."""
    monkeypatch.chdir(foreign_folders(tmp_path_factory.mktemp("cwd")))


def environment(data: Path) -> dict[str, str]:
    return os.environ | {"MLHPC_DATA": str(data), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def mlhpc(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run that no signal meets: in a fork of a Python that has loaded torch, as its ranks are."""
    command = [*warm_python(), "-P", "-m", "mlhpc", *arguments]
    return subprocess.run(command, env=environment(data), capture_output=True, text=True, timeout=600)


def started(data: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    """An `mlhpc run` on two ranks that cannot reach its target, after its first epoch."""
    process = subprocess.Popen(
        [
            *(MLHPC, "run", "cosmoflow", "--size", "smoke", "--ranks", "2", "-o", str(folder)),
            *("--set", "max_epochs=500", "--set", "hyperparameters.base_learning_rate=1e-9", *more),
        ],
        env=environment(data),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "epoch 1:" in line:
            return process
    raise AssertionError("the run ended before its first epoch did")


def ranks_of(folder: Path) -> list[str]:
    """Command lines of processes that work in a run folder."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words:
            lines.append(b" ".join(words).decode())
    return lines


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_stopped_run_leaves_a_checkpoint_an_aborted_log_and_no_process(
    smoke_data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = started(smoke_data, folder)
    process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 3, output
    assert "Traceback" not in output
    assert "0 of 1 run reached the target, 1 not finished; to go on: mlhpc run cosmoflow --output " in output
    assert (folder / "checkpoint" / "trial_0.pt").exists()
    record = summarise_log(read_events(folder / "result_0.txt"))
    assert record.status == "aborted"
    assert ranks_of(folder) == []
    refused = mlhpc(smoke_data, "run", "cosmoflow", "--size", "smoke", "--ranks", "2", "-o", str(folder))
    assert refused.returncode == 2
    resumed = mlhpc(
        smoke_data,
        *("run", "cosmoflow", "-o", str(folder), "--trial", "0", "--ranks", "2", "--resume", "--set", "max_epochs=2"),
    )
    assert resumed.returncode == 1, resumed.stdout + resumed.stderr  # it ends, and the target is out of its reach
    assert summarise_log(read_events(folder / "resumed_0_1.txt")).resumed


def test_a_run_that_was_ended_from_outside_ends_with_the_command_that_repeats_it(tmp_path: Path) -> None:
    root = run_folder(tmp_path / "R", count=2, staging_s=None)
    assert _render_summary(RunFolder(root), 2, refused=False).endswith(f"next: mlhpc score {root} --explain")
    log = root / "result_1.txt"
    log.write_text(log.read_text().partition('"run_stop"')[0].rpartition("\n")[0] + "\n")
    assert _render_summary(RunFolder(root), 2, refused=False) == (
        "1 of 2 runs reached the target; after mending what ended a rank: "
        f"mlhpc run cosmoflow --output {root} --resume --replace-failed"
    )


@pytest.mark.long
def test_a_launcher_killed_outright_leaves_a_checkpoint_no_process_and_a_log_that_parses(
    smoke_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = started(smoke_data, folder)
    process.kill()
    process.communicate(timeout=600)
    deadline = time.monotonic() + 300
    while ranks_of(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ranks_of(folder) == []
    log = read_events(folder / "result_0.txt")
    assert not log.problems
    assert summarise_log(log).status != "success"
    assert (folder / "checkpoint" / "trial_0.pt").exists()


def test_a_reader_that_closes_the_output_does_not_end_the_run(smoke_data: Path, tmp_path: Path) -> None:
    """`mlhpc run ... | head -1`."""
    folder = tmp_path / "run"
    words = ("run", "cosmoflow", "--size", "smoke", "-o", str(folder), "--set", "max_epochs=2")
    never = ("--set", "hyperparameters.base_learning_rate=1e-9")
    with subprocess.Popen(
        [*warm_python(), "-P", "-m", "mlhpc", *words, *never],
        env=environment(smoke_data) | {"MLHPC_ORG": "ACME"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("run 0: epoch 1:")
        process.stdout.close()
        errors = process.stderr.read()
        code = process.wait(timeout=600)
    assert code == 1, "as without head: the target is out of reach"
    assert errors == "note: the checker would refuse this result: 1 run; cosmoflow needs 5 (rule run-count)\n"
    record = summarise_log(read_events(folder / "result_0.txt"))
    assert len(record.epochs) == 2
    stated = load_descriptor("cosmoflow").card().size("smoke").baselines
    assert stated is not None
    assert record.baselines == stated.metrics()
    *_, outcome, baselines, course = (folder / "output" / "trial_0.log").read_text().splitlines()
    assert outcome == "target not reached in 2 epochs"
    assert course == "no reference course of these settings: only the target judges this training"
    assert re.fullmatch(
        r"simple predictors reach on such data: train_mean 0\.4962, one_point_ridge .*, power_spectrum_ridge .*",
        baselines,
    )


def test_a_damaged_shard_ends_the_run_with_one_line(smoke_data: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(smoke_data / "cosmoflow-smoke", tmp_path / "data")
    shard = sorted((tmp_path / "data" / "validation").glob("*.h5"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    sets = ("--set", f"data={tmp_path / 'data'}", "--set", f"staging.directory={tmp_path}/local")
    done = mlhpc(smoke_data, "run", "cosmoflow", "--size", "smoke", "--ranks", "2", "-o", str(tmp_path / "run"), *sets)
    assert done.returncode == 2, done.stdout + done.stderr
    assert shard.name in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list((tmp_path / "local").rglob("manifest.json"))
    assert "0 of 1 run began" in done.stdout
    assert "mlhpc score" not in done.stdout


def test_an_output_folder_that_cannot_be_made_is_one_line(smoke_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = mlhpc(smoke_data, "run", "cosmoflow", "--size", "smoke", "-o", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert f"{tmp_path / 'file' / 'run'}: {tmp_path / 'file'} is a file, not a folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_torchrun_is_a_launcher_too(smoke_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "mlhpc", "run", "cosmoflow", "--size", "smoke", "--output", str(folder), "--trial", "0"),
            *("--seed", "1", "--set", "max_epochs=1", "--set", f"staging.directory={tmp_path}/local"),
        ],
        env=environment(smoke_data) | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    record = summarise_log(read_events(folder / "result_0.txt"))
    assert (record.ranks, record.seed, len(record.evals)) == (2, 1, 1), done.stdout + done.stderr
    assert record.staging_stats is not None


@pytest.mark.long  # the toy of tests/suite/training/test_harness.py shows it in `make test`
def test_one_and_two_ranks_have_the_same_losses_and_the_same_metric(smoke_data: Path) -> None:
    """At a rate below the edge of stability: above it, rounding alone may grow to 1e-3 within 20 steps (docs/cosmoflow.md)."""
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "rank_invariance.py"), "cosmoflow", "--size", "smoke"),
            *("--data", str(smoke_data / "cosmoflow-smoke")),
            *("--set", "hyperparameters.base_learning_rate=0.001", "--set", "hyperparameters.scaling=none"),
        ],
        env=environment(smoke_data),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_user_s_folders_of_our_names_are_not_imported(tmp_path: Path) -> None:
    """By the console script, by python -P -m and by python -m."""
    from tests.fixtures import runs

    folder = runs.our_runs(tmp_path / "run", 1)
    report = ("report", str(folder), "-o", str(tmp_path / "report"))
    for command in ([MLHPC, "workload", "list"], make_suite_command("workload", "list"), [MLHPC, *report]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "mlhpc", "workload", "list"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
