"""The race: who is still in it after each block, and why each other entry was dropped. Pure arithmetic on times of blocks.

The best entry is the one that no other beats in more than half of the blocks. Against "this entry is the best" a wealth of 1
is bet: before each block the leader of the earlier blocks is named, and a part of the wealth is put on "the leader is faster".
If the entry is the best, this wealth does not grow on average, so it ever reaches w with a probability of at most 1/w (Ville,
1939), however long one looks and whatever the times are distributed like. An entry whose wealth reaches `threshold` is dropped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from suite.errors import InputError

STAKES = ((1.0, 0.4), (0.9, 0.15), (0.8, 0.1), (0.6, 0.15), (0.4, 0.1), (0.2, 0.1))
"""The shares of the wealth that are bet each time, and the part of the wealth that is bet so. The parts sum to 1."""


@dataclass(frozen=True)
class Plan:
    """What decides a tournament: the entries, the chance of a wrong answer, the most blocks and the seed of orders and runs."""

    entries: tuple[str, ...]
    error: float
    blocks: int
    seed: int

    @property
    def threshold(self) -> float:
        """The wealth that drops an entry. With k equal entries, k - 1 of them are dropped with a chance of at most ``error``."""
        count = len(self.entries)
        return count / (self.error * (count - 1))

    @property
    def fewest(self) -> int:
        """Blocks before which nobody can be dropped, however the runs go."""
        return next(n for n in range(1, 1000) if evidence(n, 0) >= self.threshold)

    def order(self, block: int, survivors: Sequence[str]) -> list[str]:
        """The order of the runs of a block, drawn anew for each.

        Independent orders, none balanced by force: only so are times of equal entries exchangeable in each block, whatever the
        machine does meanwhile.
        """
        drawn = sorted(survivors)
        random.Random(f"{self.seed}/{block}").shuffle(drawn)  # noqa: S311  no secret
        return drawn

    def run_seed(self, block: int) -> int:
        """The seed of all runs of a block."""
        return self.seed + block


@dataclass(frozen=True)
class Turn:
    """One run: an entry in a block. Blocks count from 1."""

    block: int
    entry: str


@dataclass(frozen=True)
class Dropped:
    """An entry that left the race after a block. ``p``: the chance that the best entry looks like this or worse, at any time."""

    block: int
    leader: str
    p: float


Times = Mapping[str, float]  # of a block, by entry; infinite: did not finish within its budget


@dataclass
class Race:
    """The state of a race. `add` takes its blocks one after the other."""

    plan: Plan
    survivors: list[str] = field(init=False)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    blocks: list[Times] = field(default_factory=list)
    points: dict[str, float] = field(init=False)
    _wealth: dict[str, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        if len(set(self.plan.entries)) < 2 or len(set(self.plan.entries)) < len(self.plan.entries):
            raise InputError(f"a race needs two or more entries, each once; there are {len(self.plan.entries)}")
        self.survivors = sorted(self.plan.entries)
        self.points = dict.fromkeys(self.survivors, 0.0)
        self._wealth = {name: [1.0] * len(STAKES) for name in self.survivors}

    @property
    def winner(self) -> str | None:
        """The only entry left; None while nobody can tell."""
        return self.survivors[0] if len(self.survivors) == 1 else None

    @property
    def over(self) -> bool:
        """True if there is a winner or the budget is spent."""
        return self.winner is not None or len(self.blocks) >= self.plan.blocks

    def wealth(self, name: str) -> float:
        """The evidence against an entry; 1 at the beginning."""
        return math.fsum(part * grown for (_, part), grown in zip(STAKES, self._wealth[name], strict=True))

    def leader(self, of: Sequence[str]) -> str | None:
        """The entry that beat most of its rivals so far; None before the first block. Of equal ones the first by name."""
        return max(of, key=lambda name: self.points[name]) if self.blocks else None

    def add(self, times: Times) -> None:
        """Take the times of a block: those of exactly the survivors."""
        assert sorted(times) == self.survivors, (sorted(times), self.survivors)
        leaders = {name: self.leader([each for each in self.survivors if each != name]) for name in self.survivors}
        for name, leader in leaders.items():
            rivals = [leader] if leader else [each for each in self.survivors if each != name]
            lost = sum(outcome(times[name], times[each]) for each in rivals) / len(rivals)
            self._wealth[name] = [
                grown * (1.0 + stake * lost) for (stake, _), grown in zip(STAKES, self._wealth[name], strict=True)
            ]
        for name in self.survivors:
            rivals = [each for each in self.survivors if each != name]
            self.points[name] -= sum(outcome(times[name], times[each]) for each in rivals) / len(rivals)
        self.blocks.append(times)
        self._drop(leaders)

    def _drop(self, leaders: Mapping[str, str | None]) -> None:
        """Drop whom the evidence is against, the worst first; one always stays."""
        for name in sorted(self.survivors, key=self.wealth, reverse=True):
            if len(self.survivors) > 1 and self.wealth(name) >= self.plan.threshold:
                self.survivors.remove(name)
                self.dropped[name] = Dropped(len(self.blocks), leaders[name] or "all others", 1.0 / self.wealth(name))


def outcome(mine: float, its: float) -> int:
    """1 if I was slower, -1 if I was faster, 0 for a tie: two that did not finish, or equal times."""
    return (mine > its) - (mine < its)


def evidence(lost: int, won: int) -> float:
    """The wealth after so many blocks lost to and won against one rival, named beforehand; ties change nothing."""
    return math.fsum(part * (1.0 + stake) ** lost * (1.0 - stake) ** won for stake, part in STAKES)


def run_race(plan: Plan, known: Mapping[Turn, float], run: Callable[[Turn], float]) -> Race:
    """Run a tournament to its end: the turns that are ``known`` already are not run again.

    ``run`` makes one run and returns its time, infinite if it did not finish within its budget. All turns of a block are run,
    one after the other, before anybody is dropped. What ``run`` raises ends the tournament, and a later call goes on.
    """
    race = Race(plan)
    while not race.over:
        block = len(race.blocks) + 1
        turns = [Turn(block, name) for name in plan.order(block, race.survivors)]
        race.add({turn.entry: known[turn] if turn in known else run(turn) for turn in turns})
    return race


def replay(plan: Plan, known: Mapping[Turn, float]) -> tuple[Race, list[Turn]]:
    """The race as far as its complete blocks go, and the turns of the next block; none if it is over."""
    race = Race(plan)
    while not race.over:
        block = len(race.blocks) + 1
        turns = [Turn(block, name) for name in plan.order(block, race.survivors)]
        if not all(turn in known for turn in turns):
            return race, turns
        race.add({turn.entry: known[turn] for turn in turns})
    return race, []
