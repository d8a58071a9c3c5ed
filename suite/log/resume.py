"""Decides how a trial goes on when its run folder is continued: it starts, resumes from its checkpoint, or stays as it
is.

A log that never reached run_start is no run: it is moved aside and the trial starts afresh. A run that began and failed
counts, as the rules ask. It is replaced only if the user asks for it, and the new log states that. A checkpoint with a
damaged file counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.run_folder import RunFolder

REPLACE = "--replace-failed"


@dataclass(frozen=True)
class ResumeDecision:
    """How a trial goes on.

    ``code``: it stays as it is and counts with this exit code; None: it runs. ``resume``: from its checkpoint.
    ``text``: one line for people, or empty.
    """

    code: int | None = None
    resume: bool = False
    text: str = ""


def find_newest_log(folder: RunFolder, trial: int) -> Path | None:
    """Find the log of a trial's last continuation, else its first log. None if there is none."""
    logs = [path for path in (folder.result(trial), *folder.resumed(trial)) if path.exists()]
    return logs[-1] if logs else None


def find_newest_run_log(folder: RunFolder, trial: int) -> Path | None:
    """Find the newest log of a trial that reached run_start. None if none did."""
    logs = [path for path in (folder.result(trial), *folder.resumed(trial)) if path.exists() and has_run_start(path)]
    return logs[-1] if logs else None


def has_run_start(log: Path) -> bool:
    """Return True if a log reached run_start. From then on it is a run that counts."""
    return read_events(log).first(mllog.RUN_START) is not None


def plan_resume(
    folder: RunFolder, trial: int, *, replace_failed: bool = False, damage: str | None = None
) -> ResumeDecision:
    """Decide how a trial goes on. Changes nothing.

    ``damage``: why its checkpoint cannot be used (`mlhpc.suite.log.checkpoint_index.find_damage`), in one line.
    """
    log = find_newest_run_log(folder, trial)
    record = None if log is None else summarise_log(read_events(log))
    if log is not None and record is not None and record.status == "success":
        return ResumeDecision(code=0, text=f"finished already, left as it is ({log.name})")
    if damage is None and folder.checkpoint(trial).exists():
        return ResumeDecision(resume=True)
    cannot = f"cannot be resumed ({damage})" if damage else ""
    if log is None or record is None:
        return ResumeDecision(text=cannot and f"{cannot}, so it starts afresh")
    why = "has no end" if record.run_stop_s is None else f"ended with status {record.status}"
    why = f"({log.name} {why})" + (f" and {cannot}" if cannot else "")
    if replace_failed:
        return ResumeDecision(text=f"replaces a run that began and failed {why}")
    return ResumeDecision(
        code=1, text=f"began and failed {why}, which counts, so left as it is; {REPLACE} runs it again"
    )


def plan_and_prepare_resume(
    folder: RunFolder, trial: int, *, replace_failed: bool = False, damage: str | None = None
) -> ResumeDecision:
    """Decide how a trial goes on, and move aside the logs of failed attempts and a damaged checkpoint.

    Only the process that owns the trial may call it: nobody else may be writing its logs. OSError if a file cannot be
    moved.
    """
    way = plan_resume(folder, trial, replace_failed=replace_failed, damage=damage)
    if way.code is not None:
        return way
    logs = [path for path in (folder.result(trial), *folder.resumed(trial)) if path.exists()]
    aside = [folder.move_aside(path, trial) for path in logs if not (way.resume and has_run_start(path))]
    moved = (
        f"earlier log{'s' if len(aside) > 1 else ''} kept as {', '.join(path.name for path in aside)}" if aside else ""
    )
    kept = f"damaged checkpoint kept in {folder.move_checkpoint_aside(trial)}" if damage else ""
    return ResumeDecision(resume=way.resume, text="; ".join(filter(None, (way.text, moved, kept))))


def list_replaced_runs(folder: RunFolder, trial: int) -> list[Path]:
    """List the logs of a trial that were moved aside although they had begun. They would have counted."""
    return [path for path in folder.failed(trial) if has_run_start(path)]
