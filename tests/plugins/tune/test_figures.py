"""The figures of searches and contests, from their documents to tables, answers and charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import report
from mlhpc.analysis.drawing.charts import build_specification
from mlhpc.analysis.sources.readers import read_file
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.plugins.tune.figures import contests, tuning
from mlhpc.plugins.tune.race import MedianRatio, PairPower
from mlhpc.plugins.tune.ranking import Finding, Ranking
from mlhpc.plugins.tune.space import TuneResult
from mlhpc.suite.card import Card
from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics import Outcome
from tests.plugins.tune.examples import TRIALS, make_ranking, make_search, write_examples

VIEWS = (*tuning.VIEWS, *contests.VIEWS)


def make_study(run_folder: Any, folder: Path, cards: dict[str, Card], *documents: TuneResult | Ranking) -> Study:
    kinds = {kind: tuple(each for each in documents if each.kind == kind) for kind in ("tune", "ab-runs")}
    return read_study([run_folder(folder)], cards, documents=kinds)


@pytest.fixture
def study(tmp_path: Path, run_folder: Any, cards: dict[str, Card]) -> Study:
    return make_study(run_folder, tmp_path / "runs", cards, make_search(), make_ranking())


def test_the_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    search, ranking = write_examples(tmp_path)
    assert (read_file(search), read_file(ranking)) == (make_search(), make_ranking())
    assert [json.loads(path.read_text())["kind"] for path in (search, ranking)] == ["tune", "ab-runs"]
    for path in (search, ranking):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
        with pytest.raises(InputError, match=r"field `version` of the .* file is 99; this suite reads 1"):
            read_file(path)


def test_the_fastest_points_are_those_of_means_each_once() -> None:
    assert make_search().list_fastest(2) == [TRIALS[2][0], TRIALS[0][0]]
    assert len(make_search().list_fastest(9)) == 3


def test_the_course_has_a_row_per_evaluation_and_the_best_until_then(study: Study) -> None:
    rows = tuning.build_course_table(study)
    assert rows["best so far"].tolist() == [0.9, 0.9, 0.5, 0.5, 0.5]
    assert rows["cannot run"].tolist() == ["", "no memory", "", "", ""]
    answer = tuning.render_course_answer(study)
    assert "takes 0.55 of the default's step time (95 % interval 0.5 to 0.61, 9 fresh pairs)" in answer
    assert "after 5 of 12 configurations in 50 s" in answer


def test_an_answer_of_nothing_better_is_one(tmp_path: Path, run_folder: Any, cards: dict[str, Card]) -> None:
    none = make_search(outcome=Outcome.SLOWER, ratio=MedianRatio(1.2, 1.1, None, 9))
    study = make_study(run_folder, tmp_path / "runs", cards, none)
    assert tuning.render_course_answer(study).startswith("moe_lm smoke: nothing better than the default")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "not decided in 16 pairs: the best was 6.1 % faster [-9.6, +2.8]"),
        (
            {"power": PairPower(0.07, 16, 0.05)},
            "not decided in 16 pairs: the best was 6.1 % faster [-9.6, +2.8]; if it is, about 32 pairs would show it in"
            " 8 of 10 cases; 16 pairs show one that is 8.3 % faster in 8 of 10 cases",
        ),
        (
            {"outcome": Outcome.SLOWER, "power": PairPower(5.0, 16, 0.05)},
            "nothing better than the default was found; 16 pairs show not even one that is 20 times as fast",
        ),
    ],
)
def test_silence_says_what_was_seen_and_what_could_have_been(changes: dict[str, Any], said: str) -> None:
    stated = {"outcome": Outcome.INCONCLUSIVE, "pairs": 16, "ratio": MedianRatio(0.939, 0.904, 1.028, 16)}
    assert make_search(**(stated | changes)).describe_silence() == said


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


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_view_is_drawn_with_its_metrics(view: Any, study: Study) -> None:
    table = view.table(study)
    assert set(view.question.metrics) <= set(table)
    assert build_specification(view.chart(table.reset_index(drop=True)))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_without_its_document_a_view_names_what_is_missing(
    view: Any, tmp_path: Path, run_folder: Any, cards: dict[str, Card]
) -> None:
    with pytest.raises(NotAnswerableError):
        view.table(make_study(run_folder, tmp_path / "runs", cards))


def test_a_report_takes_documents_beside_its_logs(tmp_path: Path, run_folder: Any) -> None:
    words = [run_folder(tmp_path / "runs"), *write_examples(tmp_path), "-o", tmp_path / "out"]
    done = CliRunner().invoke(report, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    figures = {each["name"]: each for each in json.loads((tmp_path / "out" / "report.json").read_text())["figures"]}
    for view in VIEWS:
        assert figures[view.name]["answer"]
        assert set(view.question.metrics) <= set(figures[view.name]["table"][0])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "What a tunable is worth" in page
    assert "Contests of configurations" in page


def test_a_contest_has_a_row_per_entry_and_its_verdict_is_the_answer(study: Study) -> None:
    rows = contests.build_contests_table(study).set_index("label")
    assert rows[contests.RATIO].tolist() == [1.0, 1.05, 1.5]
    assert rows.loc["bfloat16", ["verdict", "dropped after block"]].tolist() == ["slower", 7]
    said = contests.render_contests_answer(study)
    assert said.startswith("contest, moe_lm smoke on laptop: default wins; ")
    assert said.endswith("; 25 runs, 9 complete blocks; error at most 5 %")


def test_contests_of_one_name_are_apart_and_findings_are_in_the_answer(
    tmp_path: Path, run_folder: Any, cards: dict[str, Card]
) -> None:
    bad = make_ranking(findings=[Finding("log-unchanged", "runs/1/a", "its log is gone")], by_score="the score differs")
    study = make_study(run_folder, tmp_path / "runs", cards, make_ranking(), bad, make_ranking(entries=[]))
    assert contests.build_contests_table(study)["contest"].nunique() == 2
    said = contests.render_contests_answer(study)
    assert "laptop (2): " in said
    assert "; the score differs; runs/1/a: its log is gone (log-unchanged); contest" in said
    only = make_study(run_folder, tmp_path / "more", cards, make_ranking(entries=[]))
    with pytest.raises(NotAnswerableError, match="a contest with entries"):
        contests.build_contests_table(only)
