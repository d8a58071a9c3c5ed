"""Grid Engine (SGE, Son of Grid Engine, Altair). Indices of arrays begin at 1; the exit code 99 starts a job again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from mlhpc.suite.launch.job import Job
from mlhpc.suite.launch.mpiexec import render_clock, render_place
from mlhpc.suite.launch.schedulers import NOT_KNOWN, Ask, State

TITLE = "Grid Engine"
TRIED = "8.1.9, one and two nodes"
PREFIX, IN_JOB = "#$", "JOB_ID"
EXAMPLE = 'qsub -l h_rt=2:0:0 -v MLHPC_STOP_AFTER_S=7080,MLHPC_SIZE=smoke,MLHPC_SET="max_epochs=2" FILE'
SUBMIT, PARSABLE, STDIN = ("qsub",), ("-terse",), False
JOB_ID, QUEUE = r"^(\d+)(?:\.\d+-\d+:\d+)?$", "qstat"
KEPT = ("SGE_ROOT", "SGE_CELL", "SGE_QMASTER_PORT", "SGE_EXECD_PORT", "SGE_CLUSTER_NAME")
FOREIGN = ("SGE_", "PE_", "JOB_")
PE = ("qconf", "-sp", "{parallel_environment}")
CHECKS = {"controller": ("qhost",), "queue": ("qconf", "-sq", "{queue}"), "parallel environment": PE}
MPI, WRITES_OUTPUT = "hydra", False

ENVIRONMENT = """\
job=$JOB_ID self=$JOB_ID index=${MLHPC_INDEX:-}
[[ ${SGE_TASK_ID:-undefined} == undefined ]] || index=$((SGE_TASK_ID - 1))
hosts=("$(hostname)") # without a parallel environment
if [[ -n ${PE_HOSTFILE:-} ]]; then mapfile -t hosts < <(cut -d ' ' -f 1 "$PE_HOSTFILE"); fi
if ((${#hosts[@]} * SLOTS != ${NSLOTS:-SLOTS})); then
  echo "$NSLOTS slots on ${#hosts[@]} nodes: the allocation_rule of the parallel environment must be SLOTS" >&2
  exit 2
fi
trap : USR1 # of a site's s_rt or -notify, to the whole job: the ranks save and stop, and this script goes on after them
requeue() {
  echo "stopped with a checkpoint: requeued"
  exit 99
}
"""


def render_header(job: Job) -> Iterator[str]:
    site, slots = job.system.site, job.all_nodes * job.cpus_per_node
    yield "-S /bin/bash"
    yield f"-N {job.workload}-{job.size}"
    yield from ("-cwd", "-V", "-j y")
    yield from ("-o /dev/null",) * (job.output is not None)  # the script writes it itself
    if site.parallel_environment or slots > 1:
        yield f"-pe {site.parallel_environment or 'mpi'} {slots}"
    yield f"-l h_rt={render_clock(job.limit_s)}"
    yield f"-r {'y' if site.requeue else 'n'}"
    yield from (f"-q {site.queue}",) if site.queue else ()
    yield from (f"-P {site.account}",) if site.account else ()


def render_array(job: Job) -> Iterator[str]:
    yield f"-t 1-{job.runs}"
    yield "-tc 1"


def render_signal(job: Job) -> Iterator[str]:
    # Not s_rt: in 8.1.9 it signals a job's first start only, and kills one that was started again (29 November 2026).
    yield from ()


def render_dependency(job: str, *, succeeded: bool) -> Sequence[str]:
    return "-hold_jid", job  # it has no "only if it succeeded"


def render_environment(job: Job) -> str:
    return re.sub(r"\bSLOTS\b", str(job.cpus_per_node), ENVIRONMENT) + render_place(job, MPI)


def fetch_states(ids: Sequence[str], ask: Ask) -> Iterator[State]:
    text = ask("qstat", "-xml", "-u", "*")
    if text is None:
        yield from ((job, None, NOT_KNOWN) for job in ids)
    for each in ElementTree.fromstring(text or "<job_info/>").iter("job_list"):  # noqa: S314 our own scheduler's
        job, letters, tasks = (each.findtext(name) or "" for name in ("JB_job_number", "state", "tasks"))
        if job in ids:
            state = next((word for letter, word in STATES.items() if re.search(letter, letters)), "RUNNING")
            # Tasks that wait share an element: 2-5:1, or 2,4
            spans = re.findall(r"(\d+)(?:-(\d+):(\d+))?", tasks)
            numbers = [n for a, b, step in spans for n in range(int(a), int(b or a) + 1, int(step or 1))]
            yield from ((job, str(number - 1), state) for number in numbers)
            yield from ((job, None, state),) * (not numbers)


STATES = {"E": "ERROR", "d": "COMPLETING", "[sST]": "SUSPENDED", "[qh]": "PENDING", "[rt]": "RUNNING"}
