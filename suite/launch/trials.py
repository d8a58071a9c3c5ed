"""Runs trials in sequence on this machine. Shows their progress as a bar on a terminal, else as lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from mlhpc.suite.data.lock import LockedError, refuse_held
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import QUIET, print_line, print_progress, render_reason, write_file_atomically
from mlhpc.suite.launch.estimates import SeriesTimeEstimator, find_expectation
from mlhpc.suite.launch.local import keep_heartbeat, make_worker_command, read_exit_code, run_local
from mlhpc.suite.launcher import BEGAN, ENDED
from mlhpc.suite.log.run_folder import ResumeDecision, RunFolder, find_newest_log, has_run_start, plan_resume

STOPPED_EARLY = "was stopped before it began"
ENDING_S = 10.0  # so long a killed rank may take to end


def run_trials(
    workload: str,
    folder: RunFolder,
    trials: Sequence[int],
    *,
    ranks: int,
    mode: str,
    seed: int | None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    replace_failed: bool = False,
    before_each: Callable[[Callable[[str], None]], None] = lambda tell: None,
) -> int:
    """Run the trials with the folder's config in a mode, keep the exit code of each, and return the worst.

    A stop, a usage error or a trial that failed before run_start ends the series. The next trial would fail too. A stop
    signal that comes when a trial's ranks are done also ends it.

    ``overrides`` apply to a trial that is added to a folder with an older config. With ``resume``, trials that are done
    stay as they are and count with their own exit codes. So do trials that failed, unless they are to be replaced.
    ``before_each`` is called before each trial that starts, with a function that shows a line.

    LockedError before anything is written if another process runs one of the trials.
    """
    for trial in trials:
        _refuse_running(folder, trial)
    codes: list[int] = []
    stops: list[int] = []  # signals to this process
    # One clock for the series: later trials are predicted from earlier ones.
    clock = _make_time_estimator(folder, len(trials))
    with (
        _TerminalProgress(len(trials))
        if sys.stdout.isatty() and not os.environ.get(QUIET)
        else _PlainProgress() as progress
    ):
        for trial in trials:
            way = plan_resume(folder, trial, replace_failed=replace_failed) if resume else ResumeDecision()
            if way.code is not None:
                progress.line(trial, way.text)
                progress.done(trial)
                clock.end(reached=False)
                codes.append(way.code)
                continue
            before_each(partial(progress.line, trial))
            command = make_worker_command(
                workload,
                config=str(folder.config_path),
                run=folder.root,
                trial=trial,
                mode=mode,
                seed=seed,
                overrides=overrides,
                resume=resume,
                replace_failed=replace_failed,
            )
            _refuse_running(folder, trial)
            with keep_heartbeat(folder.running(trial), f"trial {trial}") as is_lost:
                times = {BEGAN: str(time.time()), ENDED: _read_mtime(folder.exit_code(trial))}
                # If this launcher is killed, the code of an earlier attempt would count for this one.
                folder.exit_code(trial).unlink(missing_ok=True)
                code = run_local(
                    command,
                    environ=os.environ | times,
                    ranks=ranks,
                    log=folder.output(trial),
                    say=progress.say,
                    echo=partial(_show_line, progress, clock, trial),
                    read_told=partial(_read_told, folder.exit_code(trial), is_lost),
                    on_stop=stops.append,
                )
                if not is_lost():  # the exit code of a trial that somebody else runs is not ours to write
                    _write_exit_code(folder, trial, code, progress.say)
            progress.done(trial)
            clock.end(reached=code == ExitCode.OK)
            codes.append(code)
            left = len(trials) - len(codes)
            why = _explain_series_end(folder, trial, code, stopped=bool(stops))
            if why and (left or why == STOPPED_EARLY):
                rest = f": {left} more run{'s' if left > 1 else ''} not started" if left else ""
                progress.say(f"run {trial} {why}{rest}")
                return _choose_exit_code(folder, trial, codes, stops, left=left)
    return _choose_exit_code(folder, trial, codes, stops, left=0)


def _read_told(path: Path, is_lost: Callable[[], bool]) -> int | None:
    """Read the exit code that rank 0 left. A process that took the trial over leaves its own there."""
    return None if is_lost() else read_exit_code(path)


def _read_mtime(path: Path) -> str:
    """Return when a file was written, in Unix seconds; "" without one."""
    try:
        return str(path.stat().st_mtime)
    except OSError:
        return ""


def _explain_series_end(folder: RunFolder, trial: int, code: int, *, stopped: bool) -> str | None:
    """Return why a trial with this exit code is the last of its series, or None. ``stopped``: a signal came."""
    if code == ExitCode.FAILED and _has_not_begun(folder, trial):
        return STOPPED_EARLY if stopped else "failed before it began"
    if stopped and code == ExitCode.OK:
        return "was done when a signal came"
    return (
        f"ended with exit code {code}"
        if stopped or code in (ExitCode.STOPPED, ExitCode.USAGE, ExitCode.TAKEN_OVER)
        else None
    )


def _make_time_estimator(folder: RunFolder, trials: int) -> SeriesTimeEstimator:
    expected = find_expectation(folder)
    return SeriesTimeEstimator(trials, expected.epochs if expected else None, time.monotonic)


def _show_line(progress: _PlainProgress | _TerminalProgress, clock: SeriesTimeEstimator, trial: int, text: str) -> None:
    """Show a line of the ranks. If it names an epoch, the series' time left follows."""
    left = clock.line(text)
    progress.line(trial, f"{text}; {left}" if left else text)


