"""Spread of runs and efficiencies on cases with known answers."""

from __future__ import annotations

import math
import statistics
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.verdict_rates import SESSION_TRUTHS, TRUTHS, count_different, draw_sessions, is_different, judge
from mlhpc.analysis.results.decompose import compute_run_spread
from mlhpc.analysis.results.selection import make_timed_runs
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.comparison import (
    Comparison,
    compare_times,
    compute_ratio,
    holm,
)
from mlhpc.suite.statistics.power import estimate_runs_needed, find_detectable_ratio, find_smallest_effect
from mlhpc.suite.statistics.sessions import (
    SESSION_SPREAD,
    SPREAD_DOF,
    TimedRun,
    describe_order,
    estimate_mean,
    find_sessions,
    render_sessions,
)


def compare(a: list[float], b: list[float], **options: float) -> Comparison | None:
    """Compare runs by turns, so that nothing is a trend."""
    return compare_times(
        [(2.0 * place, time) for place, time in enumerate(a)],
        [(2.0 * place + 1.0, time) for place, time in enumerate(b)],
        **options,
    )


def test_the_variance_of_log_time_is_the_sum_of_its_parts() -> None:
    epochs, tau = pd.Series([10.0, 12.0, 9.0, 15.0]), pd.Series([3.0, 2.9, 3.2, 2.8])
    spread = compute_run_spread(epochs, tau)
    assert spread is not None
    total = sum((spread.variance_epochs, spread.variance_epoch_time, spread.covariance_twice))
    logs = [math.log(e * t) for e, t in zip(epochs, tau, strict=True)]
    assert total == pytest.approx(pd.Series(logs).var(ddof=1))


def test_spread_that_is_all_convergence_points_along_epochs() -> None:
    spread = compute_run_spread(pd.Series([10.0, 20.0, 40.0]), pd.Series([3.0, 3.0, 3.0]))
    assert spread is not None
    assert spread.along_epochs == pytest.approx(1.0)
    assert spread.axis_1_share == pytest.approx(1.0)
    assert math.isnan(spread.correlation)


def test_one_run_has_no_spread() -> None:
    assert compute_run_spread(pd.Series([10.0]), pd.Series([3.0])) is None


def test_welch_on_log_time_as_scipy_has_it() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = [10.0, 11.5, 9.7, 12.0, 10.4], [13.0, 12.1, 14.9, 13.3, 12.8]
    found = compare(a, b)
    assert found is not None
    theirs = stats.ttest_ind([math.log(t) for t in b], [math.log(t) for t in a], equal_var=False)
    interval = theirs.confidence_interval()
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)), rel=1e-9)
    assert found.ratio == pytest.approx(math.exp(sum(map(math.log, b)) / 5 - sum(map(math.log, a)) / 5))


def test_the_permutation_p_counts_every_dealing() -> None:
    found = compare([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])
    assert found is not None
    assert found.p_permutation == pytest.approx(2 / 20)  # this split and its mirror, of 6 over 3
    same = compare([1.0, 3.0], [3.0, 1.0])
    assert same is not None
    assert same.p_permutation == 1.0
    assert same.outcome == Outcome.INCONCLUSIVE


@pytest.mark.parametrize("n", [4, 8, pytest.param(20, marks=pytest.mark.long)])
def test_the_detectable_ratio_is_found_in_four_of_five_trials(n: int) -> None:
    chance = np.random.default_rng(7)
    shift = math.log(find_detectable_ratio(0.1, math.inf, (n, n)))
    hits = 0
    for _ in range(400):
        a, b = np.exp(chance.normal(shift, 0.1, n)), np.exp(chance.normal(0.0, 0.1, n))
        found = compare(list(b), list(a))
        hits += found is not None and found.low > 1.0
    assert 0.74 < hits / 400 < 0.87


def test_a_spread_that_few_runs_know_needs_more_than_one_that_is_known() -> None:
    known, guessed = (find_detectable_ratio(0.1, dof, (5, 5)) for dof in (math.inf, 4.0))
    assert 1.2 < known < guessed < 1.5


