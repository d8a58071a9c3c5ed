"""Figure: own results and the published systems in one chart, marked where the problem size differs."""

from __future__ import annotations

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import Chart, draw_panels, draw_points, make_minutes_channel, make_number_channel
from mlhpc.analysis.drawing.view import (
    CHOOSE_SYSTEMS,
    Answer,
    Question,
    View,
    join_statements,
    rankable,
    render_seconds,
)
from mlhpc.analysis.published.scores import describe_missing_results, read_scores
from mlhpc.analysis.study import NotAnswerableError, Study

TITLE = "Beside the published systems"
QUESTION = Question(
    CHOOSE_SYSTEMS,
    "Where do our results stand beside the published systems?",
    ("score_s", "units"),
)
CAPTION = (
    "Own results and every published time to train of the benchmark in the table that ships with the suite, "
    "recomputed from the public logs. Another size than the published one is another problem, whose time compares with "
    "no published one: such a result is in the table only. Own results are not verified by MLCommons."
)
# The answer names these machines, which most readers know; the table has all
NAMED_MACHINES = ("Fugaku", "Perlmutter", "Selene", "Eos")


def build_table(study: Study) -> pd.DataFrame:
    """Build the table of own and published results of the benchmarks that both have."""
    own = _own(study)
    known = _select_published(study)
    columns = {
        "benchmark": "benchmark", "size": "size", "round": "round", "division": "division", "device": "device",
        "units": "compute units", "train_samples": "training samples", "global_batch_size": "global batch",
        "epochs": "epochs to target", "run_min": "time to train [min]", "train_rate": "train [samples/s]",
        "unit_hours": "unit hours",
    }  # fmt: skip
    ours = own.assign(
        who=own["label"], whose="own, unverified", epochs=own["epochs_to_target.mean"],
        # Without a score the mean of the runs, so that a few runs can be placed too
        run_min=own["score_s"].fillna(own["run_s.mean"]) / 60, train_rate=own["train_rate.mean"],
    )  # fmt: skip
    theirs = known.assign(who=known["machine"], whose="published", run_min=known["score_s"].astype(float) / 60)
    both = pd.concat([frame[["who", "whose", *columns]].astype(object) for frame in (ours, theirs)])
    order = both.assign(rank=both["whose"] == "published").sort_values(["benchmark", "rank", "run_min", "who"])
    return order[["who", "whose", *columns]].rename(columns=columns | {"who": "system"}).reset_index(drop=True)


def render_answer(study: Study) -> Answer:
    """Name own results of each size and the fastest of the best-known machines; say if the problems differ."""
    frame = build_table(study)
    sentences = []
    for (benchmark, size), mine in frame[frame["whose"] != "published"].groupby(["benchmark", "size"], sort=True):
        own = mine.iloc[0]  # rows are sorted by time
        known = frame[(frame["benchmark"] == benchmark) & (frame["whose"] == "published")]
        stars = known[known["system"].isin(NAMED_MACHINES)].drop_duplicates("system")
        others = ", ".join(
            f"{r['system']} {render_seconds(60 * r['time to train [min]'])} ({r['round']})"
            for r in stars.to_dict("records")
        )
        ours = f"{own['system']} {render_seconds(60 * own['time to train [min]'])}"
        said = f"{benchmark}: {ours}; {others}"
        if size != "full":
            said = (
                f"{benchmark}: size {size} is a different problem, so {ours} compares only with other results "
                f"of that size; published times of the full size are {others}"
            )
        sentences.append(Answer(said, [own.name, *stars.index]))
    return join_statements(sentences).add(describe_missing_results(study.results["group"]))


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw time over machine size, a panel per benchmark and size."""
    published = table.loc[table["whose"] == "published", "size"].unique()
    shown = table[table["size"].isin(published)].assign(_sign=table["whose"])

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_number_channel(
            alt.X, "compute units", "compute units (accelerators, or processors where there are none)", log=True
        )
        y = make_minutes_channel(alt.Y, "time to train [min]", "time to train")
        return draw_points(rows, x, y, shown["_sign"], names="system")

    return draw_panels(shown, ["benchmark", "size"], draw, zoom=True)


def _own(study: Study) -> pd.DataFrame:
    own = rankable(study.distinct)
    own = own[~own["published"] & (own["mode"] == "strong") & (own["units"] > 0) & (own["run_s.mean"] > 0)]
    own = own[own["benchmark"].isin(read_scores()["benchmark"])]
    if own.empty:
        raise NotAnswerableError("an own time-to-train result of a benchmark that MLPerf HPC has, with known units")
    return own


def _select_published(study: Study) -> pd.DataFrame:
    known = read_scores()
    known = known[(known["mode"] == "strong") & known["score_s"].notna() & known["units"].notna()]
    # A carry-over would show one run of a machine twice
    known = known[known["carried_over_from"].isna()]
    return known[known["benchmark"].isin(_own(study)["benchmark"])]


def _has_published_size(table: pd.DataFrame) -> bool:
    """Return True if an own result is of the published size: another one compares with no published time."""
    own = table[table["whose"] != "published"]
    return bool(own["size"].isin(table.loc[table["whose"] == "published", "size"]).any())


VIEWS = (
    View("beside_published", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart, _has_published_size),
)
