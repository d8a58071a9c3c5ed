"""Flux, as on El Capitan. It has no arrays and starts no job again; ids are made short by letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlhpc.suite.launch.job import Job
from mlhpc.suite.launch.schedulers import NOT_KNOWN, Ask, State

TITLE = "Flux"
TRIED = "not run on a real Flux"
PREFIX, IN_JOB = "# flux:", "FLUX_URI"
EXAMPLE = 'flux batch -t 120m --env=MLHPC_SIZE=smoke --env=MLHPC_SET="max_epochs=2 precision=bfloat16" FILE'
SUBMIT, PARSABLE, STDIN = ("flux", "batch"), (), False
JOB_ID, QUEUE = r"^(?:ƒ|f)(?P<base58>[1-9A-HJ-NP-Za-km-z]+)$", "flux jobs"
KEPT, FOREIGN = ("FLUX_URI", "FLUX_CONNECTOR_PATH", "FLUX_EXEC_PATH", "FLUX_MODULE_PATH"), ("FLUX_", "PMI_")
CHECKS = {"controller": ("flux", "resource", "list"), "queue": ("flux", "queue", "list", "--queue={queue}")}
MPI, WRITES_OUTPUT = "flux", False

ENVIRONMENT = """\
job=$(flux job id --to=dec "$(flux getattr jobid)")
self=$job index=${MLHPC_INDEX:-}
read -ra hosts <<< "$(flux hostlist --expand instance)"
names=$(IFS=,; echo "${hosts[*]}") nodes=${#hosts[@]} ranks=RANKS cpus=CPUS chosen=()
place() {
  local at=("${hosts[@]}")
  [[ -z ${chosen[*]} ]] || at=("${chosen[@]}")
  start=(flux run -N "$1" --tasks-per-node="$3" -c "$4" GPUS--requires="hosts:$(IFS=,; echo "${at[*]:$2:$1}")")
}
is_running() { return 1; } # the ranks find out, by the lock
trap : USR1 # goes to this script too, which goes on after the ranks
requeue() { :; }"""


def render_header(job: Job) -> Iterator[str]:
    site, resources = job.system.site, job.system.resources
    yield f"--job-name={job.workload}-{job.size}"
    yield f"-N {job.all_nodes}"
    yield f"-n {job.all_nodes * job.ranks_per_node}"
    yield f"-c {resources.cpus_per_rank}"
    yield from (f"-g {_count_gpus(job)}",) if _count_gpus(job) else ()
    yield from ("-x",) * resources.exclusive
    yield f"-t {job.limit_s}s"
    yield from ("--output=/dev/null",) * (job.output is not None)  # the script writes it itself
    yield from (f"-q {site.queue}",) if site.queue else ()
    yield from (f"-B {site.account}",) if site.account else ()


def render_array(job: Job) -> Iterator[str]:
    yield from ()


def render_signal(job: Job) -> Iterator[str]:
    yield f"--signal=USR1@{job.system.resources.signal_margin_s}s"


def render_dependency(job: str, *, succeeded: bool) -> Sequence[str]:
    return (f"--dependency={'afterok' if succeeded else 'afterany'}:{job}",)


def render_environment(job: Job) -> str:
    gpus = f"-g {_count_gpus(job)} " if _count_gpus(job) else ""
    text = ENVIRONMENT.replace("RANKS", str(job.ranks_per_node)).replace("GPUS", gpus)
    return text.replace("CPUS", str(job.system.resources.cpus_per_rank))


def fetch_states(ids: Sequence[str], ask: Ask) -> Iterator[State]:
    text = ask("flux", "jobs", "-a", "-n", "-o", "{id.dec} {status}", *ids)
    if text is None:
        yield from ((job, None, NOT_KNOWN) for job in ids)
    for words in map(str.split, (text or "").splitlines()):
        if len(words) == 2:
            yield words[0], None, STATES.get(words[1], words[1])


def _count_gpus(job: Job) -> int:
    """Return the GPUs of a rank: Flux counts them by slot."""
    return -(-job.system.resources.gpus_per_node // job.ranks_per_node)


STATES = {
    **dict.fromkeys(("DEPEND", "PRIORITY", "SCHED"), "PENDING"),
    **{"RUN": "RUNNING", "CLEANUP": "COMPLETING", "CANCELED": "CANCELLED"},
}
