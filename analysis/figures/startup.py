"""Figure: what passes before a run can begin: interpreter, imports, initialisation."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, ORANGE, PURPLE, bars, beside, clip, listed, seconds, stacked
from analysis.study import NotAnswerableError, Study

TITLE = "Before the run: start-up"
CAPTION = (
    "Median over ranks, mean over all runs of the result; not part of any score. Interpreter: process start to "
    "the first line of the suite. Imports: to the end of importing torch and the workload. Init: from there to "
    "init_stop without staging. The table has the slowest rank."
)

PARTS = (("interpreter", "interpreter", ORANGE), ("imports", "imports", PURPLE), ("init", "init", BLUE))


def table(study: Study) -> pd.DataFrame:
    """Seconds by part and result, median and slowest rank."""
    known = study.runs[study.runs["startup_init_median_s"].notna()]
    if known.empty:
        raise NotAnswerableError("startup events; only this suite logs them, published MLPerf HPC logs do not")
    rows = []
    for (benchmark, size, label), runs in known.groupby(["benchmark", "size", "label"], sort=True):
        line: dict[str, object] = {"benchmark": benchmark, "size": size, "label": label, "n": len(runs)}
        for name, title, _ in PARTS:
            line[f"{title} [s], median rank"] = float(pd.to_numeric(runs[f"startup_{name}_median_s"]).mean())
            line[f"{title} [s], slowest rank"] = float(pd.to_numeric(runs[f"startup_{name}_max_s"]).max())
        rows.append(line)
    return pd.DataFrame(rows)


def answer(study: Study) -> str:
    """Seconds of each result, median rank."""
    frame = table(study)
    total = frame[[f"{title} [s], median rank" for _, title, _ in PARTS]].sum(axis=1)
    named = frame["label"] + " (" + frame["benchmark"] + " " + frame["size"] + ")"
    return listed([f"{name} {seconds(value)}" for name, value in zip(named, total, strict=True)])


def draw(study: Study) -> Figure:
    """One bar per result."""
    frame = table(study)
    figure, [[axis]] = bars([len(frame)], 1, legend=True)
    columns = {title: frame[f"{title} [s], median rank"].fillna(0.0).to_numpy(float) for _, title, _ in PARTS}
    at = stacked(axis, ((title, colour, columns[title]) for _, title, colour in PARTS))
    for place, value in enumerate(at):
        beside(axis, value, place, f"{seconds(value)}")
    axis.set_xlim(0, at.max() * 1.15)
    axis.set_yticks(
        range(len(frame)), [clip(f"{row.label}, {row.benchmark} {row.size}", 60) for row in frame.itertuples()]
    )
    axis.set_xlabel("seconds")
    axis.grid(visible=False, axis="y")
    figure.legend(loc="outside upper center", ncols=len(PARTS))
    return figure
