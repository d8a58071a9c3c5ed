"""CPU-seconds that `mlhpc plan` takes at size full on 2,048 ranks, the whole process, by turns with another tree.

    python benchmarks/plan_seconds.py [--before FOLDER] [--repeats 3] [--sweeps cosmoflow moe_lm deepcam]

``--before``: a checkout of another commit, whose answers are compared with this one's: they must be equal to the byte.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = {
    "cosmoflow": ("spatial", "data=512,spatial=2x2x1"),
    "deepcam": ("spatial", "data=128,spatial=4x4"),
    "moe_lm": ("sharded", "data=256,shard=8"),
    "open_catalyst": ("sharded", "data=256,shard=8"),
    "swinv2_moe": ("sharded", "data=256,shard=8"),
    "openfold": ("axial", "data=128,axial=16"),
}
BATCH = ("--set", "global_batch_size=2048")
MACHINE = ("--tflops", "50", "--gigabytes-per-s", "10", "--latency-us", "5", "--format", "json")


def answer(root: Path, workload: str, options: list[str]) -> tuple[float, Any]:
    """CPU-seconds of one process of the tree at ``root``, and what it printed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "mlhpc", "plan", workload, "--size", "full", *options, *MACHINE],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, json.loads(done.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", default=list(CASES))
    parser.add_argument("--sweeps", nargs="*", default=[])
    args = parser.parse_args()
    roots = [Path(__file__).resolve().parents[1], *([args.before.resolve()] if args.before else [])]
    cases = [(name, ["--plan", CASES[name][0], "--mesh", CASES[name][1], *BATCH]) for name in args.workloads]
    cases += [(name, ["--nodes", "2048", "--sweep", *BATCH]) for name in args.sweeps]
    print(
        "| workload | options | CPU-seconds | before | answers | load |\n| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    for name, options in cases:
        sweep = "--sweep" in options
        seconds: list[list[float]] = [[] for _ in roots]
        answers: list[Any] = [None for _ in roots]
        for _ in range(1 if sweep else args.repeats):
            for at, root in enumerate(roots):
                took, answers[at] = answer(root, name, options)
                seconds[at].append(took)
        words = [", ".join(f"{each:.1f}" for each in sorted(took)) for took in seconds]
        plans = len(answers[0]["plans"])
        same = "" if len(roots) == 1 else "equal" if answers[0] == answers[1] else "**differ**"
        shown = f"sweep, {plans} legal meshes" if sweep else f"{CASES[name][0]}, {CASES[name][1]}"
        before = words[1] if len(roots) > 1 else ""
        print(f"| {name} | {shown} | {words[0]} | {before} | {same} | {os.getloadavg()[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
