"""A fit finds the machine a sweep was made from, damaged sweeps are one line, and a report takes a sweep."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import report
from mlhpc.analysis.figures import list_views
from mlhpc.plugins.network.fit import fit_sweep
from mlhpc.plugins.network.intervals import Interval
from mlhpc.plugins.network.sweep import SWEEP_KIND, SWEEP_VERSION, read_sweep
from mlhpc.suite.errors import InputError
from mlhpc.workloads.commands.moe import moe
from tests.analysis.conftest import write_run_folder
from tests.fixtures.cli import mlhpc
from tests.fixtures.sweeps import MACHINE, sweep, written
from tests.fixtures.wings import needs_axes


def test_a_fit_finds_the_machine(tmp_path: Path) -> None:
    fit = fit_sweep(read_sweep(written(tmp_path, sweep())))
    for name in ("inter_latency_s", "inter_bandwidth", "intra_bandwidth", "two_level_latency_s"):
        assert getattr(fit.network, name) == pytest.approx(getattr(MACHINE, name), rel=0.05), name
    assert fit.r_squared > 0.9999
    assert {item.measurement.size_bytes for item in fit.held_out}.isdisjoint(
        item.measurement.size_bytes for item in fit.fitted
    )
    assert max(abs(item.error) for item in (*fit.held_out, *fit.next_grid)) < 0.05
    assert {item.measurement.ranks for item in fit.next_grid} == {16}


def test_congestion_is_fitted_where_there_are_enough_ranks_to_see_it(tmp_path: Path) -> None:
    grids = ((4, 4), (16, 4), (64, 4), (128, 4), (256, 4))
    found = fit_sweep(read_sweep(written(tmp_path, sweep(replace(MACHINE, congestion=0.2), grids))))
    assert found.network.congestion == pytest.approx(0.2, rel=0.1)


def test_a_noisy_sweep_is_fitted_within_its_noise(tmp_path: Path) -> None:
    fit = fit_sweep(read_sweep(written(tmp_path, sweep(noise=0.15))))
    assert np.median([abs(item.error) for item in fit.held_out]) < 0.15
    assert fit.network.inter_bandwidth == pytest.approx(MACHINE.inter_bandwidth, rel=0.15)


def test_the_command_says_errors_and_labels_extrapolation(tmp_path: Path) -> None:
    done = CliRunner().invoke(moe, ["fit", str(written(tmp_path, sweep(noise=0.05)))])
    assert done.exit_code == 0, done.output
    assert "error, sizes left out, 2dh" in done.output
    assert "error, largest grid from smaller ones, linear" in done.output
    assert "extrapolated from 16 ranks, not measured" in done.output
    assert "    64 ranks: " in done.output
    assert "more than 64 ranks: inconclusive: the data carry 4 times the measured ranks" in done.output
    assert "4,096" not in done.output


def test_the_fit_as_json_holds_the_numbers_of_the_text(tmp_path: Path) -> None:
    path = str(written(tmp_path, sweep(noise=0.05)))
    done = CliRunner().invoke(moe, ["fit", path, "--format", "json"])
    assert done.exit_code == 0, done.output
    (fit,) = json.loads(done.stdout)["fits"]
    text = CliRunner().invoke(moe, ["fit", path]).stdout
    assert f"R2 of log seconds {fit['r_squared']:.3f}" in text
    for row in fit["errors"]:
        assert f"error, {row['of']}, {row['algorithm']:6s}: median {100 * row['median']:.0f} %" in text
    assert [row["ranks"] for row in fit["extrapolated"]] == [32, 64]
    assert fit["network"]["rendezvous_from"] is None, "JSON has no infinity"
    for row in fit["extrapolated"]:
        for number in (row["best"]["seconds"], row["all_to_all"]["linear"], row["all_to_all"]["2dh"]):
            high = math.inf if number["high"] is None else number["high"]
            assert number["low"] < number["value"] < high
            assert math.isfinite(high) == (row["ranks"] == 32), "beyond twice the measured ranks there is no upper end"
            assert Interval(number["value"], number["low"], high).words(" ms", 1e3) in text
        assert row["crossover_bytes"]["verdict"] in ("at", "never", "always", "inconclusive")


def test_a_sweep_in_which_nothing_varies_is_valid_json_too(tmp_path: Path) -> None:
    document = sweep()
    for grid in document["grids"]:
        for row in grid["all_to_all"]:
            row["seconds"] = [1e-3]
    path = str(written(tmp_path, document))
    assert CliRunner().invoke(moe, ["fit", path]).exit_code == 0
    text = CliRunner().invoke(moe, ["fit", path, "--format", "json"]).stdout
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["fits"][0]["r_squared"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(version=1), "`version` of the sweep is 1; this suite reads 2"),
        (lambda d: d.update(kind="other"), "not a sweep"),
        (lambda d: d["grids"][0].pop("all_to_all"), "damaged sweep"),
        (lambda d: d["grids"][0]["all_to_all"][0].update(seconds=[]), "damaged sweep"),
        (lambda d: d["grids"][0]["all_to_all"][0].update(algorithm="3dh"), "damaged sweep"),
        (lambda d: d["grids"][0].update(layer=None), "damaged sweep"),
        (lambda d: d.update(grids=[]), "damaged sweep"),
        (lambda d: d["grids"][0]["all_to_all"][0].update(seconds=[0.0]), "expected a positive number"),
        (lambda d: d["grids"][0]["all_to_all"][0].update(seconds=[-1e-5]), "expected a positive number"),
        (lambda d: d["grids"][0]["all_to_all"][0].update(seconds=[float("nan")]), "expected a positive number"),
        (lambda d: d["grids"][0]["all_to_all"][0].update(seconds=["fast"]), "damaged sweep"),
        (lambda d: d["grids"][0]["all_to_all"][0].update(bytes=0), "expected a positive number"),
        (lambda d: d["grids"][-1].update(copy_bytes_per_s=float("inf")), "expected a positive number"),
        (lambda d: d["grids"][2].update(ranks_per_node=0), "8 ranks on nodes of 0"),
        (lambda d: d["grids"][2].update(ranks_per_node=3), "8 ranks on nodes of 3"),
        (lambda d: d["grids"][0]["layer"].update(flops_per_s=0), "expected a positive number"),
        (lambda d: d["grids"][0]["layer"].update(runs=[]), "a layer on 2 ranks without runs"),
        (lambda d: d.update(ranks_per_node=0), "not those of the grids"),
        (lambda d: d.update(nodes=0), "not those of the grids"),
        (lambda d: d.update(ranks=8), "not those of the grids"),
    ],
)
def test_a_bad_sweep_is_one_line(tmp_path: Path, change: Any, said: str) -> None:
    document = sweep()
    change(document)
    with pytest.raises(InputError, match=said):
        read_sweep(written(tmp_path, document))


def test_one_node_cannot_be_extrapolated(tmp_path: Path) -> None:
    found = read_sweep(written(tmp_path, sweep(grids=((2, 2), (4, 4)))))
    with pytest.raises(InputError, match="no all-to-all across nodes"):
        fit_sweep(found)


def test_a_report_takes_a_sweep_beside_its_logs(tmp_path: Path) -> None:
    runs, path = write_run_folder(tmp_path / "runs"), written(tmp_path, sweep(noise=0.05))
    output = tmp_path / "report"
    done = CliRunner().invoke(report, [str(runs), str(path), "-o", str(output)])
    assert done.exit_code == 0, done.output
    figures = {f["name"]: f for f in json.loads((output / "report.json").read_text())["figures"]}
    names = ("moe_network_fit", "moe_layer_time", "moe_choice", "moe_crossover")
    assert all(figures[name]["answer"] for name in names)
    for name in names:
        assert set(list_views()[name].question.metrics) <= set(figures[name]["table"][0])
    rows = figures["moe_layer_time"]["table"]
    assert all((row["measured [s]"] is None) == (row["ranks"] > 16 or row["idea"].startswith("masks")) for row in rows)
    assert {row["ranks"] for row in rows if row["extrapolated"]} == {32, 64}, "4 times the measured ranks, and no more"
    assert all(row["low [s]"] < row["model [s]"] for row in rows if row["extrapolated"])
    assert all(row["model [s]"] < row["high [s]"] for row in rows if row["ranks"] == 32)
    assert all(row["high [s]"] is None for row in rows if row["ranks"] == 64), "not less than, beyond twice the ranks"
    best = min(row["model [s]"] for row in rows if row["ranks"] == 64)
    assert best == next(row["model [s]"] for row in rows if row["ranks"] == 64 and row["idea"] == "and pipelining")
    choices = figures["moe_choice"]["table"]
    assert all((row["gain low"] is None) == (row["ranks"] <= 16) for row in choices)
    assert all(row["gain low"] <= row["gain"] <= row["gain high"] for row in choices if row["extrapolated"])
    curves = figures["moe_crossover"]["table"]
    assert {row["ranks"] for row in curves if row["extrapolated"]} == {32}
    assert all(row["low"] < row["model, linear / 2DH"] < row["high"] for row in curves)
    assert "inconclusive" in figures["moe_crossover"]["answer"]
    html = (output / "report.html").read_text()
    assert "extrapolat" in html


def test_a_report_without_a_sweep_says_what_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "report"
    done = CliRunner().invoke(report, [str(write_run_folder(tmp_path / "runs")), "-o", str(output)])
    assert done.exit_code == 0, done.output
    figures = {f["name"]: f for f in json.loads((output / "report.json").read_text())["figures"]}
    assert "moe --sweep-network" in figures["moe_crossover"]["not_answerable"]
    assert "an all-to-all sweep (4)" in (output / "report.html").read_text()


def test_a_sweep_alone_is_no_report(tmp_path: Path) -> None:
    done = mlhpc("report", written(tmp_path, sweep()), "-o", tmp_path / "report")
    assert done.returncode == 2
    assert "a report needs logs" in done.stderr


@needs_axes
def test_a_plan_reads_the_fit_as_json(tmp_path: Path) -> None:
    from mlhpc.plugins.axes.step_time import read_machine
    from tests.plugins.axes.test_step_time import files

    done = CliRunner().invoke(moe, ["fit", str(written(tmp_path, sweep())), "--format", "json"])
    machine = read_machine(*files(tmp_path, json.loads(done.stdout)), "float32", None)
    assert machine.network.inter_bandwidth == pytest.approx(MACHINE.inter_bandwidth, rel=0.05)
    assert machine.measured_ranks == 16
    assert 1 < machine.network_factor < 1.2


def test_the_sweep_that_is_read_is_the_one_that_is_written() -> None:
    bench = importlib.import_module("mlhpc.workloads.moe.bench")
    assert (SWEEP_KIND, SWEEP_VERSION) == (bench.SWEEP_KIND, bench.SWEEP_VERSION)
