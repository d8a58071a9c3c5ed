"""Figure: how runs learn: the metric over epochs, the epochs to the target, and what a larger batch costs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    VERMILION,
    Chart,
    compute_chart_height,
    draw_panels,
    draw_points,
    draw_result_panels,
    layer_charts,
    make_names_axis,
    make_number_channel,
    make_span_channels,
)
from mlhpc.analysis.drawing.view import (
    UNDERSTAND_CONVERGENCE,
    Answer,
    Question,
    View,
    has_several_rows,
    join_statements,
    render_count,
    render_label,
    varies,
)
from mlhpc.analysis.results.names import PROBLEM_COLUMNS, build_result_table, render_short_heading
from mlhpc.analysis.results.selection import compute_reference_limit
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.analysis.tables.ingest import parse_mapping
from mlhpc.analysis.tables.run_row import LARGEST_PLAUSIBLE
from mlhpc.suite.log.score import find_round_group

TITLE = "Convergence"
MOST_NAMED = 6  # results that the answer names
MOST_PROBLEMS = 4  # of which it gives the epochs by batch
MOST_CURVES, MOST_RUNS = 6, 10  # results with curves, and runs of each
SAMPLED = "ranked, of several courses"
BATCH_GROUP = (*PROBLEM_COLUMNS, "division", "rounds", "training samples")  # where epochs mean the same
NOT_BATCH = 1.1  # times as many epochs at a smaller or equal batch: more than the batch explains
MANY_RESULTS = 12  # results, of which only one's own have curves: those of four public rounds would be 2 MB of a page

Row = Mapping[Hashable, Any]


def build_epochs_table(study: Study) -> pd.DataFrame:
    """Build epochs to target and the metric reached, by result."""
    frame = study.distinct[study.distinct["group"].isin(_curves(study)["group"].unique())]
    if frame.empty:
        raise NotAnswerableError("no log has an evaluation with a metric value and an epoch number")
    return build_result_table(
        frame,
        ("mode", "label"),
        {
            "runs started": frame["n_started"],
            "runs that reached the target": frame["n_reached"],
            "n averaged": frame["n_averaged"],
            "different courses": [study.count_courses(group)[0] for group in frame["group"]],
            "epochs to target, mean": frame["epochs_to_target.mean"],
            "epochs to target, std": frame["epochs_to_target.std"],
            **_references(frame),
            "target": frame["target"],
            "metric at target, mean": frame["reached_value.mean"],
        },
    )


def render_epochs_answer(study: Study) -> Answer:
    """Count the results that need no more epochs than the rules expect of the reference, and name the first ones."""
    rows = build_epochs_table(study)
    bounds = rows[rows["reference mean [epochs]"].notna() & rows["epochs to target, mean"].notna()]
    mean, reference = bounds["epochs to target, mean"], bounds["reference mean [epochs]"]
    # The rules limit the mean from below only; the band is as wide above the reference
    within = int((mean <= 2 * reference - bounds["least allowed mean [epochs]"]).sum())
    sentences = []
    if len(bounds) and len(rows) > 1:
        band = "the upper end of the reference's band, which no rule sets"
        text = f"{within} of {len(bounds)} results take no more epochs than {band}"
        sentences.append(Answer(text))
    for at, row in rows.head(MOST_NAMED).iterrows():
        if pd.notna(row["epochs to target, mean"]):
            bound = row["reference mean [epochs]"]
            against = f", reference {bound:.3g}" if pd.notna(bound) else ""
            problem = render_short_heading(row["benchmark"], row["size"], row["mode"])
            runs = f"n = {row['n averaged']}"
            if row["different courses"] < row["n averaged"]:  # equal ones are repetitions of one sample
                runs += f", but only {render_count(row['different courses'], 'different course')} of the metric"
            epochs = f"{row['epochs to target, mean']:.3g} epochs ({runs}{against})"
            sentences.append(Answer(f"{row['label']} {problem} {epochs}", [at]))
    more = len(rows) - MOST_NAMED
    answer = join_statements(sentences, MOST_NAMED + 1)
    return answer.add(f"; {more} more in the figure" if more > 0 and sentences else "")


def draw_epochs_chart(table: pd.DataFrame) -> Chart:
    """Draw mean epochs with standard deviation for each result, and the band of the reference."""
    mean, spread = table["epochs to target, mean"], table["epochs to target, std"].astype(float).fillna(0.0)
    reference, least = (
        table[name].astype(float) for name in ("reference mean [epochs]", "least allowed mean [epochs]")
    )
    shown = table.assign(_low=mean - spread, _high=mean + spread, _most=2 * reference - least)[mean.notna()]

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows.sort_values("epochs to target, mean")
        base = alt.Chart(rows).encode(y=make_names_axis(rows))
        x = make_number_channel(alt.X, "epochs to target, mean", "epochs to target", zero=True)
        ends = make_span_channels("x", "least allowed mean [epochs]", "_most", "epochs to target")
        band = base.mark_bar(color=GREEN, opacity=0.25, height={"band": 0.8}).encode(**ends)
        middle = base.mark_tick(color=GREEN, thickness=2).encode(x="reference mean \\[epochs\\]:Q")
        rule = base.mark_rule(color=BLUE, strokeWidth=2).encode(x="_low:Q", x2="_high:Q")
        point = base.mark_point(color=BLUE, filled=True, size=80, opacity=1).encode(x=x)
        return layer_charts(band, middle, rule, point, height=compute_chart_height(len(rows)))

    return draw_result_panels(shown, draw, columns=1)


def build_curves_table(study: Study) -> pd.DataFrame:
    """Build the metric at every evaluation up to run_stop: first runs of the first results, own ones first."""
    curves = _curves(study)
    known = study.distinct[study.distinct["group"].isin(curves["group"].unique())]
    if known.empty:
        raise NotAnswerableError("no log has an evaluation with a metric value and an epoch number")
    if len(known) > MANY_RESULTS:
        known = known[~known["published"]]
    if known.empty:
        raise NotAnswerableError(f"a result of yours, or at most {MANY_RESULTS} published ones")
    chosen = known.sort_values("published", kind="stable").head(MOST_CURVES)
    parts = []
    for row in chosen.to_dict("records"):
        own = curves[curves["group"] == row["group"]]
        # The first runs and not the best: the curves must not look better than the result
        own = own[own["run"].isin(own["run"].unique()[:MOST_RUNS])]
        head = {name: row[name] for name in ("benchmark", "size", "label")}
        baselines = ", ".join(f"{name} {value:.4g}" for name, value in _baselines(row["baselines"]).items())
        columns = {"run": own["run"], "epochs": own["epochs"], "metric": own["value"], "target": own["target"]}
        parts.append(pd.DataFrame(columns).assign(**head, baselines=baselines, metric_is=row["metric_name"]))
    frame = pd.concat(parts).rename(columns={"metric_is": "metric is"})
    order = ["benchmark", "size", "label", "run", "epochs", "metric", "metric is", "target", "baselines"]
    return frame[order].reset_index(drop=True)


def render_curves_answer(study: Study) -> str:
    """Count the shown runs that reached the target."""
    frame = build_curves_table(study)
    runs = frame[["label", "benchmark", "run"]].drop_duplicates()
    reached = study.runs.set_index("run")["converged"]
    count = int(sum(bool(reached.get(run, False)) for run in runs["run"]))
    return f"{count} of the {len(runs)} runs shown reached the target"


def draw_curves_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per result, a line per run, the target dashed."""

    def draw(rows: pd.DataFrame) -> Chart:
        title = str(rows["metric is"].iloc[0] or "metric")
        base = alt.Chart(rows).encode(x=make_number_channel(alt.X, "epochs", "epochs trained"))
        y = make_number_channel(alt.Y, "metric", render_label(title, 40))
        line = base.mark_line(color=BLUE, opacity=0.6, point={"size": 18, "color": BLUE}).encode(y=y, detail="run:N")
        target = alt.Chart(rows.head(1)).mark_rule(strokeDash=[5, 3], color=VERMILION).encode(y="target:Q")
        return layer_charts(line, target, height=220)

    return draw_panels(table, ["benchmark", "size", "label"], draw, zoom=True)


