"""Times several ways to compute one thing against each other, and stops as soon as one is fastest.

On a processor with one thread CPU time counts, since other processes disturb it little. With several threads it is the
wall clock, because CPU time does not distinguish working threads from waiting ones. On a GPU it is the time between two
events of the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

Candidate = Callable[[], object]

ROUNDS, MIN_ROUNDS, FULL_ROUNDS = 15, 2, 5  # at most; before one leaves; before timing may end
DROP_RATIO, TIE_RATIO = 1.2, 1.03  # a candidate this much slower than the best leaves; one this near is raced on
BUDGET_S = 0.5  # measured seconds after which fair rounds are enough
SHORTEST_S = 1e-3  # a shorter candidate is repeated, so that clocks and launches count little
COLLECTIVE_REPEATS = 4  # calls in a row of what ranks do together
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
    together: bool = False,
) -> dict[str, Timing]:
    """Measure the least seconds of each candidate, in rounds of alternating order. A candidate that raises is dropped.

    The first one or two calls do not count. Candidates far behind are dropped after a few rounds, so their seconds come
    from fewer passes. ``wall``: use the wall clock on a processor. ``together``: a candidate is a step of all ranks.
    Then all ranks call each equally often, waiting counts, and an error ends the measurement.

    It ends when the two best differ clearly, or after a fixed number of rounds.
    """
    if together:
        return _measure_together(candidates)
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
        if number >= FULL_ROUNDS and (spent > budget_s or len(_select_near_best(racing, least, TIE_RATIO)) == 1):
            break
    return least


def _choose_repeats(candidate: Candidate, seconds_of: Callable[[Candidate, int], float]) -> int:
    """Call a candidate once or twice. Returns how many calls in a row a clock can measure well."""
    first = seconds_of(candidate, 1)
    if first <= LONG_S:  # the first call also compiles and allocates
        first = seconds_of(candidate, 1)
    return min(50, max(1, math.ceil(SHORTEST_S / max(first, 1e-6))))


def _measure_together(candidates: Mapping[str, Candidate]) -> dict[str, Timing]:
    least = dict.fromkeys(candidates, math.inf)
    for _ in range(FULL_ROUNDS):
        for name, candidate in candidates.items():
            candidate()  # wakes the ranks, and connects them at first
            least[name] = min(least[name], _measure_on_cpu(time.perf_counter, candidate, COLLECTIVE_REPEATS))
    return {name: Timing(seconds) for name, seconds in least.items()}


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
