"""What the size of a machine is counted in, and the names of results."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mlhpc.analysis.figures import list_views
from mlhpc.analysis.results.machine_size import add_extent, choose_extent, find_training_units, find_unit_names
from mlhpc.analysis.results.names import build_result_names
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import Card


@pytest.mark.parametrize(
    ("units", "nodes", "cores", "ranks", "one", "sizes"),
    [
        ([1, 2], [1, 2], [8, 16], [2, 4], "unit", [1, 2]),
        ([4, 4], [1, 2], [8, 8], [2, 4], "node", [1, 2]),
        ([1, 1], [1, 1], [1, 4], [1, 4], "core", [1, 4]),
        ([1, 1], [1, 1], [4, 16], [1, 1], "core", [4, 16]),
        ([1, 1], [1, 1], [None, None], [1, 4], "rank", [1, 4]),
        ([1, 1], [1, 1], [None, 4], [1, 4], "rank", [1, 4]),
        ([1, 1], [1, 1], [4, 4], [1, 4], "unit", [1, 1]),  # more ranks on the same cores are no larger machine
        ([1, 1], [None, 2], [4, 4], [1, 4], "unit", [1, 1]),
    ],
)
def test_size_is_counted_in_what_varies(
    units: list[Any], nodes: list[Any], cores: list[Any], ranks: list[Any], one: str, sizes: list[float]
) -> None:
    rows = pd.DataFrame({"units": units, "nodes": nodes, "cores": cores, "ranks": ranks, "unit": None})
    found = choose_extent(rows)
    assert (found.sizes.tolist(), found.one) == (sizes, one)


@pytest.mark.parametrize("kinds", [["accelerator"] * 2, ["accelerator", "processor"]])
def test_as_many_accelerators_on_half_the_nodes_are_as_large_a_machine(kinds: list[str]) -> None:
    rows = pd.DataFrame({"units": [8, 8], "nodes": [2, 1], "cores": [8, 16], "ranks": [8, 8], "unit": kinds})
    assert choose_extent(rows).sizes.tolist() == [8, 8]


def test_accelerators_that_only_evaluate_train_nothing() -> None:
    """Evaluations that overlap training on Eos: OC20 has 512 ranks, OpenFold trains a sample on eight accelerators."""
    rows = pd.DataFrame({"units": [640, 640, 8, 8, 2080, 2080], "ranks": [512, 512, 4, None, 2080, 2080],
                         "async_eval": [True, False, True, True, True, False],
                         "unit": ["accelerator", "accelerator", "processor", "accelerator", "accelerator", "accelerator"],
                         "global_batch_size": [2048, 2048, 4, None, 256, 256], "nodes": 1, "cores": 1})  # fmt: skip
    found = choose_extent(rows.head(2), training=True)
    assert found.sizes.tolist() == [512, 640]
    assert choose_extent(rows.head(2)).sizes.tolist() == [640, 640]
    assert find_training_units(rows).tolist() == [512, 640, 8, 8, 2048, 2080]


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (["accelerator", "accelerator"], "accelerators"),
        (["processor", "processor"], "processors"),
        (["accelerator", "processor"], "compute units"),
        (["accelerator", None], "compute units"),
    ],
)
def test_units_of_one_kind_have_its_name(kinds: list[Any], count: str) -> None:
    rows = pd.DataFrame({"units": [1, 2], "nodes": 1, "cores": 1, "ranks": 1, "unit": kinds})
    assert choose_extent(rows).count == count


def test_a_unit_is_an_accelerator_where_the_system_has_one() -> None:
    systems = pd.DataFrame(
        {"system_key": list("abc"), "accelerators_per_node": [4, 0, None], "processors_per_node": [2, 2, None]}
    )
    named = find_unit_names(pd.DataFrame({"system_key": list("cba")}), systems)
    assert named.fillna("unknown").tolist() == ["unknown", "processor", "accelerator"]


def test_sizes_are_counted_alike_within_a_benchmark_only() -> None:
    rows = pd.DataFrame(
        {"benchmark": ["a", "a", "b", "b", "b"], "units": [1, 1, 2, 4, None], "nodes": [1, 1, 1, 1, None], "cores": [2, 4, 8, 8, 8],
         "ranks": 1, "unit": "processor", "run_s.mean": 7200.0}
    )  # fmt: skip
    found = add_extent(rows, ["benchmark"])
    assert found["one"].tolist() == ["core", "core", "processor", "processor"]
    assert found["hours"].tolist() == [4.0, 8.0, 4.0, 8.0]


@pytest.fixture(scope="module")
def one_node(
    tmp_path_factory: pytest.TempPathFactory, run_folder: Callable[..., Path], cards: dict[str, Card]
) -> Study:
    """2, 4 and 8 ranks, a core each, on one CPU node."""
    root = tmp_path_factory.mktemp("ranks")
    known = read_study([run_folder(root, f"of{n}", ranks=n, train_s=40.0 / n) for n in (2, 4, 8)], cards)
    rows = known.results.assign(
        units=1, nodes=1, cores=known.results["ranks"], machine="laptop", device="CPU", unit="processor"
    )
    return replace(known, results=rows)


def test_ranks_on_one_cpu_node_are_a_scaling_experiment(one_node: Study) -> None:
    rows = list_views()["scaling"].table(one_node)
    assert (rows["counts"].unique().tolist(), rows["size"].tolist()) == (["cores"], [2, 4, 8])
    assert rows["evaluation"].iloc[-1] < 1  # evaluations did not become shorter
    assert "at 8 cores" in list_views()["scaling"].answer(one_node)
    same_cores = replace(one_node, results=one_node.results.assign(cores=8))
    with pytest.raises(NotAnswerableError, match="units, nodes or cores"):
        list_views()["scaling"].table(same_cores)


@pytest.mark.parametrize("name", ["time_and_units", "throughput"])
def test_every_figure_of_machine_size_counts_the_cores_of_one_node(one_node: Study, name: str) -> None:
    rows = list_views()[name].table(one_node)
    assert rows["machine size"].tolist() == [2, 4, 8]
    assert set(rows["counts"]) == {"cores"}


def test_the_hours_that_are_compared_are_those_of_what_varies(one_node: Study) -> None:
    assert "fewest core hours of2" in list_views()["time_and_units"].answer(one_node)
    cost = list_views()["pareto"].table(one_node).set_index("label")
    assert set(cost["cost in"]) == {"core hours"}
    assert cost[
        "on the front"
    ].all()  # fewer cores take longer and cost less: with hours of units only the fastest was there
    assert "4 (cores)" in list_views()["waterfall"].answer(one_node) or "2 (cores)" in list_views()["waterfall"].answer(
        one_node
    )


def test_a_result_of_unknown_size_keeps_its_throughput(one_node: Study) -> None:
    rows = one_node.results.assign(units=None, nodes=None, cores=None, ranks=None)
    known = replace(one_node, results=rows)
    found = list_views()["throughput"].table(known)
    assert found["machine size"].isna().all()
    assert (found["train [samples/s], harmonic mean"] > 0).all()
    for name in ("time_and_units", "pareto", "scaling"):
        with pytest.raises(NotAnswerableError):
            list_views()[name].table(known)


@pytest.mark.parametrize(
    ("folders", "nodes", "ranks", "names"),
    [
        (["laptop_1x2_smoke"], [1], [2], ["laptop"]),
        (["laptop_1x1_smoke", "laptop_1x2_smoke"], [1, 1], [1, 2], ["laptop · 1 rank", "laptop · 2 ranks"]),
        (["a_b_8x2x4_mini_facts"], [2], [8], ["a_b"]),
        (["c_1x4_full", "c_2x4_full"], [1, 2], [4, 8], ["c · 4 ranks", "c · 2 nodes of 4 ranks"]),
        (["runs-1x2", "laptop"], [1, 1], [2, 2], ["runs-1x2", "laptop"]),
        (["c_1x4_full", "c"], [1, 1], [4, 4], ["c · c_1x4_full", "c · c"]),
    ],
)
def test_ones_own_results_have_the_names_of_their_systems(
    folders: list[str], nodes: list[int], ranks: list[int], names: list[str]
) -> None:
    rows = pd.DataFrame({"system": folders, "nodes": nodes, "ranks": ranks})
    known = {"published": False, "machine": "", "division": "closed", "submitter": "ACME", "round": "", "rounds": ""}
    rows = rows.assign(benchmark="b", size="s", mode="strong", units=1.0, units_described=1.0, **known)
    assert list(build_result_names(rows)[0]) == names
