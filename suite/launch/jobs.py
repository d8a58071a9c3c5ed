"""Submits jobs to Slurm and asks for their state: squeue, then scontrol, then the exit file. Does not need sacct."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes
from mlhpc.suite.log.limits import EXIT_CODE_BYTES

# Settings of a job script that `mlhpc submit` does not pass on from its environment; a person who calls sbatch may set
# them.
SCRIPT_VARIABLES = (
    "MLHPC_PYTHON",
    "MLHPC_SIZE",
    "MLHPC_CONFIG",
    "MLHPC_RUN",
    "MLHPC_RUNS",
    "MLHPC_INSTANCES",
    "MLHPC_SEED",
    "MLHPC_SET",
    "MLHPC_MPI",
    "MLHPC_STAGING_DIRECTORY",
    "MLHPC_CACHE_DROP_COMMAND",
    "MLHPC_CACHE_DROP_RC",
    "MLHPC_REQUEUE",
    "MLHPC_REPLACE_FAILED",
    "MLHPC_SPARES",
    "MLHPC_PREFLIGHT",
    "MLHPC_PREFLIGHT_S",
    "MLHPC_PREFLIGHT_HISTORY",
    "MLHPC_PREFLIGHT_DIRECTORY",
)
# The most active first: a job of several array tasks has the state of its most active task
NOT_KNOWN = "not known"  # the state of a job where Slurm does not answer
ACTIVE_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "PENDING")
ANSWER_TIMEOUT_S = 30


def make_clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, without sbatch's options, an outer job's variables and settings of
    the script.
    """

    def foreign(name: str) -> bool:
        return name in SCRIPT_VARIABLES or (name.startswith(("SBATCH_", "SLURM_")) and name != "SLURM_CONF")

    return {name: value for name, value in environ.items() if not foreign(name)}


def parse_job_id(text: str) -> str:
    """Parse the job id that ``sbatch --parsable`` prints: ``123`` or ``123;cluster``. InputError otherwise."""
    match = re.search(r"^(\d+)(?:;\S+)?$", text.strip(), re.MULTILINE)
    if match is None:
        raise InputError(
            f"sbatch answered {text.strip()[:200]!r}: expected a job id; squeue --me shows whether the job is queued"
        )
    return match.group(1)


def submit_script(script: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Give a script to sbatch and return the job id. InputError has sbatch's message in one line."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=make_clean_environment(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise InputError("no sbatch on PATH: submit on a login node, or see the script with --dry-run") from None
    if done.returncode:
        message = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
        raise InputError(f"sbatch refused {script.name}: {message or f'exit code {done.returncode}'}")
    return parse_job_id(done.stdout)


def parse_squeue(text: str) -> dict[str, str]:
    """Parse lines ``<job id> <state>``, one per array task. Returns one state per job: its most active task's."""
    states: dict[str, set[str]] = {}
    for line in text.splitlines():
        job, _, state = line.strip().partition(" ")
        if state:
            states.setdefault(job, set()).add(state.strip())
    return {job: _select_most_active(of_tasks) for job, of_tasks in states.items()}


def parse_scontrol(text: str) -> str | None:
    """Parse the state of the most active array task from ``scontrol show job``. None if it prints none."""
    states = set(re.findall(r"\bJobState=(\w+)", text))
    return _select_most_active(states) if states else None


def fetch_job_states(ids: Iterable[str]) -> dict[str, str]:
    """Return the state of each job that squeue or scontrol still knows; `NOT_KNOWN` if neither answers."""
    ids = sorted(set(ids))
    if not ids:
        return {}
    # %F is the job id without the number of an array task, %T the long name of the state.
    listed = _query_slurm("squeue", "--noheader", "--format=%F %T", f"--jobs={','.join(ids)}")
    states = parse_squeue(listed or "")
    shown: str | None = ""
    for job in ids:
        if job in states:
            continue
        if shown is not None:  # who does not answer once is not asked again
            shown = _query_slurm("scontrol", "show", "job", job)
        state = parse_scontrol(shown or "") or (NOT_KNOWN if shown is None and listed is None else None)
        if state is not None:
            states[job] = state
    return states


def list_started_jobs(run: Path) -> set[str]:
    """List the ids of all jobs whose script started in this run folder, including jobs submitted by hand."""
    # Files of job 123: `123` or `123_<task>` with an exit code, and the same with `.running` while the script runs.
    names = (re.fullmatch(r"(\d+)(_\d+)?(\.running)?", path.name) for path in (run / "exit").glob("*"))
    return {match[1] for match in names if match}


def may_be_running(run: Path, job: str) -> bool:
    """Return True unless the files of a job's script say that it has ended."""
    # An array has a file per task: one task may still run when others have ended.
    return not list_exit_codes(run, job) or any((run / "exit").glob(f"{job}*.running"))


def list_exit_codes(run: Path, job: str) -> list[int]:
    """List the exit codes that the job's script wrote, one per array task. A killed task has none."""
    codes = []
    for path in sorted((run / "exit").glob(f"{job}*")):
        # The pattern of glob also finds job 1234 for 123.
        if re.fullmatch(rf"{job}(_\d+)?", path.name):
            text = ""
            with suppress(OSError):  # a file that is larger than a number, or no file
                text = read_bytes(path, EXIT_CODE_BYTES).decode(errors="replace").strip()
            if text.isascii() and text.isdigit():
                codes.append(int(text))
    return codes


def _select_most_active(states: set[str]) -> str:
    # If no task is active, any state will do, but the same one at every call.
    return next((state for state in ACTIVE_STATES if state in states), min(states))


def _query_slurm(*command: str) -> str | None:
    """Return the standard output of a query. None if the program is missing, or cannot ask Slurm.

    "Invalid job id" is an answer: the job no longer exists.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode and "Invalid job id" not in done.stderr else done.stdout
