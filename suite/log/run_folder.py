"""Names all files of the run folder, makes it, reads and writes run.json. docs/architecture.md describes the layout.

Decides how a trial goes on when its run folder is continued: it starts, resumes from its checkpoint, or stays as it
is.

A log that never reached run_start is no run: it is moved aside and the trial starts afresh. A run that began and failed
counts, as the rules ask. It is replaced only if the user asks for it, and the new log states that. A checkpoint with a
damaged file counts as none.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import yaml
from msgspec import Meta, Struct

from mlhpc.suite import MOST_RUNS, VERSION
from mlhpc.suite.documents import Count, FolderName, convert_to_plain_data, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import PART_SUFFIX, make_folder, quote_path, render_reason, write_file_atomically
from mlhpc.suite.log import mllog
from mlhpc.suite.log.origin.sources import compute_suite_digests, read_environment, read_git_state
from mlhpc.suite.log.reader import read_events, read_limits
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.results_tree import RESULT_OF_RUN

if TYPE_CHECKING:
    from mlhpc.suite.config import RunConfig


RUN_VERSION = 1
JOB_VERSION = 1
SCRIPT = "job.sbatch"  # of every scheduler: the first to be spoken here gave the name
_REFRESHED_S = 60.0  # an owner refreshes its lock every 20 s (mlhpc.suite.data.lock)


class GitInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The commit of a checkout, and the sha256 of its changes."""

    commit: str
    dirty: bool
    diff_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None


class RunInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``run.json``: what the user asked for.

    ``ranks`` is None if the launcher decides it per trial. ``seed`` is the base seed: trial i has seed + i; None if
    each trial draws its own. ``loop`` is the program of a person's own loop; None: the harness's. ``git`` is the state
    of the code that trained.
    """

    workload: FolderName
    size: FolderName
    mode: Annotated[str, Meta(pattern="^(strong|weak)$", description="strong or weak")]
    runs: Annotated[int, Meta(ge=1, le=MOST_RUNS)]
    ranks: Count | None
    created: str
    command: tuple[str, ...]
    git: GitInfo | None
    same_allocation: bool
    seed: Annotated[int, Meta(ge=0)] | None = None
    loop: str | None = None
    suite_version: FolderName = VERSION
    version: int = RUN_VERSION


class JobInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``job.json``: the jobs of a run folder, and when they were submitted.

    ``kind`` names their scheduler's dialect, ``command`` is what submits the script.
    """

    version: int = JOB_VERSION
    kind: str = "slurm"
    command: Annotated[str, Meta(pattern=r"\A[a-z]+(?: [a-z]+)?(?: <)?\Z")] = "sbatch"  # scripts of a package have it
    job_ids: tuple[str, ...]
    submitted: str


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run folder."""

    root: Path

    @property
    def info_path(self) -> Path:
        """run.json."""
        return self.root / "run.json"

    @property
    def config_path(self) -> Path:
        """The resolved config, which `mlhpc run --config` reads again."""
        return self.root / "config.yaml"

    @property
    def plan_path(self) -> Path:
        """In the run folder: a copy of the parallel plan, if it is a file of the user's."""
        return self.root / "plan.yaml"

    @property
    def changes_path(self) -> Path:
        """The difference to the commit, as git prints it. Exists only if there is one."""
        return self.root / "changes.diff"

    @property
    def sources_path(self) -> Path:
        """The digests of the suite's own files."""
        return self.root / "sources.json"

    @property
    def environment_path(self) -> Path:
        """The installed distributions (mlhpc.suite.log.origin.sources)."""
        return self.root / "environment.json"

    @property
    def data_path(self) -> Path:
        """A copy of the manifest of the data set that the first trial read."""
        return self.root / "data.json"

    @property
    def card_path(self) -> Path:
        """A copy of the card for which a person's own loop was made."""
        return self.root / "card.yaml"

    @property
    def code(self) -> Path:
        """A copy of the program of a person's own loop."""
        return self.root / "code"

    @property
    def facts(self) -> Path:
        """One file per compute node."""
        return self.root / "facts"

    def result(self, trial: int) -> Path:
        """Return the path of a scored run's log."""
        return self.root / f"result_{trial}.txt"

    def checkpoint(self, trial: int) -> Path:
        """Return the path of a trial's checkpoint."""
        return self.root / "checkpoint" / f"trial_{trial}.pt"

    def lock(self, trial: int) -> Path:
        """Return the path of a trial's lock (mlhpc.suite.data.lock). It exists while the trial runs."""
        return self.root / f"trial_{trial}.lock"

    def output(self, trial: int) -> Path:
        """Return the path for stdout and stderr of a trial's ranks."""
        return self.root / "output" / f"trial_{trial}.log"

    def exit_code(self, trial: int) -> Path:
        """Return the path for the exit code of a trial's last attempt, in digits. The launcher writes it after the
        ranks' end.
        """
        return self.root / "exit" / f"trial_{trial}"

    def running(self, trial: int) -> Path:
        """Return the path of the local launcher's lock, which names host and process. It is touched as a heartbeat."""
        return self.root / "exit" / f"trial_{trial}.running"

    def failed(self, trial: int | None = None) -> list[Path]:
        """List the logs of failed attempts that were moved aside, of all trials or one, by trial and attempt."""
        return sorted(self.root.glob(f"failed_{'*' if trial is None else trial}_*.txt"), key=_parse_trial_numbers)

    def move_aside(self, log: Path, trial: int) -> Path:
        """Rename the log of a failed attempt to the next free ``failed_<i>_<k>.txt``. Returns the new path.

        Its power readings move with it.
        """
        last = max((_parse_trial_numbers(path)[-1] for path in self.failed(trial)), default=0)
        aside = log.rename(self.root / f"failed_{trial}_{last + 1}.txt")
        if self.power(log).is_dir():
            self.power(log).rename(self.power(aside))
        return aside

    def move_checkpoint_aside(self, trial: int) -> Path:
        """Move the files of a trial's checkpoint to the next free folder ``failed_<i>_<k>`` next to it. Returns the
        folder.
        """
        place = self.checkpoint(trial).parent
        last = max((_parse_trial_numbers(path)[-1] for path in place.glob(f"failed_{trial}_*")), default=0)
        aside = place / f"failed_{trial}_{last + 1}"
        make_folder(aside)
        for path in sorted(place.glob(f"trial_{trial}.*"), reverse=True):  # the index, trial_<i>.pt, first
            path.rename(aside / path.name)
        return aside

    def under_way(self) -> list[int]:
        """List the trials that run now, on any launcher and node: their lock was refreshed within a minute."""
        found = []
        for path in self.root.glob("trial_*.lock"):
            with suppress(OSError):
                if abs(time.time() - path.lstat().st_mtime) < _REFRESHED_S:
                    found.append(_parse_trial_numbers(path)[0])
        return sorted(found)

    def under_way_text(self) -> str | None:
        """Return in words which trials run now. None if none does."""
        trials = self.under_way()
        if not trials:
            return None
        numbers, many = ", ".join(map(str, trials)), len(trials) > 1
        return f"run{'s' * many} {numbers} of {self.root} {'are' if many else 'is'} under way"

    def power(self, log: Path) -> Path:
        """Return the folder of a trial's power readings, by its log."""
        return self.root / "power" / log.stem

    def stacks(self, trial: int, rank: int) -> Path:
        """Return the path for the Python stacks of a rank that hung."""
        return self.root / "output" / f"stack_{trial}_rank{rank}.txt"

    def preflights(self) -> list[Path]:
        """List the measurements of nodes before the trials of each job, and the verdicts."""
        found = (path for kind in ("verdict.json", "[12]/*.jsonl") for path in self.root.glob(f"preflight/*/{kind}"))
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def results(self) -> list[Path]:
        """List the logs of scored runs, by trial. A copy, such as ``result_1 (copy).txt``, is none."""
        found = (path for path in self.root.glob("result_*.txt") if re.fullmatch(RESULT_OF_RUN, path.name))
        return sorted(found, key=_parse_trial_numbers)

    def resumed(self, trial: int | None = None) -> list[Path]:
        """List the logs of continuations, of all trials or one, by trial and continuation."""
        pattern = "resumed_*.txt" if trial is None else f"resumed_{trial}_*.txt"
        return sorted(self.root.glob(pattern), key=_parse_trial_numbers)

    def node_facts(self) -> list[Path]:
        """List the files with the facts of every node."""
        return sorted(self.facts.glob("*.json"))

    def next_resumed(self, trial: int) -> Path:
        """Return the path for the log of a trial's next continuation."""
        last = max((_parse_trial_numbers(path)[-1] for path in self.resumed(trial)), default=0)
        return self.root / f"resumed_{trial}_{last + 1}.txt"

    def read_info(self) -> RunInfo:
        """Read run.json. InputError says what is wrong with it."""
        if not self.info_path.exists():
            raise InputError(f"{self.root}: not a run folder (no run.json)")
        return read_json_document(self.info_path, RunInfo, "a run.json", RUN_VERSION, largest=read_limits().json)

    def write_info(self, info: RunInfo) -> None:
        """Write run.json again. InputError if it cannot be written."""
        try:
            write_file_atomically(self.info_path, _render_info(info))
        except OSError as error:
            raise InputError(f"{self.info_path}: cannot be written: {render_reason(error)}") from None

    def read_job(self) -> JobInfo | None:
        """Read job.json. None without one, and if it is incomplete."""
        try:
            path = self.root / "job.json"
            return read_json_document(path, JobInfo, "a job.json", JOB_VERSION, largest=read_limits().json)
        except InputError:
            return None


def _parse_trial_numbers(path: Path) -> tuple[int, ...]:
    """Return the numbers in a log's name: trial, and continuation if there is one. (0,) without numbers."""
    return tuple(map(int, re.findall(r"_(\d+)", path.stem))) or (0,)


