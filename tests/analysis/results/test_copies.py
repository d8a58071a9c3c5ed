"""Results that a later round published again are one result."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from mlhpc.analysis.page.summary import build_score_sections
from mlhpc.analysis.results.decompose import find_copies, list_rounds
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.card import Card


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory, package: Callable[..., Path], cards: dict[str, Card]) -> Study:
    """One result of v1.0 in v2.0 and v3.0 too, and one with one run more in v3.0."""
    root = tmp_path_factory.mktemp("again")
    package(root / "hpc_results_v1.0", system="fugaku_1")
    package(root / "hpc_results_v1.0", system="daint_1", eval_s=3.0)
    for round_ in ("v2.0", "v3.0"):
        shutil.copytree(root / "hpc_results_v1.0", root / f"hpc_results_{round_}")
    changed = root / "hpc_results_v3.0/ACME/results/daint_1/strong/cosmoflow/result_9.txt"
    changed.write_text(changed.read_text().replace("170000", "170001"))
    return read_study([root / f"hpc_results_{round_}" for round_ in ("v1.0", "v2.0", "v3.0")], cards)


def test_a_carried_over_result_appears_once_in_each_group_of_rounds(again: Study) -> None:
    assert len(again.results) == 6
    assert sorted(again.distinct["label"]) == [
        "Fugaku 4 · v1.0 = v2.0 = v3.0", "Piz Daint 4 · v1.0 = v2.0", "Piz Daint 4 · v3.0",
    ]  # fmt: skip
    # Once where results are listed; where they are ranked, in each group of rounds whose times mean the same
    assert [sorted(rows["round"]) for *_, rows in again.tasks()] == [["v1.0", "v1.0"], ["v3.0", "v3.0"]]
    cells = [cell.text for section in build_score_sections(again) for row in section.table.rows for cell in row]
    assert cells.count("v1.0 = v2.0 = v3.0") == 1
    assert sum("Fugaku" in cell for cell in cells) == 2  # the rules of v3.0 are not those of v1.0
    assert cells.count("carried over from v1.0") == 1


def test_a_result_can_be_named_by_any_of_its_rounds(again: Study, cards: dict[str, Card]) -> None:
    from mlhpc.analysis.results.names import find_pairs

    names = ("Fugaku 4 · v3.0", "Piz Daint 4 · v3.0")
    ((first, second),) = find_pairs(again.results, *names)
    assert first.startswith("v1.0/")
    assert second.startswith("v3.0/")


def _tables(**changes: object) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two results of two runs in two rounds, alike but for ``changes`` of the later one or of its second run."""
    results, runs = [], []
    for round_ in ("v1.0", "v2.0"):
        more = changes if round_ == "v2.0" else {}
        row = {"group": f"{round_}/g", "round": round_, "benchmark": "b", "size": "full", "mode": "strong", "division": "closed",
               "score_s": 10.0, "system": "s"}  # fmt: skip
        results.append(row | {name: value for name, value in more.items() if name in row})
        for run in range(2):
            line = {"group": f"{round_}/g", "run_start_ms": 1000.0 * run, "run_s": 9.0 + run, "pruned": False}
            runs.append(line | ({name: value for name, value in more.items() if name in line} if run else {}))
    return pd.DataFrame(results), pd.DataFrame(runs)


def test_the_same_runs_of_a_later_round_are_a_copy() -> None:
    results, runs = _tables()
    assert find_copies(results, runs).tolist()[1] == "v1.0/g"
    results["same_as"] = find_copies(results, runs)
    assert list_rounds(results).tolist()[0] == "v1.0 = v2.0"


@pytest.mark.parametrize(
    "changes",
    [
        {"benchmark": "other"}, {"size": "mini"}, {"mode": "weak"}, {"division": "open"}, {"score_s": 11.0}, {"score_s": None},
        {"run_start_ms": 1001.0}, {"run_start_ms": None}, {"run_s": 10.5}, {"run_s": None}, {"pruned": True}, {"round": "v1.0"},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_differs_is_another_result(changes: dict[str, object]) -> None:
    assert find_copies(*_tables(**changes)).isna().all()


def test_a_copy_belongs_to_the_system_of_its_name() -> None:
    """Two systems with the same runs in both rounds, as a mistake may have them."""
    results, runs = _tables()
    others = results.assign(group=results["group"] + "2", system="t"), runs.assign(group=runs["group"] + "2")
    both = pd.concat([results, others[0]], ignore_index=True)
    both["same_as"] = find_copies(both, pd.concat([runs, others[1]], ignore_index=True))
    assert both.set_index("group")["same_as"].dropna().to_dict() == {"v2.0/g": "v1.0/g", "v2.0/g2": "v1.0/g2"}
    assert list_rounds(both).tolist() == ["v1.0 = v2.0", "v2.0"] * 2
