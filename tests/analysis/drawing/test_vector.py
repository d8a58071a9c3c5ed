"""The SVG of the page: what matplotlib draws, in fewer bytes, and marks that say what they stand for."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis.drawing import vector
from analysis.drawing.axes import INK, bars, panels, style
from analysis.drawing.labels import name_panels
from analysis.drawing.tips import remember_runs
from analysis.drawing.vector import save, svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn() -> Figure:
    """A bit of everything: rows of bars, many signs, lines with gaps, a band, a hatch, turned text, odd names."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    (left, right), (below, last) = figure.subplots(2, 2)
    left.barh([0, 1], [3.0, 4.5], label="training", hatch="///", edgecolor=INK)
    left.set_yticks([0, 1], ["Fugaku <512>", 'Eos "&" 64'])
    left.set_xlabel("time [min]")
    right.plot([1, 2, 3, 4], [4, float("nan"), 2, 1], "o-", color="#0072B2", label="a & b")
    right.set_xlabel("epochs")
    right.set_ylabel("error")
    below.fill_between([0, 1, 2], [0, 1, 0], [2, 2, 3], alpha=0.3)
    below.plot(np.linspace(0, 2, 200), np.sin(np.linspace(0, 20, 200)), color=INK)
    below.set_xticks([0, 1, 2], ["turned", "labels", "here"], rotation=35, ha="right")
    last.scatter([1, 2, 3], [1, 2, 3], s=[10, 40, 90])
    figure.legend(loc="outside upper center")
    return figure


def plain(figure: Figure) -> ElementTree.Element:
    """The figure as matplotlib writes it, laid out as for the page."""
    figure.set_layout_engine("none")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return ElementTree.fromstring(buffer.getvalue())


def points(d: str) -> list[tuple[float, float]]:
    """The corners of a path of straight lines, whether written in steps or not."""
    found, x, y = [], 0.0, 0.0
    for letter, numbers in re.findall(r"([MLHVlhvZz])([^A-Za-z]*)", d):
        values = [float(number) for number in re.findall(r"-?\d*\.?\d+", numbers)]
        if letter in "ML":
            x, y = values
        elif letter == "l":
            x, y = x + values[0], y + values[1]
        elif letter == "h":
            x += values[0]
        elif letter == "v":
            y += values[0]
        else:
            continue
        if not found or (x, y) != found[-1]:
            found.append((x, y))
    return found


