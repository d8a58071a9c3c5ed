"""What figures show and say: one message each, however many results there are."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mlhpc.analysis.figures import bounds, list_views
from mlhpc.analysis.figures.convergence import MOST_CURVES, MOST_RUNS
from mlhpc.analysis.figures.scaling import SCALING
from mlhpc.analysis.published.scores import ROUNDS, describe_missing_results, read_scores
from mlhpc.analysis.study import SAME_COURSE_EVALS, Study, read_study
from mlhpc.suite.card import Card
from tests.fixtures.charts import drawn, panels

Build = Callable[..., Any]


def test_every_result_has_a_row_and_few_have_curves(crowded: Study, sizes: Study) -> None:
    rows = panels(drawn("convergence", crowded))
    of_title = {title: len({row["label"] for row in part}) for title, part in rows.items()}
    known = list_views()["convergence"].table(crowded)["epochs to target, mean"].notna()
    assert sum(of_title.values()) == known.sum() > 10
    assert len(panels(drawn("learning_curves", sizes))) == MOST_CURVES < len(sizes.distinct)


def test_own_results_keep_their_curves_beside_many(crowded: Study) -> None:
    own = crowded.results["published"].copy()
    own.iloc[0] = False
    known = replace(crowded, results=crowded.results.assign(published=own))
    assert list_views()["learning_curves"].table(known)["label"].iloc[0] == known.results["label"].iloc[0]


def test_of_many_runs_the_first_have_curves(crowded: Study) -> None:
    alone = replace(crowded, results=crowded.results[crowded.results["mode"] == "weak"])
    assert alone.results["n_started"].tolist() == [60]
    assert list_views()["learning_curves"].table(alone)["run"].nunique() == MOST_RUNS


def test_a_short_run_is_as_visible_as_a_long_one(crowded: Study) -> None:
    """A run of seconds beside one of hours: each has a bar of shares, not of seconds."""
    spans = crowded.distinct.groupby("benchmark")["run_s.mean"].agg(["min", "max"])
    assert (spans["max"] / spans["min"]).max() > 100
    for rows in panels(drawn("time_split", crowded)).values():
        ends: dict[str, float] = {}
        for row in rows:
            if row["_part"] != "staging before the run":
                ends[row["label"]] = ends.get(row["label"], 0.0) + row["_value"]
        assert list(ends.values()) == pytest.approx([100.0] * len(ends))


def test_the_split_mentions_no_part_that_nobody_spends_time_on(
    tmp_path: Path, run_folder: Build, cards: dict[str, Card]
) -> None:
    said = list_views()["time_split"].answer(read_study([run_folder(tmp_path, runs=3, gap_s=0.0, staging=None)], cards))
    assert "other" not in said
    assert "staging" not in said
    assert re.search(r"training \d+ %; evaluation \d+ %", said)


def test_the_direction_of_the_spread_is_told(
    tmp_path: Path, package: Build, log: Build, cards: dict[str, Card]
) -> None:
    package(tmp_path / "hpc_results_v9.9", system="by-machine", submitter="A")
    root = tmp_path / "hpc_results_v9.9"
    package(root, system="by-seed", submitter="B", runs=10)
    for trial in range(10):
        text = log(errors=(0.5,) * (1 + trial % 3) + (0.1,), start_s=1000.0 * trial, train_s=10.0, staging=None)
        text.write(root / "B/results/by-seed/strong/cosmoflow" / f"result_{trial}.txt")
    known = read_study([root], cards)
    along = list_views()["run_to_run"].table(known).set_index("label")["direction, along epochs [%]"]
    assert along["by-machine"] == pytest.approx(0.0, abs=1e-6)
    assert along["by-seed"] == pytest.approx(100.0, abs=1e-6)
    said = list_views()["run_to_run"].answer(known)
    by_rest = "by staging and other time in 0"
    assert (
        f"runs differ mostly by epochs in 1 of 2 results, by seconds per epoch in 1, {by_rest}, and the runs of 0"
        in said
    )
    assert "most: by-seed" in said


def test_five_runs_whose_epochs_and_speed_cancel_cannot_tell(
    tmp_path: Path, package: Build, log: Build, cards: dict[str, Card]
) -> None:
    """Four runs of 5 epochs vary by 4.4 %; that of 4 takes as long as the fastest of them."""
    root = package(tmp_path / "hpc_results_v9.9", runs=5)
    for trial, (epochs, train_s) in enumerate([(5, 10.0), (5, 10.6), (5, 11.1), (4, 12.8), (5, 10.9)]):
        errors = (0.5,) * (epochs - 1) + (0.1,)
        text = log(errors=errors, start_s=1000.0 * trial, train_s=train_s, staging=None, eval_s=0.1, gap_s=0.0)
        text.write(root / "results/sys1/strong/cosmoflow" / f"result_{trial}.txt")
    said = list_views()["run_to_run"].answer(read_study([root], cards))
    assert said.endswith("whether by epochs or by seconds per epoch cannot be told from 5 runs")


def test_unlike_divisions_are_no_scaling_series(tmp_path: Path, package: Build, cards: dict[str, Card]) -> None:
    root = tmp_path / "hpc_results_v9.9"
    for system, division, nodes in (("daint_a", "closed", 2), ("daint_b", "closed", 4), ("daint_c", "open", 64)):
        package(root, system=system, division=division, nodes=nodes, train_s=20.0 / nodes, submitter=system)
    known = read_study([root], cards)
    assert list_views()["scaling"].table(known)["size"].tolist() == [4, 8]
    waterfall = list_views()["waterfall"].table(known)
    assert not (waterfall["from"].str.contains("open") ^ waterfall["to"].str.contains("open")).any()
    open_group, closed_group = (known.results.set_index("system")["group"][name] for name in ("daint_c", "daint_a"))
    asked = replace(known, between=((closed_group, open_group),))
    assert "unlike divisions" in list_views()["waterfall"].answer(asked)


def test_epochs_of_batches_are_told_of_results_that_may_be_ranked(
    tmp_path: Path, package: Build, cards: dict[str, Card]
) -> None:
    for system in ("a", "b", "c"):
        package(tmp_path / "hpc_results_v9.9", system=system, submitter=system, errors=(0.1,))
    study = read_study([tmp_path / "hpc_results_v9.9"], cards)
    study = replace(study, results=study.results.assign(global_batch_size=[32, 64, 128], not_ranked=[None, None, "x"]))
    assert "batch 32: 1 epochs (1 result), 64: 1 epochs" in list_views()["epochs_and_batch"].answer(study)
    assert list_views()["epochs_and_batch"].table(study)["global batch"].max() == 128


@pytest.mark.parametrize("certain", [False, True])
def test_a_share_of_scaling_that_may_be_chance_says_so(
    tmp_path: Path, package: Build, log: Build, cards: dict[str, Card], certain: bool
) -> None:
    """Epochs of the larger size: 5 or 7, as those of the smaller one; or always 9."""
    root = tmp_path / "hpc_results_v9.9"
    for system, nodes, epochs in (("daint_a", 2, (5, 5, 7, 5)), ("daint_b", 4, (9,) * 4 if certain else (7, 5, 7, 5))):
        package(root, system=system, nodes=nodes, submitter=system, runs=4)
        for trial, count in enumerate(epochs):
            text = log(errors=(0.5,) * (count - 1) + (0.1,), start_s=1000.0 * trial, train_s=20.0 / nodes, seed=trial)
            text.write(root / system / f"results/{system}/strong/cosmoflow/result_{trial}.txt")
    study = read_study([root], cards)
    row = list_views()["scaling"].table(study).iloc[-1]
    assert (row["algorithmic from"] <= 1 <= row["algorithmic to"]) == (not certain)
    said = list_views()["scaling"].answer(study)
    assert bool(re.search(r"algorithmic \d+ %: may be chance", said)) == (not certain)


def test_an_extrapolated_time_has_an_interval(sizes: Study) -> None:
    rows = list_views()["scaling"].table(sizes)
    assert SCALING in rows
    last = rows.iloc[-1]
    assert last["further size"] == 256
    assert last["there from"] <= last["s/epoch there"] <= last["there to"]
    said = list_views()["scaling"].answer(sizes)
    assert re.search(r"by the models [\d.]+ m?s \[[\d.]+, [\d.]+\] per epoch at 256", said)
    assert "(the upper end holds if no limit begins beyond 128 and no size had a better day)" in said


def test_the_ranks_where_a_network_decides_are_a_range_with_two_digits(
    rich: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list_views()["extended_roofline"].answer(rich)
    assert "the network would not be the limit on any number of ranks up to the global batch of " in said
    cases = [replace(case, batch=1e9) for case in bounds._cases(rich)]
    monkeypatch.setattr(bounds, "_cases", lambda study: cases)
    said = list_views()["extended_roofline"].answer(rich)
    ranges = re.findall(r"from ([\d,]+) to ([\d,]+) ranks on the network", said)
    assert ranges
    for ends in ranges:
        for end in ends:
            assert len(end.replace(",", "").rstrip("0")) <= 2
    row = list_views()["extended_roofline"].table(rich).iloc[0]
    assert row["network roof from [ranks]"] < row["network roof to [ranks]"]


def test_a_predicted_step_has_the_digits_of_its_band(rich: Study) -> None:
    said = list_views()["what_if"].answer(rich)
    found = re.search(r"a step of ([\d.]+) ms \[([\d.]+), ([\d.]+)\]", said.replace("1,000", "1000"))
    value, low, high = map(float, found.groups())
    assert low <= value <= high
    assert len(str(value).rstrip("0.")) <= 2


def test_what_the_page_holds_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    table = read_scores()
    part = table[table["round"] != "v2.0"]
    monkeypatch.setattr("mlhpc.analysis.published.scores.read_scores", lambda: part)
    assert "v2.0 (22 of 22 results)" in describe_missing_results()
    held = table.loc[table["round"] == "v2.0", "group"]
    assert describe_missing_results(held) == ""
    assert f"v2.0 (1 of {ROUNDS['v2.0']} results)" in describe_missing_results(held.iloc[1:])
    assert describe_missing_results(["v2.0/NOBODY/x"]).endswith(
        "."
    )  # a group of another name counts as one of the round


def test_the_published_machines_are_named_with_their_round(rich: Study) -> None:
    said = list_views()["beside_published"].answer(rich)
    assert "(v3.0)" in said
    rows = pd.DataFrame(list_views()["beside_published"].table(rich))
    assert {"round", "division"} <= set(rows.columns)


def test_runs_of_one_course_of_the_metric_are_said_to_be_one_sample(crowded: Study) -> None:
    evals = crowded.tables.evals.copy()
    chance = np.random.default_rng(3)
    evals["value"] += chance.uniform(0.0, 1e-6, len(evals))  # no two alike
    long = evals.groupby("run")["value"].transform("size") >= SAME_COURSE_EVALS
    group = crowded.runs[crowded.runs["run"].isin(evals[long]["run"]) & crowded.runs["converged"]]["group"].iloc[0]
    runs = crowded.converged_of(group)["run"]
    counts = []
    for same in (0, 2, len(runs)):
        of_first = evals[evals["run"] == runs.iloc[0]]["value"].to_list()
        changed = evals.copy()
        for run in runs.iloc[:same]:
            changed.loc[changed["run"] == run, "value"] = of_first
        study = replace(crowded, tables=replace(crowded.tables, evals=changed))
        counts.append(study.count_courses(group)[0])
        table = (
            list_views()["convergence"].table(study).query("label == @crowded.results.set_index('group').label[@group]")
        )
        said = str(list_views()["convergence"].answer(study))
        assert counts[-1] in table["different courses"].tolist()
    assert counts == [len(runs), len(runs) - 1, 1]
    assert "1 different course of the metric" in said
