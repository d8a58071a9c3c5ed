"""Draws the charts that figures share, as Vega-Lite specifications made by altair: bars, points, lines, intervals.

A chart shows the rows of a figure's table. Columns whose names begin with "_" are the page's own. They say which row of
the table and which results a mark stands for, so every chart keeps them. Colours are those of Okabe and Ito
(https://jfly.uni-koeln.de/color/), always with a shape or a place of its own. Orange and sky blue are darker here, for
a contrast of 3:1 on white. On a dark page `DARK_COLOURS` replaces colours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from mlhpc.analysis.drawing.view import render_label

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = (
    "#0072B2", "#C08400", "#009E73", "#D55E00", "#CC79A7", "#3A9BD9", "#8A8A8A",
)  # fmt: skip
ON_DARK, ON_LIGHT = "#FEFEFE", "#000001"  # of texts on a mark; no other mark has these colours
DARK_COLOURS = {
    BLUE: "#3D8FDB", ORANGE: "#E69F00", VERMILION: "#F0703A", SKY: "#7CC8F2", GREY: "#9AA4AE", ON_DARK: ON_LIGHT,
}  # fmt: skip
TEXT_COLOUR = "currentColor"  # the page's text colour, also in dark mode; black in a file
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
WIDTH, NARROW = 760, 340  # pixels of a chart alone, and of one of several side by side
ROW_HEIGHT = 22  # pixels from row to row of a chart with a name at each row
LEAST_HEIGHT = 60  # pixels of such a chart
LETTER_SHARE = 7 / 300  # of a letter in the width of a chart on a phone
AXIS_MARGIN = 14  # pixels between the outermost marks and the frame, on a logarithmic axis
# On a logarithmic axis a label at 8 or 9 takes the room of the one at 10
CROWDS_TEN = "test(/^[89]\\.000/, format(datum.value, '.3e'))"

# An altair chart (its own types make a chain of calls Any, or a union with kinds that none of these is), or a Vega-Lite
# document as a dict, whose "data" are tables: altair copies every object of a chart that is put into another
Chart = Any

_TEXT = {
    "labelColor": TEXT_COLOUR,
    "titleColor": TEXT_COLOUR,
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
}
THEME: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_TEXT,
        "domainColor": GREY,
        "tickColor": GREY,
        "gridColor": GREY,
        "gridOpacity": 0.25,
        "labelLimit": 260,
        "labelSeparation": 6,
    },
    "legend": {**_TEXT, "title": None, "orient": "top", "symbolType": "circle", "labelLimit": 300, "columns": 6},
    "title": {
        "color": TEXT_COLOUR,
        "anchor": "start",
        "frame": "bounds",
        "fontSize": 13,
        "fontWeight": "bold",
        "subtitleColor": TEXT_COLOUR,
    },
    "text": {"color": TEXT_COLOUR, "fontSize": 12},
    "rule": {"color": TEXT_COLOUR},
    "point": {"opacity": 1},
    "mark": {"tooltip": {"content": "data"}},
    "concat": {"spacing": 30},
    "range": {"category": list(CYCLE), "symbol": list(SHAPES)},
}


def encode_column(name: str) -> str:
    """Encode the name of a column for Vega-Lite, where dots and brackets would mean a path inside of the value."""
    return "".join(f"\\{letter}" if letter in ".[]\\'\"" else letter for letter in name)


def make_number_channel(
    channel: type, name: str, title: str | None = None, *, log: bool = False, prefix: bool = False, **scale: Any
) -> Any:
    """Make a channel for a column of numbers, titled by the column's name. ``scale`` are properties of its scale.

    ``prefix`` writes the ticks with decimal prefixes: 1k, 1M, 1m.
    """
    kind: dict[str, Any] = {"type": "log", "nice": False, "padding": AXIS_MARGIN} if log else {"zero": False}
    # Few ticks on a logarithmic axis, whose labels would overlap
    axis = alt.Axis(format="~s" if prefix else ".6~g", tickCount=6 if log else 8)
    if log:
        axis.labelExpr = f"{CROWDS_TEN} ? '' : datum.label"
    return channel(
        field=encode_column(name),
        type="quantitative",
        title=title or name,
        scale=alt.Scale(**(kind | scale)),
        axis=axis,
    )


def make_minutes_channel(channel: type, name: str, title: str) -> Any:
    """Make a logarithmic channel for a column of minutes, whose ticks are seconds below two minutes."""
    drawn = make_number_channel(channel, name, title, log=True)
    text = "datum.value < 2 ? format(60 * datum.value, '.3~g') + ' s' : format(datum.value, '.6~g') + ' min'"
    drawn.axis = alt.Axis(labelExpr=f"{CROWDS_TEN} ? '' : {text}", tickCount=6)
    return drawn


def make_marker_channels(names: Iterable[str]) -> dict[str, Any]:
    """Make the channels of colour and shape by the column ``_sign``. Equal sets of names always get equal markers."""
    return {
        "color": make_colour_channel(alt.Color, names),
        "shape": alt.Shape(field="_sign", type="nominal", scale=_scale(names, SHAPES)),
    }


def make_colour_channel(channel: type, names: Iterable[str], **options: Any) -> Any:
    """Make a channel of colour by the column ``_sign``."""
    return channel(field="_sign", type="nominal", scale=_scale(names, CYCLE), **options)


def make_kind_channels(name: str, colours: Mapping[str, str]) -> dict[str, Any]:
    """Make the channels of colour and shape by the column ``name``, for kinds with a colour of their own each."""
    kinds = list(colours)
    return {
        "color": alt.Color(f"{name}:N", scale=alt.Scale(domain=kinds, range=list(colours.values()))),
        "shape": alt.Shape(f"{name}:N", scale=alt.Scale(domain=kinds)),
    }


def _scale(names: Iterable[str], looks: Sequence[str]) -> alt.Scale:
    # Sorted: a name has one colour in all panels, in whatever order their rows come
    ordered = sorted(set(names))
    return alt.Scale(domain=ordered, range=[looks[place % len(looks)] for place in range(len(ordered))])


def draw_panels(
    table: pd.DataFrame,
    by: Sequence[str],
    draw: Callable[[pd.DataFrame], Chart],
    *,
    columns: int = 2,
    zoom: bool = False,
    sort: bool = True,
    first: int | None = None,
    colours: str = "shared",
) -> Chart:
    """Draw one chart for the rows of each value of the columns ``by``, titled by it. A single chart is drawn wide.

    With ``zoom`` a person can zoom and move the axes of each. Without ``sort`` panels have the order of the rows. The
    page shows the ``first`` panels, and the others by a choice. ``colours``: "shared", or "independent" for each panel.
    """
    groups = [(_title(key), rows) for key, rows in table.groupby(list(by), sort=sort, dropna=False)]
    width = WIDTH if columns == 1 or len(groups) == 1 else NARROW
    drawn = [
        _convert_to_document(draw(rows)) | {"title": render_label(title, 60), "width": width} for title, rows in groups
    ]
    for place, panel in enumerate(drawn if zoom else ()):
        # The axes follow the wheel with Ctrl, because the wheel alone scrolls the page. Each panel's parameter needs a
        # name of its own
        select = {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"}
        panel.get("layer", [panel])[0]["params"] = [{"name": f"zoom_{place}", "select": select, "bind": "scales"}]
    if len(drawn) == 1:
        return drawn[0]
    # One legend for all panels
    resolve = {"scale": {"color": colours, "shape": "shared"}}
    return {"concat": drawn, "columns": columns, "resolve": resolve} | ({"usermeta": {"first": first}} if first else {})


def layer_charts(*charts: Chart, **options: Any) -> Chart:
    """Draw charts over each other. ``options`` are those of a chart: width, height."""
    parts = [_convert_to_document(chart) for chart in charts]
    return {"layer": [each for part in parts for each in part.get("layer", [part])], **options}


def _convert_to_document(chart: Chart) -> dict[str, Any]:
    """Convert a chart of altair to a document, whose "data" is the table itself."""
    if isinstance(chart, dict):
        return chart
    if not isinstance(chart, alt.Chart):  # a chart of others, which altair has put together
        with alt.data_transformers.enable("default", max_rows=None):
            # altair refuses tables of more than 5,000 rows unless told otherwise
            whole = chart.to_dict(validate=False)
        return {name: value for name, value in whole.items() if name not in ("$schema", "config")}
    unit = chart.copy(deep=False)
    table, unit.data = unit.data, alt.Undefined
    document: dict[str, Any] = unit.to_dict(validate=False, context={"top_level": False, "data": table})
    return document | {"data": {"values": [{}]} if table is alt.Undefined else table}  # a mark of no row is drawn once


def _title(key: tuple[Any, ...]) -> str:
    # part == part: not NaN, which a missing value of a column is
    return " · ".join(str(part) for part in key if part is not None and part == part and part != "")


def draw_result_panels(table: pd.DataFrame, draw: Callable[[pd.DataFrame], Chart], **options: Any) -> Chart:
    """Draw one chart for each benchmark and size, and for each mode if the table has several.

    ``options`` are those of `draw_panels`.
    """
    by = [name for name in ("benchmark", "size") if name in table]
    if "mode" in table and table["mode"].nunique() > 1:
        by.append("mode")
        table = table.assign(mode=table["mode"].map({"strong": "time to train", "weak": "throughput"}))
    return draw_panels(table, by, draw, **options)


def convert_to_long_table(table: pd.DataFrame, columns: Sequence[str], name: str, value: str) -> pd.DataFrame:
    """Give each value of ``columns`` a row: its column in ``name``, itself in ``value``, the rest repeated."""
    return table.melt([each for each in table if each not in columns], list(columns), name, value)


def compute_chart_height(rows: int, bar: int = ROW_HEIGHT) -> int:
    """Return the height in pixels of a chart with ``rows`` rows."""
    return max(LEAST_HEIGHT, bar * rows)


def make_span_channels(axis: str, low: str, high: str, title: str) -> dict[str, Any]:
    """Make the channels of a mark from one column to another, along "x" or "y"."""
    start = {"x": alt.X, "y": alt.Y}[axis](field=encode_column(low), type="quantitative", title=title)
    return {axis: start, f"{axis}2": {"field": encode_column(high)}}


def draw_stacked_bars(
    table: pd.DataFrame, parts: Mapping[str, str], unit: str, *, text: str | None = None, longest: float | None = None
) -> Chart:
    """Draw a horizontal bar for each row, made of ``parts`` (column: colour) in their order, in ``unit``.

    ``text`` is a column that is written at the end of the bar. Names of parts in the legend are those of the columns
    without the unit in brackets. The axis ends at ``longest``, which several panels can share.
    """
    names = {part: part.partition(" [")[0] for part in parts}
    wide = table.reset_index(drop=True)
    long = convert_to_long_table(wide, list(parts), "_part", "_value")
    long["_order"] = long["_part"].map({part: place for place, part in enumerate(parts)})
    ends = wide[list(parts)].fillna(0.0).cumsum(axis=1)
    middles = convert_to_long_table(ends - wide[list(parts)] / 2, list(parts), "_part", "_middle")
    long["_middle"], long["_ink"] = middles["_middle"], long["_part"].map(lambda part: _choose_ink(parts[part]))
    long["_part"] = long["_part"].map(names)
    long["_inside"] = long["_part"].where(
        long["_value"] > long["_part"].str.len() * LETTER_SHARE * ends.max(axis=None), ""
    )
    base = alt.Chart(long).encode(y=make_names_axis(table))
    colours = alt.Scale(domain=list(names.values()), range=list(parts.values()))
    legend: Any = {} if len(parts) > 1 else {"legend": None}
    bars = base.mark_bar(height={"band": 0.75}).encode(
        x=alt.X(
            "sum(_value):Q", title=unit, axis=alt.Axis(format=".6~g", tickCount=8), stack="zero",
            scale=alt.Undefined if longest is None else alt.Scale(domain=[0, longest], nice=False),
        ),
        color=alt.Color("_part:N", scale=colours, **legend),
        order=alt.Order("_order:Q"),
    )  # fmt: skip
    inside = base.mark_text(fontSize=11).encode(
        x=alt.X("_middle:Q"), text="_inside:N", color=alt.Color("_ink:N", scale=None)
    )
    layers = [bars, inside] if len(parts) > 1 else [bars]
    if text is not None:
        # The text once for each row, not for each part of its bar
        written = base.transform_filter("datum._order == 0").mark_text(align="left", dx=5)
        long["_whole"] = pd.concat([ends.iloc[:, -1]] * len(parts), ignore_index=True)
        layers.append(written.encode(x=alt.X("_whole:Q"), text=alt.Text(field=encode_column(text), type="nominal")))
    return layer_charts(*layers, height=ROW_HEIGHT * len(table))


def _choose_ink(colour: str) -> str:
    """Choose the colour of a text on a mark."""
    return ON_DARK if colour == BLUE else ON_LIGHT


def make_names_axis(table: pd.DataFrame) -> alt.Y:
    """Make the axis of names, in the order of the rows."""
    return alt.Y(
        "label:N", title=None, sort=list(dict.fromkeys(table["label"])), axis=alt.Axis(ticks=False, domain=False)
    )


def draw_points(
    table: pd.DataFrame, x: alt.X, y: alt.Y, signs: Iterable[str], *,
    y_ends: tuple[str, str] | None = None, hollow: str | None = None, joined: str | None = None,
    names: str | None = None,
) -> Chart:  # fmt: skip
    """Draw a point for each row of ``table`` (columns ``_sign`` and the axes'). ``y_ends`` adds intervals along y.

    ``hollow`` and ``joined`` are columns of booleans: which points are hollow, and which of one sign a line joins from
    left to right. ``names`` is the column of names at the points, on logarithmic axes; one without room has none.
    """
    if names is not None:
        places = PLACES if joined is None else PLACES_OFF_LINES
        table = pd.concat([table, place_names(table[_field(x)], table[_field(y)], table[names], places)], axis=1)
    base = alt.Chart(table)
    layers: list[alt.Chart] = []
    if joined is not None:
        # json.dumps writes the name as JavaScript reads it, with its quotes
        front = base.transform_filter(f"datum[{json.dumps(joined)}]")
        line = front.mark_line(interpolate="step-after", color=TEXT_COLOUR, strokeWidth=1)
        layers.append(line.encode(x=x, y=y, detail="_sign:N"))
    look = make_marker_channels(signs)
    if y_ends is not None:
        low, high = (encode_column(end) for end in y_ends)
        rule = base.mark_rule(strokeWidth=1.5)
        layers.append(
            rule.encode(x=x, y=alt.Y(field=low, type="quantitative"), y2={"field": high}, color=look["color"])
        )
    filled = make_colour_channel(alt.Fill, signs)
    opacity: Any = alt.value(0.85)
    if hollow is not None:
        opacity = alt.when(f"datum[{json.dumps(hollow)}]").then(alt.value(0)).otherwise(opacity)
    marks = base.mark_point(size=90, strokeWidth=1.8)
    layers.append(marks.encode(x=x, y=y, fill=filled, fillOpacity=opacity, **look))
    if names is not None:
        layers.append(_draw_names(base, x, y))
    return layer_charts(*layers, height=PANEL_HEIGHT)


def _field(channel: Any) -> str:
    """Return the column of a channel."""
    return str(channel.to_dict()["field"]).replace("\\", "")


def _draw_names(base: Chart, x: alt.X, y: alt.Y) -> Chart:
    where = {name: alt.expr(f"datum._{name}") for name in ("align", "dx", "dy")}
    return base.mark_text(fontSize=11, **where).encode(x=x, y=y, text="_name:N")


PANEL_HEIGHT = 300  # pixels of a chart of points
NAMED_WIDTH = 200  # pixels for which names are placed: a wider chart has room for them too
PLACES = (
    ("left", 1, 0),
    ("right", -1, 0),
    ("center", 0, -1),
    ("center", 0, 1),
)  # of a name: alignment, and where it is
PLACES_OFF_LINES = (("left", 0, -1), ("right", 0, -1), ("left", 0, 1), ("right", 0, 1))  # above and below a point
MOST_LETTERS = 20  # of a name
FROM_POINT, LETTER, LINE = 8, 6.2, 13  # pixels from a point to its name, of a letter and of a line


def place_names(
    x: pd.Series, y: pd.Series, names: pd.Series, places: Sequence[tuple[str, int, int]] = PLACES
) -> pd.DataFrame:
    """Place a name at each point of two logarithmic axes, so that none covers another name or point.

    The first rows come first. Columns: ``_name`` (empty: no room), ``_align``, ``_dx``, ``_dy``.
    """
    across, up = (_place_on_axis(np.log(values.astype(float))) for values in (x, y))
    points = [(at * NAMED_WIDTH, (1 - height) * PANEL_HEIGHT) for at, height in zip(across, up, strict=True)]
    taken = [(a - 5, a + 5, b - 5, b + 5) for a, b in points]
    rows = []
    for (a, b), name in zip(points, names.map(lambda each: render_label(each, MOST_LETTERS)), strict=True):
        length = len(name) * LETTER
        for align, side, over in places:
            left = a + side * FROM_POINT - {"left": 0.0, "right": length, "center": length / 2}[align]
            top = b + over * (LINE + 2)
            box = (left, left + length, top - LINE / 2, top + LINE / 2)
            inside = box[0] >= 0 and box[1] <= NAMED_WIDTH and box[2] >= 0 and box[3] <= PANEL_HEIGHT
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                rows.append((name, align, side * FROM_POINT, over * (LINE + 2)))
                break
        else:
            rows.append(("", "left", 0, 0))
    return pd.DataFrame(rows, columns=["_name", "_align", "_dx", "_dy"], index=x.index)


def _place_on_axis(values: pd.Series) -> pd.Series:
    """Return where values lie on an axis from 0 to 1."""
    length = values.max() - values.min()
    return 0.05 + 0.9 * (values - values.min()) / length if length > 0 else values * 0 + 0.5


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def draw_intervals(
    table: pd.DataFrame, value: str, ends: tuple[str, str], title: str, kind: str, colours: alt.Scale, *,
    at: float | None = None, log: bool = False,
) -> Chart:  # fmt: skip
    """Draw for each row of ``table`` a point at ``value`` and a line between its ends, coloured by the column ``kind``.

    ``at`` draws a vertical line there, such as a ratio of 1.
    """
    kinds = alt.Color(field=encode_column(kind), type="nominal", scale=colours)
    base = alt.Chart(table).encode(y=make_names_axis(table), color=kinds)
    rule = base.mark_rule(strokeWidth=2.5).encode(**make_span_channels("x", *ends, title))
    point = base.mark_point(size=80, filled=True, opacity=1).encode(x=make_number_channel(alt.X, value, title, log=log))
    layers = [rule, point]
    if at is not None:
        layers.insert(0, alt.Chart().mark_rule(strokeDash=[3, 3]).encode(x=alt.datum(at)))
    return layer_charts(*layers, height=compute_chart_height(table["label"].nunique()))


def build_specification(chart: Chart) -> dict[str, Any]:
    """Build the Vega-Lite document of a chart, with the theme.

    It has only the columns that the chart draws, or that begin with "_".
    """
    datasets: dict[str, list[dict[str, Any]]] = {}
    tables: dict[int, tuple[str, pd.DataFrame]] = {}
    document = _name_tables(_convert_to_document(chart), tables, datasets)
    for part in document.get("concat", [document]):
        _mark_logarithmic(part)
    document |= {"$schema": alt.SCHEMA_URL, "config": THEME}
    text = json.dumps(document, ensure_ascii=False)
    # A name counts as used if it occurs anywhere in the text: a column too many costs little, one too few the chart
    for name, table in tables.values():
        used = [column for column in table if _is_used(column, text)]
        values = [[None if _is_missing(value) else value for value in table[column].tolist()] for column in used]
        datasets[name] = [dict(zip(used, row, strict=True)) for row in zip(*values, strict=True)]
    return document | {"datasets": datasets}


def _mark_logarithmic(part: dict[str, Any]) -> None:
    """Say of each logarithmic axis of a panel that it is one: without that 2 and 65 times as fast look alike."""
    for axis in ("x", "y"):
        # Layers that share an axis have one title, or all of them are written.
        layers = [each["encoding"][axis] for each in part.get("layer", [part]) if axis in each.get("encoding", {})]
        titles = {each.get("title") for each in layers if (each.get("scale") or {}).get("type") == "log"} - {None}
        for each in layers:
            if each.get("title") in titles and not each["title"].endswith(", log"):
                each["title"] += ", log"


def _name_tables(
    part: dict[str, Any], tables: dict[int, tuple[str, pd.DataFrame]], datasets: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return a document with the name of each table in its place. ``tables`` gets each table once, by its identity.

    ``datasets`` gets those of charts that altair has put together.
    """
    named = dict(part)
    datasets.update(named.pop("datasets", {}))
    if isinstance(table := part.get("data"), pd.DataFrame):
        named["data"] = {"name": tables.setdefault(id(table), (f"data-{len(tables)}", table))[0]}
    for several in {"layer", "concat"} & part.keys():
        named[several] = [_name_tables(each, tables, datasets) for each in part[several]]
    return named


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and not math.isfinite(value))


def _is_used(name: str, text: str) -> bool:
    return name.startswith("_") or json.dumps(encode_column(name), ensure_ascii=False)[1:-1] in text
