"""What experts in files or in the host's memory cost where loading takes less than half of computing: interleaved pairs of runs.

    python benchmarks/offload_pairs.py [--pairs 20] [--batch 64] [--tier file] > benchmarks/results/DATE-offload_pairs.txt

Each pair trains `moe_lm` smoke for two epochs on one rank without offload and with it, in an order that alternates. Compared is
the throughput of the second epoch. Run it alone: it takes ten minutes. Printed: n, the ratio with / without of geometric means with
its 90 % interval, and what a step waits for loads. Needs the data set ($MLHPC_DATA).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.machine.probes.processor import read_cpu
from mlhpc.suite.statistics.comparison import compute_equivalence

RUN = ["run", "moe_lm", "--size", "smoke", "--ranks", "1", "--runs", "1", "--set", "max_epochs=2", "--quiet"]
CACHE = 1_000_000_000


def train(folder: Path, batch: int, tier: str) -> tuple[float, float]:
    """Train once. Return samples per second of the second epoch, and the share of its steps that waited for loads."""
    words = [*RUN, "--set", f"global_batch_size={batch}", "-o", str(folder)]
    offload = "hyperparameters.moe.offload"
    if tier != "none":
        words += ["--set", f"{offload}.tier={tier}"]
    if tier == "file":
        words += ["--set", f"{offload}.folder={folder}-experts", "--set", f"{offload}.cache={CACHE}"]
    subprocess.run([sys.executable, "-m", "mlhpc", *words], capture_output=True)  # two epochs miss the target
    events = read_events(folder / "result_0.txt").events
    rates = [event.value["throughput"] for event in events if event.key == mllog.TRACKED_STATS]
    waits = [event.value["offload"]["wait_s"] for event in events if event.key == mllog.WINDOW_STATS and tier == "file"]
    steps = [event.value["step"] for event in events if event.key == mllog.STEP_PHASES]
    return rates[-1], sum(waits) / sum(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tier", action="append", choices=("file", "host"), help="default: both")
    given = parser.parse_args()
    print(
        f"{read_cpu(Path('/')).model}; moe_lm smoke, one rank, batch {given.batch}, cache {CACHE / 1e9:g} GB",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as place:
        for tier in given.tier or ("file", "host"):
            seconds: dict[str, list[float]] = {"none": [], tier: []}
            waited = []
            for pair in range(given.pairs):
                for side in sorted(seconds, reverse=bool(pair % 2)):
                    rate, wait = train(Path(place) / f"{tier}-{side}-{pair}", given.batch, side)
                    seconds[side].append(1 / rate)
                    waited += [wait] if side == tier else []
            found = compute_equivalence(seconds["none"], seconds[tier], 0.1)
            low, high = 1 / found.high, 1 / found.low
            print(
                f"{tier}: throughput {1 / found.ratio:.3f} [{low:.3f}, {high:.3f}] of that without, n = {given.pairs} pairs;"
                f" steps waited {100 * statistics.mean(waited):.2g} % for loads",
                flush=True,
            )


if __name__ == "__main__":
    main()
