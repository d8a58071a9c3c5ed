"""No scheduler: the script runs on this machine at once, and mpiexec starts ranks on the site's hosts by ssh."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.launch.job import Job
from mlhpc.suite.launch.mpiexec import render_place
from mlhpc.suite.launch.schedulers import Ask, State

TITLE = "ssh"
TRIED = "one host"
PREFIX, IN_JOB = "# ", ""
EXAMPLE = 'MLHPC_SIZE=smoke MLHPC_SET="max_epochs=2 precision=bfloat16" bash FILE'
SUBMIT, PARSABLE, STDIN = ("bash",), ("-c", 'setsid bash "$0" > /dev/null 2>&1 < /dev/null & echo "$!"'), False
JOB_ID, QUEUE = r"^(\d+)$", "ps -e"
KEPT, FOREIGN = (), ()
CHECKS = {"mpiexec": ("mpiexec", "--version")}
MPI, WRITES_OUTPUT = "hydra", False

ENVIRONMENT = """\
job=$$ self=$$ index=
hosts=(HOSTS)
requeue() { exec bash "$0"; }
"""


def render_header(job: Job) -> Iterator[str]:
    hosts = len(job.system.site.hosts) or 1
    if job.all_nodes > hosts:
        raise InputError(f"{job.all_nodes} nodes asked for; {job.system.name} has {hosts} (site.hosts)")
    yield from ()


def render_array(job: Job) -> Iterator[str]:
    raise InputError("--array: without a scheduler nothing waits for its turn; leave it out")


def render_signal(job: Job) -> Iterator[str]:
    yield from ()


def render_dependency(job: str, *, succeeded: bool) -> Sequence[str]:
    raise InputError("without a scheduler no job waits for another one: submit it when the first has ended")


def render_environment(job: Job) -> str:
    hosts = shlex.join(job.system.site.hosts[: job.all_nodes]) or '"$(hostname)"'
    return ENVIRONMENT.replace("HOSTS", hosts) + render_place(job, MPI)


def fetch_states(ids: Sequence[str], ask: Ask) -> Iterator[State]:
    for job in ids:
        try:
            words = Path(f"/proc/{job}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] in (b"bash", b"setsid"):  # the kernel gives the number of an ended process to a new one
            yield job, None, "RUNNING"
