"""Figure: the best published time of each round, with what changed in the rules."""

from __future__ import annotations

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import WIDTH, Chart, layer_charts, make_marker_channels, make_minutes_channel
from mlhpc.analysis.drawing.view import CHOOSE_SYSTEMS, Answer, Question, View, join_statements
from mlhpc.analysis.published.scores import ROUNDS, describe_missing_results, read_scores
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.suite.log.score import GROUP_MEANINGS, find_round_group

TITLE = "From round to round"
QUESTION = Question(
    CHOOSE_SYSTEMS,
    "How much faster did the best published result become from round to round?",
    ("score_s", "round"),
    needs="a result of the MLPerf size",
)
CAPTION = (
    "Fastest published score of the closed division by round, recomputed from the public logs, also of results that "
    "this page does not rank; carry-overs count where they were first published. Rules and data changed between "
    "rounds, so a line mixes progress of machines and codes with that."
)

CHANGES = (  # of rules and data, said below the chart
    "v1.0: CosmoFlow's data doubled and its convolutions grew (3.4 times the work per sample), OC20 and throughput "
    "new. v2.0: reference points redone. v3.0: staging may precede the run, OpenFold new."
)


def build_table(study: Study) -> pd.DataFrame:
    """Build the best result by benchmark and round, from the shipped table and the logs of this report."""
    if not (study.distinct["size"] == "full").any():
        raise NotAnswerableError("a result of the MLPerf size; sizes of our own have no rounds")
    own = study.distinct[study.distinct["published"]]
    columns = [
        "group", "round", "benchmark", "machine", "division", "mode", "units", "train_samples", "score_s",
        "carried_over_from",
    ]  # fmt: skip
    # The report may have results that were not at hand when the shipped table was made
    known = pd.concat([read_scores()[columns], own[columns].astype(object)]).drop_duplicates("group")
    # Only the closed division: open results may have another model or algorithm
    known = known[(known["mode"] == "strong") & (known["division"] == "closed") & known["score_s"].notna()]
    known = known[known["round"].isin(ROUNDS) & known["benchmark"].isin(study.distinct["benchmark"])]
    # A carry-over is no progress of the later round
    known = known[known["carried_over_from"].isna()].assign(score_s=lambda frame: frame["score_s"].astype(float))
    if known.empty:
        raise NotAnswerableError("published scores of these benchmarks")
    best = (
        known.sort_values(["score_s", "machine"])
        .groupby(["benchmark", "round"], sort=True)
        .head(1)
        .sort_values(["benchmark", "round"])
    )
    return pd.DataFrame(
        {
            "benchmark": best["benchmark"],
            "round": best["round"],
            "machine": best["machine"],
            "compute units": best["units"],
            "training samples": best["train_samples"].astype(float),
            "rules": best["round"].map(lambda name: GROUP_MEANINGS[find_round_group(name)].replace("; ", ", ")),
            "score by the rules [min]": best["score_s"] / 60,
            "faster than the first [x]": best.groupby("benchmark")["score_s"].transform("first") / best["score_s"],
        }
    ).reset_index(drop=True)


def render_answer(study: Study) -> Answer:
    """Compare the last round of each benchmark with its first, and say what else changed between them."""
    sentences = []
    for benchmark, rows in build_table(study).groupby("benchmark", sort=True):
        first, last = rows.iloc[0], rows.iloc[-1]
        if last["faster than the first [x]"] > 1:
            ends = f"from {first['round']}{_describe(first, last)} to {last['round']}{_describe(last, first)}"
            said = f"{benchmark} (closed) {last['faster than the first [x]']:.3g}× {ends}"
            sentences.append(Answer(said, [first.name, last.name]))
    return join_statements(sentences).add(describe_missing_results(study.results["group"]))


def _describe(row: pd.Series, other: pd.Series) -> str:
    """Describe data and rules of a round where they are not those of the other one."""
    samples = f"{row['training samples']:,.0f} samples" if row["training samples"] != other["training samples"] else ""
    said = ", ".join(part for part in (samples, row["rules"] if row["rules"] != other["rules"] else "") if part)
    return f" ({said})" if said else ""


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a line per benchmark, from round to round."""
    shown = table.assign(_sign=table["benchmark"])
    x = alt.X("round:N", sort=list(ROUNDS), title=None, axis=alt.Axis(labelAngle=0))
    base = alt.Chart(shown).encode(x=x, y=make_minutes_channel(alt.Y, "score by the rules [min]", "best time to train"))
    look = make_marker_channels(table["benchmark"])
    line = base.mark_line().encode(color=look["color"])
    marks = base.mark_point(size=90, filled=True).encode(**look)
    names = base.mark_text(align="left", dx=8, dy=-8).encode(text="machine:N")
    return layer_charts(line, marks, names, width=WIDTH, height=320)


VIEWS = (View("progress", TITLE, QUESTION, f"{CAPTION} {CHANGES}", build_table, render_answer, draw_chart),)
