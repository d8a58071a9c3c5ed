"""The index for a procurement is the weighted geometric mean of ratios, with an interval that holds, and invents nothing."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mlhpc.analysis.page.summary import build_procurement_section
from mlhpc.analysis.results.index import (
    Index,
    Ratio,
    SystemIndex,
    Weights,
    Workload,
    _interval,
    build_index_tables,
    compute_index,
    read_weights,
)
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.card import Card
from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics.comparison import compute_ratio

Build = Callable[..., Any]
Cards = dict[str, Card]
COSMOFLOW, OC20 = Workload("cosmoflow", weight=2.0), Workload("oc20")
BENCHMARKS = ("cosmoflow", "deepcam", "oc20", "openfold")


@pytest.fixture
def made(tmp_path: Path, package: Build) -> Build:
    """A package of ten equally long runs of three epochs, each of 3 s and the time of training, after 5 s of staging."""

    def make(system: str, benchmark: str = "cosmoflow", *, run_s: float, **more: Any) -> Path:
        errors = {"oc20": (0.05, 0.04, 0.03)}.get(benchmark, (0.5, 0.3, 0.1))
        given = {"train_s": (run_s - 5) / 3 - 3, "errors": errors} | more
        root = tmp_path / "hpc_results_v9.9"
        made = package(root, system=system, submitter=system, benchmark=benchmark, **given)
        assert isinstance(made, Path)
        return made

    return make


def index_of(data: Study, weights: Weights, reference: str) -> Index:
    return compute_index(data.distinct, data.runs, weights, reference)


def of(index: Index, system: str, tier: str = "tier not stated") -> SystemIndex:
    (found,) = [each for each in index.systems if (each.system, each.tier) == (system, tier)]
    return found


def test_the_index_is_the_weighted_geometric_mean_of_the_ratios_of_time(made: Build, cards: Cards) -> None:
    # cosmoflow, weight 2: 80 s against 40 s; oc20, weight 1: 400 s against 50 s
    for system, cosmoflow, oc20 in (("old", 80, 400), ("new", 40, 50)):
        made(system, run_s=cosmoflow)
        path = made(system, "oc20", run_s=oc20)
    index = index_of(read_study([path.parent], cards), Weights(1, (COSMOFLOW, OC20)), "old")
    new, old = of(index, "new"), of(index, "old")
    assert new.value == pytest.approx((2**2 * 8) ** (1 / 3))
    assert new.without == pytest.approx({"cosmoflow": 8.0, "oc20": 2.0})
    assert (new.low, new.missing) == (None, ())  # runs that take the same time say nothing of their spread
    assert (old.value, old.low) == (pytest.approx(1.0), None)
    assert [each.system for each in index.systems] == ["new", "old"]
    table = build_index_tables(index)["index_ratios"].set_index(["system", "workload"])
    assert table.loc[("new", "oc20"), "ratio"] == pytest.approx(8.0)
    assert table.loc[("new", "oc20"), "n"] == 10


def test_a_system_without_a_workload_has_no_index_but_one_without_that_workload(made: Build, cards: Cards) -> None:
    made("old", run_s=80)
    made("old", "oc20", run_s=400)
    path = made("new", run_s=40)
    index = index_of(read_study([path.parent], cards), Weights(1, (COSMOFLOW, OC20)), "old")
    new = of(index, "new")
    assert (new.value, new.low, new.missing) == (None, None, ("oc20",))
    assert new.without == {"cosmoflow": None, "oc20": pytest.approx(2.0)}
    section = build_procurement_section(index)
    assert section.answer == "No other system than old has a result of every workload, so there is no index."


def test_with_one_workload_the_interval_is_that_of_a_comparison(made: Build, cards: Cards) -> None:
    made("old", run_s=80, step_s=0.2)
    path = made("new", run_s=40, step_s=0.1)
    data = read_study([path.parent], cards)
    index = index_of(data, Weights(1, (COSMOFLOW,)), "OLD")
    times = [data.runs.loc[data.runs["label"] == name, "run_s"].tolist() for name in ("new", "old")]
    truth, found = compute_ratio(*([each] for each in times)), of(index, "new")
    assert (found.value, found.low, found.high) == pytest.approx((truth.ratio, truth.low, truth.high))
    section = build_procurement_section(index)
    assert section.answer == "new is 2.00 [1.959, 2.042] times as fast as old."


def test_units_of_a_workload_choose_the_machine_size(made: Build, cards: Cards) -> None:
    for system, run_s, nodes in (("old", 80, 2), ("new_a", 40, 2), ("new_b", 20, 4)):
        path = made(system, run_s=run_s, nodes=nodes)
    data = read_study([path.parent], cards)
    at_four = index_of(data, Weights(1, (Workload("cosmoflow", units=4),)), "old")
    assert {each.system: each.value for each in at_four.systems} == pytest.approx({"old": 1.0, "new_a": 2.0})
    at_any = index_of(data, Weights(1, (Workload("cosmoflow"),)), "old")
    assert of(at_any, "new_b").value == pytest.approx(4.0)


def test_results_of_unlike_rounds_or_divisions_make_no_ratio(made: Build, package: Build, cards: Cards) -> None:
    path = made("old", run_s=80)
    made("free", run_s=20, division="open")
    other = package(path.parent.parent / "hpc_results_v8.8", system="other", submitter="other")
    index = index_of(read_study([path.parent, other], cards), Weights(1, (COSMOFLOW,)), "old")
    assert [each.system for each in index.systems] == ["old"]


def test_an_optimized_tier_has_the_ported_results_too_and_the_rest_is_named(made: Build, cards: Cards) -> None:
    for system, run_s in (("old", 80), ("plain", 40), ("tuned", 20), ("other", 10)):
        path = made(system, run_s=run_s)
    weights = Weights(1, (COSMOFLOW,), ported=("old", "Plain"), optimized=("tuned",))
    index = index_of(read_study([path.parent], cards), weights, "old")
    values = {(each.tier, each.system): each.value for each in index.systems}
    assert values == pytest.approx(
        {
            ("ported", "plain"): 2.0,
            ("ported", "old"): 1.0,
            ("optimized", "tuned"): 4.0,
            ("optimized", "plain"): 2.0,
            ("optimized", "old"): 1.0,
        }
    )
    assert index.without_tier == ("other",)
    section = build_procurement_section(index)
    assert section.answer == "ported: plain is 2 times as fast as old; optimized: tuned is 4 times as fast as old."
    assert section.remarks[-1] == "Not in any tier, so left out: other."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("version: 1\n", "weights.yaml: missing key 'workloads'"),
        ("version: 2\nworkloads: [{benchmark: oc20}]\n", "weights.yaml:1: version = 2: expected one of 1"),
        ("version: 1\nworkloads: []\n", "weights.yaml:2: workloads = []: "),
        ("version: 1\nworkloads: [{benchmark: oc20, weight: 0}]\n", "weights.yaml:2: workloads.0.weight = 0: "),
        ("version: 1\nworkloads: [{benchmark: oc20, weight: .nan}]\n", "a finite number"),
        ("version: 1\nworkloads: [{benchmark: oc20, weigth: 1}]\n", "did you mean 'weight'"),
        ("version: 1\nworkloads: [{benchmark: ox20}]\n", "no benchmark is called 'ox20'; did you mean 'oc20'?"),
        ("version: 1\nworkloads: [{benchmark: oc20}, {benchmark: oc20, weight: 3}]\n", "oc20 is stated 2 times"),
        ("version: 1\nworkloads: [{benchmark: oc20, mode: fast}]\n", "expected one of 'strong', 'weak'"),
        ("version: 1\nworkloads: [{benchmark: oc20, units: 0}]\n", "workloads.0.units = 0: "),
        ("- 1\n", "weights.yaml: expected a mapping, found list"),
        ("version: [\n", "not valid YAML"),
    ],
)
def test_a_mistake_in_the_weights_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "weights.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_weights(path, BENCHMARKS)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("weights", "reference", "line"),
    [
        ({}, "nowhere", "--reference 'nowhere' is no system with a score; systems: new_a, new_b"),
        ({}, "new", "--reference 'new' is the name of 2 systems; systems: new_a, new_b"),
        ({"ported": ("new_c",)}, "new_a", "--index: ported: no result is called 'new_c'"),
        ({"ported": ("new_a",), "optimized": ("new",)}, "new_a", "--index: 'new_a' is both ported and optimized"),
    ],
)
def test_a_name_that_fits_nothing_is_one_line(
    made: Build, cards: Cards, weights: dict[str, Any], reference: str, line: str
) -> None:
    made("new_a", run_s=40)
    path = made("new_b", run_s=80)
    with pytest.raises(InputError) as error:
        index_of(read_study([path.parent], cards), Weights(1, (COSMOFLOW,), **weights), reference)
    assert str(error.value).startswith(line)


def interval_of(times: np.ndarray) -> tuple[float, float]:
    """The interval of an index over workloads; ``times`` has logs by workload, side (system, reference) and run."""
    ratios = [
        Ratio(
            Workload(f"w{at}", weight=1.0 + at),
            pd.Series({"group": f"a{at}"}),
            pd.Series({"group": f"b{at}"}),
            math.exp(logs[1].mean() - logs[0].mean()),
            compute_ratio(*([np.exp(side).tolist()] for side in logs)).error,
        )
        for at, logs in enumerate(times)
    ]
    low, high = _interval(ratios)
    assert low is not None
    assert high is not None
    return low, high


def bootstrap(times: np.ndarray, random: np.random.Generator, draws: int = 200) -> tuple[float, float]:
    """The percentile interval of the same index by resampling the runs of every result."""
    runs = times.shape[2]
    places = random.integers(runs, size=(draws, *times.shape))
    means = np.take_along_axis(times[None], places, axis=3).mean(axis=3)
    shares = np.arange(1.0, len(times) + 1) / np.arange(1.0, len(times) + 1).sum()
    indices = np.exp(((means[:, :, 1] - means[:, :, 0]) * shares).sum(axis=1))
    low, high = np.quantile(indices, (0.025, 0.975))
    return float(low), float(high)


@pytest.mark.long
def test_the_interval_holds_the_true_index_as_often_as_it_says_and_a_bootstrap_does_not() -> None:
    random, draw = np.random.default_rng(20261127), np.random.default_rng(1)
    held, held_by_bootstrap, cases = 0, 0, 1000
    for _ in range(cases):  # three workloads with five runs a side; all systems are truly as fast
        times = random.normal(0.0, 0.05, size=(3, 2, 5)) * np.array([1.0, 2.0, 0.5])[:, None, None]
        low, high = interval_of(times)
        held += low <= 1.0 <= high
        low, high = bootstrap(times, draw)
        held_by_bootstrap += low <= 1.0 <= high
    assert 0.935 <= held / cases <= 0.97, held / cases
    assert held_by_bootstrap / cases < 0.91, held_by_bootstrap / cases