@pytest.mark.parametrize("unit", ["runs", "sessions"])
def test_runs_needed_have_a_range_that_holds_them(unit: str) -> None:
    found = estimate_runs_needed(0.05, 8.0, 0.05)
    assert found.runs is not None
    assert found.low < found.runs < (found.high or 0)
    assert (
        found.render(unit)
        == f"about {found.runs} {unit} each ({found.low} to {found.high}) would show 5 % in 8 of 10 cases of normal noise"
    )
    assert "more than 1000 runs each" in estimate_runs_needed(5.0, 4.0, 0.05).render()


def test_the_smallest_effect_is_where_the_share_reaches_eight_of_ten() -> None:
    assert find_smallest_effect(lambda effect: effect, 2.0) == pytest.approx(0.8, rel=0.02)
    assert find_smallest_effect(lambda _: 0.5, 2.0) is None


def test_equal_systems_are_called_different_once_in_twenty() -> None:
    chance = np.random.default_rng(8)
    wrong = 0
    for _ in range(400):
        found = compare(list(np.exp(chance.normal(0, 0.1, 6))), list(np.exp(chance.normal(0, 0.3, 5))))
        wrong += found is not None and found.outcome != Outcome.INCONCLUSIVE
    assert 0.02 < wrong / 400 < 0.09


def test_holm_as_published() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9]) == [0.9]


def test_one_run_or_no_spread_cannot_be_compared() -> None:
    assert compare([1.0], [1.0, 2.0]) is None
    assert compare([1.0, 1.0], [2.0, 2.0]) is None


@pytest.mark.drawn(3)
@pytest.mark.parametrize("truth", [name for name, (_, named) in TRUTHS.items() if named is None])
def test_equal_results_are_called_unequal_as_seldom_as_stated(truth: str) -> None:
    """100 comparisons each: with 5 % wrong, more than 12 are seen once in seven hundred tries."""
    chance = np.random.default_rng(11)
    for sizes in ((3, 10), (5, 5)):
        assert count_different(chance, truth, sizes, 1.0, 100) <= 12, sizes


@pytest.mark.parametrize(("truth", "sizes", "effect"), [
    ("0.01 z", (5, 5), 1.03),
    ("0.01 z", (3, 10), 1.06),
    ("epochs 3, 4, 5", (8, 8), 1.5),
    ("1 in 10 takes twice as long", (5, 5), 4.0),
    ("rounded to 1 %", (5, 5), 1.03),
])  # fmt: skip
def test_a_slower_result_is_found(truth: str, sizes: tuple[int, int], effect: float) -> None:
    assert count_different(np.random.default_rng(12), truth, sizes, effect, 100) >= 70


@pytest.mark.drawn(4)
@pytest.mark.parametrize("truth", [name for name, (*_, named) in SESSION_TRUTHS.items() if named is None])
def test_equal_results_of_several_sessions_are_called_unequal_as_seldom_as_stated(truth: str) -> None:
    chance, (counts, spread, noise, _) = np.random.default_rng(13), SESSION_TRUTHS[truth]
    assert sum(is_different(judge(*draw_sessions(chance, counts, spread, noise))) for _ in range(100)) <= 12


def test_a_result_that_is_slower_in_every_session_is_found() -> None:
    chance, (counts, spread, noise, _) = (
        np.random.default_rng(14),
        SESSION_TRUTHS["3 and 3 sessions of 0.02 z, runs 0.01 z"],
    )
    for _ in range(20):
        a, b = draw_sessions(chance, counts, spread, noise)
        found = compare_times(a, [run._replace(time_s=1.3 * run.time_s) for run in b])
        assert found is not None
        assert (found.by_session, found.sessions_a, found.n_a) == (True, 3, 15)
        assert found.outcome == Outcome.SLOWER


SESSIONS = st.lists(st.lists(st.floats(50.0, 200.0), min_size=2, max_size=4), min_size=1, max_size=4)


@given(SESSIONS, SESSIONS.filter(lambda side: len(side) > 1))
def test_an_interval_by_sessions_is_at_least_that_of_runs_and_at_most_that_of_an_assumed_spread(
    a: list[list[float]], b: list[list[float]]
) -> None:
    from scipy import stats

    found, runs = compute_ratio(a, b), compute_ratio([list(chain(*a))], [list(chain(*b))])
    half, least = (math.log(each.ratio / each.low) for each in (found, runs))
    means = [[statistics.fmean(map(math.log, session)) for session in side] for side in (a, b)]
    dof = SPREAD_DOF + len(a) + len(b) - 2
    squares = sum((mean - statistics.fmean(side)) ** 2 for side in means for mean in side)
    part = (SPREAD_DOF * SESSION_SPREAD**2 + squares) / dof * (1 / len(a) + 1 / len(b))
    error = runs.error.size**2 + part
    both = error**2 / (runs.error.size**4 / runs.error.dof + part**2 / dof)
    assert least - 1e-9 <= half <= max(least, stats.t.ppf(0.975, both) * math.sqrt(error)) + 1e-6
    assert found.ratio == pytest.approx(compute_ratio(b, a).ratio ** -1)
    assert (found.p < 0.05) == (not found.low <= 1.0 <= found.high)


