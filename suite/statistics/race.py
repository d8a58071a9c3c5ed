"""Runs a race of entries over blocks. Drops entries that are not the best, at a given chance of a wrong answer.

The best entry is the one that no other beats in more than half of the blocks. Before each block the leader of the
earlier blocks is named. The bet is that the leader is faster (`mlhpc.suite.statistics.bets`). An entry is dropped when the
bets against it reach the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics.bets import BettingTest, compute_sign
from mlhpc.suite.statistics.blocks import Turn, make_random_order, run_block

Times = Mapping[str, float]  # of a block, by entry; infinite: did not finish within its budget


@dataclass(frozen=True)
class RaceRules:
    """The rules of a race. ``error``: chance of a wrong answer. ``blocks``: at most. ``seed``: of orders and runs."""

    entries: tuple[str, ...]
    error: float
    blocks: int
    seed: int

    @property
    def threshold(self) -> float:
        """The wealth that drops an entry.

        If all k entries are equal, k - 1 of them are dropped with a chance of at most ``error``.
        """
        count = len(self.entries)
        return count / (self.error * (count - 1))


@dataclass(frozen=True)
class DroppedEntry:
    """An entry that left the race after a block. ``p``: the chance that the best entry ever looks as bad."""

    block: int
    p: float


@dataclass
class Race:
    """The state of a race. `add` takes its blocks one after the other."""

    rules: RaceRules
    survivors: list[str] = field(init=False)
    dropped: dict[str, DroppedEntry] = field(default_factory=dict)
    blocks: list[Times] = field(default_factory=list)
    points: dict[str, float] = field(init=False)  # mean over rivals of blocks won less blocks lost
    bets: dict[str, BettingTest] = field(init=False)

    def __post_init__(self) -> None:
        if len(set(self.rules.entries)) < 2 or len(set(self.rules.entries)) < len(self.rules.entries):
            raise InputError(
                "a contest needs at least two entries, each with its own name; "
                f"it has {', '.join(self.rules.entries) or 'none'}"
            )
        self.survivors = sorted(self.rules.entries)
        self.points = dict.fromkeys(self.survivors, 0.0)
        self.bets = {name: BettingTest() for name in self.survivors}

    @property
    def winner(self) -> str | None:
        """The only entry left; None if there are several."""
        return self.survivors[0] if len(self.survivors) == 1 else None

    @property
    def over(self) -> bool:
        """True if there is a winner or no block left."""
        return self.winner is not None or len(self.blocks) >= self.rules.blocks

    def next_turns(self) -> list[Turn]:
        """List the turns of the next block in their drawn order; none if the race is over."""
        block = len(self.blocks) + 1
        return (
            []
            if self.over
            else [Turn(block, name) for name in make_random_order(block, self.survivors, self.rules.seed)]
        )

    def add(self, times: Times) -> None:
        """Add a block's times (seconds) of all entries still in the race. Drop entries with wealth above the threshold.

        One entry always stays.
        """
        assert sorted(times) == self.survivors, (sorted(times), self.survivors)
        rivals = {name: [each for each in self.survivors if each != name] for name in self.survivors}
        for name, others in rivals.items():
            # The leader is that of the earlier blocks: a bet must not know its block. In the first one all are bet on
            bet_on = [max(others, key=lambda each: self.points[each])] if self.blocks else others
            self.bets[name].settle(_compute_mean_losses(times, name, bet_on))
        for name, others in rivals.items():
            self.points[name] -= _compute_mean_losses(times, name, others)
        self.blocks.append(times)
        for name in sorted(self.survivors, key=lambda each: self.bets[each].wealth, reverse=True):
            wealth = self.bets[name].wealth
            if len(self.survivors) > 1 and wealth >= self.rules.threshold:
                self.survivors.remove(name)
                self.dropped[name] = DroppedEntry(len(self.blocks), 1.0 / wealth)


def _compute_mean_losses(times: Times, name: str, rivals: Sequence[str]) -> float:
    """Compute the mean over rivals of 1 for a block lost, -1 for one won."""
    return sum(compute_sign(times[name], times[each]) for each in rivals) / len(rivals)


def run_race(rules: RaceRules, known: Mapping[Turn, float], run: Callable[[Turn], float]) -> Race:
    """Run a race to its end: the turns that are ``known`` already are not run again.

    ``run`` makes one run and returns its time, infinite if it did not finish within its budget. All turns of a block
    are run before an entry is dropped. An exception of ``run`` ends the race, and a later call goes on.
    """
    race = Race(rules)
    while turns := race.next_turns():
        race.add(run_block(turns[0].block, [turn.entry for turn in turns], run, known))
    return race


def build_race(rules: RaceRules, known: Mapping[Turn, float]) -> tuple[Race, list[Turn]]:
    """Return the race up to its last complete block, and all turns that it demands. These include the next block's."""
    race = Race(rules)
    demanded: list[Turn] = []
    while turns := race.next_turns():
        demanded += turns
        if not all(turn in known for turn in turns):
            break
        race.add({turn.entry: known[turn] for turn in turns})
    return race, demanded