def build_batch_table(study: Study) -> pd.DataFrame:
    """Build batch, epochs and reference by result."""
    frame = _with_batch(study)
    return build_result_table(
        frame,
        ("label", "mode", "submitter", "division"),
        {
            "rounds": frame["round"].map(find_round_group),
            "training samples": frame["train_samples"],
            "global batch": frame["global_batch_size"],
            "epochs to target, mean": frame["epochs_to_target.mean"],
            "epochs to target, std": frame["epochs_to_target.std"],
            "n": frame["n_averaged"],
            SAMPLED: frame["group"].isin(study.sampled["group"]),
            **_references(frame),
        },
    )


def render_batch_answer(study: Study) -> Answer:
    """Give the epochs at both ends of the batches of each problem, where the data and the rules are the same.

    Results that are not ranked or repeat one course say little of how epochs vary: the answer is without them.
    """
    sentences, alone = [], []
    table = build_batch_table(study)
    table = table[table[SAMPLED]] if table[SAMPLED].any() else table
    for (benchmark, size, division, rounds, samples), rows in table.groupby(list(BATCH_GROUP), sort=True, dropna=False):
        title = f"{render_short_heading(benchmark, size, '')} · {division} · {rounds} · {samples:,.0f} samples"
        ends = [rows[rows["global batch"] == end] for end in (rows["global batch"].min(), rows["global batch"].max())]
        if ends[0].index.equals(ends[1].index):
            alone.append(Answer(f"{title}: one batch size only, {ends[0]['global batch'].iloc[0]:g}", rows.index))
            continue
        said = f"{title}: batch {', '.join(_describe_batch(end) for end in ends)}{_describe_others(rows)}"
        sentences.append(Answer(said, rows.index))
    return join_statements(sentences or alone, MOST_PROBLEMS)


