"""Figure: the best published time of each round, with what changed in the rules."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from analysis.drawing.axes import INK, clip, legend_of, looks
from analysis.drawing.labels import name_panels
from analysis.published.scores import ROUNDS, missing, published
from analysis.study import NotAnswerableError, Study

TITLE = "From round to round"
CAPTION = (
    "Fastest score of the closed division by round, recomputed from the public logs; carry-overs count where they "
    "were first "
    "published. Rules and data changed between rounds (dotted lines), so a line mixes progress of machines and codes "
    "with that."
)
CHANGES = {
    "v1.0": "CosmoFlow data doubled\nOC20 and weak scaling new",
    "v2.0": "reference points redone",
    "v3.0": "staging may precede the run\nOpenFold new",
}


def table(study: Study) -> pd.DataFrame:
    """The best result by benchmark and round, from the table that ships and the logs of this report."""
    if not (study.distinct["size"] == "full").any():
        raise NotAnswerableError("a result of the MLPerf size; sizes of our own have no rounds")
    own = study.distinct.loc[study.distinct["published"]]
    columns = ["group", "round", "benchmark", "machine", "division", "mode", "units", "score_s", "carried_over_from"]
    known = pd.concat([published()[columns], own[columns].astype(object)]).drop_duplicates("group")
    known = known[(known["mode"] == "strong") & (known["division"] == "closed") & known["score_s"].notna()]
    known = known[known["round"].isin(ROUNDS) & known["benchmark"].isin(study.distinct["benchmark"])]
    known = known[known["carried_over_from"].isna()].assign(score_s=lambda frame: frame["score_s"].astype(float))
    if known.empty:
        raise NotAnswerableError("published scores of these benchmarks")
    best = (
        known.sort_values("score_s")
        .groupby(["benchmark", "round"], sort=True)
        .head(1)
        .sort_values(["benchmark", "round"])
    )
    return pd.DataFrame(
        {
            "benchmark": best["benchmark"],
            "round": best["round"],
            "machine": best["machine"],
            "compute units": best["units"],
            "score by the rules [min]": best["score_s"] / 60,
            "faster than the first [x]": best.groupby("benchmark")["score_s"].transform("first") / best["score_s"],
        }
    ).reset_index(drop=True)


def answer(study: Study) -> str:
    """First to last round of each benchmark."""
    rows = table(study)
    first = rows.groupby("benchmark")["round"].first()
    last = rows.groupby("benchmark", sort=True).tail(1)
    sentences = [
        f"{r['benchmark']} {r['faster than the first [x]']:.3g}× from {first[r['benchmark']]} to {r['round']}"
        for r in last.to_dict("records")
        if r["faster than the first [x]"] > 1
    ]
    return "; ".join(sentences) + missing(study.results["group"])


def draw(study: Study) -> Figure:
    """A line per benchmark."""
    frame = table(study)
    signs = looks(frame["benchmark"])
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    axis = figure.subplots()
    places = {round_: place for place, round_ in enumerate(ROUNDS)}
    named: list[tuple[float, float, str, bool]] = []
    for benchmark, rows in frame.groupby("benchmark", sort=True):
        colour, marker = signs[benchmark]
        at = [places[round_] for round_ in rows["round"]]
        axis.plot(at, rows["score by the rules [min]"], color=colour, marker=marker, markersize=8)
        named += [
            (place, r["score by the rules [min]"], f"{clip(r['machine'], 16)} {r['compute units']:g}", False)
            for place, r in zip(at, rows.to_dict("records"), strict=True)
        ]
    axis.set_yscale("log")
    low, high = frame["score by the rules [min]"].min(), frame["score by the rules [min]"].max()
    axis.set_ylim(low / 1.6, high * 4)
    for round_, text in CHANGES.items():
        axis.axvline(places[round_] - 0.5, color=INK, linestyle=":", linewidth=1.0)
        axis.text(places[round_] - 0.47, high * 3.6, text, va="top", color=INK)
    axis.set_xticks(list(places.values()), list(places))
    axis.set_xlim(-0.45, len(places) - 0.4)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_ylabel("best time to train [min]")
    legend_of(figure, axis, signs)
    name_panels(figure, [axis], [named])
    return figure
