"""The integral of readings: closed values, the published function beside ours, coverage of the intervals."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.log.energy.power_log import (
    PHASE_LOCK_LIMIT,
    build_curve,
    compute_sampling_halfwidth_j,
    estimate_resolution_w,
    measure_phase_lock,
    read_power_log,
)
from tests.fixtures.power import START_S, line, power_log

Official = Callable[[Path, float], float]


@pytest.fixture(scope="module")
def official() -> Official:
    """MLCommons' function, on the events that its own parser finds."""
    parser = pytest.importorskip("mlperf_logging.compliance_checker.mlp_parser")
    summarizer = pytest.importorskip("mlperf_logging.result_summarizer.result_summarizer")

    def value(path: Path, time_ms: float) -> float:
        lines: Any = parser.parse_file(str(path), ruleset="5.0.0")[0]
        function = summarizer._compute_power_sw if path.name.startswith("sw") else summarizer._compute_power_node
        return float(function(lines, time_ms))

    return value


def test_the_published_function_and_ours_have_the_closed_value(tmp_path: Path, official: Official) -> None:
    path = power_log(tmp_path / "node_0.txt", [1000] * 600)
    assert official(path, 600_000) == pytest.approx(600_000, rel=1e-12)
    assert build_curve(read_power_log(path)).between(START_S, START_S + 600) == pytest.approx(600_000, rel=1e-12)


def test_a_switch_that_is_estimated(tmp_path: Path, official: Official) -> None:
    path = tmp_path / "sw_0.txt"
    path.write_text(line("conversion_eff", 0.9, 0) + "\n" + line("interconnect_power_est", 16100, 0) + "\n")
    log = read_power_log(path)
    assert (log.efficiency, log.estimate_w) == (0.9, 16100)
    assert official(path, 318_000) == pytest.approx(0.9 * 16100 * 318)


def test_where_the_published_function_divides_by_zero_ours_has_a_value(tmp_path: Path, official: Official) -> None:
    path = power_log(tmp_path / "node_0.txt", [700] * 20, stop=False)
    path.write_text(path.read_text() + line("power_measurement_stop", None, START_S) + "\n")
    with pytest.raises(ZeroDivisionError):
        official(path, 1e4)
    assert build_curve(read_power_log(path)).between(START_S + 5, START_S + 15) == pytest.approx(7000)


def test_only_the_run_counts_and_nothing_is_extrapolated(tmp_path: Path) -> None:
    idle, busy = [100.0] * 50, [1000.0] * 100
    line_ = build_curve(read_power_log(power_log(tmp_path / "node_0.txt", [*idle, *busy, *idle])))
    assert line_.between(START_S + 50, START_S + 150) == pytest.approx(100_000)
    assert line_.between(START_S + 49.5, START_S + 50.5) == pytest.approx(550)
    assert line_.uncovered_s(START_S - 10, START_S + 250) == pytest.approx(60)
    assert line_.between(START_S - 10, START_S + 250) == pytest.approx(110_000)
    assert line_.largest_gap_s(START_S + 5.5, START_S + 9) == pytest.approx(1)
    assert line_.largest_gap_s(START_S + 100, START_S + 260) == pytest.approx(60)


def square_wave(source: random.Random, seconds: float, jitter: float) -> tuple[list[float], list[float], float]:
    """A load of 10 Hz between 400 and 1200 W whose half periods vary by ``jitter``: edges, cumulated joules, mean joules."""
    edges, joules, high = [0.0], [0.0], source.random() < 0.5
    at = -source.uniform(0, 0.1)
    while at < seconds:
        until = at + max(0.05 * (1 + jitter * source.gauss(0, 1)), 0.005)
        if until > 0:
            joules.append(joules[-1] + (until - edges[-1]) * (1200.0 if high else 400.0))
            edges.append(until)
        at, high = until, not high
    return edges, joules, 0.0


def cumulated(edges: Sequence[float], joules: Sequence[float], at: float) -> float:
    from bisect import bisect_right

    index = min(bisect_right(edges, at), len(edges) - 1)
    share = (at - edges[index - 1]) / (edges[index] - edges[index - 1])
    return joules[index - 1] + share * (joules[index] - joules[index - 1])


def covered(seed: int, *, duty: float | None, seconds: float = 120.0) -> bool:
    """Whether the interval of one simulated run holds its true energy. ``duty`` None: readings of a moment, at random phase."""
    source = random.Random(seed)
    edges, joules, _ = square_wave(source, seconds + 2, 0.1)
    readings, before, phase = [], 0.0, source.uniform(0, 0.1)
    for second in range(int(seconds)):
        at = second + source.random() if duty is None else second + 1.0
        if duty is None:
            watts = (cumulated(edges, joules, at + 1e-6) - cumulated(edges, joules, at)) / 1e-6
        else:  # the board looks 25 of every 100 ms; the reading is the last such look before it
            look = math.floor((at - phase) / 0.1) * 0.1 + phase
            low = max(look - duty * 0.1, 0.0)
            watts = (cumulated(edges, joules, look) - cumulated(edges, joules, low)) / (look - low)
        readings.append((at - before, watts))
        before = at
    energy = math.fsum(seconds_ * watts for seconds_, watts in readings)
    half = compute_sampling_halfwidth_j(readings, duty=duty or 1.0, most_w=max(watts for _, watts in readings))
    return abs(energy - cumulated(edges, joules, before)) <= half