def test_few_sessions_that_differ_do_not_hide_a_result_that_takes_many_times_as_long() -> None:
    a, b = [[100.0, 101.0, 99.0], [108.0, 109.0, 107.0]], [[1600.0, 1610.0, 1590.0]]
    found, unequal = compute_ratio(a, b), compute_ratio(a, [[120.0, 121.0, 119.0]])
    assert found.low > 8.0
    assert found.p < 0.01
    assert unequal.low < 1.0 < unequal.high  # two sessions say little about another one
    assert unequal.high / unequal.low < 1.5  # but not nothing
    alike = compute_ratio([[100.0, 110.0], [110.0, 100.0]], b)
    assert alike.high / alike.low > 1.15  # sessions that are alike by luck


def test_sessions_that_differ_much_are_no_evidence_for_another_result() -> None:
    assert compute_ratio([[100.0, 101.0], [300.0, 301.0]], [[420.0, 421.0]]).low < 1.0
    assert compute_ratio([[100.0] * 5, [400.0] * 5], [[1.0, 2.0]], 1 - 0.05 / 50).low >= 0.0


def make_session(day: float, *times: float) -> list[TimedRun]:
    """Make the runs of a session, one after the other."""
    return [TimedRun(day * 24 * HOUR_S + 1.1 * sum(times[:place]), time) for place, time in enumerate(times)]


def test_what_would_have_been_seen_is_what_an_interval_with_an_assumed_spread_shows() -> None:
    a = make_session(0, 100.0, 101.0, 99.0) + make_session(1, 106.0, 105.0, 107.0)
    for factor in (1.0, 1.1, 1.3, 2.0):
        found = compare_times(a, make_session(2, *(103.0 * factor * each for each in (1.0, 1.01, 0.99))))
        assert found is not None
        assert found.bound is not None
        assert found.unit == "sessions"
        assert found.bound.ratio == pytest.approx(found.ratio / found.low) == pytest.approx(1.195, abs=0.001)
        assert found.bound.ratio < found.detectable < 1.3
        assert (found.outcome == Outcome.SLOWER) == (factor > 1.2), factor
        alone = any(text.startswith("runs alone would say slower; the 2 and 1 sessions") for text in found.doubts)
        assert alone == (1.05 < factor < 1.2)
    alike = compare_times(
        make_session(0, 99.0, 101.0) + make_session(1, 101.0, 99.0),
        make_session(2, 100.0, 102.0) + make_session(3, 102.0, 100.0),
    )
    assert alike is not None
    assert (alike.by_session, alike.unit, alike.counts, alike.bound) == (True, "runs", (4, 4), None)


@pytest.mark.parametrize(("pause_h", "sessions"), [(1.25, 1), (5.0, 2)])
def test_runs_that_do_not_overlap_are_told_apart_in_spite_of_a_pause(pause_h: float, sessions: int) -> None:
    """Published OC20 of v2.0: Selene, with its pause and with one of a session, and HoreKa."""
    selene = make_session(0, 1333.0) + make_session((1333 + HOUR_S * pause_h) / 86400, 1301.0, 1322.0, 1198.0, 1324.0)
    horeka = make_session(30, 1801.0, 1840.0, 1822.0, 1835.0, 1829.0)
    found = compare_times(selene, horeka, same_machine=False)
    assert found is not None
    assert (found.sessions_a, found.sessions_b, found.outcome) == (sessions, 1, Outcome.SLOWER)


