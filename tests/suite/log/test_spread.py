"""What is said before runs about their number, and after them about their largest losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.lost_time import find_largest_losses, render_losses
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import Phases, RunRecord, summarise_log
from mlhpc.suite.log.spread import KnownSpread, find_known_spread
from mlhpc.suite.log.timeline import TimeShares
from mlhpc.suite.statistics.power import estimate_runs_needed
from tests.fixtures.cli import mlhpc
from tests.fixtures.runs import run_folder


def test_the_spread_is_that_of_earlier_runs_alike(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "a")
    run_folder(tmp_path / "runs" / "b")
    config = load_config(load_descriptor("cosmoflow"), "smoke")
    known = find_known_spread(config, 2, [tmp_path / "runs"], None)
    assert known is not None
    assert (known.dof, known.source) == (8, "of 10 earlier runs here in 2 run folders")
    times = [summarise_log(read_events(path)).time_to_train_s for path in (tmp_path / "runs" / "a").glob("result_*")]
    assert known.run_s == pytest.approx(sum(filter(None, times)) / 5)
    assert known.count_runs(0.05) == estimate_runs_needed(known.spread, 8, 0.05)
    assert find_known_spread(config, 4, [tmp_path / "runs"], None) is None, "runs on other ranks say nothing"


def test_run_says_how_many_runs_show_a_difference_and_runs_none(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "a")
    words = ("run", "cosmoflow", "--size", "smoke", "--ranks", 2)
    told = mlhpc(*words, "--detect", "5%", "--within", "2h", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "would show 5 % in 8 of 10 cases of normal noise; " in told.stdout
    assert "runs fit into 2 h; so many of each side show " in told.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    short = mlhpc(*words, "--within", "1s", cwd=tmp_path)
    assert (short.returncode, "is enough for 0 of two runs" in short.stderr) == (2, True)
    unknown = mlhpc("run", "open_catalyst", "--size", "mini", "--ranks", 1, "--detect", "5%", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "first mlhpc run open_catalyst --size mini --ranks 1 --runs 3" in unknown.stderr
    assert "such as 90s, 30min or 2h" in mlhpc(*words, "--within", "2", cwd=tmp_path).stderr


def test_reference_points_tell_the_spread_where_no_run_does(tmp_path: Path) -> None:
    said = mlhpc("run", "openfold", "--size", "smoke", "--detect", "20%", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "of the epochs of 25 reference runs" in said.stdout
    assert "run one first" in mlhpc("run", "openfold", "--size", "smoke", "--within", "2h", cwd=tmp_path).stderr


def test_no_session_counts_its_runs_with_those_of_another() -> None:
    apart = KnownSpread.of([[100.0, 101.0], [200.0, 202.0]], "two days")
    assert apart.spread == pytest.approx(0.00704, rel=0.01)
    assert apart.dof == 2


def record(wait: float, evaluation: float, exchange: float = 0.0, **changes: Any) -> RunRecord:
    return replace(
        RunRecord(ranks=2, nodes=1, size="smoke", eval_samples=1000),
        config={"workload": "cosmoflow", "loader_threads": 2, "eval_batch_size": 50},
        shares=TimeShares(100.0, 0.0, 0.0, 0.0, 100.0 - evaluation, evaluation, 0.0, 0.0),
        mean_phases=Phases(wait, 80.0 - wait - exchange, exchange, 5.0, 0.0, 0.0, 85.0),
        **changes,
    )


def test_the_largest_losses_come_with_the_setting_to_try() -> None:
    lines = list(render_losses([record(12.0, 9.0, 20.0), record(14.0, 9.0, 18.0)], 16))
    assert lines == [
        "  loss: waiting for other ranks 19 %: try mlhpc tune cosmoflow --size smoke (ranks, threads and plans), which "
        "gains at most that",
        "  loss: waiting for data 13 %: try --set loader_threads=4, which gains at most that",
        "  loss: evaluation 9 %: try --set eval_batch_size=100, which gains at most that",
    ]


@pytest.mark.parametrize(
    ("records", "cores"),
    [
        ([record(1.0, 1.0)], 16),  # too small
        ([record(12.0, 1.0), record(0.0, 1.0)], 16),  # not in every run
        ([record(12.0, 1.0)], 1),  # no core is left for more threads
        ([record(1.0, 20.0, **{})], 16),
        ([], 16),
    ],
)
def test_without_the_data_nothing_is_said(records: list[RunRecord], cores: int) -> None:
    if records and records[0].shares is not None and records[0].shares.eval_s == 20.0:
        records = [replace(records[0], eval_samples=80)]  # one batch of a rank holds them all
    assert find_largest_losses(records, cores) == []
