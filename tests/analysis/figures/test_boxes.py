"""No text of a figure lies on another, on a line or sign, or outside the figure; what measures that finds texts that do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.axes import style
from analysis.drawing.labels import name_panels
from analysis.figures import views
from analysis.study import NotAnswerableError, Study, study
from suite.descriptor import installed_cards
from tests.fixtures.boxes import collisions

SLANTED = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}


@pytest.mark.parametrize("name", sorted(views()))
def test_no_text_lies_on_anything(name: str, rich: Study, crowded: Study, sizes: Study) -> None:
    drawn = 0
    for known in (rich, crowded, sizes) if name in ("scaling", "stragglers") else (rich, crowded):
        with style():
            try:
                figure = views()[name].draw(known)
            except NotAnswerableError:
                continue
            assert collisions(figure) == [], name
            drawn += 1
    assert drawn


@pytest.mark.long
@pytest.mark.parametrize("rounds", [("v0.7", "v1.0", "v2.0", "v3.0"), ("v3.0",), ("v0.7",)], ids="-".join)
def test_no_text_of_the_published_rounds_lies_on_anything(rounds: tuple[str, ...]) -> None:
    folder = Path(os.environ.get("MLHPC_PUBLISHED_RESULTS", "none"))
    paths = [folder / f"hpc_results_{round_}" for round_ in rounds]
    if not all(path.is_dir() for path in paths):
        pytest.skip("set MLHPC_PUBLISHED_RESULTS to a folder with hpc_results_v* checkouts")
    known = study(paths, installed_cards())
    for name, module in views().items():
        with style():
            try:
                found = collisions(module.draw(known))
            except NotAnswerableError:
                continue
        assert found == [], name


def plot(change: Callable[[Axes], object]) -> list[str]:
    with style():
        figure = Figure(figsize=(4, 3), layout="constrained")
        axis = figure.subplots()
        axis.plot([0, 1], [0, 1], label="line")
        change(axis)
        return collisions(figure)


@pytest.mark.parametrize(
    "change",
    [
        lambda axis: [axis.text(0.5, 0.2, "one"), axis.text(0.52, 0.21, "two")],
        lambda axis: axis.text(0.5, 0.5, "on the line", ha="center", va="center"),
        lambda axis: [axis.axhline(0.2), axis.text(0.7, 0.2, "on an axhline", va="center")],
        lambda axis: [axis.plot([0.8], [0.2], "o"), axis.text(0.8, 0.2, "on a sign", ha="center", va="center")],
        lambda axis: [axis.hlines(0.2, 0, 1), axis.text(0.5, 0.2, "on hlines", va="center")],
        lambda axis: [axis.set_yscale("log"), axis.plot([0, 1], [0.1, 0.1]), axis.text(0.5, 0.1, "on log", va="center")],
        lambda axis: axis.set_xticks([0.5, 0.51], ["tick one", "tick two"]),
        lambda axis: axis.set_title("a title that is longer than the whole figure is wide, by far, and by still more"),
        lambda axis: [axis.legend(loc="lower right"), axis.text(0.97, 0.06, "in the legend", ha="right", transform=axis.transAxes)],
        lambda axis: [axis.step([0, 0.4, 1], [0.1, 0.3, 0.3], where="post"), axis.text(0.4, 0.2, "on a step", ha="center")],
        lambda axis: [axis.text(0.6, 0.1, "slanted", rotation=30), axis.text(0.61, 0.1, "slanted", rotation=30)],
        lambda axis: axis.figure.text(0.99, 0.5, "outside"),
    ],
)  # fmt: skip
def test_a_text_on_something_is_found(change: Callable[[Axes], object]) -> None:
    assert plot(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda axis: axis.text(0.6, 0.2, "free"),
        lambda axis: [axis.text(0.6, 0.3, "above"), axis.text(0.6, 0.15, "below")],
        lambda axis: [axis.axhline(0.2), axis.text(0.6, 0.2, "above the line", va="bottom")],
        lambda axis: [axis.axhline(0.2, visible=False), axis.text(0.6, 0.2, "on a hidden line", va="center")],
        lambda axis: [axis.plot([0.5, 0.5], [0.1, 0.2], linestyle="none"), axis.text(0.5, 0.15, "no line", ha="left")],
        lambda axis: axis.set_xticks([0.1, 0.9], ["one", "two"]),
        lambda axis: axis.set_xticks([0, 0.2, 0.4], ["long names", "side by side", "slant"], **SLANTED),
        lambda axis: [axis.bar([0.7], [0.1]), axis.text(0.7, 0.05, "in a bar")],
        lambda axis: [axis.plot([0.5, float("nan"), 1], [0.1, float("nan"), 0.1]), axis.text(0.6, 0.1, "gap", va="center")],
        lambda axis: [axis.set_xlim(0, 1), axis.plot([2, 3], [0.2, 0.2]), axis.text(0.6, 0.2, "out of view", va="center")],
        lambda axis: axis.text(0.5, 0.5, ""),
    ],
)  # fmt: skip
def test_a_text_beside_everything_is_not(change: Callable[[Axes], object]) -> None:
    assert plot(change) == []


def named(points: list[tuple[float, float, str, bool]], change: Callable[[Axes], object] = lambda axis: None) -> Axes:
    with style():
        figure = Figure(figsize=(5, 4), layout="constrained")
        axis = figure.subplots()
        axis.plot([x for x, *_ in points], [y for _, y, *_ in points], "o")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        change(axis)
        name_panels(figure, [axis], [points])
        assert collisions(figure) == []
    return axis


def written_in(axis: Axes) -> set[str]:
    return {text.get_text() for text in axis.texts if text.get_text()}


def test_bold_names_come_first_and_with_a_line_where_there_is_no_room() -> None:
    close = [(0.5 + i / 200, 0.5 + i / 200, f"point {i}", i == 9) for i in range(12)]
    axis = named(close)
    assert "point 9" in written_in(axis)
    assert len(written_in(axis)) < 12
    inside = named([(0.5, 0.5, "in a cage", True)], lambda axis: [axis.axhline(0.5), axis.axvline(0.5)])
    assert written_in(inside) == {"in a cage"}
    no_bold = named([(0.5, 0.5, "in a cage", False)], lambda axis: [axis.axhline(y / 100) for y in range(101)])
    assert written_in(no_bold) == set()


def test_a_faint_line_gives_way_to_a_name() -> None:
    def faint(axis: Axes) -> None:
        for y in (0.4, 0.45, 0.5, 0.55, 0.6):
            axis.plot([0, 1], [y, y], "--", label="_yields")

    axis = named([(0.5, 0.5, "a name", False)], faint)
    assert written_in(axis) == {"a name"}
    gaps = [line for line in axis.lines if line.get_label() == "_yields" and len(line.get_xdata()) > 2]
    assert len(gaps) == 1  # of the line that the name stands on