def _refuse_running(folder: RunFolder, trial: int) -> None:
    """Raise LockedError if ranks of another launcher or job run a trial, or another launcher holds it."""
    for path in (folder.lock(trial), folder.running(trial)):
        refuse_held(path, f"trial {trial}")


def _write_exit_code(folder: RunFolder, trial: int, code: int, say: Callable[[str], None]) -> None:
    """Write a trial's exit code. A full disk costs the file, not the series.

    If another process holds the trial, our ranks were refused, and the exit code is not the trial's.
    """
    path = folder.exit_code(trial)
    # Our own killed ranks may still hold the lock: on a busy machine they take seconds to end.
    deadline = time.monotonic() + (0.0 if code == ExitCode.USAGE else ENDING_S)
    while _is_held(folder, trial):
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    try:
        write_file_atomically(path, f"{code}\n")
    except OSError as error:
        say(f"{path}: exit code {code} cannot be kept: {render_reason(error)}")


def _is_held(folder: RunFolder, trial: int) -> bool:
    try:
        refuse_held(folder.lock(trial), f"trial {trial}")
    except LockedError:
        return True
    return False


def _choose_exit_code(folder: RunFolder, trial: int, codes: Sequence[int], stops: Sequence[int], *, left: int) -> int:
    """Return the exit code of a series that ends with this trial.

    It is 128 + signal if a signal stopped the trial before it began.
    """
    if stops and codes[-1] == ExitCode.FAILED and _has_not_begun(folder, trial):
        return 128 + stops[0]
    return select_worst_exit_code([*codes, *([ExitCode.STOPPED] if stops and left else [])])


def _has_not_begun(folder: RunFolder, trial: int) -> bool:
    log = find_newest_log(folder, trial)
    return log is None or not has_run_start(log)


def select_worst_exit_code(codes: Iterable[int]) -> int:
    """Return the most important exit code: stopped, then usage, then failed, then 0."""
    present = set(codes)
    urgent = (ExitCode.STOPPED, ExitCode.USAGE, ExitCode.TAKEN_OVER, ExitCode.FAILED)
    return next((code for code in urgent if code in present), ExitCode.OK)


class _PlainProgress:
    def __enter__(self) -> _PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, trial: int, text: str) -> None:
        print_progress(f"run {trial}: {text}")

    def say(self, text: str) -> None:
        print_line(f"mlhpc: {text}", error=True)

    def done(self, trial: int) -> None:
        pass


class _TerminalProgress:
    """Shows a progress bar over the trials, with the newest line next to it.

    The last line of each finished trial stays above the bar.
    """

    def __init__(self, trials: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("runs"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._task = self._progress.add_task("starting", total=trials)
        self._last = ""

    def __enter__(self) -> _TerminalProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def line(self, trial: int, text: str) -> None:
        self._last = text
        self._progress.update(self._task, description=f"run {trial}: {text}", refresh=True)

    def say(self, text: str) -> None:
        # A path may hold square brackets, which rich would take for markup.
        self._progress.console.print(f"mlhpc: {text}", style="red", highlight=False, markup=False)

    def done(self, trial: int) -> None:
        self._progress.console.print(f"run {trial}: {self._last}", highlight=False, markup=False)
        self._progress.advance(self._task)
