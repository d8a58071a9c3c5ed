"""Figure: every result against the fastest of its task, as a ratio of times with its interval."""

from __future__ import annotations

import math
from functools import lru_cache

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import BLUE, GREY, Chart, draw_intervals, draw_panels
from mlhpc.analysis.drawing.view import CHOOSE_SYSTEMS, Question, View, join_statements, render_label
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.comparison import (
    CONFIDENCE,
    Comparison,
    TimedRun,
    compare_times,
    estimate_runs_needed,
    holm,
)

TITLE = "Is the difference real?"
QUESTION = Question(
    CHOOSE_SYSTEMS,
    "Is the difference between two systems real?",
    ("run_s",),
    needs="a second result of the same benchmark and size",
    decision="the 95 % interval of the ratio of geometric means excludes 1, and so does Holm's adjusted p < 0.05",
)
CAPTION = (
    "Ratio of geometric mean times to that of the fastest result of the panel, with 95 % Welch interval on log "
    "time, over all runs that reached the target. A panel has results that may be ranked against each other: of "
    "one division, and of rounds whose data are the same and whose times include the same. Grey: inconclusive, "
    "because the interval holds 1, Holm's p over all comparisons of the panel is above 0.05, the permutation "
    "test disagrees, or the times drift from run to run. The table has these values, the smallest ratio that so "
    "many runs would find with 80 % power, and the ratio of scores, which drop the fastest and the slowest run. "
    "Results of two machines are of two sessions: what else differed between them counts as difference."
)


def build_table(study: Study) -> pd.DataFrame:
    """Build the ratio, interval and p values of every comparison."""
    lines = []
    for title, short, rows in study.tasks():
        known = rows[(rows["mode"] == "strong") & rows["run_s.mean"].notna() & ~rows["group"].isin(_copies(study))]
        if len(known) < 2:
            continue
        # By the mean of the runs and not by score, because a result with too few runs has no score
        best = known.loc[known["run_s.mean"].idxmin()]
        base = _runs(study, best["group"])
        part = []
        for row in known.drop(best.name).sort_values("run_s.mean").to_dict("records"):
            comparison = _compare_runs(base, _runs(study, row["group"]))
            if comparison is not None:
                head = {
                    "class": title,
                    "task": short,
                    "benchmark": row["benchmark"],
                    "size": row["size"],
                    "label": row["label"],
                    "against": best["label"],
                    "division": row["division"],
                }
                enough = estimate_runs_needed(comparison) if comparison.outcome == Outcome.INCONCLUSIVE else None
                tail = {"ratio of scores": row["score_s"] / best["score_s"], "runs to tell": enough}
                part.append(head | vars(comparison) | tail)
        # Of one panel at a time: its comparisons are one family of tests
        for line, adjusted in zip(part, holm([line["p"] for line in part]), strict=True):
            # The interval is not adjusted for the number of comparisons: Holm's p must agree with it
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
    """Find results all of whose runs are those of another result: nothing differs between a result and itself."""
    again = study.runs["repeats"].notna().groupby(study.runs["group"]).all()
    return set(again[again].index)


def render_answer(study: Study) -> str:
    """Name the closest follower of each task."""
    sentences = []
    for _, rows in build_table(study).groupby("class", sort=True):
        first = rows.iloc[0]
        if first["verdict"] == Outcome.SLOWER:
            what = f"{first['ratio of times']:.3g} [{first['95 % from']:.3g}, {first['95 % to']:.3g}] times the time of"
            by_score = "" if pd.isna(first["ratio of scores"]) else f" ({first['ratio of scores']:.3g} by score)"
        else:
            what, by_score = "inconclusive against", ""
        sentences.append(f"{first['task']}: {first['label']} is {what} {first['against']}{by_score}")
    return join_statements(sentences)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a ratio with its interval for each result, and a line at 1."""
    colours = alt.Scale(domain=[Outcome.SLOWER.value, Outcome.INCONCLUSIVE.value], range=[BLUE, GREY])

    def draw(rows: pd.DataFrame) -> Chart:
        against = f"time ÷ time of {render_label(rows['against'].iloc[0], 40)}"
        return draw_intervals(
            rows, "ratio of times", ("95 % from", "95 % to"), against, "verdict", colours, at=1.0, log=True
        )

    return draw_panels(table, ["class"], draw)


def compare_results(study: Study, a: str, b: str) -> Comparison | None:
    """Compare the times of result ``b`` with those of ``a``, given their groups; None if runs are too few."""
    return _compare_runs(_runs(study, a), _runs(study, b))


@lru_cache(maxsize=1024)
def _compare_runs(a: tuple[TimedRun, ...], b: tuple[TimedRun, ...]) -> Comparison | None:
    """Compare the times of two results, once for table, answer and figure."""
    return compare_times(a, b)


def _runs(study: Study, group: str) -> tuple[TimedRun, ...]:
    """List (start, time) in seconds of each run of a result that reached the target."""
    runs = study.converged_of(group)
    known = runs[runs["run_s"].notna() & (runs["run_s"] > 0)]
    # The starts order the runs, to find a drift
    begins = known["run_start_ms"].fillna(0.0) / 1e3
    return tuple((float(at), float(time)) for at, time in zip(begins, known["run_s"], strict=True) if time < math.inf)


VIEWS = (View("comparison", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart),)
