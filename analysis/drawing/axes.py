"""Drawing tools of all figures: style, panels, axes and labels. `analysis.drawing.vector` renders them.

Figures do not use pyplot, so there is no global state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from suite.files import duration_text

WIDTH_IN = 11.0  # 792 user units; the page never shows it narrower than 792 px, so 11 pt text is at least 11 px
LEGEND_IN = 0.45
BAR_IN, FRAME_IN = 0.36, 0.9  # height of one bar, and of title, axis and label around bars
INK = "#1b1f25"  # on paper and slides; on the page the text colour, which differs in dark mode (`vector`)
# Okabe and Ito, https://jfly.uni-koeln.de/color/ (black left out: it is no colour in dark mode)
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip
GREY = "#8A8A8A"
YIELDS = "_yields"  # label (in no legend) of lines that are interrupted where a name stands
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
CHARACTER_IN = 0.6 * 11 / 72
LEGEND_CHARACTERS = 110  # across a figure, the signs and gaps of a column taken for 8
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[str, Any] = {
    "figure.dpi": 72,  # that of SVG: names find the same room there
    "svg.hashsalt": "mlhpc",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    **dict.fromkeys(
        ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color", "hatch.color"],
        INK,
    ),
}


@contextmanager
def style() -> Iterator[None]:
    """Set the style of figures; use it around drawing and saving."""
    with mpl.rc_context(cast(Any, _STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # absurd numbers have long labels
        yield


def panels(count: int, columns: int, height_in: float, extra_in: float = 0.0) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` equal panels in rows, with ``extra_in`` inches for legends around them."""
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH_IN, rows * height_in + extra_in), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def bars(rows: Sequence[int], columns: int, *, legend: bool = False, **options: Any) -> tuple[Figure, list[list[Axes]]]:
    """A figure with one row of axes per entry of ``rows``, the number of bars in it. All bars have the same height."""
    heights = [FRAME_IN + BAR_IN * count for count in rows]
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + (LEGEND_IN if legend else 0.0)), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=[count + 0.2 for count in rows], **options)
    for row, count in zip(axes, rows, strict=True):
        for axis in row:
            axis.set_ylim(-0.6, count - 0.4)
    return figure, [list(row) for row in axes]


def looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each name. The same set of names always gets the same."""
    ordered = sorted(set(names))
    return {name: (CYCLE[i % len(CYCLE)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(ordered)}


def legend_of(figure: Figure, axis: Axes, signs: Mapping[str, tuple[str, str]]) -> None:
    """Draw a legend of colours and markers below the panels."""
    for name, (colour, marker) in signs.items():
        axis.plot([], [], marker, color=colour, linestyle="none", markersize=9, label=clip(name, 40))
    handles, labels = axis.get_legend_handles_labels()
    columns = LEGEND_CHARACTERS // (max(map(len, labels), default=0) + 8)
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(4, len(labels), columns)))


def log_frame(axis: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Two logarithmic axes with these limits."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*x)
    axis.set_ylim(*y)


@dataclass(frozen=True)
class Diagonals:
    """Lines of equal ``scale`` · x^power · y in a log-log panel, at powers of ten; they stand beside the frame with
    ``unit``.
    """

    unit: str
    scale: float = 1.0
    power: int = 1
    invert: bool = False


def loglog(axis: Axes, x: Sequence[float], y: Sequence[float], lines: Diagonals | None = None) -> None:
    """Set logarithmic axes around the data, with plain numbers, and draw the diagonals. Call it after the title."""
    left, right = min(x) / 1.6, max(x) * 1.6
    low, high = min(y) / 1.9, max(y) * 1.9
    axis.set_xlim(left, right)  # before the scales: setting a scale autoscales, which overflows on absurd times
    axis.set_ylim(low, high)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 200 else (1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    for formatted in (axis.xaxis, axis.yaxis):
        formatted.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if lines is not None:
        _diagonals(axis, lines, (left, right), (low, high))


def _diagonals(axis: Axes, lines: Diagonals, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Draw the lines that cross the frame.

    Their values stand outside it, where a line leaves at the right or at the top.
    """
    ends = [lines.scale * a**lines.power * b for a in x for b in y]
    above = []
    for exponent in range(-9, 16):
        value = 10.0**exponent
        level = (1.0 / value if lines.invert else value) / lines.scale  # x^power · y = level
        if not min(ends) < level * lines.scale < max(ends):
            continue
        axis.plot(x, [level / end**lines.power for end in x], "--", color=GREY, linewidth=0.8, zorder=0, label=YIELDS)
        text = f"{value:,.6g} {lines.unit}"
        if y[0] < level / x[1] ** lines.power < y[1]:
            axis.annotate(
                text, (1, level / x[1] ** lines.power), xycoords=("axes fraction", "data"), xytext=(3, 0),
                textcoords="offset points", va="center", annotation_clip=False,
            )  # fmt: skip
        elif x[0] < (at := (level / y[1]) ** (1 / lines.power)) < x[1]:
            above.append((math.log(at / x[0]) / math.log(x[1] / x[0]), text))
    _write_above(axis, above)


def _write_above(axis: Axes, above: Sequence[tuple[float, str]]) -> None:
    """Write texts above the frame at these shares of its width, the rightmost first, as far as they have room; title
    higher.
    """
    free = 1.0
    width_in = (
        0.8 * WIDTH_IN * axis.get_position().width
    )  # the layout, not made yet, leaves less than the plain position
    for at, text in sorted(above, reverse=True):
        half = CHARACTER_IN / 2 * len(text) / width_in
        if at + half > free:
            continue
        free = at - half - 0.02
        axis.annotate(
            text, (at, 1), xycoords="axes fraction", xytext=(0, 3), textcoords="offset points", ha="center",
            annotation_clip=False,
        )  # fmt: skip
        axis.set_title(axis.get_title(loc="left"), loc="left", pad=20)


def listed(statements: Sequence[str], most: int = 6) -> str:
    """The first ``most`` statements in one line, and the number of the others."""
    more = f"; and {len(statements) - most} more" if len(statements) > most else ""
    return "; ".join(statements[:most]) + more


def stacked(axis: Axes, parts: Iterable[tuple[str, str, NDArray[np.float64]]]) -> NDArray[np.float64]:
    """Draw horizontal bars of parts (title, colour, widths by bar) one after another, and return where each bar ends."""
    ends = np.zeros(1)
    for title, colour, width in parts:
        ends = np.broadcast_to(ends, width.shape)
        axis.barh(np.arange(len(width)), width, left=ends, height=0.72, color=colour, label=title)
        ends = ends + width
    return ends


def beside(axis: Axes, x: float, y: float, text: str) -> None:
    """Write a value to the right of the end of a bar."""
    axis.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", ha="left")


def clip(text: object, length: int = 44) -> str:
    """A label of at most ``length`` printable characters.

    Longer ones are cut in the middle: names differ at both ends.
    """
    line = str(text)
    if not line.isprintable():
        line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    if len(line) <= length:
        return line
    head = length * 2 // 3
    return f"{line[:head]}…{line[-(length - head - 1) :]}"


def readable_on(colour: tuple[float, float, float]) -> str:
    """Black or white, whichever has the higher contrast on an sRGB colour (0 to 1); at least 4.5:1 (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if luminance < 0.179 else "#000000"


def seconds(value: float) -> str:
    """Seconds as text for people, as the commands print them; a dash for NaN."""
    return "–" if value != value else duration_text(value)