@pytest.mark.parametrize("duty", [None, 0.25])
def test_the_interval_holds_the_truth(duty: float | None) -> None:
    held = sum(covered(seed, duty=duty) for seed in range(120))
    assert 104 <= held <= 120  # 1,000 of each are in benchmarks/results


def test_a_meter_that_counts_joules_misses_nothing_between_its_readings() -> None:
    assert compute_sampling_halfwidth_j([(1.0, 5.0), (1.0, 500.0)], integrates=True) == 0.0
    assert compute_sampling_halfwidth_j([(1.0, 5.0), (1.0, 500.0)]) is None


def test_readings_in_step_may_hide_any_power_up_to_the_most() -> None:
    assert compute_sampling_halfwidth_j([(1.0, 500.0)] * 10, most_w=500.0) == 5000.0
    assert compute_sampling_halfwidth_j([(1.0, 500.0)] * 10, most_w=1600.0) == 11_000.0


def test_readings_in_step_have_no_interval_if_nothing_limits_the_power() -> None:
    assert compute_sampling_halfwidth_j([(1.0, 500.0)] * 10) is None
    assert compute_sampling_halfwidth_j([(step, 500.0) for step in jittered(100)]) is not None


def jittered(count: int, seed: int = 1) -> list[float]:
    source = random.Random(seed)
    return [0.9 * source.uniform(0.5, 1.5) for _ in range(count)]


def test_equal_steps_marks_of_a_clock_and_two_steps_by_turns_are_in_step_and_random_steps_are_not() -> None:
    source = random.Random(2)
    marks = [second + 0.05 * source.random() for second in range(301)]
    assert measure_phase_lock([1.0] * 300) == pytest.approx(1.0)
    assert measure_phase_lock([b - a for a, b in pairwise(marks)]) > PHASE_LOCK_LIMIT
    assert measure_phase_lock([0.8, 1.0] * 150) > PHASE_LOCK_LIMIT
    assert max(measure_phase_lock(jittered(300, seed)) for seed in range(10)) < PHASE_LOCK_LIMIT


def test_a_gap_and_a_power_that_few_readings_would_miss_widen_the_interval() -> None:
    steady = [(step, 500.0) for step in jittered(200)]
    rated = compute_sampling_halfwidth_j(steady, most_w=1500.0)
    seconds = math.fsum(step for step, _ in steady)
    assert 3 / 200 * 1000 * seconds <= rated <= 3 * 3 / 200 * 1000 * seconds
    with_gap = compute_sampling_halfwidth_j([*steady[:100], (20.0, 500.0), *steady[100:]], most_w=1500.0)
    assert with_gap >= rated + 20.0 * 1000


def test_the_last_reading_inside_counts_to_the_end_of_the_run(tmp_path: Path) -> None:
    path = power_log(tmp_path / "node_0.txt", [100.0] * 5 + [1000.0] * 60 + [100.0] * 5)
    line_ = build_curve(read_power_log(path))
    start, stop = START_S + 5.0, START_S + 65.5
    assert sum(s * w for s, w in line_.within(start, stop, hold=True)) == pytest.approx(60_500)
    assert sum(s * w for s, w in line_.within(start, stop)) == pytest.approx(60_050)
    assert list(line_.cut_intervals(start, stop)) == [(pytest.approx(0.5), pytest.approx(1.0), 100.0, 1000.0)]


def test_a_clock_that_may_be_wrong_costs_the_energy_at_both_ends(tmp_path: Path) -> None:
    line_ = build_curve(read_power_log(power_log(tmp_path / "node_0.txt", [1000.0] * 100)))
    assert line_.clock_error_j(START_S + 20, START_S + 80, 0.5) == pytest.approx(1000.0)
    assert line_.clock_error_j(START_S + 20, START_S + 80, 0.0) == 0.0


@pytest.mark.parametrize(
    ("watts", "unit"),
    [([700.0, 720.0], 10.0), ([700.0, 721.0], 1.0), ([0.5, 0.7], 0.1), ([700.123, 1.0], 0.0), ([700.0, 700.0], 0.0)],
)
def test_the_resolution_is_the_power_of_ten_of_which_all_readings_are_multiples(
    watts: list[float], unit: float
) -> None:
    assert estimate_resolution_w(watts) == pytest.approx(unit)
