"""A contest of whole runs: its folder has common settings, entries and a journal of runs.

Its turns are `mlhpc run` processes, one at a time. Results are read from the logs only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta, Struct

from mlhpc.plugins.tune.race import Race, RaceRules, Turn, run_race
from mlhpc.suite.card import Target
from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import FolderName, YamlSource, convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, quote_path, read_bytes, render_duration, render_error, write_file_atomically
from mlhpc.suite.launch.local import make_suite_command
from mlhpc.suite.log.reader import Log, read_events, read_limits
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.log.score import find_failure
from mlhpc.suite.processes import make_parent_death_hook

ENTRY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
ENTRY_NAME_TEXT = "1 to 40 letters, digits, - and _, the first a letter or a digit"
COMMON_SETTINGS = ("data", "verify_data", "submission", "staging", "cache_drop_command", "instrumentation", "watchdog")
"""Settings that no entry may state: some of them name commands and folders."""

Document = TypeVar("Document", bound=Struct)


class ContestSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of contest.yaml: what is the same for all entries and never changes."""

    version: Literal[1] = 1
    workload: FolderName
    size: FolderName
    system: Annotated[str, Meta(min_length=1, max_length=200)]  # name of the machine; stated in every log
    ranks: Annotated[int, Meta(ge=1, le=65536)] = 1
    objective: Literal["time_to_train", "cpu_seconds"] = "time_to_train"
    error: Annotated[float, Meta(ge=0.001, le=0.5)] = 0.05  # chance of a wrong answer
    blocks: Annotated[int, Meta(ge=1, le=1000)] = 16  # the most runs that each entry gets
    run_limit_s: Annotated[float, Meta(gt=0.0, le=1e7)] = 3600.0  # from start to end of a run
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    data: str


class StartedRun(Struct, kw_only=True, forbid_unknown_fields=True):
    """A run in the journal. It counts from its start. ``log_sha256`` is null if it left no log."""

    block: int
    entry: str
    ended: bool = False
    exit_code: int | None = None  # null, too, for a run whose contest was killed
    log_sha256: str | None = None

    @property
    def turn(self) -> Turn:
        """The turn of the run."""
        return Turn(self.block, self.entry)


