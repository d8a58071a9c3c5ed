"""Runs the turns of a contest as `mlhpc run` processes, one at a time. Results are read from the logs only."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.errors import ExitCode, InputError
from mlhpc.suite.files import print_line, render_duration
from mlhpc.suite.launch.local import make_suite_command
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Log, convert_to_float, read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.score import find_failure
from mlhpc.suite.performance.ab.contest import Contest, Journal, StartedRun, read_contest
from mlhpc.suite.processes import make_parent_death_hook
from mlhpc.suite.statistics.blocks import Turn
from mlhpc.suite.statistics.race import Race, run_race

# Added to a run's limit for its start-up, and given to it to end: `mlhpc run` gives its ranks 30 s for that.
GRACE_S = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class RunResult:
    """A run that was started.

    ``value`` is the objective in seconds; infinite if the run did not finish, with the reason ``why``.
    """

    turn: Turn
    value: float
    why: str = ""
    record: RunRecord | None = None
    log: Log | None = field(default=None, repr=False)
    log_sha256: str | None = None

    @property
    def finished(self) -> bool:
        """True if it reached the target within its budget."""
        return math.isfinite(self.value)


def read_result(contest: Contest, turn: Turn) -> RunResult:
    """Read the result of a turn. A run with an unreadable log did not finish: nothing in the folder raises."""
    folder = contest.run(turn)
    path = folder.result(0)
    if any(each.is_symlink() for each in (path, folder.root, folder.root.parent, folder.root.parent.parent)):
        return RunResult(turn, math.inf, "is a symbolic link, which is not followed")
    if not path.is_file():
        return RunResult(turn, math.inf, "left no log")
    try:
        log, sha256 = read_events(path, steps=False), compute_sha256(path)
    except OSError as error:
        return RunResult(turn, math.inf, f"its log cannot be read: {error.strerror}")
    record = summarise_log(log, contest.target.metric)
    value, why = _compute_objective(contest, log, record)
    return RunResult(turn, value, why, record, log, sha256)


def _compute_objective(contest: Contest, log: Log, record: RunRecord) -> tuple[float, str]:
    """Return the objective, or infinity and the reason."""
    if why := find_failure(record, contest.target):
        return math.inf, why
    limit_s, seconds = contest.settings.run_limit_s, record.time_to_train_s or 0.0
    if record.status != "success" or seconds > limit_s:
        return (
            math.inf,
            f"status is {record.status!r}, after {render_duration(seconds)} of a budget of {render_duration(limit_s)}",
        )
    if contest.settings.objective == "time_to_train":
        return seconds, ""
    cpu_s = sum_cpu_seconds(log)
    return (cpu_s, "") if cpu_s else (math.inf, "its log has no CPU seconds of the ranks")


def sum_cpu_seconds(log: Log) -> float | None:
    """Compute the ranks' CPU seconds from run_start to run_stop; None if the log does not list every node."""
    event = log.first(mllog.OTHER_WORK)
    if event is None or not isinstance(event.value, list) or len(event.value) != event.metadata.get("nodes"):
        return None
    each = [convert_to_float(node.get("own_s")) if isinstance(node, dict) else None for node in event.value]
    seconds = [number for number in each if number is not None and number > 0]
    return math.fsum(seconds) if seconds and len(seconds) == len(each) else None


class ContestStopped(Exception):
    """Raised when the user has asked the contest to end after the present run."""


