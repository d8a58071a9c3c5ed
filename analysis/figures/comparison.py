"""Figure: every result against the fastest of its task, as a ratio of times with its interval."""

from __future__ import annotations

import math
from functools import lru_cache

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.drawing.axes import BLUE, GREY, INK, bars, clip, listed
from analysis.study import NotAnswerableError, Study
from suite.statistics import Outcome
from suite.statistics.comparison import CONFIDENCE, Comparison, Run, compare_times, holm

TITLE = "Is the difference real?"
CAPTION = (
    "Ratio of geometric mean times to that of the fastest result of the panel, with 95 % Welch interval on log time, "
    "over all "
    "runs that reached the target. A panel has results that may be ranked against each other: of one division, and of "
    "rounds whose data are the same and whose times include the same. Grey and hollow: inconclusive. The interval "
    "holds 1, Holm's p over all comparisons of the panel is above 0.05, the permutation test disagrees, or the times "
    "drift from run to run. The table has these values, the smallest ratio that so many runs would find with 80 % "
    "power, and the ratio of scores, which drop the fastest and the slowest run. Results of two machines are of two "
    "sessions: what else differed between them counts as difference."
)


def table(study: Study) -> pd.DataFrame:
    """Ratio, interval and p values of every comparison."""
    lines = []
    for title, short, rows in study.tasks():
        known = rows[(rows["mode"] == "strong") & rows["run_s.mean"].notna() & ~rows["group"].isin(_copies(study))]
        if len(known) < 2:
            continue
        best = known.loc[known["run_s.mean"].idxmin()]
        base = _runs(study, best["group"])
        part = []
        for row in known.drop(best.name).sort_values("run_s.mean").to_dict("records"):
            comparison = _compared(base, _runs(study, row["group"]))
            if comparison is not None:
                head = {
                    "class": title,
                    "task": short,
                    "label": row["label"],
                    "against": best["label"],
                    "division": row["division"],
                }
                part.append(head | vars(comparison) | {"ratio of scores": row["score_s"] / best["score_s"]})
        for line, adjusted in zip(part, holm([line["p"] for line in part]), strict=True):
            real = adjusted < 1 - CONFIDENCE and line["outcome"] == Outcome.SLOWER
            line["doubts"] = "; ".join(line["doubts"])
            lines.append(
                line | {"p_holm": adjusted, "verdict": (Outcome.SLOWER if real else Outcome.INCONCLUSIVE).value}
            )
    if not lines:
        raise NotAnswerableError("two time-to-train results of one benchmark and size with at least two runs each")
    return pd.DataFrame(lines).rename(
        columns={
            "n_b": "n", "n_a": "n of the other", "ratio": "ratio of times", "low": "95 % from", "high": "95 % to",
            "p": "p (Welch)", "p_permutation": "p (permutation)", "p_holm": "p (Holm)",
            "detectable": "smallest detectable ratio", "drift": "drift a run",
        }
    ).drop(columns="outcome")  # fmt: skip


def _copies(study: Study) -> set[str]:
    """Results all of whose runs are those of another result: nothing differs between a result and itself."""
    again = study.runs["repeats"].notna().groupby(study.runs["group"]).all()
    return set(again[again].index)


def answer(study: Study) -> str:
    """The closest follower of each task."""
    sentences = []
    for _, rows in table(study).groupby("class", sort=True):
        first = rows.iloc[0]
        if first["verdict"] == Outcome.SLOWER:
            what = f"{first['ratio of times']:.3g} [{first['95 % from']:.3g}, {first['95 % to']:.3g}] times the time of"
            by_score = "" if pd.isna(first["ratio of scores"]) else f" ({first['ratio of scores']:.3g} by score)"
        else:
            what, by_score = "inconclusive against", ""
        sentences.append(f"{first['task']}: {first['label']} is {what} {first['against']}{by_score}")
    return listed(sentences)


def draw(study: Study) -> Figure:
    """A forest plot per task."""
    classes = list(table(study).groupby("class", sort=True))
    figure, axes = bars([len(rows) for _, rows in classes], 1)
    for (title, rows), (axis,) in zip(classes, axes, strict=True):
        for place, row in enumerate(rows.iloc[::-1].to_dict("records")):
            real = row["verdict"] == Outcome.SLOWER
            colour, middle = (BLUE, row["ratio of times"]) if real else (GREY, row["ratio of times"])
            axis.plot([row["95 % from"], row["95 % to"]], [place, place], color=colour, linewidth=2.2)
            axis.plot(
                [middle], [place], "o" if real else "s", color=colour, mfc=colour if real else "none", markersize=7
            )
            text = f"{middle:.3g}×" if real else "inconclusive"
            axis.annotate(
                text, (max(row["95 % to"], middle), place), xytext=(7, 0), textcoords="offset points", va="center"
            )
        axis.axvline(1.0, color=INK, linewidth=0.9)
        axis.set_xscale("log", base=2)
        low, high = min(rows["95 % from"].min(), 1.0), max(rows["95 % to"].max(), 1.0)
        axis.set_xlim(low / 1.05, high * max(1.15, (high / low) ** 0.25))
        if high / low < 3:
            axis.set_xticks(
                [value for value in (0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5) if low / 1.05 < value < high * 1.1]
            )
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.minorticks_off()
        axis.set_yticks(range(len(rows)), [clip(label) for label in rows["label"].iloc[::-1]])
        axis.set_title(clip(title, 60))
        axis.set_xlabel(f"time ÷ time of {clip(rows['against'].iloc[0], 36)}")
        axis.grid(visible=False, axis="y")
    return figure


def between(study: Study, a: str, b: str) -> Comparison | None:
    """Compare the times of result ``b`` with those of ``a``, given their groups; None if runs are too few."""
    return _compared(_runs(study, a), _runs(study, b))


@lru_cache(maxsize=1024)
def _compared(a: tuple[Run, ...], b: tuple[Run, ...]) -> Comparison | None:
    """Compared once, though table, answer and figure ask."""
    return compare_times(a, b)


def _runs(study: Study, group: str) -> tuple[Run, ...]:
    """When each run of a result that reached the target began, and how long it took."""
    runs = study.converged_of(group)
    known = runs[runs["run_s"].notna() & (runs["run_s"] > 0)]
    begins = known["run_start_ms"].fillna(0.0) / 1e3
    return tuple((float(at), float(time)) for at, time in zip(begins, known["run_s"], strict=True) if time < math.inf)
