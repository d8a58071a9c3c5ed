"""The slow rank is named by the smallest wait, and healthy jitter names nobody."""

import numpy as np
import pytest

from mlhpc.analysis.figures import stragglers
from mlhpc.suite.performance.stragglers import StragglerTest, find_straggler


def job(ranks: int, blocks: int, *, jitter: float, slow: float = 0.0, seed: int = 0) -> StragglerTest | None:
    """Synchronous training in blocks of 50 steps: every step lasts as long as its slowest rank. Rank 1 is ``slow``."""
    rng = np.random.default_rng(seed)
    own_KSR = rng.normal(1.0, jitter, (blocks, 50, ranks))
    own_KSR[:, :, 1 % ranks] *= 1 + slow
    wait_KSR = own_KSR.max(axis=2, keepdims=True) - own_KSR + 0.05
    return find_straggler(own_KSR.sum(axis=1), wait_KSR.sum(axis=1), np.full(blocks, 50.0))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ranks", [3, 16])
def test_a_rank_six_percent_slow_is_found(ranks: int, seed: int) -> None:
    found = job(ranks, 8, jitter=0.02, slow=0.06, seed=seed)
    assert found.is_slow
    assert found.slow == 1
    assert found.gap_s == pytest.approx(0.06, abs=0.01)
    assert found.waiting_s == pytest.approx(0.06, abs=0.01)
    assert found.excess_s <= found.gap_s


def test_healthy_ranks_have_no_culprit() -> None:
    named = 0
    for seed in range(60):
        found = job(16, 8, jitter=0.02, seed=seed)
        assert found.excess_s < 0.005
        named += found.is_slow
    assert named == 0


def test_one_block_cannot_name_anybody() -> None:
    found = job(2, 1, jitter=0.02, slow=0.5)
    assert found.least_p == 1.0
    assert not found.is_slow


def test_one_rank_waits_for_nobody() -> None:
    assert job(1, 5, jitter=0.1) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (job(3, 8, jitter=0.02, slow=0.06), "rank 1 is slow"),
        (job(2, 1, jitter=0.02), "too few to tell a slow rank from luck"),
        (job(16, 8, jitter=0.0002, slow=0.002), "no rank costs 1 % of the step; rank 1 waits least"),
        (job(16, 8, jitter=0.02), "no rank stands out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_figure_says_how_sure_it_is(found: StragglerTest, words: str) -> None:
    assert words in stragglers._describe_result(stragglers.ResultRanks("a run", "cosmoflow", "mini", found))
