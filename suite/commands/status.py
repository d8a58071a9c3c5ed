"""`mlhpc status`: what each trial of a run folder is doing, from its log and, for Slurm, from the queue. Reads only."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import yaml

from suite.card import SizeCard, read_reference_points
from suite.descriptor import descriptor
from suite.launch import jobs
from suite.launch.cost import Epochs, duration, expected_epochs
from suite.log.reader import read_events
from suite.log.record import RunRecord, summarise
from suite.log.run_folder import RunFolder, RunInfo

STALE_S = 300.0  # a local run whose log and output are silent for so long is not running any more
DEFAULT_ROOT = Path("runs")


@dataclass(frozen=True)
class TrialStatus:
    """One row. ``state``: queued, running, finished (target reached), aborted, killed, incomplete.

    ``eta_s`` seconds from now to the expected end, ``eta_source`` what it assumes; None where nothing is known.
    """

    run: str
    trial: int
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
class Expectation:
    """What a size is judged by and how long it should take; absent for a workload that is not installed here."""

    card: SizeCard
    epochs: Epochs


@dataclass(frozen=True)
class JobStatus:
    """The jobs of a run folder: ``state`` is the queue's, or ``exit N``, or ``gone``; ``ended`` None: not Slurm."""

    ids: tuple[str, ...] = ()
    state: str | None = None
    ended: bool | None = None


