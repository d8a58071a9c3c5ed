"""Times several ways to compute one thing against each other, and stops as soon as one is fastest. Keeps and decides nothing.

On a processor with one thread the CPU time counts, which other processes disturb little; with several threads the wall clock,
because CPU time does not tell threads that work from threads that wait. On a GPU it is the time between two events of the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

Way = Callable[[], object]

ROUNDS, LEAST_ROUNDS, FAIR_ROUNDS = 15, 2, 5  # at most; before one leaves; before the race may end
FAR, NEAR = 1.2, 1.03  # a way this much slower than the best leaves; one this near is raced on
BUDGET_S = 0.5  # measured seconds after which a race ends that has been fair
SHORTEST_S = 1e-3  # a shorter way is repeated, so that clocks and launches count little
TOGETHER = 4  # calls in a row of what ranks do together
LONG_S = 0.02  # a way that takes this long at first is not called a second time before it counts


@dataclass(frozen=True)
class Timing:
    """How one way did: the least seconds of a pass, or why it has none."""

    seconds: float = math.inf
    problem: str | None = None


def race(
    ways: Mapping[str, Way],
    device: torch.device,
    *,
    budget_s: float = BUDGET_S,
    wall: bool = False,
    together: bool = False,
) -> dict[str, Timing]:
    """Measure the least seconds of each way, in rounds whose order alternates. A way that raises is out, with its reason.

    Each is called once or twice before it counts. Ways that are far behind leave after a few rounds, so their seconds are of
    fewer passes. ``wall``: by the wall clock on a processor. ``together``: a way is a step of all ranks, so all call each equally
    often, and waiting counts; one that raises ends the race.

    The race ends when the two best are apart, at the latest after some rounds.
    """
    if together:
        return _race_together(ways)
    seconds_of = clock_of(device, wall=wall)
    least: dict[str, float] = {}
    problems: dict[str, str] = {}
    repeats: dict[str, int] = {}
    for name, way in ways.items():
        try:
            first = seconds_of(way, 1)
            first = first if first > LONG_S else seconds_of(way, 1)
        except Exception as error:  # out of memory, an operator that is not there: the others still count
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        least[name], repeats[name] = math.inf, min(50, max(1, math.ceil(SHORTEST_S / max(first, 1e-6))))
    racing, spent = list(least), 0.0
    for number in range(ROUNDS):
        for name in racing if number % 2 == 0 else list(reversed(racing)):
            seconds = seconds_of(ways[name], repeats[name])
            least[name], spent = min(least[name], seconds), spent + seconds * repeats[name]
        if number + 1 < LEAST_ROUNDS or not racing:
            continue
        racing = _still_racing(racing, least, FAR)
        if number + 1 >= FAIR_ROUNDS and (spent > budget_s or len(_still_racing(racing, least, NEAR)) == 1):
            break
    return {name: Timing(problem=problems[name]) if name in problems else Timing(least[name]) for name in ways}


def _race_together(ways: Mapping[str, Way]) -> dict[str, Timing]:
    least = dict.fromkeys(ways, math.inf)
    for _ in range(FAIR_ROUNDS):
        for name, way in ways.items():
            way()  # wakes the ranks, and connects them at first
            least[name] = min(least[name], _processor_seconds(time.perf_counter, way, TOGETHER))
    return {name: Timing(seconds) for name, seconds in least.items()}


def clock_of(device: torch.device, *, wall: bool = False) -> Callable[[Way, int], float]:
    """The clock that counts on a device: a function of a way and how often it is called in a row, to seconds of one call."""
    if device.type == "cuda":
        return _device_seconds
    wall = wall or torch.get_num_threads() > 1
    return partial(_processor_seconds, time.perf_counter if wall else time.process_time)


def _still_racing(names: list[str], least: Mapping[str, float], factor: float) -> list[str]:
    best = min(least[name] for name in names)
    return [name for name in names if least[name] <= factor * best]


def _processor_seconds(clock: Callable[[], float], way: Way, repeats: int) -> float:
    begin = clock()
    for _ in range(repeats):
        way()
    return (clock() - begin) / repeats


def _device_seconds(way: Way, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        way()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats
