"""The summary on top of the page says what the figure of comparisons says, and nothing that the runs do not show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from mlhpc.analysis.drawing.view import FASTEST, NOT_RANKED, SLOWER, name_passed
from mlhpc.analysis.figures import list_views
from mlhpc.analysis.page.issues import build_tiles, list_issues
from mlhpc.analysis.page.summary import Summary, _name_settings, build_summary, write_headline
from mlhpc.analysis.results.index import read_prices
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import Card

Build = Callable[..., Any]
Cards = dict[str, Card]


def of(data: Study) -> Summary:
    numbers, answers = {}, {}
    for name in ("standing", "comparison", "waterfall", "beside_published", "extended_roofline"):
        with suppress(NotAnswerableError):
            numbers[name], answers[name] = list_views()[name].table(data), list_views()[name].answer(data)
    return build_summary(data, numbers, answers)


def lines(data: Study) -> list[dict[str, str]]:
    table = of(data).table
    assert table is not None
    return [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]


@pytest.fixture
def made(tmp_path: Path, package: Build) -> Build:
    def make(system: str, round_: str = "v9.9", **more: Any) -> Path:
        if "train_s" in more:  # without a spread there is nothing to compare
            more = {"step_s": 0.01} | more
        path = package(tmp_path / f"hpc_results_{round_}", system=system, submitter=system, **more)
        assert isinstance(path, Path)
        return path

    return make


def test_the_fastest_is_named_with_the_ratio_interval_and_runs_of_the_figure(made: Build, cards: Cards) -> None:
    data = read_study([made("slow", train_s=40), made("quick", train_s=5)], cards)
    (line,) = lines(data)
    row = list_views()["comparison"].table(data).iloc[0]
    assert line["fastest"] == "quick"
    said = (
        f"slow takes {row['ratio of times']:.3g} times as long (95 %: {row['95 % from']:.3g} to {row['95 % to']:.3g})"
    )
    assert line["by how much, and is it sure"] == f"{said}; sure, by 10 and 10 runs"
    assert re.match(r"each A1 does [\d.]+ times the work in the same time \([\d.]+ to [\d.]+\)", line["why"])
    assert re.fullmatch(r"4 A1 against 4 A1; [\d.]+ against [\d.]+ A1 hours", line["size and cost of both"])
    assert line["what to take"] == "quick: faster, and cheaper"


def test_a_sure_difference_says_what_it_rests_on_and_an_open_one_does_not(made: Build, cards: Cards) -> None:
    sure = [
        text
        for text in of(read_study([made("slow", train_s=40), made("quick", train_s=5)], cards)).sentences
        if text.startswith("A sure difference assumes that nothing but the systems differed between their sessions")
    ]
    assert len(sure) == 1
    assert "that runs do not depend on each other" in sure[0]
    open_ = of(read_study([made("a1"), made("b2", eval_s=2.3)], cards))
    assert not any("assumes" in text for text in open_.sentences)


def test_another_ratio_of_scores_is_explained(made: Build, cards: Cards) -> None:
    data = read_study([made("slow", train_s=40), made("quick", train_s=5)], cards)
    assert "by scores" not in lines(data)[0]["by how much, and is it sure"]
    slower = data.results["score_s"].where(data.results["name"] != "slow", 2 * data.results["score_s"])
    twice = replace(data, results=data.results.assign(score_s=slower))
    ratio = list_views()["comparison"].table(twice)["ratio of scores"].iloc[0]
    said = f"; {ratio:.3g} times by scores, without the fastest run and the slowest or a failed one; sure"
    assert said in lines(twice)[0]["by how much, and is it sure"]


def test_a_slow_first_epoch_is_no_slow_accelerator(made: Build, cards: Cards) -> None:
    """Asynchronous staging that no event names made Perlmutter's DeepCAM seem 2.04 times as slow, where it was 1.63."""
    errors = (0.5, 0.4, 0.3, 0.2, 0.1)
    data = read_study(
        [made("late", errors=errors, train_s=10, first_extra_s=60.0), made("soon", errors=errors, train_s=10)], cards
    )
    (line,) = lines(data)
    assert line["fastest"] == "soon"
    assert re.match(r"less staging in the run or its first epoch: [\d.]+ times as fast", line["why"])
    assert "the work" not in line["why"]
    factors = list_views()["waterfall"].table(data).iloc[0]
    assert (factors["speed/size"], factors["evaluation"]) == pytest.approx((1.0, 1.0), abs=1e-3)
    rates = data.results.set_index("name")["train_rate.mean"]
    assert rates["late"] == pytest.approx(rates["soon"], rel=1e-3)
    split = list_views()["time_split"].table(data).set_index("label")
    assert split["first epoch's extra [s]"].tolist() == [60.0, 0.0] or split["first epoch's extra [s]"].max() == 60.0
    before = data.results["name"].map({"late": 0.0, "soon": 15.0})
    moved = replace(data, results=data.results.assign(**{"staging_before_run_s.mean": before}))
    said = "less staging in the run or its first epoch, but 15 s against 0 s before it: "
    assert said in lines(moved)[0]["why"]