class Journal(Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of journal.json: every started run, in order.

    ``digests`` are those of settings and entries when the first run started.
    """

    version: Literal[1] = 1
    digests: dict[str, str] = {}
    runs: list[StartedRun] = []

    def changed(self, now: dict[str, str]) -> Iterator[str]:
        """Yield a clause for each file of settings and entries that changed since the first run started."""
        before = self.digests or now
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                # A file may be deleted, edited or added; each makes earlier and later runs differ.
                what = "is gone" if name not in now else "was changed" if name in before else "was added"
                yield f"{name} {what} since the first run was started"


@dataclass(frozen=True)
class Contest:
    """The folder of a contest, its settings and the resolved configurations of its entries by name."""

    root: Path
    settings: ContestSettings
    entries: Mapping[str, RunConfig]

    @cached_property
    def rules(self) -> RaceRules:
        """The rules of the race. InputError with fewer than two entries."""
        if len(self.entries) < 2:
            raise InputError(
                f"{self.root}: the contest has {len(self.entries)} of at least two entries (configurations); "
                f"add one with: mlhpc ab runs enter {quote_path(self.root)} NAME --config FILE"
            )
        return RaceRules(tuple(self.entries), self.settings.error, self.settings.blocks, self.settings.seed)

    def path_of(self, entry: str) -> Path:
        """Return the file of an entry's configuration."""
        return self.root / "entries" / f"{entry}.yaml"

    def run(self, turn: Turn) -> RunFolder:
        """Return the run folder of a turn."""
        return RunFolder(self.root / "runs" / f"block_{turn.block:03d}" / turn.entry)

    @property
    def target(self) -> Target:
        """The target of a run: the card's, whatever an entry says."""
        return load_descriptor(self.settings.workload).card().target(self.settings.size)

    def digests(self) -> dict[str, str]:
        """Compute the sha256, by name, of each file that may not change once a run has started."""
        paths = [self.root / "contest.yaml", *map(self.path_of, self.entries)]
        return {
            path.relative_to(self.root).as_posix(): hashlib.sha256(read_small_file(path)).hexdigest() for path in paths
        }

    def read_journal(self) -> Journal:
        """Read the journal; an empty one before the first run."""
        # A dangling link does not "exist"; it must not pass for a contest without runs.
        path = self.root / "journal.json"
        return _read_document(path, Journal) if path.exists() or path.is_symlink() else Journal()

    def write_journal(self, journal: Journal) -> None:
        """Write the journal atomically."""
        write_file_atomically(
            self.root / "journal.json", msgspec.json.format(msgspec.json.encode(journal), indent=1) + b"\n"
        )


def read_contest(root: Path) -> Contest:
    """Read a contest. InputError names a damaged file, the value and what was expected."""
    if not (root / "contest.yaml").exists():
        raise InputError(
            f"{root}: no contest here (no contest.yaml); "
            f"begin one with: mlhpc ab runs new {quote_path(root)} WORKLOAD --system NAME"
        )
    settings = _read_document(root / "contest.yaml", ContestSettings)
    shipped = load_config(load_descriptor(settings.workload), settings.size)
    folder = root / "entries"
    entries: dict[str, RunConfig] = {}
    for path in sorted(folder.glob("*.yaml")) if not folder.is_symlink() else []:
        if not ENTRY_NAME.fullmatch(path.stem):
            raise InputError(f"{path}: file name {path.stem!r} is no name of an entry; expected {ENTRY_NAME_TEXT}")
        # Before load_config: a link or a device file must not be opened.
        read_small_file(path)
        entries[path.stem] = read_config(str(path), (), settings, shipped)
    return Contest(root, settings, entries)


def read_config(
    name: str, overrides: Sequence[str], settings: ContestSettings, shipped: RunConfig | None = None
) -> RunConfig:
    """Read the configuration of an entry. InputError if it is of another size, or sets a common setting."""
    known = load_descriptor(settings.workload)
    config = load_config(known, name, overrides)
    shipped = shipped or load_config(known, settings.size)
    if config.size != settings.size:
        raise InputError(f"{name}: field size is {config.size!r}; expected {settings.size!r}, the size of this contest")
    for key in COMMON_SETTINGS:
        if getattr(config, key) != getattr(shipped, key):
            raise InputError(
                f"{name}: field {key} must be the same for all entries of a contest; remove it from this one"
            )
    return config


def write_settings(root: Path, settings: ContestSettings) -> None:
    """Make the folder of a new contest. InputError if its path exists."""
    if root.exists() or root.is_symlink():
        raise InputError(f"{root}: exists already; choose a new folder for the contest")
    text = yaml.safe_dump(convert_to_plain_data(settings), sort_keys=False)
    write_file_atomically(root / "contest.yaml", text, overwrite=False)


def write_entry(contest: Contest, name: str, config: RunConfig) -> Path:
    """Add an entry and return its file. InputError if name or configuration is taken, or the race has begun."""
    if not ENTRY_NAME.fullmatch(name):
        raise InputError(f"name of an entry {name!r}: expected {ENTRY_NAME_TEXT}")
    if contest.read_journal().runs:
        raise InputError(
            f"{contest.root}: runs of this contest have started, so no entry can be added; "
            "begin a new contest with: mlhpc ab runs new"
        )
    for other, its_config in contest.entries.items():
        if other.lower() == name.lower():  # some file systems ignore the case of names
            raise InputError(f"entry {name!r}: the contest has an entry {other!r} already; choose another name")
        if _drop_common_settings(its_config) == _drop_common_settings(config):
            raise InputError(
                f"entry {name!r}: has the same configuration as entry {other!r}; change a setting with --set"
            )
    path = contest.path_of(name)
    text = yaml.safe_dump(convert_to_plain_data(config, without_none=True), sort_keys=False)
    write_file_atomically(path, text, overwrite=False)
    return path


def _drop_common_settings(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as its log has it, without common settings."""
    # Through JSON, so that paths and enums compare as a log has them.
    text: dict[str, Any] = json.loads(json.dumps(config.logged(), default=str))
    return {key: value for key, value in text.items() if key not in COMMON_SETTINGS}


def read_small_file(path: Path) -> bytes:
    """Read a small regular file. InputError for a link, a larger file, or anything else."""
    if path.is_symlink():
        raise InputError(f"{path}: is a symbolic link, which a contest does not follow; put the file itself here")
    try:
        return read_bytes(path, read_limits().json)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or render_error(error)}") from None


def _read_document(path: Path, kind: type[Document]) -> Document:
    """Read a document, YAML or JSON, which is YAML. InputError names file, line, value and what was expected."""
    read_small_file(path)
    return YamlSource.read(path).convert(kind)


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
    value, why = _compute_objective(contest, record)
    return RunResult(turn, value, why, record, log, sha256)


def _compute_objective(contest: Contest, record: RunRecord) -> tuple[float, str]:
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
    cpu_s = record.own_cpu_s
    return (cpu_s, "") if cpu_s else (math.inf, "its log has no CPU seconds of the ranks")


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
                f"after a correction continue with: mlhpc ab runs run {quote_path(self.contest.root)})"
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
        make = f"mlhpc data generate {settings.workload} --size {settings.size} -o {quote_path(settings.data)}"
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
