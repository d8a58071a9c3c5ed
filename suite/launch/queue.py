"""Submits job scripts and asks for the state of jobs: first the scheduler, then the exit files of the scripts."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes
from mlhpc.suite.launch.schedulers import ENDED, NOT_KNOWN, Dialect
from mlhpc.suite.log.reader import EXIT_CODE_BYTES

# Settings of a job script that `mlhpc submit` does not pass on from its environment; a person who submits it may set
# them.
SCRIPT_VARIABLES = (
    "MLHPC_PYTHON",
    "MLHPC_SIZE",
    "MLHPC_CONFIG",
    "MLHPC_RUN",
    "MLHPC_RUNS",
    "MLHPC_INDEX",
    "MLHPC_JOB",
    "MLHPC_BEGAN",
    "MLHPC_ENDED",
    "MLHPC_INSTANCES",
    "MLHPC_SEED",
    "MLHPC_SET",
    "MLHPC_MPI",
    "MLHPC_STAGING_DIRECTORY",
    "MLHPC_CACHE_DROP_COMMAND",
    "MLHPC_CACHE_DROP_RC",
    "MLHPC_REQUEUE",
    "MLHPC_STOP_AFTER_S",
    "MLHPC_REPLACE_FAILED",
    "MLHPC_SPARES",
    "MLHPC_PREFLIGHT",
    "MLHPC_PREFLIGHT_S",
    "MLHPC_PREFLIGHT_HISTORY",
    "MLHPC_PREFLIGHT_DIRECTORY",
)
# The most active first: a job of several array tasks has the state of its most active task
ACTIVE_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "PENDING")
ANSWER_TIMEOUT_S = 30


def make_clean_environment(environ: Mapping[str, str], dialect: Dialect) -> dict[str, str]:
    """Return the environment for the scheduler's command, without an outer job's variables and settings of the
    script.
    """

    def foreign(name: str) -> bool:
        return name in SCRIPT_VARIABLES or (name.startswith(tuple(dialect.FOREIGN)) and name not in dialect.KEPT)

    return {name: value for name, value in environ.items() if not foreign(name)}


def submit_script(
    script: Path, dialect: Dialect, *options: str, index: int | None = None, environ: Mapping[str, str] = os.environ
) -> str:
    """Give a script to the scheduler and return the job id. InputError has the scheduler's message in one line.

    ``options`` of the command come before the script. ``index``: the run that this job is for.
    """
    command = dialect.SUBMIT[0]
    environment = make_clean_environment(environ, dialect)
    if index is not None:
        environment["MLHPC_INDEX"] = str(index)
    with script.open("rb") if dialect.STDIN else open(os.devnull, "rb") as given:  # noqa: PTH123
        try:
            done = subprocess.run(
                [*dialect.SUBMIT, *dialect.PARSABLE, *options, *([] if dialect.STDIN else [str(script)])],
                env=environment,
                stdin=given,
                capture_output=True,
                text=True,
                errors="replace",
            )
        except FileNotFoundError:
            raise InputError(
                f"no {command} on PATH: submit on a login node, or see the script with --dry-run"
            ) from None
    if done.returncode:
        said = done.stderr if done.stderr.strip() else done.stdout  # a site's wrapper may print its reason there
        message = "; ".join(line.removeprefix(f"{command}: error: ") for line in said.strip().splitlines())
        raise InputError(f"{command} refused {script.name}: {message or f'exit code {done.returncode}'}")
    return parse_job_id(done.stdout, dialect)


def parse_job_id(text: str, dialect: Dialect) -> str:
    """Parse the job id in a scheduler's answer. InputError if there is none."""
    match = re.search(dialect.JOB_ID, text.strip(), re.MULTILINE)
    if match is None:
        raise InputError(
            f"{dialect.SUBMIT[0]} answered {text.strip()[:200]!r}: expected a job id; "
            f"{dialect.QUEUE} shows whether the job is queued"
        )
    return str(decode_base58(match[1])) if "base58" in match.groupdict() else match[1]


def decode_base58(text: str) -> int:
    """Decode Flux's short form of a job id."""
    letters, number = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", 0
    for letter in text:
        number = number * len(letters) + letters.index(letter)
    return number


def fetch_job_states(ids: Iterable[str], dialect: Dialect) -> dict[str, str]:
    """Return the state of each job that the scheduler still knows; `NOT_KNOWN` if it does not answer.

    A task of an array has an entry too, as 7_0. The state of a job is that of its most active task.
    """
    states: dict[str, set[str]] = {}
    if ids := sorted(set(ids)):
        # A person's own defaults (SQUEUE_STATES) would hide jobs.
        environment = make_clean_environment(os.environ, dialect)
        for job, index, state in dialect.fetch_states(ids, lambda *words: ask(*words, environ=environment)):
            for name in (job, *([] if index is None else [f"{job}_{index}"])):
                states.setdefault(name, set()).add(state)
    return {name: min(found, key=rank_activity) for name, found in states.items()}


def rank_activity(state: str) -> tuple[int, str]:
    """Rank a state by how active it is: a job has the state of its most active task."""
    rank = ACTIVE_STATES.index(state) if state in ACTIVE_STATES else len(ACTIVE_STATES) + (state in ENDED)
    return rank, state


def is_active(state: str | None) -> bool:
    """Return True if a job in this state has not ended."""
    return state is not None and state != NOT_KNOWN and state not in ENDED


def find_kind(run: Path) -> str | None:
    """Find the kind of scheduler whose script runs in a run folder, or was killed there."""
    for path in sorted((run / "exit").glob("*.running")):
        with suppress(OSError):
            text = read_bytes(path, EXIT_CODE_BYTES).decode(errors="replace").strip()
            if re.fullmatch(r"[a-z_]+", text):
                return text
    return None


def list_started_jobs(run: Path) -> set[str]:
    """List the ids of all jobs whose script started in this run folder, including jobs submitted by hand."""
    # Files of job 123: `123` or `123_<task>` with an exit code, and the same with `.running` while the script runs.
    names = (re.fullmatch(r"(\d+)(_\d+)?(\.running)?", path.name) for path in (run / "exit").glob("*"))
    return {match[1] for match in names if match}


def may_be_running(run: Path, job: str) -> bool:
    """Return True unless the files of a job's script say that it has ended."""
    # An array has a file per task: one task may still run when others have ended.
    return not list_exit_codes(run, job) or any((run / "exit").glob(f"{job}*.running"))


def list_exit_codes(run: Path, job: str) -> dict[int | None, int]:
    """Return the exit codes that the job's script wrote, by array task (None: no array). A killed task has none."""
    codes: dict[int | None, int] = {}
    for path in sorted((run / "exit").glob(f"{job}*")):
        # The pattern of glob also finds job 1234 for 123.
        if match := re.fullmatch(rf"{job}(?:_(\d+))?", path.name):
            text = ""
            with suppress(OSError):  # a file that is larger than a number, or no file
                text = read_bytes(path, EXIT_CODE_BYTES).decode(errors="replace").strip()
            if text.isascii() and text.isdigit():
                codes[None if match[1] is None else int(match[1])] = int(text)
    return codes


def ask(*command: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return what a scheduler's program prints. None if the program is missing, or cannot ask the scheduler.

    That it does not know a job is an answer too: the job has ended.
    """
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    unknown = re.search(r"Invalid job id|Unknown Job|is not found|has finished", done.stderr, re.IGNORECASE)
    return None if done.returncode and not unknown else done.stdout
