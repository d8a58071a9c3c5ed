"""What figures show and say: one message each, however many results there are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyArrowPatch, Rectangle

from analysis.drawing.axes import BLUE, VERMILION, style
from analysis.figures import views
from analysis.figures.scaling import SCALING
from analysis.published.scores import ROUNDS, missing, published
from analysis.study import Study, study
from suite.card import Card

Build = Callable[..., Any]


def draw(name: str, known: Study) -> Figure:
    with style():
        return views()[name].draw(known)


def test_many_results_are_rows_and_few_are_curves(crowded: Study, sizes: Study) -> None:
    rows = draw("convergence", crowded).axes
    with_curves = crowded.distinct[crowded.distinct["benchmark"] == "cosmoflow"]
    assert len(rows) == 2  # time to train and throughput
    assert len([label for axis in rows for label in axis.get_yticklabels()]) == len(with_curves) > 12
    curves = draw("convergence", sizes).axes
    assert len([axis for axis in curves if axis.axison]) == len(sizes.distinct)


def test_own_results_keep_their_curves_beside_many(crowded: Study) -> None:
    own = crowded.results["published"].copy()
    own.iloc[0] = False
    figure = draw("convergence", replace(crowded, results=crowded.results.assign(published=own)))
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert len(figure.axes) == 3
    assert "a-system-with-a-name" in titles[0]


def test_a_panel_of_curves_ends_where_its_data_end(tmp_path: Path, run_folder: Build, cards: dict[str, Card]) -> None:
    short = run_folder(tmp_path, "short", ours=False)
    long = run_folder(tmp_path, "long", errors=(0.5,) * 30 + (0.1,), seed=9)
    figure = draw("convergence", study([short, long], cards))
    ends = {axis.get_title(loc="left").split("\n")[0]: axis.get_xlim()[1] for axis in figure.axes}
    assert ends["long"] == pytest.approx(31 * 1.04)
    assert ends["short"] < 15
    assert len({axis.get_ylim() for axis in figure.axes}) == 1


def test_more_than_fifty_runs_are_one_band(crowded: Study) -> None:
    alone = crowded.results[crowded.results["mode"] == "weak"]
    assert alone["n_started"].tolist() == [60]
    figure = draw("convergence", replace(crowded, results=alone))
    (axis,) = [axis for axis in figure.axes if axis.axison]
    assert len(axis.lines) < 5
    assert axis.collections  # the band
    (left, *_) = draw("throughput", replace(crowded, results=alone)).axes
    assert all(len(line.get_xdata()) <= 2 for line in left.lines)


def test_a_short_run_is_as_visible_as_a_long_one(crowded: Study) -> None:
    """A run of seconds beside one of hours: each has a bar of shares, not of seconds."""
    spans = crowded.distinct.groupby("benchmark")["run_s.mean"].agg(["min", "max"])
    assert (spans["max"] / spans["min"]).max() > 100
    for axis in draw("time_split", crowded).axes:
        ends: dict[float, float] = {}
        for bar in (patch for patch in axis.patches if isinstance(patch, Rectangle)):
            place = round(bar.get_y(), 3)
            ends[place] = max(ends.get(place, 0.0), bar.get_x() + bar.get_width())
        assert list(ends.values()) == pytest.approx([100.0] * len(ends))


def test_the_split_mentions_no_part_that_nobody_spends_time_on(
    tmp_path: Path, run_folder: Build, cards: dict[str, Card]
) -> None:
    said = views()["time_split"].answer(study([run_folder(tmp_path, runs=3, gap_s=0.0, staging=None)], cards))
    assert "other" not in said
    assert "staging" not in said
    assert re.search(r"training \d+ %; evaluation \d+ %", said)


def test_the_direction_of_the_spread_has_two_colours_and_names(
    tmp_path: Path, package: Build, log: Build, cards: dict[str, Card]
) -> None:
    package(tmp_path / "hpc_results_v9.9", system="by-machine", submitter="A")
    root = tmp_path / "hpc_results_v9.9"
    package(root, system="by-seed", submitter="B", runs=10)
    for trial in range(10):
        text = log(errors=(0.5,) * (1 + trial % 3) + (0.1,), start_s=1000.0 * trial, train_s=10.0, staging=None)
        text.write(root / "B/results/by-seed/strong/cosmoflow" / f"result_{trial}.txt")
    known = study([root], cards)
    figure = draw("spread_ellipse", known)
    shapes = [patch for axis in figure.axes for patch in axis.patches if isinstance(patch, Ellipse)]
    colours = {tuple(np.round(shape.get_edgecolor()[:3], 3)) for shape in shapes}
    assert len(colours) == 2
    names = {text.get_text() for axis in figure.axes for text in axis.texts}
    assert names >= {"by-machine", "by-seed"}
    assert "along epochs in 1 of 2 results" in views()["spread_ellipse"].answer(known)
    assert {BLUE, VERMILION} == {line.get_color() for line in figure.axes[0].lines if not len(line.get_xdata())}


def test_the_four_views_name_results_and_join_the_sizes_of_one_machine(sizes: Study) -> None:
    figure = draw("two_by_two", sizes)
    for axis in figure.axes:
        assert {"of2", "of128"} & {text.get_text() for text in axis.texts}
        assert any(isinstance(text.arrow_patch, FancyArrowPatch) for text in axis.texts if hasattr(text, "arrow_patch"))
    assert "64 times the compute units (of2 to of128) gave" in views()["two_by_two"].answer(sizes)


def test_unlike_divisions_are_no_scaling_series(tmp_path: Path, package: Build, cards: dict[str, Card]) -> None:
    root = tmp_path / "hpc_results_v9.9"
    for system, division, nodes in (("daint_a", "closed", 2), ("daint_b", "closed", 4), ("daint_c", "open", 64)):
        package(root, system=system, division=division, nodes=nodes, train_s=20.0 / nodes, submitter=system)
    known = study([root], cards)
    assert views()["scaling"].table(known)["size"].tolist() == [4, 8]
    waterfall = views()["waterfall"].table(known)
    assert not (waterfall["from"].str.contains("open") ^ waterfall["to"].str.contains("open")).any()
    open_group, closed_group = (known.results.set_index("system")["group"][name] for name in ("daint_c", "daint_a"))
    asked = replace(known, between=((closed_group, open_group),))
    assert "unlike divisions" in views()["waterfall"].answer(asked)


def test_an_extrapolated_time_has_an_interval(sizes: Study) -> None:
    rows = views()["scaling"].table(sizes)
    assert SCALING in rows
    last = rows.iloc[-1]
    assert last["further size"] == 256
    assert last["there from"] <= last["s/epoch there"] <= last["there to"]
    said = views()["scaling"].answer(sizes)
    assert re.search(r"by the models [\d.]+ m?s \[[\d.]+, [\d.]+\] per epoch at 256", said)
    assert "(the upper end holds if no limit begins beyond 128)" in said


def test_the_ranks_where_a_network_decides_are_a_range_with_two_digits(rich: Study) -> None:
    said = views()["extended_roofline"].answer(rich)
    ranges = re.findall(r"reached at ([\d,]+) to ([\d,]+) ranks", said)
    assert ranges
    for ends in ranges:
        for end in ends:
            assert len(end.replace(",", "").rstrip("0")) <= 2
    row = views()["extended_roofline"].table(rich).iloc[0]
    assert row["network roof from [ranks]"] < row["network roof to [ranks]"]


def test_a_predicted_step_has_the_digits_of_its_band(rich: Study) -> None:
    said = views()["what_if"].answer(rich)
    found = re.search(r"a step of ([\d.]+) ms \[([\d.]+), ([\d.]+)\]", said.replace("1,000", "1000"))
    assert found is not None
    value, low, high = map(float, found.groups())
    assert low <= value <= high
    assert len(str(value).rstrip("0.")) <= 2


def test_what_the_page_holds_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    table = published()
    part = table[table["round"] != "v2.0"]
    monkeypatch.setattr("analysis.published.scores.published", lambda: part)
    assert "v2.0 (22 of 22 results)" in missing()
    held = table.loc[table["round"] == "v2.0", "group"]
    assert missing(held) == ""
    assert f"v2.0 (1 of {ROUNDS['v2.0']} results)" in missing(held.iloc[1:])
    assert missing(["v2.0/NOBODY/x"]).endswith(".")  # a group of another name counts as one of the round


def test_the_published_machines_are_named_with_their_round(rich: Study) -> None:
    said = views()["beside_published"].answer(rich)
    assert "(v3.0)" in said
    rows = pd.DataFrame(views()["beside_published"].table(rich))
    assert {"round", "division"} <= set(rows.columns)
