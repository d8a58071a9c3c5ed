"""Runs the turns of a tournament as `mlhpc run` processes, one at a time. What a run gave is read from its log alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from analysis.tournament.folder import Tournament, read_tournament
from analysis.tournament.journal import ENDED, Journal, read_journal
from analysis.tournament.outcome import Outcome, read_outcome
from analysis.tournament.race import Race, Turn, run_race
from suite.config import default_data_root
from suite.data.lock import locked
from suite.errors import InputError
from suite.exit_codes import ExitCode
from suite.files import print_line
from suite.launch.local import suite_command
from suite.processes import end_with_parent

GRACE_S = 60.0  # for what a run does before run_start; and `mlhpc run` gives its ranks 30 s to end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A person asked the tournament to end after the present run."""


@dataclass
class ProcessRunner:
    """Starts the run of a turn and waits for it. A first signal ends the tournament after this run, a second one ends the run."""

    tournament: Tournament
    journal: Journal
    tell: Callable[[Outcome], None]
    stopping: bool = False
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def __call__(self, turn: Turn) -> float:
        """Run a turn and return its objective in seconds. Stopped if a signal came before it."""
        if self.stopping:
            raise Stopped
        self.journal.start(turn)
        code, last = self._execute(run_command(self.tournament, turn))
        outcome = read_outcome(self.tournament, turn)
        self.journal.end(turn, code, outcome.log_sha256)
        self.tell(outcome)
        if code == ExitCode.USAGE:
            raise InputError(
                f"block {turn.block}, entry {turn.entry!r}: mlhpc run could not begin, which counts: {last}"
            )
        return outcome.value

    def _execute(self, command: list[str]) -> tuple[int, str]:
        """The exit code of a command and the last line of its standard error. It is ended when its time is over."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C of the terminal is for the tournament, which lets the run end
            preexec_fn=end_with_parent(os.getpid()),
        )
        with self._process as process:
            errors = ""
            for limit_s, end in (
                (self.tournament.settings.run_limit_s + GRACE_S, process.terminate),
                (GRACE_S, process.kill),
                (None, process.kill),
            ):
                try:
                    errors = process.communicate(timeout=limit_s)[1]
                    break
                except subprocess.TimeoutExpired:
                    end()
        return process.returncode, (errors.strip().splitlines() or [""])[-1].removeprefix("mlhpc: ")

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.stopping and self._process is not None:
            self._process.terminate()
        elif not self.stopping:
            print_line(
                "mlhpc: the tournament ends after this run; once more ends the run, which then counts", error=True
            )
        self.stopping = True


def run_command(tournament: Tournament, turn: Turn) -> list[str]:
    """The command line of a turn: the entry's configuration, the block's seed, and what the tournament states."""
    settings = tournament.settings
    entry = next(entry for entry in tournament.entries if entry.name == turn.entry)
    words = ["run", settings.workload, "--config", str(entry.path), "--ranks", str(settings.ranks), "--runs", "1"]
    words += [
        "--seed",
        str(tournament.plan.run_seed(turn.block)),
        "--output",
        str(tournament.run(turn.block, turn.entry).root),
    ]
    stated = {"submission.platform": settings.system, "data": str(data_root(tournament))}
    words += [part for key, value in stated.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return suite_command(*words, "--quiet")


def data_root(tournament: Tournament) -> Path:
    """The folder of the data that all runs read."""
    settings = tournament.settings
    return (
        Path(settings.data)
        if settings.data is not None
        else default_data_root(settings.workload, settings.size).absolute()
    )


def run_tournament(root: Path, tell: Callable[[Outcome], None]) -> tuple[Race | None, int]:
    """Run a tournament to its end, or go on with it. Returns the race, None if a signal ended it, and how many runs were made.

    InputError if another process runs it, if it is not as it began, or if a run could not begin.
    """
    tournament = read_tournament(root)
    data = data_root(tournament)
    if not (data / "manifest.json").is_file():
        settings = tournament.settings
        raise InputError(
            f"{data}: no data set here; make it with: mlhpc data generate {settings.workload} --size {settings.size} -o {data}"
        )
    plan = tournament.plan
    with locked(tournament.lock, f"tournament {root}"):
        journal = read_journal(tournament.journal)
        for text in journal.broken:
            raise InputError(f"{root}: {text}")
        journal.open(tournament)
        _close(tournament, journal)
        known = {turn: read_outcome(tournament, turn).value for turn in journal.started()}
        before = len(known)
        runner = ProcessRunner(tournament, journal, tell)
        with _signals(runner.stop):
            try:
                race = run_race(plan, known, runner)
            except Stopped:
                return None, len(journal.started()) - before
        return race, len(journal.started()) - before


def _close(tournament: Tournament, journal: Journal) -> None:
    """Note the end of a run whose tournament was killed: it counts as what its log says. InputError while it still ends."""
    ended = {turn for turn, _ in journal.turns(ENDED)}
    for turn in journal.started():
        if turn not in ended:
            folder = tournament.run(turn.block, turn.entry)
            if folder.root.is_dir():
                with locked(folder.lock(0), f"block {turn.block}, entry {turn.entry!r}"):
                    pass
            journal.end(turn, None, read_outcome(tournament, turn).log_sha256)


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
