"""Renders result.json, version 1: the score that the submitter's suite computed from the logs of a result.

The score is never read from it: `mlhpc reproduce` recomputes it from the logs and compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.manifest import compute_sha256
from mlhpc.suite.compliance.ruleset import Benchmark
from mlhpc.suite.log.energy.score import find_energy
from mlhpc.suite.log.record import RunRecord, find_first_on_target
from mlhpc.suite.log.score import Throughput, TimeToTrain

STATED = "result.json"
STATED_VERSION = 1
ENERGY = ("energy_j", "energy_of")  # only in a result whose energy was measured


def build_stated_result(
    result: TimeToTrain | Throughput,
    benchmark: Benchmark,
    names: Mapping[Path, str] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Return the content of result.json: seconds, joules, epochs; null for what does not exist.

    ``names`` maps paths of logs to their names in the package. ``folder`` holds them there, with power readings.
    """
    rate = result if isinstance(result, Throughput) else None
    time = result if isinstance(result, TimeToTrain) else None
    return {
        "version": STATED_VERSION,
        "benchmark": benchmark.name,
        "size": benchmark.size,
        "score_s": time.mean_s if time else None,
        "score_with_staging_s": time.mean_with_staging_s if time else None,
        "models_per_min": rate.models_per_minute if rate else None,
        "reason": result.reason,
        "runs": [
            _build_run(run.record, benchmark, names)
            for run in sorted(result.runs, key=lambda run: str(run.record.path))
        ],
        **_build_energy(time, names or {}, folder),
    }


def list_differences(stated: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """List what differs between two such documents: name, stated and found value. Runs are matched by their file."""
    names: tuple[str, ...] = ("benchmark", "size", "score_s", "score_with_staging_s", "models_per_min")
    # Packages without a meter state no energy.
    names += tuple(name for name in ENERGY if name in stated)
    different = [(name, stated.get(name), found.get(name)) for name in names if stated.get(name) != found.get(name)]
    one, other = (_group_by_file(document.get("runs")) for document in (stated, found))
    for file in sorted({*one, *other}):
        a, b = one.get(file, {}), other.get(file, {})
        keys = [key for key in ("sha256", "seed", "time_s", "epochs", "converged") if a.get(key) != b.get(key)]
        different += [(f"{file}: {key}", a.get(key), b.get(key)) for key in keys]
    # A stranger's document may hold texts of any length.
    return [(name, str(was)[:80], str(now)[:80]) for name, was, now in different]


def _build_energy(result: TimeToTrain | None, names: Mapping[Path, str], folder: Path | None) -> dict[str, Any]:
    if result is not None and folder is not None:
        # An external meter's readings are in the package only, so the energy is that of the logs there.
        runs = []
        for run in result.runs:
            assert run.record.path is not None  # a log of a run folder always has a path
            packaged = replace(run.record, path=folder / names[run.record.path])
            runs.append(replace(run, record=packaged))
        result = replace(result, runs=tuple(runs))
    found = find_energy(result) if result is not None else None
    return {} if found is None or found.mean_j is None else dict(zip(ENERGY, (found.mean_j, found.what), strict=True))


def find_epochs_to_target(record: RunRecord, benchmark: Benchmark) -> float | None:
    """Return the epoch_num at which the target was reached first; None if it was not."""
    first = find_first_on_target(record, benchmark)
    return None if first is None else first.epoch


def _group_by_file(runs: object) -> dict[str, Mapping[str, Any]]:
    items: Sequence[Any] = runs if isinstance(runs, list) else ()
    return {str(item.get("file")): item for item in items if isinstance(item, dict)}


def _build_run(record: RunRecord, benchmark: Benchmark, names: Mapping[Path, str] | None) -> dict[str, Any]:
    assert record.path is not None
    return {
        "file": (names or {}).get(record.path, record.path.name),
        "sha256": compute_sha256(record.path),
        "seed": record.seed,
        "time_s": record.time_to_train_s,
        "epochs": find_epochs_to_target(record, benchmark),
        "converged": find_first_on_target(record, benchmark) is not None,
    }
