"""The harness on real MPI worlds, with a toy workload: convergence, phases, stopping, resuming, dying."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.log.other_work import find_problem
from mlhpc.suite.log.reader import Log, read_events
from mlhpc.suite.training.step_timing import PHASES
from tests.fixtures.warm import warm_python

HERE = Path(__file__).parent
MPIEXEC = Path(sys.executable).with_name("mpiexec")
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def command(data: Path, *trials: Sequence[str], ranks: int = 1, python: Sequence[str] = ()) -> list[str]:
    """The command of a process per rank that runs these trials one after another (toy.py)."""
    words = [word for trial in trials for word in ("--", *trial)][1:]
    worker = [*(python or warm_python()), str(HERE / "toy.py"), str(data), *words]
    return ([str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []) + worker


def trial(folder: Path, *options: str, index: int = 0) -> tuple[str, ...]:
    return (str(folder), str(index), "11", *options)


def completed(
    data: Path, *trials: Sequence[str], ranks: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(data, *trials, ranks=ranks), env=ENV | environment, capture_output=True, text=True, timeout=300
    )


# Trials that differ in options only share one start of a process per rank.
SHORT = ("window_steps=1", "max_epochs=2")
ENDLESS = ("max_epochs=100000", "hyperparameters.base_learning_rate=1e-9")
SHARDED = ("submission.division=open", "hyperparameters.sharded=true")
CLIPPED_SHARDED = (*SHORT, *SHARDED, "hyperparameters.clip_norm=0.1")
ON_ONE_RANK = {
    "short": SHORT,
    "blocks": (*SHORT, "TOY_EVAL_EVERY_STEPS=10"),
    "averaged": (*SHORT, "hyperparameters.ema_decay=0.999999"),
    "clipped": (*SHORT, "hyperparameters.clip_norm=1e-9"),
    "parts": (*SHORT, "gradient_accumulation_steps=4"),
    "sharded": CLIPPED_SHARDED,
    "sharded, not clipped": (*SHORT, *SHARDED),
    "staged": ("max_epochs=1", "staging.directory=LOCAL/{node}"),
    "staged again": ("max_epochs=1", "staging.directory=LOCAL/{node}"),
}
ON_TWO_RANKS = {
    "short": SHORT,
    "to the target": (),
    "diverging": ("hyperparameters.base_learning_rate=1e30",),
    "parts": (*SHORT, "gradient_accumulation_steps=4"),
    "sharded": CLIPPED_SHARDED,
    "sharded, in parts": (*CLIPPED_SHARDED, "gradient_accumulation_steps=2"),
    "measured": ("max_epochs=6", "hyperparameters.base_learning_rate=1e-9"),
    "not measured": (*SHORT, "instrumentation=false"),
    "staged in the background": ("max_epochs=2", "staging.directory=LOCAL/{node}", "staging.overlap=true"),
}


def logs_of(trials: Mapping[str, Sequence[str]], ranks: int, data: Path, folder: Path) -> dict[str, Log]:
    """Run the trials, each in a run folder of its name, and read their logs."""
    options = {name: [word.replace("LOCAL", f"{folder}/local") for word in words] for name, words in trials.items()}
    done = completed(data, *(trial(folder / name, *words) for name, words in options.items()), ranks=ranks)
    wanted = ["exit code 0" if name == "to the target" else "exit code 1" for name in trials]
    found = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert found == wanted, done.stdout + done.stderr
    return {name: read_events(folder / name / "result_0.txt") for name in trials}


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    """The logs of ON_ONE_RANK."""
    return logs_of(ON_ONE_RANK, 1, data, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    """The logs of ON_TWO_RANKS."""
    return logs_of(ON_TWO_RANKS, 2, data, tmp_path_factory.mktemp("two"))


def values(log: Log, key: str) -> list[Any]:
    return [event.value for event in log.events if event.key == key]


def windows(log: Log) -> dict[tuple[int, int], float]:
    found = [event.metadata for event in log.events if event.key == "step_phases"]
    return {(m["epoch_num"], m["first_step"]): m["loss"] for m in found}


def stop(log: Log) -> dict[str, Any]:
    (event,) = [event for event in log.events if event.key == "run_stop"]
    return dict(event.metadata)


def test_a_run_to_the_target_says_success_and_its_phases_sum_to_the_step(two: dict[str, Log]) -> None:
    log = two["to the target"]
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
    assert keys[-2:] == ["run_stop", "goodput"]
    assert_goodput(log, interruptions=0)
    assert values(log, "data_selected_until") == ["2021-09-16"]  # what the workload says of the data's manifest
    folder = log.path.parent
    assert json.loads((folder / "run.json").read_text())["workload"] == "toy"
    assert list((folder / "facts").iterdir())


def assert_goodput(log: Log, interruptions: int) -> dict[str, Any]:
    """The run's own words on where its time went add up, and are those of the events."""
    (value,) = values(log, "goodput")
    parts = ("useful_s", "lost_s", "stalled_s", "starting_s", "down_s")
    assert value["wall_s"] == pytest.approx(sum(value[part] for part in parts), abs=1e-6)
    assert value["ratio"] == pytest.approx(value["useful_s"] / value["wall_s"])
    assert min(value[part] for part in parts) >= 0
    assert len(value["interruptions"]) == interruptions
    assert sum(each["lost_s"] for each in value["interruptions"]) == pytest.approx(value["lost_s"])
    (startup,) = values(log, "startup")
    assert value["starting_s"] > startup["interpreter"]["max"] + startup["imports"]["max"] > 0
    run = [event.time_ms for event in log.events if event.key in ("run_start", "run_stop")]
    if not interruptions:
        assert value["useful_s"] + value["stalled_s"] == pytest.approx((run[1] - run[0]) / 1000, abs=1e-6)
    return dict(value)


def assert_same(log: Log, reference: Log) -> None:
    """Two runs on different ranks: the same losses, and every evaluation sample counted once."""
    for each in (log, reference):
        assert [e.metadata["metrics"]["counted"] for e in each.events if e.key == "eval_error"] == [37.0, 37.0]
    assert windows(log) == pytest.approx(windows(reference), rel=1e-5)
    for phases, wanted in zip(values(log, "rank_phases"), values(reference, "rank_phases"), strict=True):
        assert phases["loss_sum"] == pytest.approx(wanted["loss_sum"], rel=1e-5)
    assert values(log, "eval_error") == pytest.approx(values(reference, "eval_error"), rel=1e-5)


def test_ranks_do_not_change_the_losses_and_every_sample_counts_once(one: dict[str, Log], two: dict[str, Log]) -> None:
    assert_same(two["short"], one["short"])


@pytest.mark.long
def test_four_ranks_do_not_change_the_losses_either(data: Path, tmp_path: Path, one: dict[str, Log]) -> None:
    assert_same(logs_of({"short": SHORT}, 4, data, tmp_path)["short"], one["short"])


def test_a_run_that_misses_the_target_is_aborted_with_exit_code_1(one: dict[str, Log]) -> None:
    assert stop(one["short"])["status"] == "aborted"
    assert "not reached in 2 epochs" in stop(one["short"])["reason"]


def test_a_diverging_run_is_aborted_and_its_log_stays_valid_json(two: dict[str, Log]) -> None:
    log = two["diverging"]
    assert not log.problems
    assert stop(log)["status"] == "aborted"
    assert "diverged" in stop(log)["reason"]


def test_blocks_of_steps_have_the_losses_of_whole_epochs_and_count_samples(one: dict[str, Log]) -> None:
    blocks = one["blocks"]
    assert [e.metadata["epoch_num"] for e in blocks.events if e.key == "eval_error"] == [80, 160, 240]
    losses = [[e.metadata["loss"] for e in log.events if e.key == "step_phases"] for log in (one["short"], blocks)]
    assert losses[1] == losses[0][:30]  # 32 steps in two epochs; a block that is not whole is not begun


def test_averaged_weights_are_what_is_evaluated_and_clipping_is_applied(one: dict[str, Log]) -> None:
    moved, averaged, held = (values(one[name], "eval_error")[0] for name in ("short", "averaged", "clipped"))
    assert moved < averaged < held  # held: the initial weights; averaged: those after the first step, where it begins
    assert windows(one["averaged"]) == windows(one["short"])


def test_a_batch_in_parts_has_the_losses_of_a_whole_one(one: dict[str, Log], two: dict[str, Log]) -> None:
    for log in (one["parts"], two["parts"]):
        assert windows(log) == pytest.approx(windows(one["short"]), rel=1e-5)
        assert values(log, "gradient_accumulation_steps") == [4]
        for phases in values(log, "step_phases"):
            assert sum(phases[name] for name in PHASES) == pytest.approx(phases["step"], rel=1e-9)


def test_sharded_parameters_train_and_clip_as_whole_ones(one: dict[str, Log], two: dict[str, Log]) -> None:
    reference = one["sharded"]
    assert windows(two["sharded"]) == pytest.approx(windows(reference), rel=1e-5)
    assert windows(two["sharded, in parts"]) == pytest.approx(windows(reference), rel=1e-5)
    assert values(two["sharded"], "eval_error") == pytest.approx(values(reference, "eval_error"), rel=1e-5)
    assert windows(one["sharded, not clipped"]) != pytest.approx(windows(reference), rel=1e-2)


def test_every_window_has_the_workloads_own_statistics(two: dict[str, Log]) -> None:
    log = two["short"]
    assert values(log, "window_stats") == [{"ranks": 2.0}] * len(values(log, "step_phases"))


def test_the_run_measures_itself_on_every_rank(two: dict[str, Log]) -> None:
    log = two["measured"]
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


def test_every_run_says_who_used_its_cpus(one: dict[str, Log], two: dict[str, Log]) -> None:
    """How much others took depends on who else is at work here; that the ranks used something does not."""
    for ranks, log in ((1, one["short"]), (2, two["to the target"]), (2, two["not measured"])):
        (event,) = [event for event in log.events if event.key == "other_work"]
        assert find_problem(event) is None
        assert [event.key for event in log.events[-3:]] == ["other_work", "run_stop", "goodput"]
        (node,) = event.value
        assert (node["node"], node["cpus"]) == (0, len(os.sched_getaffinity(0)))
        # The times are read between events of the log, however long other work delays what lies between two of them
        begin, end = (
            next(n for n, each in enumerate(log.events) if each.key == key) for key in ("run_start", event.key)
        )
        longest = log.events[end].time_ms - log.events[begin - 1].time_ms
        shortest = log.events[end - 1].time_ms - log.events[begin].time_ms
        assert shortest - 2 <= 1e3 * event.metadata["seconds"] <= longest + 2
        assert 0 <= node["own_s"] < node["cpus"] * longest / 1e3 + 0.1 * ranks  # a tick of the kernel for each
    assert sum(event.value[0]["own_s"] for log in two.values() for event in log.every("other_work")) > 0


def test_without_instrumentation_nothing_is_measured_and_the_run_is_the_same(two: dict[str, Log]) -> None:
    assert values(two["not measured"], "eval_error") == values(two["short"], "eval_error")
    assert not {"step_phases", "rank_stats", "energy"} & {event.key for event in two["not measured"].events}


def test_staging_in_the_background_counts_inside_the_run(two: dict[str, Log]) -> None:
    log = two["staged in the background"]
    keys = [event.key for event in log.events]
    assert keys.index("run_start") < keys.index("staging_start") < keys.index("staging_stop") < keys.index("run_stop")
    (stats,) = values(log, "staging_stats")
    assert stats["overlapped"] is True
    assert stats["bytes"] > 0


