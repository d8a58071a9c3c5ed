"""Figure: how much of the time since a run's first process started was training that counts, and where the rest went."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREY, ORANGE, PURPLE, VERMILION, bars, beside, clip, listed, stacked
from analysis.study import NotAnswerableError, Study

TITLE = "Goodput"
CAPTION = (
    "Share of the time from the start of a run's first process to its end, over all attempts, mean of the runs of a "
    "result; runs "
    "without an interruption or a checkpoint are beside those with. Useful: training and evaluation that count. "
    "Checkpoints: "
    "what they stalled. Lost: after the last checkpoint before an interruption. Starting: until run_start, of every "
    "attempt. "
    "Down: between attempts. Interrupted runs are not scored."
)

PARTS = (
    ("useful", "useful", BLUE),
    ("stalled", "checkpoints", ORANGE),
    ("lost", "lost", VERMILION),
    ("starting", "starting", PURPLE),
    ("down", "down", GREY),
)


def table(study: Study) -> pd.DataFrame:
    """Shares of the wall time by result, mean over runs, with the least and most useful run."""
    known = study.runs[study.runs["goodput_wall_s"].fillna(0.0) > 0.0]
    if known.empty or not (known[["goodput_interruptions", "goodput_saves"]].fillna(0.0).to_numpy(float) > 0.0).any():
        raise NotAnswerableError(
            "a run that was interrupted or saved a checkpoint; only this suite logs what that cost"
        )
    attempts = known.assign(folder=[str(Path(file).parent) for file in known["file"]])
    last = attempts.sort_values("goodput_wall_s").groupby(["folder", "trial"], dropna=False).tail(1)
    rows = []
    for (benchmark, size, label), runs in last.groupby(["benchmark", "size", "label"], sort=True):
        wall = runs["goodput_wall_s"].to_numpy(float)
        line: dict[str, object] = {"benchmark": benchmark, "size": size, "label": label, "n": len(runs)}
        for name, title, _ in PARTS:
            line[f"{title} [%]"] = float((100 * runs[f"goodput_{name}_s"].to_numpy(float) / wall).mean())
        useful = 100 * runs["goodput_useful_s"].to_numpy(float) / wall
        interruptions = int(runs["goodput_interruptions"].sum())
        line |= {"least useful [%]": useful.min(), "most useful [%]": useful.max(), "interruptions": interruptions}
        rows.append(line)
    return pd.DataFrame(rows)


def answer(study: Study) -> str:
    """The useful share of each result."""
    frame = table(study)
    return listed([f"{row['label']} {_useful(row)}" for _, row in frame.iterrows()])


def draw(study: Study) -> Figure:
    """One bar per result."""
    frame = table(study)
    figure, [[axis]] = bars([len(frame)], 1, legend=True)
    stacked(axis, ((title, colour, frame[f"{title} [%]"].to_numpy(float)) for _, title, colour in PARTS))
    for place, (_, row) in enumerate(frame.iterrows()):
        beside(axis, 100.0, place, _useful(row))
    axis.set_xlim(0, 195)
    axis.set_xticks(range(0, 101, 20))
    axis.set_yticks(range(len(frame)), [clip(f"{row.label}, {row.benchmark} {row.size}") for row in frame.itertuples()])
    axis.set_xlabel("% of the time since the first process started")
    axis.grid(visible=False, axis="y")
    figure.legend(loc="outside upper center", ncols=len(PARTS))
    return figure


def _useful(row: pd.Series) -> str:
    count = int(row["interruptions"])
    least, most = f"{row['least useful [%]']:.3g}", f"{row['most useful [%]']:.3g}"
    spread = "" if least == most else f" ({least} to {most})"
    return f"{row['useful [%]']:.3g} %{spread}, n = {row['n']}, {count} interruption{'s' * (count != 1)}"
