"""Answers questions such as "which product is fastest here?" for all ranks of a run together.

The answer is what an earlier part of the run chose, what the configuration pins, what this user's cache holds, or what is
measured now, in this order; without measuring it is a fixed rule. Rank 0 decides for all, and a forward pass never measures.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from suite import VERSION
from suite.log import mllog
from suite.log.mllog import EventLog
from suite.machine.choice.race import Way, race
from suite.machine.choice.store import Store, cache_folder
from suite.machine.probes.processor import read_cpu
from suite.machine.probes.root import machine_root
from suite.world import World, node_name

if TYPE_CHECKING:
    from suite.config import RunConfig

Source = Literal["kept", "pinned", "cache", "measured", "rule"]
BUSY = 1.25  # load over CPUs from which on a choice by the wall clock is not kept
EVEN = 1.01  # within this, the first way of a question stays the choice: a choice should not change with the noise


def fastest(seconds: Mapping[str, float]) -> str:
    """The way with the least seconds; the first of those within 1 % of it."""
    least = min(seconds.values())
    return next(name for name, each in seconds.items() if each <= EVEN * least)


def if_worth(other: str, rule: str, worth: float) -> Callable[[Mapping[str, float]], str]:
    """What decides for ``other`` where it takes at most ``worth`` of the time of ``rule``. One without seconds takes for ever."""
    return lambda seconds: other if seconds.get(other, math.inf) <= worth * seconds.get(rule, math.inf) else rule


@dataclass(frozen=True)
class Question:
    """One thing to choose. ``name`` is what a log, a pin and a resumed run know it by; ``shape`` what the answer depends on.

    ``ways`` each compute a training pass, without effect on the model or random states, and without communication unless they are
    timed ``together``. ``decide`` makes the answer of their seconds, ``possible`` says whether an answer from elsewhere can be
    followed here, ``rule`` is the answer without measuring. ``beside`` measures what is told but not chosen. ``wall``,
    ``together``: see `race`. ``unmeasured``: why it cannot be measured here, the same on all ranks; "" if it can.
    """

    name: str
    shape: Mapping[str, Any]
    rule: str
    ways: Callable[[], Mapping[str, Way]]
    possible: Callable[[str], bool]
    decide: Callable[[Mapping[str, float]], str] = fastest
    beside: Callable[[], Mapping[str, Any]] = dict
    wall: bool = False
    together: bool = False
    unmeasured: str = ""


@dataclass(frozen=True)
class Choice:
    """An answer. ``seconds`` of each way that ran, ``problems`` of the others; ``note`` is one line, empty if nothing is to say."""

    name: str
    value: str
    source: Source
    shape: Mapping[str, Any]
    seconds: Mapping[str, float] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def log(self, log: EventLog) -> None:
        """Write the event."""
        about = {key: value for key, value in vars(self).items() if key not in ("name", "value") and value}
        log.event(mllog.MEASURED_CHOICE, {"name": self.name, "chosen": self.value}, metadata=about)


class Chooser:
    """Makes the choices of one run; every rank asks the same questions in the same order. ``choices`` has the answers so far.

    ``earlier`` are the choices of the run's earlier part (a resumed run), ``pinned`` those of the configuration. Without
    ``measure`` what neither names follows the rule.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        measure: bool,
        store: Store,
        pinned: Mapping[str, str] | None = None,
        earlier: Mapping[str, str] | None = None,
    ) -> None:
        self.world, self.device, self.measure, self.store = world, device, measure, store
        self.pinned, self.earlier = pinned or {}, earlier or {}
        self.choices: dict[str, Choice] = {}
        self.threads: int = min(world.allgather(torch.get_num_threads()))

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
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
        note = "" if found is None or found.source == "cache" else f"{found.source} {found.value} is not possible here"
        if not self.measure or question.unmeasured:
            note = note or (question.unmeasured and f"not measured: {question.unmeasured}")
            return Choice(question.name, question.rule, "rule", question.shape, note=note)
        busy = self._busy(question)
        if busy and question.wall:
            return Choice(question.name, question.rule, "rule", question.shape, note=f"not measured: {busy}")
        return self._measured(question, note or busy)

    def _given(self, question: Question) -> Choice | None:
        """What is known before measuring, the same on all ranks."""
        for source, given in (("kept", self.earlier), ("pinned", self.pinned)):
            if question.name in given:
                return Choice(question.name, given[question.name], source, question.shape)  # type: ignore[arg-type]
        if not self.measure or question.unmeasured:
            return None
        entry = self.store.find(self._key(question)) if self.world.is_first else None
        return self.world.broadcast(None if entry is None else _from_cache(question, entry), Choice | None)  # type: ignore[no-any-return]

    def _busy(self, question: Question) -> str:
        """Why the wall clock would tell of other work, which is no property of the machine; empty if CPU time or a GPU's counts."""
        if self.device.type == "cuda" or (self.threads == 1 and not question.together):
            return ""
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        busy = f"the machine is busy (load {load:.1f} on {cores} CPUs)" if load > BUSY * cores else ""
        return self.world.broadcast(busy)  # type: ignore[no-any-return]

    def _everywhere(self, question: Question, value: str) -> bool:
        return all(self.world.allgather(question.possible(value)))

    def _measured(self, question: Question, note: str) -> Choice:
        """Measure on all ranks at once, as they will compute. Of each way the slowest rank's seconds count.

        What was measured beside other work, or in place of a pin, is not kept for later runs.
        """
        self.world.barrier()
        timings = race(question.ways(), self.device, wall=question.wall, together=question.together)
        rows = self.world.gather({name: (timing.seconds, timing.problem) for name, timing in timings.items()})
        beside = dict(question.beside())
        choice = None
        if rows is not None:
            problems = {name: why for row in rows for name, (_, why) in row.items() if why is not None}
            names = [name for name in rows[0] if name not in problems]
            seconds = {name: _four_digits(max(row.get(name, (math.inf, None))[0] for row in rows)) for name in names}
            value = question.decide(seconds) if seconds else question.rule
            note = note if seconds else "nothing could be measured"
            source: Source = "measured" if seconds else "rule"
            choice = Choice(question.name, value, source, question.shape, seconds, problems, beside, note)
            if seconds and not note:
                kept = {"chosen": value, "seconds": seconds, "problems": problems, "beside": beside}
                self.store.keep(self._key(question), kept)
        return self.world.broadcast(choice, Choice)  # type: ignore[no-any-return]

    def _key(self, question: Question) -> str:
        """What must be equal for a measurement to hold again."""
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        about = {
            "host": node_name(),
            "processor": read_cpu(machine_root(os.environ)).model,
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
    """Make what makes the choices of a run. ``earlier``: those of the part of the run that is continued; None: it is new.

    A run that is continued and made no choices followed the rules, and goes on with them.
    """
    measure = config.choices.measure and earlier != {}
    return Chooser(world, device, measure=measure, store=_store(world), pinned=config.choices.pinned, earlier=earlier)


def measuring_chooser(world: World, device: torch.device) -> Chooser:
    """Make what makes the choices of a measurement without a configuration of a run: what the cache has not is measured."""
    return Chooser(world, device, measure=True, store=_store(world))


def _store(world: World) -> Store:
    return Store(cache_folder() if world.is_first else None)


def _four_digits(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _from_cache(question: Question, entry: Mapping[str, Any]) -> Choice | None:
    """An entry of the cache as a choice; None if it is not one."""
    value, parts = entry.get("chosen"), [entry.get(name) for name in ("seconds", "problems", "beside")]
    if not isinstance(value, str) or not all(isinstance(part, dict) for part in parts):
        return None
    return Choice(question.name, value, "cache", question.shape, *parts)  # type: ignore[arg-type]


def class_of(count: float) -> int:
    """The nearest power of two: numbers of one class are measured once."""
    return 1 << max(0, round(math.log2(max(1.0, count))))