def test_staging_before_the_run_is_outside_it_and_is_reused(one: dict[str, Log]) -> None:
    first, again = one["staged"], one["staged again"]
    keys = [event.key for event in first.events]
    assert keys.index("staging_stop") < keys.index("run_start")
    assert [values(log, "staging_stats")[0]["reused"] for log in (first, again)] == [False, True]


def start_endless(
    data: Path, folder: Path, ranks: int, *rest: str, python: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A run that cannot end by itself, and is well into training."""
    process = subprocess.Popen(
        command(data, trial(folder, *ENDLESS, *rest), ranks=ranks, python=python),
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


def ranks_of(process: subprocess.Popen[str], folder: Path) -> list[int]:
    """The ranks of the run in this folder: other tests, which run at the same time, start the same program."""
    found = subprocess.run(["pgrep", "-f", f"toy.py .*{folder}"], capture_output=True, text=True).stdout.split()
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
        pytest.param(1, (), marks=pytest.mark.long),
        pytest.param(2, (), marks=pytest.mark.long),
        (2, (*SHARDED, "hyperparameters.normalised=true")),
    ],
    ids=["alone", "two", "two-sharded"],
)
def test_sigterm_leaves_a_checkpoint_and_the_resumed_run_has_the_same_losses(
    data: Path, tmp_path: Path, ranks: int, own: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    changes = ("hyperparameters.dropout=0.3", "window_steps=1", "hyperparameters.ema_decay=0.9", *own)
    process = start_endless(data, folder, ranks, *changes)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 3
    log = read_events(folder / "result_0.txt")
    assert stop(log)["status"] == "aborted"
    assert len(list((folder / "checkpoint").iterdir())) == 2  # one file of all ranks, one of the node
    assert (folder / "checkpoint" / "trial_0.pt").exists()
    assert "stopped by SIGTERM" in stop(log)["reason"]
    last = max(windows(log))
    resumed, whole = resumed_and_whole(data, folder, last[0] + 1, *changes, ranks=ranks)
    assert not list((folder / "checkpoint").iterdir())
    assert len(values(resumed, "run_resumed")) == 1
    found = assert_goodput(resumed, interruptions=1)
    assert found["checkpoint"]["saves"] >= 1
    assert found["interruptions"][0]["restart_s"] > 0
    (recovery,) = values(resumed, "recovery")
    assert min(seconds for seconds in recovery.values() if seconds is not None) >= 0
    assert min(recovery["restart_s"], recovery["reload_s"]) > 0
    assert windows(resumed) == {key: loss for key, loss in windows(whole).items() if key > last}
    assert windows(log) == {key: loss for key, loss in windows(whole).items() if key <= last}


def resumed_and_whole(data: Path, folder: Path, epochs: int, *changes: str, ranks: int) -> tuple[Log, Log]:
    """The logs of a continued run and of one that nobody stopped, to the same epoch."""
    same, other = (*ENDLESS, *changes, f"max_epochs={epochs}"), folder.with_name("whole")
    done = completed(data, trial(folder, *same, "resume"), trial(other, *same), ranks=ranks)
    assert done.returncode == 1, done.stdout + done.stderr
    return read_events(folder / "resumed_0_1.txt"), read_events(other / "result_0.txt")


def test_a_continued_folder_leaves_what_is_done_and_runs_again_what_never_began(data: Path, tmp_path: Path) -> None:
    """The trial is killed in its initialisation, runs, is continued twice and replaced, all by the same command."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "result_0.txt").write_text(':::MLLOG {"key": "init_start", "time_ms": 1}\n')
    again = trial(folder, *SHORT, "resume")
    done = completed(data, again, again, trial(folder, *SHORT, "resume", "replace"), again, ranks=2)
    assert [line for line in done.stdout.splitlines() if line.startswith(("trial 0", "exit code"))] == [
        "trial 0: earlier log kept as failed_0_1.txt",
        "exit code 1",
        "trial 0: began and failed (result_0.txt ended with status aborted), which counts, so left as it is; "
        "--replace-failed runs it again",
        "exit code 1",
        "trial 0: replaces a run that began and failed (result_0.txt ended with status aborted); "
        "earlier log kept as failed_0_2.txt",
        "exit code 1",
        "trial 0: began and failed (result_0.txt ended with status aborted), which counts, so left as it is; "
        "--replace-failed runs it again",
        "exit code 1",
    ], done.stdout + done.stderr
    assert values(read_events(folder / "failed_0_2.txt"), "failed_run_replaced") == []
    assert values(read_events(folder / "result_0.txt"), "failed_run_replaced") == ["failed_0_2.txt"]


def stopped_run(data: Path, folder: Path, ranks: int) -> None:
    """A run folder in which a signal stopped trial 0, with its checkpoint."""
    process = start_endless(data, folder, ranks)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 3


def test_a_checkpoint_that_does_not_fit_leaves_no_log_of_a_continuation(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped_run(data, folder, ranks=1)
    other = (*SHORT, "hyperparameters.dropout=0.5", "resume")
    done = completed(data, trial(folder, *other))
    assert done.stdout.splitlines()[-1] == "exit code 2", done.stdout + done.stderr
    assert "trial_0.pt: is not of this run: " in done.stderr
    assert "; hyperparameters.dropout: checkpoint 0.0, config 0.5; restore that, or" in done.stderr
    assert [path.name for path in folder.glob("*_0*.txt")] == ["result_0.txt"]
    assert not list((folder / "checkpoint").glob("failed_*"))
    done = completed(data, trial(folder, *other, "replace"))  # the way on that the line names
    assert done.stdout.splitlines()[-1] == "exit code 1", done.stdout + done.stderr
    assert sorted(path.name for path in folder.glob("*_0*.txt")) == ["failed_0_1.txt", "result_0.txt"]
    assert len(values(read_events(folder / "result_0.txt"), "run_stop")) == 1
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["failed_0_1"]


def test_a_damaged_checkpoint_is_as_good_as_none_and_kept(data: Path, tmp_path: Path) -> None:
    """Only the second rank reads the damaged file."""
    folder = tmp_path / "run"
    stopped_run(data, folder, ranks=2)
    (file,) = (folder / "checkpoint").glob("*/__1_0.distcp")
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 4]) + whole[1:])
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    again = trial(folder, *SHORT, "resume")
    done = completed(data, again, trial(folder, *SHORT, "resume", "replace"), again, ranks=2)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("trial 0", "exit code"))]
    damaged = f"{file}: damaged: it has another checksum than it was written with"
    began = f"a run that began and failed (result_0.txt ended with status aborted) and cannot be resumed ({damaged})"
    assert lines[:4] == [
        f"trial 0: {began.removeprefix('a run that ')}, which counts, so left as it is; --replace-failed runs it again",
        "exit code 1",
        f"trial 0: replaces {began}; earlier log kept as failed_0_1.txt; "
        f"damaged checkpoint kept in {folder / 'checkpoint' / 'failed_0_1'}",
        "exit code 1",
    ], done.stdout + done.stderr
    assert len(values(read_events(folder / "result_0.txt"), "run_stop")) == 1
    kept = folder / "checkpoint" / "failed_0_1"
    assert sorted(path.name for path in kept.iterdir()) == names
    assert (kept / file.parent.name / file.name).stat().st_size == len(whole)
    assert list((folder / "checkpoint").iterdir()) == [kept]


