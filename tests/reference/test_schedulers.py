"""Our directives beside those of ReFrame's own scheduler classes: the same job by both."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from mlhpc.suite.launch.job import Job, Resources, Site, SystemFile
from mlhpc.suite.launch.schedulers import load_dialect
from mlhpc.suite.launch.script import render_directives

# A class asks for options of a configuration; here there is none.
PROGRAM = """
import json, sys
from reframe.core.backends import getlauncher, getscheduler
from reframe.core.schedulers import Job
kind, options = sys.argv[1], json.loads(sys.argv[2])
known = {"job_submit_timeout": 60, "slurm_job_cancel_reasons": [], "slurm_envvar_whitelist": [], "max_sacct_failures": 3}
class Scheduler(getscheduler(kind)):
    def get_option(self, name):
        return known.get(name, False)
job = Job.create(Scheduler(), getlauncher("local")(), name="x", workdir="/w", script_filename="/w/j", stdout="/w/o", stderr="/w/e")
for name, value in options.items():
    setattr(job, name, value)
print(json.dumps(job.scheduler.emit_preamble(job)))
"""
SHARED = {  # what both say of nodes, ranks and time
    "slurm": ("--ntasks-per-node=4", "--cpus-per-task=8", "--time=2:30:0", "--exclusive"),
    "pbs": ("-l select=3:mpiprocs=4:ncpus=32", "-l walltime=2:30:00"),
    "lsf": ("-nnodes 3", "-W 150"),
}


def parts(line: str) -> frozenset[str]:
    """The words of a directive, whatever their order and zeros: chunks of select are one word each."""
    return frozenset(
        word.replace(":00", ":0").replace("=02:", "=2:")
        for word in line.replace(":mpi", " mpi").replace(":ncpus", " ncpus").split()
    )


@pytest.mark.parametrize("kind", SHARED)
def test_nodes_ranks_and_time_are_reframes(kind: str, python_with: Callable[..., str]) -> None:
    options = {
        "num_tasks": 12,
        "num_tasks_per_node": 4,
        "num_cpus_per_task": 8,
        "time_limit": 9000,
        "exclusive_access": True,
    }
    done = subprocess.run(
        [python_with("reframe"), "-c", PROGRAM, kind, json.dumps(options)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    theirs = {parts(line) for line in json.loads(done.stdout.splitlines()[-1])}
    system = SystemFile(name="s", kind=kind, site=Site(), resources=Resources(cpus_per_rank=8))
    job = Job("cosmoflow", "mini", "mini", system, nodes=3, ranks_per_node=4, time_limit="2:30:0")
    dialect = load_dialect(kind)
    ours = {parts(line) for line in render_directives(job, dialect)}
    wanted = {parts(f"{dialect.PREFIX} {text}") for text in SHARED[kind]}
    assert wanted <= ours, sorted(map(sorted, wanted - ours))
    assert wanted <= theirs, (done.stdout, sorted(map(sorted, wanted - theirs)))