def _describe_batch(rows: pd.DataFrame) -> str:
    """Describe the epochs that the results of one batch size take, and the reference's."""
    means, reference = rows["epochs to target, mean"], rows["reference mean [epochs]"].dropna()
    ends = " to ".join(dict.fromkeys(f"{end:.3g}" for end in (means.min(), means.max())))
    beside = f", reference {reference.iloc[0]:.3g}" if len(reference) else ""
    return f"{rows['global batch'].iloc[0]:g}: {ends} epochs ({render_count(len(rows), 'result')}{beside})"


def _describe_others(rows: pd.DataFrame) -> str:
    """Name two results if the one with the larger or equal batch takes far fewer epochs."""
    known = rows.sort_values(["global batch", "epochs to target, mean"], ascending=[True, False])
    most = known["epochs to target, mean"].cummax()  # of smaller and equal batches
    excess = most / known["epochs to target, mean"]
    if not excess.max() > NOT_BATCH:
        return ""
    few = known.loc[excess.idxmax()]
    many = known[known["epochs to target, mean"] == most[few.name]].iloc[0]
    who = "submitters differ" if few["submitter"] != many["submitter"] else "results differ"
    each = [f"{row['epochs to target, mean']:.3g} at {row['global batch']:g} ({row['label']})" for row in (few, many)]
    return f", but {each[0]} and {each[1]}: {who}, not only batches"


def draw_batch_chart(table: pd.DataFrame) -> Chart:
    """Draw mean epochs with standard deviation over the batch, and the reference's mean at the same batch."""
    mean, spread = table["epochs to target, mean"], table["epochs to target, std"].astype(float).fillna(0.0)
    shown = table.assign(_low=mean - spread, _high=mean + spread, _sign=table["division"])

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_number_channel(alt.X, "global batch", "global batch size [samples]", log=True)
        y = make_number_channel(alt.Y, "epochs to target, mean", "epochs to target", log=True)
        line = alt.Chart(rows).transform_filter("isValid(datum['reference mean [epochs]'])")
        reference = line.mark_line(color=GREEN, strokeDash=[5, 3], point={"color": GREEN}).encode(
            x=x, y=make_number_channel(alt.Y, "reference mean [epochs]", "epochs to target", log=True)
        )
        means = draw_points(rows, x, y, table["division"], y_ends=("_low", "_high"), names="label")
        return layer_charts(reference, means, height=260)

    return draw_result_panels(shown, draw, zoom=True)


