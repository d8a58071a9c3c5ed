"""Record what mlhpc says of real rounds and of its own runs, and compare two such records.

    python benchmarks/same_results.py record --mlhpc /work/before/.venv/bin/mlhpc --rounds ROUNDS --runs RUNS -o BEFORE
    python benchmarks/same_results.py record --mlhpc .venv/bin/mlhpc --rounds ROUNDS --runs RUNS -o AFTER
    python benchmarks/same_results.py compare BEFORE AFTER

ROUNDS is a folder of clones of MLCommons' `hpc_results_v*`. RUNS is a folder of run folders, one per workload at size smoke;
both records read the same ones: they are checked, scored, packaged, and the packages are reproduced up to level 1. Each record
also trains every workload for one run with a fixed seed on two ranks; its losses and evaluations must be equal bit for bit.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKLOADS = ("cosmoflow", "deepcam", "moe_lm", "open_catalyst", "openfold", "swinv2_moe")
SEED = 20261126
# The values of a log that training decides; all others are times, hosts or paths.
TRAINED = (
    "first_losses",
    "eval_accuracy",
    "eval_error",
    "seed",
    "global_batch_size",
    "model_parameters",
    "train_samples",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("--mlhpc", type=Path, required=True)
    recorder.add_argument("--rounds", type=Path, required=True)
    recorder.add_argument("--runs", type=Path, required=True, help="folder with one run folder per workload")
    recorder.add_argument("--data", type=Path, required=True, help="folder of the smoke data sets; made if not there")
    recorder.add_argument("--only", nargs="*", default=["rounds", "packages", "training"])
    recorder.add_argument("-o", "--output", type=Path, required=True)
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    args = parser.parse_args()
    return record(args) if args.command == "record" else compare(args.before, args.after)


def record(args: argparse.Namespace) -> int:
    """Write one JSON document per question into the output folder."""
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    mlhpc = Mlhpc(args.mlhpc.absolute(), args.data.resolve())
    if "rounds" in args.only:
        for a_round in sorted(args.rounds.glob("hpc_results_v*")):
            for command in ("check", "score"):
                mlhpc.save(
                    output / f"{command}-{a_round.name}.json", args.rounds, command, a_round.name, "--format", "json"
                )
            mlhpc.run(args.rounds, "report", a_round.name, "-o", str(output / f"report-{a_round.name}"))
        mlhpc.run(
            args.rounds,
            "report",
            *sorted(r.name for r in args.rounds.glob("hpc_results_v*")),
            "-o",
            str(output / "report-all"),
        )
    if "packages" in args.only:
        for run in sorted(args.runs.iterdir()):
            mlhpc.save(output / f"check-{run.name}.json", args.runs, "check", run.name, "--format", "json")
            mlhpc.save(output / f"score-{run.name}.json", args.runs, "score", run.name, "--format", "json")
        mlhpc.run(
            args.runs,
            "package",
            *sorted(r.name for r in args.runs.iterdir()),
            "--system",
            "laptop",
            "--submitter",
            "bench",
            "-o",
            str(output / "bench"),
        )
        for command in ("check", "score", "reproduce"):
            mlhpc.save(output / f"{command}-package.json", output, command, "bench", "--format", "json")
        mlhpc.run(output, "report", "bench", "-o", "report-package")
    if "training" in args.only:
        for workload in WORKLOADS:
            if not (mlhpc.data / f"{workload}-smoke").exists():
                mlhpc.run(output, "data", "generate", workload, "--size", "smoke", "--ranks", "2")
            settings = ["--set", "choices.measure=false"]  # else what is fastest today decides the rounding
            mlhpc.run(
                output,
                "run",
                workload,
                "--size",
                "smoke",
                "--ranks",
                "2",
                "--runs",
                "1",
                "--seed",
                str(SEED),
                *settings,
                "-o",
                f"run-{workload}",
            )
            events = read_events(output / f"run-{workload}" / "result_0.txt")
            trained = [[key, value] for key, value in events if key in TRAINED]
            (output / f"training-{workload}.json").write_text(json.dumps(trained, indent=1))
    return 0


class Mlhpc:
    """One installed mlhpc, called as a person calls it."""

    def __init__(self, program: Path, data: Path) -> None:
        self.program = program
        self.data = data

    def run(self, cwd: Path, *words: str) -> str:
        environment = {**os.environ, "MLHPC_DATA": str(self.data), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{self.program.parent}:{environment['PATH']}"
        done = subprocess.run([str(self.program), *words], cwd=cwd, env=environment, capture_output=True, text=True)
        print(f"{done.returncode} mlhpc {' '.join(words)}", flush=True)
        if done.returncode not in (0, 1):
            print(done.stderr[-2000:], flush=True)
        return done.stdout

    def save(self, file: Path, cwd: Path, *words: str) -> None:
        file.write_text(self.run(cwd, *words))


def read_events(log: Path) -> list[tuple[str, Any]]:
    lines = [line.partition(":::MLLOG ")[2] for line in log.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line]
    return [(event["key"], event["value"]) for event in events]


def compare(before: Path, after: Path) -> int:
    """Print every place where two records differ."""
    files = sorted({path.relative_to(each) for each in (before, after) for path in documents(each)})
    count = 0
    for file in files:
        if not (before / file).exists() or not (after / file).exists():
            differences = [f"only in {before if (before / file).exists() else after}"]
        elif file.suffix == ".csv":
            differences = [] if (before / file).read_bytes() == (after / file).read_bytes() else ["other bytes"]
        else:
            differences = list(differing("", read_document(before / file), read_document(after / file)))
        count += len(differences)
        print(f"{'equal' if not differences else f'{len(differences)} differences'}  {file}")
        for difference in differences[:12]:
            print(f"    {difference}")
    return 1 if count else 0


def read_document(path: Path) -> Any:
    """Read what a command printed: JSON, or its text if it printed none."""
    text = path.read_text()
    try:
        return json.loads(text)
    except ValueError:
        return text


def documents(folder: Path) -> Iterator[Path]:
    yield from folder.glob("*.json")
    for report in folder.glob("report-*"):
        yield from report.glob("*.json")
        yield from (report / "tables").glob("*.csv")


IGNORED = {"suite_version", "created", "time", "command", "version"}


def differing(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key in IGNORED:
                continue
            if key not in one or key not in other:
                yield f"{path}.{key}: only {'before' if key in one else 'after'}"
            else:
                yield from differing(f"{path}.{key}", one[key], other[key])
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from differing(f"{path}[{number}]", first, second)
    elif one != other and not (one != one and other != other):
        yield f"{path}: {str(one)[:150]!r} -> {str(other)[:150]!r}"


if __name__ == "__main__":
    sys.exit(main())
