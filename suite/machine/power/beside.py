"""Starts one power sampler per node before staging, and ends it after run_stop."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mlhpc.suite import LAUNCH
from mlhpc.suite.files import print_line, render_reason
from mlhpc.suite.log.results_tree import POWER
from mlhpc.suite.machine.power.counters import find_node_counters
from mlhpc.suite.machine.probes.processor import find_machine_root
from mlhpc.suite.processes import make_python_command
from mlhpc.suite.world import World

_ROUNDS = 5  # exchanges of which the shortest tells the clock's offset
_END_S = 5.0  # for which a sampler may take to write its end


@contextmanager
def run_power_sampler(log: Path, world: World, gpu: str | None, lock: Path, *, wanted: bool) -> Iterator[None]:
    """Sample the power of every node into ``power/<name of the log>/`` while the body runs. Every rank calls it.

    A sampler ends when another process takes over the trial's lock. On a node without counters nothing is written. A
    sampler that cannot start prints one line on stderr; the run goes on.
    """
    process = _start_sampler(log, world, gpu, lock) if wanted else None
    try:
        yield
    finally:
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start_sampler(log: Path, world: World, gpu: str | None, lock: Path) -> subprocess.Popen[bytes] | None:
    """Start the sampler of this node, on its first rank. All ranks take part in comparing clocks."""
    root = find_machine_root(os.environ)
    gpus = world.allgather((world.node, gpu))
    mine = list(dict.fromkeys(uuid for node, uuid in gpus if node == world.node and uuid is not None))
    has = world.local_rank == 0 and (bool(mine) or bool(find_node_counters(root).counters))
    if not any(world.allgather(has)):
        return None
    offset, bound = measure_clock_offset(world)
    if not has:
        return None
    folder = str(log.parent / POWER / log.stem)
    words = [
        *make_python_command("-m", "mlhpc.suite.machine.power.sampler", folder, str(world.node)),
        "--root",
        str(root),
        "--offset",
        f"{offset:.6f}",
        "--bound",
        f"{bound:.6f}",
        "--lock",
        str(lock),
        *_make_option_words("--gpu", mine),
    ]
    unmarked = {name: value for name, value in os.environ.items() if name != LAUNCH}  # it is no rank
    try:
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=unmarked, start_new_session=True
        )
    except OSError as error:
        print_line(f"mlhpc: power is not sampled: {render_reason(error)}", error=True)
        return None


def _make_option_words(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def measure_clock_offset(world: World) -> tuple[float, float]:
    """Measure what to add to this node's clock to get rank 0's, and the error bound, in seconds. A collective.

    Rank 0 read its clock between the moments when this rank entered and left the exchange. The shortest exchange
    counts.
    """
    best = (0.0, float("inf"))
    for _ in range(_ROUNDS):
        begin = time.time()
        world.barrier()  # rank 0 reads its clock after this rank came here
        said = world.broadcast(time.time() if world.is_first else None)
        end = time.time()
        half = max((end - begin) / 2, 0.0)
        if half < best[1]:
            best = (said - (begin + end) / 2, half)
    return (0.0, 0.0) if world.node == 0 else best
