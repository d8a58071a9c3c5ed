"""The slow rank is named by the smallest wait, and healthy jitter names nobody."""

import itertools
import math
from collections.abc import Callable

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
    assert found is not None
    assert found.find_visible_share() is None
    assert not found.is_slow


def noise(seed: int, blocks: int = 20, ranks: int = 8, correlation: float = 0.0) -> np.ndarray:
    """Standard normal noise by block and rank; each block's correlates with that of the block before."""
    found = np.random.default_rng(seed).standard_normal((blocks, ranks))
    for before, after in itertools.pairwise(found):
        after *= math.sqrt(1 - correlation**2)
        after += correlation * before
    return found


def judge(own: np.ndarray) -> StragglerTest:
    found = find_straggler(own, own.max(axis=1, keepdims=True) - own + 0.05, np.ones(len(own)))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: np.exp(0.03 * noise(seed, correlation=0.9)),
        lambda seed: np.exp(
            0.03 * noise(seed, ranks=4, correlation=0.9).repeat(2, axis=1) + 0.003 * noise(~seed & 999)
        ),
        lambda seed: 1 + 0.03 * np.random.default_rng(seed).standard_t(1.5, (20, 8)),
        lambda seed: 1 + 0.03 * noise(seed) + 20 * (np.arange(160).reshape(20, 8) == seed),
    ],
    ids=["noise that lasts", "two ranks of a node share it", "long tails", "one stall"],
)
def test_equal_ranks_are_named_as_rarely_as_stated(make: Callable[[int], np.ndarray]) -> None:
    assert sum(judge(make(seed)).is_slow for seed in range(100)) <= 10


def test_a_rank_that_was_slow_for_a_while_is_slow_then_and_not_always() -> None:
    own = 1 + 0.01 * noise(1)
    own[2:7, 3] += 0.3
    found = judge(own)
    assert (found.slow, found.is_slow, found.slow_blocks) == (3, False, (3, 4, 5, 6, 7))
    words = stragglers._describe_result(stragglers.ResultRanks("a run", "cosmoflow", "mini", found))
    assert words.endswith("; rank 3 was slow in 5 of 20 epochs (3 to 7)")


def test_what_it_says_it_could_see_it_sees_in_eight_of_ten() -> None:
    test = judge(1 + 0.03 * noise(0))
    share = test.find_visible_share()
    assert share == pytest.approx(0.032, rel=0.2)
    slow = np.arange(8) == 1
    found = [judge(1 + 0.03 * noise(seed) + share * test.step_s * slow) for seed in range(1, 201)]
    assert 0.65 <= sum(each.is_slow and each.slow == 1 for each in found) / 200 <= 0.92


def test_one_rank_waits_for_nobody() -> None:
    assert job(1, 5, jitter=0.1) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (job(3, 8, jitter=0.02, slow=0.06), "rank 1 was slow in this run"),
        (job(2, 1, jitter=0.02), "too few to tell a slow rank from luck"),
        (job(16, 8, jitter=0.0002, slow=0.002), "no rank costs 1 % of the step; rank 1 waits least"),
        (job(16, 8, jitter=0.02), "no rank was slow all the time"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_figure_says_how_sure_it_is(found: StragglerTest, words: str) -> None:
    assert words in stragglers._describe_result(stragglers.ResultRanks("a run", "cosmoflow", "mini", found))
