"""IBM Spectrum LSF. Reads the script from stdin; minutes, not seconds; the first of its hosts may run no rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlhpc.suite.launch.job import Job
from mlhpc.suite.launch.mpiexec import render_place
from mlhpc.suite.launch.schedulers import NOT_KNOWN, Ask, State

TITLE = "LSF"
TRIED = "not run on a real LSF"
PREFIX, IN_JOB = "#BSUB", "LSB_JOBID"
EXAMPLE = 'MLHPC_SIZE=smoke MLHPC_SET="max_epochs=2 precision=bfloat16" bsub -W 120 < FILE'
SUBMIT, PARSABLE, STDIN = ("bsub",), (), True
JOB_ID, QUEUE = r"^Job <(\d+)> is submitted", "bjobs"
KEPT, FOREIGN = ("LSF_ENVDIR", "LSF_SERVERDIR", "LSF_LIBDIR", "LSF_BINDIR"), ("LSB_", "LS_", "LSF_")
CHECKS = {"controller": ("lsid",), "queue": ("bqueues", "{queue}")}
MPI, WRITES_OUTPUT = "jsrun", False
REQUEUE_CODE = 99

ENVIRONMENT = """\
job=$LSB_JOBID self=$LSB_JOBID index=${MLHPC_INDEX:-}
((${LSB_JOBINDEX:-0} == 0)) || index=$((LSB_JOBINDEX - 1))
mapfile -t hosts < <(awk '!seen[$0]++' "$LSB_DJOB_HOSTFILE") # a host stands there once for each slot
trap : USR1 # the ranks save and stop, and this script goes on after them
DROP_FIRST
requeue() {
  echo "stopped with a checkpoint: requeued"
  exit 99
}
"""


def render_header(job: Job) -> Iterator[str]:
    site, resources = job.system.site, job.system.resources
    if not job.array:
        yield f"-J {job.workload}-{job.size}"
    if (site.mpi or MPI) == "jsrun":
        yield f"-nnodes {job.all_nodes}"
    else:
        yield f"-n {job.all_nodes * job.ranks_per_node}"
        yield f'-R "span[ptile={job.ranks_per_node}] affinity[core({resources.cpus_per_rank})]"'
        yield from (f"-gpu num={resources.gpus_per_node}",) if resources.gpus_per_node else ()
        yield from ("-x",) * resources.exclusive
    yield f"-W {-(-job.limit_s // 60)}"
    yield "-o /dev/null" if job.output else f"-o {job.workload}-{job.size}.%J.out"  # the script writes it itself
    yield from (f"-Q {REQUEUE_CODE}",) * site.requeue
    yield from (f"-q {site.queue}",) if site.queue else ()
    yield from (f"-P {site.account}",) if site.account else ()


def render_array(job: Job) -> Iterator[str]:
    yield f'-J "{job.workload}-{job.size}[1-{job.runs}]%1"'


def render_signal(job: Job) -> Iterator[str]:
    yield f"-wt {-(-job.system.resources.signal_margin_s // 60)}"
    yield "-wa USR1"


def render_dependency(job: str, *, succeeded: bool) -> Sequence[str]:
    return "-w", f"{'done' if succeeded else 'ended'}({job})"


def render_environment(job: Job) -> str:
    # With jsrun the script runs on a node of its own, which stands first.
    jsrun = (job.system.site.mpi or MPI) == "jsrun"
    drop = 'hosts=("${hosts[@]:1}") # the first one runs this script only\n'
    return ENVIRONMENT.replace("DROP_FIRST\n", drop * jsrun) + render_place(job, MPI)


def fetch_states(ids: Sequence[str], ask: Ask) -> Iterator[State]:
    text = ask("bjobs", "-a", "-noheader", "-o", "jobid jobindex stat", *ids)
    if text is None:
        yield from ((job, None, NOT_KNOWN) for job in ids)
    for words in map(str.split, (text or "").splitlines()):
        if len(words) == 3 and words[0] in ids:
            job, index, state = words
            yield job, None if index == "0" else str(int(index) - 1), STATES.get(state, state)


STATES = {
    **dict.fromkeys(("PEND", "PROV", "WAIT"), "PENDING"),
    **dict.fromkeys(("PSUSP", "USUSP", "SSUSP"), "SUSPENDED"),
    **{"RUN": "RUNNING", "DONE": "COMPLETED", "EXIT": "FAILED"},  # UNKWN and ZOMBI have not ended
}
