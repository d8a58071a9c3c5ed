"""Reference points: recorded from logs of many seeds, with n and spread stated, never into the card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlhpc.suite.card import ReferencePoints
from mlhpc.suite.commands.workload import compute_reference_point
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import convert
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import edit, our_run, our_runs, write


def records(folder: Path) -> list[RunRecord]:
    return [summarise_log(read_events(path)) for path in sorted(folder.glob("result_*.txt"))]


def test_record_writes_epochs_and_seeds_beside_the_card(tmp_path: Path) -> None:
    runs = our_runs(tmp_path / "runs", 12)
    write(runs / "result_3.txt", our_run(seed=103, values=(0.5, 0.45)))
    write(runs / "result_4.txt", our_run(seed=104, values=(0.5, 0.45, 0.4, 0.35)))
    done = mlhpc("workload", "rcp", "record", runs, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "batch 16: 4.91 +- 0.30 epochs, n=11, 1 did not converge" in done.stdout

    points = convert(json.loads((tmp_path / "out" / "rcp" / "smoke.json").read_text()), ReferencePoints)
    (point,) = points.points
    assert (points.workload, points.size, point.global_batch_size) == ("cosmoflow", "smoke", 16)
    assert point.not_converged == (103,)
    assert dict(zip(point.seeds, point.epochs, strict=True))[104] == 4
    assert point.hyperparameters["opt_base_learning_rate"] == 0.01
    assert point.recorded == "2026-09-21"


def test_a_point_spans_data_sets(tmp_path: Path) -> None:
    """Five runs on one data set said 5.00 +- 0.00; on others the same seeds took 4 epochs."""
    first, second = our_runs(tmp_path / "a"), our_runs(tmp_path / "b")
    for path in second.glob("result_*.txt"):
        log = our_run(seed=100 + int(path.stem[-1]), values=(0.5, 0.45, 0.4, 0.35))
        write(path, edit("data_manifest", value="f" * 64)(log))
    done = mlhpc("workload", "rcp", "record", first, second, "-o", tmp_path)
    assert "batch 16: 4.50 +- 0.53 epochs, n=10 on 2 data sets" in done.stdout, done.stderr
    (point,) = convert(json.loads((tmp_path / "rcp" / "smoke.json").read_text()), ReferencePoints).points
    assert point.data_manifests[5:] == ("f" * 64,) * 5
    assert len({*zip(point.seeds, point.data_manifests, strict=True)}) == 10
    assert len(set(point.seeds)) == 5


def test_points_of_other_batch_sizes_are_kept(tmp_path: Path) -> None:
    mlhpc("workload", "rcp", "record", our_runs(tmp_path / "a"), "-o", tmp_path)
    other = our_runs(tmp_path / "b", hyperparameters={"global_batch_size": 64})
    assert mlhpc("workload", "rcp", "record", other, "-o", tmp_path).returncode == 0
    known = json.loads((tmp_path / "rcp" / "smoke.json").read_text())
    assert [point["global_batch_size"] for point in known["points"]] == [16, 64]


def test_what_is_no_point_is_refused(tmp_path: Path) -> None:
    benchmark = read_ruleset("mlhpc-1.0").benchmark("cosmoflow", "smoke")
    assert benchmark is not None
    with pytest.raises(InputError, match="another run on the same data has seed 5 too"):
        compute_reference_point(records(our_runs(tmp_path / "same", seed=5)), benchmark, "x")
    drifted = our_runs(tmp_path / "drifted")
    write(drifted / "result_4.txt", our_run(seed=9, hyperparameters={"dropout": 0.5}))
    with pytest.raises(InputError, match="hyperparameters differ"):
        compute_reference_point(records(drifted), benchmark, "x")
    mixed = our_runs(tmp_path / "mixed")
    write(mixed / "result_4.txt", our_run("mini", seed=9, values=(0.25,)))
    assert "the logs are of several benchmarks or sizes" in mlhpc("workload", "rcp", "record", mixed).stderr


def test_show_lists_every_size() -> None:
    done = mlhpc("workload", "rcp", "show", "cosmoflow")
    assert done.returncode == 0
    assert "cosmoflow full: eval_error target 0.124" in done.stdout
    assert "unknown workload 'nope'" in mlhpc("workload", "rcp", "show", "nope").stderr


def test_the_workloads_own_points_are_not_replaced_by_those_of_fewer_runs(tmp_path: Path) -> None:
    runs = our_runs(tmp_path / "runs", 5)  # the shipped point has more
    card = load_descriptor("cosmoflow").folder / "rcp/smoke.json"
    before = card.read_bytes()
    done = mlhpc("workload", "rcp", "record", runs)
    assert (done.returncode, card.read_bytes()) == (2, before)
    assert "runs, these are 5; write it elsewhere with -o FOLDER" in done.stderr
