"""Which of two entries is faster, and by what factor, from their times in common blocks. Valid however long one looks.

Both follow from counts of blocks won and lost (`race.evidence`): no distribution of times is assumed. The better entry is the one
that is faster in more than half of the blocks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.tournament.race import Times, evidence, outcome

LEVEL = 0.05  # chance that an interval misses, and that some entry is wrongly placed on or off the front


@dataclass(frozen=True)
class Ratio:
    """The median ratio of two entries' times over ``blocks`` common blocks, and its 95 % interval; infinite ends: no bound yet."""

    value: float
    low: float
    high: float
    blocks: int


def compute_ratio(mine: str, its: str, blocks: Sequence[Times]) -> Ratio | None:
    """My time over its time. A run that did not finish took infinitely long; None if no block tells."""
    common = [times for times in blocks if mine in times and its in times]
    ratios = sorted(ratio for times in common if (ratio := _ratio(times[mine], times[its])) is not None)
    if not ratios:
        return None
    count = len(ratios)
    cut = 0  # so many from each end are outside
    while cut < count and evidence(count - cut, cut) >= 2.0 / LEVEL:
        cut += 1
    low, high = (ratios[cut - 1], ratios[count - cut]) if 0 < cut <= (count + 1) // 2 else (0.0, math.inf)
    return Ratio(statistics.median(ratios), low, high, count)


def _ratio(mine: float, its: float) -> float | None:
    if math.isinf(mine):
        return None if math.isinf(its) else math.inf
    return mine / its


def surely_less(mine: str, its: str, blocks: Sequence[Times], entries: int) -> bool:
    """True if I needed less in so many blocks that chance would do it to any pair with a probability of at most `LEVEL`."""
    signs = [outcome(times[its], times[mine]) for times in blocks if mine in times and its in times]
    return evidence(signs.count(1), signs.count(-1)) >= entries * (entries - 1) / LEVEL


ON_FRONT, DOMINATED, CANNOT_TELL = "on the front", "dominated", "cannot tell"


def find_front(entries: Sequence[str], objectives: Mapping[str, Sequence[Times]]) -> dict[str, str]:
    """Say of each entry whether it is on the Pareto front: dominated if another surely needs less of everything.

    On the front if it surely needs less of something than each other.
    """
    surely = {
        (mine, its): [surely_less(mine, its, blocks, len(entries)) for blocks in objectives.values()]
        for mine in entries
        for its in entries
        if mine != its
    }
    found = {}
    for name in entries:
        others = [each for each in entries if each != name]
        if dominating := [each for each in others if all(surely[each, name])]:
            found[name] = f"{DOMINATED} by {', '.join(dominating)}"
        else:
            found[name] = ON_FRONT if all(any(surely[name, each]) for each in others) else CANNOT_TELL
    return found
