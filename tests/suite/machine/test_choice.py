"""Measuring what is fastest: the race, the file that keeps it, and one answer for all ranks."""

import json
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mlhpc.suite.files import find_cache_folder
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import read_choices
from mlhpc.suite.machine.choice import chooser as timing
from mlhpc.suite.machine.choice.chooser import (
    MAX_BYTES,
    MAX_ENTRIES,
    NAME,
    ChoiceCache,
    Chooser,
    Question,
    choose_fastest,
    compute_nearest_power_of_two,
    measure_candidates,
)
from mlhpc.suite.world import World
from tests.fixtures.thread_ranks import Meeting

CPU = torch.device("cpu")


def busy(ms: float) -> Any:
    """A way that takes so many milliseconds of CPU time."""

    def way() -> None:
        end = time.process_time() + ms / 1e3
        while time.process_time() < end:
            pass

    return way


def question(ways: Mapping[str, Any], **changes: Any) -> Question:
    made: dict[str, Any] = {
        "name": "toy",
        "shape": {"rows": 8},
        "rule": "slow",
        "ways": lambda: ways,
        "possible": lambda text: text in ways,
    }
    return Question(**made | changes)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """On one thread; a chooser is told what its ways take: a number is the seconds of a way."""

    def told(ways: Mapping[str, Any], device: torch.device, *, wall: bool) -> dict[str, timing.Timing]:
        return {name: timing.Timing(way) if isinstance(way, float) else way for name, way in ways.items()}

    monkeypatch.setattr("mlhpc.suite.machine.choice.chooser.measure_candidates", told)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chooser(folder: Path | None, **changes: Any) -> Chooser:
    made: dict[str, Any] = {"measure": True, "store": ChoiceCache(folder)}
    return Chooser(World.create(None), CPU, **made | changes)


def test_the_race_orders_ways_and_names_why_one_is_out() -> None:
    def broken() -> None:
        raise RuntimeError("no such operator\nin detail")

    found = measure_candidates({"slow": busy(4), "broken": broken, "fast": busy(2)}, CPU)
    assert found["fast"].seconds < found["slow"].seconds
    assert found["slow"].seconds == pytest.approx(4e-3, rel=0.5)
    assert found["broken"] == timing.Timing(math.inf, "RuntimeError: no such operator")


def test_a_way_that_is_far_behind_leaves_the_race_early() -> None:
    calls = {"fast": 0, "slow": 0}

    def counted(name: str, ms: float) -> Any:
        way = busy(ms)

        def call() -> None:
            calls[name] += 1
            way()

        return call

    measure_candidates({"fast": counted("fast", 1), "slow": counted("slow", 25)}, CPU)
    assert calls["slow"] <= 1 + timing.MIN_ROUNDS
    assert calls["fast"] >= timing.FULL_ROUNDS


def test_the_first_of_nearly_equal_ways_is_chosen() -> None:
    assert choose_fastest({"a": 1.005, "b": 1.0}) == "a"
    assert choose_fastest({"a": 1.02, "b": 1.0}) == "b"


def test_a_measurement_is_kept_and_logged(tmp_path: Path) -> None:
    ways = {"slow": 3.0, "fast": 1.0}
    first, second = chooser(tmp_path), chooser(tmp_path)
    assert first.choose(question(ways)) == second.choose(question({"slow": 0.1, "fast": 9.0})) == "fast"
    assert [each.choices["toy"].source for each in (first, second)] == ["measured", "cache"]
    assert second.choices["toy"].seconds == first.choices["toy"].seconds
    log = EventLog(tmp_path / "log.txt")
    second.choices["toy"].log(log)
    log.close()
    events = read_events(tmp_path / "log.txt")
    assert read_choices(events) == {"toy": "fast"}
    assert {"source", "seconds", "shape"} <= events.events[0].metadata.keys()


