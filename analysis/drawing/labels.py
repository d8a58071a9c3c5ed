"""Names written beside points: where there is room, never on a line, a sign, another text or over the frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import Bbox

from analysis.drawing.axes import GREY, INK, YIELDS
from analysis.drawing.tips import remember_names
from analysis.drawing.vector import lay_out, measuring

NamedPoint = tuple[float, float, str, bool]  # x, y, text, bold
Floats = npt.NDArray[np.float64]

# To the right of a point, above or below it, or to its left; how many lines up; how far away in half lines. The nearest
# first.
NEAR = ((1, 0.0, 1), (-1, 0.0, 1), (1, 0.6, 1), (-1, 0.6, 1), (1, -0.6, 1), (-1, -0.6, 1), (0, 1.0, 0), (0, -1.0, 0))
FAR = tuple(
    (side, sign * up, away)
    for up in (1.5, 2.2, 3.0, 4.0, 5.0, 7.0)
    for away in (2, 4, 7, 11)
    for side in (1, -1)
    for sign in (1, -1)
)  # with a thin line to the point; only for names that must be there
ALIGNED: Mapping[int, Literal["left", "center", "right"]] = {1: "left", 0: "center", -1: "right"}
LINE_PT, GAP_PT = 13.0, 8.0  # height of a line of text; from a point to its name
SIGN_PT = 5.0  # half a sign


def name_panels(figure: Figure, axes: Sequence[Axes], points: Sequence[Sequence[NamedPoint]]) -> None:
    """Write the text of each point beside it, bold ones first, if need be with a thin line to the point.

    A text without room is left out. Call it last, after the legend: it computes the layout to know where all else is.
    """
    lay_out(figure)
    for axis, named in zip(axes, points, strict=True):
        axis.apply_aspect()
        remember_names(axis, named)
        _name(figure, axis, named)


def segments(line: Line2D) -> Floats:
    """The straight pieces that a line draws, in pixels: n x 4 (x0, y0, x1, y1). Empty for signs alone."""
    if line.get_linestyle() in ("None", "none", "", " ") or not line.get_visible():
        return np.empty((0, 4))
    at = line.get_transform().transform(np.asarray(line.get_xydata(), float))
    if line.get_drawstyle() == "steps-post" and len(at) > 1:
        at = np.repeat(at, 2, axis=0)
        at = np.column_stack([at[1:, 0], at[:-1, 1]])
    at = at[np.isfinite(at).all(axis=1)]
    return np.column_stack([at[:-1], at[1:]]) if len(at) > 1 else np.empty((0, 4))


def outline(patch: Patch) -> Floats:
    """The straight pieces of the edge of a shape that is not filled, in pixels, as `segments`."""
    if patch.get_fill():
        return np.empty((0, 4))
    edges = [np.asarray(edge) for edge in patch.get_transform().transform_path(patch.get_path()).to_polygons()]
    return np.concatenate([np.empty((0, 4)), *(np.column_stack([edge[:-1], edge[1:]]) for edge in edges)])


def crosses(pieces: Floats, box: Bbox) -> bool:
    """True if one of the straight pieces passes through the box."""
    low, high = _share_inside(pieces, box)
    return bool((low < high).any())


def _share_inside(pieces: Floats, box: Bbox) -> tuple[Floats, Floats]:
    """Where each piece enters and leaves the box, as shares of its length; the first is larger if it misses it."""
    start, step = pieces[:, :2], pieces[:, 2:] - pieces[:, :2]
    low, high = np.zeros(len(pieces)), np.ones(len(pieces))
    for place, (least, most) in enumerate(((box.x0, box.x1), (box.y0, box.y1))):
        flat = step[:, place] == 0
        outside = flat & ((start[:, place] <= least) | (start[:, place] >= most))
        with np.errstate(divide="ignore", invalid="ignore"):
            enter, leave = (least - start[:, place]) / step[:, place], (most - start[:, place]) / step[:, place]
        low = np.maximum(low, np.where(flat, 0.0, np.minimum(enter, leave)))
        high = np.minimum(high, np.where(flat, 1.0, np.maximum(enter, leave)))
        high = np.where(outside, -1.0, high)
    return low, high


def _name(figure: Figure, axis: Axes, points: Sequence[NamedPoint]) -> None:
    point = figure.dpi / 72
    canvas = measuring(figure)
    signs = [_around(axis.transData.transform((x, y)), SIGN_PT * point) for x, y, *_ in points]
    signs += [_around(at, line.get_markersize() / 2 * point) for line in axis.lines for at in _signs(line)]
    firm = [segments(line) for line in axis.lines if line.get_label() != YIELDS]
    pieces = np.concatenate([np.empty((0, 4)), *firm, *(outline(patch) for patch in axis.patches)])
    taken = [*signs, *(text.get_window_extent(canvas) for text in axis.texts if text.get_text())]
    frame = axis.get_window_extent()
    for x, y, words, bold in sorted(points, key=lambda named: not named[3]):
        if not words:
            continue
        text = axis.annotate(
            words, (x, y), xytext=(0, 0), textcoords="offset points", va="center",
            fontweight="bold" if bold else "normal", color=INK,
        )  # fmt: skip
        text.set_in_layout(False)  # a name may not move what it was placed beside
        own = axis.transData.transform((x, y))
        for side, up, away in (*NEAR, *(FAR if bold else ())):
            text.set_position((GAP_PT * away * side, LINE_PT * up))
            text.set_horizontalalignment(ALIGNED[side])
            box = text.get_window_extent(canvas)
            if not _inside(box, frame) or box.count_overlaps(taken) or crosses(pieces, box):
                continue
            if (side, up, away) in FAR:
                leader = np.array([[*own, box.x0 if side > 0 else box.x1, (box.y0 + box.y1) / 2]])
                if any(crosses(leader, other) for other in taken[len(signs) :]):
                    continue
                axis.annotate(
                    "", (x, y), xytext=(GAP_PT * away * side, LINE_PT * up), textcoords="offset points",
                    arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3},
                ).set_in_layout(False)  # fmt: skip
                pieces = np.concatenate([pieces, leader])
            taken.append(box)
            break
        else:
            text.remove()
    for line in axis.lines:
        if line.get_label() == YIELDS:
            _interrupt(axis, line, taken[len(signs) :])


def _interrupt(axis: Axes, line: Line2D, boxes: Sequence[Bbox]) -> None:
    """Leave gaps in a straight line where texts stand on it."""
    piece = segments(line)
    gaps = []
    for box in boxes:
        low, high = _share_inside(piece, box.padded(GAP_PT / 3))
        if low[0] < high[0]:
            gaps.append((float(low[0]), float(high[0])))
    shares, reached = [0.0], 0.0
    for low_, high_ in sorted(gaps):
        if low_ > reached:
            shares += [low_, math.nan, high_]
        elif high_ > reached:
            shares[-1] = high_
        reached = max(reached, high_)
    at = piece[0, :2] + np.outer([*shares, 1.0], piece[0, 2:] - piece[0, :2])
    line.set_data(*axis.transData.inverted().transform(at).T)


def _signs(line: Line2D) -> Iterator[tuple[float, float]]:
    if line.get_marker() not in ("None", "none", "", " ", None) and line.get_visible():
        for x, y in line.get_transform().transform(np.asarray(line.get_xydata(), float)):
            if np.isfinite(x) and np.isfinite(y):
                yield float(x), float(y)


def _around(at: Iterable[float], half: float) -> Bbox:
    x, y = at
    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def _inside(box: Bbox, frame: Bbox) -> bool:
    return bool(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
