"""Comparing two results: the ratio of geometric means with its interval, and an exit code a regression job can use."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.suite.statistics import judge_interval
from mlhpc.suite.statistics.comparison import compute_ratio
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import hpc_run, our_run, our_runs, results, write


def test_the_interval_is_welch_on_log_time() -> None:
    """scipy.stats.ttest_ind(log b, log a, equal_var=False).confidence_interval(), exponentiated."""
    found = compute_ratio([[10, 11, 12, 13]], [[12, 15, 19]])
    a, b = [math.log(x) for x in (10, 11, 12, 13)], [math.log(x) for x in (12, 15, 19)]
    assert found.ratio == pytest.approx(math.exp(sum(b) / 3 - sum(a) / 4))
    assert math.log(found.high) - math.log(found.ratio) == pytest.approx(math.log(found.ratio) - math.log(found.low))
    assert (found.low, found.high) == pytest.approx((0.8100008570972211, 2.1393078454722456), rel=1e-9)


TIMES = st.lists(st.floats(1.0, 1e4), min_size=2, max_size=12)


@given(TIMES, TIMES)
def test_the_other_way_round_the_ratio_is_the_inverse(a: list[float], b: list[float]) -> None:
    one, other = compute_ratio([a], [b]), compute_ratio([b], [a])
    assert one.ratio * other.ratio == pytest.approx(1.0)
    if one.low > 1e-200 and one.high < 1e200:
        assert one.low * other.high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("interval", "tolerance", "expected"),
    [
        ((0.95, 1.05), 0.0, "inconclusive"),
        ((1.01, 1.05), 0.0, "slower"),
        ((1.01, 1.05), 2.0, "inconclusive"),
        ((1.01, 1.05), 5.0, "equivalent"),
        ((0.95, 1.05), 5.0, "equivalent"),
        ((0.95, 1.051), 5.0, "inconclusive"),
        ((1.06, 1.09), 5.0, "slower"),
        ((0.90, 0.99), 0.0, "faster"),
        ((0.90, 0.99), 5.0, "faster"),
        ((0.0, math.inf), 50.0, "inconclusive"),
    ],
)
def test_verdicts(interval: tuple[float, float], tolerance: float, expected: str) -> None:
    assert judge_interval(*interval, tolerance / 100) == expected


def runs(folder: Path, factor: float) -> Path:
    """Five runs that take between 6 and 7 s, times ``factor``, without a trend."""
    return results(
        folder,
        5,
        lambda n: our_run(
            seed=n, start_ms=1_780_000_000_000 + n * 10**5, epoch_s=(2 + 0.05 * (1, 2, 4, 0, 3)[n]) * factor
        ),
    )


def test_slower_faster_equivalent_and_inconclusive_are_one_line_and_an_exit_code(tmp_path: Path) -> None:
    before, after, slow = (runs(tmp_path / str(factor), factor) for factor in (1.0, 1.01, 1.5))
    alike = mlhpc("compare", before, after)
    assert (alike.returncode, alike.stdout.count("\n")) == (4, 1), alike.stderr
    assert alike.stdout.startswith(f"cosmoflow smoke strong: {after} (B) takes 1.0")
    power = r"[\d.]+ % would have been seen in 8 of 10 cases of normal noise"
    power += r"; about \d+ runs each \(\d+ to \d+\) would show 5 % in 8 of 10 cases of normal noise"
    assert re.search(rf": inconclusive; {power}\n$", alike.stdout)
    slower = mlhpc("compare", before, slow)
    assert slower.returncode == 1
    assert ": slower; assumes that runs do not depend on each other" in slower.stdout
    within = mlhpc("compare", before, slow, "--tolerance", 80)
    assert (within.returncode, ": equivalent within 80 %; assumes" in within.stdout) == (0, True)
    faster = mlhpc("compare", slow, before)
    assert (faster.returncode, ": faster; assumes" in faster.stdout) == (0, True)


def test_a_copy_is_called_one(tmp_path: Path) -> None:
    before, after = (runs(tmp_path / name, 1.0) for name in ("before", "after"))
    done = mlhpc("compare", before, after)
    copy = "5 of 5 runs of B are runs of A: a result and its copy say nothing of each other"
    assert done.returncode == 4
    assert f"inconclusive; {copy}" in done.stdout


def test_a_side_that_is_not_compliant_is_named_and_is_no_score(tmp_path: Path) -> None:
    before, after = (runs(tmp_path / name, 1.0) for name in ("before", "after"))
    (after / "result_2.txt").write_bytes((after / "result_1.txt").read_bytes())  # a copy
    done = mlhpc("compare", before, after)
    assert done.returncode == 3
    assert f"{after} (B) takes 0.99" in done.stdout, "the ratio is said all the same"
    assert "B is NOT compliant (seed-distinct, run-copied)" in done.stdout
    assert "A is NOT" not in done.stdout
    assert mlhpc("compare", before, after, "--any").returncode == 4


def test_what_is_not_a_score_is_compared_only_when_asked(tmp_path: Path) -> None:
    whole, few = runs(tmp_path / "a", 1.0), our_runs(tmp_path / "b", 3)
    done = mlhpc("compare", whole, few)
    assert done.returncode == 3
    assert "inconclusive; B is not a score: 3 of the 5 required runs complete" in done.stdout
    assert "times as long" not in done.stdout
    asked = mlhpc("compare", whole, few, "--any")
    assert asked.returncode in {0, 1, 4}
    assert "(3 runs and 5 runs, " in asked.stdout
    assert "no score" in asked.stdout


def test_one_run_has_no_spread_so_nothing_is_told_of_it(tmp_path: Path) -> None:
    done = mlhpc("compare", runs(tmp_path / "a", 1.0), our_runs(tmp_path / "b", 1), "--any", "--tolerance", 50)
    assert done.returncode == 4
    assert "no interval" in done.stdout
    assert "B has one run, which has no spread" in done.stdout


def test_runs_that_never_converged_are_no_score_even_when_asked(tmp_path: Path) -> None:
    failed = results(
        tmp_path / "b", 5, lambda n: our_run(seed=n, values=(0.9,), start_ms=1_780_000_000_000 + n * 10**5)
    )
    assert mlhpc("compare", runs(tmp_path / "a", 1.0), failed, "--any").returncode == 3


def test_many_results_are_compared_with_one_baseline_at_one_level(tmp_path: Path) -> None:
    before, after, slow = (runs(tmp_path / str(factor), factor) for factor in (1.0, 1.01, 1.5))
    done = mlhpc("compare", before, after, slow, "--format", "json")
    assert done.returncode == 1, "slower is the most urgent"
    told = json.loads(done.stdout)
    assert [row["verdict"] for row in told["comparisons"]] == ["inconclusive", "slower"]
    assert [row["b"] for row in told["comparisons"]] == [str(after), str(slow)]
    assert told["confidence"] == pytest.approx(1 - 0.05 / 2)
    alone = json.loads(mlhpc("compare", before, slow, "--format", "json").stdout)["comparisons"][0]
    assert alone["interval"][0] > told["comparisons"][1]["interval"][0], "more results, wider intervals"
    other = mlhpc("compare", before, after, "--baseline", slow)
    assert (other.returncode, other.stdout.count(": faster")) == (0, 2)
    assert str(before) in other.stdout.splitlines()[0]
    assert mlhpc("compare", before, "--baseline", slow).returncode == 0
    assert mlhpc("compare", before).returncode == 2


def test_json_has_no_number_that_json_does_not_know(tmp_path: Path) -> None:
    done = mlhpc("compare", runs(tmp_path / "a", 1.0), our_runs(tmp_path / "b", 1), "--any", "--format", "json")
    (row,) = json.loads(done.stdout, parse_constant=pytest.fail)["comparisons"]
    assert (row["interval"], row["verdict"]) == (None, "inconclusive")


def _differs(a: list[float], b: list[float]) -> bool:
    found = compute_ratio([a], [b], 1 - 0.05 / 4)
    return judge_interval(found.low, found.high) in {"slower", "faster"}


@pytest.mark.long
def test_results_of_one_machine_are_called_slower_as_seldom_as_stated() -> None:
    """4 results beside a baseline, all of one law: some interval misses in at most 5 % of 1,000 such commands (2 of them low)."""
    rng = random.Random(5)
    alarms = 0
    for _ in range(1000):
        first, *others = ([math.exp(rng.gauss(0, 0.2)) for _ in range(5)] for _ in range(5))
        alarms += any(_differs(first, other) for other in others)
    assert 10 <= alarms <= 70


def test_sizes_are_never_compared(tmp_path: Path) -> None:
    mini = write(tmp_path / "b" / "result_0.txt", our_run("mini", values=(0.3, 0.25)))
    done = mlhpc("compare", runs(tmp_path / "a", 1.0), mini.parent)
    assert done.returncode == 2
    assert "have no benchmark and size in common" in done.stderr
    assert "cosmoflow mini strong" in done.stderr


def test_two_results_of_one_kind_ask_for_a_choice(tmp_path: Path) -> None:
    a = runs(tmp_path / "a", 1.0)
    for name in ("one", "two"):
        runs(tmp_path / "b" / name, 1.0)
    done = mlhpc("compare", a, tmp_path / "b")
    assert done.returncode == 2
    assert "has 2 results of cosmoflow smoke strong; give one of them: " in done.stderr


@pytest.mark.parametrize("tolerance", ["nan", "inf"])
def test_a_tolerance_is_a_number_so_that_no_gate_is_switched_off(tmp_path: Path, tolerance: str) -> None:
    a = runs(tmp_path / "a", 1.0)
    done = mlhpc("compare", a, a, "--tolerance", tolerance)
    assert (done.returncode, "is not a finite number" in done.stderr) == (2, True)


def test_unlike_rounds_are_said(tmp_path: Path) -> None:
    def package(round_: str) -> Path:
        folder = tmp_path / f"hpc_results_{round_}" / "ACME"
        (folder / "systems").mkdir(parents=True)
        results(
            folder / "results" / "bed" / "strong" / "cosmoflow", 10, lambda n: hpc_run(seed=n + 1, epoch_s=5 + n / 10)
        )
        return folder

    done = mlhpc("compare", package("v3.0"), package("v2.0"), "--any")
    reason = "unlike rules: v3.0 (staging before run_start does not count) and v1.0 and v2.0 (staging counts)"
    assert f": inconclusive; {reason}" in done.stdout
    assert done.returncode == 4
