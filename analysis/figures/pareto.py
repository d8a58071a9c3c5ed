"""Figure: time to train against its cost (by the user's prices, else unit hours), with the systems that nobody beats in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.page.drawing import INK, clip, legend_of, listed, loglog, looks, name_panels, panels
from analysis.page.scatter import label_axes, plot_sign, problems, result_table, several_per_problem
from analysis.results.names import tasks
from analysis.study import NotAnswerableError, Study

TITLE = "Time and cost"
CAPTION = (
    "Time to train against the cost of one run: what the prices given with --price make of its compute unit hours, without any "
    "the unit hours themselves, which are not the same money on different devices. A line joins the results of one division "
    "and of rounds alike that no other of them beats in both. Results without a score are shown only where no other has one."
)
ORDER = 16


def table(study: Study) -> pd.DataFrame:
    """Time, unit hours, cost if there are prices, and whether a result is on the front."""
    frame = _shown(study)
    column, unit = study.cost
    return result_table(
        frame,
        ("label", "division"),
        {
            "time to train [min]": frame["run_s.mean"] / 60,
            "unit hours": frame["unit_hours"],
        }
        | ({f"cost [{unit}]": frame[column]} if study.prices else {})
        | {f"nobody faster with fewer {unit}": frame["front"]},
    )


def answer(study: Study) -> str:
    """The front of each benchmark."""
    _, unit = study.cost
    sentences = [
        f"{title.replace(' · time to train', '')}: {', '.join(rows.loc[rows['front']].sort_values('run_s.mean')['label'])}"
        for title, rows in tasks(_shown(study))
        if len(rows) > 1
    ]
    return f"nobody is faster with fewer {unit}: {listed(sentences)}{_unpriced(study)}"


def draw(study: Study) -> Figure:
    """Log-log panels; the front is named."""
    frame = _shown(study)
    column, unit = study.cost
    signs = looks(frame["device"])
    classes = problems(frame)
    figure, axes = panels(len(classes), min(2, len(classes)), 3.8, extra_in=0.3 * -(-len(signs) // 4))
    named = []
    for (title, rows), axis in zip(classes, axes, strict=True):
        for row in rows.to_dict("records"):
            carried_over = pd.notna(row["carried_over_from"])
            plot_sign(axis, row["run_s.mean"] / 60, row[column], signs[row["device"]], hollow=carried_over)
        loglog(axis, (rows["run_s.mean"] / 60).tolist(), rows[column].tolist())
        for _, alike in tasks(rows):
            front = alike[alike["front"]].sort_values("run_s.mean")
            axis.step(front["run_s.mean"] / 60, front[column], where="post", color=INK, linewidth=1.0, zorder=0)
        named.append(
            [(r["run_s.mean"] / 60, r[column], clip(r["label"], 28), bool(r["front"])) for r in rows.to_dict("records")]
        )
        label_axes(axis, title, "time to train [min]", f"cost [{unit}]" if study.prices else "compute unit hours")
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _shown(study: Study) -> pd.DataFrame:
    frame = study.results[(study.results["mode"] == "strong") & study.results[study.cost[0]].notna()]
    scored = frame["score_s"].notna()
    frame = frame[scored | ~scored.groupby([frame["benchmark"], frame["size"]]).transform("any")]
    frame = several_per_problem(frame)
    if frame.empty:
        priced = " and a price (--price)" if study.prices else ""
        raise NotAnswerableError(
            f"two time-to-train results of one benchmark and size with known compute units{priced}"
        )
    cost = study.cost[0]
    parts = [part.assign(front=[_unbeaten(row, part, cost) for _, row in part.iterrows()]) for _, part in tasks(frame)]
    return pd.concat(parts).loc[frame.index]


def _unpriced(study: Study) -> str:
    """The devices without a price, as the end of the answer."""
    if study.prices is None:
        return ""
    strong = study.results[(study.results["mode"] == "strong") & study.results["unit_hours"].notna()]
    devices = sorted(set(strong.loc[strong["cost"].isna(), "device"]))
    return f". No price for {', '.join(devices)}" if devices else ""


def _unbeaten(row: pd.Series, others: pd.DataFrame, cost: str) -> bool:
    """True if none of the results that may be ranked beside it is both faster and costs less."""
    faster, fewer = others["run_s.mean"] < row["run_s.mean"], others[cost] < row[cost]
    return not bool((faster & fewer).any())
