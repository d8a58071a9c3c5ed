"""What a rank costs the others: open files, control traffic and start-up at 4 to 64 ranks, oversubscribed; a fit for 8,192.

    python benchmarks/scale.py [--ranks 4 8 16 32 64] [--predict 8192]

One epoch of CosmoFlow `smoke` on local MPI ranks. Bytes are those of the harness's own objects and numbers (not gradients):
what a rank gives in and what it gets, as pickles, from its start to run_stop. They and the open files do not depend on how
many ranks share a core, so they are fitted as a + b n by least squares, with the 95 % interval of a prediction. Start-up
does depend on it: its wall time is shown and not extrapolated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlhpc.suite.statistics import compute_t_quantile

SETTINGS = ("max_epochs=1", "global_batch_size=64", "submission.division=open")
QUANTITIES = {
    "open_files": "open files of a rank",
    "received_first": "bytes that rank 0 gets",
    "received_other": "bytes that another rank gets",
    "given": "bytes that a rank gives in",
}


def be_a_rank(data: str, run: str) -> None:
    """Train one epoch as one rank, counting; rank 0 prints a line of JSON."""
    first_line = time.perf_counter()
    from mlhpc.suite import world as worlds
    from mlhpc.suite.config import load_config
    from mlhpc.suite.descriptor import load_descriptor
    from mlhpc.suite.log.run_folder import RunFolder
    from mlhpc.suite.training.statement import TrialPlan
    from mlhpc.suite.training.worker import run_worker

    counts = {"given": 0, "received": 0, "collectives": 0}
    original = worlds.MpiTransport

    class Counting(original):  # type: ignore[misc,valid-type]
        def allgather(self, data: bytes) -> list[bytes]:
            everyone = super().allgather(data)
            _count(counts, data, everyone)
            return everyone

        def gather(self, data: bytes) -> list[bytes] | None:
            everyone = super().gather(data)
            _count(counts, data, everyone or [])
            return everyone

        def broadcast(self, data: bytes, root: int) -> bytes:
            answer = super().broadcast(data, root)
            is_root = self.rank == root
            _count(counts, answer if is_root else b"", [] if is_root else [answer])
            return answer

        def sum(self, values: Any) -> Any:
            counts["given"] += values.nbytes
            counts["received"] += values.nbytes
            counts["collectives"] += 1
            return super().sum(values)

    worlds.MpiTransport = Counting  # type: ignore[misc]
    chosen = load_descriptor("cosmoflow")
    config = load_config(chosen, "smoke", (f"data={data}", *SETTINGS))
    open_files = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            open_files[0] = max(open_files[0], sum(1 for _ in Path("/proc/self/fd").iterdir()))

    threading.Thread(target=watch, daemon=True).start()
    run_worker(TrialPlan(chosen, config, RunFolder(Path(run)), 0, base_seed=1), first_line=first_line)
    done.set()
    from mpi4py import MPI

    usage = resource.getrusage(resource.RUSAGE_SELF)
    mine = {**counts, "open_files": open_files[0], "resident_mib": usage.ru_maxrss / 1024}
    everyone = MPI.COMM_WORLD.gather(mine, root=0)
    if everyone is not None:
        others = everyone[1:]
        print(
            json.dumps(
                {
                    "open_files": max(rank["open_files"] for rank in everyone),
                    "received_first": everyone[0]["received"],
                    "received_other": statistics.fmean(rank["received"] for rank in others),
                    "given": statistics.fmean(rank["given"] for rank in others),
                    "collectives": everyone[0]["collectives"],
                    "resident_mib": statistics.fmean(rank["resident_mib"] for rank in everyone),
                }
            )
        )


def _count(counts: dict[str, int], given: bytes, received: Sequence[bytes]) -> None:
    counts["collectives"] += 1
    counts["given"] += len(given)
    counts["received"] += sum(map(len, received))


def measure(ranks: int, data: Path, root: Path) -> dict[str, float]:
    """One run on ``ranks`` ranks: what rank 0 printed."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    run = root / f"run{ranks}"
    words = [str(mpiexec), "-n", str(ranks), sys.executable, __file__, "--rank", str(data), str(run)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{ranks} ranks: no answer; {done.stdout[-500:]} {done.stderr[-500:]}")
    return dict(json.loads(lines[0]))


def predict(ranks: Sequence[int], values: Sequence[float], at: float) -> tuple[float, float]:
    """Least squares a + b n at ``at``, and half the width of the 95 % interval of a prediction."""
    n = len(ranks)
    mean_x, mean_y = statistics.fmean(ranks), statistics.fmean(values)
    spread = sum((x - mean_x) ** 2 for x in ranks)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(ranks, values, strict=True)) / spread
    start = mean_y - slope * mean_x
    rest = sum((y - start - slope * x) ** 2 for x, y in zip(ranks, values, strict=True)) / (n - 2)
    error = math.sqrt(rest * (1 + 1 / n + (at - mean_x) ** 2 / spread))
    return start + slope * at, compute_t_quantile(0.975, n - 2) * error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--predict", type=int, default=8192)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_a_rank(*options.rank)
        return
    with tempfile.TemporaryDirectory(prefix="mlhpc-scale-") as scratch:
        root = Path(scratch)
        words = ["data", "generate", "cosmoflow", "--size", "smoke", "-o", str(root / "data")]
        subprocess.run([sys.executable, "-P", "-m", "mlhpc", *words], check=True, capture_output=True)
        rows = {}
        print("| ranks |", " | ".join(QUANTITIES.values()), "| collectives | resident MiB of a rank | wall s |")
        print("|" + " --- |" * (len(QUANTITIES) + 4))
        for ranks in options.ranks:
            begin = time.monotonic()
            row = rows[ranks] = measure(ranks, root / "data", root)
            shown = [f"{row[name]:,.0f}" for name in (*QUANTITIES, "collectives", "resident_mib")]
            print(f"| {ranks} | {' | '.join(shown)} | {time.monotonic() - begin:.0f} |", flush=True)
    print(f"\n| quantity | at {options.predict:,} ranks, a + b n | 95 % interval |\n| --- | --- | --- |")
    for name, title in QUANTITIES.items():
        value, half = predict(list(rows), [row[name] for row in rows.values()], options.predict)
        print(f"| {title} | {value:,.0f} | {max(0.0, value - half):,.0f} to {value + half:,.0f} |")


if __name__ == "__main__":
    main()
