"""Run folders with any name, as Slurm itself reads and expands them."""

from __future__ import annotations

from pathlib import Path

from mlhpc.suite.launch.slurm import Job, Launcher, render_sbatch_script
from tests.slurm.conftest import Cluster


def test_slurm_writes_the_output_where_the_name_says(cluster: Cluster, tmp_path: Path) -> None:
    """The line of a job script, and the words of srun in it."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    run = tmp_path / 'a %j %% b$5\'s "q" #x'
    (run / "output").mkdir(parents=True)
    job = Job(
        workload="cosmoflow", size="smoke", config="smoke", system="s", launcher=Launcher(), nodes=1, ranks_per_node=1,
        run=str(run), output=f"{run}/output".replace("%", "%%") + "/job_%j.log",
    )  # fmt: skip
    lines = render_sbatch_script(job).splitlines()
    head = [
        line for line in lines if line.startswith("#SBATCH --output") or "MLHPC_RUN:=" in line or "apostrophe" in line
    ]
    (output,) = (line.split()[0] for line in lines if "MLHPC_RUN//" in line)
    script = tmp_path / "job.sbatch"
    script.write_text("\n".join(["#!/bin/bash", *head, "echo job", f"srun --ntasks=1 {output} echo step", ""]))
    number = cluster.sbatch(script, "--nodes=1")
    assert cluster.wait(number) == "COMPLETED"
    assert (run / "output" / f"job_{number}.log").read_text() == "job\n"
    assert (run / "output" / "trial_.log").read_text() == "step\n"  # outside of the function that has a trial
