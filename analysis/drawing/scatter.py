"""What figures with one sign per result share: panels by benchmark and size, signs by device, names at the points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from analysis.drawing.axes import clip

PROBLEM = ["benchmark", "size"]


def problems(results: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Results by benchmark and size, each with the title of its panel."""
    return [
        (clip(f"{benchmark} · size {size}", 50), rows)
        for (benchmark, size), rows in results.groupby(PROBLEM, sort=True)
    ]


def several_per_problem(results: pd.DataFrame) -> pd.DataFrame:
    """The results that share benchmark and size with at least one other."""
    return results[results.groupby(PROBLEM)["group"].transform("size") > 1]


def plot_sign(axis: Axes, x: float, y: float, sign: tuple[str, str], *, size: float = 9, hollow: bool = False) -> None:
    """The sign (colour and marker) of one result."""
    colour, marker = sign
    axis.plot([x], [y], marker, color=colour, markersize=size, mfc="none" if hollow else colour, linestyle="none")


def plot_ring(axis: Axes, x: float, y: float, colour: str, *, size: float, width: float | None = None) -> None:
    """The ring that marks a result of the open division."""
    axis.plot([x], [y], "o", color=colour, markersize=size, mfc="none", mew=width, linestyle="none")


def label_axes(axis: Axes, title: str, x: str, y: str) -> None:
    """Title of a panel and names of its axes."""
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)


def result_table(
    results: pd.DataFrame, identity: Sequence[str], values: Mapping[str, pd.Series | list[float | None]]
) -> pd.DataFrame:
    """A figure's table with one row per result: benchmark, size and the columns of ``identity`` first, then the values."""
    columns = {name: results[name] for name in (*PROBLEM, *identity)}
    return pd.DataFrame(columns | dict(values)).reset_index(drop=True)
