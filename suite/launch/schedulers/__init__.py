"""Dialects of schedulers: one module for each. A new one is one file with the names of `Dialect`; nothing lists it.

The job script is the same for all (`launch/templates/job.sh`): a dialect states what its scheduler calls things.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.launch.job import Job

Ask = Callable[..., str | None]  # runs a query: its output, or None if the scheduler does not answer
State = tuple[str, str | None, str]  # job, index of an array's task, state
NOT_KNOWN = "not known"  # the state of a job where the scheduler does not answer
# Slurm's words; the other dialects use them too. Every other state is not an end: PREEMPTED, SUSPENDED, REQUEUE_HOLD …
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"),
    "ENDED",  # nobody says how
)


class Dialect(Protocol):
    """What a module of this folder states. Every render function yields words after the prefix of a directive."""

    TITLE: str
    TRIED: str  # what was run for real, and where
    PREFIX: str
    EXAMPLE: str  # how a person submits the script with other settings
    SUBMIT: Sequence[str]  # the command; the script's path follows
    STDIN: bool  # the script is given there instead
    PARSABLE: Sequence[str]  # options of the command, for a program that reads its answer
    JOB_ID: str  # pattern of the number in that answer
    IN_JOB: str  # variable that every job has; "" if there is none
    QUEUE: str  # what shows a person's jobs
    KEPT: Sequence[str]  # variables of the scheduler that a new job needs; the others are an outer job's
    FOREIGN: Sequence[str]  # beginnings of those
    CHECKS: Mapping[str, Sequence[str]]  # what `mlhpc doctor --system` asks; {queue} and the like become the site's
    MPI: str  # how ranks start, if the system file does not say
    WRITES_OUTPUT: bool  # the scheduler can write the job's output to a folder of any name

    def render_header(self, job: Job) -> Iterable[str]:
        """Name, nodes, ranks, time, queue, output."""

    def render_array(self, job: Job) -> Iterable[str]:
        """A task for each run, one at a time. Nothing: `mlhpc submit` gives each run a job, which waits for the
        last.
        """

    def render_signal(self, job: Job) -> Iterable[str]:
        """A signal to the ranks before the limit. Nothing: the script has a timer."""

    def render_dependency(self, job: str, *, succeeded: bool) -> Sequence[str]:
        """Return options of the command: start after this job, if it ``succeeded`` or whatever its end."""

    def render_environment(self, job: Job) -> str:
        """Bash: the names that templates/job.sh lists, and the functions place, is_running and requeue."""

    def fetch_states(self, ids: Sequence[str], ask: Ask) -> Iterable[State]:
        """Yield the states of jobs and tasks that are known; `NOT_KNOWN` if the scheduler does not answer."""


def list_kinds() -> list[str]:
    """List the names of the dialects."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def load_dialect(kind: str) -> Dialect:
    """Load the dialect that ``kind`` of a system file names. InputError if there is none."""
    if kind not in list_kinds():
        raise InputError(explain_unknown_name("kind", kind, list_kinds()))
    return cast(Dialect, importlib.import_module(f"{__name__}.{kind}"))


def render_command(dialect: Dialect) -> str:
    """Render what a person writes before a script's path to submit it."""
    return " ".join(dialect.SUBMIT) + " <" * dialect.STDIN
