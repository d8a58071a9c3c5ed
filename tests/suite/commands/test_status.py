"""`mlhpc status`: states from logs cut anywhere, and from what the queue and the exit files say."""

import json
import os
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from mlhpc.suite import VERSION
from mlhpc.suite.commands import status
from mlhpc.suite.commands.status import JobStatus, TrialStatus, judge_trial, read_folder_status, render_table
from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.launch import queue as jobs
from mlhpc.suite.launch.estimates import Epochs, estimate_eta_s
from mlhpc.suite.launch.local import AttemptState, keep_heartbeat, read_attempt_state
from mlhpc.suite.launch.schedulers import slurm
from mlhpc.suite.log.checkpoint_index import CheckpointIndex, FileSum, build_folder_path
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import find_logs
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.log.timeline import Epoch
from tests.fixtures.warm import warm_python

NO_JOB = JobStatus()
RUNNING = JobStatus(("7",), "RUNNING", ended=False)
PENDING = JobStatus(("7",), "PENDING", ended=False)
ENDED = JobStatus(("7",), "exit 0", ended=True)
OPEN = RunRecord(run_start_s=100.0)


def line(key: str, value: Any, time_s: float, **metadata: Any) -> str:
    record = {"namespace": "", "time_ms": int(time_s * 1e3), "event_type": "", "key": key, "value": value}
    return f":::MLLOG {json.dumps(record | {'metadata': metadata})}\n"


def log_text(*, epochs: int, stop: str | None = None) -> str:
    """A log with some complete epochs of ten seconds each, the metric falling by 0.1 per epoch from 0.9."""
    text = line("init_start", None, 0) + line("init_stop", None, 90) + line("run_start", None, 100)
    for number in range(1, epochs + 1):
        begin = 100 + 10 * (number - 1)
        text += line("epoch_start", None, begin, epoch_num=number)
        text += line("eval_error", 1.0 - 0.1 * number, begin + 9, epoch_num=number)
        text += line("epoch_stop", None, begin + 10, epoch_num=number)
    if stop is not None:
        text += line("run_stop", None, 100 + 10 * epochs, status=stop)
    return text


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    info = {
        "version": 1, "suite_version": "1", "workload": "cosmoflow", "size": "mini", "mode": "strong", "runs": 2,
        "ranks": 2, "created": "x", "command": [], "git": None, "same_allocation": True,
    }  # fmt: skip
    root = tmp_path / "runs" / "r"
    root.mkdir(parents=True)
    (root / "run.json").write_text(json.dumps(info))
    (root / "config.yaml").write_text("max_epochs: 8\nglobal_batch_size: 16\n")
    return RunFolder(root)


@pytest.mark.parametrize(
    ("record", "job", "silent_s", "resumable", "state"),
    [
        (None, NO_JOB, 0.0, False, "queued"),
        (None, NO_JOB, 5000.0, False, "incomplete"),
        (None, PENDING, 0.0, False, "queued"),
        (None, RUNNING, 0.0, False, "queued"),
        (None, ENDED, 0.0, False, "incomplete"),
        (OPEN, NO_JOB, 5.0, False, "incomplete"),
        (OPEN, NO_JOB, -3e7, False, "incomplete"),
        (OPEN, NO_JOB, 5000.0, False, "incomplete"),
        (OPEN, RUNNING, 5000.0, False, "running"),
        (OPEN, ENDED, 1.0, False, "killed"),
        (OPEN, PENDING, 1.0, True, "queued"),
        (RunRecord(run_start_s=0.0, run_stop_s=9.0, status="success"), ENDED, 1.0, False, "finished"),
        (RunRecord(run_start_s=0.0, run_stop_s=9.0, status="aborted"), NO_JOB, 1.0, True, "aborted"),
    ],
)
def test_a_state_follows_from_log_and_job(
    record: RunRecord | None, job: JobStatus, silent_s: float, resumable: bool, state: str
) -> None:
    assert judge_trial(record, job, silent_s, resumable=resumable, sign=AttemptState())[0] == state


DONE = RunRecord(run_start_s=0.0, run_stop_s=9.0, status="success")
MISSED = RunRecord(run_start_s=0.0, run_stop_s=9.0, status="aborted")
INIT = RunRecord()


