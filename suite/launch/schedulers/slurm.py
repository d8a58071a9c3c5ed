"""Slurm. Asks squeue, then scontrol; does not need sacct, whose database many sites lack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mlhpc.suite.launch.job import Job
from mlhpc.suite.launch.schedulers import NOT_KNOWN, Ask, State
from mlhpc.suite.node_list import parse_node_list

TITLE = "Slurm"
TRIED = "22.05.8, two nodes"
PREFIX, IN_JOB = "#SBATCH", "SLURM_JOB_ID"
EXAMPLE = 'sbatch --nodes=4 --time=02:00:00 --export=ALL,MLHPC_SIZE=smoke,MLHPC_SET="max_epochs=2" FILE'
SUBMIT, PARSABLE, STDIN = ("sbatch",), ("--parsable",), False
JOB_ID, QUEUE = r"^(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?$", "squeue --me"  # --parsable or not
KEPT, FOREIGN = ("SLURM_CONF", "SLURM_JWT"), ("SBATCH_", "SLURM_", "SQUEUE_")
CHECKS = {"controller": ("sinfo", "--noheader", "--format=%P %D nodes %T"), "queue": ("sinfo", "-hp", "{queue}")}
MPI, WRITES_OUTPUT = "pmi2", True
# A record of scontrol: tasks of an array (`7`, or `8-10,12%2` that wait), then the state in a line of its own
RECORD = r"^JobId=\d+(?: ArrayJobId=\d+ ArrayTaskId=(?:([\d,-]+)(?:%\d+)? )?)?.*(?:\n +.*)*?\n +JobState=(\w+)"

ENVIRONMENT = """\
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} index=${SLURM_ARRAY_TASK_ID:-} chosen=() # SLURM_JOB_ID of one task is the array's
self=$SLURM_JOB_ID names=$SLURM_JOB_NODELIST nodes=$SLURM_JOB_NUM_NODES ranks=$SLURM_NTASKS_PER_NODE cpus=$SLURM_CPUS_PER_TASK
place() {
  start=(srun --nodes="$1" --ntasks="$(($1 * $3))" --ntasks-per-node="$3" --cpus-per-task="$4" --mpi="${5:-none}")
  start+=(--kill-on-bad-exit="${6:-0}" --input=none)
  if [[ -n ${chosen[*]} ]]; then start+=("--nodelist=$(IFS=,; echo "${chosen[*]:$2:$1}")"); else start+=(--relative="$2"); fi
}
is_running() { [[ $(squeue --noheader --format=%T --jobs="$1" 2> /dev/null) == RUNNING ]]; }
requeue() {
  command -v scontrol > /dev/null || return 0
  echo "stopped with a checkpoint: requeued"
  if scontrol requeue "$task"; then sleep 60; fi # Slurm ends this script meanwhile
}"""


def render_header(job: Job) -> Iterator[str]:
    site, resources = job.system.site, job.system.resources
    yield f"--job-name={job.workload}-{job.size}"
    yield f"--nodes={job.all_nodes}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    yield f"--cpus-per-task={resources.cpus_per_rank}"
    yield from (f"--gpus-per-node={resources.gpus_per_node}",) * bool(resources.gpus_per_node)
    yield from ("--exclusive",) * resources.exclusive
    yield f"--time={job.time_limit}"
    yield "--requeue" if site.requeue else "--no-requeue"
    name = "%A_%a" if job.array else "%j"
    output = f"%x-{name}.out" if job.output is None else job.output.replace("%", "%%") + f"/job_{name}.log"
    yield f"--output={_quote(output)}"  # Slurm expands %j in any part of a path
    yield "--open-mode=append"  # a requeued job would overwrite the output of its first start
    options = {"partition": site.queue, "account": site.account, "qos": site.qos, "constraint": site.constraint}
    yield from (f"--{name}={_quote(value)}" for name, value in options.items() if value)


def render_array(job: Job) -> Iterator[str]:
    yield f"--array=0-{job.runs - 1}%1"


def render_signal(job: Job) -> Iterator[str]:
    yield f"--signal=TERM@{job.system.resources.signal_margin_s}"  # without `B:` to the job's steps: the ranks


def render_dependency(job: str, *, succeeded: bool) -> Sequence[str]:
    return (f"--dependency={'afterok' if succeeded else 'afterany'}:{job}",)


def render_environment(job: Job) -> str:
    return ENVIRONMENT


def fetch_states(ids: Sequence[str], ask: Ask) -> Iterator[State]:
    # %F: the job id, %K: the number of an array's task, %T: the state. With --array tasks that wait have a line each
    listed = ask("squeue", "--array", "--noheader", "--format=%F %K %T", f"--jobs={','.join(ids)}")
    found = [each for line in (listed or "").splitlines() if len(each := line.split()) == 3]
    yield from ((job, index if index.isdecimal() else None, state) for job, index, state in found)
    shown: str | None = ""
    for job in sorted(set(ids) - {each[0] for each in found}):
        shown = None if shown is None else ask("scontrol", "show", "job", job)  # who does not answer is not asked again
        for tasks, state in re.findall(RECORD, shown or "", re.MULTILINE):
            yield from ((job, index, state) for index in (parse_node_list(f"[{tasks}]") if tasks else (None,)))
        if shown is None and listed is None:
            yield job, None, NOT_KNOWN


def _quote(text: str) -> str:
    """Quote a value for an #SBATCH line: sbatch understands double quotes and expands no variables."""
    return text if re.fullmatch(r"[\w./:=@+,%-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
