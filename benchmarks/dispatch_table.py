"""The table of `mlhpc dispatch`, and how far it can be trusted: order of modes, closed form, an injected millisecond.

    python benchmarks/dispatch_table.py > benchmarks/results/DATE-dispatch_table.txt        alone on a quiet machine; 3 minutes

Order: of 20 repetitions those in which sync takes longer than ahead, ahead longer than chained, and chained at most 10 % more
than SPMD, with empty computations. Millisecond: time of sync with 1 ms per command minus that without, in turn.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from mlhpc.plugins.dispatch.controllers import start_monarch, start_ray
from mlhpc.plugins.dispatch.loops import Controller, FirstRank, list_modes, make_link, serve
from mlhpc.plugins.dispatch.measure import make_case, make_interval, measure_overheads, time_in_turn
from mlhpc.plugins.dispatch.results import Dispatch
from mlhpc.suite.launch.local import make_mpiexec_command
from mlhpc.suite.world import World

REPEATS = 20
NEAR = 1.1  # of SPMD's time: chained is about SPMD
MODES = list_modes(16, 128, 2)


def judge(name: str, controller: Controller) -> None:
    """Print the order of modes, and what an injected millisecond shows as."""
    spmd, sync, ahead, chained, _ = MODES
    times = measure_overheads(controller, MODES, REPEATS)
    rows = list(zip(*(times[mode] for mode in (spmd, sync, ahead, chained)), strict=True))
    ordered = sum(s > a > c and c < NEAR * base for base, s, a, c in rows)
    ratios = ", ".join(
        f"{mode.name} {statistics.median(times[mode]) / statistics.median(times[spmd]):.2f}" for mode in MODES
    )
    plain = make_case(sync, 0.0, 1e-3)
    slowed = plain._replace(delay_s=1e-3)
    found = time_in_turn(controller, (plain, slowed), REPEATS)
    shows = make_interval([a - b for a, b in zip(found[slowed], found[plain], strict=True)])
    print(
        f"{name:8} order in {ordered} of {REPEATS}; 1 ms shows as {shows.render(1e3, ' ms')}; times over SPMD's: {ratios}"
    )


def judge_own() -> None:
    """On each rank: judge mpi and torch."""
    sys.stdout.reconfigure(line_buffering=True)
    world = World.create()
    for name in ("mpi", "torch"):
        link, version = make_link(name, world, world.size, 2)
        if world.is_first:
            controller = FirstRank(link, version)
            judge(name, controller)
            controller.stop()
        else:
            serve(link)
        world.barrier()


def main() -> None:
    """Print the table, then the judgements."""
    sys.stdout.reconfigure(line_buffering=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dispatch.json")
        subprocess.run(
            [sys.executable, "-m", "mlhpc", "dispatch", "-q", "-o", path], check=True, stdout=subprocess.DEVNULL
        )
        found = msgspec.json.decode(path.read_bytes(), type=Dispatch)
        print("\n".join(found.render()))
        known = [row for row in found.rows if row.break_even_s and row.predicted_s is not None]
        near = [row for row in known if abs(row.predicted_s / row.break_even_s.value - 1) <= 0.2]
        print(f"\nclosed form within 20 % of the measured break-even: {len(near)} of {len(known)} rows")
        subprocess.run([*make_mpiexec_command(ranks=2), sys.executable, __file__, "--rank"], check=True)
        for name, start in (("ray", start_ray), ("monarch", start_monarch)):
            meeting = Path(folder, name)
            meeting.mkdir()
            controller = start(2, 2, str(meeting))
            judge(name, controller)
            controller.stop()


if __name__ == "__main__":
    judge_own() if "--rank" in sys.argv else main()