def test_accelerators_that_only_evaluate_are_named_and_unknown_ones_are_not(made: Build, cards: Cards) -> None:
    data = read_study([made("slow", train_s=40), made("quick", train_s=5)], cards)
    quick = data.results["name"] == "quick"
    beside = replace(data, results=data.results.assign(async_eval=quick, ranks=data.results["ranks"].mask(quick, 3)))
    assert "; 1 of 4 accelerators of quick only evaluate" in lines(beside)[0]["why"]
    unknown = replace(data, results=data.results.assign(units=None))
    assert "only evaluate" not in lines(unknown)[0]["why"]


def test_runs_at_the_same_time_are_a_doubt(made: Build, cards: Cards) -> None:
    said = "runs began before the one before them ended"
    together = read_study([made("together", start_s=1000.0), made("quick", train_s=5)], cards)
    doubts = [issue.text for issue in list_issues(together) if said in issue.text]
    assert len(doubts) == 1
    assert doubts[0].startswith("9 of 10 runs ")


def test_every_run_of_a_shared_seed_is_counted(made: Build, cards: Cards) -> None:
    said = [issue.text for issue in list_issues(read_study([made("alike", seed=333)], cards)) if "a seed" in issue.text]
    assert said == ["10 of 10 runs share a seed with another"]


def test_what_may_be_luck_is_not_sure(made: Build, cards: Cards) -> None:
    (line,) = lines(read_study([made("a1"), made("b2", eval_s=2.3)], cards))
    assert "inconclusive: " in line["by how much, and is it sure"]
    assert "sure, by" not in line["by how much, and is it sure"]
    assert line["fastest"] in ("a1, or b2", "b2, or a1")
    assert re.match(r"(a1|b2), the cheaper of two that may be as fast; (about|more) ", line["what to take"])


def test_other_work_beside_runs_stands_beside_the_conclusion_and_among_the_doubts(made: Build, cards: Cards) -> None:
    paths = [made("quick", train_s=5, others=0.02), made("slow", train_s=40, others=0.23), made("none", train_s=50)]
    data = read_study(paths, cards)
    (line,) = lines(data)
    assert line["by how much, and is it sure"].endswith(
        "sure, by 10 and 10 runs; 10 of 10 runs of slow shared the CPUs with other programs"
    )
    (doubt,) = [issue for issue in list_issues(data) if "other programs" in issue.text]
    assert (doubt.severity, doubt.where.split()[0]) == ("doubt", "slow")
    assert doubt.text == "10 of 10 runs shared their CPUs with other programs, which used up to 23 %"
    first = build_tiles(data, [])[0]
    assert (first.state, first.title, first.value) == ("bad", "Busy machine", "10 of 30 runs")
    assert "up to 23 % of the CPUs" in first.detail
    (quiet,) = [tile for tile in build_tiles(read_study(paths[:1], cards), []) if tile.title == "Busy machine"]
    assert (quiet.state, quiet.title, quiet.value) == ("good", "Busy machine", "no")
    unknown = build_tiles(read_study([made("unknown")], cards), [])[-1]
    assert (unknown.state, unknown.title, unknown.value) == ("info", "Busy machine", "not logged")


