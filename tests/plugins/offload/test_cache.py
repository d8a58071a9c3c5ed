"""The cache: within its budget, least recently used out first, and the wait is that of the closed form."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlhpc.plugins.offload import cache as caching
from mlhpc.plugins.offload.cache import Cache
from mlhpc.plugins.offload.tier import Entry, HostTier, Key


class SeenTier(HostTier):
    """It keeps what was read, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Key] = []
        read = self.read

        def seen(key: Key) -> Entry:
            self.reads.append(key)
            return read(key)

        self.read = seen  # type: ignore[method-assign]


def key(layer: int) -> Key:
    return Key(layer, 0, "weights")


@pytest.fixture
def made() -> Iterator[Any]:
    kept: list[Cache] = []

    def make(budget: int, layers: int) -> tuple[Cache, SeenTier]:
        tier = SeenTier()
        cache = Cache(tier, budget)
        kept.append(cache)
        for layer in range(layers):
            cache.put(key(layer), {"up": torch.full((25,), float(layer))})  # 100 bytes
        return cache, tier

    yield make
    for cache in kept:
        cache.close()


def test_the_least_recently_used_entry_goes_first(made: Any) -> None:
    cache, tier = made(500, 5)
    for layer in (0, 1, 2):
        cache.get(key(layer))
    cache.reserve(200)  # 3 and 4 go
    for layer in (0, 1, 2):
        assert cache.get(key(layer))["up"][0] == layer
    assert tier.reads == []
    cache.reserve(-200)
    assert cache.get(key(3))["up"][0] == 3
    assert tier.reads == [key(3)]
    assert cache.flush()["peak_bytes"] <= 500


def test_what_is_not_in_the_tier_yet_is_written_before_it_goes(made: Any) -> None:
    cache, tier = made(300, 0)
    cache.put(key(7), {"up": torch.ones(25)}, spare=0)
    assert not tier.has(key(7))
    cache.reserve(250)
    assert tier.has(key(7))
    cache.reserve(-250)
    assert cache.get(key(7))["up"][0] == 1
    cache.drop(key(7))
    assert not cache.has(key(7))


def test_what_would_not_fit_is_written_before_it_has_to_go(made: Any) -> None:
    cache, tier = made(300, 0)
    cache.put(key(0), {"up": torch.ones(25)}, spare=150)
    cache.settle()
    assert not tier.has(key(0))
    cache.put(key(1), {"up": torch.ones(25)}, spare=150)
    cache.settle()
    assert tier.has(key(0))
    assert tier.has(key(1))
    tier.write = lambda *_: pytest.fail("written again")
    cache.reserve(250)


def test_an_error_of_the_thread_is_raised_where_the_entry_is_needed(made: Any) -> None:
    cache, tier = made(300, 2)
    cache.reserve(300)
    cache.reserve(-300)
    tier.read = lambda key: (_ for _ in ()).throw(OSError("gone"))
    cache.prefetch([key(0)])
    with pytest.raises(OSError, match="gone"):
        cache.get(key(0))


def test_whatever_happens_the_budget_holds_and_the_newest_values_are_there(made: Any) -> None:
    """Drawn calls, while both threads are slow at drawn moments."""
    cache, tier = made(450, 0)
    write, read = tier.write, tier.read
    tier.write = lambda *given: (time.sleep(random.choice((0, 1e-3))), write(*given))
    tier.read = lambda *given: (time.sleep(random.choice((0, 1e-3))), read(*given))[1]
    newest: dict[Key, float] = {}
    for value in range(300):
        one = key(random.randrange(8))
        act = random.choice(("put", "put", "dirty", "get", "prefetch", "drop", "reserve", "commit"))
        if act in ("put", "dirty"):
            newest[one] = float(value)
            spare = random.choice((0, 150, 300)) if act == "dirty" else None
            cache.put(one, {"up": torch.full((25,), newest[one])}, spare=spare)
        elif act == "drop":
            cache.drop(one)
            newest.pop(one, None)
        elif act == "reserve":
            cache.reserve(200)
            cache.reserve(-200)
        elif act == "commit":
            cache.commit()
        elif one in newest and act == "get":
            assert cache.get(one)["up"][0] == newest[one], value
        elif one in newest:
            cache.prefetch([one])
        with cache._state:
            spared = cache._ahead | cache._dirty
            assert cache._clean == sum(100 for each in cache._entries if each not in spared)
    cache.settle()
    assert {one: cache.get(one)["up"][0].item() for one in newest} == newest
    assert cache.flush()["peak_bytes"] <= 450


def test_an_error_of_a_write_is_raised_by_a_later_call(made: Any) -> None:
    cache, tier = made(300, 0)
    tier.write = lambda *_: (_ for _ in ()).throw(OSError("no room"))
    cache.put(key(0), {"up": torch.zeros(25)})
    with pytest.raises(OSError, match="no room"):
        cache.settle()
    with pytest.raises(OSError, match="no room"):
        cache.put(key(1), {"up": torch.zeros(25)})


class OneChannel:
    """Time as the training thread would have it: a load begins when it was asked for and the channel is free.

    No clock runs: threads may be woken as late as they like.
    """

    def __init__(self, cache: Cache, tier: HostTier, load_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.free = 0.0
        self.ends: dict[Key, float] = {}
        self._asked: dict[Key, float] = {}
        self._cache, self._load_s, read = cache, load_s, tier.read
        self._stamps, self._awaited = 0, key(-1)

        def timed(one: Key) -> Entry:
            self.free = self.ends[one] = max(self.free, self._asked[one]) + load_s
            return read(one)

        monkeypatch.setattr(tier, "read", timed)
        monkeypatch.setattr(caching, "time", SimpleNamespace(perf_counter=self._stamp))

    def _stamp(self) -> float:
        """The beginning of a call, then its end: that of the load that it awaited."""
        self._stamps += 1
        if self._stamps % 2 == 0:
            self.now = max(self.now, self.ends.get(self._awaited, 0.0))
        return self.now

    def get(self, one: Key) -> None:
        self._asked.setdefault(one, self.now)
        self._awaited = one
        self._cache.get(one)

    def prefetch(self, keys: list[Key]) -> None:
        with self._cache._state:  # the thread begins none of them before it is known which it will load
            self._cache.prefetch(keys)
            for one in {*self._cache._queue, *self._cache._entries}:
                self._asked.setdefault(one, self.now)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize(("load_s", "compute_s"), [(3.0, 2.0), (1.5, 3.0), (2.5, 2.5), (3.0, 1.0)])
def test_the_wait_is_that_of_the_closed_form(
    made: Any, load_s: float, compute_s: float, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One channel: the first load is waited for whole, the others as far as they take longer than computing."""
    layers = 8
    cache, tier = made(10_000, layers)
    cache.settle()
    cache.reserve(10_000)  # nothing stays
    cache.reserve(-10_000)
    cache.flush()
    channel = OneChannel(cache, tier, load_s, monkeypatch)
    for layer in range(layers):
        channel.get(key(layer))
        channel.prefetch([key(each) for each in range(layer + 1, min(layers, layer + 1 + depth))])
        channel.now += compute_s
    stats = cache.flush()
    expected = load_s + (layers - 1) * (max(0.0, load_s - compute_s) if depth else load_s)
    assert stats["wait_s"] == pytest.approx(expected)
    assert stats["hits"] + stats["ahead"] + stats["misses"] == layers