@pytest.mark.parametrize(
    ("record", "job", "silent_s", "resumable", "sign", "said"),
    [
        (None, NO_JOB, 0.0, False, AttemptState(code=2), ("aborted", "exit code 2 before it began")),  # refused
        (INIT, NO_JOB, 0.0, False, AttemptState(code=1), ("aborted", "exit code 1 before it began")),
        (INIT, RUNNING, 0.0, False, AttemptState(code=1), ("aborted", "exit code 1 before it began")),  # the job is at the next one
        (INIT, NO_JOB, 5.0, False, AttemptState(alive=True), ("running", "starting")),
        (None, NO_JOB, 0.0, False, AttemptState(alive=True), ("running", "starting")),
        (OPEN, NO_JOB, 5.0, False, AttemptState(alive=True), ("running", "")),
        (OPEN, NO_JOB, 4000.0, False, AttemptState(alive=True), ("running", "silent for 66.7 min")),
        (OPEN, RUNNING, 90.0, False, AttemptState(), ("running", "silent for 90 s")),
        (OPEN, NO_JOB, 5.0, False, AttemptState(alive=False), ("killed", "its launcher has gone; log has no end")),
        (OPEN, NO_JOB, 5.0, True, AttemptState(alive=False), ("killed", "its launcher has gone; can be resumed")),
        (INIT, NO_JOB, 5.0, False, AttemptState(alive=False), ("killed", "its launcher has gone; it never began")),
        (None, NO_JOB, 5.0, False, AttemptState(code=0), ("unreadable", "its log is missing: exit code 0")),
        (None, ENDED, 5.0, True, AttemptState(code=3), ("unreadable", "its log is missing: exit code 3")),
        (INIT, NO_JOB, 5.0, False, AttemptState(code=0), ("unreadable", "its log lacks the run: exit code 0")),
        (OPEN, NO_JOB, 5.0, False, AttemptState(code=0), ("incomplete", f"exit code 0, but {status._CUT}")),
        (OPEN, NO_JOB, 5.0, True, AttemptState(code=3), ("incomplete", f"exit code 3, but {status._CUT}; can be resumed")),
        (OPEN, NO_JOB, 5.0, False, AttemptState(), ("incomplete", f"{status._CUT}; no process holds it")),
        (OPEN, NO_JOB, 5.0, False, AttemptState(code=1), ("killed", "exit code 1; log has no end")),
        (OPEN, RUNNING, 5.0, False, AttemptState(code=137), ("killed", "exit code 137; log has no end")),
        (DONE, RUNNING, 5.0, True, AttemptState(alive=True), ("finished", "")),
        (DONE, NO_JOB, 5.0, True, AttemptState(alive=False), ("finished", "")),
        (MISSED, NO_JOB, 5.0, True, AttemptState(code=3), ("aborted", "can be resumed")),
        (MISSED, NO_JOB, 5.0, True, AttemptState(alive=True), ("running", "")),  # being continued
        (MISSED, RUNNING, 5.0, False, AttemptState(), ("aborted", "")),
    ],
)  # fmt: skip
def test_what_the_launcher_left_says_more_than_the_log(
    record: RunRecord | None,
    job: JobStatus,
    silent_s: float,
    resumable: bool,
    sign: AttemptState,
    said: tuple[str, str],
) -> None:
    assert judge_trial(record, job, silent_s, resumable=resumable, sign=sign) == said


@pytest.mark.parametrize("damage", ["index", "part", "missing"])
def test_a_damaged_checkpoint_is_not_said_to_go_on(run: RunFolder, damage: str) -> None:
    run.result(0).write_text(log_text(epochs=2, stop="aborted"))
    path = run.checkpoint(0)
    file = build_folder_path(path, "0123abcd") / "__0_0.distcp"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"whole")
    known = FileSum(bytes=5, crc32c=google_crc32c.value(b"whole"))
    path.write_bytes(CheckpointIndex(token="0123abcd", files={file.name: known}).text())
    row = read_folder_status(run, now_s=300)[0]
    assert (row.state, row.note) == ("aborted", "can be resumed")
    named = path if damage == "index" else file
    if damage == "missing":
        file.unlink()
    else:
        named.write_bytes(bytes([named.read_bytes()[0] ^ 1]) + named.read_bytes()[1:])
    os.utime(path, ns=(1, 1))
    row = read_folder_status(run, now_s=300)[0]
    assert row.state == "aborted"
    assert row.note.startswith(f"cannot be resumed: {named}: ")
    assert row.note.endswith("; --resume --replace-failed runs it again")


