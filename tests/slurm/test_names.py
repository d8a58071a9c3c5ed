"""Run folders with any name, as Slurm itself reads and expands them."""

from __future__ import annotations

from pathlib import Path

from mlhpc.suite.launch.job import Job, SystemFile
from mlhpc.suite.launch.script import render_script
from tests.slurm.conftest import Cluster


def test_slurm_writes_the_output_where_the_name_says(cluster: Cluster, tmp_path: Path) -> None:
    """The line of a job script."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    run = tmp_path / 'a %j %% b$5\'s "q" #x'
    (run / "output").mkdir(parents=True)
    job = Job(
        workload="cosmoflow", size="smoke", config="smoke", system=SystemFile(name="s"), nodes=1, ranks_per_node=1,
        run=str(run), output=f"{run}/output",
    )  # fmt: skip
    lines = render_script(job).splitlines()
    head = [line for line in lines if line.startswith("#SBATCH --output")]
    script = tmp_path / "job.sbatch"
    script.write_text("\n".join(["#!/bin/bash", *head, "echo job", ""]))
    number = cluster.sbatch(script, "--nodes=1")
    assert cluster.wait(number) == "COMPLETED"
    assert (run / "output" / f"job_{number}.log").read_text() == "job\n"
