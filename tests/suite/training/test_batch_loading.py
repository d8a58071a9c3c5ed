"""Batches reach the device whole, in order, in one copy each, and none waits for a later one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from mlhpc.suite.machine.probes.allowance import UsableResources
from mlhpc.suite.training import batch_loading
from mlhpc.suite.training.batch_loading import (
    ALIGNMENT,
    LOADS_PER_CHECK,
    THREAD_LOADS,
    BatchCopier,
    PackedBatch,
    has_no_idle_core,
    load_with_prefetch,
)
from mlhpc.suite.world import World

CPU = torch.device("cpu")
Batch = Mapping[str, Tensor]


def batch() -> dict[str, Tensor]:
    """One tensor of every kind that a workload has, and some that none has yet."""
    generator = torch.Generator().manual_seed(0)
    return {
        "flags": torch.rand(3, generator=generator) < 0.5,
        "bytes": torch.arange(5, dtype=torch.uint8),
        "x": torch.randn(2, 3, 4, generator=generator),
        "turned": torch.randn(3, 5, generator=generator).t(),
        "short": torch.arange(7, dtype=torch.int16),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "nothing": torch.zeros(0, 3, dtype=torch.int64),
        "energy": torch.tensor(1.5, dtype=torch.float64),
        "number": torch.arange(3),
    }


def test_a_parcel_has_the_tensors_of_the_batch_in_one_buffer() -> None:
    given = batch()
    parcel = PackedBatch.pack(given, pinned=False)
    found = parcel.unpack()
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        if tensor.numel():
            assert found[name].untyped_storage().data_ptr() == parcel.buffer.data_ptr()
            assert (found[name].data_ptr() - parcel.buffer.data_ptr()) % ALIGNMENT == 0


def test_a_parcel_is_brought_in_one_copy() -> None:
    brought = PackedBatch.pack(batch(), pinned=False).to(torch.device("meta"))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in brought.unpack().items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in batch().items()
    }


def test_fixed_batches_of_one_form_lie_at_one_place() -> None:
    feed = BatchCopier(CPU, fixed=True)
    wanted = [{"x": torch.full((length,), float(number))} for number, length in enumerate((2, 2, 3, 2, 3))]
    places: dict[int, set[int]] = {2: set(), 3: set()}
    for given in wanted:
        found = feed.end(feed.begin(feed.pack(given)))
        assert torch.equal(found["x"], given["x"])
        places[len(given["x"])].add(found["x"].data_ptr())
    assert [len(each) for each in places.values()] == [1, 1]
    assert len(set.union(*places.values())) == 2


class Copying(BatchCopier):
    """A feed that copies, on the host, and tells when."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.told: list[str] = []

    @property
    def copies(self) -> bool:
        return True

    def pack(self, batch: Batch) -> Batch | PackedBatch:
        return PackedBatch.pack(batch, pinned=False)

    def begin(self, packed: Batch | PackedBatch) -> Batch | PackedBatch:
        assert isinstance(packed, PackedBatch)
        self.told.append(f"begin {int(packed.unpack()['number'])}")
        return packed

    def end(self, packed: Batch | PackedBatch) -> Batch:
        assert isinstance(packed, PackedBatch)
        return packed.unpack()


def load(number: int) -> Batch:
    return {"number": torch.tensor(number)}


@pytest.mark.parametrize(
    "feed", [BatchCopier(CPU), BatchCopier(CPU, alone=True), BatchCopier(CPU, fixed=True), Copying()]
)
@pytest.mark.parametrize("items", [0, 1, 2, 9, 200])
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_come_in_order_and_once(feed: BatchCopier, items: int, threads: int) -> None:
    found = [
        (item, int(each["number"])) for item, each in load_with_prefetch(load, range(items), threads=threads, feed=feed)
    ]
    assert found == [(number, number) for number in range(items)]


def test_the_next_copy_begins_before_a_batch_is_used_but_not_before_it_is_loaded() -> None:
    feed, gate, loaded = Copying(), threading.Event(), threading.Event()

    def slow(number: int) -> Batch:
        if number == 3:
            gate.wait(300)
        if number == 2:
            loaded.set()
        return load(number)

    batches = load_with_prefetch(slow, range(4), threads=1, feed=feed)
    assert next(batches)[0] == 0
    assert loaded.wait(300)
    assert next(batches)[0] == 1
    assert next(batches)[0] == 2  # 3 is not loaded: 2 does not wait for it
    assert "begin 3" not in feed.told
    gate.set()
    assert next(batches)[0] == 3
    assert feed.told == [f"begin {number}" for number in range(4)]


