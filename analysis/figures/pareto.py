"""Figure: time to train against its cost, with the systems that nobody beats in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.page.drawing import INK, clip, legend_of, listed, loglog, looks, name_points, panels
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
    return pd.DataFrame(
        {
            "benchmark": frame["benchmark"],
            "size": frame["size"],
            "label": frame["label"],
            "division": frame["division"],
            "time to train [min]": frame["run_s.mean"] / 60,
            "cost [unit hours]": frame["unit_hours"],
            "nobody faster and cheaper": frame["front"],
        }
    ).reset_index(drop=True)


def answer(study: Study) -> str:
    """The front of each benchmark."""
    return listed(
        [
            f"{benchmark} {size}: {', '.join(rows.loc[rows['front']].sort_values('run_s.mean')['label'])}"
            for (benchmark, size), rows in _shown(study).groupby(["benchmark", "size"], sort=True)
        ]
    )


def draw(study: Study) -> Figure:
    """Log-log panels; the front is named."""
    frame = _shown(study)
    signs = looks(frame["device"])
    classes = list(frame.groupby(["benchmark", "size"], sort=True))
    figure, axes = panels(len(classes), min(2, len(classes)), 3.8, extra_in=0.3 * -(-len(signs) // 4))
    named = []
    for (key, rows), axis in zip(classes, axes, strict=True):
        for row in rows.to_dict("records"):
            colour, marker = signs[row["device"]]
            hollow = pd.notna(row["carried_over_from"])
            axis.plot(
                [row["run_s.mean"] / 60], [row["unit_hours"]], marker, color=colour, markersize=9,
                mfc="none" if hollow else colour, linestyle="none",
            )  # fmt: skip
        loglog(axis, (rows["run_s.mean"] / 60).tolist(), rows["unit_hours"].tolist())
        front = rows[rows["front"]].sort_values("run_s.mean")
        axis.step(front["run_s.mean"] / 60, front["unit_hours"], where="post", color=INK, linewidth=1.0, zorder=0)
        named.append(
            [
                (r["run_s.mean"] / 60, r["unit_hours"], clip(r["label"], 28), bool(r["front"]))
                for r in rows.to_dict("records")
            ]
        )
        axis.set_title(clip(f"{key[0]} · size {key[1]}", 50))
        axis.set_xlabel("time to train [min]")
        axis.set_ylabel("cost [compute unit hours]")
    legend_of(figure, axes[0], signs)
    for axis, points in zip(axes, named, strict=True):
        name_points(figure, axis, points)
    return figure


def _shown(study: Study) -> pd.DataFrame:
    frame = study.results[(study.results["mode"] == "strong") & study.results["unit_hours"].notna()]
    scored = frame["score_s"].notna()
    frame = frame[scored | ~scored.groupby([frame["benchmark"], frame["size"]]).transform("any")]
    frame = frame[frame.groupby(["benchmark", "size"])["group"].transform("size") > 1]
    if frame.empty:
        raise NotAnswerableError("two time-to-train results of one benchmark and size with known compute units")
    return frame.assign(front=[_unbeaten(row, frame) for row in frame.itertuples()])


def _unbeaten(row: object, frame: pd.DataFrame) -> bool:
    same = frame[(frame["benchmark"] == row.benchmark) & (frame["size"] == row.size)]  # type: ignore[attr-defined]
    mine = frame.loc[row.Index]  # type: ignore[attr-defined]
    faster, cheaper = same["run_s.mean"] < mine["run_s.mean"], same["unit_hours"] < mine["unit_hours"]
    return not bool((faster & cheaper).any())
