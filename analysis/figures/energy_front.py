"""Figure: time to train against energy to solution, with intervals, and the systems that nobody beats in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import INK, clip, legend_of, listed, loglog, looks, panels
from analysis.drawing.labels import name_panels
from analysis.drawing.scatter import label_axes, plot_sign, result_table
from analysis.figures.pareto import mark_front
from analysis.results.names import tasks
from analysis.study import NotAnswerableError, Study

TITLE = "Time and energy"
CAPTION = (
    "Time to train against the energy of one run, from run_start to run_stop, over the runs that the time score "
    "keeps. A panel "
    "holds results measured at the same place: nodes, packages and devices, AC and DC are never beside each other. "
    "Bars are 95 % "
    "intervals, of energy from the spread of runs, the sampling and the accuracy of the meters (5 % where none is "
    "stated). Hollow: "
    "no score, as readings lack a part of a run. The energy of a network may be the rules' estimate (table). A line "
    "joins the "
    "results that no other in the panel and of its rounds beats in both."
)
_MJ = 1e6


def table(study: Study) -> pd.DataFrame:
    """Time, energy and its interval, what it is of, power per node, energy x delay, idle share, and whether it is on
    the front.
    """
    frame = _shown(study)
    return result_table(
        frame,
        ("label", "division"),
        {
            "time to train [min]": frame["run_s.mean"] / 60,
            "energy [MJ]": frame["energy_j"] / _MJ,
            "energy, low [MJ]": frame["energy_low_j"] / _MJ,
            "energy, high [MJ]": frame["energy_high_j"] / _MJ,
            "energy of": frame["energy_kind"],
            "network estimated": frame["interconnect_estimated"],
            "no score": frame["energy_note"],
            "power per node [W]": frame["watts_per_node"],
            "energy x delay [MJ s]": frame["energy_delay_js"] / _MJ,
            "idle share": frame["idle_share"],
            "on the front": frame["front"],
        },
    )


def answer(study: Study) -> str:
    """What speed costs in energy, from the least to the fastest of each front."""
    sentences = []
    for title, rows in _panels(_shown(study)):
        front = rows[rows["front"]].sort_values("run_s.mean")
        fast, slow = front.iloc[0], front.iloc[-1]
        if len(front) < 2:
            sentences.append(f"{title}: {fast['label']} is both the fastest and takes the least")
            continue
        speed, cost = slow["run_s.mean"] / fast["run_s.mean"], fast["energy_j"] / slow["energy_j"]
        sentences.append(
            f"{title}: {fast['label']} is {speed:.3g} times faster than {slow['label']} for {cost:.3g} times the energy"
        )
    return listed(sentences)


def draw(study: Study) -> Figure:
    """Log-log panels with intervals; the front is named."""
    frame = _shown(study)
    signs = looks(frame["device"])
    classes = _panels(frame)
    figure, axes = panels(len(classes), min(2, len(classes)), 3.8, extra_in=0.3 * -(-len(signs) // 4))
    named = []
    for (title, rows), axis in zip(classes, axes, strict=True):
        for row in rows.to_dict("records"):
            at, mega = row["run_s.mean"] / 60, row["energy_j"] / _MJ
            colour, _ = signs[row["device"]]
            if pd.notna(row["energy_low_j"]):
                axis.plot(
                    [at, at], [row["energy_low_j"] / _MJ, row["energy_high_j"] / _MJ], color=colour, linewidth=1.2
                )
            if pd.notna(row["score_low_s"]) and pd.notna(row["score_high_s"]):
                axis.plot(
                    [row["score_low_s"] / 60, row["score_high_s"] / 60], [mega, mega], color=colour, linewidth=1.2
                )
            plot_sign(axis, at, mega, signs[row["device"]], hollow=not row["energy_valid"])
        label_axes(axis, title, "time to train [min]", "energy of a run [MJ]")
        loglog(axis, (rows["run_s.mean"] / 60).tolist(), (rows["energy_j"] / _MJ).tolist())
        for *_, alike in tasks(rows):
            front = alike[alike["front"]].sort_values("run_s.mean")
            axis.step(
                front["run_s.mean"] / 60, front["energy_j"] / _MJ, where="post", color=INK, linewidth=1.0, zorder=0
            )
        named.append(
            [
                (r["run_s.mean"] / 60, r["energy_j"] / _MJ, clip(r["label"], 40), bool(r["front"]))
                for r in rows.to_dict("records")
            ]
        )
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _panels(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Results of one benchmark and size that were measured at the same place."""
    grouped = frame.groupby(["benchmark", "size", "energy_kind"], sort=True, dropna=False)
    return [(clip(f"{benchmark} {size} · {kind}", 60), rows) for (benchmark, size, kind), rows in grouped]


def _shown(study: Study) -> pd.DataFrame:
    frame = study.distinct[study.distinct["mode"] == "strong"]
    if "energy_j" in frame:
        frame = frame[frame["energy_j"].notna() & (frame["run_s.mean"] > 0)]
    if "energy_j" not in frame or frame.empty:
        raise NotAnswerableError("a time-to-train result with power readings or energy counters (docs/energy.md)")
    frame = frame.assign(energy_j=frame["energy_j"].astype(float))
    return pd.concat([mark_front(rows, "energy_j") for _, rows in _panels(frame)]).loc[frame.index]