def far(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """The largest distance of a corner of one path from the other's nearest."""
    a, b = np.array(first), np.array(second)
    return float(np.abs(a[:, None] - b[None]).max(axis=2).min(axis=1).max())


def straight(root: ElementTree.Element) -> Iterator[list[tuple[float, float]]]:
    """The visible paths of straight lines outside of definitions."""
    hidden = {id(path) for defs in root.iter(f"{SVG}defs") for path in defs.iter()}
    for path in root.iter(f"{SVG}path"):
        d = path.get("d", "")
        if id(path) not in hidden and path.get("style") != "fill: none" and not re.search("[CQSTA]", d):
            yield points(d)


@pytest.fixture(scope="module")
def both() -> tuple[ElementTree.Element, ElementTree.Element, str]:
    with style():
        text = svg(drawn(), "odd-name", "title", "what it shows")
        figure = drawn()
        vector.lay_out(figure)
        return plain(figure), ElementTree.fromstring(text), text


Both = tuple[ElementTree.Element, ElementTree.Element, str]


def test_every_sign_text_and_line_of_matplotlib_is_there(both: Both) -> None:
    theirs, ours, _ = both
    for tag in ("use", "text"):
        places = [
            sorted((float(e.get("x", 0)), float(e.get("y", 0))) for e in root.iter(f"{SVG}{tag}"))
            for root in (theirs, ours)
        ]
        assert len(places[0]) == len(places[1]) > 5
        assert np.abs(np.array(places[0]) - np.array(places[1])).max() <= 0.06
    words = [sorted(e.text or "" for e in root.iter(f"{SVG}text")) for root in (theirs, ours)]
    assert words[0] == words[1]
    lines = [list(straight(root)) for root in (theirs, ours)]
    assert len(lines[0]) == len(lines[1]) > 10
    assert max(far(a, b) for a, b in zip(*lines, strict=True)) <= 0.08
    assert max(len(line) for line in lines[1]) > 100  # of 200 points, less those that matplotlib finds on a line


def test_every_style_and_reference_is_kept(both: Both) -> None:
    theirs, ours, _ = both
    rules = dict(re.findall(r"\.([\w-]+)\{([^}]*)\}", ours.findtext(f"{SVG}style") or ""))

    def styled(root: ElementTree.Element, tag: str) -> list[str]:
        found = []

        def walk(element: ElementTree.Element, inherited: str) -> None:
            own = rules.get(element.get("class", ""), "") or element.get("style", "") or inherited
            if element.tag == f"{SVG}{tag}" and element.get("style") != "fill: none":
                own = own.replace(INK, "currentColor").replace(": ", ":").replace("; ", ";")
                found.append(re.sub(r"url\(#[^)]*\)", "url()", own))
            for child in element:
                walk(child, own)

        walk(root, "")
        return sorted(found)

    for tag in ("path", "use", "text"):
        assert styled(ours, tag) == styled(theirs, tag), tag
    ids = {element.get("id") for element in ours.iter()} - {None}
    values = [ours.findtext(f"{SVG}style") or "", *(v for e in ours.iter() for v in e.attrib.values())]
    referred = {name for value in values for name in re.findall(r"url\(#([^)]+)\)", value)}
    referred |= {element.get("href", "")[1:] for element in ours.iter(f"{SVG}use")}
    assert len(referred) > 3
    assert referred <= ids
    assert all(str(name).startswith("odd-name-") for name in ids | set(rules))
    assert INK not in ElementTree.tostring(ours, "unicode")


def test_steps_do_not_drift() -> None:
    for seed in range(20):
        chance = np.random.default_rng(seed)
        corners = chance.uniform(0, 800, (500, 2)).round(2)
        d = "M " + "\nL ".join(f"{x:.2f} {y:.2f} " for x, y in corners)
        found = points(vector._path(d))
        assert np.abs(np.array(found) - corners).max() <= 0.051


def test_marks_say_name_series_and_value(both: Both) -> None:
    _, ours, _ = both
    said = [title.text for title in ours.iter(f"{SVG}title")][1:]  # the first is the figure's own
    assert "Fugaku <512>\ntraining\ntime [min]: 3" in said
    assert 'Eos "&" 64\ntraining\ntime [min]: 4.5' in said
    assert [text for text in said if text and text.startswith("a & b")] == [
        f"a & b\nepochs: {x}\nerror: {y}" for x, y in ((1, 4), (3, 2), (4, 1))
    ]


def test_points_have_their_names_without_room_for_them_and_their_runs() -> None:
    figure, (axis,) = panels(1, 1, 3.0)
    for _ in range(30):
        axis.plot([1.0], [2.0], "o")
    axis.plot([1.0, 3.0], [2.0, 5.0], "x")
    remember_runs(axis.lines[-1], [7, 9])
    name_panels(figure, [axis], [[(1.0, 2.0, "one of thirty", False), (3.0, 5.0, "far", True)]])
    text = svg(figure, "n", "t", "d")
    assert text.count("<title>one of thirty\n") == 31  # and the point of a run
    assert 'data-run="7"><title>one of thirty' in text
    assert 'data-run="9"><title>far' in text


def test_names_of_rows_hold_for_the_panels_beside_them() -> None:
    figure, ((left, right),) = bars([2], 2)
    for axis in (left, right):
        axis.plot([1.0, 2.0], [0, 1], "o")
    left.set_yticks([0, 1], ["first", "second"])
    right.set_yticks([0, 1], ["", ""])
    assert svg(figure, "n", "t", "d").count("<title>second\n2</title>") == 2


def test_a_figure_is_a_third_of_what_matplotlib_writes() -> None:
    def many() -> Figure:
        figure, axes = panels(4, 2, 2.5)
        for axis in axes:
            for seed in range(20):
                axis.plot(np.arange(30), np.random.default_rng(seed).normal(size=30), color="#0072B2", alpha=0.5)
        return figure

    with style():
        theirs = many()
        buffer = io.StringIO()
        theirs.savefig(buffer, format="svg")
        assert len(svg(many(), "n", "t", "d")) < len(buffer.getvalue()) / 2.5


@pytest.mark.parametrize(("form", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_saved_figure_has_its_form_and_is_the_same_every_time(form: str, start: bytes) -> None:
    first, second = save(drawn(), form), save(drawn(), form)
    assert first.startswith(start)
    assert first == second
