"""CPU seconds from a command to the target, of two source trees: the same seeds and data, whole commands, interleaved.

    python benchmarks/time_to_quality.py OLD NEW [WORKLOAD ...] --data ROOT [--size mini] [--ranks 2] [--seeds 1 2 3]

OLD and NEW are checkouts, each with a .venv of its own; OLD is one that nobody else uses. ROOT/<workload>-<size> are data sets
that both read. Counted is user and system time of `mlhpc run`: its launcher and all its ranks, with one thread each, so that
start and evaluations count. Every run has to meet NEW's target: where OLD's card has another one, its threshold is NEW's for
the time of the runs, and the table says so. A run that misses the target is shown and has no ratio.

Printed: each run when it ends; then for each workload the ratio of OLD's CPU seconds to NEW's, the geometric mean over seeds
with the least and the largest. The order of the trees changes from seed to seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WORKLOADS = ("cosmoflow", "deepcam", "open_catalyst", "openfold", "swinv2_moe", "moe_lm")
METRICS = ("eval_error", "eval_accuracy")


@dataclass(frozen=True)
class Run:
    """One run. ``values``: the metric of each evaluation, of which the last met the target if ``reached``."""

    cpu_s: float
    values: tuple[float, ...]
    reached: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--keep", type=Path, help="folder for NEW's run folders; else they are removed")
    args = parser.parse_args()
    old, new = args.old.resolve(), args.new.resolve()
    print(f"OLD {commit(old)}, NEW {commit(new)}; {args.size}, {args.ranks} rank(s) of one thread, seeds {args.seeds}")
    for workload in args.workloads:
        target = threshold(new, workload, args.size)
        with at_target(old, workload, args.size, target) as former:
            changed = "" if former == target else f" (OLD's own was {former:g})"
            print(f"{workload}: target {target:g}{changed}; load average {os.getloadavg()[0]:.1f}", flush=True)
            ratios = [ratio for turn, seed in enumerate(args.seeds) if (ratio := pair(args, workload, seed, turn))]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            extent = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{workload}: OLD / NEW {mean:.2f} ({extent}, n = {len(ratios)} of {len(args.seeds)} seeds)", flush=True
            )


def pair(args: argparse.Namespace, workload: str, seed: int, turn: int) -> float | None:
    """Run both trees on one seed, OLD first in even turns. Returns OLD's CPU seconds over NEW's if both met the target."""
    runs: dict[str, Run] = {}
    for name in ("OLD", "NEW") if turn % 2 == 0 else ("NEW", "OLD"):
        keep = args.keep / f"{workload}-{seed}" if args.keep and name == "NEW" else None
        run = runs[name] = train(args, getattr(args, name.lower()).resolve(), workload, seed, keep)
        values = " ".join(f"{value:.4g}" for value in run.values)
        missed = "" if run.reached else "  TARGET NOT REACHED"
        print(
            f"  seed {seed} {name}: {run.cpu_s:6.1f} CPU-s, {len(run.values):2} evaluations: {values}{missed}",
            flush=True,
        )
    if not all(run.reached for run in runs.values()):
        return None
    return runs["OLD"].cpu_s / runs["NEW"].cpu_s


def train(args: argparse.Namespace, tree: Path, workload: str, seed: int, keep: Path | None) -> Run:
    """Run one command of a tree to its end."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary) / "run"
        command = [str(tree / ".venv/bin/mlhpc"), "run", workload, "--size", args.size, "--ranks", str(args.ranks)]
        command += ["--seed", str(seed), "-o", str(folder), "-q"]
        command += ["--set", f"data={args.data.resolve() / f'{workload}-{args.size}'}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{tree / '.venv/bin'}:{os.environ['PATH']}"}
        before = children_s()
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        spent = children_s() - before
        log = folder / "result_0.txt"
        if not log.exists():
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        lines = [
            json.loads(line.removeprefix(":::MLLOG "))
            for line in log.read_text().splitlines()
            if line[:8] == ":::MLLOG"
        ]
    values = tuple(float(line["value"]) for line in lines if line["key"] in METRICS)
    return Run(
        spent, values, any(line["key"] == "run_stop" and line["metadata"]["status"] == "success" for line in lines)
    )


def children_s() -> float:
    """User and system seconds of all processes that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def threshold(tree: Path, workload: str, size: str) -> float:
    """The threshold in a tree's card."""
    return float(find_threshold(card(tree, workload).read_text(), size)[2])


def find_threshold(text: str, size: str) -> re.Match[str]:
    """Find the threshold of a size: what stands before it, and its value."""
    found = re.search(rf"(^  {size}:\n(?:    .*\n)*?    threshold: )(\S+)", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"no threshold of {size} in the card")
    return found


def card(tree: Path, workload: str) -> Path:
    """The card of a workload."""
    return tree / "workloads" / workload / "card.yaml"


@contextmanager
def at_target(tree: Path, workload: str, size: str, target: float) -> Iterator[float]:
    """Give a tree's size another threshold for a while. Yields its own."""
    path = card(tree, workload)
    text = path.read_text()
    found = find_threshold(text, size)
    try:
        if float(found[2]) != target:
            path.write_text(f"{text[: found.start()]}{found[1]}{target:g}{text[found.end() :]}")
        yield float(found[2])
    finally:
        path.write_text(text)


def commit(tree: Path) -> str:
    """The short commit of a checkout, with a word if files in it were changed."""
    words = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
