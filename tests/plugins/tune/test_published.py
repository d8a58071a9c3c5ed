"""The prediction of published machines that were left out: what is known of them must not count."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from benchmarks.tune_published import build_points, predict_by_rate, predict_prior, read_results

ROWS = [("a", "V100", 10, 100.0), ("b", "V100", 20, 100.0), ("c", "A100", 10, 50.0), ("c", "A100", 20, 30.0)]
RESULTS = pd.DataFrame(ROWS, columns=["machine", "device", "units", "score_s"]).assign(benchmark="cosmoflow")


def test_a_rate_is_the_geometric_mean_of_time_times_units() -> None:
    found = predict_by_rate(RESULTS, [0, 1], 3, same_device=False)
    assert found == pytest.approx(math.log(math.sqrt(1000 * 2000) / 20))
    assert predict_by_rate(RESULTS, [0, 1], 3, same_device=True) is None


def test_the_prior_takes_the_own_device_and_never_the_own_machine() -> None:
    assert predict_prior(RESULTS, [0, 1, 2, 3], 0) == pytest.approx(math.log(2000 / 10)), "of b alone"
    others = predict_by_rate(RESULTS, [0, 1], 2, same_device=False)
    assert predict_prior(RESULTS, [0, 1, 2, 3], 2) == others, "c's device is on no other machine"


def test_published_results_are_points_of_a_space() -> None:
    results = read_results()
    space, points = build_points(results)
    assert len(points) == len(results) > 50
    assert set(space.tunables) == {"benchmark", "device", "round", "units", "global_batch_size"}
