"""Figure: time to train against its cost (by the user's prices, else unit hours), with the systems that nobody beats in
both.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import INK, clip, legend_of, listed, loglog, looks, panels
from analysis.drawing.labels import name_panels
from analysis.drawing.scatter import PROBLEM, label_axes, plot_sign, problems, result_table, several_per_problem
from analysis.results.extent import with_extent
from analysis.results.names import tasks
from analysis.study import NotAnswerableError, Study

TITLE = "Time and cost"
CAPTION = (
    "Time to train against the cost of one run: what the prices given with --price make of its compute unit hours; "
    "without any "
    "the hours of accelerators, processors, nodes, cores or ranks themselves (what varies), which are not the same "
    "money on "
    "different devices. Further left is faster, lower is cheaper; a line joins the results of one division and of "
    "rounds alike "
    "that no other of them beats in both. Results without a score are shown only where no other has one."
)


def table(study: Study) -> pd.DataFrame:
    """Time, cost, what it counts, and whether a result is on the front."""
    frame = _shown(study)
    return result_table(
        frame,
        ("label", "division"),
        {
            "time to train [min]": frame["run_s.mean"] / 60,
            "machine hours": frame["hours"],
            "cost": frame["paid"],
            "cost in": frame["paid_in"],
            "on the front": frame["front"],
        },
    )


def answer(study: Study) -> str:
    """The front of each benchmark."""
    frame = _shown(study)
    sentences = [
        f"{short}: {', '.join(rows.loc[rows['front']].sort_values('run_s.mean')['label'])}"
        for _, short, rows in tasks(frame)
        if len(rows) > 1
    ]
    units = frame["paid_in"].unique()
    unit = units[0] if len(units) == 1 else "machine hours"
    return f"no other result is both faster and takes fewer {unit}: {listed(sentences)}{_unpriced(study)}"


def draw(study: Study) -> Figure:
    """Log-log panels; the front is named."""
    frame = _shown(study)
    signs = looks(frame["device"])
    classes = problems(frame)
    figure, axes = panels(len(classes), min(2, len(classes)), 3.8, extra_in=0.3 * -(-len(signs) // 4))
    named = []
    for (title, rows), axis in zip(classes, axes, strict=True):
        minutes = rows["run_s.mean"] / 60
        for at, paid, device in zip(minutes, rows["paid"], rows["device"], strict=True):
            plot_sign(axis, at, paid, signs[device])
        label_axes(axis, title, "time to train [min]", f"cost [{rows['paid_in'].iloc[0]}]")
        loglog(axis, minutes.tolist(), rows["paid"].tolist())
        for *_, alike in tasks(rows):
            front = alike[alike["front"]].sort_values("run_s.mean")
            axis.step(front["run_s.mean"] / 60, front["paid"], where="post", color=INK, linewidth=1.0, zorder=0)
        named.append(
            [(r["run_s.mean"] / 60, r["paid"], clip(r["label"], 40), bool(r["front"])) for r in rows.to_dict("records")]
        )
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _shown(study: Study) -> pd.DataFrame:
    frame = study.distinct[study.distinct["mode"] == "strong"]
    frame = with_extent(frame[frame["run_s.mean"] > 0], PROBLEM)
    paid_in = study.prices.unit if study.prices else frame["one"] + " hours"
    frame = frame.assign(paid=frame["cost"] if study.prices else frame["hours"], paid_in=paid_in)
    frame = frame[frame["paid"].notna()]
    scored = frame["score_s"].notna()
    frame = frame[scored | ~scored.groupby([frame["benchmark"], frame["size"]]).transform("any")]
    frame = several_per_problem(frame)
    if frame.empty:
        priced = " and a price (--price)" if study.prices else ""
        raise NotAnswerableError(
            f"two time-to-train results of one benchmark and size on machines of known size{priced}"
        )
    return mark_front(frame, "paid")


def _unpriced(study: Study) -> str:
    """The devices without a price, as the end of the answer."""
    if study.prices is None:
        return ""
    strong = study.distinct[(study.distinct["mode"] == "strong") & study.distinct["unit_hours"].notna()]
    devices = sorted(set(strong.loc[strong["cost"].isna(), "device"]))
    return f". No price for {', '.join(devices)}" if devices else ""


def mark_front(frame: pd.DataFrame, against: str) -> pd.DataFrame:
    """Add the column ``front``: true on the Pareto front of ``run_s.mean`` and ``against``, within comparable results."""
    front = pd.Series(False, index=frame.index)
    for *_, alike in tasks(frame):
        front.loc[alike.index] = [_unbeaten(row, alike, against) for _, row in alike.iterrows()]
    return frame.assign(front=front)


def _unbeaten(row: pd.Series, others: pd.DataFrame, against: str) -> bool:
    faster, less = others["run_s.mean"] < row["run_s.mean"], others[against] < row[against]
    return not bool((faster & less).any())