def test_one_run_a_day_is_a_session_each_and_the_run_stays_the_unit() -> None:
    times = (100.0, 101.0, 99.0, 100.5, 300.0)
    a, b = ([TimedRun(24 * HOUR_S * (place + first), by * time) for place, time in enumerate(times)]
            for first, by in ((0, 1.0), (5, 1.02)))  # fmt: skip
    daily, beside = compare_times(a, b), compare_times(*([(0.0, run.time_s) for run in runs] for runs in (a, b)))
    assert daily is not None
    assert beside is not None
    assert (daily.sessions_a, beside.sessions_a) == (5, 1)
    assert (daily.low, daily.high, daily.p) == pytest.approx((beside.low, beside.high, beside.p))
    assert daily.doubts == ("run 5 of A takes 2.99 times as long as its others",
                            "run 5 of B takes 2.99 times as long as its others")  # fmt: skip


def test_the_mean_of_two_sessions_that_are_alike_is_known_as_one_of_five_percent() -> None:
    def find_half(*sessions: list[TimedRun]) -> float:
        error = estimate_mean(sessions)[1]
        assert error is not None
        return error.find_half()

    days = [make_session(day, 100.0 * by, 101.0 * by, 99.0 * by) for day, by in enumerate((1.0, 1.004))]
    assert find_half(days[0]) == pytest.approx(0.025, abs=0.001)
    assert find_half(days[0], make_session(1, 108.0, 109.0, 107.0)) == pytest.approx(0.108, abs=0.01)
    assert find_half(*days) < 0.03  # by luck no wider than that of runs
    assert estimate_mean([make_session(0, math.e)]) == (1.0, None)


HOUR_S = 3600.0


@pytest.mark.parametrize(("begins_h", "sessions"), [
    ((0, 0.2, 0.4, 0.6), [4]),
    ((0, 0.2, 40, 40.2, 40.4), [2, 3]),
    ((0, 1.4, 1.6, 1.8), [4]),
    ((0, 2, 4, 6, 8), [5]),  # as long as the pauses are short, however regular
    ((0, 1.5, 6, 7.5, 48, 48.5, 49), [2, 2, 3]),
    ((0, 24, 48, 72), [1, 1, 1, 1]),
])  # fmt: skip
def test_a_long_pause_begins_a_session(begins_h: tuple[float, ...], sessions: list[int]) -> None:
    runs = [TimedRun(HOUR_S * begin, 600.0) for begin in begins_h]
    assert [len(each) for each in find_sessions(runs[::-1])] == sessions


def test_a_new_batch_job_begins_a_session() -> None:
    runs = [TimedRun(700.0 * place, 600.0, job) for place, job in enumerate("7778")]
    assert [len(each) for each in find_sessions(runs)] == [3, 1]
    assert (render_sessions(4, 2), render_sessions(4, 1)) == ("4 runs in 2 sessions", "4 runs")


@pytest.mark.parametrize(("times", "said"), [
    ((600, 601, 599, 600, 1800), "run 5 of A takes 3 times as long as its others"),
    ((284, 296, 291, 285, 334, 377, 363, 346, 358, 365), "runs 5 to 10 of A take 1.24 times as long as 1 to 4"),
    # HoreKa, v2.0, seconds per epoch: two levels and one between them
    ((11.7, 12.3, 12.6, 12.4, 14.0, 15.9, 15.9, 15.2, 15.7, 16.1), "runs 5 to 10 of A take 1.26 times as long as 1 to 4"),
    ((100, 101.1, 101.9, 103.05, 104, 105.1), "times of A grow by 0.99 % from run to run"),
    ((100, 101, 99.5, 100.7, 99.8), None),
    ((100, 100, 100, 100), None),
])  # fmt: skip
def test_an_outlier_a_step_and_a_trend_are_different_things(times: tuple[float, ...], said: str | None) -> None:
    texts = describe_order([TimedRun(place * 1000.0, time) for place, time in enumerate(times)], "A").texts
    assert list(texts) == ([said] if said else [])


@pytest.mark.parametrize(("epochs", "speed", "said"), [
    ((4, 4, 4, 4, 12), 1.0, "run 5 of A takes 3 times as long as its others, most of it by epochs"),
    ((50, 50, 45, 45, 45), 1.0, "runs 3 to 5 of A take 0.9 times as long as 1 to 2, most of it by epochs"),
    ((50, 50, 51, 51, 51), 0.9, "runs 3 to 5 of A take 0.918 times as long as 1 to 2"),  # the machine's
    ((20, 21, 22, 23, 24), 1.0, "times of A grow by 4.66 % from run to run, most of it by epochs"),
])  # fmt: skip
def test_epochs_that_explain_a_difference_of_times_are_named(epochs: Any, speed: float, said: str) -> None:
    noise = (1.0, 1.0001, 0.9999, 1.0001, 0.9999)
    times = [
        100.0 * n * e * (speed if place > 1 else 1.0) for place, (n, e) in enumerate(zip(noise, epochs, strict=True))
    ]
    runs = [TimedRun(1e4 * place, time, "", n) for place, (time, n) in enumerate(zip(times, epochs, strict=True))]
    (text,) = describe_order(runs, "A").texts
    assert text == said


