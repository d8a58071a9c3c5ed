"""Global batches divided by cost: every sample once, nearly even work, on ranks as in parts of accumulated gradients."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlhpc.suite.data.balance import BalancedShares, split_by_padding, split_by_sum
from mlhpc.suite.data.sampling import list_train_batches

LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 12))
@settings(max_examples=100)
def test_sums_are_nearly_even(costs: list[int], ranks: int) -> None:
    shares = split_by_sum(np.array(costs), ranks)
    assert len(shares) == ranks
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs)))
    if len(costs) >= ranks:
        assert min(map(len, shares)) >= 1
    loads = [sum(costs[place] for place in share) for share in shares]
    assert max(loads) <= sum(costs) / ranks + max(costs)  # greedy, largest first


@given(LENGTHS, st.integers(1, 12))
@settings(max_examples=100)
def test_padded_shares_are_no_worse_than_even_ones(costs: list[int], ranks: int) -> None:
    if len(costs) < ranks:
        return
    shares = split_by_padding(np.array(costs), ranks)
    assert len(shares) == ranks
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs)))
    assert min(map(len, shares)) >= 1
    even = np.array_split(np.argsort(-np.array(costs)), ranks)
    assert padded(costs, shares) <= padded(costs, even)


@given(st.lists(st.integers(1, 9), min_size=3, max_size=6), st.integers(2, 3))
@settings(max_examples=40)
def test_no_other_division_has_a_smaller_padded_share(costs: list[int], ranks: int) -> None:
    every = (
        padded(costs, [[place for place, own in enumerate(owner) if own == rank] for rank in range(ranks)])
        for owner in product(range(ranks), repeat=len(costs))
        if set(owner) == set(range(ranks))
    )
    assert padded(costs, split_by_padding(np.array(costs), ranks)) == min(every)


def padded(costs: list[int], shares: list[list[int]] | list[np.ndarray]) -> int:
    return max(len(share) * max(costs[place] for place in share) for share in shares)


@pytest.mark.parametrize("divide", [split_by_sum, split_by_padding])
@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_the_global_batch_stays_the_same(divide: object, ranks: int, parts: int) -> None:
    cost = np.random.default_rng(0).integers(1, 100, 50)
    balance = BalancedShares(50, 8, lambda indices, seed, epoch: cost[indices], divide)  # type: ignore[arg-type]
    for epoch in (1, 2):
        whole = list(list_train_batches(50, 8, seed=3, epoch=epoch, rank=0, size=1))
        given = [list(list_train_batches(50, 8, seed=3, epoch=epoch, rank=rank, size=ranks)) for rank in range(ranks)]
        for step, batch in enumerate(whole):
            shares = [
                balance.share(given[rank][step][part::parts], seed=3, epoch=epoch)
                for rank in range(ranks)
                for part in range(parts)
            ]
            assert sorted(np.concatenate(shares).tolist()) == sorted(batch.tolist())
