"""PBS Pro and OpenPBS, as on Aurora and Polaris. No signal before the limit; a job begins in the home folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mlhpc.suite.launch.job import Job
from mlhpc.suite.launch.mpiexec import render_clock, render_place
from mlhpc.suite.launch.schedulers import NOT_KNOWN, Ask, State

TITLE = "PBS"
TRIED = "not run on a real PBS"
PREFIX, IN_JOB = "#PBS", "PBS_JOBID"
EXAMPLE = 'qsub -l walltime=2:00:00 -v MLHPC_STOP_AFTER_S=7080,MLHPC_SIZE=smoke,MLHPC_SET="max_epochs=2" FILE'
SUBMIT, PARSABLE, STDIN = ("qsub",), (), False
JOB_ID, QUEUE = r"^(\d+)(?:\[\])?(?:\.\S+)?$", "qstat -u $USER"
KEPT, FOREIGN = ("PBS_CONF_FILE", "PBS_DEFAULT", "PBS_SERVER", "PBS_EXEC"), ("PBS_", "PMI_", "PALS_")
CHECKS = {"controller": ("qstat", "-B"), "queue": ("qstat", "-Q", "{queue}")}
MPI, WRITES_OUTPUT = "hydra", False

ENVIRONMENT = """\
cd "${PBS_O_WORKDIR:-.}"
job=${PBS_JOBID%%[!0-9]*} self=${PBS_JOBID%%[!0-9]*} index=${PBS_ARRAY_INDEX:-${MLHPC_INDEX:-}}
mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE") # a node stands there once for each rank
requeue() {
  echo "stopped with a checkpoint: requeued"
  if qrerun "$PBS_JOBID"; then sleep 60; fi # PBS ends this script meanwhile
}
"""


def render_header(job: Job) -> Iterator[str]:
    site, resources = job.system.site, job.system.resources
    yield f"-N {re.sub(r'[^A-Za-z0-9]', '', f'{job.workload}{job.size}')[:15]}"
    chunk = f"{job.all_nodes}:ncpus={job.cpus_per_node}:mpiprocs={job.ranks_per_node}"
    yield f"-l select={chunk}" + (f":ngpus={resources.gpus_per_node}" if resources.gpus_per_node else "")
    yield f"-l place=scatter{':excl' * resources.exclusive}"
    yield f"-l walltime={render_clock(job.limit_s)}"
    yield from ("-V", "-j oe")
    yield from ("-o /dev/null",) * (job.output is not None)  # the script writes it itself
    # Arrays must be rerunnable.
    yield f"-r {'y' if site.requeue or job.array else 'n'}"
    yield from (f"-q {site.queue}",) if site.queue else ()
    yield from (f"-A {site.account}",) if site.account else ()


def render_array(job: Job) -> Iterator[str]:
    # A range of one is refused.
    yield from (f"-J 0-{job.runs - 1}%1",) * (job.runs > 1)


def render_signal(job: Job) -> Iterator[str]:
    # At the limit it sends SIGTERM, and ten seconds later SIGKILL: not enough for a checkpoint.
    yield from ()


def render_dependency(job: str, *, succeeded: bool) -> Sequence[str]:
    return "-W", f"depend={'afterok' if succeeded else 'afterany'}:{job}"


def render_environment(job: Job) -> str:
    return ENVIRONMENT + render_place(job, MPI)


def fetch_states(ids: Sequence[str], ask: Ask) -> Iterator[State]:
    # An array answers to its number with brackets only. Ended jobs (-x) are there where the site keeps a history.
    for job, name in ((each, name) for each in ids for name in (each, f"{each}[]")):
        text = ask("qstat", "-x", "-t", "-f", "-F", "json", name)
        if text is None:
            yield job, None, NOT_KNOWN
            return
        # Not as JSON: names of jobs and variables are not always escaped.
        for index, letter in re.findall(r'"\d+(?:\[(\d*)\])?[^"]*":\s*\{[^{]*?"job_state":\s*"(\w)"', text):
            yield job, index or None, STATES.get(letter, "PENDING")


STATES = {
    "R": "RUNNING",
    "B": "RUNNING",
    "E": "COMPLETING",
    **dict.fromkeys("SU", "SUSPENDED"),
    **dict.fromkeys("FX", "ENDED"),
}
