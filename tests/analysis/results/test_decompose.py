"""Means, rates and scores of results, on runs whose answers can be done by hand."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mlhpc.analysis.results.decompose import add_time_parts, compute_harmonic_mean
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.card import Card

Cards = dict[str, Card]
Build = Callable[..., Any]


def only(made: Study) -> pd.Series:
    assert len(made.results) == 1
    return made.results.iloc[0]


def test_one_failed_run_is_the_slowest(tmp_path: Path, package: Build, log: Build, cards: Cards) -> None:
    made = package(tmp_path)
    log(errors=(0.5,), seed=3, start_s=3000).write(made / "results/sys1/strong/cosmoflow/result_3.txt")
    result = read_study([made], cards)
    row = only(result)
    times = [5 + 3 * (13 + trial) for trial in range(10) if trial != 3]
    assert row["score_s"] == pytest.approx(sum(times[1:]) / 8)
    fates = result.runs.set_index("trial")["fate"]
    assert "did not converge" in fates[3] or "not converged" in fates[3]
    assert fates[0] == "left out: fastest"


def test_too_few_runs_have_means_but_no_score(tmp_path: Path, package: Build, cards: Cards) -> None:
    row = only(read_study([package(tmp_path, runs=4)], cards))
    assert pd.isna(row["score_s"])
    assert "4 of the 10" in row["score_note"]
    assert row["n_averaged"] == 4


def test_epochs_times_tau_and_the_parts_give_the_run(tmp_path: Path, package: Build, cards: Cards) -> None:
    table = add_time_parts(read_study([package(tmp_path)], cards).tables.runs)
    rebuilt = table["staging_exposed_s"] + table["epochs"] * table["tau_s"] + table["other_s"]
    assert rebuilt.to_list() == pytest.approx(table["run_s"].to_list())


def test_rates_of_one_run(tmp_path: Path, package: Build, cards: Cards) -> None:
    table = add_time_parts(read_study([package(tmp_path)], cards).tables.runs)
    first = table[table["trial"] == 0].iloc[0]  # 3 epochs of 10 s training and 2 s evaluation
    assert first["train_rate"] == pytest.approx(100 / 10)
    assert first["eval_rate"] == pytest.approx(20 / 2)
    assert first["combined_rate"] == pytest.approx(120 / 12)
    assert first["staging_rate"] == pytest.approx(120 / 5)


def test_placeholder_staging_counts_as_none(tmp_path: Path, package: Build, cards: Cards) -> None:
    made = read_study([package(tmp_path, staging=(0.0, 0.3))], cards)
    assert made.tables.runs["staging_placeholder"].all()
    assert made.runs["staging_s"].isna().all()


def test_a_normalisation_scales_all_but_staging(tmp_path: Path, package: Build, cards: Cards) -> None:
    runs = read_study([package(tmp_path, runs=1)], cards).tables.runs
    plain, scaled = (
        add_time_parts(runs).iloc[0],
        add_time_parts(runs, epoch_factor={runs["group"].iloc[0]: 2.0}).iloc[0],
    )
    assert scaled["run_s"] == pytest.approx(5 + 2 * (plain["run_s"] - 5))
    assert scaled["epochs"] == 2 * plain["epochs"]
    assert scaled["train_rate"] == pytest.approx(plain["train_rate"])


def test_the_harmonic_mean_of_rates_is_work_over_time() -> None:
    mean, _ = compute_harmonic_mean(pd.Series([10.0, 30.0]))
    assert mean == pytest.approx(2 / (1 / 10 + 1 / 30))


def test_throughput_mode_counts_models_per_minute(tmp_path: Path, log: Build, cards: Cards) -> None:
    for trial in range(4):
        text = log(size="mini", errors=(0.1,), staging=None, train_s=20, start_s=float(trial), seed=trial)
        text.write(tmp_path / "P" / "results" / "sys" / "weak" / "cosmoflow" / f"result_{trial}.txt")
    row = only(read_study([tmp_path], cards))
    assert row["score_s"] == pytest.approx(3 + 23)
    assert row["models_per_min"] == pytest.approx(4 / (26 / 60))


def test_two_sizes_never_share_a_result_or_a_class(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    made = read_study([run_folder(tmp_path, "a", size="mini"), run_folder(tmp_path, "b", size="other")], cards)
    assert len(made.results) == 2
    assert [len(rows) for _, rows in made.classes()] == [1, 1]


@pytest.mark.long
def test_logs_that_lack_any_event_are_read(tmp_path: Path, package: Build, cards: Cards) -> None:
    made = package(tmp_path)
    logs = {path: path.read_text() for path in made.rglob("result_*.txt")}
    keys = sorted({key for text in logs.values() for key in re.findall(r'"key": "(\w+)"', text)})
    assert "train_samples" in keys
    for key in keys:
        for path, text in logs.items():
            kept = [line for line in text.splitlines() if f'"key": "{key}"' not in line]
            path.write_text("\n".join(kept) + "\n")
        assert len(read_study([made], cards).results) >= 1, key


def test_a_clock_that_stands_still_leaves_no_share(tmp_path: Path, package: Build, cards: Cards) -> None:
    made = package(tmp_path)
    for path in made.rglob("result_*.txt"):
        path.write_text(re.sub(r'"time_ms": [\d.]+', '"time_ms": 1000', path.read_text()))
    assert pd.isna(only(read_study([made], cards))["staging_in_epochs"])