def test_a_result_alone_says_what_was_beside_it(made: Build, cards: Cards) -> None:
    (first, *_) = of(read_study([made("alone", others=0.5)], cards)).sentences
    assert first.endswith("10 of 10 runs reached it; 10 of 10 runs of alone shared the CPUs with other programs.")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("prices", "cost", "advice"),
    [
        ((1.0, 1.0), " USD", "quick: faster, and cheaper"),
        ((50.0, 1.0), " USD", "quick where time counts, for "),
        ((None, 1.0), "cost not known of fast one", "quick where time counts; the cost of one of them"),
        ((1.0, None), "cost not known of slow one", "quick where time counts; the cost of one of them"),
    ],
)
def test_prices_decide_what_to_do(
    tmp_path: Path, made: Build, cards: Cards, prices: tuple[float | None, ...], cost: str, advice: str
) -> None:
    paths = [made("quick", train_s=5), made("slow", train_s=40)]
    for path, name in zip(paths, ("fast one", "slow one"), strict=True):
        (description,) = (path / "systems").glob("*.json")
        description.write_text(description.read_text().replace('"A1"', f'"{name}"'))
    given = [f"{name}={price} USD/h" for name, price in zip(("fast one", "slow one"), prices, strict=True) if price]
    (line,) = lines(read_study(paths, cards, prices=read_prices(given)))
    assert cost in line["size and cost of both"]
    assert line["what to take"].startswith(advice)


def test_the_same_speed_is_chosen_by_cost(made: Build, cards: Cards) -> None:
    paths = [made("a1", eval_s=2.1, nodes=8), made("b2")]
    (line,) = lines(read_study(paths, cards, prices=read_prices(["A1=2 USD/h"])))
    cheap = "b2"
    assert line["what to take"].startswith(f"{cheap}, the cheaper of two that may be as fast; ")


def test_what_may_not_be_ranked_together_has_no_line(made: Build, cards: Cards) -> None:
    data = read_study([made("a1", "v2.0"), made("b2", "v3.0", train_s=5), made("c3", "v2.0", division="open")], cards)
    assert of(data).table is None
    assert len(of(data).sentences) == 4  # one each, and how to make a comparison


