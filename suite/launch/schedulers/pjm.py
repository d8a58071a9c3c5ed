"""PJM, the scheduler of Fugaku. Whole nodes; no signal before the limit; mpiexec takes the nodes of the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlhpc.suite.errors import InputError
from mlhpc.suite.launch.job import Job
from mlhpc.suite.launch.mpiexec import render_clock
from mlhpc.suite.launch.schedulers import NOT_KNOWN, Ask, State

TITLE = "PJM"
TRIED = "not run on a real PJM"
PREFIX, IN_JOB = "#PJM", "PJM_JOBID"
EXAMPLE = 'pjsub -L elapse=2:00:00 -x MLHPC_STOP_AFTER_S=7080,MLHPC_SIZE=smoke,MLHPC_SET="max_epochs=2" FILE'
SUBMIT, PARSABLE, STDIN = ("pjsub",), (), False
JOB_ID, QUEUE = r"pjsub Job (\d+) submitted", "pjstat"
KEPT, FOREIGN = (), ("PJM_", "PLE_", "PMIX_")
CHECKS = {"controller": ("pjstat",), "queue": ("pjstat", "--rsc", "--rg", "{queue}")}
MPI, WRITES_OUTPUT = "pjm", False

ENVIRONMENT = """\
job=$PJM_JOBID self=$PJM_JOBID index=${PJM_BULKNUM:-${MLHPC_INDEX:-}}
mapfile -t hosts < <(awk '!seen[$0]++' "$PJM_O_NODEINF")
names=$(IFS=,; echo "${hosts[*]}") nodes=${#hosts[@]} ranks=RANKS cpus=CPUS
place() { start=(mpiexec -n "$(($1 * $3))"); } # all nodes: max-proc-per-node spreads the ranks
is_running() { return 1; } # the ranks find out, by the lock
trap '' XCPU # at the limit all processes get it, the ranks too: they end by SIGKILL ten seconds later, or before
requeue() { :; }"""


def render_header(job: Job) -> Iterator[str]:
    site = job.system.site
    if job.instances > 1 or job.spares:
        raise InputError("PJM gives a command all nodes of its job: --instances and --spares cannot be used")
    yield f"-N {job.workload}-{job.size}"[:66]
    yield f'-L "node={job.all_nodes}"'
    yield f'-L "elapse={render_clock(job.limit_s)}"'
    yield f'--mpi "max-proc-per-node={job.ranks_per_node}"'
    yield from ("-X", "-j")
    yield from ("-o /dev/null",) * (job.output is not None)  # the script writes it itself
    yield "--restart" if site.requeue else "--norestart"
    yield from (f'-L "rscgrp={site.queue}"',) if site.queue else ()
    yield from (f"-g {site.account}",) if site.account else ()


def render_array(job: Job) -> Iterator[str]:
    yield "--bulk"
    yield f'--sparam "0-{job.runs - 1}"'


def render_signal(job: Job) -> Iterator[str]:
    # At the limit all processes get SIGXCPU, and ten seconds later SIGKILL: not enough for a checkpoint.
    yield from ()


def render_dependency(job: str, *, succeeded: bool) -> Sequence[str]:
    return "--step", "--sparam", f"jid={job}" + ",sd=ec!=0:all" * succeeded


def render_environment(job: Job) -> str:
    return ENVIRONMENT.replace("RANKS", str(job.ranks_per_node)).replace(
        "CPUS", str(job.system.resources.cpus_per_rank)
    )


def fetch_states(ids: Sequence[str], ask: Ask) -> Iterator[State]:
    text = ask("pjstat", "-E", *ids)
    if text is None:
        yield from ((job, None, NOT_KNOWN) for job in ids)
    column = None
    for words in map(str.split, (text or "").splitlines()):
        if words[:1] == ["JOB_ID"]:
            column = words.index("ST")
        elif column is not None and len(words) > column:
            job, _, index = words[0].rstrip("]").partition("[")
            if job in ids:
                yield job, index or None, STATES.get(words[column], words[column])


STATES = {
    **dict.fromkeys(("ACC", "QUE", "HLD", "RNA"), "PENDING"),
    **dict.fromkeys(("SPP", "SPD", "RSM"), "SUSPENDED"),
    **{"RNP": "RUNNING", "RUN": "RUNNING", "RNE": "COMPLETING", "RNO": "COMPLETING"},
    **{"EXT": "ENDED", "CCL": "CANCELLED", "ERR": "FAILED", "RJT": "FAILED"},
}