def test_a_refused_continuation_does_not_make_a_finished_trial_run(run: RunFolder) -> None:
    run.result(0).write_text(log_text(epochs=1, stop="success"))
    (run.root / "resumed_0_1.txt").write_text(line("init_start", None, 0))
    assert read_folder_status(run, now_s=run.result(0).stat().st_mtime)[0].state == "finished"


def test_the_launcher_of_a_local_run_is_seen_to_live_and_to_have_gone(run: RunFolder) -> None:
    run.result(0).write_text(log_text(epochs=1))
    now_s = run.result(0).stat().st_mtime
    with keep_heartbeat(run.running(0), "trial 0"):
        assert [row.state for row in read_folder_status(run, now_s=now_s + 4000)] == ["running", "queued"]
        sign = json.loads(run.running(0).read_text())
    assert not run.running(0).exists()
    rows = read_folder_status(run, now_s=now_s)  # it left nothing: no process holds the log
    assert [row.state for row in rows] == ["incomplete", "queued"]
    run.running(0).write_text(json.dumps(sign | {"started": sign["started"] - 1}))  # another process has its number now
    rows = read_folder_status(run, now_s=now_s)
    assert [(row.state, row.note) for row in rows] == [
        ("killed", "its launcher has gone; log has no end"),
        ("incomplete", "not started"),
    ]
    run.running(0).write_text(json.dumps(sign | {"host": "another"}))  # whose processes cannot be looked at
    touched_s = run.running(0).stat().st_mtime
    assert read_folder_status(run, now_s=touched_s + 30)[0].state == "running"
    assert read_folder_status(run, now_s=touched_s + 90)[0].state == "killed"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"host": "h", "pid": "x", "started": 1}', "\x00"])
def test_a_damaged_sign_counts_as_none(run: RunFolder, text: str) -> None:
    run.running(0).parent.mkdir()
    run.running(0).write_text(text)
    assert read_attempt_state(run, 0) == AttemptState()


def test_follow_shows_each_change_once_and_ends_with_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    states = iter(["queued", "running", "running", "finished"])
    times = iter([None, 9.0, 4.0, None])
    pauses: list[float] = []
    status.print_until_ended(lambda: [TrialStatus("r", 0, next(states), eta_s=next(times))], pauses.append)
    tables = capsys.readouterr().out.split("\n\n")
    assert [text.splitlines()[1].split()[2] for text in tables] == ["queued", "running", "finished"]
    assert len(pauses) == 3


def test_time_left_is_the_epochs_that_remain_at_the_pace_so_far() -> None:
    epochs = (Epoch(1, 0, 10, 9, True), Epoch(2, 10, 22, 11, True), Epoch(3, 22, 25, 3, False))
    record = RunRecord(run_start_s=1000.0, epochs=epochs)
    assert estimate_eta_s(record, Epochs(6, "x"), now_s=1025.0) == pytest.approx((6 - 2) * 11 - 3)
    assert estimate_eta_s(record, Epochs(2, "x"), now_s=1025.0) == 0.0
    assert estimate_eta_s(RunRecord(run_start_s=1000.0), Epochs(6, "x"), now_s=1025.0) is None


def test_rows_say_epoch_last_value_target_and_time_left(run: RunFolder) -> None:
    run.result(0).write_text(log_text(epochs=3, stop="success"))
    run.result(1).write_text(log_text(epochs=2))
    now_s = run.result(1).stat().st_mtime
    with create_lock(run.lock(1), "trial 1"):
        first, second = read_folder_status(run, now_s=now_s)
    assert (first.state, first.epoch, first.value) == ("finished", 3, pytest.approx(0.7))
    assert (second.state, second.epoch, second.value) == ("running", 2, pytest.approx(0.8))
    assert second.target == first.target is not None
    assert second.eta_s is not None
    assert second.eta_source is not None


def test_a_log_cut_at_any_byte_is_a_state_and_never_an_error(run: RunFolder) -> None:
    """Without a process that holds it, at any age by any clock, it is never said to run, nor to have been killed."""
    text = log_text(epochs=2, stop="aborted").encode()
    for end in range(0, len(text), 7):
        run.result(0).write_bytes(text[:end])
        for now_s in (0.0, run.result(0).stat().st_mtime, 4e9):
            row = read_folder_status(run, now_s=now_s)[0]
            assert row.state in {"incomplete", "aborted"}
            assert row.eta_s is None
            assert row.state == "aborted" or "no process holds it" in row.note
        with create_lock(run.lock(0), "trial 0"):
            assert read_folder_status(run, now_s=0.0)[0].state == "running"