def test_another_shape_is_another_measurement(tmp_path: Path) -> None:
    chooser(tmp_path).choose(question({"slow": 2.0, "fast": 1.0}))
    other = chooser(tmp_path)
    other.choose(question({"slow": 2.0, "fast": 1.0}, shape={"rows": 16}))
    assert other.choices["toy"].source == "measured"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff\xfe", b'{"version": 2, "entries": {}}', b'{"version": 1, "entries": []}',
        b'{"version": 1, "entries": {"KEY": {"chosen": 7, "seconds": {}, "problems": {}, "beside": {}}}}',
        b'{"version": 1, "entries": {"KEY": {"chosen": "fast", "seconds": 1, "problems": {}, "beside": {}}}}',
        b'{"version": 1, "entries": {"KEY": "fast"}}',
        b'{"version": 1, "entries": {"KEY": {"chosen": "gone", "seconds": {}, "problems": {}, "beside": {}}}}',
        b"[" * 100_000, b" " * (MAX_BYTES + 1),
    ],
)  # fmt: skip
def test_a_cache_that_is_damaged_or_forged_is_measured_again(tmp_path: Path, content: bytes) -> None:
    asked = question({"slow": 2.0, "fast": 1.0})
    key = chooser(tmp_path)._key(asked)
    (tmp_path / NAME).write_bytes(content.replace(b'"KEY"', json.dumps(key).encode()))
    again = chooser(tmp_path)
    assert again.choose(asked) == "fast"
    assert again.choices["toy"].source == "measured"
    assert ChoiceCache(tmp_path).find(key) is not None


def test_a_link_in_place_of_the_cache_is_not_followed(tmp_path: Path) -> None:
    asked = question({"slow": 2.0, "fast": 1.0})
    other = tmp_path / "other"
    chooser(other).choose(asked)
    (tmp_path / NAME).symlink_to(other / NAME)
    found = chooser(tmp_path)
    found.choose(asked)
    assert found.choices["toy"].source == "measured"


def test_the_cache_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"version": 1, "entries": {str(n): {} for n in range(MAX_ENTRIES)}}))
    store = ChoiceCache(tmp_path)
    store.keep("new", {"chosen": "a"})
    assert store.find("new") == {"chosen": "a"}
    assert store.find("0") is None
    assert store.find("1") == {}


def test_without_a_folder_or_a_disk_it_still_measures(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file"):
        assert chooser(folder).choose(question({"slow": 2.0, "fast": 1.0})) == "fast"


def test_the_folder_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"XDG_CACHE_HOME": str(tmp_path / "x"), "HOME": str(tmp_path / "home")}
    assert find_cache_folder(given) == tmp_path / "x/mlhpc"
    assert find_cache_folder({"HOME": str(tmp_path / "home")}) == tmp_path / "home/.cache/mlhpc"
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "blocked").write_text("")
    last = find_cache_folder({"XDG_CACHE_HOME": str(tmp_path / "blocked")})
    assert last == tmp_path / f"mlhpc-{os.getuid()}"
    assert last.stat().st_mode & 0o777 == 0o700
    last.chmod(0o777)  # anybody may have written there
    assert find_cache_folder({"XDG_CACHE_HOME": "relative"}) is None


def test_what_is_given_comes_before_what_is_measured(tmp_path: Path) -> None:
    ways = {"slow": 2.0, "fast": 1.0}
    chooser(tmp_path).choose(question(ways))  # in the cache: fast
    both = chooser(tmp_path, pinned={"toy": "fast"}, earlier={"toy": "slow"})
    assert (both.choose(question(ways)), both.choices["toy"].source) == ("slow", "kept")
    pinned = chooser(tmp_path, pinned={"toy": "slow"})
    assert (pinned.choose(question(ways)), pinned.choices["toy"].source) == ("slow", "pinned")
    fixed = chooser(tmp_path, measure=False)
    assert (fixed.choose(question(ways)), fixed.choices["toy"].source) == ("slow", "rule")
    gone = chooser(tmp_path, measure=False, pinned={"toy": "fused"})
    assert gone.choose(question(ways)) == "slow"
    assert gone.choices["toy"].note == "pinned fused is not possible here"