def _references(frame: pd.DataFrame) -> dict[str, list[float | None]]:
    """Compute the reference's epochs at the batch size of each result: mean, and least mean that the rules allow."""
    names = ["benchmark", "size", "round", "train_samples", "global_batch_size", "required_runs"]
    limits = [compute_reference_limit(*row) for row in frame[names].itertuples(index=False, name=None)]
    return {
        "reference mean [epochs]": [limit.mean if limit else None for limit in limits],
        "least allowed mean [epochs]": [limit.minimum if limit else None for limit in limits],
    }


def _baselines(text: object) -> dict[str, float]:
    return {name: value for name, value in parse_mapping(text).items() if abs(value) < LARGEST_PLAUSIBLE}


def _curves(study: Study) -> pd.DataFrame:
    evals = study.tables.evals
    evals = evals[~evals["after_run_stop"].astype(bool)].dropna(subset=["epochs", "value"])
    # One impossible value would make the scale useless
    evals = evals[(evals["value"].abs() < LARGEST_PLAUSIBLE) & evals["epochs"].between(0, LARGEST_PLAUSIBLE)]
    columns = ["run", "group", "benchmark", "size", "target", "baselines"]
    return evals.merge(study.runs[columns], on="run")


def _with_batch(study: Study) -> pd.DataFrame:
    frame = study.distinct
    frame = frame[
        frame["global_batch_size"].notna() & (frame["epochs_to_target.mean"] > 0) & (frame["global_batch_size"] > 0)
    ]
    if frame.empty:
        raise NotAnswerableError("a result with a batch size whose runs reached the target")
    return frame


VIEWS = (
    View(
        "convergence", "Epochs to the target",
        Question(
            UNDERSTAND_CONVERGENCE,
            "How many epochs does the target take, and how do runs compare with the reference?",
            ("epochs_to_target.mean", "epochs_to_target.std", "target"),
        ),
        "A row per result: mean epochs to the first evaluation that meets the target, with one standard deviation over "
        "the runs. Green: mean epochs of the reference at this batch size. Its band begins at the least mean that the "
        "rules allow, and ends as far above the reference. Runs with one metric at every evaluation are one course: they "
        "repeat a sample, and their spread is not that of seeds.",
        build_epochs_table, render_epochs_answer, draw_epochs_chart, has_several_rows,
    ),
    View(
        "learning_curves", "Learning curves",
        Question(
            UNDERSTAND_CONVERGENCE,
            "How does the metric fall over the epochs, run by run?",
            ("metric", "epochs", "target"),
            needs="a result of yours",
        ),
        "The metric at every evaluation up to run_stop, a line per run; the dashed line is the target. The first "
        f"{MOST_CURVES} results, own ones first, and the first {MOST_RUNS} runs of each; tables/evals has all. What "
        "trivial and analytic predictors reach stands in the table.",
        build_curves_table, render_curves_answer, draw_curves_chart,
    ),
    View(
        "epochs_and_batch", "Epochs and batch size",
        Question(
            UNDERSTAND_CONVERGENCE,
            "How many more epochs does a larger batch need?",
            ("global_batch_size", "epochs_to_target.mean"),
            needs="a second batch size",
        ),
        "Mean epochs to target with standard deviation; the open division may change the algorithm. The dashed "
        "line joins the reference's convergence points at the same batch sizes. The answer is of results that may be "
        "ranked and whose runs do not all repeat one course.",
        build_batch_table, render_batch_answer, draw_batch_chart, partial(varies, column="global batch", by=BATCH_GROUP),
    ),
)  # fmt: skip