def test_an_error_comes_at_its_own_batch_and_nothing_is_loaded_after_the_end() -> None:
    loaded: list[int] = []

    def failing(number: int) -> Batch:
        loaded.append(number)
        if number == 2:
            raise ValueError("sample 2 is damaged")
        return load(number)

    batches = load_with_prefetch(failing, range(100), threads=1, feed=Copying())
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(ValueError, match="sample 2 is damaged"):
        next(batches)
    assert len(loaded) <= 6


def test_at_most_two_per_thread_are_loaded_ahead() -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            asked.append(number)
            yield number

    batches = load_with_prefetch(load, items(), threads=2, feed=BatchCopier(CPU))
    next(batches)
    assert len(asked) == 5
    next(batches)
    assert len(asked) == 6
    batches.close()


def test_a_loader_s_thread_computes_alone_and_the_rank_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        batches = load_with_prefetch(
            lambda item: {"threads": torch.tensor(torch.get_num_threads())}, range(4), threads=2, feed=BatchCopier(CPU)
        )
        assert [int(batch["threads"]) for _, batch in batches] == [1, 1, 1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Clocks:
    """The wall clock and the calling thread's processor time, which go on only in loads and steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.by_caller: list[int] = []
        told = SimpleNamespace(perf_counter=lambda: self.wall_s, thread_time=lambda: self.cpu_s)
        monkeypatch.setattr(batch_loading, "time", told)

    def run(self, items: int, threads: int, waits_s: Callable[[int], float], *, alone: bool = True) -> list[int]:
        """Load and use all; the items that the caller loaded itself. A load computes 1 ms, a step 10 ms."""
        caller = threading.current_thread()

        def timed(number: int) -> Batch:
            if threading.current_thread() is caller:
                self.by_caller.append(number)
                self.cpu_s += 1e-3
                self.wall_s += 1e-3 + waits_s(number)
            return load(number)

        for number, _ in load_with_prefetch(timed, range(items), threads=threads, feed=BatchCopier(CPU, alone=alone)):
            assert number >= 0
            self.cpu_s, self.wall_s = self.cpu_s + 1e-2, self.wall_s + 1e-2
        return self.by_caller


def test_loads_that_only_compute_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Clocks(monkeypatch).run(100, 1, lambda number: 0.0) == list(range(100))
    assert Clocks(monkeypatch).run(100, 1, lambda number: 3e-4) == list(range(100))  # 2.7 % of the time


@pytest.mark.parametrize(("threads", "alone"), [(2, True), (1, False)])
def test_several_threads_or_a_free_core_load_ahead(threads: int, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Clocks(monkeypatch).run(20, threads, lambda number: 0.0, alone=alone) == []


def test_a_thread_loads_while_storage_lets_loads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller tries again after 32 batches, then after 64, and so on: of 1,000 loads few wait."""
    found = Clocks(monkeypatch).run(1000, 1, lambda number: 2e-3)
    tries = [LOADS_PER_CHECK * k + THREAD_LOADS * (2**k - 1) for k in range(5)]
    assert found == [first + number for first in tries for number in range(LOADS_PER_CHECK)]


def test_one_long_wait_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Clocks(monkeypatch).run(100, 1, lambda number: 0.2 if number == 3 else 0.0)
    assert found == [*range(4), *range(4 + THREAD_LOADS, 100)]


def test_an_error_of_the_caller_s_load_comes_at_its_own_batch() -> None:
    def failing(number: int) -> Batch:
        if number == 2:
            raise ValueError("sample 2 is damaged")
        return load(number)

    batches = load_with_prefetch(failing, range(9), threads=1, feed=BatchCopier(CPU, alone=True))
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(ValueError, match="sample 2 is damaged"):
        next(batches)


@pytest.mark.parametrize(
    ("cpus", "quota", "ranks", "threads", "taken"),
    [
        (64, None, 64, 1, True),
        (64, None, 32, 1, False),
        (64, None, 32, 2, False),  # threads of a rank share its work: a loader's is one more
        (64, 8.0, 8, 1, True),  # a container's quota
        (1, None, 64, 1, True),  # bound to a core of its own
        (2, None, 64, 1, False),  # bound to two
    ],
)
def test_a_core_is_free_unless_ranks_of_one_thread_compute_on_all(
    cpus: int, quota: float | None, ranks: int, threads: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_loading, "find_usable_resources", lambda: UsableResources(frozenset(range(cpus)), quota))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert has_no_idle_core(cast("World", SimpleNamespace(local_size=ranks))) is taken
