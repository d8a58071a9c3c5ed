"""Figure: contests of configurations by whole runs (`mlhpc ab runs`): who wins, and how far the others are. Computes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    Chart,
    compute_chart_height,
    draw_panels,
    encode_column,
    layer_charts,
    make_names_axis,
    make_number_channel,
    make_span_channels,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.plugins.tune.ranking import KIND, Ranking
from mlhpc.suite.statistics import Outcome

TITLE = "Contests of configurations"
NEEDS = "the ranking of a contest by mlhpc ab runs show -o"
RATIO, ENDS = "time / leader's", ("95 % from", "95 % to")
LONGEST_FINDING = 300  # characters
COLOURS = {Outcome.FASTER: GREEN, Outcome.SLOWER: BLUE, Outcome.INCONCLUSIVE: GREY}


def build_contests_table(study: Study) -> pd.DataFrame:
    """Build a row per entry of each contest, the leader first."""
    rows = [row for title, ranking in _list_contests(study) for row in _list_entries(title, ranking)]
    if not rows:
        raise NotAnswerableError("a contest with entries")
    return pd.DataFrame(rows)


def _list_entries(title: str, ranking: Ranking) -> Iterator[dict[str, Any]]:
    for place, each in enumerate(ranking.entries):
        ratio = each.ratio_to_leader
        # Only the leader, who is first, has no ratio to itself
        known = (1.0, None, None) if place == 0 else (ratio.value, ratio.low, ratio.high) if ratio else (None,) * 3
        yield {
            "contest": title,
            "label": each.entry,
            "verdict": each.verdict.value,
            "dropped after block": each.dropped_after_block,
            "p of the drop": each.dropped_p,
            "runs": each.runs,
            "finished runs": each.finished,
            "objective": ranking.objective,
            "mean": each.mean,
            "spread, factor": each.spread_factor,
            "score: fastest and slowest dropped": each.score,
            **dict(zip((RATIO, *ENDS), known, strict=True)),
        }


def render_contests_answer(study: Study) -> str:
    """State the verdict of each contest, what it rests on, and why it must not be trusted."""
    return join_statements([_render_verdict(title, ranking) for title, ranking in _list_contests(study)])


def _render_verdict(title: str, ranking: Ranking) -> str:
    counted = f"{ranking.runs} runs, {ranking.blocks} complete blocks; error at most {100 * ranking.error:g} %"
    findings = [str(each)[:LONGEST_FINDING] for each in ranking.findings]
    parts = [f"{title}: {ranking.verdict}", counted, ranking.by_score, join_statements(findings)]
    return "; ".join(part for part in parts if part)


def draw_contests_chart(table: pd.DataFrame) -> Chart:
    """Draw the ratio of each entry's time to the leader's, with its interval where it has two ends."""
    kinds = [outcome.value for outcome in COLOURS]
    colours = alt.Scale(domain=kinds, range=list(COLOURS.values()))
    low, high = ENDS

    def draw(rows: pd.DataFrame) -> Chart:
        colour = alt.Color(field=encode_column("verdict"), type="nominal", scale=colours)
        base = alt.Chart(rows).encode(y=make_names_axis(rows), color=colour)
        bounded = base.transform_filter(f"datum['{low}'] > 0 && isValid(datum['{high}'])")
        rules = bounded.mark_rule(strokeWidth=2.5).encode(**make_span_channels("x", low, high, RATIO))
        placed = base.transform_filter(f'datum["{RATIO}"] > 0')  # 0: the leader did not finish where this one did
        points = placed.mark_point(size=80, filled=True).encode(x=make_number_channel(alt.X, RATIO, log=True))
        leader = alt.Chart().mark_rule(strokeDash=[3, 3]).encode(x=alt.datum(1.0))
        return layer_charts(leader, rules, points, height=compute_chart_height(len(rows)))

    return draw_panels(table, ["contest"], draw)


def _list_contests(study: Study) -> list[tuple[str, Ranking]]:
    """List the contests with their titles, which all differ."""
    rankings = cast(tuple[Ranking, ...], study.documents_of(KIND, f"{NEEDS} among the report's paths"))
    seen: Counter[str] = Counter()
    found = []
    for ranking in rankings:
        stated = ranking.settings
        title = f"{ranking.name}, {stated.get('workload')} {stated.get('size')} on {stated.get('system')}"
        seen[title] += 1
        found.append((title if seen[title] == 1 else f"{title} ({seen[title]})", ranking))
    return found


VIEWS = (
    View(
        "contests", TITLE,
        Question(
            UNDERSTAND_TIME, "Which of several configurations is the fastest, by whole runs?", (RATIO,), needs=NEEDS,
            decision="the verdict of the contest: an entry is dropped when it is not the best, at the stated error",
        ),
        "Entries with equal budgets, run in paired blocks; every run that was started counts. A point is the median "
        "ratio of an entry's time to the leader's, with its 95 % interval where it has two ends. Intervals hold "
        "however long one looks.",
        build_contests_table, render_contests_answer, draw_contests_chart,
    ),
)  # fmt: skip