def test_a_first_run_says_what_it_knows(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    said = of(read_study([run_folder(tmp_path, "first")], cards))
    assert said.table is None
    first, ceilings, then = said.sentences
    assert said.headline.startswith("cosmoflow mini reached its target in ")
    # The shipped results of others have modelled ceilings, which are no answer here.
    assert re.fullmatch(
        r"How near that is .* not known: `mlhpc ceilings -o [\w.]+` measures its peak rates; .*\.", ceilings
    )
    assert first.startswith("first trains to the target of cosmoflow (mini) in ")
    assert "3 of 3 runs reached it" in first
    assert "% of a run is training" in first
    assert then.startswith("Nothing to rank yet")


def test_results_of_unlike_tasks_are_one_headline(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    said = of(read_study([run_folder(tmp_path, "one"), run_folder(tmp_path, "two", size="other")], cards)).headline
    assert re.fullmatch(r"cosmoflow mini in [\d.]+ s, cosmoflow other in [\d.]+ s: each reached its target", said)


def test_settings_that_differ_explain_a_difference_of_ones_own() -> None:
    configs = [{"batch": 20, "parts": parts, "data": place} for parts, place in ((1, "a"), (2, "b"))]
    rows = [
        {"group": name, "published": False, "config": json.dumps(config), "hyperparameters": "{}"}
        for name, config in zip("ab", configs, strict=True)
    ]
    study = cast(Study, SimpleNamespace(runs=pd.DataFrame(rows)))
    one, other = (pd.Series(row) for row in rows)
    assert _name_settings(one, other, study) == "; settings that differ: parts (1 against 2)"
    assert _name_settings(one, one, study) == ""
    assert _name_settings(one, other.replace(False, True), study) == ""


def test_what_has_no_score_is_named_with_the_reason(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    said = of(read_study([run_folder(tmp_path, "part", runs=1), run_folder(tmp_path, "whole")], cards)).sentences
    assert any(sentence.startswith("part (cosmoflow mini) has no score: ") for sentence in said)


def test_results_of_ones_own_come_first(tmp_path: Path, made: Build, run_folder: Build, cards: Cards) -> None:
    own = [run_folder(tmp_path, "one"), run_folder(tmp_path, "two", train_s=30.0)]
    rows = lines(read_study([made("a1"), made("b2", train_s=5), *own], cards))
    assert ["mini" in row["task"] for row in rows] == [True, False]


def headline(data: Study) -> str:
    return of(data).headline


def test_the_headline_is_the_verdict(tmp_path: Path, made: Build, run_folder: Build, cards: Cards) -> None:
    slow, quick = made("slow", train_s=40), made("quick", train_s=5)
    sure = read_study([slow, quick], cards)
    row = list_views()["comparison"].table(sure).iloc[0]
    ends = f"({row['95 % from']:.3g} to {row['95 % to']:.3g})"
    assert headline(sure) == f"quick is {row['ratio of times']:.3g} times as fast as slow at cosmoflow {ends}"
    luck = read_study([made("a1"), made("b2", eval_s=2.3)], cards)
    assert headline(luck).startswith("The runs do not tell whether ")
    part = read_study([run_folder(tmp_path, "part", runs=1)], cards)
    assert headline(part).startswith("cosmoflow mini has no score: ")
    assert any(
        re.search(r"`mlhpc run cosmoflow -o FOLDER --resume --runs \d+` completes", text) for text in of(part).sentences
    )


@pytest.mark.parametrize("reason", ["NOT compliant (rcp-above)", "other programs used 62 % of the CPUs during its run"])
def test_what_is_not_ranked_is_hollow_with_the_reason_and_never_the_headline(
    made: Build, cards: Cards, reason: str
) -> None:
    data = read_study([made("slow", train_s=40), made("quick", train_s=5)], cards)
    data.results["not_ranked"] = [reason if name == "quick" else None for name in data.results["name"]]
    assert headline(data) == f"quick cannot be ranked: {reason}; only slow can"
    rows = list_views()["standing"].table(data)
    assert rows[["name", "verdict"]].to_numpy().tolist() == [["slow", "fastest ranked"], ["quick", "not ranked"]]
    of = {name: data.runs.loc[data.runs["group"].str.contains(name), "run_s"] for name in ("quick", "slow")}
    mean = {name: math.exp(sum(map(math.log, times)) / len(times)) for name, times in of.items()}
    assert rows["ratio"].iloc[1] == pytest.approx(mean["quick"] / mean["slow"])  # as the key below the marks says
    assert rows["ratio"].iloc[1] < 1
    assert rows["why not"].iloc[1] == reason
    data.results["not_ranked"] = reason
    assert headline(data) == f"None of 2 results is ranked: {reason}"


def test_what_is_not_ranked_and_faster_than_the_second_is_named(made: Build, cards: Cards) -> None:
    data = read_study([made("best", train_s=5), made("barred", train_s=10), made("next", train_s=40)], cards)
    data.results["not_ranked"] = ["NOT compliant" if name == "barred" else None for name in data.results["name"]]
    (line,) = lines(data)
    assert re.search(
        r"; faster than that, but not ranked: barred \(1\.\d+ times as long\)$", line["by how much, and is it sure"]
    )


def test_without_prices_the_price_is_told_at_which_the_faster_is_the_cheaper(made: Build, cards: Cards) -> None:
    paths = [made("quick", train_s=5), made("next", train_s=30), made("slow", train_s=40)]
    for path, name in zip(paths, ("H100", "A100", "A100"), strict=True):
        (description,) = (path / "systems").glob("*.json")
        description.write_text(description.read_text().replace('"A1"', f'"{name}"'))
    data = read_study(paths, cards)
    data.results.loc[data.results["name"] == "slow", "unit_hours"] /= (
        4  # a smaller machine: the cheapest, not the second
    )
    hours = data.results.set_index("name")["unit_hours"]
    (line,) = lines(data)
    even = hours["slow"] / hours["quick"]
    assert (
        line["what to take"]
        == f"quick: faster; cheaper than slow only if an H100 hour costs less than {even:.3g} A100 hours"
    )
    (found,) = of(data).breaks
    assert (found.devices, found.hours) == (("H100", "A100"), pytest.approx(even))
    staged = data.results["score_s"] * (1 + (data.results["name"] == "quick"))
    data = replace(data, results=data.results.assign(score_with_staging_s=staged))
    assert lines(data)[0]["what to take"].endswith(f" A100 hours ({even / 2:.3g} with the staging before the runs)")


def test_a_target_that_simple_predictors_reach_is_told_once(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    folder = run_folder(tmp_path, "easy", extra=(("baseline", {"mean": 0.1, "ridge": 0.15, "far": 0.9}),))
    for log in folder.glob("result_*.txt"):  # that of the fixture comes later
        log.write_text(
            log.read_text().replace('"value": {"mean": 0.9}', '"value": {"mean": 0.1, "ridge": 0.15, "far": 0.9}')
        )
    (issue,) = [each for each in list_issues(read_study([folder], cards)) if "no learning" in each.text]
    assert issue.severity == "note"  # not the MLPerf problem
    assert issue.text.endswith("as well: mean (0.1), ridge (0.15)")


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (("a>b 2", "a>b 3"), "a is the fastest in all 2 tasks by time to train: 2 to 3 times as fast as b"),
        (
            ("a>b 2", "a>c 3", "a>b 2"),
            "a is the fastest in all 3 tasks by time to train: 2 to 3 times as fast as the next",
        ),
        (("a>b 2", "b>a 3", "a>c 4"), "a is the fastest in 2 of 3 tasks by time to train, b in 1"),
        (("a>b 2", "b~a 1"), "a is the fastest in 1 of 2 tasks by time to train: 2 times as fast as b; 1 undecided"),
        (("a~b 1", "b~a 1"), "No system is surely the fastest in any of 2 tasks by time to train"),
    ],
)
def test_the_headline_of_several_tasks(made: Build, cards: Cards, tasks: tuple[str, ...], said: str) -> None:
    rows = []
    for task in tasks:
        best, sign, other = task[0], task[1], task[2]
        head = {"class": f"{task} {len(rows)}", "mode": "strong", "shown": True}
        rows.append(head | {"machine": best, "ratio": 1.0, "verdict": "fastest ranked"})
        verdict = "slower" if sign == ">" else "inconclusive"
        rows.append(head | {"machine": other, "ratio": float(task[4:]), "verdict": verdict})
    assert write_headline(read_study([made("alone")], cards), pd.DataFrame(rows)) == said


def test_the_headline_names_who_was_passed_over(made: Build, cards: Cards) -> None:
    found = [("one", "a", 1.0, FASTEST), ("one", "b", 20.0, SLOWER), ("one", "c", 1.5, NOT_RANKED),
             ("two", "a", 1.0, FASTEST), ("two", "b", 3.0, SLOWER)]  # fmt: skip
    rows = pd.DataFrame(
        {"class": task, "task": task, "mode": "strong", "shown": True, "machine": who, "label": who, "ratio": ratio,
         "verdict": verdict} for task, who, ratio, verdict in found
    )  # fmt: skip
    said = "3 to 20 times as fast as b, the next that is ranked; at one 1.5 times as fast as c, which is not ranked"
    assert write_headline(read_study([made("alone")], cards), rows).endswith(said)


def test_a_sentence_names_who_was_passed_over() -> None:
    rows = pd.DataFrame(
        [
            {"mode": "strong", "label": "a", "ratio": 1.0, "verdict": FASTEST},
            {"mode": "strong", "label": "b", "ratio": 20.0, "verdict": SLOWER},
            {"mode": "strong", "label": "c", "ratio": 1.5, "verdict": NOT_RANKED},
            {"mode": "strong", "label": "d", "ratio": 21.0, "verdict": NOT_RANKED},
        ]
    )
    assert name_passed(rows) == "; faster than that, but not ranked: c (1.5 times as long)"
    weak = rows.assign(mode="weak", **{"with staging": [2.0, 1.0, 1.0, 1.0]})
    said = "c (0.667 times as many models, 1.33 with the staging before the runs)"
    assert name_passed(weak) == f"; faster than that, but not ranked: {said}"
    assert "staging" not in name_passed(weak.assign(**{"with staging": 1.0}))
    assert name_passed(rows.head(1)) == ""
