"""How fast logs become tables, beside plain json.loads over every MLLOG line of the same files.

    python benchmarks/ingest.py PATH...        clones of mlcommons/hpc_results_v*, packages or run folders

Both in wall and in CPU seconds (children included), best of the repeats; the baseline is one process that splits and
decodes and makes no tables. The targets are in docs/tables.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from analysis.tables.ingest import ingest
from suite.descriptor import installed_cards
from suite.log.results_tree import find_logs


def main() -> None:
    parser = argparse.ArgumentParser(description="Ingest speed beside plain json.loads.")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    files = [place.path for place in find_logs(given.paths)[0]]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    cards = installed_cards()
    tables = best(lambda: ingest(given.paths, cards), given.repeats)
    plain = best(lambda: decode(files), given.repeats)
    print(f"{len(files)} logs, {megabytes:.0f} MB, {len(os.sched_getaffinity(0))} cores")
    for name, (wall, cpu) in (("ingest", tables), ("json.loads", plain)):
        print(
            f"{name:10s} {wall:6.2f} s wall  {cpu:6.2f} s CPU  {len(files) / wall:6.0f} log/s  {megabytes / wall:6.1f} MB/s"
        )
    print(f"ingest is {plain[0] / tables[0]:.1f}x as fast by wall, {plain[1] / tables[1]:.1f}x by CPU")


def decode(files: list[Path]) -> int:
    count = 0
    for path in files:
        for line in path.read_text("utf-8", "replace").splitlines():
            at = line.find(":::MLLOG ")
            if at >= 0:
                json.loads(line[at + 9 :])
                count += 1
    return count


def best(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least wall seconds and least CPU seconds."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.monotonic(), sum(os.times()[:4])
        work()
        walls.append(time.monotonic() - wall)
        cpus.append(sum(os.times()[:4]) - cpu)
    return min(walls), min(cpus)


if __name__ == "__main__":
    main()
