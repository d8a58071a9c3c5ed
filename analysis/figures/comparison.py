"""Figure: every result against the fastest of its task, as a ratio of times with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import BLUE, GREY, Chart, draw_intervals, draw_panels
from mlhpc.analysis.drawing.view import (
    CHOOSE_SYSTEMS,
    Answer,
    Question,
    View,
    join_statements,
    list_timed_runs,
    render_counts,
    render_label,
)
from mlhpc.analysis.study import NotAnswerableError, Study, build_once
from mlhpc.suite.compliance.verdict import list_assumptions
from mlhpc.suite.statistics import CONFIDENCE, Outcome
from mlhpc.suite.statistics.comparison import Comparison, compare_times, holm
from mlhpc.suite.statistics.sessions import TimedRun

TITLE = "Is the difference real?"
MOST_ON_TOP = 20  # comparisons that the figure on top of the page shows
QUESTION = Question(
    CHOOSE_SYSTEMS,
    "Is the difference between two systems real?",
    ("run_s",),
    needs="a second result of the same benchmark and size",
    decision="the 95 % interval of the ratio of geometric means excludes 1, and so does Holm's adjusted p < 0.05",
)
CAPTION = (
    "Ratio of geometric mean times to that of the fastest result of the panel, with 95 % Welch interval on log time, "
    "over all runs that reached the target. A panel has results that may be ranked against each other: of one "
    "division, and of rounds whose data are the same and whose times include the same. Grey: inconclusive, because "
    "the interval holds 1, Holm's p over all comparisons of the panel is above 0.05, or the permutation test "
    "disagrees where it can: p (permutation) of few sessions cannot be below 0.05. The table has these values, the "
    "smallest ratio that so many runs would find with 80 % power, and the ratio of scores, which drop the fastest "
    "and the slowest run. Where a result has several sessions, these and not runs are what is compared; the interval "
    "is at least that of the runs. Results of two machines are of two sessions: what else differed between them "
    "counts as difference. What a sure difference rests on stands in assumes. In doubts A is the fastest result, B "
    "the other."
)


@build_once
def build_table(study: Study) -> pd.DataFrame:
    """Build the ratio, interval and p values of every comparison."""
    lines = []
    for title, short, rows in study.tasks():
        known = rows[(rows["mode"] == "strong") & rows["run_s.mean"].notna()]
        # By the mean of the runs and not by score, because a result with too few runs has no score
        known = known[~known["group"].isin(_copies(study, known))].sort_values(["run_s.mean", "label"])
        if len(known) < 2:
            continue
        best = known.iloc[0]
        part = []
        for row in known.drop(best.name).to_dict("records"):
            comparison = compare_results(study, best, row)
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
                needed = comparison.needed if comparison.outcome == Outcome.INCONCLUSIVE else None
                tail = {
                    "detectable": comparison.detectable,
                    "ratio of scores": row["score_s"] / best["score_s"],
                    "ratio with staging": row["score_with_staging_s"] / best["score_with_staging_s"],
                    "assumes": _list_assumptions(study, best, row, comparison),
                    "to tell": needed.render(comparison.unit) if needed else None,
                }
                part.append(head | vars(comparison) | tail)
        # Of one panel at a time: its comparisons are one family of tests
        # All pairs count: the fastest is chosen by the times that it is then compared by
        pairs_each = len(known) / 2
        for line, adjusted in zip(part, holm([min(1.0, pairs_each * line["p"]) for line in part]), strict=True):
            # The interval is not adjusted for the number of comparisons: Holm's p must agree with it
            real = adjusted < 1 - CONFIDENCE and line["outcome"] == Outcome.SLOWER
            line["doubts"] = "; ".join(line["doubts"])
            line["assumes"] = "; ".join(line["assumes"]) if real else None
            lines.append(
                line | {"p_holm": adjusted, "verdict": (Outcome.SLOWER if real else Outcome.INCONCLUSIVE).value}
            )
    if not lines:
        raise NotAnswerableError("two time-to-train results of one benchmark and size with at least two runs each")
    return pd.DataFrame(lines).rename(
        columns={
            "n_b": "n", "n_a": "n of the other", "ratio": "ratio of times", "low": "95 % from", "high": "95 % to",
            "p": "p (Welch)", "p_permutation": "p (permutation)", "p_holm": "p (Holm)",
            "detectable": "smallest detectable ratio", "sessions_b": "sessions",
            "sessions_a": "sessions of the other",
        }
    ).drop(columns=["outcome", "needed", "by_session", "error", "counts", "bound", "confidence",
                     "margin"], errors="ignore")  # fmt: skip


def _copies(study: Study, known: pd.DataFrame) -> set[str]:
    """Find results all of whose runs are those of another one of the panel: nothing differs from itself."""
    groups = study.runs.set_index("run")["group"]
    again = study.runs["repeats"].map(groups).isin(known["group"]).groupby(study.runs["group"]).all()
    return set(again[again].index)


def render_answer(study: Study) -> Answer:
    """Name the closest follower of each task."""
    sentences = []
    for _, rows in build_table(study).groupby("class", sort=True):
        first = rows.iloc[0]
        interval = f"{first['ratio of times']:.3g} [{first['95 % from']:.3g}, {first['95 % to']:.3g}]"
        by_score = "" if pd.isna(first["ratio of scores"]) else f", {first['ratio of scores']:.3g} by score"
        if first["verdict"] == Outcome.SLOWER:
            what = f"is {interval} times the time of {first['against']}"
        else:
            what = f"is inconclusive against {first['against']}: {interval} times its time"
        counts = f" ({render_counts(first)}{by_score})"
        sentences.append(Answer(f"{first['task']}: {first['label']} {what}{counts}", [rows.index[0]]))
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


def compare_results(
    study: Study, a: Mapping[str, Any] | pd.Series, b: Mapping[str, Any] | pd.Series
) -> Comparison | None:
    """Compare the times of result ``b`` with those of ``a``, two rows of results; None if runs are too few."""
    runs_a, runs_b = (list_timed_runs(study, row["group"]) for row in (a, b))
    return _compare_runs(runs_a, runs_b, same_machine=a["machine"] == b["machine"])


def _list_assumptions(study: Study, a: pd.Series, b: Mapping[str, Any], comparison: Comparison) -> list[str]:
    runs = (list_timed_runs(study, row["group"]) for row in (a, b))
    return list_assumptions(comparison, *runs, same_machine=a["machine"] == b["machine"])


@lru_cache(maxsize=1024)
def _compare_runs(a: tuple[TimedRun, ...], b: tuple[TimedRun, ...], *, same_machine: bool) -> Comparison | None:
    """Compare the times of two results, once for table, answer and figure."""
    return compare_times(a, b, same_machine=same_machine)


def _has_more_than_the_first(table: pd.DataFrame) -> bool:
    """Return True if there are results that the figure on top of the page leaves out."""
    return len(table) > MOST_ON_TOP


VIEWS = (
    View("comparison", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart, _has_more_than_the_first),
)
