"""Links between nodes: everybody meets everybody once, and one slow node is told from its partners."""

from __future__ import annotations

import os
import subprocess
from itertools import combinations
from pathlib import Path

import pytest

from mlhpc.plugins.fleet.benches import list_round_robin_rounds
from mlhpc.plugins.fleet.samples import group_by_metric, read_samples
from mlhpc.suite.launch.local import make_mpiexec_command, make_suite_command
from tests.fixtures.cli import mlhpc
from tests.fixtures.warm import warm_python


@pytest.mark.parametrize("nodes", range(2, 14))
def test_everybody_meets_everybody_once_and_nobody_two_at_a_time(nodes: int) -> None:
    met = [pair for of_round in list_round_robin_rounds(nodes) for pair in of_round]
    assert sorted(met) == list(combinations(range(nodes), 2))
    for of_round in list_round_robin_rounds(nodes):
        busy = [node for pair in of_round for node in pair]
        assert len(busy) == len(set(busy)) == nodes - nodes % 2


def test_three_nodes_leave_samples_of_each(tmp_path: Path) -> None:
    program = make_mpiexec_command(2)[0]
    words: list[str] = []
    for name in ("a1", "b2", "c3"):
        command = [*warm_python(), *make_suite_command("preflight", "links", "--budget", "100", "--rounds", "2")[1:]]
        words += [
            *([":"] if words else []),
            "-n",
            "1",
            "-env",
            "SLURMD_NODENAME",
            name,
            *command,
            "-o",
            str(tmp_path / "out"),
        ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = {metric.name: metric for metric in group_by_metric(read_samples(tmp_path / "out"))}
    assert set(metrics) == {"clock_offset", "link/pair", "link/without"}
    for metric in metrics.values():
        assert set(metric.samples) == {"a1", "b2", "c3"}
    assert {metric.better for metric in metrics.values()} == {"more", "less"}
    assert max(max(values) for values in metrics["clock_offset"].samples.values()) < 0.1  # one machine, one clock
    assert metrics["clock_offset"].bound == 1.0


def test_one_node_has_no_links(tmp_path: Path) -> None:
    done = mlhpc("preflight", "links", "-o", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "one node: there are no links to measure\n"), done.stderr
    (tmp_path / "out/links.jsonl").write_text("kept")
    again = mlhpc("preflight", "links", "-o", "out", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
