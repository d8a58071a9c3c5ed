"""The gate of `mlhpc submit --preflight` on a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.cli import mlhpc
from tests.fixtures.wings import MISSING_COMMANDS
from tests.slurm.conftest import Cluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif("preflight" in MISSING_COMMANDS, reason="the wing fleet is not installed"),
]

HANGS = """#!/bin/bash
# A node whose Python never starts
if [[ ${SLURMD_NODENAME:-} == node1 && $* == *"preflight node"* ]]; then sleep 600; fi
exec %s "$@"
"""


@pytest.mark.long
def test_a_node_that_hangs_is_named_and_the_trial_runs_on_the_spare_one(
    cluster: Cluster, smoke_data: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(HANGS % sys.executable)
    python.chmod(0o755)
    system = tmp_path / "two.yaml"
    parts = {"resources": {"exclusive": False}, "site": {"python": str(python)}}
    system.write_text(json.dumps({"name": "two", **parts}))
    words = ["submit", "cosmoflow", "--system", str(system), "--size", "smoke", "--nodes", "1", "--preflight", "66"]
    words += ["--spares", "1", "-o", "run", "--set", "max_epochs=1", "--set", f"data={smoke_data / 'cosmoflow-smoke'}"]
    done = mlhpc(*words, cwd=tmp_path, environment=cluster.environment | {"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunFolder(tmp_path / "run")
    (job,) = json.loads((run.root / "job.json").read_text())["job_ids"]
    cluster.wait(job, timeout_s=500)
    text = (run.root / f"output/job_{job}.log").read_text()
    assert "preflight: node1: bad" in text
    assert "preflight:   left no samples: nothing was measured there" in text
    assert "preflight: to leave them out: --exclude=node1" in text
    assert "preflight: the trials run on node2" in text
    took = int(text.rpartition("preflight: took ")[2].split()[0])
    assert took < 300  # the node would hang for 600; on a quiet machine it is 66 and srun's two seconds of grace
    log = read_events(run.result(0))
    (event,) = [event for event in log.events if event.key == "preflight"]
    assert (event.value["bad"], sum(event.value.values())) == (1, 2)
    assert event.metadata["false_alarms"] == 1e-3
    kept = [path.relative_to(run.root / "preflight").parts[1:] for path in run.preflights()]
    assert ("verdict.json",) in kept
    assert any(parts[-1] == "node2.jsonl" for parts in kept)
    assert [path.stem for path in run.node_facts()] == ["node2"]
