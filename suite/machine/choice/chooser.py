"""Answers questions such as "which memory format is fastest here?" for all ranks of a run together.

The answer is, in this order: what an earlier part of the run chose, what the configuration pins, what this user's cache
holds, what is measured now. Without measuring it is a fixed rule. Rank 0 decides for all. A forward pass never
measures.

Caches measurements in one JSON file of the user: per host, processor, torch and suite. It may be lost.

The file is read and written whole. If it cannot be read, or holds something else, measurements are repeated and it is
replaced. If two runs write at once, one entry is lost and measured again.

Times several ways to compute one thing against each other, and stops as soon as one is fastest.

On a processor with one thread CPU time counts, since other processes disturb it little. With several threads it is the
wall clock, because CPU time does not distinguish working threads from waiting ones. On a GPU it is the time between two
events of the device.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mlhpc.suite import VERSION
from mlhpc.suite.files import find_cache_folder, read_json, write_file_atomically
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.machine.probes.processor import find_machine_root, read_cpu
from mlhpc.suite.world import World, find_node_name

if TYPE_CHECKING:
    from mlhpc.suite.config import RunConfig


STORE_VERSION = 1
NAME = "choices.json"  # in the user's cache folder
MAX_BYTES = 2**20  # bytes that are read
MAX_ENTRIES = 512  # entries; the oldest go first


class ChoiceCache:
    """JSON objects by a text key, newest last. ``folder`` None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / NAME

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the entry of a key, or None."""
        entry = self._entries().get(key)
        return entry if isinstance(entry, dict) else None

    def keep(self, key: str, entry: Mapping[str, Any]) -> None:
        """Write an entry. A failed write is ignored."""
        if self.path is None:
            return
        entries = self._entries()
        entries.pop(key, None)
        entries[key] = dict(entry)
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        with suppress(OSError, ValueError):
            write_file_atomically(
                self.path, json.dumps({"version": STORE_VERSION, "entries": newest}, indent=1, allow_nan=False) + "\n"
            )

    def _entries(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            found = {} if self.path.is_symlink() else read_json(self.path, MAX_BYTES)
        except (OSError, ValueError):
            return {}
        entries = found.get("entries") if isinstance(found, dict) and found.get("version") == STORE_VERSION else None
        return entries if isinstance(entries, dict) else {}


Candidate = Callable[[], object]

ROUNDS, MIN_ROUNDS, FULL_ROUNDS = 15, 2, 5  # at most; before one leaves; before timing may end
DROP_RATIO, RACE_TIE_RATIO = 1.2, 1.03  # a candidate this much slower than the best leaves; one this near is raced on
BUDGET_S = 0.5  # measured seconds after which fair rounds are enough
SHORTEST_S = 1e-3  # a shorter candidate is repeated, so that clocks and launches count little
LONG_S = 0.02  # a candidate that takes this long at first is not called a second time before it counts


@dataclass(frozen=True)
class Timing:
    """The result of one candidate: the least seconds of a pass, or why it has none."""

    seconds: float = math.inf
    problem: str | None = None


def measure_candidates(
    candidates: Mapping[str, Candidate],
    device: torch.device,
    *,
    budget_s: float = BUDGET_S,
    wall: bool = False,
) -> dict[str, Timing]:
    """Measure the least seconds of each candidate, in rounds of alternating order. A candidate that raises is dropped.

    The first one or two calls do not count. Candidates far behind are dropped after a few rounds, so their seconds come
    from fewer passes. ``wall``: use the wall clock on a processor.

    It ends when the two best differ clearly, or after a fixed number of rounds.
    """
    seconds_of = make_clock(device, wall=wall)
    problems: dict[str, str] = {}
    repeats: dict[str, int] = {}
    for name, candidate in candidates.items():
        try:
            repeats[name] = _choose_repeats(candidate, seconds_of)
        except Exception as error:  # out of memory, an operator that is not there: the others still count
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    least = _measure_in_rounds(lambda name: seconds_of(candidates[name], repeats[name]), repeats, budget_s)
    return {name: Timing(problem=problems[name]) if name in problems else Timing(least[name]) for name in candidates}


def _measure_in_rounds(
    seconds_of: Callable[[str], float], repeats: Mapping[str, int], budget_s: float
) -> dict[str, float]:
    """Time candidates in rounds until the best is clear. Returns the least seconds of each."""
    least = dict.fromkeys(repeats, math.inf)
    racing, spent = list(least), 0.0
    for number in range(1, ROUNDS + 1):
        for name in racing:
            seconds = seconds_of(name)
            least[name] = min(least[name], seconds)
            spent += seconds * repeats[name]
        racing.reverse()  # so that a drift of the clock frequency favours nobody
        if number < MIN_ROUNDS or not racing:
            continue
        racing = _select_near_best(racing, least, DROP_RATIO)
        if number >= FULL_ROUNDS and (spent > budget_s or len(_select_near_best(racing, least, RACE_TIE_RATIO)) == 1):
            break
    return least


def _choose_repeats(candidate: Candidate, seconds_of: Callable[[Candidate, int], float]) -> int:
    """Call a candidate once or twice. Returns how many calls in a row a clock can measure well."""
    first = seconds_of(candidate, 1)
    if first <= LONG_S:  # the first call also compiles and allocates
        first = seconds_of(candidate, 1)
    return min(50, max(1, math.ceil(SHORTEST_S / max(first, 1e-6))))


def make_clock(device: torch.device, *, wall: bool = False) -> Callable[[Candidate, int], float]:
    """Return the clock of a device: a function from a candidate and a repetition count to seconds per call."""
    if device.type == "cuda":
        return _measure_on_device
    wall = wall or torch.get_num_threads() > 1
    return partial(_measure_on_cpu, time.perf_counter if wall else time.process_time)


def _select_near_best(names: list[str], least: Mapping[str, float], factor: float) -> list[str]:
    best = min(least[name] for name in names)
    return [name for name in names if least[name] <= factor * best]


def _measure_on_cpu(clock: Callable[[], float], candidate: Candidate, repeats: int) -> float:
    begin = clock()
    for _ in range(repeats):
        candidate()
    return (clock() - begin) / repeats


def _measure_on_device(candidate: Candidate, repeats: int) -> float:
    # The host returns before the device is done: only the device's own clock tells.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        candidate()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


Source = Literal["kept", "pinned", "cache", "measured", "rule"]
BUSY_LOAD_RATIO = 1.25  # load over CPUs from which on a choice by the wall clock is not kept
TIE_RATIO = 1.01  # within this, the first way of a question stays the choice: a choice should not change with the noise
CACHED_FIELDS = ("seconds", "problems", "beside")  # of a choice that the cache keeps, with what was chosen


def choose_fastest(seconds: Mapping[str, float]) -> str:
    """Return the candidate with the least seconds: the first that is within 1 % of the least."""
    least = min(seconds.values())
    return next(name for name, each in seconds.items() if each <= TIE_RATIO * least)


def make_threshold_rule(other: str, rule: str, worth: float) -> Callable[[Mapping[str, float]], str]:
    """Return a rule: take ``other`` if its time is at most ``worth`` times that of ``rule``."""
    return lambda seconds: other if seconds.get(other, math.inf) <= worth * seconds.get(rule, math.inf) else rule


@dataclass(frozen=True)
class Question:
    """A choice to make. ``name`` identifies it in logs, pins and resumed runs. The answer depends on ``shape``.

    ``ways`` returns the candidates: each computes a training pass, without communication and without effect on the
    model or random states. ``decide`` chooses from their seconds. ``possible`` tests whether an answer from elsewhere can be
    followed here. ``rule`` is the answer without measuring. ``beside`` measures what is only reported. ``wall``: see
    `measure_candidates`. ``unmeasured``: why it cannot be measured here, the same on all ranks; "" if it can.
    """

    name: str
    shape: Mapping[str, Any]
    rule: str
    ways: Callable[[], Mapping[str, Candidate]]
    possible: Callable[[str], bool]
    decide: Callable[[Mapping[str, float]], str] = choose_fastest
    beside: Callable[[], Mapping[str, Any]] = dict
    wall: bool = False
    unmeasured: str = ""


@dataclass(frozen=True)
class Choice:
    """An answer. ``seconds`` of each candidate that ran, ``problems`` of the others; ``note`` is one line or empty."""

    name: str
    value: str
    source: Source
    shape: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def log(self, log: EventLog) -> None:
        """Write the event of this choice."""
        about = {key: value for key, value in vars(self).items() if key not in ("name", "value") and value}
        log.event(mllog.MEASURED_CHOICE, {"name": self.name, "chosen": self.value}, metadata=about)


class Chooser:
    """Makes the choices of one run. Every rank asks in the same order. ``choices``: the answers so far.

    ``earlier``: choices of the run's earlier part (a resumed run). ``pinned``: choices of the configuration. Without
    ``measure`` all other questions get their rule.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        measure: bool,
        store: ChoiceCache,
        pinned: Mapping[str, str] | None = None,
        earlier: Mapping[str, str] | None = None,
    ) -> None:
        self.world, self.device, self.measure, self.store = world, device, measure, store
        self.pinned, self.earlier = pinned or {}, earlier or {}
        self.choices: dict[str, Choice] = {}
        # All ranks must ask the same questions, so the smallest number counts everywhere.
        self.threads: int = min(world.allgather(torch.get_num_threads()))

    @property
    def ranks(self) -> int:
        """The number of ranks of the run."""
        return self.world.size

    def choose(self, question: Question) -> str:
        """Answer a question; a second one of the same name gets the same answer."""
        if question.name not in self.choices:
            self.choices[question.name] = self._choose(question)
        return self.choices[question.name].value

    def _choose(self, question: Question) -> Choice:
        found = self._given(question)
        if found is not None and self._everywhere(question, found.value):
            return found
        note = ""
        if found is not None and found.source != "cache":
            note = f"{found.source} {found.value} is not possible here"
        if question.unmeasured:
            return _choose_by_rule(question, note or f"not measured: {question.unmeasured}")
        if not self.measure:
            return _choose_by_rule(question, note)
        busy = self._busy(question)
        if busy and question.wall:
            return _choose_by_rule(question, f"not measured: {busy}")
        return self._measured(question, note or busy)

    def _given(self, question: Question) -> Choice | None:
        """Return the choice that is known before measuring, the same on all ranks."""
        for source, given in (("kept", self.earlier), ("pinned", self.pinned)):
            if question.name in given:
                return Choice(question.name, given[question.name], source, question.shape)  # type: ignore[arg-type]
        if not self.measure or question.unmeasured:
            return None
        entry = self.store.find(self._key(question)) if self.world.is_first else None
        found = None if entry is None else _read_cached_choice(question, entry)
        return self.world.broadcast(found, Choice | None)  # type: ignore[no-any-return]

    def _busy(self, question: Question) -> str:
        """Return why other work would distort the wall clock. Empty if CPU time or a GPU's time is measured."""
        if self.device.type == "cuda" or self.threads == 1:
            return ""
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        busy = f"the machine is busy (load {load:.1f} on {cores} CPUs)" if load > BUSY_LOAD_RATIO * cores else ""
        return self.world.broadcast(busy)  # type: ignore[no-any-return]

    def _everywhere(self, question: Question, value: str) -> bool:
        # A node may lack what another has: a library, or the CPUs for that many threads.
        return all(self.world.allgather(question.possible(value)))

    def _measured(self, question: Question, note: str) -> Choice:
        """Measure on all ranks at once, as they will compute. The slowest rank's seconds of each candidate count.

        A result that was measured on a busy machine, or because a pinned choice was impossible, is not cached.
        """
        # All ranks measure at once: alone a rank would have the node's caches and memory for itself.
        self.world.barrier()
        timings = measure_candidates(question.ways(), self.device, wall=question.wall)
        rows = self.world.gather({name: (timing.seconds, timing.problem) for name, timing in timings.items()})
        beside = dict(question.beside())
        choice = None
        if rows is not None:  # on rank 0
            choice = _choose_by_times(question, rows, beside, note)
            if choice.source == "measured" and not choice.note:
                kept = {"chosen": choice.value, **{key: getattr(choice, key) for key in CACHED_FIELDS}}
                self.store.keep(self._key(question), kept)
        return self.world.broadcast(choice, Choice)  # type: ignore[no-any-return]

    def _key(self, question: Question) -> str:
        """Return the cache key: everything that must be equal for a measurement to hold again."""
        # A cache in a home folder is seen from all nodes of a cluster: the key names the machine.
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        about = {
            "host": find_node_name(),
            "processor": read_cpu(find_machine_root(os.environ)).model,
            "device": gpu or self.device.type,
            "torch": torch.__version__,
            "suite": VERSION,
            "threads": torch.get_num_threads(),
            "ranks_of_node": self.world.local_size,
            "name": question.name,
            **question.shape,
        }
        return json.dumps(about, sort_keys=True, default=str)


