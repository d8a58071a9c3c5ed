"""Figure: time to train against the unit hours it took, with the systems that nobody beats in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.page.drawing import INK, clip, legend_of, listed, loglog, looks, name_panels, panels
from analysis.page.scatter import label_axes, plot_sign, problems, result_table, several_per_problem
from analysis.results.names import tasks
from analysis.study import NotAnswerableError, Study

TITLE = "Time and unit hours"
CAPTION = (
    "Time to train against compute unit hours of one run. A line joins the results of one division and of rounds alike that no "
    "other of them beats in both. Unit hours of different devices are not the same money. Results without a score are shown "
    "only where no other has one."
)
ORDER = 16


def table(study: Study) -> pd.DataFrame:
    """Time, unit hours and whether a result is on the front."""
    frame = _shown(study)
    return result_table(
        frame,
        ("label", "division"),
        {
            "time to train [min]": frame["run_s.mean"] / 60,
            "unit hours": frame["unit_hours"],
            "nobody faster with fewer": frame["front"],
        },
    )


def answer(study: Study) -> str:
    """The front of each benchmark."""
    return listed(
        [
            f"{title.replace(' · time to train', '')}: {', '.join(rows.loc[rows['front']].sort_values('run_s.mean')['label'])}"
            for title, rows in tasks(_shown(study))
            if len(rows) > 1
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
        for _, alike in tasks(rows):
            front = alike[alike["front"]].sort_values("run_s.mean")
            axis.step(front["run_s.mean"] / 60, front["unit_hours"], where="post", color=INK, linewidth=1.0, zorder=0)
        named.append(
            [
                (r["run_s.mean"] / 60, r["unit_hours"], clip(r["label"], 28), bool(r["front"]))
                for r in rows.to_dict("records")
            ]
        )
        label_axes(axis, title, "time to train [min]", "compute unit hours")
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
    parts = [part.assign(front=[_unbeaten(row, part) for _, row in part.iterrows()]) for _, part in tasks(frame)]
    return pd.concat(parts).loc[frame.index]


def _unbeaten(row: pd.Series, others: pd.DataFrame) -> bool:
    """True if none of the results that may be ranked beside it is both faster and takes fewer unit hours."""
    faster, fewer = others["run_s.mean"] < row["run_s.mean"], others["unit_hours"] < row["unit_hours"]
    return not bool((faster & fewer).any())
