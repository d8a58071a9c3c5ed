"""Figure: time to train against its cost, with the systems that nobody beats in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.page.drawing import INK, clip, legend_of, listed, loglog, looks, name_panels, panels
from analysis.page.scatter import PROBLEM, label_axes, plot_sign, problems, result_table, several_per_problem
from analysis.study import NotAnswerableError, Study

TITLE = "Time and cost"
CAPTION = (
    "Time to train against compute unit hours of one run. The line joins the results that no other of the panel beats in "
    "both. Unit hours of different devices are not the same money; rounds with other rules or data stand in one panel, "
    "results without a score only where no other has one."
)
ORDER = 16


def table(study: Study) -> pd.DataFrame:
    """Time, cost and whether a result is on the front."""
    frame = _shown(study)
    return result_table(
        frame,
        ("label", "division"),
        {
            "time to train [min]": frame["run_s.mean"] / 60,
            "cost [unit hours]": frame["unit_hours"],
            "nobody faster and cheaper": frame["front"],
        },
    )


def answer(study: Study) -> str:
    """The front of each benchmark."""
    return listed(
        [
            f"{benchmark} {size}: {', '.join(rows.loc[rows['front']].sort_values('run_s.mean')['label'])}"
            for (benchmark, size), rows in _shown(study).groupby(PROBLEM, sort=True)
        ]
    )


def draw(study: Study) -> Figure:
    """Log-log panels; the front is named."""
    frame = _shown(study)
    signs = looks(frame["device"])
    classes = problems(frame)
    figure, axes = panels(len(classes), min(2, len(classes)), 3.8, extra_in=0.3 * -(-len(signs) // 4))
    named = []
    for (title, rows), axis in zip(classes, axes, strict=True):
        for row in rows.to_dict("records"):
            carried_over = pd.notna(row["carried_over_from"])
            plot_sign(axis, row["run_s.mean"] / 60, row["unit_hours"], signs[row["device"]], hollow=carried_over)
        loglog(axis, (rows["run_s.mean"] / 60).tolist(), rows["unit_hours"].tolist())
        front = rows[rows["front"]].sort_values("run_s.mean")
        axis.step(front["run_s.mean"] / 60, front["unit_hours"], where="post", color=INK, linewidth=1.0, zorder=0)
        named.append(
            [
                (r["run_s.mean"] / 60, r["unit_hours"], clip(r["label"], 28), bool(r["front"]))
                for r in rows.to_dict("records")
            ]
        )
        label_axes(axis, title, "time to train [min]", "cost [compute unit hours]")
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _shown(study: Study) -> pd.DataFrame:
    frame = study.results[(study.results["mode"] == "strong") & study.results["unit_hours"].notna()]
    scored = frame["score_s"].notna()
    frame = frame[scored | ~scored.groupby([frame["benchmark"], frame["size"]]).transform("any")]
    frame = several_per_problem(frame)
    if frame.empty:
        raise NotAnswerableError("two time-to-train results of one benchmark and size with known compute units")
    return frame.assign(front=[_unbeaten(row, frame) for _, row in frame.iterrows()])


def _unbeaten(row: pd.Series, frame: pd.DataFrame) -> bool:
    """True if no result of the same benchmark and size is both faster and cheaper."""
    others = frame[(frame["benchmark"] == row["benchmark"]) & (frame["size"] == row["size"])]
    faster, cheaper = others["run_s.mean"] < row["run_s.mean"], others["unit_hours"] < row["unit_hours"]
    return not bool((faster & cheaper).any())