def test_runs_side_by_side_have_no_order() -> None:
    assert describe_order([TimedRun(0.0, 100.0 * 1.01**place) for place in range(8)], "A").texts == ()
    # Piz Daint, v1.0: the first alone, then two and two
    begins, times = (0, 2e3, 2e3, 4e3, 4e3), (1551, 1794, 1781, 2066, 2099)
    assert describe_order([TimedRun(*run) for run in zip(begins, times, strict=True)], "A").texts == ()


def test_the_order_of_independent_runs_is_seldom_called_a_trend() -> None:
    chance = np.random.default_rng(15)
    for n in (5, 10):
        drawn = [
            [TimedRun(2.0 * k, float(np.exp(z))) for k, z in enumerate(chance.normal(0.0, 0.01, n))] for _ in range(400)
        ]
        assert sum(bool(describe_order(runs, "A").texts) for runs in drawn) <= 36, "5 %, and 1 % outliers"


def test_only_a_drift_within_one_session_of_one_machine_widens_the_interval() -> None:
    drifting = [(1000.0 * place, 100.0 * 1.01**place * (1.0 + 0.001 * (place % 3))) for place in range(10)]
    widths = []
    for same_machine in (True, False):
        found = compare_times(drifting[:5], drifting[5:], same_machine=same_machine)
        assert found is not None
        assert any(doubt.startswith("times of A grow by ") for doubt in found.doubts)
        widths.append(math.log(found.high / found.low))
    assert widths[0] > 2 * widths[1]
    assert compare_times(drifting[:5], drifting[5:], same_machine=True).outcome == Outcome.INCONCLUSIVE  # type: ignore[union-attr]


@pytest.mark.parametrize(("a", "b", "said"), [
    ([100.0, 101.0], [110.0, 111.0, 112.0], "A has 2 runs; 3 are needed"),
    ([100.0, 101.0, 102.0], [110.0, 110.0, 110.0], "all 3 runs of B take the same time"),
])  # fmt: skip
def test_too_few_runs_or_no_spread_is_inconclusive(a: list[float], b: list[float], said: str) -> None:
    found = compare(a, b)
    assert found is not None
    assert found.outcome == Outcome.INCONCLUSIVE
    assert any(doubt.startswith(said) for doubt in found.doubts)


def test_no_interval_is_narrower_than_the_resolution_of_the_times() -> None:
    found = compare([100.0, 100.0001, 100.0002], [100.1, 100.1001, 100.1002], resolution_s=1.0)
    assert found is not None
    assert found.outcome == Outcome.INCONCLUSIVE
    assert math.log(found.high / found.low) == pytest.approx(2 * 1.0 / 100.0, rel=1e-3)


def test_the_drift_that_widens_the_interval_is_named_at_its_own_side() -> None:
    noise = [1.0 + 0.001 * (place % 3) for place in range(6)]
    a = [TimedRun(200.0 * place, 100.0 * 1.01**place * each) for place, each in enumerate(noise)]
    b = [TimedRun(2000.0 + 200.0 * place, 106.0 * each) for place, each in enumerate(noise)]
    found = compare_times(a, [*b[:-1], b[-1]._replace(time_s=300.0)])
    assert found is not None
    drift, outlier = found.doubts
    assert drift.startswith("times of A grow by ")
    assert drift.endswith(", and the interval allows for that")
    assert outlier == "run 6 of B takes 2.83 times as long as its others"


def test_runs_of_a_frame_are_divided_by_their_jobs() -> None:
    frame = pd.DataFrame({"run_start_ms": [0.0, 7e5, 14e5], "run_s": [100.0, 121.0, 80.0], "job": [None, None, "8"]})
    assert [len(each) for each in find_sessions(make_timed_runs(frame))] == [2, 1]
