"""Predicts the time to train of published MLPerf HPC systems that were left out, by the proxy of `mlhpc tune`.

    python -m benchmarks.tune_published

All results of one machine are left out, and predicted from those of the others. The baseline has the same samples per second
and compute unit, and the same epochs: the geometric mean of time x units of the other machines' results of the benchmark. The
proxy learns the rest from benchmark, device, round, units and batch. Errors are factors: 1.5 is half as much again, or 2/3.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pandas as pd

from mlhpc.analysis.published.scores import read_scores
from mlhpc.plugins.tune.search import NORMAL_90, Proxy
from mlhpc.plugins.tune.space import Point, Space
from mlhpc.suite.card import Tunable

FEATURES = ("benchmark", "device", "round", "units", "global_batch_size")


def read_results() -> pd.DataFrame:
    """Results of time to train in the closed division, without those that repeat an earlier round."""
    scores = read_scores()
    kept = scores[(scores["mode"] == "strong") & (scores["division"] == "closed") & scores["carried_over_from"].isna()]
    return kept.dropna(subset=["score_s", "units", "global_batch_size"]).reset_index(drop=True)


def build_points(results: pd.DataFrame) -> tuple[Space, list[Point]]:
    """The results as points of a space, for the proxy."""
    rows = [tuple(row) for row in results[list(FEATURES)].itertuples(index=False)]
    points: list[Point] = [dict(zip(FEATURES, row, strict=True)) for row in rows]
    space = Space({name: Tunable(values=tuple(dict.fromkeys(point[name] for point in points))) for name in FEATURES})
    return space, points


def predict_by_rate(results: pd.DataFrame, known: Sequence[int], place: int, *, same_device: bool) -> float | None:
    """Log of the time if each unit is as fast as the known ones are in the geometric mean. None: there is no such result."""
    row = results.loc[place]
    others = results.loc[list(known)]
    others = others[others["benchmark"] == row["benchmark"]]
    if same_device:
        others = others[others["device"] == row["device"]]
    if others.empty:
        return None
    return statistics.fmean(
        math.log(s * n) for s, n in zip(others["score_s"], others["units"], strict=True)
    ) - math.log(row["units"])


def predict_prior(results: pd.DataFrame, known: Sequence[int], place: int) -> float | None:
    """Log of the time by the rate of this device, if others have it, else of all. The place's own machine never counts."""
    others = [other for other in known if results.loc[other, "machine"] != results.loc[place, "machine"]]
    found = predict_by_rate(results, others, place, same_device=True)
    return predict_by_rate(results, others, place, same_device=False) if found is None else found


def main() -> None:
    """Print a row per machine, then the errors of all."""
    results = read_results()
    space, points = build_points(results)
    truth = [math.log(score) for score in results["score_s"]]
    errors: dict[str, list[float]] = {"same rate": [], "same rate, same device": [], "proxy": []}
    inside = judged = 0
    print(f"{'machine':<36} {'n':>2}  median error as a factor: same rate, same rate of this device, proxy")
    for machine, group in results.groupby("machine", sort=False):
        left_out = list(group.index)
        known = [place for place in results.index if place not in left_out]
        prior = [predict_prior(results, known, place) for place in results.index]
        usable = [place for place in results.index if prior[place] is not None]
        proxy = Proxy(space, [points[place] for place in usable], [prior[place] or 0.0 for place in usable])
        measured = {usable.index(place): [truth[place]] for place in known if place in usable}
        found = proxy.predict(measured)
        own: dict[str, list[float]] = {name: [] for name in errors}
        for place in left_out:
            if place not in usable:
                continue
            at = usable.index(place)
            rated = predict_by_rate(results, known, place, same_device=True)
            plain = predict_by_rate(results, known, place, same_device=False)
            own["same rate"].append(abs(truth[place] - (plain or 0.0)))
            if rated is not None:
                own["same rate, same device"].append(abs(truth[place] - rated))
            own["proxy"].append(abs(truth[place] - float(found.mean[at])))
            half = NORMAL_90 * math.hypot(float(found.std[at]), found.noise)
            inside += abs(truth[place] - float(found.mean[at])) <= half
            judged += 1
        print(f"{machine:<36} {len(own['proxy']):>2}  " + "  ".join(render_factor(each) for each in own.values()))
        for name, values in own.items():
            errors[name] += values
    print()
    for name, values in errors.items():
        ordered = sorted(values)
        worst = ordered[math.ceil(0.9 * len(ordered)) - 1]
        print(f"{name:<24} n {len(values)}, median {render_factor(values)}, nine of ten within {math.exp(worst):.2f}")
    print(f"90 % intervals of the proxy hold {inside} of {judged}")


def render_factor(values: Sequence[float]) -> str:
    """The median of errors of logarithms as a factor."""
    return f"{math.exp(statistics.median(values)):.2f}" if values else "none"


if __name__ == "__main__":
    main()