def test_what_is_chosen_was_truly_raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlhpc.suite.machine.choice.chooser.measure_candidates", measure_candidates)
    found = chooser(tmp_path)
    assert found.choose(question({"slow": busy(8), "fast": busy(1)})) == "fast"
    assert 0 < found.choices["toy"].seconds["fast"] < found.choices["toy"].seconds["slow"]


def test_nothing_that_can_be_measured_leaves_the_rule(tmp_path: Path) -> None:
    broken = timing.Timing(problem="MemoryError: too large")
    found = chooser(tmp_path)
    assert found.choose(question({"slow": broken, "fast": broken})) == "slow"
    assert found.choices["toy"].source == "rule"
    assert not (tmp_path / NAME).exists()


class ThreadWorld:
    """The calls of a World that a Chooser makes, between threads."""

    def __init__(self, rank: int, meeting: Meeting, size: int) -> None:
        self.rank, self.is_first, self.local_size, self._meeting = rank, rank == 0, size, meeting

    def allgather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)

    def gather(self, value: Any, kind: Any = Any) -> list[Any] | None:
        found = self.allgather(value)
        return found if self.is_first else None

    def broadcast(self, value: Any, kind: Any = Any) -> Any:
        return self.allgather(value)[0]

    def barrier(self) -> None:
        self.allgather(None)


def test_ranks_that_measure_otherwise_choose_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest rank's seconds count; a way that one rank cannot follow is out for all."""
    of_ranks = (
        {"a": 1.0, "b": 2.0, "c": 0.1},
        {"a": 9.0, "b": 3.0, "c": timing.Timing(problem="not here")},
    )
    meeting = Meeting(2)

    def rank(number: int) -> tuple[str, str, Mapping[str, str]]:
        world = cast(World, ThreadWorld(number, meeting, 2))
        mine = Chooser(world, CPU, measure=True, store=ChoiceCache(tmp_path if number == 0 else None))
        value = mine.choose(question(of_ranks[number], possible=lambda text: True))
        again = Chooser(world, CPU, measure=True, store=ChoiceCache(tmp_path if number == 0 else None))
        assert again.choose(question({}, possible=lambda text: True)) == value  # from rank 0's cache
        one_cannot = Chooser(world, CPU, measure=False, store=ChoiceCache(None), pinned={"toy": "c"})
        found = one_cannot.choose(question(of_ranks[number], possible=lambda text: number == 0, rule="a"))
        return value, found, mine.choices["toy"].problems

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, (0, 1))) == [("b", "a", {"c": "not here"})] * 2


@pytest.mark.parametrize(("count", "wanted"), [(0, 1), (1, 1), (3, 4), (90, 64), (91, 128), (1024, 1024)])
def test_classes_are_powers_of_two(count: float, wanted: int) -> None:
    assert compute_nearest_power_of_two(count) == wanted


def test_a_busy_machine_leaves_no_choice_by_the_wall_clock_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"slow": 2.0, "fast": 1.0}
    torch.set_num_threads(2)
    for load, cached in ((99.0 * (os.cpu_count() or 1), False), (0.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        found = chooser(tmp_path)
        assert found.choose(question(ways)) == "fast"
        assert (tmp_path / NAME).exists() is cached
        assert bool(found.choices["toy"].note) is not cached
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 1e6, 1e6))
    by_wall = chooser(None)
    assert by_wall.choose(question(ways, wall=True)) == "slow"
    assert by_wall.choices["toy"].source == "rule"
    torch.set_num_threads(1)  # CPU time is not that of others
    alone = chooser(tmp_path / "alone")
    alone.choose(question(ways))
    assert (tmp_path / "alone" / NAME).exists()