TIMED = (
    "checkpoint.interval_s=0.3",
    "window_steps=1",
    "hyperparameters.dropout=0.3",
    "hyperparameters.normalised=true",
)


def saved(log: Log) -> list[tuple[int, int]]:
    """The first step of the log's checkpoints, as (epoch, step)."""
    found = [event.metadata for event in log.events if event.key == "checkpoint_saved"]
    return [(m["epoch_num"] + (m["next_step"] == 0), m["next_step"]) for m in found]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_after_a_kill_the_run_resumes_from_its_last_timed_checkpoint(data: Path, tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "run"
    process = start_endless(data, folder, ranks, *TIMED)
    while not len(saved(read_events(folder / "result_0.txt"))) > 2:
        time.sleep(0.05)
    for pid in ranks_of(process, folder) if ranks > 1 else [process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=300)
    log = read_events(folder / "result_0.txt")
    for value in values(log, "checkpoint_saved"):
        assert 0 < value["stall_s"] < 1
        assert value["bytes"] > 5_000 * (1 + ranks)  # a random state is 5,056 bytes
        assert value["files"] == ranks + 2
    assert len([each for each in (folder / "checkpoint").glob("trial_0.*") if each.is_dir()]) <= 3
    resumed, whole = resumed_and_whole(data, folder, max(windows(log))[0] + 2, *TIMED, ranks=ranks)
    (event,) = [event for event in resumed.events if event.key == "run_resumed"]
    first = (event.metadata["block"], event.metadata["next_step"])
    assert first >= saved(log)[-1]
    assert event.metadata["rederived"] == []
    assert windows(resumed) == {key: loss for key, loss in windows(whole).items() if key >= first}
    assert windows(log) == {key: loss for key, loss in windows(whole).items() if key <= max(windows(log))}


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.long)])
def test_a_checkpoint_continues_on_another_number_of_ranks(
    data: Path, tmp_path: Path, one: dict[str, Log], before: int, after: int
) -> None:
    """A stopped run of a fixed number of steps: SIGTERM to itself, so that both halves are short."""
    folder = tmp_path / "run"
    done = completed(data, trial(folder, *SHORT, "checkpoint.interval_s=0.001", "TOY_FAULT=term:loop:20"), ranks=before)
    assert done.returncode == 3, done.stdout + done.stderr
    done = completed(data, trial(folder, *SHORT, "resume"), ranks=after)
    assert done.returncode == 1, done.stdout + done.stderr
    resumed = read_events(folder / "resumed_0_1.txt")
    (event,) = [event for event in resumed.events if event.key == "run_resumed"]
    assert (event.metadata["ranks"], event.metadata["rederived"]) == (before, ["random state"])
    first = (event.metadata["block"], event.metadata["next_step"])
    wanted = {key: loss for key, loss in windows(one["short"]).items() if key >= first}
    assert len(wanted) > 5
    assert windows(resumed) == pytest.approx(wanted, rel=1e-5)
    assert values(resumed, "eval_error")[-1:] == pytest.approx(values(one["short"], "eval_error")[-1:], rel=1e-5)


