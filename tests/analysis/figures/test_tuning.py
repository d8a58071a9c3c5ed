"""The figures of a search by `mlhpc tune`, from its document to tables, answers and charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import report
from mlhpc.analysis.figures import tuning
from mlhpc.analysis.sources.readers import Inputs, read_file
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import Card
from mlhpc.suite.documents import render_json
from mlhpc.suite.performance.tune.result import TunedTrial, TuneResult
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.bets import MedianRatio

DEFAULT = {"ranks": 1, "precision": "float32", "hyperparameters.moe.backend": "loop"}
TRIALS = (
    ({"ranks": 2, "precision": "float32", "hyperparameters.moe.backend": "loop"}, 0.9),
    ({"ranks": 1, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, None),
    ({"ranks": 2, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, 0.5),
    ({"ranks": 4, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, 1.5),
    ({"ranks": 2, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, 0.6),
)


def make_result(**changes: Any) -> TuneResult:
    best = dict(TRIALS[2][0])
    stated: dict[str, Any] = {
        "workload": "moe_lm",
        "size": "smoke",
        "division": "closed",
        "objective": "step-time",
        "processor": "EPYC",
        "begun": "2026-11-28T00:00:00+00:00",
        "error": 0.05,
        "default": DEFAULT,
        "configurations": 12,
        "refused": {},
        "trials": tuple(
            TunedTrial(point=point, ratio=ratio, seconds=10.0, why="" if ratio else "no memory")
            for point, ratio in TRIALS
        ),
        "search_s": 50.0,
        "best": best,
        "pairs": 9,
        "pairs_s": 30.0,
        "ratio": MedianRatio(0.55, 0.5, 0.61, 9),
        "importance": {"ranks": 0.7, "precision": 0.2},
        "outcome": Outcome.FASTER,
    }
    return TuneResult(**(stated | changes))


def write_search(path: Path) -> Path:
    """Write the document of a made-up search."""
    path.write_text(render_json(make_result()))
    return path


def make_study(run_folder: Any, folder: Path, cards: dict[str, Card], *searches: TuneResult) -> Study:
    return read_study([run_folder(folder)], cards, Inputs(searches=searches))


@pytest.fixture
def study(tmp_path: Path, run_folder: Any, cards: dict[str, Card]) -> Study:
    return make_study(run_folder, tmp_path / "runs", cards, make_result())


def test_the_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write_search(tmp_path / "tune.json")
    assert read_file(path) == make_result()
    assert json.loads(path.read_text())["kind"] == "tune"


def test_the_fastest_points_are_those_of_means_each_once() -> None:
    assert make_result().list_fastest(2) == [TRIALS[2][0], TRIALS[0][0]]
    assert len(make_result().list_fastest(9)) == 3


def test_the_course_has_a_row_per_evaluation_and_the_best_until_then(study: Study) -> None:
    rows = tuning.build_course_table(study)
    assert rows["best so far"].tolist() == [0.9, 0.9, 0.5, 0.5, 0.5]
    assert rows["cannot run"].tolist() == ["", "no memory", "", "", ""]
    answer = tuning.render_course_answer(study)
    assert "takes 0.55 of the default's step time (95 % interval 0.5 to 0.61, 9 fresh pairs)" in answer
    assert "after 5 of 12 configurations in 50 s" in answer


def test_an_answer_of_nothing_better_is_one(tmp_path: Path, run_folder: Any, cards: dict[str, Card]) -> None:
    none = make_result(outcome=Outcome.INCONCLUSIVE, ratio=MedianRatio(0.98, 0.9, None, 9))
    study = make_study(run_folder, tmp_path / "runs", cards, none)
    assert tuning.render_course_answer(study).startswith("moe_lm smoke: nothing better than the default")


def test_a_tunable_is_worth_what_the_search_says(study: Study) -> None:
    assert tuning.build_importance_table(study)["n"].tolist() == [4, 4]
    assert tuning.render_importance_answer(study) == "moe_lm smoke: ranks explains 70 % of the variance of log time"


def test_values_stand_in_order_and_the_fastest_have_in_common(study: Study) -> None:
    rows = tuning.build_values_table(study)
    places = {(row["tunable"], row["value"]): row["_place"] for row in rows.to_dict("records")}
    assert [places["ranks", "2"], places["ranks", "4"]] == [0.0, 1.0]
    assert {places["backend", "bmm"], places["backend", "loop"]} == {0.0, 1.0}
    assert set(rows["trial"]) == {1, 2, 3, 4}, "the one that could not run has no line"
    assert tuning.render_values_answer(study) == "moe_lm smoke: the 3 fastest have no change of the default in common"


@pytest.mark.parametrize("view", tuning.VIEWS, ids=lambda view: view.name)
def test_every_view_is_drawn_with_its_metrics(view: Any, study: Study) -> None:
    table = view.table(study)
    assert set(view.question.metrics) <= set(table)
    assert view.chart(table.reset_index(drop=True)).to_dict()


@pytest.mark.parametrize("view", tuning.VIEWS, ids=lambda view: view.name)
def test_without_a_search_a_view_names_what_is_missing(
    view: Any, tmp_path: Path, run_folder: Any, cards: dict[str, Card]
) -> None:
    with pytest.raises(NotAnswerableError):
        view.table(make_study(run_folder, tmp_path / "runs", cards))


def test_a_report_takes_a_search_beside_its_logs(tmp_path: Path, run_folder: Any) -> None:
    words = [str(run_folder(tmp_path / "runs")), str(write_search(tmp_path / "tune.json")), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(report, words)
    assert done.exit_code == 0, done.output
    figures = {each["name"]: each for each in json.loads((tmp_path / "out" / "report.json").read_text())["figures"]}
    for view in tuning.VIEWS:
        assert figures[view.name]["answer"]
        assert set(view.question.metrics) <= set(figures[view.name]["table"][0])
    assert "What a tunable is worth" in (tmp_path / "out" / "report.html").read_text()