@click.command(
    epilog="""\b
Examples:
  mlhpc status                      every run under runs/
  mlhpc status runs/mine --json
"""
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON list on standard output.")
def status(paths: tuple[Path, ...], as_json: bool) -> None:
    """Show runs and jobs: state, epoch, last evaluation against the target, time left."""
    rows = [row for folder in find_runs(paths or (DEFAULT_ROOT,)) for row in folder_status(folder, now_s=time.time())]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif sys.stdout.isatty():
        _print_table(rows)
    else:
        for line in table(rows):
            click.echo(" ".join(line).rstrip())


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """The run folders among the paths and below them, in order. ValueError for a path that holds none."""
    found = []
    for path in paths:
        below = sorted(
            info.parent for info in [*path.glob("run.json"), *path.glob("*/run.json"), *path.glob("*/*/run.json")]
        )
        if not below:
            raise ValueError(f"{path}: no run folder here (no run.json, nor in the two levels below)")
        found += [RunFolder(folder) for folder in below]
    return found


def folder_status(folder: RunFolder, *, now_s: float) -> list[TrialStatus]:
    """One row per trial of a run folder. ValueError if its run.json is damaged."""
    info = folder.read_info()
    job = job_status(folder.root)
    expectation = _expectation(folder, info)
    return [_trial(folder, trial, job, expectation, now_s) for trial in range(info.runs)]


def job_status(root: Path) -> JobStatus:
    """What is known of the folder's jobs; empty if none was submitted or began. Ended: the last one speaks."""
    ids = tuple(sorted(_submitted(root) | jobs.started_jobs(root), key=int))
    if not ids:
        return JobStatus()
    states = jobs.job_states(ids)
    active = [states[job] for job in ids if states.get(job) in jobs.ACTIVE_STATES]
    if active:
        return JobStatus(ids, min(active, key=jobs.ACTIVE_STATES.index), ended=False)
    codes = jobs.exit_codes(root, ids[-1])
    if codes:
        return JobStatus(ids, f"exit {max(codes)}", ended=True)
    return JobStatus(ids, states.get(ids[-1], "gone"), ended=True)


def judge(record: RunRecord | None, job: JobStatus, silent_s: float, *, resumable: bool) -> tuple[str, str]:
    """State of a trial and a note, from its newest log, its job and how long its files have been silent."""
    if record is None:
        if job.ended is False:
            return "queued", ""
        return ("incomplete", "no log") if job.ended else ("queued", "no log yet")
    if record.status == "success":
        return "finished", "resumed, not scored" if record.resumed else ""
    if record.run_stop_s is not None:
        return "aborted", "can be resumed" if resumable else ""
    if job.ended is False:
        return (
            ("running", "")
            if job.state != "PENDING"
            else ("queued", "to be resumed" if resumable else "log has no end")
        )
    if job.ended:
        return "killed", "log has no end"
    if silent_s < STALE_S:
        return "running", ""
    return "incomplete", f"log has no end, silent for {duration(silent_s)}"


def eta(record: RunRecord, expected: Epochs, now_s: float) -> float | None:
    """Seconds to the expected end of a running trial: epochs that remain at the mean time of those complete."""
    complete = [epoch for epoch in record.epochs if epoch.complete]
    if not complete or record.run_start_s is None:
        return None
    epoch_s = sum(epoch.stop_s - epoch.start_s for epoch in complete) / len(complete)
    done = max((epoch.number or 0.0 for epoch in complete), default=0.0)
    since_s = max(0.0, now_s - record.run_start_s - complete[-1].stop_s)
    return max(0.0, (expected.count - done) * epoch_s - since_s)


def table(rows: Sequence[TrialStatus]) -> list[list[str]]:
    """Header and rows as text, padded to columns."""
    lines = [["run", "trial", "state", "epoch", "last eval", "target", "time left", "job", "note"]]
    lines += [_texts(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]


def _texts(row: TrialStatus) -> list[str]:
    return [
        row.run,
        str(row.trial),
        row.state,
        "-" if row.epoch is None else str(row.epoch),
        "-" if row.value is None else f"{row.value:.4g}",
        "-" if row.target is None else f"{row.target:g}",
        "-" if row.eta_s is None else f"{duration(row.eta_s)} ({row.eta_source})",
        "-" if row.job is None else f"{row.job} {row.job_state}",
        row.note,
    ]


def _submitted(root: Path) -> set[str]:
    """The ids in job.json; none if it is absent or is being written."""
    try:
        ids = json.loads((root / "job.json").read_text())["job_ids"]
        return {str(item) for item in ids if str(item).isdecimal()}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _trial(folder: RunFolder, trial: int, job: JobStatus, expectation: Expectation | None, now_s: float) -> TrialStatus:
    log = _newest_log(folder, trial)
    record = _read(log)
    silent_s = now_s - max((_modified_s(path) for path in (log, folder.output(trial)) if path), default=0.0)
    state, note = judge(record, job, silent_s, resumable=folder.checkpoint(trial).exists())
    epoch, value, eta_s, source = None, None, None, None
    if record is not None:
        epoch = max((int(item.number) for item in record.epochs if item.number is not None), default=None)
        value = record.evals[-1].value if record.evals else None
        if state == "running" and expectation is not None:
            eta_s = eta(record, expectation.epochs, now_s)
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


def _newest_log(folder: RunFolder, trial: int) -> Path | None:
    """The last continuation of a trial, else its first log, else None."""
    numbers = {
        int(match[1]): path
        for path in folder.root.glob(f"resumed_{trial}_*.txt")
        if (match := re.fullmatch(rf"resumed_{trial}_(\d+)\.txt", path.name))
    }
    if numbers:
        return numbers[max(numbers)]
    return folder.result(trial) if folder.result(trial).exists() else None


def _read(log: Path | None) -> RunRecord | None:
    """The record of a log that may be cut anywhere; None if it vanished or cannot be read."""
    try:
        return None if log is None else summarise(read_events(log))
    except OSError:
        return None


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _expectation(folder: RunFolder, info: RunInfo) -> Expectation | None:
    try:
        chosen = descriptor(info.workload)
        card = chosen.card().size(info.size)
    except ValueError:
        return None  # a workload of someone else's: its log is shown all the same
    config = _config(folder.config_path)
    max_epochs, batch = config.get("max_epochs"), config.get("global_batch_size")
    points = read_reference_points(chosen.folder, info.size)
    limit = max_epochs if isinstance(max_epochs, int) else sys.maxsize
    return Expectation(card, expected_epochs(points, batch if isinstance(batch, int) else 0, limit))


def _config(path: Path) -> Mapping[str, object]:
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def _print_table(rows: Sequence[TrialStatus]) -> None:
    from rich.console import Console
    from rich.table import Table

    colors = {"finished": "green", "running": "cyan", "queued": "dim", "killed": "red", "aborted": "red"}
    head, *lines = table(rows)
    shown = Table(*(name.strip() for name in head), box=None, header_style="bold")
    for row, line in zip(rows, lines, strict=True):
        cells = [text.strip() for text in line]
        cells[2] = f"[{colors.get(row.state, 'yellow')}]{cells[2]}[/]"
        shown.add_row(*cells)
    Console().print(shown)
