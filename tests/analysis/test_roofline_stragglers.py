"""The slow rank is named by the smallest wait, and healthy jitter names nobody."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.stragglers import RankTimes, Straggling, largest_of, straggling


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 0.5642), (4, 1.0294), (16, 1.7660), (1000, 3.2414)])
def test_the_expected_maximum_of_normals_is_the_tabulated_one(count: int, expected: float) -> None:
    assert largest_of(count) == pytest.approx(expected, abs=2e-3)


def job(ranks: int, steps: int, *, jitter: float, slow: float = 0.0, seed: int = 0) -> Straggling:
    """Synchronous training: every step lasts as long as its slowest rank, the others wait. Rank 3 is ``slow``."""
    rng = np.random.default_rng(seed)
    compute_KR = rng.normal(1.0, jitter, (steps, ranks))
    compute_KR[:, 3] *= 1 + slow
    wait_KR = compute_KR.max(axis=1, keepdims=True) - compute_KR + 0.05
    times = [
        RankTimes(
            rank, f"node{rank // 4}", float(compute_KR[:, rank].mean()), float(wait_KR[:, rank].mean()),
            float(compute_KR[:, rank].std(ddof=1)), steps,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = straggling(times, float(compute_KR.max(axis=1).mean()) + 0.05)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_six_percent_slow_is_found_among_sixteen(seed: int) -> None:
    found = job(16, 200, jitter=0.02, slow=0.06, seed=seed)
    assert found.is_slow
    assert found.slow.rank == 3
    assert found.excess_s == pytest.approx(0.06, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_ranks_with_jitter_have_no_culprit(seed: int) -> None:
    found = job(16, 200, jitter=0.02, seed=seed)
    assert not found.is_slow
    assert found.excess_s < 0.005
    assert found.jitter_tax_s == pytest.approx(0.035, abs=0.003)  # which every healthy job of 16 ranks pays


def test_one_rank_waits_for_nobody() -> None:
    assert straggling([RankTimes(0, "a", 1.0, 0.0, 0.1, 10)], 1.0) is None
