"""The harness on real MPI worlds, with a toy workload: convergence, phases, stopping, resuming, dying."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from suite.log.reader import Log, read_events
from suite.training.timing import PHASES

HERE = Path(__file__).parent
MPIEXEC = Path(sys.executable).with_name("mpiexec")
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(HERE))
    import toy

    root = tmp_path_factory.mktemp("toy") / "data"
    toy.generate(root)
    return root


def command(data: Path, run: Path, trial: int, *rest: str, ranks: int = 1) -> list[str]:
    worker = [sys.executable, str(HERE / "toy.py"), str(data), str(run), str(trial), "11", *rest]
    return ([str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []) + worker


def run(data: Path, folder: Path, *rest: str, trial: int = 0, ranks: int = 1, code: int = 0) -> Log:
    done = subprocess.run(
        command(data, folder, trial, *rest, ranks=ranks), env=ENV, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return read_events(folder / f"result_{trial}.txt")


def values(log: Log, key: str) -> list[Any]:
    return [event.value for event in log.events if event.key == key]


def windows(log: Log) -> dict[tuple[int, int], float]:
    found = [event.metadata for event in log.events if event.key == "step_phases"]
    return {(m["epoch_num"], m["first_step"]): m["loss"] for m in found}


def stop(log: Log) -> dict[str, Any]:
    (event,) = [event for event in log.events if event.key == "run_stop"]
    return dict(event.metadata)


def test_a_run_to_the_target_says_success_and_its_phases_sum_to_the_step(data: Path, tmp_path: Path) -> None:
    log = run(data, tmp_path / "run", ranks=2)
    assert not log.problems
    assert stop(log)["status"] == "success"
    assert values(log, "eval_error")[-1] <= 0.02 < values(log, "eval_error")[-2]
    for phases in values(log, "step_phases"):
        assert sum(phases[name] for name in PHASES) == pytest.approx(phases["step"], rel=1e-9)
        assert phases["exposed_communication"] > 0
        assert 0 <= phases["overlapped_communication"] <= phases["forward_backward"]
    keys = [event.key for event in log.events]
    order = [
        "cache_state",
        "init_start",
        "cache_clear",
        "seed",
        "train_samples",
        "init_stop",
        "run_start",
        "epoch_start",
    ]
    assert sorted(order, key=keys.index) == order
    assert keys[-1] == "run_stop"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["workload"] == "toy"
    assert list((tmp_path / "run" / "facts").iterdir())


def test_ranks_do_not_change_the_losses_and_every_sample_counts_once(data: Path, tmp_path: Path) -> None:
    logs = {n: run(data, tmp_path / f"run{n}", "window_steps=1", "max_epochs=2", ranks=n, code=1) for n in (1, 2, 4)}
    counted = {
        n: [e.metadata["metrics"]["counted"] for e in log.events if e.key == "eval_error"] for n, log in logs.items()
    }
    assert counted == {n: [37.0, 37.0] for n in logs}
    one = values(logs[1], "rank_phases")
    for n in (2, 4):
        for phases, reference in zip(values(logs[n], "rank_phases"), one, strict=True):
            assert phases["loss_sum"] == pytest.approx(reference["loss_sum"], rel=1e-5)
        assert values(logs[n], "eval_error") == pytest.approx(values(logs[1], "eval_error"), rel=1e-5)


def test_a_run_that_misses_the_target_is_aborted_with_exit_code_1(data: Path, tmp_path: Path) -> None:
    log = run(data, tmp_path / "run", "max_epochs=1", code=1)
    assert stop(log)["status"] == "aborted"
    assert "not reached in 1 epochs" in stop(log)["reason"]


def test_a_diverging_run_is_aborted_and_its_log_stays_valid_json(data: Path, tmp_path: Path) -> None:
    log = run(data, tmp_path / "run", "hyperparameters.base_learning_rate=1e30", ranks=2, code=1)
    assert not log.problems
    assert stop(log)["status"] == "aborted"
    assert "diverged" in stop(log)["reason"]


def test_an_earlier_result_is_never_written_over(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", "max_epochs=1", code=1)
    before = (tmp_path / "run" / "result_0.txt").read_bytes()
    done = subprocess.run(
        command(data, tmp_path / "run", 0, ranks=2), env=ENV, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "result_0.txt").read_bytes() == before


def test_blocks_of_steps_have_the_losses_of_whole_epochs_and_count_samples(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(data, tmp_path / "whole", "window_steps=1", "max_epochs=2", code=1)
    monkeypatch.setitem(ENV, "TOY_EVAL_EVERY_STEPS", "10")
    blocks = run(data, tmp_path / "blocks", "window_steps=1", "max_epochs=2", code=1)
    assert [e.metadata["epoch_num"] for e in blocks.events if e.key == "eval_error"] == [80, 160, 240]
    losses = [[e.metadata["loss"] for e in log.events if e.key == "step_phases"] for log in (whole, blocks)]
    assert losses[1] == losses[0][:30]  # 32 steps in two epochs; a block that is not whole is not begun


def test_averaged_weights_are_what_is_evaluated_and_clipping_is_applied(data: Path, tmp_path: Path) -> None:
    plain = run(data, tmp_path / "plain", "max_epochs=1", code=1)
    still = run(data, tmp_path / "still", "max_epochs=1", "hyperparameters.ema_decay=0.999999", code=1)
    clipped = run(data, tmp_path / "clipped", "max_epochs=1", "hyperparameters.clip_norm=1e-9", code=1)
    (moved,), (averaged,), (held,) = (values(log, "eval_error") for log in (plain, still, clipped))
    assert moved < averaged < held  # held: the initial weights; averaged: those after the first step, where it begins
    assert windows(still) == windows(plain)


def test_a_batch_in_parts_has_the_losses_of_a_whole_one(data: Path, tmp_path: Path) -> None:
    whole = run(data, tmp_path / "whole", "window_steps=1", "max_epochs=1", code=1)
    for ranks in (1, 2):
        parts = ("gradient_accumulation_steps=4", "window_steps=1", "max_epochs=1")
        log = run(data, tmp_path / f"parts{ranks}", *parts, ranks=ranks, code=1)
        assert windows(log) == pytest.approx(windows(whole), rel=1e-5)
        assert values(log, "gradient_accumulation_steps") == [4]
        for phases in values(log, "step_phases"):
            assert sum(phases[name] for name in PHASES) == pytest.approx(phases["step"], rel=1e-9)
    done = subprocess.run(
        command(data, tmp_path / "run", 0, "gradient_accumulation_steps=3", ranks=2),
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "global_batch_size 8 cannot be split evenly over 2 ranks in 3 accumulation steps" in done.stderr


def test_sharded_parameters_train_and_clip_as_whole_ones(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "TOY_SHARDED", "1")
    changes = ("hyperparameters.sharded=true", "hyperparameters.clip_norm=0.1", "window_steps=1", "max_epochs=1")
    one, two, parts = (
        run(data, tmp_path / f"run{i}", *changes, *more, ranks=ranks, code=1)
        for i, (ranks, more) in enumerate([(1, ()), (2, ()), (2, ("gradient_accumulation_steps=2",))])
    )
    free = run(data, tmp_path / "free", *changes, "hyperparameters.clip_norm=null", code=1)
    assert windows(two) == pytest.approx(windows(one), rel=1e-5)
    assert windows(parts) == pytest.approx(windows(one), rel=1e-5)
    assert values(two, "eval_error") == pytest.approx(values(one, "eval_error"), rel=1e-5)
    assert windows(free) != pytest.approx(windows(one), rel=1e-2)


def test_every_window_has_the_workloads_own_statistics(data: Path, tmp_path: Path) -> None:
    log = run(data, tmp_path / "run", "max_epochs=1", ranks=2, code=1)
    assert values(log, "window_stats") == [{"ranks": 2.0}] * len(values(log, "step_phases"))


def test_the_run_measures_itself_on_every_rank(data: Path, tmp_path: Path) -> None:
    log = run(data, tmp_path / "run", "max_epochs=6", "hyperparameters.base_learning_rate=1e-9", ranks=2, code=1)
    steps, samples, bytes_each = 16, 64, 8 * 6
    gaps_s = []
    for stats, throughput in zip(values(log, "rank_stats"), values(log, "tracked_stats"), strict=True):
        assert stats["loader_bytes"]["values"] == [samples * bytes_each] * 2
        assert stats["all_reduce_calls"]["min"] == stats["all_reduce_calls"]["max"] == steps
        assert stats["all_reduce_bytes"]["mean"] == steps * 6 * 6 * 4
        assert stats["peak_resident_bytes"]["min"] > 50e6
        parts = sum(stats[f"{name}_s"]["mean"] for name in PHASES)
        assert parts == pytest.approx(stats["step_s"]["mean"], rel=1e-9)
        gaps_s.append(abs(2 * samples / throughput["throughput"] - parts))
        waits = stats["exposed_communication_s"]
        assert waits["values"][waits["min_rank"]] == waits["min"]
    # An epoch takes some 40 ms here: other work on the machine may interrupt one between its clocks, not all six
    assert min(gaps_s) <= 2e-3, gaps_s
    assert len(values(log, "energy")) == 6
    assert all(event.metadata["seconds"] > 0 for event in log.events if event.key == "energy")


def test_without_instrumentation_nothing_is_measured_and_the_run_is_the_same(data: Path, tmp_path: Path) -> None:
    plain = run(data, tmp_path / "plain", "max_epochs=2", "instrumentation=false", ranks=2, code=1)
    measured = run(data, tmp_path / "measured", "max_epochs=2", ranks=2, code=1)
    assert values(plain, "eval_error") == values(measured, "eval_error")
    assert not {"step_phases", "rank_stats", "energy"} & {event.key for event in plain.events}


def start_endless(data: Path, folder: Path, ranks: int, *rest: str) -> subprocess.Popen[str]:
    """A run that cannot end by itself, and is well into training."""
    process = subprocess.Popen(
        command(data, folder, 0, "max_epochs=100000", "hyperparameters.base_learning_rate=1e-9", *rest, ranks=ranks),
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 3"):
            return process
    raise AssertionError("the run ended before its third epoch")


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-f", str(HERE / "toy.py")], capture_output=True, text=True).stdout.split()
    own = {process.pid}
    return sorted(
        int(pid)
        for pid in found
        if int(pid) not in own
        and b"mpiexec" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        and b"hydra" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    )


@pytest.mark.parametrize(
    ("ranks", "own"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.long),
        (2, ("hyperparameters.sharded=true", "hyperparameters.normalised=true")),
    ],
    ids=["alone", "two", "two-sharded"],
)
def test_sigterm_leaves_a_checkpoint_and_the_resumed_run_has_the_same_losses(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, own: tuple[str, ...]
) -> None:
    if own:
        monkeypatch.setitem(ENV, "TOY_SHARDED", "1")
    folder = tmp_path / "run"
    changes = ("hyperparameters.dropout=0.3", "window_steps=1", "hyperparameters.ema_decay=0.9", *own)
    process = start_endless(data, folder, ranks, *changes)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 3
    log = read_events(folder / "result_0.txt")
    assert stop(log)["status"] == "aborted"
    assert len(list((folder / "checkpoint").iterdir())) == (1 + ranks if own else 1)
    assert (folder / "checkpoint" / "trial_0.pt").exists()
    assert "stopped by SIGTERM" in stop(log)["reason"]
    last_epoch, last_step = max(windows(log))
    more = f"max_epochs={last_epoch + 1}"
    same = ("max_epochs=100000", "hyperparameters.base_learning_rate=1e-9", *changes)
    done = subprocess.run(
        command(data, folder, 0, *same, more, "resume", ranks=ranks),
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert not list((folder / "checkpoint").iterdir())
    resumed = read_events(folder / "resumed_0_1.txt")
    assert len(values(resumed, "run_resumed")) == 1
    whole = run(data, tmp_path / "whole", *same, more, ranks=ranks, code=1)
    expected = {key: loss for key, loss in windows(whole).items() if key > (last_epoch, last_step)}
    assert windows(resumed) == expected
    assert windows(log) == {key: loss for key, loss in windows(whole).items() if key <= (last_epoch, last_step)}


def test_a_signal_after_the_end_does_not_change_the_exit_code(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "TOY_LATE_SIGNAL", "1")
    run(data, tmp_path / "run", "max_epochs=1", "hyperparameters.base_learning_rate=1e-9", code=1)
    assert (tmp_path / "run" / "result_0.txt").exists()


def test_a_rank_killed_in_the_middle_ends_the_run_in_seconds_and_its_log_parses(data: Path, tmp_path: Path) -> None:
    process = start_endless(data, tmp_path / "run", 2)
    pids = ranks_of(process)
    assert len(pids) == 2
    began = time.monotonic()
    os.kill(pids[-1], signal.SIGKILL)
    process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode != 0
    log = read_events(tmp_path / "run" / "result_0.txt")
    assert not log.problems
    assert "success" not in [event.metadata.get("status") for event in log.events if event.key == "run_stop"]
    assert not ranks_of(process)


def test_after_a_kill_the_run_resumes_from_its_last_epoch_checkpoint(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_endless(data, folder, 1, "checkpoint_every_epochs=1")
    process.kill()
    process.communicate(timeout=30)
    run(data, folder, "max_epochs=1000", "hyperparameters.base_learning_rate=1e-9", "resume", "max_epochs=5", code=1)
    resumed = read_events(folder / "resumed_0_1.txt")
    (event,) = [event for event in resumed.events if event.key == "run_resumed"]
    assert event.metadata["block"] >= 3
    assert event.metadata["next_step"] == 0


def test_staging_in_the_background_counts_inside_the_run(data: Path, tmp_path: Path) -> None:
    log = run(data, tmp_path / "run", f"staging.directory={tmp_path}/local/{{node}}", "staging.overlap=true", ranks=2)
    keys = [event.key for event in log.events]
    assert keys.index("run_start") < keys.index("staging_start") < keys.index("staging_stop") < keys.index("run_stop")
    (stats,) = values(log, "staging_stats")
    assert stats["overlapped"] is True
    assert stats["bytes"] > 0


def test_staging_before_the_run_is_outside_it_and_is_reused(data: Path, tmp_path: Path) -> None:
    place = f"staging.directory={tmp_path}/local/{{node}}"
    first = run(data, tmp_path / "run", place)
    keys = [event.key for event in first.events]
    assert keys.index("staging_stop") < keys.index("run_start")
    again = run(data, tmp_path / "run", place, trial=1)
    assert [values(log, "staging_stats")[0]["reused"] for log in (first, again)] == [False, True]


def test_a_damaged_shard_is_one_line_that_names_the_file(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    shard = tmp_path / "data" / "train" / "shard_00000.h5"
    shard.write_bytes(shard.read_bytes()[:-100])
    done = subprocess.run(
        command(tmp_path / "data", tmp_path / "run", 0, ranks=2), env=ENV, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "shard_00000.h5" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_that_does_not_divide_is_refused_with_ones_that_do(data: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(data, tmp_path / "run", 0, "global_batch_size=7", ranks=2),
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "global_batch_size 7 cannot be split evenly over 2 ranks; nearest that can: 6, 8" in done.stderr