@pytest.mark.parametrize("created", ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00+02:00", "x"])
def test_a_run_json_alone_is_no_queued_run_for_ever(run: RunFolder, created: str) -> None:
    info = json.loads(run.info_path.read_text()) | {"created": created}
    run.info_path.write_text(json.dumps(info))
    made_s = datetime.fromisoformat(created).timestamp() if created != "x" else run.info_path.stat().st_mtime
    for age_s, state in ((1.0, "queued"), (status.STALE_S + 1, "incomplete")):
        assert [row.state for row in read_folder_status(run, now_s=made_s + age_s)] == [state, state]
    with create_lock(run.lock(0), "trial 0"):
        rows = read_folder_status(run, now_s=made_s + 4000)
    assert [row.state for row in rows] == ["running", "queued"], "the other runs of a series wait"


def test_the_newest_continuation_speaks_for_a_trial(run: RunFolder) -> None:
    run.result(0).write_text(log_text(epochs=1, stop="aborted"))
    for number in (2, 10):
        path = run.root / f"resumed_0_{number}.txt"
        path.write_text(line("run_resumed", None, 1) + log_text(epochs=number, stop="success"))
    row = read_folder_status(run, now_s=0.0)[0]
    assert (row.state, row.epoch, row.note) == ("finished", 10, "resumed, not scored")


def test_a_job_is_asked_of_the_queue_then_of_its_exit_file(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.root / "job.json").write_text('{"version": 1, "job_ids": ["7"], "submitted": "x"}')
    monkeypatch.setattr(jobs, "fetch_job_states", lambda ids, dialect: {"7": "RUNNING"})
    assert status.read_job_status(run.root) == JobStatus(("7",), "RUNNING", ended=False)
    monkeypatch.setattr(jobs, "fetch_job_states", lambda ids, dialect: {})
    assert status.read_job_status(run.root) == JobStatus(("7",), "gone", ended=True)
    (run.root / "exit").mkdir()
    (run.root / "exit" / "7").write_text("3\n")
    assert status.read_job_status(run.root) == JobStatus(("7",), "exit 3", ended=True)
    (run.root / "exit" / "8_1.running").touch()  # submitted again by a person, as an array, and not ended
    assert status.read_job_status(run.root) == JobStatus(("7", "8"), "gone", ended=True)


@pytest.mark.parametrize(
    ("queue", "codes", "trials", "states"),
    [
        ({"7_1": "PENDING"}, {"7_0": 233}, {0: 233}, ["aborted exit 233", "queued PENDING"]),  # its node died
        ({"7_1": "PENDING"}, {}, {}, ["incomplete gone", "queued PENDING"]),
        (
            {"7_0": "PENDING", "7_1": "RUNNING"},
            {"7_0": 143},
            {0: 143},
            ["queued PENDING", "queued RUNNING"],
        ),  # requeued
        ({"7_0": "RUNNING"}, {"7_1": 1}, {1: 1}, ["queued RUNNING", "aborted exit 1"]),
        ({}, {"7_0": 0, "7_1": 1}, {0: 0, 1: 1}, ["unreadable exit 0", "aborted exit 1"]),
        ({}, {"7_1": 2}, {1: 2}, ["incomplete gone", "aborted exit 2"]),
    ],
)
def test_each_task_of_an_array_has_a_state_of_its_own(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    queue: dict[str, str],
    codes: dict[str, int],
    trials: dict[int, int],
    states: list[str],
) -> None:
    (run.root / "job.json").write_text('{"version": 1, "job_ids": ["7"], "submitted": "x"}')
    (run.root / "exit").mkdir()
    for name, code in (codes | {f"trial_{trial}": code for trial, code in trials.items()}).items():
        (run.root / "exit" / name).write_text(f"{code}\n")
    listed = "".join(f"7 {name[2:]} {state}\n" for name, state in queue.items())
    monkeypatch.setattr(jobs, "ask", lambda *words, **_: listed if words[0] == "squeue" else "")
    assert [f"{row.state} {row.job_state}" for row in read_folder_status(run, now_s=5.0)][:2] == states


@pytest.mark.parametrize("name", ["result_0 (copy).txt", "result_99.txt", "result_0.old.txt", "result_.txt"])
def test_a_log_of_no_trial_is_shown_as_the_checker_counts_it(run: RunFolder, name: str) -> None:
    run.result(0).write_text(log_text(epochs=1, stop="success"))
    (run.root / name).write_text(log_text(epochs=1, stop="success"))
    rows = read_folder_status(run, now_s=5.0)
    counts = name == "result_99.txt"  # another name is of a copy
    assert [row.note for row in rows if row.state == "extra"] == [
        f"{name} is the log of no trial of run.json; check, score and package {'count it' if counts else 'leave it out'}"
    ]
    logs, skipped = find_logs([run.root])
    assert [log.path.name for log in logs] == ["result_0.txt", *([name] if counts else [])]
    assert [path.name for path in run.results()] == ["result_0.txt", *([name] if counts else [])]
    assert [item.path.name for item in skipped] == ([] if counts else [name])


@pytest.fixture(params=["no squeue", "failing squeue", "slow squeue"])
def mute(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which Slurm does not answer."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("squeue", "scontrol") if request.param != "no squeue" else ():
        fails = "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1"
        (tools / name).write_text(f"#!/bin/sh\n{'exec sleep 20' if request.param == 'slow squeue' else fails}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv(
        "PATH", f"{tools}:/nowhere" if request.param != "slow squeue" else f"{tools}:{os.environ['PATH']}"
    )
    monkeypatch.setattr(jobs, "ANSWER_TIMEOUT_S", 0.3)


@pytest.mark.usefixtures("mute")
def test_a_trial_is_not_killed_where_slurm_does_not_answer(run: RunFolder) -> None:
    """The script of one job has ended in the folder, that of another goes on."""
    run.result(0).write_text(log_text(epochs=2))
    (run.root / "job.json").write_text('{"version": 1, "job_ids": ["7"], "submitted": "x"}')
    (run.root / "exit").mkdir()
    (run.root / "exit" / "9").write_text("0\n")
    (run.root / "exit" / "7.running").touch()
    now_s = run.result(0).stat().st_mtime
    assert status.read_job_status(run.root) == JobStatus(("7", "9"), "not known", scheduler="Slurm")
    for later_s, state in ((1.0, "running"), (4000.0, "incomplete")):
        first, second = read_folder_status(run, now_s=now_s + later_s)
        assert (first.state, first.job_state, second.state) == (state, "not known", "queued")
        assert "Slurm does not answer here" in first.note
        assert "Slurm does not answer here" in second.note
    with create_lock(run.lock(0), "trial 0"):
        assert (read_folder_status(run, now_s=now_s + 4000)[0].state) == "running"
    (run.root / "exit" / "7.running").rename(run.root / "exit" / "7")
    (run.root / "exit" / "7").write_text("3\n")
    assert status.read_job_status(run.root).ended  # both scripts left an exit code
    assert read_folder_status(run, now_s=now_s)[0].state == "killed"


def test_slurm_that_does_not_know_a_job_any_more_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("squeue", "echo 7 N/A RUNNING"),
        ("scontrol", "echo slurm error: Invalid job id specified >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert jobs.fetch_job_states(["7", "8"], slurm) == {"7": "RUNNING"}
    (tmp_path / "scontrol").unlink()
    assert jobs.fetch_job_states(["7", "8"], slurm) == {"7": "RUNNING"}


def test_the_lock_of_a_trial_says_that_it_runs_unless_slurm_knows_the_end_of_its_job(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.result(0).write_text(log_text(epochs=2))
    run.exit_code(0).parent.mkdir()
    run.exit_code(0).write_text("1\n")  # of an earlier attempt
    now_s = run.result(0).stat().st_mtime + 4000
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with create_lock(run.lock(0), "trial 0"):
        assert read_folder_status(run, now_s=now_s)[0].state == "running"
        (run.root / "job.json").write_text('{"version": 1, "job_ids": ["7"], "submitted": "x"}')
        for states, state in (({"7": "RUNNING"}, "running"), ({"7": "not known"}, "running"), ({}, "killed")):
            monkeypatch.setattr(jobs, "fetch_job_states", lambda ids, dialect, states=states: states)
            assert read_folder_status(run, now_s=now_s)[0].state == state
        (run.root / "job.json").write_text('{"version": 1, "job_ids": ["8"], "submitted": "x"}')
        assert read_folder_status(run, now_s=now_s)[0].state == "running"  # a person continues it outside of the job
    assert read_folder_status(run, now_s=now_s)[0].state == "killed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job_ids": 3}', '{"job_ids": ["x; y"]}'])
def test_a_damaged_job_file_counts_as_none(run: RunFolder, text: str) -> None:
    (run.root / "job.json").write_text(text)
    assert status.read_job_status(run.root) == NO_JOB


def test_the_table_is_aligned() -> None:
    rows = [
        TrialStatus("runs/a", 0, "running", 3, 0.51, 0.26, 90.0, "max_epochs", "7", "RUNNING"),
        TrialStatus("b", 1, "queued"),
    ]
    lines = [" ".join(cells).rstrip() for cells in render_table(rows)]
    assert lines == [
        "run    trial state   epoch last eval target time left         job       note",
        "runs/a 0     running 3     0.51      0.26   90 s (max_epochs) 7 RUNNING",
        "b      1     queued  -     -         -      -                 -",
    ]


@pytest.mark.parametrize(("columns", "below"), [(80, True), (200, False)])
def test_notes_stand_below_a_table_that_a_terminal_cannot_hold(
    columns: int, below: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    note = "other programs used 94 % of the CPUs (1.9 of 2)"
    finished = [TrialStatus("runs/a", trial, "finished", 7, 0.93, 0.9, note=note) for trial in (0, 2)]
    status._print_table([*finished, TrialStatus("runs/a", 1, "queued"), TrialStatus("b", None, "unreadable", note="x")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert (lines[-2:] == [f"runs/a trials 0, 2: {note}", "b: x"]) == below
    assert len(lines) == (7 if below else 5)
    assert ("note" in lines[0]) != below


def command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm_python(), "-m", "mlhpc", "status", *arguments],
        cwd=cwd,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )


def test_the_command_finds_runs_below_and_speaks_json(run: RunFolder) -> None:
    run.result(0).write_text(log_text(epochs=3, stop="success"))
    top = run.root.parents[1]
    rows = json.loads(command(top, "--format", "json").stdout)
    assert [(row["run"], row["trial"], row["state"]) for row in rows] == [
        ("runs/r", 0, "finished"),
        ("runs/r", 1, "queued"),
    ]
    plain = command(top, "runs").stdout.splitlines()
    assert plain[0].split()[:3] == ["run", "trial", "state"]


def test_links_show_no_run_twice(run: RunFolder) -> None:
    """A link to the folder itself or to the one above; a run elsewhere that a link leads to is shown."""
    top = run.root.parent
    elsewhere = copy_of(run, "../elsewhere/x")
    (run.root / "self").symlink_to(".")
    (run.root / "up").symlink_to("..")
    (run.root / "loop").symlink_to("loop")
    (top / "a").symlink_to(run.root.name)
    (top / "b").symlink_to(elsewhere.root)
    for paths in ([top], [run.root], [top, run.root, top]):
        roots = [folder.root for folder in status.find_runs(paths)]
        assert roots == [top / "b", run.root][paths == [run.root] :], paths


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    done = command(tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "mlhpc: runs: does not exist; expected a run folder, or a folder of run folders; this folder is empty\n",
    )


NEWER = f"written by a newer mlhpc than this, {VERSION}: update mlhpc; "
OF_2_3 = f"written by mlhpc 2.3.0, this is {VERSION}: update mlhpc; "


def test_settings_of_a_newer_suite_are_known_by_the_run_json_beside_them(run: RunFolder) -> None:
    run.config_path.write_text("optimizer_fusion: true\n")
    for version, told in (("2.3.0", OF_2_3), ("1", "")):
        run.info_path.write_text(json.dumps(json.loads(run.info_path.read_text()) | {"suite_version": version}))
        with pytest.raises(InputError, match="unknown key 'optimizer_fusion'") as caught:
            YamlSource.read(run.config_path).convert(RunConfig)
        assert str(caught.value).startswith(f"{run.config_path}:1: {told}unknown key ")


def copy_of(run: RunFolder, name: str, **changes: Any) -> RunFolder:
    """A second run folder beside one, with another run.json."""
    folder = run.root.parent / name
    folder.mkdir(parents=True)
    info = json.loads(run.info_path.read_text()) | changes
    (folder / "run.json").write_text(json.dumps(info))
    return RunFolder(folder)


def show(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*warm_python(), "-m", "mlhpc", "status", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=300)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"runs": "x"}, "runs = 'x': expected int, got str"),
        ({"runs": 100_000_000}, "runs = 100000000: expected int <= 10000"),
        ({"runs": 0}, "runs = 0: expected int >= 1"),
        ({"runs": -1}, "runs = -1: expected int >= 1"),
        ({"runs": 1.5}, "runs = 1.5: expected int, got float"),
        ({"runs": None}, "runs = None: expected int, got null"),
        ({"ranks": [2]}, "ranks = [2]: expected int | null, got a list"),
        ({"seed": -3}, "seed = -3: expected int >= 0"),
        ({"mode": "fast"}, "mode = 'fast': expected strong or weak"),
        ({"git": {"commit": 7, "dirty": False}}, 'git.commit = 7: expected str, got int; put it in quotes: "7"'),
        ({"git": {}}, "missing keys 'git.commit', 'git.dirty'"),
        ({"command": "mlhpc run"}, "command = 'mlhpc run': expected a list, got str; write a list: [ONE, TWO]"),
        ({"version": 2}, f"{NEWER}expected a run.json of version 1, found 2"),
        ({"version": 0}, "expected a run.json of version 1, found 0"),
        ({"version": 2, "suite_version": "2.3.0"}, f"{OF_2_3}expected a run.json of version 1, found 2"),
        ({"suite_version": "2.3.0", "runs": 0}, f"{OF_2_3}runs = 0: expected int >= 1"),
        ({"suite_version": "0.9", "runs": 0}, "runs = 0: expected int >= 1"),
        (
            {"suite_version": VERSION.replace(".dev0", ""), "runs": 0},
            f"{OF_2_3.replace('2.3.0', '1.0.0')}runs = 0: expected int >= 1",
        ),
    ],
)
def test_a_damaged_run_json_is_one_row_and_hides_no_other(
    run: RunFolder, changes: dict[str, Any], problem: str
) -> None:
    damaged = copy_of(run, "damaged", **changes)
    (run.root / "result_0.txt").write_text(log_text(epochs=2, stop="success"))
    first, *others = status.read_rows([run.root.parent])
    assert (first.run, first.trial, first.state) == (str(damaged.root), None, "unreadable")
    assert first.note == f"{damaged.info_path}: {problem}"
    assert [(row.trial, row.state) for row in others] == [(0, "finished"), (1, "queued")]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{" * 3000, '{"version": NaN}'])
def test_a_run_json_that_is_none_hides_no_other_either(run: RunFolder, content: str) -> None:
    damaged = copy_of(run, "damaged")
    damaged.info_path.write_text(content)
    first, *others = status.read_rows([run.root.parent])
    assert (first.state, len(others)) == ("unreadable", 2)


def test_status_shows_what_it_can_and_ends_with_1(run: RunFolder) -> None:
    copy_of(run, "damaged", runs="x")
    done = show(run.root.parent)
    assert done.returncode == 1
    assert [line.split()[1:3] for line in done.stdout.splitlines()[1:]] == [
        ["-", "unreadable"],
        ["0", "queued"],
        ["1", "queued"],
    ]
    rows = json.loads(show(run.root.parent, "--format", "json").stdout)
    assert [row["trial"] for row in rows] == [None, 0, 1]


@pytest.mark.parametrize("what", ["too large", "a folder"])
def test_a_log_that_cannot_be_read_hides_no_other_trial(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (run.root / "result_1.txt").write_text(log_text(epochs=2, stop="success"))
    if what == "a folder":
        run.result(0).mkdir()
    else:
        run.result(0).write_text(log_text(epochs=400))
        monkeypatch.setenv("MLHPC_LIMITS", "file=16KiB")
    first, second = read_folder_status(run, now_s=0.0)
    assert (first.trial, first.state, str(run.result(0)) in first.note) == (0, "unreadable", True)
    assert second.state == "finished"
    done = show("--goodput", run.root)
    assert (done.returncode, "trial 1: " in done.stdout, str(run.result(0)) in done.stderr) == (1, True, True)
