"""`mlhpc status`: shows the state of each trial of a run folder, from its log and the scheduler's queue. Reads only."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

import click

from mlhpc.suite.card import render_metric_value
from mlhpc.suite.cli.options import JSON, TEXT, FiniteRange, card_option, format_option
from mlhpc.suite.data.lock import find_living_owner
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import WORKER_CODES, ExitCode
from mlhpc.suite.files import explain_link, print_line, render_duration, render_error, render_printable
from mlhpc.suite.launch import queue
from mlhpc.suite.launch.estimates import Expectation, estimate_eta_s, find_expectation
from mlhpc.suite.launch.local import AttemptState, read_attempt_state
from mlhpc.suite.launch.schedulers import NOT_KNOWN, Dialect, list_kinds, load_dialect
from mlhpc.suite.log.checkpoint_index import find_damage_quickly
from mlhpc.suite.log.goodput import Goodput, compute_advice, find_goodput, render_advice
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.run_folder import REPLACE, RunFolder, RunInfo, find_newest_log, find_newest_run_log

UNREADABLE, EXTRA = "unreadable", "extra"
STALE_S = 300.0  # a run without job and launcher that wrote nothing to log and output for so long counts as dead
SHOWN_SILENCE_S = 60.0  # a note says so from then on
FOLLOW_INTERVAL_S = 5.0  # between two looks of --follow
DEFAULT_ROOT = Path("runs")


@dataclass(frozen=True)
class TrialStatus:
    """One row. ``state``: queued, running, finished (target reached), aborted, killed, incomplete, unreadable or extra.

    An unreadable row is of a log, or of a whole run folder (``trial`` None). Its note says why. An extra row is of a log
    that is no trial's.
    ``eta_s`` is the time from now to the expected end, ``eta_source`` what that assumes; None if unknown.
    """

    run: str
    trial: int | None
    state: str
    epoch: int | None = None
    value: float | None = None
    target: float | None = None
    eta_s: float | None = None
    eta_source: str | None = None
    job: str | None = None
    job_state: str | None = None
    note: str = ""


@dataclass(frozen=True)
class JobStatus:
    """The jobs of a run folder. ``state``: the queue's, ``exit N``, ``gone`` or ``not known``.

    ``ended`` is None without a job, and where the scheduler does not answer. ``tasks`` are those of an array.
    """

    ids: tuple[str, ...] = ()
    state: str | None = None
    ended: bool | None = None
    tasks: Mapping[int, JobStatus] = field(default_factory=dict)
    scheduler: str = ""

    def of(self, trial: int) -> JobStatus:
        """Return the state of the array's task that runs a trial, else of the job."""
        return self.tasks.get(trial, self)


