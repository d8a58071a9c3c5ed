"""How fast logs become tables, beside plain json.loads over every MLLOG line of the same files.

    python benchmarks/ingest.py PATH...        clones of mlcommons/hpc_results_v*, packages or run folders

Both in wall and in CPU seconds (children included), in turn, best of the repeats, and the median of the ratios within each round;
the baseline is one process that splits and decodes and makes no tables. ``events`` reads the logs' events in one process, and
makes no tables. The targets are in docs/tables.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from mlhpc.analysis.tables.ingest import read_tables
from mlhpc.suite.descriptor import list_installed_cards
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.results_tree import find_logs


def main() -> None:
    parser = argparse.ArgumentParser(description="Ingest speed beside plain json.loads.")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    files = [place.path for place in find_logs(given.paths)[0]]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    cards = list_installed_cards()
    work: dict[str, Callable[[], object]] = {
        "json.loads": lambda: decode(files),
        "events": lambda: sum(len(read_events(path, steps=False).events) for path in files),
        "ingest": lambda: read_tables(given.paths, cards),
    }
    rounds = [{name: timed(each) for name, each in work.items()} for _ in range(given.repeats)]
    print(f"{len(files)} logs, {megabytes:.0f} MB, {len(os.sched_getaffinity(0))} cores, {given.repeats} rounds")
    for name in work:
        wall, cpu = (min(times[name][kind] for times in rounds) for kind in (0, 1))
        ratios = [times[name][1] / times["json.loads"][1] for times in rounds]
        print(
            f"{name:10s} {wall:6.2f} s wall  {cpu:6.2f} s CPU  {len(files) / wall:6.0f} log/s  {megabytes / wall:6.1f} MB/s  "
            f"CPU over json.loads {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        )


def decode(files: list[Path]) -> int:
    count = 0
    for path in files:
        for line in path.read_text("utf-8", "replace").splitlines():
            at = line.find(":::MLLOG ")
            if at >= 0:
                json.loads(line[at + 9 :])
                count += 1
    return count


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds and CPU seconds."""
    wall, cpu = time.monotonic(), sum(os.times()[:4])
    work()
    return time.monotonic() - wall, sum(os.times()[:4]) - cpu


if __name__ == "__main__":
    main()
