"""Figure: where the time goes: of a run, of its start, of all attempts at it, and of one training step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    Chart,
    draw_result_panels,
    draw_stacked_bars,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Answer, Question, View, join_statements, render_seconds
from mlhpc.analysis.results.names import render_short_heading
from mlhpc.analysis.roofline.regime import count_steps
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.suite.log.goodput import PHASES

TITLE = "Where the time goes"
BEFORE, FIRST_EPOCH = "staging before the run", "first epoch's extra"
RUN_PARTS = (  # column of the results, of the table, and its colour
    ("staging_exposed_s", "staging", ORANGE),
    ("first_epoch_extra_s", FIRST_EPOCH, VERMILION),
    ("train_s", "training", BLUE),
    ("eval_s", "evaluation", GREEN),
    ("other_s", "other", GREY),
    ("staging_before_run_s", BEFORE, PURPLE),
)
START_PARTS = (("interpreter", ORANGE), ("imports", PURPLE), ("init", BLUE))
GOODPUT_PARTS = (
    ("useful", "useful", BLUE),
    ("stalled", "checkpoints", ORANGE),
    ("lost", "lost", VERMILION),
    ("starting", "starting", PURPLE),
    ("down", "down", GREY),
)
RECOVERY_PARTS = {f"recovery_{name}": f"{name.removesuffix('_s')} of a recovery [s]" for name in PHASES}
STEP_PARTS = (
    ("data_wait", "data wait", VERMILION),
    ("forward_backward", "forward + backward", BLUE),
    ("exposed_communication", "exposed communication", PURPLE),
    ("optimizer", "optimizer", GREEN),
    ("other", "other", GREY),
)
OVERLAPPED_PART = ("overlapped_communication", "overlapped communication")
LEAST_PERCENT_NAMED = 5.0  # per cent: a part that takes less of every run is not worth a sentence


def build_run_table(study: Study) -> pd.DataFrame:
    """Build mean seconds of each part by result."""
    known = study.distinct[study.distinct["run_s.mean"].notna()]
    if known.empty:
        raise NotAnswerableError("no run reached its target, so there is no time to split")
    frame = known[["benchmark", "size", "mode", "label", "n_averaged", "run_s.mean"]].rename(
        columns={"run_s.mean": "run [s]", "n_averaged": "n"}
    )
    for name, title, _ in RUN_PARTS:
        frame[f"{title} [s]"] = known[f"{name}.mean"]
    frame["all staging [epochs]"] = known["staging_in_epochs"]
    return frame.reset_index(drop=True)


def render_run_answer(study: Study) -> Answer:
    """State the share of training, and where each other part takes most. Parts of a few per cent are left out."""
    frame = build_run_table(study)
    shares = {part: 100 * frame[f"{part} [s]"] / frame["run [s]"] for _, part, _ in RUN_PARTS}
    train = shares["training"]
    several = len(frame) > 1
    whole = f"training {train.min():.0f} to {train.max():.0f} %" if several else f"training {train.max():.0f} %"
    sentences = [Answer(whole)]
    for part, share in shares.items():
        if part != "training" and share.max() >= LEAST_PERCENT_NAMED:
            row = frame.loc[share.idxmax()]
            where = (
                f" ({row['label']}, {render_short_heading(row['benchmark'], row['size'], row['mode'])})"
                if several
                else ""
            )
            of = " of the run's length" if part == BEFORE else ""
            text = f"{part} {'at most ' if several else ''}{share.max():.0f} %{of}{where}"
            sentences.append(Answer(text, [row.name]))
    return join_statements(sentences)


def draw_run_chart(table: pd.DataFrame) -> Chart:
    """Draw bars in per cent of the run, the fastest result on top."""
    parts = {f"{part} [s]": colour for _, part, colour in RUN_PARTS}
    ordered = table[table["run [s]"] > 0].sort_values("run [s]")
    shares = dict(100 * ordered[list(parts)].fillna(0.0).div(ordered["run [s]"], axis=0))
    longest = float(pd.DataFrame(shares).sum(axis=1).max())
    totals = ordered["run [s]"].map(render_seconds)
    return _bars(ordered.assign(**shares), totals, parts, "share of the run [%]", longest)


def build_start_table(study: Study) -> pd.DataFrame:
    """Build seconds by part and result, of the median and the slowest rank."""
    known = study.runs[study.runs["startup_init_median_s"].notna()]
    if known.empty:
        raise NotAnswerableError("startup events; only this suite logs them, published MLPerf HPC logs do not")
    rows = []
    for (benchmark, size, label), runs in known.groupby(["benchmark", "size", "label"], sort=True):
        line: dict[str, object] = {"benchmark": benchmark, "size": size, "label": label, "n": len(runs)}
        for part, _ in START_PARTS:
            line[f"{part} [s], median rank"] = float(pd.to_numeric(runs[f"startup_{part}_median_s"]).mean())
            line[f"{part} [s], slowest rank"] = float(pd.to_numeric(runs[f"startup_{part}_max_s"]).max())
        rows.append(line)
    return pd.DataFrame(rows)


def render_start_answer(study: Study) -> Answer:
    """State the seconds before the run of each result, median rank."""
    frame = build_start_table(study)
    total = frame[[f"{part} [s], median rank" for part, _ in START_PARTS]].sum(axis=1)
    named = frame["label"] + " (" + frame["benchmark"] + " " + frame["size"] + ")"
    return join_statements([Answer(f"{named[at]} {render_seconds(value)}", [at]) for at, value in total.items()])


def draw_start_chart(table: pd.DataFrame) -> Chart:
    """Draw bars of seconds of the median rank."""
    parts = {f"{part} [s], median rank": colour for part, colour in START_PARTS}
    return _bars(table, table[list(parts)].sum(axis=1).map(render_seconds), parts, "seconds")


def build_goodput_table(study: Study) -> pd.DataFrame:
    """Build shares of the wall time by result, mean over runs, with the least and the most useful run."""
    known = study.runs[study.runs["goodput_wall_s"].fillna(0.0) > 0.0]
    # Without interruptions and checkpoints every run is fully useful, which needs no figure
    if known.empty or not (known[["goodput_interruptions", "goodput_saves"]].fillna(0.0).to_numpy(float) > 0.0).any():
        raise NotAnswerableError(
            "a run that was interrupted or saved a checkpoint; only this suite logs what that cost"
        )
    attempts = known.assign(folder=[str(Path(file).parent) for file in known["file"]])
    # Each attempt logs the time of all attempts before it too: only the last one has the whole
    last = attempts.sort_values("goodput_wall_s").groupby(["folder", "trial"], dropna=False).tail(1)
    rows = []
    for (benchmark, size, label), runs in last.groupby(["benchmark", "size", "label"], sort=True):
        wall = runs["goodput_wall_s"].to_numpy(float)
        line: dict[str, object] = {"benchmark": benchmark, "size": size, "label": label, "n": len(runs)}
        for name, title, _ in GOODPUT_PARTS:
            line[f"{title} [%]"] = float((100 * runs[f"goodput_{name}_s"].to_numpy(float) / wall).mean())
        useful = 100 * runs["goodput_useful_s"].to_numpy(float) / wall
        interruptions = int(runs["goodput_interruptions"].sum())
        same = (known["benchmark"] == benchmark) & (known["size"] == size) & (known["label"] == label)
        again = known[same & known["recovery_reload_s"].notna()]
        line |= {title: float(pd.to_numeric(again[column]).mean()) for column, title in RECOVERY_PARTS.items()}
        line["recoveries"] = len(again)
        line |= {"least useful [%]": useful.min(), "most useful [%]": useful.max(), "interruptions": interruptions}
        rows.append(line)
    return pd.DataFrame(rows)


def render_goodput_answer(study: Study) -> Answer:
    """State the useful share of each result."""
    frame = build_goodput_table(study)
    return join_statements(
        [
            Answer(f"{row['label']} ({row['benchmark']} {row['size']}) {_useful(row)}", [at])
            for at, row in frame.iterrows()
        ]
    )


def _useful(row: pd.Series) -> str:
    count = int(row["interruptions"])
    least, most = f"{row['least useful [%]']:.3g}", f"{row['most useful [%]']:.3g}"
    spread = "" if least == most else f" ({least} to {most})"
    text = f"{row['useful [%]']:.3g} %{spread}, n = {row['n']}, {count} interruption{'s' * (count != 1)}"
    if not row["recoveries"]:
        return text
    phases = {title: row[title] for title in RECOVERY_PARTS.values() if pd.notna(row[title])}
    named = ", ".join(f"{title.partition(' ')[0]} {render_seconds(seconds)}" for title, seconds in phases.items())
    return f"{text}; a recovery took {render_seconds(sum(phases.values()))}: {named}"


def draw_goodput_chart(table: pd.DataFrame) -> Chart:
    """Draw bars of per cent of the time since the first process started."""
    parts = {f"{part} [%]": colour for _, part, colour in GOODPUT_PARTS}
    return draw_result_panels(
        table.assign(_end=[_useful(row) for _, row in table.iterrows()]),
        lambda rows: draw_stacked_bars(rows, parts, "% of the time since the first process started", text="_end"),
        columns=1,
    )


def build_step_table(study: Study) -> pd.DataFrame:
    """Build milliseconds per training step by phase and result."""
    rows = []
    steps = count_steps(study)
    for row in study.distinct.to_dict("records"):
        # The same runs that the result's means are of
        chosen = study.runs[study.runs["run"].isin(study.selections[row["group"]].averaged)]
        chosen = chosen[chosen["step_forward_backward_s"].notna() & chosen["run"].isin(steps.index)]
        if chosen.empty:
            continue
        count = chosen["run"].map(steps).to_numpy(float)
        line = {name: row[name] for name in ("benchmark", "size", "mode", "label")} | {"n": len(chosen)}
        for part, title in (*((name, title) for name, title, _ in STEP_PARTS), OVERLAPPED_PART):
            spent = pd.to_numeric(chosen[f"step_{part}_s"]).to_numpy(float)
            line[f"{title} [ms/step]"] = float(np.mean(1e3 * spent / count))
        rows.append(line)
    if not rows:
        raise NotAnswerableError("step_phases events; only this suite logs them, published MLPerf HPC logs do not")
    return pd.DataFrame(rows)


def render_step_answer(study: Study) -> Answer:
    """Name the two largest parts of a step of each result."""
    columns = [f"{title} [ms/step]" for _, title, _ in STEP_PARTS]
    frame = build_step_table(study)
    shares = 100 * frame[columns].div(frame[columns].sum(axis=1), axis=0)
    named = frame["label"] + " (" + frame["benchmark"] + " " + frame["size"] + "): "
    parts = [
        [f"{row[c]:.0f} % {c.removesuffix(' [ms/step]')}" for c in row.nlargest(2).index]
        for _, row in shares.iterrows()
    ]
    return join_statements([Answer(named[at] + ", ".join(two), [at]) for at, two in enumerate(parts)])


def draw_step_chart(table: pd.DataFrame) -> Chart:
    """Draw bars of milliseconds of a step."""
    parts = {f"{part} [ms/step]": colour for _, part, colour in STEP_PARTS}
    whole_ms = table[list(parts)].sum(axis=1)
    return _bars(table, whole_ms.map("{:.3g} ms".format), parts, "milliseconds per training step")


def _bars(
    table: pd.DataFrame, totals: pd.Series, parts: dict[str, str], unit: str, longest: float | None = None
) -> Chart:
    """Draw bars of parts for each benchmark and size, with the total time (and n) at their ends."""
    ends = [f"{total} ({f'mean of {n}' if n > 1 else '1 run'})" for total, n in zip(totals, table["n"], strict=True)]
    return draw_result_panels(
        table.assign(_end=ends),
        lambda rows: draw_stacked_bars(rows, parts, unit, text="_end", longest=longest),
        columns=1,
    )


VIEWS = (
    View(
        "time_split", "Parts of a run",
        Question(
            UNDERSTAND_TIME,
            "How is a run's time split between staging, training, evaluation and the rest?",
            ("staging_exposed_s.mean", "train_s.mean", "eval_s.mean", "other_s.mean", "staging_in_epochs"),
        ),
        "Shares of a run, mean over the scored runs (over all that reached the target where there is no score), with "
        "the time from run_start to run_stop at the right; the fastest is on top. Staging before run_start lies "
        "right of 100 % (HPC 3.0 rules do not count it). Evaluation that ran beside a later epoch costs no time "
        "here. First epoch's extra: what it trains longer than the median of later ones, if hardly any is as long; "
        "data that are read or staged beside it, a cold cache and compilers make it so. Other: in no epoch, "
        "evaluation or staging. The table has all staging in epochs of training; placeholders below one second are "
        "none.",
        build_run_table, render_run_answer, draw_run_chart,
    ),
    View(
        "startup", "Before the run",
        Question(
            UNDERSTAND_TIME,
            "How long does a job take until it can train?",
            ("startup_imports_median_s", "startup_init_median_s"),
            needs="runs of this suite",
        ),
        "Median over ranks, mean over all runs of the result; not part of any score. Interpreter: process start "
        "to the first line of the suite. Imports: to the end of importing torch and the workload. Init: from "
        "there to init_stop without staging. The table has the slowest rank.",
        build_start_table, render_start_answer, draw_start_chart,
    ),
    View(
        "goodput", "Goodput",
        Question(
            UNDERSTAND_TIME,
            "How much of a run's time was training that counts, and what did checkpoints and interruptions cost?",
            ("goodput_useful_s", "goodput_stalled_s", "goodput_lost_s", "goodput_starting_s", "goodput_down_s"),
            needs="a run that saved checkpoints or was interrupted",
        ),
        "Share of the time from the start of a run's first process to its end, over all attempts, mean of the "
        "runs of a result; runs without an interruption or a checkpoint are beside those with. Useful: training "
        "and evaluation that count. Checkpoints: what they stalled. Lost: after the last checkpoint before an "
        "interruption. Starting: until run_start, of every attempt. Down: between attempts. Interrupted runs are "
        "not scored. A recovery is the time from the last step that counts to the next one, mean of all by phase: work"
        " that is replayed, until the end was seen, in the queue, to restart, to reload the checkpoint.",
        build_goodput_table, render_goodput_answer, draw_goodput_chart,
    ),
    View(
        "phases", "Inside a training step",
        Question(
            UNDERSTAND_TIME,
            "What does a training step wait for?",
            ("step_data_wait_s", "step_exposed_communication_s"),
            needs="runs of this suite",
        ),
        "Mean over ranks and epochs, then over the scored runs. Exposed communication is what remains of the "
        "gradient exchange after the backward pass; the part that overlaps with it lies inside forward + backward "
        "and is given in the table only.",
        build_step_table, render_step_answer, draw_step_chart,
    ),
)  # fmt: skip