@click.command(
    epilog="""\b
Examples:
  mlhpc status                      every run under runs/
  mlhpc status runs/mine --format json
  mlhpc status runs/mine --follow   until every run has ended
  mlhpc status runs/mine --goodput --mtbf-h 6
"""
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@card_option
@format_option()
@click.option("--follow", is_flag=True, help="Keep showing the table as it changes, until every run has ended.")
@click.option(
    "--goodput",
    "--time",
    is_flag=True,
    help="Show the share of the time that was useful training, what each recovery took by phase, and the checkpoint "
    "interval that would lose least.",
)
@click.option(
    "--mtbf-h",
    type=FiniteRange(0, min_open=True),
    help="With --goodput: mean hours between failures, such as 6, for the interval. [estimated from interruptions]",
)
def status(paths: tuple[Path, ...], style: str, follow: bool, goodput: bool, mtbf_h: float | None) -> None:
    """Show state, epoch, last evaluation and time left of runs; with --goodput, where their time went.

    PATHS are run folders, or folders that hold them. [runs]

    Exit code 1 if a run cannot be read; the other runs are still shown.
    """
    if follow and style == JSON:
        raise click.UsageError("--follow shows tables: leave --format json out")
    if follow and goodput:
        raise click.UsageError("--follow and --goodput cannot be combined: give one of them")
    if mtbf_h is not None and not goodput:
        raise click.UsageError("--mtbf-h belongs to --goodput: give both")
    paths = paths or (DEFAULT_ROOT,)
    if goodput:
        print_goodput(find_runs(paths), mtbf_h, style)
    elif follow:
        # Each look finds the folders anew: a job may begin a run folder meanwhile.
        print_until_ended(lambda: read_rows(paths))
    else:
        rows = read_rows(paths)
        _print_rows(rows, style)
        if any(row.state == UNREADABLE for row in rows):
            raise click.exceptions.Exit(ExitCode.FINDINGS)


def read_rows(paths: Iterable[Path]) -> list[TrialStatus]:
    """Read the state of every trial of the run folders at the paths.

    A damaged folder is one row, and hides no other.
    """
    rows = [
        TrialStatus(str(folder), None, UNREADABLE, note=os.strerror(errno.EACCES)) for folder in _list_closed(paths)
    ]
    # A run folder may have been moved or removed where it really lies, as on scratch
    lost = [link for path in paths for link in sorted(path.glob("*")) if explain_link(link) and not _is_run(path)]
    rows += [TrialStatus(str(link), None, UNREADABLE, note=explain_link(link)) for link in lost]
    try:
        folders = find_runs(paths)
    except InputError:
        if not rows:
            raise
        folders = []
    for folder in folders:
        try:
            rows += read_folder_status(folder, now_s=time.time())
        except (InputError, OSError) as error:
            rows.append(TrialStatus(str(folder.root), None, UNREADABLE, note=render_error(error)))
    return rows


def print_goodput(folders: Sequence[RunFolder], mtbf_h: float | None, style: str) -> None:
    """Print the share of each trial's time that counts, and the advice on checkpoints, or raise InputError."""
    found, problems = _read_goodput(folders)
    for problem in problems:
        print_line(f"mlhpc: {problem}", error=True)
    if not found and problems:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if not found:
        raise InputError(
            f"{', '.join(str(folder.root) for folder in folders)}: no log has an event yet; repeat the command when a"
            " run has begun"
        )
    advice = compute_advice(found, None if mtbf_h is None else 3600 * mtbf_h)
    if style == JSON:
        trials = [asdict(each) | {"folder": str(each.folder), "ratio": each.ratio} for each in found]
        print_line(json.dumps({"version": 1, "trials": trials, "advice": advice}, indent=1))
    else:
        for each in found:
            print_line(render_printable(render_goodput(each)))
        print_line(render_advice(advice))
    if problems:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _read_goodput(folders: Sequence[RunFolder]) -> tuple[list[Goodput], list[str]]:
    """Read the goodput of each trial, and why some cannot be read: these hide no other."""
    found, problems = [], []
    for folder in folders:
        try:
            runs = folder.read_info().runs
        except InputError as error:
            problems.append(render_error(error))
            continue
        for trial in range(runs):
            try:
                goodput = find_goodput(folder, trial)
            except OSError as error:
                problems.append(render_error(error))
            else:
                found += [] if goodput is None else [goodput]
    return found, problems


def render_goodput(trial: Goodput) -> str:
    """Describe one trial: the share that counts and where the rest of the time went."""
    parts = (
        ("lost", trial.lost_s),
        ("checkpoints", trial.stalled_s),
        ("starting", trial.starting_s),
        ("down", trial.down_s),
    )
    rest = ", ".join(f"{name} {render_duration(seconds)}" for name, seconds in parts)
    share = "no part" if trial.ratio is None else f"{trial.ratio:.1%}"
    unfinished = "; it never finished" if trial.died else ""
    count = f"{trial.interruptions} interruption{'s' * (trial.interruptions != 1)}"
    useful = f"{share} of {render_duration(trial.wall_s)} was useful training"
    return f"{trial.folder} trial {trial.trial}: {useful}; {rest}; {count}{unfinished}{_render_recoveries(trial)}"


def _render_recoveries(trial: Goodput) -> str:
    """Say what each recovery took, by phase: the parts are the time from the last step that counts to the next one."""
    text = ""
    for number, parts in enumerate(trial.recoveries, 1):
        known = {name.removesuffix("_s"): seconds for name, seconds in parts.items() if seconds is not None}
        phases = ", ".join(f"{name} {render_duration(seconds)}" for name, seconds in known.items())
        text += f"; recovery {number}: {render_duration(sum(known.values()))} ({phases})"
    return text


def print_until_ended(read: Callable[[], list[TrialStatus]], pause: Callable[[float], object] = time.sleep) -> None:
    """Show the rows until none is queued or running. A terminal shows one table; elsewhere each change prints one."""
    shown: list[list[str]] | None = None
    while True:
        rows = read()  # a whole table at a time, so that a person sees one moment
        if sys.stdout.isatty():
            click.clear()
            _print_rows(rows)
        # The time left changes at every look; alone it is no reason for a new table.
        elif (texts := [_render_row(replace(row, eta_s=None)) for row in rows]) != shown:
            if shown is not None:
                print_line()
            _print_rows(rows)
            shown = texts
        if not any(row.state in ("queued", "running") for row in rows):
            return
        pause(FOLLOW_INTERVAL_S)


def _print_rows(rows: Sequence[TrialStatus], style: str = TEXT) -> None:
    if style == JSON:
        print_line(json.dumps([asdict(row) for row in rows], indent=2))
    elif sys.stdout.isatty():
        _print_table(rows)
    else:
        for line in render_table(rows):
            print_line(render_printable(" ".join(line).rstrip()))


def _list_closed(paths: Iterable[Path]) -> list[Path]:
    """List the folders, up to two levels below, that this user may not read: a run in them would not be seen."""
    every = {each for path in paths for each in (path, *path.glob("*/"), *path.glob("*/*/")) if each.is_dir()}
    return sorted(each for each in every if not os.access(each, os.R_OK | os.X_OK))


def _is_run(path: Path) -> bool:
    return RunFolder(path).info_path.exists()


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """List the run folders at the paths and up to two levels below. InputError for a path that has none.

    Each is listed once, whatever links lead to it.
    """
    folders: dict[str, RunFolder] = {}
    for path in paths:
        below = [info.parent for info in [*path.glob("run.json"), *path.glob("*/run.json"), *path.glob("*/*/run.json")]]
        if not path.exists():
            raise InputError(f"{path}: does not exist; expected a run folder, or a folder of run folders")
        if not below:
            raise InputError(f"{path}: not a run folder, and none in the two levels below (no run.json)")
        outermost = [folder for folder in below if set(below).isdisjoint(folder.parents)]  # a run holds no other run
        # Real paths sort before links, so that a folder is listed under its own name.
        for folder in sorted(outermost, key=lambda each: (os.path.realpath(each) != os.path.abspath(each), each)):  # noqa: PTH100
            folders.setdefault(os.path.realpath(folder), RunFolder(folder))
    return sorted(folders.values(), key=lambda folder: folder.root)


def read_folder_status(folder: RunFolder, *, now_s: float) -> list[TrialStatus]:
    """Read one row per trial of a run folder. InputError if its run.json is damaged. A damaged log is one row."""
    info = folder.read_info()
    job = read_job_status(folder.root, info.runs)
    expectation = find_expectation(folder)
    signs = [_read_attempt_state(folder, trial, job.of(trial), now_s) for trial in range(info.runs)]
    # A launcher was here, and none is alive
    over = any(sign != AttemptState() for sign in signs) and not any(sign.alive for sign in signs)
    rows, waits = [], any(sign.alive for sign in signs)
    age_s = 0.0 if waits else now_s - _read_created_s(folder, info)
    for trial, sign in enumerate(signs):
        try:
            rows.append(_read_trial_status(folder, trial, job.of(trial), sign, expectation, now_s, age_s))
        except OSError as error:  # a log that cannot be read, or is larger than the limits
            rows.append(TrialStatus(str(folder.root), trial, UNREADABLE, note=render_error(error)))
    if over and not job.ids:  # the local series has ended: what has no log was not started
        rows = [replace(row, state="incomplete", note="not started") if row.state == "queued" else row for row in rows]
    known = {folder.result(trial) for trial in range(info.runs)}
    counted = set(folder.results())
    text = "{} is the log of no trial of run.json; check, score and package {}"
    return rows + [
        TrialStatus(
            str(folder.root),
            None,
            EXTRA,
            note=text.format(path.name, "count it" if path in counted else "leave it out"),
        )
        for path in sorted(folder.root.glob("result_*.txt"))
        if path not in known
    ]


def _read_attempt_state(folder: RunFolder, trial: int, job: JobStatus, now_s: float) -> AttemptState:
    """Read what is known of the last attempt at a trial. It lives if its lock has an owner who lives."""
    sign = read_attempt_state(folder, trial, now_s=now_s)
    owner = find_living_owner(folder.lock(trial))
    # On another node an owner counts as living for a while after it was killed: the scheduler knows it at once.
    ended = owner is not None and job.ended and owner.job in job.ids
    # What a script left that was stopped from outside is not the end of a trial that waits for its next start.
    if sign.code not in WORKER_CODES and job.ended is False:
        sign = replace(sign, code=None)
    return sign if owner is None or ended else replace(sign, alive=True)


def read_job_status(root: Path, trials: int = 0) -> JobStatus:
    """Return the state of a folder's most active job, or of the last one if all have ended. Empty without a job.

    Tasks of an array are those of the first ``trials`` trials.
    """
    # A job that was requeued or resubmitted by hand is not in job.json, but its script left a file.
    info = RunFolder(root).read_job()
    known = {job for job in info.job_ids if job.isdecimal()} if info else set()
    ids = tuple(sorted(known | queue.list_started_jobs(root), key=int))
    if not ids:
        return JobStatus()
    dialect = _load_dialect(info.kind if info else queue.find_kind(root))
    states = queue.fetch_job_states(ids, dialect)
    # The jobs of a chain: one that runs says more than those that wait for it.
    active = [job for job in ids if queue.is_active(states.get(job))]
    if active:
        job = min(active, key=lambda job: queue.rank_activity(states[job]))
        return JobStatus(ids, states[job], ended=False, tasks=_read_task_states(root, ids, job, states, trials))
    if any(states.get(job) == NOT_KNOWN and queue.may_be_running(root, job) for job in ids):
        return JobStatus(ids, NOT_KNOWN, scheduler=dialect.TITLE)
    # Job ids rise, so the last one is the newest job.
    codes = queue.list_exit_codes(root, ids[-1])
    state = f"exit {max(codes.values())}" if codes else states.get(ids[-1], "gone")
    return JobStatus(ids, state, ended=True, tasks=_read_task_states(root, ids, ids[-1], states, trials))


def _load_dialect(kind: str | None) -> Dialect:
    """Load the dialect of a run folder's jobs. A folder that names none, or one that is not here, is taken for
    Slurm's.
    """
    return load_dialect(kind if kind in list_kinds() else "slurm")


def _read_task_states(
    root: Path, ids: tuple[str, ...], job: str, states: Mapping[str, str], trials: int
) -> dict[int, JobStatus]:
    """Return the state of each task of a job: the queue's if it is active, else that of its exit file. Empty: no
    array.
    """
    codes, tasks = queue.list_exit_codes(root, job), {}
    if not any(name.startswith(f"{job}_") for name in states) and set(codes) <= {None}:
        return {}
    for trial in range(trials):
        state = states.get(f"{job}_{trial}")
        if queue.is_active(state):
            tasks[trial] = JobStatus(ids, state, ended=False)
        else:
            tasks[trial] = JobStatus(ids, f"exit {codes[trial]}" if trial in codes else state or "gone", ended=True)
    return tasks


def judge_trial(
    record: RunRecord | None, job: JobStatus, silent_s: float, *, resumable: bool, sign: AttemptState
) -> tuple[str, str]:
    """Judge a trial by its last log, its job, its launcher and the age of its files. Return state and note."""
    if record is not None and record.status == "success":
        return "finished", _describe_finished(record)
    stopped = _has_stopped(record)
    # What is certain comes first: a process that lives, a log with an end, what the launcher left behind. The queue
    # only knows the job, not the trial, and the age of files is the last resort.
    if sign.alive or (job.state == "RUNNING" and sign.code is None and not stopped):
        return _judge_running(record, silent_s, launched=bool(sign.alive))
    if stopped:
        return "aborted", "can be resumed" if resumable else ""
    if sign.code is not None or sign.alive is False:
        whole = sign.code in (ExitCode.OK, ExitCode.STOPPED)  # codes of a run that trained and wrote its end
        if whole and not _has_begun(record):
            return UNREADABLE, f"its log {'is missing' if record is None else 'lacks the run'}: exit code {sign.code}"
        if whole:
            return "incomplete", f"exit code {sign.code}, but {_CUT}{'; can be resumed' if resumable else ''}"
        return _judge_ended(sign, begun=_has_begun(record), resumable=resumable)
    if record is None:
        return _judge_unlogged(job, silent_s)
    return _judge_by_job(record, job, silent_s, resumable=resumable)


_CUT = "its log ends before run_stop: cut short, or copied while it ran"


def _describe_finished(record: RunRecord) -> str:
    notes = []
    if record.resumed:
        notes.append("resumed, not scored")
    if record.company is not None:
        notes.append(record.company.text)
    return "; ".join(notes)


def _judge_running(record: RunRecord | None, silent_s: float, *, launched: bool) -> tuple[str, str]:
    """Judge a trial whose launcher or job runs. Without a launcher the job may still run an earlier trial."""
    if record is None and not launched:
        return "queued", ""
    return "running", _describe_silence(silent_s) or ("" if _has_begun(record) else "starting")


def _judge_ended(sign: AttemptState, *, begun: bool, resumable: bool) -> tuple[str, str]:
    """Judge a trial whose launcher left an exit code, or left nothing because it was killed."""
    # The launcher's code without a run_start: the trial failed before training.
    if sign.code is not None and not begun:
        return "aborted", f"exit code {sign.code} before it began"
    how = "its launcher has gone" if sign.code is None else f"exit code {sign.code}"
    if resumable:
        return "killed", f"{how}; can be resumed"
    return "killed", f"{how}; {'log has no end' if begun else 'it never began'}"


def _judge_unlogged(job: JobStatus, silent_s: float) -> tuple[str, str]:
    """Judge a trial without a log and without a launcher on this machine. ``silent_s``: the age of its run folder."""
    if not job.ids and silent_s > STALE_S:
        return "incomplete", "no log, and no process or job that would write it"
    # None: the scheduler does not answer, or there is no job.
    if job.ended is None:
        return "queued", "; ".join(filter(None, ("no log yet", _describe_no_answer(job))))
    return ("incomplete", "no log") if job.ended else ("queued", "")


def _judge_by_job(record: RunRecord, job: JobStatus, silent_s: float, *, resumable: bool) -> tuple[str, str]:
    """Judge a trial whose log has no end by its job, or without one by the age of its files."""
    if job.ended is False:
        return "queued", "to be resumed" if resumable else "log has no end"
    if job.ended:
        return "killed", "log has no end" if _has_begun(record) else "it never began"
    if not job.ids:  # whatever writes a log holds the lock of its trial
        return "incomplete", f"{_CUT if _has_begun(record) else 'its log ends before run_start'}; no process holds it"
    if silent_s < STALE_S:
        return "running", "; ".join(filter(None, (_describe_silence(silent_s), _describe_no_answer(job))))
    return "incomplete", "; ".join(
        filter(None, (f"log has no end, {_describe_silence(silent_s)}", _describe_no_answer(job)))
    )


def _describe_no_answer(job: JobStatus) -> str:
    return f"{job.scheduler} does not answer here: whether job {job.ids[-1]} goes on is not known" if job.ids else ""


def _has_begun(record: RunRecord | None) -> bool:
    return record is not None and record.run_start_s is not None


def _has_stopped(record: RunRecord | None) -> bool:
    return record is not None and record.run_stop_s is not None


def _describe_silence(silent_s: float) -> str:
    """Say how long a trial wrote nothing. Empty for a pause that is usual between lines of a log."""
    return f"silent for {render_duration(silent_s)}" if silent_s > SHOWN_SILENCE_S else ""


def render_table(rows: Sequence[TrialStatus]) -> list[list[str]]:
    """Render header and rows as text, padded to columns."""
    lines = [["run", "trial", "state", "epoch", "last eval", "target", "time left", "job", "note"]]
    lines += [_render_row(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]


def _render_row(row: TrialStatus) -> list[str]:
    return [
        row.run,
        "-" if row.trial is None else str(row.trial),
        row.state,
        "-" if row.epoch is None else str(row.epoch),
        _render_value(row),
        "-" if row.target is None else f"{row.target:g}",
        "-" if row.eta_s is None else f"{render_duration(row.eta_s)} ({row.eta_source})",
        "-" if row.job is None else f"{row.job} {row.job_state}",
        row.note,
    ]


def _render_value(row: TrialStatus) -> str:
    if row.value is None:
        return "-"
    return f"{row.value:.4g}" if row.target is None else render_metric_value(row.value, row.target, "g")


def _read_trial_status(
    folder: RunFolder,
    trial: int,
    job: JobStatus,
    sign: AttemptState,
    expectation: Expectation | None,
    now_s: float,
    age_s: float,
) -> TrialStatus:
    log = find_newest_log(folder, trial)
    newest = find_newest_run_log(folder, trial) or log
    record = None if newest is None else summarise_log(read_events(newest))
    written_s = max(_read_mtime_s(log), _read_mtime_s(folder.output(trial)))
    silent_s = now_s - written_s if written_s else age_s
    state, note = judge_trial(record, job, silent_s, resumable=folder.checkpoint(trial).exists(), sign=sign)
    # A note must not promise that a run can be resumed from a damaged checkpoint.
    if "resumed" in note and state != "finished" and (damage := find_damage_quickly(folder.checkpoint(trial))):
        state, note = judge_trial(record, job, silent_s, resumable=False, sign=sign)
        note = "; ".join(filter(None, (note, f"cannot be resumed: {damage}; --resume {REPLACE} runs it again")))
    epoch, value, eta_s, source = None, None, None, None
    if record is not None:
        epoch = max((int(item.number) for item in record.epochs if item.number is not None), default=None)
        value = record.evals[-1].value if record.evals else None
        if state == "running" and expectation is not None:
            eta_s = estimate_eta_s(record, expectation.epochs, now_s)
            source = None if eta_s is None else expectation.epochs.source.partition(",")[0]
    return TrialStatus(
        run=str(folder.root),
        trial=trial,
        state=state,
        epoch=epoch,
        value=value,
        target=expectation.card.threshold if expectation else None,
        eta_s=eta_s,
        eta_source=source,
        job=",".join(job.ids) or None,
        job_state=job.state,
        note=note,
    )


def _read_created_s(folder: RunFolder, info: RunInfo) -> float:
    """Return when a run folder was made, in Unix seconds. A copy has the times of its copying."""
    try:
        return datetime.fromisoformat(info.created).timestamp()
    except ValueError:
        return _read_mtime_s(folder.info_path)


def _read_mtime_s(path: Path | None) -> float:
    """Return the time of the last change of a file; 0 without a file."""
    try:
        return path.stat().st_mtime if path is not None else 0.0
    except OSError:
        return 0.0


def _print_table(rows: Sequence[TrialStatus]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {
        "finished": "green",
        "running": "cyan",
        "queued": "dim",
        "killed": "red",
        "aborted": "red",
        "unreadable": "red",
    }
    console = Console()
    head, *lines = render_table(rows)
    apart = len("  ".join(head)) + 2 > console.width  # then a sentence would stand in a column of a few characters
    shown = len(head) - apart
    screen = Table(*(name.strip() for name in head[:shown]), box=None, header_style="bold")
    for row, line in zip(rows, lines, strict=True):
        cells = [Text(render_printable(text.strip())) for text in line[:shown]]  # never markup: a name may hold "[/]"
        cells[2].stylize(colors.get(row.state, "yellow"))
        screen.add_row(*cells)
    console.print(screen)
    for note in _list_notes(rows) if apart else ():
        print_line(render_printable(note))


def _list_notes(rows: Sequence[TrialStatus]) -> Iterator[str]:
    """Yield the notes as lines. Trials of a run with the same note share a line."""
    trials: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note:
            trials.setdefault((row.run, row.note), []).extend([] if row.trial is None else [str(row.trial)])
    for (run, note), numbers in trials.items():
        where = f" {'trial' if len(numbers) == 1 else 'trials'} {', '.join(numbers)}" if numbers else ""
        yield f"{run}{where}: {note}"