def make_chooser(
    config: RunConfig, world: World, device: torch.device, earlier: Mapping[str, str] | None = None
) -> Chooser:
    """Make the chooser of a run. ``earlier``: the choices of the continued run's earlier part, or None.

    A continued run without earlier choices followed the rules, and goes on with them.
    """
    measure = config.choices.measure and earlier != {}
    return Chooser(
        world, device, measure=measure, store=_open_store(world), pinned=config.choices.pinned, earlier=earlier
    )


def make_measuring_chooser(world: World, device: torch.device) -> Chooser:
    """Make a chooser for a measurement without a run configuration. It measures what is not cached."""
    return Chooser(world, device, measure=True, store=_open_store(world))


def _open_store(world: World) -> ChoiceCache:
    return ChoiceCache(find_cache_folder() if world.is_first else None)


def _choose_by_rule(question: Question, note: str) -> Choice:
    return Choice(question.name, question.rule, "rule", question.shape, note=note)


def _choose_by_times(
    question: Question,
    rows: Sequence[Mapping[str, tuple[float, str | None]]],
    beside: Mapping[str, Any],
    note: str,
) -> Choice:
    """Decide from each rank's seconds and problems. The slowest rank's seconds count; one rank's problem is enough."""
    problems = {name: why for row in rows for name, (_, why) in row.items() if why is not None}
    seconds = {}
    for name in rows[0]:
        if name not in problems:
            slowest = max(row.get(name, (math.inf, None))[0] for row in rows)
            seconds[name] = float(f"{slowest:.4g}")
    if not seconds:
        unmeasured = _choose_by_rule(question, "nothing could be measured")
        return replace(unmeasured, problems=problems, beside=beside)
    value = question.decide(seconds)
    return Choice(question.name, value, "measured", question.shape, seconds, problems, beside, note)


def _read_cached_choice(question: Question, entry: Mapping[str, Any]) -> Choice | None:
    """Make a choice from a cache entry. None if it is invalid: another version may have written it."""
    value, parts = entry.get("chosen"), [entry.get(name) for name in CACHED_FIELDS]
    if not isinstance(value, str) or not all(isinstance(part, dict) for part in parts):
        return None
    return Choice(question.name, value, "cache", question.shape, *parts)  # type: ignore[arg-type]


def compute_nearest_power_of_two(count: float) -> int:
    """Return the nearest power of two. Numbers with the same one share a measurement."""
    return 1 << max(0, round(math.log2(max(1.0, count))))
