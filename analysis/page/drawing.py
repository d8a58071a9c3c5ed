"""Drawing tools of all figures: style, panels, axes and labels. `analysis.page.vector` renders them.

Figures do not use pyplot, so there is no global state.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.page.tips import remember_names

WIDTH_IN = 11.0  # 792 user units; the page never shows it narrower than 792 px, so 11 pt text is at least 11 px
LEGEND_IN = 0.45
BAR_IN, FRAME_IN = 0.36, 0.9  # height of one bar, and of title, axis and label around bars
INK = "#1b1f25"  # on paper and slides; on the page the text colour, which differs in dark mode (analysis.page.vector)
# Okabe and Ito, https://jfly.uni-koeln.de/color/ (black left out: it is no colour in dark mode)
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip
GREY = "#8A8A8A"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
LEGEND_CHARACTERS = 110  # across a figure, the signs and gaps of a column taken for 8
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[str, Any] = {
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


NamedPoint = tuple[float, float, str, bool]  # x, y, text, bold


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


def name_panels(figure: Figure, axes: Sequence[Axes], points: Sequence[Sequence[NamedPoint]]) -> None:
    """`name_points` in every panel. Call it after everything else, the legend included: both change the layout."""
    for axis, named in zip(axes, points, strict=True):
        remember_names(axis, named)
        name_points(figure, axis, named)


def log_frame(axis: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Two logarithmic axes with these limits."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*x)
    axis.set_ylim(*y)


@dataclass(frozen=True)
class Diagonals:
    """Lines of equal ``scale`` · x^power · y in a log-log panel, labelled at powers of ten with ``unit``."""

    unit: str
    scale: float = 1.0
    power: int = 1
    invert: bool = False


def loglog(axis: Axes, x: Sequence[float], y: Sequence[float], lines: Diagonals | None = None) -> None:
    """Set logarithmic axes around the data, with plain numbers, and draw the diagonals that cross the frame."""
    left, right = min(x) / 1.6, max(x) * 1.6
    low, high = min(y) / 1.9, max(y) * 1.9
    axis.set_xlim(left, right)  # before the scales: setting a scale autoscales, which overflows on absurd times
    axis.set_ylim(low, high)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 200 else (1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    for formatted in (axis.xaxis, axis.yaxis):
        formatted.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if lines is None:
        return
    ends = [lines.scale * a**lines.power * b for a in (left, right) for b in (low, high)]
    for exponent in range(-9, 16):
        value = 10.0**exponent
        level = 1.0 / value if lines.invert else value  # scale · x^power · y = level
        if not min(ends) < level < max(ends):
            continue
        axis.plot(
            [left, right],
            [level / lines.scale / end**lines.power for end in (left, right)],
            "--", color=GREY, linewidth=0.8, zorder=0,
        )  # fmt: skip
        at = right / 1.05
        height = level / lines.scale / at**lines.power
        if not low < height < high:
            edge = low * 1.03 if height < low else high / 1.2
            at = (level / lines.scale / edge) if lines.power > 0 else (edge * lines.scale / level)
            height = edge
        if left * 1.3 < at < right:
            axis.text(at, height, f"{value:g} {lines.unit}", color=INK, ha="right", va="bottom", alpha=0.8)


def name_points(figure: Figure, axis: Axes, points: Sequence[NamedPoint]) -> None:
    """Write the text of each point beside it, bold ones first. A text that would cover a point or another text is left out.

    Call it last: it computes the layout to know the positions of points.
    """
    figure.draw_without_rendering()
    dots = [tuple(axis.transData.transform((x, y))) for x, y, _, _ in points]
    taken = [(a - 5, b - 5, a + 5, b + 5) for a, b in dots]
    frame = axis.get_window_extent()
    point = figure.dpi / 72
    for (x, y, text, bold), (a, b) in sorted(zip(points, dots, strict=True), key=lambda item: not item[0][3]):
        width, height = (0.66 if bold else 0.6) * 11 * len(text) * point, 13 * point
        for right, up in ((1, 0.4), (1, -0.5), (-1, 0.4), (-1, -0.5), (1, 1.5), (1, -1.6), (-1, 1.5), (-1, -1.6)):
            left = a + 8 * point if right > 0 else a - 8 * point - width
            low = b + up * height - height / 2
            box = (left, low, left + width, low + height)
            inside = (
                frame.x0 <= left and left + width <= frame.x1 + 40 * point and frame.y0 <= low and box[3] <= frame.y1
            )
            if not inside or any(_overlap(box, other) for other in taken):
                continue
            taken.append(box)
            axis.annotate(
                text, (x, y), xytext=(8 * right, up * 13), textcoords="offset points", va="center",
                ha="left" if right > 0 else "right", fontweight="bold" if bold else "normal", color=INK,
            )  # fmt: skip
            break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def listed(statements: Sequence[str], most: int = 6) -> str:
    """The first ``most`` statements in one line, and the number of the others."""
    more = f"; and {len(statements) - most} more" if len(statements) > most else ""
    return "; ".join(statements[:most]) + more


def beside(axis: Axes, x: float, y: float, text: str) -> None:
    """Write a value to the right of the end of a bar."""
    axis.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", ha="left")


def clip(text: object, length: int = 44) -> str:
    """A label of at most ``length`` printable characters. Longer ones are cut in the middle: names differ at both ends."""
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


def time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds per unit and name of the unit, for an axis up to ``longest_s``."""
    if longest_s > 7200:
        return 3600.0, "hours"
    return (60.0, "minutes") if longest_s > 300 else (1.0, "seconds")


def seconds(value: float) -> str:
    """Seconds as text for people: s below 10 minutes, then min, below 10 hours, then h."""
    if value != value:  # NaN
        return "–"
    if value < 600:
        return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"
    return f"{value / 60:.1f} min" if value < 36000 else f"{value / 3600:.1f} h"
