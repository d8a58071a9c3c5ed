"""Targets are reached from fresh seeds, as often and as fast as the shipped reference points say."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from suite.card import read_reference_points
from suite.log_reader import read_events
from suite.record import first_reaching, summarise
from suite.workload import descriptor

SEEDS = 10


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("workload", "size"), [("cosmoflow", "smoke"), ("cosmoflow", "mini"), ("cosmoflow", "mini32")])
def test_ten_fresh_seeds_reach_the_target_as_the_reference_did(tmp_path: Path, workload: str, size: str) -> None:
    mlhpc = [sys.executable, "-m", "suite"]
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    subprocess.run([*mlhpc, "data", "generate", workload, "--size", size, "--ranks", "2", "-o", data], check=True)
    subprocess.run(
        [
            *(*mlhpc, "run", workload, "--config", size, "--ranks", "2", "--runs", str(SEEDS)),
            *("--seed", "5000", "--set", f"data={data}", "-o", run),
        ]
    )
    chosen = descriptor(workload)
    target = chosen.card().size(size)
    records = [summarise(read_events(path)) for path in sorted(Path(run).glob("result_*.txt"))]
    reached = [first_reaching(record, target) for record in records]
    epochs = [evaluation.epoch for evaluation in reached if evaluation is not None]
    print(f"{workload} {size}: {len(epochs)} of {SEEDS} seeds, {statistics.fmean(epochs):.2f} epochs: {epochs}")
    assert len(records) == SEEDS
    assert len(epochs) >= SEEDS - 1
    points = read_reference_points(chosen.folder, size)
    assert points is not None
    (point,) = points.points
    spread = (point.std**2 / len(point.epochs) + statistics.variance(epochs) / len(epochs)) ** 0.5
    assert abs(statistics.fmean(epochs) - point.mean) < 4 * spread
