"""Sampling: global batches do not depend on the ranks, evaluation meets every sample once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.suite.data.sampling import (
    check_batch,
    compute_epoch_order,
    count_steps_per_epoch,
    draws,
    list_eval_batches,
    list_train_batches,
)
from mlhpc.suite.errors import InputError


@given(n=st.integers(8, 200), per_rank=st.integers(1, 4), size=st.sampled_from([1, 2, 4]), epoch=st.integers(1, 50))
def test_the_ranks_together_have_the_global_batches_of_one_rank(n: int, per_rank: int, size: int, epoch: int) -> None:
    batch = per_rank * 4
    if n < batch:
        return
    alone = list(list_train_batches(n, batch, seed=3, epoch=epoch, rank=0, size=1))
    shares = [list(list_train_batches(n, batch, seed=3, epoch=epoch, rank=rank, size=size)) for rank in range(size)]
    assert len(alone) == count_steps_per_epoch(n, batch)
    for step, whole in enumerate(alone):
        assert sorted(np.concatenate([share[step] for share in shares])) == sorted(whole)
        assert {len(share[step]) for share in shares} == {batch // size}


@given(n=st.integers(0, 300), batch=st.integers(1, 70), size=st.integers(1, 9))
def test_evaluation_meets_every_sample_exactly_once(n: int, batch: int, size: int) -> None:
    met = [i for rank in range(size) for piece in list_eval_batches(n, batch, rank=rank, size=size) for i in piece]
    assert sorted(met) == list(range(n))


def test_epochs_and_seeds_give_different_orders_and_the_same_one_twice() -> None:
    orders = [tuple(compute_epoch_order(50, seed=s, epoch=e)) for s in (1, 2) for e in (1, 2)]
    assert len(set(orders)) == 4
    assert tuple(compute_epoch_order(50, seed=1, epoch=1)) == orders[0]


def test_a_resumed_epoch_continues_with_the_same_batches() -> None:
    whole = [b.tolist() for b in list_train_batches(40, 8, seed=1, epoch=2, rank=1, size=2)]
    rest = [b.tolist() for b in list_train_batches(40, 8, seed=1, epoch=2, rank=1, size=2, first_step=3)]
    assert rest == whole[3:]


def test_batches_that_cannot_be_split_are_refused_with_those_that_can() -> None:
    check_batch(16, 4)
    with pytest.raises(
        InputError,
        match="16 cannot be split evenly over 6 ranks; nearest batch that can: 12 or 18; nearest number of ranks: 4 or 8$",
    ):
        check_batch(16, 6)
    with pytest.raises(InputError, match="over 8 ranks; nearest batch that can: 8; nearest number of ranks: 4$"):
        check_batch(4, 8)
    with pytest.raises(
        InputError,
        match="8 cannot be split evenly over 2 ranks in 3 accumulation steps; nearest batch that can: 6 or 12$",
    ):
        check_batch(8, 2, 3)
    with pytest.raises(
        InputError,
        match="7 cannot be split evenly over 2 ranks; nearest batch that can: 6 or 8; nearest number of ranks: 1 or 7$",
    ):
        check_batch(7, 2)
    with pytest.raises(InputError, match="global_batch_size 8 exceeds the 5 training samples"):
        count_steps_per_epoch(5, 8)


def test_draws_are_uniform_and_differ_between_samples_epochs_and_seeds() -> None:
    values = draws(0, 1, np.arange(48 * 500))
    assert np.bincount((values % np.uint64(48)).astype(int), minlength=48).min() > 400
    assert len(np.unique(np.concatenate([draws(s, e, np.arange(500)) for s in range(5) for e in range(5)]))) == 12_500
    assert draws(3, 4, np.array([17]))[0] == draws(3, 4, np.arange(20))[17]
