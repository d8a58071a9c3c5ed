"""Every workload reaches its targets: one seed of each ``smoke`` and five fresh seeds of each ``mini``, in `make test-long`.

`make test` trains CosmoFlow to its `smoke` target where the README's commands are run.

Where reference points are recorded, fresh seeds need as many epochs as they say.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from mlhpc.suite.card import ReferencePoint, read_reference_points
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, find_first_on_target, summarise_log

SEEDS = 5
MLHPC = (sys.executable, "-m", "mlhpc")
OF_AN_EPOCH = 1 / 12  # variance that counting whole epochs adds

SMOKES = [name for name, chosen in load_descriptors().items() if "smoke" in chosen.card().sizes]
MINIS = [name for name, chosen in load_descriptors().items() if "mini" in chosen.card().sizes]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", SMOKES)
def test_one_seed_reaches_the_target_of_smoke(tmp_path: Path, workload: str) -> None:
    (record,) = trained(workload, "smoke", 1, tmp_path, seed=4000)
    assert find_first_on_target(record, load_descriptor(workload).card().target("smoke")) is not None


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workload", MINIS)
def test_five_fresh_seeds_reach_the_target_as_the_reference_did(tmp_path: Path, workload: str) -> None:
    records = trained(workload, "mini", SEEDS, tmp_path, seed=5000)
    chosen = load_descriptor(workload)
    target = chosen.card().target("mini")
    reached = [find_first_on_target(record, target) for record in records]
    epochs = [evaluation.epoch for evaluation in reached if evaluation is not None and evaluation.epoch is not None]
    print(
        f"{workload} mini: {len(epochs)} of {SEEDS} fresh seeds reach {target.metric_name} {target.threshold:g}, two ranks"
    )
    for record, evaluation in zip(records, reached, strict=True):
        found = "not reached" if evaluation is None else f"{evaluation.value:.4f} in epoch {evaluation.epoch:g}"
        seconds = math.nan if record.time_to_train_s is None else record.time_to_train_s
        print(f"  seed {record.seed}: {found}, {seconds:.0f} s from run_start to run_stop")
    assert len(epochs) == SEEDS
    points = read_reference_points(chosen.folder, "mini")
    batch = records[0].global_batch_size
    for point in points.points if points else ():
        if point.global_batch_size == batch:
            assert abs(statistics.fmean(epochs) - point.mean) < 4 * spread(point, epochs)


def spread(point: ReferencePoint, epochs: list[float]) -> float:
    """Standard deviation of the difference of two means of whole epochs."""
    parts = ((point.std, len(point.epochs)), (statistics.stdev(epochs), len(epochs)))
    return float(sum((std**2 + OF_AN_EPOCH) / n for std, n in parts) ** 0.5)


def trained(workload: str, size: str, runs: int, folder: Path, *, seed: int) -> list[RunRecord]:
    """Runs of a workload on two ranks, on data generated for them. Skips sizes whose data are not generated."""
    data, run = str(folder / "data"), str(folder / "run")
    made = subprocess.run(
        [*MLHPC, "data", "generate", workload, "--size", size, "--ranks", "2", "-o", data],
        capture_output=True,
        text=True,
    )
    if "is real text" in made.stderr:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    words = ["--size", size, "--ranks", "2", "--runs", str(runs), "--seed", str(seed), "--set", f"data={data}"]
    subprocess.run([*MLHPC, "run", workload, *words, "-o", run])
    records = [summarise_log(read_events(path)) for path in sorted(Path(run).glob("result_*.txt"))]
    assert len(records) == runs
    return records
