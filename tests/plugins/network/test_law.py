"""The matrices of the fit are the closed forms; a switch of protocols and congestion are found where they are, and only there."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlhpc.plugins.network.law import POSITIVE, Form, Law, Points, fit_law
from mlhpc.plugins.network.sweep import KIB, Measurement, Sweep
from mlhpc.suite.performance.cost_model import ALGORITHMS, Algorithm, Network, predict_all_to_all

MACHINE = Network(
    ranks_per_node=4,
    inter_latency_s=4e-6,
    inter_bandwidth=5e9,
    intra_latency_s=1e-6,
    intra_bandwidth=40e9,
    memory_bandwidth=400e9,
    launch_s=10e-6,
    two_level_latency_s=3e-6,
)
GRIDS = (2, 4, 8, 16, 32, 64, 128)
SIZES = tuple(KIB * 2**i for i in range(16))


def measured(network: Network, noise: float = 0.0, seed: int = 0, slow: dict[int, float] | None = None) -> Sweep:
    """A sweep of a machine; on the grids ``slow`` large all-to-alls take longer by a factor."""
    random = np.random.default_rng(seed)
    rows = []
    for ranks in GRIDS:
        own = replace(network, ranks_per_node=min(ranks, network.ranks_per_node))
        for size in SIZES:
            for name in ALGORITHMS if ranks > own.ranks_per_node else ALGORITHMS[:1]:
                time = predict_all_to_all(own, ranks, size, name)
                seconds = time.latency_s + time.streaming_s * (slow or {}).get(ranks, 1.0)
                seconds *= math.exp(noise * random.standard_normal())
                rows.append(Measurement(ranks, own.ranks_per_node, name, size, seconds, seconds, seconds, 5))
    return Sweep("s", "s", GRIDS[-1], 4, network.memory_bandwidth, tuple(rows), ())


def fitted(sweep: Sweep) -> Network:
    return fit_law(sweep, sweep.measurements).network


@settings(max_examples=200)
@given(
    st.sampled_from([(2, 4), (4, 4), (16, 4), (64, 8), (48, 8), (6, 1), (24, 3)]),
    st.floats(16.0, 1e9),
    st.sampled_from(ALGORITHMS),
    st.lists(st.floats(-3.0, 3.0), min_size=8, max_size=8),
    st.floats(16.0, 1e6),
)
def test_the_matrices_are_the_closed_forms(
    grid: tuple[int, int], size: float, algorithm: Algorithm, logs: list[float], rendezvous_from: float
) -> None:
    ranks, per_node = grid
    local = min(ranks, per_node)
    if algorithm == "2dh" and ranks <= per_node:
        return
    form = Form(per_node, 4e11, 8, rendezvous_from, ALGORITHMS)
    scales = np.array([1e-5, 1e-6, 1e-10, 1e-6, 1e-10, 1e-6, 1e-6, 1e-11, 1e-11])
    values = scales * np.exp([*logs, 0.0])
    law = Law(form, values, np.zeros((9, 9)), 1.0, 1)
    at = Points.of([(ranks, local, size, algorithm)])
    closed = predict_all_to_all(replace(law.network, ranks_per_node=local), ranks, size, algorithm).total_s
    assert law.seconds(at)[0] == pytest.approx(closed, rel=1e-9)
    for i in range(len(values)):  # slopes are by logarithms, of optional parameters by their units
        step = 1e-6 * (values[i] if i < len(POSITIVE) else 1e-6 if i == len(POSITIVE) else 1e-10)
        up, down = (replace(law, values_P=values + sign * step * np.eye(9)[i]).seconds(at)[0] for sign in (1, -1))
        assert law.slopes(at)[0, i] == pytest.approx((math.log(up) - math.log(down)) / 2e-6, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("switch", [4 * KIB, 16 * KIB, 64 * KIB])
@pytest.mark.parametrize("seconds", [3e-6, 12e-6])
def test_a_switch_of_protocols_is_found(switch: float, seconds: float) -> None:
    found = fitted(measured(replace(MACHINE, rendezvous_from=switch, rendezvous_s=seconds), noise=0.03))
    assert found.rendezvous_from == switch
    assert found.rendezvous_s == pytest.approx(seconds, rel=0.3)
    assert found.inter_latency_s == pytest.approx(MACHINE.inter_latency_s, rel=0.1)


def test_noise_is_neither_a_switch_nor_congestion() -> None:
    found = [fitted(measured(MACHINE, noise=0.1, seed=seed)) for seed in range(40)]
    assert sum(network.rendezvous_s != 0 for network in found) <= 2  # a level of 1 % over all sizes
    assert sum(network.congestion != 0 or network.two_level_congestion != 0 for network in found) <= 2


@pytest.mark.parametrize("seed", range(12))
def test_no_data_make_a_law_that_takes_less_than_no_time_on_more_ranks(seed: int) -> None:
    """Where large messages are the faster ones, the time of a message stays positive."""
    random = np.random.default_rng(seed)
    plain = measured(MACHINE)
    noise = 0.0 if seed == 0 else 1.5
    rows = tuple(replace(m, seconds=1e-3 * math.exp(noise * random.standard_normal())) for m in plain.measurements)
    law = fit_law(replace(plain, measurements=rows), rows)
    far = Points.of([(n, 4, size, name) for n in (256, 512, 4096) for size in SIZES for name in ALGORITHMS])
    assert (law.seconds(far) > 0).all()
    assert np.isfinite(law.slopes(far)).all()


@pytest.mark.parametrize("onset", [16, 32])
def test_congestion_that_two_grids_agree_on_is_found_for_both_algorithms(onset: int) -> None:
    truth = replace(MACHINE, congestion=0.25, two_level_congestion=0.15, congestion_from=onset)
    found = fitted(measured(truth, noise=0.03))
    assert found.congestion_from == onset
    assert found.congestion == pytest.approx(0.25, rel=0.2)
    assert found.two_level_congestion == pytest.approx(0.15, rel=0.25)


def test_congestion_of_2dh_alone_is_not_said_of_the_linear_one() -> None:
    found = fitted(measured(replace(MACHINE, two_level_congestion=0.2, congestion_from=16), noise=0.03))
    assert found.congestion == 0
    assert found.two_level_congestion == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("slow", [{128: 1.5}, {32: 1.5}, {64: 1.5}, {16: 1.4, 64: 1.4}, {64: 1.8, 128: 1.2}, {8: 1.5}])
def test_slow_grids_that_contradict_a_growth_with_the_ranks_are_not_congestion(slow: dict[int, float]) -> None:
    found = fitted(measured(MACHINE, noise=0.03, slow=slow))
    assert (found.congestion, found.two_level_congestion) == (0, 0)