@dataclass
class Runner:
    """Runs turns. A first signal ends the contest after the present run, a second one ends the run."""

    contest: Contest
    journal: Journal
    tell: Callable[[RunResult], None]
    stopping: bool = False
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def __call__(self, turn: Turn) -> float:
        """Run a turn and return its objective in seconds. Stopped if a signal came before it."""
        if self.stopping:
            raise ContestStopped
        noted = StartedRun(block=turn.block, entry=turn.entry)
        self.journal.runs.append(noted)
        # Before the run begins: if this process is killed, nobody can drop a slow run by starting it again.
        self.contest.write_journal(self.journal)
        noted.exit_code, last = self._execute(run_command(self.contest, turn))
        result = read_result(self.contest, turn)
        noted.ended, noted.log_sha256 = True, result.log_sha256
        self.contest.write_journal(self.journal)
        self.tell(result)
        if noted.exit_code == ExitCode.USAGE:
            where = f"block {turn.block}, entry {turn.entry!r}"
            raise InputError(
                f"{where}: mlhpc run refused to start: {last} (this counts as a run that did not finish; "
                f"after a correction continue with: mlhpc ab runs run {shlex.quote(str(self.contest.root))})"
            )
        return result.value

    def _execute(self, command: list[str]) -> tuple[int, str]:
        """Run a command, and end it after its time limit.

        Returns its exit code and last line of stderr.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A Ctrl-C of the terminal is for the contest, which lets the present run finish.
            start_new_session=True,
            preexec_fn=make_parent_death_hook(os.getpid()),
        )
        with self._process as process:
            try:
                errors = process.communicate(timeout=self.contest.settings.run_limit_s + GRACE_S)[1]
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    errors = process.communicate(timeout=GRACE_S)[1]
                except subprocess.TimeoutExpired:
                    process.kill()
                    errors = process.communicate()[1]
        return process.returncode, (errors.strip().splitlines() or [""])[-1].removeprefix("mlhpc: ")

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.stopping and self._process is not None:
            self._process.terminate()
        elif not self.stopping:
            print_line("mlhpc: the contest ends after this run; once more ends the run, which then counts", error=True)
        self.stopping = True


def run_command(contest: Contest, turn: Turn) -> list[str]:
    """Return the command line of a turn: the entry's configuration, the block's seed, and common settings."""
    settings = contest.settings
    path = contest.path_of(turn.entry)
    words = ["run", settings.workload, "--config", str(path), "--ranks", str(settings.ranks), "--runs", "1"]
    words += ["--seed", str(settings.seed + turn.block), "--output", str(contest.run(turn).root)]
    stated = {"submission.platform": settings.system, "data": settings.data}
    words += [part for key, value in stated.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return make_suite_command(*words, "--quiet")


def run_contest(root: Path, tell: Callable[[RunResult], None]) -> tuple[Race | None, int]:
    """Start or continue a contest. Returns the race (None if a signal ended it) and the number of runs made.

    InputError if another process runs it, if its settings changed, or if a run could not begin.
    """
    contest = read_contest(root)
    settings, rules = contest.settings, contest.rules
    if not (Path(settings.data) / "manifest.json").is_file():
        make = f"mlhpc data generate {settings.workload} --size {settings.size} -o {shlex.quote(str(settings.data))}"
        raise InputError(f"{settings.data}: no data set here; make it with: {make}")
    with create_lock(root / "contest.lock", f"contest {root}"):
        journal = contest.read_journal()
        for text in journal.changed(contest.digests()):
            raise InputError(
                f"{root}: {text}, but all runs of a contest need the same settings; "
                "restore the file, or begin a new contest with: mlhpc ab runs new"
            )
        journal.digests = contest.digests()
        for noted in journal.runs:
            if not noted.ended:  # the contest was killed while it ran: it counts as what its log says
                folder = contest.run(noted.turn)
                if folder.root.is_dir():
                    with create_lock(folder.lock(0), f"block {noted.block}, entry {noted.entry!r}"):
                        pass  # InputError while the run still ends
                noted.ended, noted.log_sha256 = True, read_result(contest, noted.turn).log_sha256
        contest.write_journal(journal)
        known = {noted.turn: read_result(contest, noted.turn).value for noted in journal.runs}
        runner = Runner(contest, journal, tell)
        before = {number: signal.signal(number, runner.stop) for number in SIGNALS}
        try:
            race = run_race(rules, known, runner)
        except ContestStopped:
            return None, len(journal.runs) - len(known)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return race, len(journal.runs) - len(known)
