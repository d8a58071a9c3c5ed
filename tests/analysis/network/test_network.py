"""The simulator equals the closed forms where nothing contends, a fit finds the machine a sweep was made from, the paper's rows
have the errors the docs state, and a report takes a sweep."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tutel_paper import paper_rows
from mlhpc.analysis.commands.report import report
from mlhpc.analysis.figures import list_views
from mlhpc.analysis.network.fit import fit_sweep
from mlhpc.analysis.network.intervals import Interval
from mlhpc.analysis.network.sweep import SWEEP_KIND, SWEEP_VERSION, read_sweep
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.cost_model import (
    AZURE_NDV4,
    LayerShape,
    Network,
    list_valid_r,
    predict_all_to_all,
    predict_layer_time_s,
)
from mlhpc.workloads.commands.moe import moe
from tests.fixtures.cli import mlhpc
from tests.fixtures.simulated_network import simulated_all_to_all, simulated_layer_s

MACHINE = Network(
    ranks_per_node=4,
    inter_latency_s=20e-6,
    inter_bandwidth=5e9,
    intra_latency_s=3e-6,
    intra_bandwidth=40e9,
    memory_bandwidth=400e9,
    launch_s=10e-6,
    two_level_latency_s=12e-6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 4), (2, 2), (3, 2), (2, 4), (4, 1), (8, 8), (5, 3)]),
    st.floats(1.0, 1e9),
    st.sampled_from(["linear", "2dh"]),
    st.floats(1e-7, 1e-3),
    st.floats(1e7, 1e12),
    st.floats(1.0, 1e8),
)
def test_equal_messages_take_as_long_as_the_closed_form_says(
    grid: tuple[int, int], size: float, algorithm: Any, latency: float, bandwidth: float, rendezvous_from: float
) -> None:
    nodes, per_node = grid
    ranks = nodes * per_node
    network = replace(
        MACHINE,
        ranks_per_node=per_node,
        inter_latency_s=latency,
        inter_bandwidth=bandwidth,
        congestion=0.2,
        two_level_congestion=0.1,
        congestion_from=4,
        rendezvous_from=rendezvous_from,
        rendezvous_s=7e-6,
    )
    done = simulated_all_to_all(network, np.zeros(ranks), np.full((ranks, ranks), size / ranks), algorithm)
    assert done == pytest.approx(np.full(ranks, predict_all_to_all(network, ranks, size, algorithm).total_s), rel=1e-9)


@pytest.mark.parametrize(("experts", "ranks"), [(2, 8), (8, 8), (16, 8), (1, 4), (4, 16), (8, 2)])
@pytest.mark.parametrize("tokens", [16, 100_000])
def test_a_balanced_layer_takes_as_long_as_the_closed_form_says(experts: int, ranks: int, tokens: int) -> None:
    shape = LayerShape(tokens, 256, 1024, experts, 1)
    for r in list_valid_r(experts, ranks):
        for degree in (1, 2, 4):
            for algorithm in ("linear", "2dh"):
                how = {"r": r, "degree": degree, "algorithm": algorithm}
                closed = predict_layer_time_s(shape, MACHINE, ranks, 1e13, **how)
                assert simulated_layer_s(shape, MACHINE, ranks, 1e13, **how) == pytest.approx(closed, rel=1e-9), how


def test_a_hot_expert_holds_everybody_up() -> None:
    shape = LayerShape(4096, 256, 1024, 8, 1)
    even = simulated_layer_s(shape, MACHINE, 8, 1e13, r=1, degree=2, algorithm="linear")
    load = np.array([0.3, *[0.1] * 7])
    uneven = simulated_layer_s(shape, MACHINE, 8, 1e13, r=1, degree=2, algorithm="linear", load_E=load)
    assert 1.8 * even < uneven <= 2.4 * even  # the hot rank receives and computes 2.4 times the mean
    gathered = simulated_layer_s(shape, MACHINE, 8, 1e13, r=0, degree=1, algorithm="linear", load_E=load)
    assert gathered == simulated_layer_s(shape, MACHINE, 8, 1e13, r=0, degree=1, algorithm="linear")  # no token moves


def test_a_rank_that_begins_late_is_waited_for() -> None:
    begin = np.array([0.0, 0.0, 1.0, 0.0])
    done = simulated_all_to_all(replace(MACHINE, ranks_per_node=2), begin, np.full((4, 4), 1e3), "linear")
    assert done.min() > 1.0


def sweep(
    network: Network = MACHINE,
    grids: tuple[tuple[int, int], ...] = ((2, 2), (4, 4), (8, 4), (16, 4)),
    noise: float = 0.0,
) -> dict[str, Any]:
    """What moe would have written on a machine with these links."""
    random = np.random.default_rng(0)
    rows = []
    for ranks, per_node in grids:
        own = replace(network, ranks_per_node=per_node)
        measured = [
            {
                "algorithm": algorithm,
                "bytes": size,
                "seconds": [
                    predict_all_to_all(own, ranks, size, algorithm).total_s
                    * float(np.exp(noise * random.standard_normal()))
                    for _ in range(3)
                ],
            }
            for size in [2**i for i in range(10, 28)]
            for algorithm in (("linear", "2dh") if ranks > per_node else ("linear",))
        ]
        shape = LayerShape(1024, 256, 1024, ranks // 2, 1, element_bytes=4)
        runs = [
            {"r": r, "degree": degree, "algorithm": "linear", "seconds": [2e-4 + seconds] * 3}
            for r in list_valid_r(shape.experts, ranks)
            for degree in ((1, 2, 4) if r else (1,))
            for seconds in [predict_layer_time_s(shape, own, ranks, 1e13, r=r, degree=degree, algorithm="linear")]
        ]
        moe = {"experts": shape.experts, "top_k": 1, "hidden": 1024, "activation": "relu"}
        layer = {
            "shape": {"tokens": 1024, "width": 256, "moe": moe},
            "element_bytes": 4,
            "flops_per_s": 1e13,
            "outside_s": 2e-4,
            "runs": runs,
        }
        copy = {"copy_bytes_per_s": network.memory_bandwidth}
        rows.append({"ranks": ranks, "ranks_per_node": per_node, "all_to_all": measured, "layer": layer} | copy)
    head = {"kind": SWEEP_KIND, "version": SWEEP_VERSION, "ranks": grids[-1][0], "ranks_per_node": grids[-1][1]}
    return head | {"nodes": 4, "cores_per_node": 16, "backend": "gloo", "device": "cpu", "grids": rows}


def written(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "machine.json"
    path.write_text(json.dumps(document))
    return path


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


def test_the_crossover_of_2dh() -> None:
    """At many ranks small messages cost their number: 2DH wins up to a size; on few nodes it does not."""

    def crossover_bytes(network: Network, ranks: int) -> float | None:
        wins = [
            size
            for size in np.geomspace(16.0, 2.0**34, 400)
            if predict_all_to_all(network, ranks, size, "2dh").total_s
            < predict_all_to_all(network, ranks, size, "linear").total_s
        ]
        return max(wins, default=None)

    assert crossover_bytes(AZURE_NDV4, 2048) > 2**28
    assert crossover_bytes(replace(MACHINE, two_level_latency_s=MACHINE.inter_latency_s), 4) is None
    few, many = (crossover_bytes(MACHINE, ranks) for ranks in (64, 1024))
    assert few is not None
    assert many is not None
    assert few < many
    before, after = (
        [predict_all_to_all(MACHINE, 64, few * factor, name).total_s for name in ("linear", "2dh")]
        for factor in (0.9, 1.1)
    )
    assert before[0] > before[1]
    assert after[0] < after[1]


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


def test_the_papers_rows() -> None:
    """docs/moe.md states these errors."""
    rows = paper_rows()
    for row in rows:
        if row.error is not None and row.kind in ("FIT", "PRED"):
            assert abs(row.error) <= 0.085, row
    gains = {row.claim: row.model for row in rows}
    assert gains["2DH at 256 MiB, 64 GPUs [x]"] < 1 < gains["2DH at 256 MiB, 256 GPUs [x]"]
    assert gains["degree 16 against 8 on that layer [x]"] < 1
    assert [gains[f"Fig. 12, Large: r at k f = {load}"] for load in (16, 4, 1)] == [1, 2, 4]
    assert {row.kind for row in rows} == {"FIT", "PRED", "MISMATCH", "OPEN"}


def test_a_report_takes_a_sweep_beside_its_logs(tmp_path: Path, run_folder: Any) -> None:
    runs, path = run_folder(tmp_path / "runs"), written(tmp_path, sweep(noise=0.05))
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


def test_a_report_without_a_sweep_says_what_is_missing(tmp_path: Path, run_folder: Any) -> None:
    output = tmp_path / "report"
    done = CliRunner().invoke(report, [str(run_folder(tmp_path / "runs")), "-o", str(output)])
    assert done.exit_code == 0, done.output
    figures = {f["name"]: f for f in json.loads((output / "report.json").read_text())["figures"]}
    assert "moe --sweep-network" in figures["moe_crossover"]["not_answerable"]


def test_a_sweep_alone_is_no_report(tmp_path: Path) -> None:
    done = mlhpc("report", written(tmp_path, sweep()), "-o", tmp_path / "report")
    assert done.returncode == 2
    assert "a report needs logs" in done.stderr
