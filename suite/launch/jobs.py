"""What is asked of a Slurm: take a job, say what became of it. No sacct: squeue, then scontrol, then the exit file."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

# Settings of a job script that its caller's environment must not change; a person who calls sbatch may.
SETTINGS = (
    "MLHPC_PYTHON",
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
)
# Best first: what a job of several array tasks is said to do
ACTIVE_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "PENDING")
ANSWER_TIMEOUT_S = 30


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment sbatch gets: no option of sbatch, outer job or setting of the script is inherited by accident."""

    def foreign(name: str) -> bool:
        return name in SETTINGS or (name.startswith(("SBATCH_", "SLURM_")) and name != "SLURM_CONF")

    return {name: value for name, value in environ.items() if not foreign(name)}


def parse_job_id(text: str) -> str:
    """The job id in what ``sbatch --parsable`` printed: ``123`` or ``123;cluster``."""
    match = re.search(r"^(\d+)(?:;\S+)?$", text.strip(), re.MULTILINE)
    if match is None:
        raise ValueError(f"sbatch answered {text.strip()[:200]!r}: expected a job id")
    return match.group(1)


def submit(script: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Give a script to sbatch and return the job id. ValueError is one line with what sbatch said."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], env=clean_environment(environ), capture_output=True, text=True
        )
    except FileNotFoundError:
        raise ValueError("no sbatch on PATH: submit on a login node, or see the script with --dry-run") from None
    if done.returncode:
        said = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
        raise ValueError(f"sbatch refused {script.name}: {said or f'exit code {done.returncode}'}")
    return parse_job_id(done.stdout)


def parse_squeue(text: str) -> dict[str, str]:
    """Lines ``<job id> <state>``, one per array task, to one state per job: the most active."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        job, _, state = line.strip().partition(" ")
        if state:
            found.setdefault(job, set()).add(state.strip())
    return {job: _most_active(states) for job, states in found.items()}


def parse_scontrol(text: str) -> str | None:
    """The state in the answer of ``scontrol show job``: the most active of an array's tasks."""
    states = set(re.findall(r"\bJobState=(\w+)", text))
    return _most_active(states) if states else None


def job_states(ids: Iterable[str]) -> dict[str, str]:
    """The state of each job that squeue or scontrol still knows; others are absent, and so are all without a Slurm."""
    ids = sorted(set(ids))
    if not ids:
        return {}
    states = parse_squeue(_answer("squeue", "--noheader", "--format=%F %T", f"--jobs={','.join(ids)}"))
    for job in ids:
        state = states.get(job) or parse_scontrol(_answer("scontrol", "show", "job", job))
        if state is not None:
            states[job] = state
    return states


def started_jobs(run: Path) -> set[str]:
    """Every job whose script began in this run folder, also those a person submitted without `mlhpc submit`."""
    names = (re.fullmatch(r"(\d+)(_\d+)?(\.running)?", path.name) for path in (run / "exit").glob("*"))
    return {match[1] for match in names if match}


def exit_codes(run: Path, job: str) -> list[int]:
    """What the job's script left in the run folder when it ended: one code per array task, none if it was killed."""
    codes = []
    for path in sorted((run / "exit").glob(f"{job}*")):
        if re.fullmatch(rf"{job}(_\d+)?", path.name):
            text = path.read_text(errors="replace").strip()
            if text.isdigit():
                codes.append(int(text))
    return codes


def _most_active(states: set[str]) -> str:
    return next((state for state in ACTIVE_STATES if state in states), min(states))


def _answer(*command: str) -> str:
    """Standard output of a query; nothing if the program is missing, refuses (an unknown job) or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
