"""Figure: own results beside the published systems, marked where the problem size is another."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, VERMILION, Diagonals, clip, loglog, panels
from analysis.drawing.labels import NamedPoint, name_panels
from analysis.published.scores import missing, published
from analysis.study import NotAnswerableError, Study

TITLE = "Beside the published systems"
CAPTION = (
    "Own results (orange stars) and every published time to train of the benchmark in the table that ships with the "
    "suite, "
    "recomputed from the public logs. Dashed lines are equal unit hours. A hollow star is another problem size: it "
    "shows where "
    "a machine stands in scale, its time compares with no published one. Own results are not verified by MLCommons."
)
NAMED = ("Fugaku", "Perlmutter", "Selene", "Eos")


def table(study: Study) -> pd.DataFrame:
    """Own and published results of the benchmarks that both have."""
    own = _own(study)
    known = _known(study)
    columns = {
        "benchmark": "benchmark", "size": "size", "round": "round", "division": "division", "device": "device",
        "units": "compute units", "train_samples": "training samples", "global_batch_size": "global batch",
        "epochs": "epochs to target", "run_min": "time to train [min]", "train_rate": "train [samples/s]",
        "unit_hours": "unit hours",
    }  # fmt: skip
    ours = own.assign(
        who=own["label"], whose="own, unverified", epochs=own["epochs_to_target.mean"],
        run_min=own["score_s"].fillna(own["run_s.mean"]) / 60, train_rate=own["train_rate.mean"],
    )  # fmt: skip
    theirs = known.assign(who=known["machine"], whose="published", run_min=known["score_s"].astype(float) / 60)
    both = pd.concat([frame[["who", "whose", *columns]].astype(object) for frame in (ours, theirs)])
    order = both.assign(rank=both["whose"] == "published").sort_values(["benchmark", "rank", "run_min"])
    return order[["who", "whose", *columns]].rename(columns=columns | {"who": "system"}).reset_index(drop=True)


def answer(study: Study) -> str:
    """Own and the fastest of the best-known machines."""
    frame = table(study)
    sentences = []
    for benchmark, rows in frame.groupby("benchmark", sort=True):
        own = rows[rows["whose"] != "published"].iloc[0]
        stars = rows[(rows["whose"] == "published") & rows["system"].isin(NAMED)].drop_duplicates("system")
        others = ", ".join(
            f"{r['system']} {r['time to train [min]']:.3g} ({r['round']})" for r in stars.to_dict("records")
        )
        different = "" if own["size"] == "full" else f" on size {own['size']}, a different problem"
        sentences.append(f"{benchmark} [min]: {own['system']} {own['time to train [min]']:.3g}{different}; {others}")
    return "; ".join(sentences) + missing(study.results["group"])


def draw(study: Study) -> Figure:
    """A panel per benchmark."""
    own, known = _own(study), _known(study)
    benchmarks = sorted(own["benchmark"].unique())
    figure, axes = panels(len(benchmarks), 1, 5.0)
    points: list[list[NamedPoint]] = []
    for benchmark, axis in zip(benchmarks, axes, strict=True):
        theirs, ours = known[known["benchmark"] == benchmark], own[own["benchmark"] == benchmark]
        minutes = (theirs["score_s"].astype(float) / 60).tolist()
        axis.plot(theirs["units"].astype(float), minutes, "o", color=BLUE, markersize=6, alpha=0.75, linestyle="none")
        axis.plot([], [], "o", color=BLUE, label="published")
        best = theirs.assign(minutes=minutes).sort_values("minutes").drop_duplicates("machine")
        named = [
            (float(row["units"]), row["minutes"], f"{row['machine']} {row['round']}", row["machine"] in NAMED)
            for row in best.to_dict("records")
        ]
        mine = (ours["score_s"].fillna(ours["run_s.mean"]) / 60).tolist()
        for (_, row), value in zip(ours.iterrows(), mine, strict=True):
            full = row["size"] == "full"
            axis.plot(
                [row["units"]], [value], "*", color=VERMILION, markersize=17, mfc=VERMILION if full else "none", mew=1.5
            )
            text = clip(row["label"], 28) + ("" if full else f" (size {clip(row['size'], 12)}, another problem)")
            named.append((float(row["units"]), value, text, True))
        axis.set_title(clip(benchmark, 40))
        axis.set_xlabel("compute units (accelerators, or processors where there are none)")
        axis.set_ylabel("time to train [min]")
        loglog(axis, [*theirs["units"].astype(float), *ours["units"]], [*minutes, *mine], Diagonals("h", 1 / 60))
        points.append(named)
    name_panels(figure, axes, points)
    return figure


def _own(study: Study) -> pd.DataFrame:
    own = study.distinct
    own = own[~own["published"] & (own["mode"] == "strong") & (own["units"] > 0) & (own["run_s.mean"] > 0)]
    own = own[own["benchmark"].isin(published()["benchmark"])]
    if own.empty:
        raise NotAnswerableError("an own time-to-train result of a benchmark that MLPerf HPC has, with known units")
    return own


def _known(study: Study) -> pd.DataFrame:
    known = published()
    known = known[(known["mode"] == "strong") & known["score_s"].notna() & known["units"].notna()]
    known = known[known["carried_over_from"].isna()]
    return known[known["benchmark"].isin(_own(study)["benchmark"])]
