"""Run benchmarks and write what they print to dated tables, with the machine it was measured on.

    python benchmarks/write_tables.py [NAME ...]        one file per benchmark: benchmarks/results/<date>-<name>.txt

The load average is in the header of each file: on a machine that was not quiet, only ratios inside one run mean something.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
MPIEXEC = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2"]
BELOW_EDGE = ["--set", "hyperparameters.base_learning_rate=0.002", "--set", "hyperparameters.scaling=none"]
DATA = ["--data", "data/cosmoflow-mini"]
MOE = ["--workload", "moe_lm", "--size", "smoke"]
LONG_TESTS = [sys.executable, "-m", "pytest", "-q", "-m", "long"]
PUBLISHED = os.environ.get("MLHPC_PUBLISHED_RESULTS", "published")  # a folder with hpc_results_v* checkouts
TRAINING = os.environ.get("MLHPC_PUBLISHED_TRAINING", "published")  # with training_results_v5.0 and v5.1
EXPECTED = HERE.parents[1] / "shared" / "data" / "published_scores_expected.csv"
SCORES = ["--scores", str(EXPECTED)] if EXPECTED.exists() else []
COMMANDS: dict[str, list[list[str]]] = {
    "harness_overhead": [
        [sys.executable, "benchmarks/harness_overhead.py", "--size", "mini", "--blocks", "40", *DATA],
        [*MPIEXEC, sys.executable, "benchmarks/harness_overhead.py", "--size", "mini", *DATA],
    ],
    "instrumentation": [
        [sys.executable, "benchmarks/instrumentation.py", *DATA],
        [*MPIEXEC, sys.executable, "benchmarks/instrumentation.py", *DATA],
        [sys.executable, "benchmarks/instrumentation.py", *MOE],
        [
            *MPIEXEC,
            sys.executable,
            "benchmarks/instrumentation.py",
            *MOE,
            "--set",
            "hyperparameters.moe.expert_parallel=true",
        ],
    ],
    "rank_invariance": [
        [sys.executable, "benchmarks/rank_invariance.py", "cosmoflow", "--size", "mini", "--seed", seed, *more, *DATA]
        for seed in "1234"
        for more in ([], ["--float64"], BELOW_EDGE)
    ],
    "rank_invariance_science": [
        [sys.executable, "benchmarks/rank_invariance.py", name, "--size", "mini", "--loss-limit", "1e-4", *more]
        for name in ("deepcam", "open_catalyst", "openfold")
        for more in ([], ["--float64"], ["--seed", "2"])
    ],
    "workload_steps": [[sys.executable, "benchmarks/workload_steps.py", "--ranks", ranks] for ranks in "12"],
    "reference_steps": [
        [sys.executable, "benchmarks/reference_steps.py"],
        [sys.executable, "benchmarks/reference_steps.py", "cosmoflow", "deepcam", "--precision", "bfloat16"],
    ],
    "network_intervals": [
        [sys.executable, "benchmarks/network_intervals.py", *more]
        for more in ([], ["--first-seed", "2000", "--laws", "400"])
    ],
    "formulations": [[sys.executable, "benchmarks/formulations.py"]],
    "staging": [[sys.executable, "benchmarks/staging.py"], [sys.executable, "benchmarks/staging.py", "--cold"]],
    "cosmoflow_step": [[sys.executable, "benchmarks/cosmoflow_step.py"]],
    "startup": [[sys.executable, "benchmarks/startup.py"]],
    "ceilings": [["env", f"OMP_NUM_THREADS={threads}", sys.executable, "benchmarks/ceilings.py"] for threads in (1, 2)],
    "ingest": [[sys.executable, "benchmarks/ingest.py", PUBLISHED]],
    "checker_acceptance": [[sys.executable, "-m", "benchmarks.checker_acceptance", PUBLISHED, *SCORES]],
    "checker_forgeries": [[sys.executable, "-m", "benchmarks.checker_forgeries", PUBLISHED, TRAINING]],
    "checker_fuzz": [[*LONG_TESTS, "tests/suite/compliance/test_check_fuzz.py"]],
    "whatif": [[sys.executable, "benchmarks/whatif.py", "--measure"]],
    "moe": [[sys.executable, "benchmarks/moe.py"]],
    "moe_others": [[sys.executable, "benchmarks/moe.py", "--others"]],
    "moe_exactness": [
        [sys.executable, "tests/workloads/moe/exact_worker.py", ranks, "long"] for ranks in ("1", "2", "4", "6")
    ],
    "moe_golden": [[*LONG_TESTS, "-rP", "--durations=0", "tests/workloads/moe/test_golden.py"]],
    **{
        f"convergence_{name}": [[*LONG_TESTS, "-rP", "tests/test_convergence.py", "-k", f"{name}-mini"]]
        for name in ("cosmoflow", "deepcam", "open_catalyst", "openfold", "moe_lm", "swinv2_moe")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(COMMANDS)}; default: all")
    names = parser.parse_args().names or list(COMMANDS)
    unknown = sorted(set(names) - set(COMMANDS))
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; benchmarks: {', '.join(COMMANDS)}")
    return max(write_table(name) for name in names)


def write_table(name: str) -> int:
    now = datetime.now(UTC)
    path = HERE / "results" / f"{now:%Y-%m-%d}-{name}.txt"
    text, worst = header(now), 0
    for command in COMMANDS[name]:
        shown = " ".join(Path(word).name if word.startswith("/") else word for word in command)
        print(f"$ {shown}", flush=True)
        done = subprocess.run(
            command, cwd=HERE.parent, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        text += f"\n$ {shown}\n{done.stdout}" + (
            f"exit code {done.returncode}\n{done.stderr}" if done.returncode else ""
        )
        print(done.stdout + done.stderr, flush=True)
        worst = max(worst, abs(done.returncode))
    path.write_text(text)
    return worst


def header(now: datetime) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{now:%Y-%m-%d %H:%M} UTC, commit {commit}; {cpu}, {len(os.sched_getaffinity(0))} cores, load average {load} before\n"
        f"Python {platform.python_version()}, torch {version('torch')}, numpy {version('numpy')}, "
        f"{platform.system()} {platform.release()}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
