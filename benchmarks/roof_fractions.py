"""How much of this machine's measured roofs a training step of each workload takes, and what the rest of the step is.

    OMP_NUM_THREADS=1 python benchmarks/roof_fractions.py [WORKLOAD ...] [--size mini] [--ranks 1] [--epochs 1] [--data ROOT]

Runs each workload for so many epochs with the settings it ships with, measures the ceilings (`mlhpc ceilings --quick`), and
reads both as the report does. Run it on a quiet machine: both are wall-clock times. Printed, for each workload: milliseconds of a
step; FLOPs of a step over what the fastest GEMM of the same precision would do in that time; the same of the bytes that have to
move at least, over the measured memory bandwidth; then the shares of the step by phase. What neither roof explains is small
operations: each costs microseconds whatever it computes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mlhpc.analysis.api import Results
from mlhpc.analysis.roofline.regime import list_measured_cases

WORKLOADS = ("cosmoflow", "deepcam", "open_catalyst", "openfold", "swinv2_moe", "moe_lm")
PHASES = ("data_wait", "forward_backward", "exposed_communication", "optimizer", "other")
SUITE = [sys.executable, "-m", "mlhpc"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--data", type=Path, default=os.environ.get("MLHPC_DATA", "data"))
    args = parser.parse_args()
    print(
        f"{args.size}, {args.ranks} rank(s), {args.epochs} epoch(s), load average {os.getloadavg()[0]:.1f}", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for workload in args.workloads:
            options = ["--size", args.size, "--ranks", str(args.ranks), "--seed", "1", "-o", str(folder / workload)]
            data = f"data={args.data / f'{workload}-{args.size}'}"
            call(["run", workload, *options, "--set", f"max_epochs={args.epochs}", "--set", data], reached=False)
        call(
            [
                "ceilings",
                "--quick",
                "--ranks",
                str(args.ranks),
                "--directory",
                name,
                "-o",
                str(folder / "ceilings.json"),
            ]
        )
        table(Results([*(folder / workload for workload in args.workloads), folder / "ceilings.json"]))
    print(f"load average {os.getloadavg()[0]:.1f}")
    return 0


def call(words: list[str], *, reached: bool = True) -> None:
    """Run a command of the suite. One epoch seldom reaches a target, which is exit code 1."""
    done = subprocess.run([*SUITE, *words, "-q"], capture_output=True, text=True)
    if done.returncode > (0 if reached else 1):
        sys.exit(f"mlhpc {' '.join(words)}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def table(results: Results) -> None:
    """One line per workload."""
    print(
        f"{'':14} {'precision':>9} {'step, ms':>9} {'GEMM':>6} {'memory':>6}  " + " ".join(f"{p:>21}" for p in PHASES)
    )
    phases = results.phases
    for case in list_measured_cases(results.study):
        share = {term.resource: term.seconds / case.bounds.step_s for term in case.bounds.terms}
        runs = results.runs.loc[results.runs["group"] == case.group, "run"]
        mine = phases[phases["run"].isin(runs)].groupby("phase")["seconds"].sum()
        step = mine[[phase for phase in PHASES if phase in mine.index]].sum()
        shown = " ".join(f"{mine.get(phase, 0.0) / step:>21.1%}" for phase in PHASES)
        roofs = " ".join(f"{share[each]:>6.1%}" if each in share else f"{'-':>6}" for each in ("compute", "memory"))
        print(f"{case.label:14} {case.precision:>9} {1e3 * case.bounds.step_s:9.2f} {roofs}  {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
