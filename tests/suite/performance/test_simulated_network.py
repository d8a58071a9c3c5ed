"""The simulator equals the closed forms where nothing contends, and the paper's rows have the errors that the docs state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tutel_paper import paper_rows
from mlhpc.suite.performance.cost_model import (
    AZURE_NDV4,
    LayerShape,
    Network,
    list_valid_r,
    predict_all_to_all,
    predict_layer_time_s,
)
from tests.fixtures.simulated_network import simulated_all_to_all, simulated_layer_s
from tests.fixtures.sweeps import MACHINE


@settings(max_examples=60)
@given(
    st.sampled_from([(1, 4), (2, 2), (3, 2), (2, 4), (4, 1), (8, 8), (5, 3)]),
    st.floats(1.0, 1e9),
    st.sampled_from(["linear", "2dh"]),
    st.floats(1e-7, 1e-3),
    st.floats(1e7, 1e12),
    st.floats(1.0, 1e8),
)
def test_equal_messages_take_as_long_as_the_closed_form_says(
    grid: tuple[int, int], size: float, algorithm: Any, latency: float, bandwidth: float, rendezvous_from: float
) -> None:
    nodes, per_node = grid
    ranks = nodes * per_node
    network = replace(
        MACHINE,
        ranks_per_node=per_node,
        inter_latency_s=latency,
        inter_bandwidth=bandwidth,
        congestion=0.2,
        two_level_congestion=0.1,
        congestion_from=4,
        rendezvous_from=rendezvous_from,
        rendezvous_s=7e-6,
    )
    done = simulated_all_to_all(network, np.zeros(ranks), np.full((ranks, ranks), size / ranks), algorithm)
    assert done == pytest.approx(np.full(ranks, predict_all_to_all(network, ranks, size, algorithm).total_s), rel=1e-9)


@pytest.mark.parametrize(("experts", "ranks"), [(2, 8), (8, 8), (16, 8), (1, 4), (4, 16), (8, 2)])
@pytest.mark.parametrize("tokens", [16, 100_000])
def test_a_balanced_layer_takes_as_long_as_the_closed_form_says(experts: int, ranks: int, tokens: int) -> None:
    shape = LayerShape(tokens, 256, 1024, experts, 1)
    for r in list_valid_r(experts, ranks):
        for degree in (1, 2, 4):
            for algorithm in ("linear", "2dh"):
                how = {"r": r, "degree": degree, "algorithm": algorithm}
                closed = predict_layer_time_s(shape, MACHINE, ranks, 1e13, **how)
                assert simulated_layer_s(shape, MACHINE, ranks, 1e13, **how) == pytest.approx(closed, rel=1e-9), how


def test_a_hot_expert_holds_everybody_up() -> None:
    shape = LayerShape(4096, 256, 1024, 8, 1)
    even = simulated_layer_s(shape, MACHINE, 8, 1e13, r=1, degree=2, algorithm="linear")
    load = np.array([0.3, *[0.1] * 7])
    uneven = simulated_layer_s(shape, MACHINE, 8, 1e13, r=1, degree=2, algorithm="linear", load_E=load)
    assert 1.8 * even < uneven <= 2.4 * even  # the hot rank receives and computes 2.4 times the mean
    gathered = simulated_layer_s(shape, MACHINE, 8, 1e13, r=0, degree=1, algorithm="linear", load_E=load)
    assert gathered == simulated_layer_s(shape, MACHINE, 8, 1e13, r=0, degree=1, algorithm="linear")  # no token moves


def test_a_rank_that_begins_late_is_waited_for() -> None:
    begin = np.array([0.0, 0.0, 1.0, 0.0])
    done = simulated_all_to_all(replace(MACHINE, ranks_per_node=2), begin, np.full((4, 4), 1e3), "linear")
    assert done.min() > 1.0


def test_the_crossover_of_2dh() -> None:
    """At many ranks small messages cost their number: 2DH wins up to a size; on few nodes it does not."""

    def crossover_bytes(network: Network, ranks: int) -> float | None:
        wins = [
            size
            for size in np.geomspace(16.0, 2.0**34, 400)
            if predict_all_to_all(network, ranks, size, "2dh").total_s
            < predict_all_to_all(network, ranks, size, "linear").total_s
        ]
        return max(wins, default=None)

    assert crossover_bytes(AZURE_NDV4, 2048) > 2**28
    assert crossover_bytes(replace(MACHINE, two_level_latency_s=MACHINE.inter_latency_s), 4) is None
    few, many = (crossover_bytes(MACHINE, ranks) for ranks in (64, 1024))
    assert few is not None
    assert many is not None
    assert few < many
    before, after = (
        [predict_all_to_all(MACHINE, 64, few * factor, name).total_s for name in ("linear", "2dh")]
        for factor in (0.9, 1.1)
    )
    assert before[0] > before[1]
    assert after[0] < after[1]


def test_the_papers_rows() -> None:
    """docs/moe.md states these errors."""
    rows = paper_rows()
    for row in rows:
        if row.error is not None and row.kind in ("FIT", "PRED"):
            assert abs(row.error) <= 0.085, row
    gains = {row.claim: row.model for row in rows}
    assert gains["2DH at 256 MiB, 64 GPUs [x]"] < 1 < gains["2DH at 256 MiB, 256 GPUs [x]"]
    assert gains["degree 16 against 8 on that layer [x]"] < 1
    assert [gains[f"Fig. 12, Large: r at k f = {load}"] for load in (16, 4, 1)] == [1, 2, 4]
    assert {row.kind for row in rows} == {"FIT", "PRED", "MISMATCH", "OPEN"}
