"""Renders the function `place` of a job script for schedulers that leave starting ranks to an mpiexec."""

from __future__ import annotations

from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.launch.job import Job

# By kind of mpiexec: its words for $1 nodes, which `list` names with commas, $3 processes on each and $4 cores for each
WORDS = {
    "hydra": '"$mpiexec" -hosts "$list" -ppn "$3" -n "$(($1 * $3))"',  # MPICH, Intel MPI
    "openmpi": 'mpirun --host "${list//,/:$3,}:$3" --map-by "ppr:$3:node:PE=$4" -n "$(($1 * $3))" "${given[@]}"',
    "pals": 'mpiexec --hosts "$list" --ppn "$3" --depth "$4" --cpu-bind depth -n "$(($1 * $3))"',  # HPE Cray, as on Aurora
    # A resource set a node; -E is not needed, ranks inherit. The nodes are jsrun's choice.
    "jsrun": 'jsrun -n "$1" -r 1 -a "$3" -c "$(($3 * $4))" -g {gpus} -b none',
}
GIVEN = """\
  local given=() name # Open MPI passes no variables to other nodes
  for name in "${!MLHPC_@}" PATH TMPDIR OMP_NUM_THREADS PYTHONUNBUFFERED{names}; do given+=(-x "$name"); done
"""
HYDRA = """\
  local mpiexec=${MLHPC_PYTHON%/*}/mpiexec # that of this Python fits its mpi4py
  [[ -x $mpiexec ]] || mpiexec=mpiexec
"""
LIST = """\
  local list at=("${hosts[@]}")
  [[ -z ${chosen[*]} ]] || at=("${chosen[@]}")
  list=$(IFS=,; echo "${at[*]:$2:$1}")
"""
PLACE = """\
names=$(IFS=,; echo "${hosts[*]}") nodes=${#hosts[@]} ranks=%d cpus=%d%s
place() {
%s  start=(%s)
}
is_running() { return 1; } # the ranks find out, by the lock"""


def render_place(job: Job, default: str) -> str:
    """Render `place`, and what it needs, after the line that sets the array ``hosts``. InputError: no such mpiexec."""
    kind, resources = job.system.site.mpi or default, job.system.resources
    if kind not in WORDS:
        raise InputError(f"site.mpi: {explain_unknown_name('mpiexec', kind, WORDS)}")
    names = "".join(f" {name}" for name in job.system.site.environment)
    before = {"hydra": HYDRA, "openmpi": GIVEN.replace("{names}", names)}.get(kind, "")
    lists = kind != "jsrun"  # which chooses the nodes itself
    words = WORDS[kind].replace("{gpus}", str(resources.gpus_per_node))
    return PLACE % (job.ranks_per_node, resources.cpus_per_rank, " chosen=()" * lists, LIST * lists + before, words)


def render_clock(seconds: int) -> str:
    """Render a time as hours, minutes and seconds."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
