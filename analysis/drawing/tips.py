"""What the marks of a figure say when the pointer rests on them: name, series and values, read from the figure's own
axes.

A figure need not do anything for it. Names of points come from `remember_names`, those of bars and rows from the axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator

from analysis.drawing.digits import number_text

NEAR = 1e-6  # of a coordinate: two that differ by less are one

_names: WeakKeyDictionary[Axes, Sequence[tuple[float, float, str, bool]]] = WeakKeyDictionary()
_ours: WeakKeyDictionary[Line2D, Sequence[int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Tip:
    """The text of one mark, a line for each statement, what it stands for first; ``run`` is the place of its run, if it
    is one.
    """

    text: str
    run: int | None = None


def remember_names(axis: Axes, points: Sequence[tuple[float, float, str, bool]]) -> None:
    """Say what the points of a panel (x, y, text, bold) are called, those without room for their name too."""
    _names[axis] = points


def remember_runs(line: Line2D, runs: Iterable[int]) -> None:
    """Say which run each point of a line is: the place of the run in the study's runs."""
    _ours[line] = list(runs)


def tips_of(figure: Figure) -> dict[str, list[Tip]]:
    """A tip for each mark of the lines and bars of a figure, by the id that their group gets in an SVG."""
    tips: dict[str, list[Tip]] = {}
    rows = _row_names(figure)
    for axis in figure.axes:
        for line in axis.lines:
            said = list(_of_line(axis, line, rows.get(axis, {})))
            if said:
                tips[_identified(line, tips)] = said
        for container in axis.containers:
            if isinstance(container, BarContainer):
                for bar in container.patches:
                    tips[_identified(bar, tips)] = [_of_bar(axis, container, bar, rows.get(axis, {}))]
    return tips


def _identified(artist: Line2D | Rectangle, tips: Mapping[str, list[Tip]]) -> str:
    name = f"tip{len(tips)}"
    artist.set_gid(name)
    return name


def _of_line(axis: Axes, line: Line2D, rows: Mapping[float, str]) -> Iterator[Tip]:
    """A tip for each point that is drawn as a sign. A line without signs, or with one for a legend only, has none."""
    if line.get_marker() in ("None", "none", "", " ", None) or line.get_transform() != axis.transData:
        return
    runs = _ours.get(line, ())
    points = np.asarray(line.get_xydata(), float)
    for place, (x, y) in enumerate(points):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        name = rows.get(round(y, 6), "") or _name_at(axis, x, y)
        tip = _tip(name, [_series(line.get_label()), _value(axis.xaxis, x), "" if rows else _value(axis.yaxis, y)])
        yield replace(tip, run=runs[place]) if len(runs) == len(points) else tip


def _of_bar(axis: Axes, container: BarContainer, bar: Rectangle, rows: Mapping[float, str]) -> Tip:
    across = container.orientation == "horizontal"
    value, place = (
        (bar.get_width(), bar.get_y() + bar.get_height() / 2)
        if across
        else (bar.get_height(), bar.get_x() + bar.get_width() / 2)
    )
    names = rows if across else _labels(axis.xaxis)
    along = axis.xaxis if across else axis.yaxis
    return _tip(names.get(round(place, 6), ""), [_series(container.get_label()), _value(along, value)])


def _tip(name: str, statements: Sequence[str]) -> Tip:
    return Tip("\n".join(part for part in (name, *statements) if part))


def _series(label: object) -> str:
    text = str(label)
    return "" if text.startswith("_") else text


def _value(axis: Axis, value: float) -> str:
    """The value of a coordinate with the name of its axis, which has the unit."""
    label = axis.get_label().get_text() or _shared_label(axis)
    words = _labels(axis)
    text = words.get(round(value, 6), number_text(value))
    return f"{' '.join(label.split())}: {text}" if label else text


def _shared_label(axis: Axis) -> str:
    """The label of the panel below or beside it that is written once for several."""
    own = axis.axes
    shared = own.get_shared_x_axes() if axis is own.xaxis else own.get_shared_y_axes()
    for other in shared.get_siblings(own):
        text = (other.xaxis if axis is own.xaxis else other.yaxis).get_label().get_text()
        if text:
            return str(text)
    return ""


def _name_at(axis: Axes, x: float, y: float) -> str:
    for a, b, text, _ in _names.get(axis, ()):
        if math.isclose(a, x, rel_tol=NEAR) and math.isclose(b, y, rel_tol=NEAR):
            return text
    return ""


def _row_names(figure: Figure) -> dict[Axes, dict[float, str]]:
    """For each panel whose rows have names: the name of the row at each height. Panels side by side are named once."""
    own = {axis: _labels(axis.yaxis) for axis in figure.axes}
    named: dict[Axes, dict[float, str]] = {}
    for axis in figure.axes:
        beside = [other for other in figure.axes if other is not axis and _in_one_row(axis, other)]
        found = [own[other] for other in (axis, *beside) if any(own[other].values())]
        if found:
            named[axis] = found[0]
    return named


def _in_one_row(a: Axes, b: Axes) -> bool:
    first, second = a.get_position(original=True), b.get_position(original=True)
    return a.get_ylim() == b.get_ylim() and abs(first.y0 - second.y0) < NEAR and abs(first.y1 - second.y1) < NEAR


def _labels(axis: Axis) -> dict[float, str]:
    """The words that stand at places of an axis; none where its ticks are numbers."""
    locator = axis.get_major_locator()
    if not isinstance(locator, FixedLocator):
        return {}
    places = [float(place) for place in locator()]
    words = axis.get_major_formatter().format_ticks(places)
    return (
        {} if all(_is_number(word) for word in words) else dict(zip((round(p, 6) for p in places), words, strict=True))
    )


def _is_number(text: str) -> bool:
    try:
        float(text.replace("\N{MINUS SIGN}", "-").replace(",", ""))
    except ValueError:
        return False
    return True