def test_a_full_disk_under_the_checkpoints_is_a_warning_and_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoint").write_text("not a folder")
    done = completed(data, trial(folder, *SHORT, "checkpoint.interval_s=0.001"), ranks=2)
    assert done.returncode == 1, done.stdout + done.stderr
    log = read_events(folder / "result_0.txt")
    assert "not reached in 2 epochs" in stop(log)["reason"]
    assert values(log, "checkpoint_saved") == []
    assert values(log, "checkpoint_failed")
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("mlhpc: warning: checkpoint not written: ") for line in lines)
    assert str(folder / "checkpoint") in lines[0]


def test_a_second_job_in_a_trial_ends_with_one_line_and_the_first_goes_on(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_endless(data, folder, 1, python=[sys.executable])  # the number of this process is in the line
    second = completed(data, trial(folder, *ENDLESS), trial(folder, *ENDLESS, "resume"), ranks=2)
    assert second.returncode == 2
    (line,) = {line.partition(" [rank")[0] for line in second.stderr.splitlines() if line.startswith("mlhpc: ")}
    assert f"{folder}/trial_0.lock: trial 0 is in use by process {process.pid} on " in line
    assert not list(folder.glob("resumed_*"))
    assert not (folder / "exit" / "trial_0").exists()  # the exit code of a trial that runs
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 3
    assert not (folder / "trial_0.lock").exists()


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The run folder and the process of one rank: trials on damaged copies of the data, one on the data, a signal at the end."""
    root = tmp_path_factory.mktemp("alone")
    for harm in ("cut", "flipped"):
        shutil.copytree(data, root / f"{harm}-data")
        shard = root / f"{harm}-data" / "train" / "shard_00000.h5"
        content = bytearray(shard.read_bytes())
        content[-100] ^= 1  # a sample: HDF5 sees nothing wrong
        shard.write_bytes(content[:-100] if harm == "cut" else content)
    trials = (
        trial(root / "cut", f"data={root / 'cut-data'}"),
        trial(root / "flipped", f"data={root / 'flipped-data'}"),
        trial(
            root / "flipped-overlapped",
            f"data={root / 'flipped-data'}",
            f"staging.directory={root}/n",
            "staging.overlap=true",
        ),
        trial(root / "unverified", f"data={root / 'flipped-data'}", "verify_data=false", "max_epochs=1"),
        trial(root / "run", "max_epochs=1"),
    )
    return root / "run", completed(data, *trials, TOY_LATE_SIGNAL="1")


def test_a_damaged_shard_is_one_line_that_names_the_file(
    alone: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """On one rank; on two, tests/test_run.py."""
    folder, done = alone
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == ["exit code 2"] * 3 + ["exit code 1"] * 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert "cut-data/train/shard_00000.h5: truncated" in lines[0]
    assert all("flipped-data/train/shard_00000.h5: damaged: crc32c" in line for line in lines[1:])
    for name in ("cut", "flipped", "flipped-overlapped"):
        assert not (folder.with_name(name) / "result_0.txt").exists()


def test_the_log_says_how_the_data_were_verified_and_that_they_were_not(
    one: dict[str, Log], alone: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, _ = alone
    found = {}
    for log in (read_events(folder / "result_0.txt"), read_events(folder.with_name("unverified") / "result_0.txt")):
        (event,) = [event for event in log.events if event.key == "data_verified"]
        found[log.path.parent.name] = event
        keys = [event.key for event in log.events]
        assert keys.index("data_verified") < keys.index("run_start")
    assert found["run"].value["files"] == 2
    assert found["run"].value["gb_per_s"] > 0
    assert found["run"].metadata["place"] == "data root"
    assert found["unverified"].value is None
    assert found["unverified"].metadata["reason"] == "verify_data is false"
    staged = [event for event in one["staged"].events if event.key == "data_verified"]
    assert [event.metadata["place"] for event in staged] == ["staged copy of each node"]


def test_a_signal_after_the_end_does_not_change_the_exit_code(
    alone: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = alone
    assert done.returncode == 1, done.stdout + done.stderr
    assert (folder / "result_0.txt").exists()


def test_an_earlier_result_is_never_written_over(
    data: Path, alone: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, _ = alone
    before = (folder / "result_0.txt").read_bytes()
    done = completed(data, trial(folder), ranks=2)
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "result_0.txt").read_bytes() == before


def test_a_rank_killed_in_the_middle_ends_the_run_and_its_log_parses(data: Path, tmp_path: Path) -> None:
    process = start_endless(data, tmp_path / "run", 2)
    pids = ranks_of(process, tmp_path / "run")
    assert len(pids) == 2
    os.kill(pids[-1], signal.SIGKILL)
    process.communicate(timeout=300)
    assert process.returncode != 0
    log = read_events(tmp_path / "run" / "result_0.txt")
    assert not log.problems
    assert "success" not in [event.metadata.get("status") for event in log.events if event.key == "run_stop"]
    assert not ranks_of(process, tmp_path / "run")
