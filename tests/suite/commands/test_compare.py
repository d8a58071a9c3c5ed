"""Comparing two results: the ratio of geometric means with its interval, and an exit code a regression job can use."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.commands.compare import verdict
from suite.log.score import TimeRatio, time_ratio
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import hpc_run, our_run, our_runs, results, write


def test_the_interval_is_welch_on_log_time() -> None:
    """scipy.stats.ttest_ind(log b, log a, equal_var=False).confidence_interval(), exponentiated."""
    found = time_ratio([10, 11, 12, 13], [12, 15, 19])
    a, b = [math.log(x) for x in (10, 11, 12, 13)], [math.log(x) for x in (12, 15, 19)]
    assert found.ratio == pytest.approx(math.exp(sum(b) / 3 - sum(a) / 4))
    assert math.log(found.high) - math.log(found.ratio) == pytest.approx(math.log(found.ratio) - math.log(found.low))
    assert (found.low, found.high) == pytest.approx((0.8100008570972211, 2.1393078454722456), rel=1e-9)


TIMES = st.lists(st.floats(1.0, 1e4), min_size=2, max_size=12)


@given(TIMES, TIMES)
def test_the_other_way_round_the_ratio_is_the_inverse(a: list[float], b: list[float]) -> None:
    one, other = time_ratio(a, b), time_ratio(b, a)
    assert one.ratio * other.ratio == pytest.approx(1.0)
    if one.low > 1e-200 and one.high < 1e200:
        assert one.low * other.high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("interval", "tolerance", "expected"),
    [
        ((0.95, 1.05), 0.0, "not distinguishable"),
        ((1.01, 1.05), 0.0, "slower"),
        ((1.01, 1.05), 2.0, "not distinguishable"),
        ((0.90, 0.99), 0.0, "faster"),
    ],
)
def test_verdicts(interval: tuple[float, float], tolerance: float, expected: str) -> None:
    assert verdict(TimeRatio(1.0, *interval), tolerance) == expected


def runs(folder: Path, factor: float) -> Path:
    """Five runs that take between 6 and 7 s, times ``factor``."""
    return results(folder, 5, lambda n: our_run(seed=n, start_ms=10**12 + n * 10**5, epoch_s=(2 + 0.05 * n) * factor))


def test_slower_faster_and_not_distinguishable_are_one_line_and_an_exit_code(tmp_path: Path) -> None:
    before, after, slow = (runs(tmp_path / str(factor), factor) for factor in (1.0, 1.01, 1.5))
    alike = mlhpc("compare", before, after)
    assert (alike.returncode, alike.stdout.count("\n")) == (0, 1), alike.stderr
    assert alike.stdout.startswith("cosmoflow smoke strong: B takes 1.0")
    assert alike.stdout.endswith(": not distinguishable\n")
    slower = mlhpc("compare", before, slow)
    assert (slower.returncode, slower.stdout.endswith(": slower\n")) == (1, True)
    assert mlhpc("compare", before, slow, "--tolerance", 80).returncode == 0
    faster = mlhpc("compare", slow, before)
    assert (faster.returncode, faster.stdout.endswith(": faster\n")) == (0, True)


def test_a_side_that_is_not_compliant_is_named(tmp_path: Path) -> None:
    before, after = (runs(tmp_path / name, 1.0) for name in ("before", "after"))
    (after / "result_2.txt").write_bytes((after / "result_1.txt").read_bytes())  # a copy
    said = mlhpc("compare", before, after).stdout
    assert "B is NOT compliant" in said
    assert "A is NOT" not in said


def test_what_is_not_a_score_is_not_compared(tmp_path: Path) -> None:
    done = mlhpc("compare", runs(tmp_path / "a", 1.0), our_runs(tmp_path / "b", 3))
    assert done.returncode == 1
    assert "B is not a score: 3 of 5 runs" in done.stdout


def test_sizes_are_never_compared(tmp_path: Path) -> None:
    mini = write(tmp_path / "b" / "result_0.txt", our_run("mini", values=(0.3, 0.25)))
    done = mlhpc("compare", runs(tmp_path / "a", 1.0), mini.parent)
    assert done.returncode == 2
    assert "nothing in common" in done.stderr
    assert "cosmoflow mini strong" in done.stderr


def test_two_results_of_one_kind_ask_for_a_choice(tmp_path: Path) -> None:
    a = runs(tmp_path / "a", 1.0)
    for name in ("one", "two"):
        runs(tmp_path / "b" / name, 1.0)
    done = mlhpc("compare", a, tmp_path / "b")
    assert done.returncode == 2
    assert "2 results of cosmoflow smoke strong; choose one of" in done.stderr


@pytest.mark.parametrize("tolerance", ["nan", "inf"])
def test_a_tolerance_is_a_number_so_that_no_gate_is_switched_off(tmp_path: Path, tolerance: str) -> None:
    a = runs(tmp_path / "a", 1.0)
    done = mlhpc("compare", a, a, "--tolerance", tolerance)
    assert (done.returncode, "expected a number of percent" in done.stderr) == (2, True)


def test_unlike_rounds_are_said(tmp_path: Path) -> None:
    def package(round_: str) -> Path:
        folder = tmp_path / f"hpc_results_{round_}" / "ACME"
        (folder / "systems").mkdir(parents=True)
        results(
            folder / "results" / "bed" / "strong" / "cosmoflow", 10, lambda n: hpc_run(seed=n + 1, epoch_s=5 + n / 10)
        )
        return folder

    done = mlhpc("compare", package("v3.0"), package("v2.0"))
    reason = "unlike rules: v3.0 (staging before run_start does not count) and v1.0 and v2.0 (staging counts)"
    assert f": not distinguishable; {reason}" in done.stdout
