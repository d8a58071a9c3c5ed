"""Figure: the speed-up between two results as a product of machine size, speed per unit, epochs and staging."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.page.drawing import BLUE, GREEN, INK, VERMILION, clip, panels
from analysis.statistics.scaling import Factors, Split, factors
from analysis.study import NotAnswerableError, Study

TITLE = "Why is it faster?"
CAPTION = (
    "Speed-up from the first to the second result, factor by factor, on a logarithmic axis: they multiply to the total. Units: "
    "how much larger the machine is. Speed per unit: epochs per second and unit, below 1 where scaling is not perfect. Epochs: "
    "below 1 where the second needs more, usually for its larger batch. Staging and other: time outside epochs. Shown are "
    "the pairs asked for (--between), consecutive sizes of one machine and the way to the fastest; the table has every result "
    "against the fastest of its class."
)
ORDER = 32
SHOWN = 6  # panels per class
PARTS = ("units", "system", "algorithmic", "staging", "other")
NAMES = ("units", "speed/unit", "epochs", "staging", "other", "total")


def table(study: Study) -> pd.DataFrame:
    """The factors of every pair."""
    lines = [
        {"class": title, "from": a["label"], "to": b["label"]}
        | {name.replace("\n", " "): getattr(found, part) for name, part in zip(NAMES, PARTS, strict=False)}
        | {"speed-up": found.speed_up, "efficiency": found.efficiency, "shown": shown}
        for title, a, b, found, shown in _pairs(study)
    ]
    if not lines:
        raise NotAnswerableError("two time-to-train results of one benchmark and size with units and epochs")
    return pd.DataFrame(lines)


def answer(study: Study) -> str:
    """The first pair in words."""
    row = table(study).query("shown").iloc[0]
    return (
        f"{row['from']} to {row['to']}: {row['speed-up']:.3g}× = {row['units']:.3g} (units) × {row['speed/unit']:.3g} "
        f"(speed per unit) × {row['epochs']:.3g} (epochs) × {row['staging'] * row['other']:.3g} (staging and other)"
    )


def draw(study: Study) -> Figure:
    """A panel per shown pair."""
    table(study)
    pairs = [pair for pair in _pairs(study) if pair[4]]
    columns = min(3, len(pairs))
    figure, axes = panels(len(pairs), columns, 3.0)
    for (title, a, b, found, _), axis in zip(pairs, axes, strict=True):
        at = 1.0
        for place, part in enumerate(PARTS):
            factor = getattr(found, part)
            colour = GREEN if factor >= 1 else VERMILION
            axis.bar(
                [place], [at * factor - at], bottom=at, width=0.7, color=colour, hatch=None if factor >= 1 else "//"
            )
            axis.plot([place - 0.35, place + 1.35], [at * factor] * 2, color=INK, linewidth=0.7)
            axis.annotate(
                f"×{factor:.2g}", (place, max(at, at * factor)), xytext=(0, 3), textcoords="offset points", ha="center"
            )
            at *= factor
        axis.bar([len(PARTS)], [at - 1], bottom=1.0, width=0.7, color=BLUE)
        axis.annotate(f"×{at:.3g}", (len(PARTS), max(at, 1.0)), xytext=(0, 3), textcoords="offset points", ha="center")
        axis.axhline(1.0, color=INK, linewidth=0.8)
        axis.set_yscale("log", base=2)
        reached = [1.0, at, *_levels(found)]
        axis.set_ylim(min(reached) / 1.25, max(reached) * 1.5)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_xticks(range(len(NAMES)), NAMES, rotation=35, ha="right", rotation_mode="anchor")
        axis.set_title(
            f"{clip(title.split(' ·')[0], 14)}: {clip(a['label'], 26)}\n→ {clip(b['label'], 32)}", fontsize=11
        )
        axis.grid(visible=False, axis="x")
    return figure


def _levels(found: Factors) -> Iterator[float]:
    at = 1.0
    for part in PARTS:
        at *= getattr(found, part)
        yield at


def _pairs(study: Study) -> list[tuple[str, pd.Series, pd.Series, Factors, bool]]:
    """Pairs by class: those asked for by name, consecutive sizes of a machine, then every result against the fastest."""
    found = []
    for title, rows in study.classes():
        known = rows[(rows["mode"] == "strong") & rows["units"].notna() & (rows["epoch_time_s.mean"] > 0)]
        if len(known) < 2:
            continue
        best = known.loc[known["run_s.mean"].idxmin()]
        pairs = []
        for _, series in known.groupby(["round", "machine", "device"], sort=True):
            ordered = [row for _, row in series.sort_values(["units", "run_s.mean"]).iterrows()]
            pairs += [(a, b) for a, b in itertools.pairwise(ordered) if a["units"] < b["units"]]
        asked = [(known[known["group"] == a], known[known["group"] == b]) for a, b in study.between]
        named = [(a.iloc[0], b.iloc[0]) for a, b in asked if len(a) and len(b)]
        names = {(a.name, b.name) for a, b in named}
        pairs = named + [(a, b) for a, b in pairs if (a.name, b.name) not in names]
        own_first = known.drop(best.name).sort_values(["published", "run_s.mean"])
        pairs += [
            (row, best)
            for _, row in own_first.iterrows()
            if not any(a.name == row.name and b.name == best.name for a, b in pairs)
        ]
        for place, (a, b) in enumerate(pairs):
            split = factors(_split(a), _split(b))
            if math.isfinite(split.speed_up) and split.speed_up > 0:
                found.append((title, a, b, split, place < SHOWN))
    return found


def _split(row: pd.Series) -> Split:
    return Split(
        units=float(row["units"]),
        epochs=float(row["epochs.mean"]),
        compute_s=float(row["epoch_time_s.mean"]),
        staging_s=float(row["staging_exposed_s.mean"]),
        other_s=float(row["other_s.mean"]),
    )
