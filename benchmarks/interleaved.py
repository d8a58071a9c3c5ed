"""Several ways to compute one thing, timed in interleaved blocks of CPU time, with ratios to the first. No main."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def compare(title: str, formulations: dict[str, Callable[[], object]], *, blocks: int, repeats: int) -> None:
    """Print a table: median CPU-ms of each, and the median over blocks of its ratio to the first with its quartiles.

    The process's CPU time, so that a busy machine disturbs little; each is called twice before it counts.
    """
    times: dict[str, list[float]] = {name: [] for name in formulations}
    for call in formulations.values():
        call(), call()
    for block in range(blocks):
        names = list(formulations) if block % 2 == 0 else list(reversed(formulations))
        for name in names:
            times[name].append(timed(formulations[name], repeats))
    first = next(iter(formulations))
    print(f"{title:44} {'CPU-ms':>9} {'ratio':>7}  quartiles of {blocks} blocks")
    for name, values in times.items():
        ratios = [mine / base for mine, base in zip(values, times[first], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {name:42} {1e3 * statistics.median(values):9.3f} {middle:7.2f}  {low:.2f} to {high:.2f}")


def timed(call: Callable[[], object], repeats: int) -> float:
    """CPU-seconds of one call."""
    begin = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - begin) / repeats