def parse_trial(log: Path) -> int:
    """Return the trial of a log, by its name."""
    return _parse_trial_numbers(log)[0]


def may_be_used(root: Path) -> bool:
    """Return True for a folder that is empty, was left by a kill in `write_run_info`, or has only failed attempts."""
    left = [
        path for path in root.iterdir() if path.name not in _ATTEMPT_FOLDERS and not path.name.startswith("failed_")
    ]
    return not left or _has_only_first_files(root)


_ATTEMPT_FOLDERS = frozenset({"facts", "exit", "output", "power"})  # folders that an attempt leaves before it begins


def choose_default_folder(workload: str, size: str, now: datetime, under: str = "runs") -> Path:
    """Return <under>/<workload>-<size>-<UTC time>."""
    return Path(under) / f"{workload}-{size}-{now:%Y%m%dT%H%M%SZ}"


def refuse_existing(root: Path) -> None:
    """Raise InputError if a new run folder's path exists, unless it is empty or a kill left it in `write_run_info`."""
    if root.exists() and not _has_only_first_files(root):
        way = f"; to continue it: {find_continue_command(root)}" if find_continue_command(root) else ""
        raise InputError(f"{root}: exists already; choose another folder with -o{way}")


def find_continue_command(root: Path, *, left: bool = False, more: int = 0) -> str | None:
    """Return the command that continues a run folder with runs left. None if none are left, or for another folder.

    ``left``: it is known that some are. ``more``: how many runs it shall have beyond those it was begun with, if none
    of these are left.
    """
    folder = RunFolder(root)
    added = []
    try:
        info = folder.read_info()
        left = left or len(folder.results()) < info.runs or any(folder.checkpoint(0).parent.glob("trial_*.pt"))
        if more and not left:
            left, added = True, [f"--runs {info.runs + more}"]
    except (InputError, OSError):
        return None
    if not left or info.loop is not None:  # nothing of mlhpc continues a person's own loop
        return None
    script = root / SCRIPT
    if script.is_file() and added:  # a job script has its own number of runs
        return None
    if script.is_file():
        job = folder.read_job()
        return f"{job.command if job else 'sbatch'} {quote_path(script)}"
    from mlhpc.suite.config import list_outer_settings

    words = ["mlhpc", "run", shlex.quote(info.workload), "--output", quote_path(root), "--resume", *added]
    with suppress(InputError):
        words += [f"--set {shlex.quote(each)}" for each in list_outer_settings(folder.config_path)]
    return " ".join(words)


def _has_only_first_files(root: Path) -> bool:
    """Return True for a folder that is empty, or that a kill left with the first files of `write_run_info` only."""
    try:
        paths = list(root.iterdir())
    except OSError:
        return False
    folder = RunFolder(root)
    first = (folder.config_path, folder.plan_path, folder.changes_path, folder.sources_path, folder.environment_path)
    return all(path in first or path.suffix == PART_SUFFIX for path in paths)


def create_run_folder(root: Path) -> None:
    """Make a new, empty run folder for `write_run_info`.

    InputError if it exists (see `refuse_existing`) or cannot be made.
    """
    try:
        refuse_existing(root)
        make_folder(root)
        for path in root.iterdir():
            path.unlink()
    except OSError as error:
        raise InputError(f"{root}: cannot be created: {render_reason(error)}") from None


def _render_info(info: RunInfo) -> str:
    return json.dumps(convert_to_plain_data(info), indent=2) + "\n"


def write_run_info(
    root: Path,
    config: RunConfig,
    *,
    mode: str,
    runs: int,
    ranks: int | None,
    seed: int | None,
    same_allocation: bool = True,
    loop: Path | None = None,
) -> RunFolder:
    """Write config.yaml, the state of code and environment, and last run.json, each unless it exists.

    All instances of a job try at once and one wins. ``loop`` is the program of a person's own loop.
    """
    folder = RunFolder(root)
    if folder.info_path.exists() and folder.config_path.exists():
        return folder
    git = read_git_state(None if loop is None else loop.absolute().parent)
    info = RunInfo(
        workload=config.workload,
        size=config.size,
        mode=mode,
        runs=runs,
        ranks=ranks,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=tuple(sys.argv if loop is None else sys.orig_argv),
        git=None if git is None else GitInfo(**git.logged()),
        same_allocation=same_allocation,
        seed=seed,
        loop=None if loop is None else loop.name,
    )
    texts = (
        (folder.config_path, yaml.safe_dump(convert_to_plain_data(config, without_none=True), sort_keys=False)),
        *([(folder.changes_path, git.diff)] if git is not None and git.diff else []),
        *([(folder.plan_path, config.plan.read_text())] if config.plan is not None and config.plan.is_file() else []),
        (folder.sources_path, json.dumps(compute_suite_digests(), indent=1) + "\n"),
        (folder.environment_path, read_environment().text()),
        (folder.info_path, _render_info(info)),
    )
    for path, text in texts:
        try:
            write_file_atomically(path, text, overwrite=False)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {render_reason(error)}") from None
    return folder


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
