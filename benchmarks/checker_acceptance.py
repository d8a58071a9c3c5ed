"""The checker and scorer against published rounds and against the official checker: verdicts, scores, speed, memory.

    python -m benchmarks.checker_acceptance ROUNDS [--scores published_scores_expected.csv] [--sample 34]

ROUNDS is a folder of hpc_results_v* checkouts. The official checker is called once per log, on every n-th log by size; ours
is called on all logs at once and on the same sample, in turn with it. Times are CPU seconds of the processes with their
start. Exit code 1 if a verdict or a score is not what it should be.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.log.results_tree import find_results

RULESETS = {"v0.7": "1.0.0", "v1.0": "1.0.0", "v2.0": "2.0.0", "v3.0": "3.0.0"}


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    cpu_s: float
    peak_mib: float
    code: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=Path)
    parser.add_argument("--scores", type=Path)
    parser.add_argument("--sample", type=int, default=34)
    args = parser.parse_args()
    groups = find_results(args.rounds).groups
    logs = sorted((path for group in groups for path in group.logs), key=lambda path: path.stat().st_size)
    before = fingerprint(args.rounds)
    with tempfile.TemporaryDirectory(prefix="mlhpc-acceptance-") as scratch:
        folder = Path(scratch)
        limits = [
            *verdicts(args.rounds, logs, folder),
            *(scores(args.rounds, args.scores, folder) if args.scores else ()),
        ]
        print_speed(args.rounds, logs, args.sample, folder)
    limits.append(("no byte of the rounds changed", fingerprint(args.rounds) == before))
    for name, holds in limits:
        print(f"{'holds ' if holds else 'MISSED'}  {name}")
    return 0 if all(holds for _, holds in limits) else 1


def verdicts(rounds: Path, logs: list[Path], folder: Path) -> list[tuple[str, bool]]:
    run([*MLHPC, "check", str(rounds), "--format", "json"], folder / "check.json")
    document = json.loads((folder / "check.json").read_text())
    errors = [finding for finding in document["findings"] if finding["severity"] == "error"]
    of_logs = [finding for finding in errors if finding["file"].endswith(".txt")]
    print(
        f"{document['checked']['logs']} logs in {document['checked']['packages']} packages, rulesets {document['ruleset']}"
    )
    print(f"  warnings: {dict(Counter(f['rule'] for f in document['findings'] if f['severity'] == 'warning'))}")
    for finding in errors:
        print(f"  error {finding['rule']}: {Path(finding['file']).relative_to(rounds)}: {finding['message']}")
    missed = sorted({f["file"] for f in document["findings"] if f["rule"] in ("target-missed", "run-unfinished")})
    alone = [run([*MLHPC, "check", path], folder / "one.txt").code for path in missed]
    for path in missed:
        print(f"  not converged: {Path(path).relative_to(rounds)}")
    return [
        ("no scored log has an error in its package", not of_logs),
        ("package errors are those of the reference points", all(f["rule"] == "rcp-speed" for f in errors)),
        ("each run that missed the target is an error by itself", all(code == 1 for code in alone)),
        ("all logs were checked", document["checked"]["logs"] >= len(logs)),
    ]


def scores(rounds: Path, expected: Path, folder: Path) -> list[tuple[str, bool]]:
    run([*MLHPC, "score", str(rounds), "--format", "json"], folder / "score.json")
    found = {
        (group["round"], group["submitter"], group["system"], group["scenario"], group["benchmark"]): group
        for group in json.loads((folder / "score.json").read_text())["groups"]
    }
    worst = {"score": 0.0, "TTTa": 0.0, "models/min": 0.0}
    compared = Counter[str]()
    for row in csv.DictReader(expected.read_text().splitlines()):
        scenario = row["scaling"].partition("/")[0]
        group = found.get((row["round"], row["submitter"], row["system"], scenario, row["benchmark"]))
        if group is None:
            continue
        shown = group["score_scaled_min"] or group["score_min"]
        pairs = {
            "score": (shown, row["official_tool_min"] or row["olympic_min"] if scenario == "strong" else ""),
            "TTTa": (group["ttta_min"], row["weak_TTTa_min"]),
            "models/min": (group["models_per_min"], row["weak_models_per_min"]),
        }
        for name, (ours, theirs) in pairs.items():
            if theirs:
                compared[name] += 1
                worst[name] = max(worst[name], abs(ours - float(theirs)) / float(theirs) if ours else 1.0)
    print(f"scores compared: {dict(compared)}, largest relative differences: {worst}")
    return [("scores, TTTa and models/min equal the expected to 1e-6", all(error <= 1e-6 for error in worst.values()))]


def print_speed(rounds: Path, logs: list[Path], sample: int, folder: Path) -> None:
    chosen = logs[:: max(len(logs) // sample, 1)]
    check, score = (run([*MLHPC, word, str(rounds)], folder / word) for word in ("check", "score"))
    theirs, ours = [], []
    for path in chosen:
        command = [
            sys.executable,
            "-m",
            "mlperf_logging.compliance_checker",
            "--usage",
            "hpc",
            "--ruleset",
            _ruleset(path),
        ]
        theirs.append(
            run([*command, "--log_output", str(folder / "official.log"), str(path)], folder / "official").cpu_s
        )
        ours.append(run([*MLHPC, "check", str(path)], folder / "ours").cpu_s)
    together = run([*MLHPC, "check", *map(str, chosen)], folder / "sample")
    largest = run([*MLHPC, "check", str(logs[-1])], folder / "largest")
    per_log = (check.cpu_s + score.cpu_s) / len(logs)
    official = statistics.fmean(theirs)
    small = statistics.median(run([*MLHPC, "check", str(logs[0])], folder / "one").cpu_s for _ in range(5))
    size = sum(path.stat().st_size for path in logs) / 2**20
    print(f"all {len(logs)} logs ({size:.0f} MiB): check {check.cpu_s:.2f} s, score {score.cpu_s:.2f} s CPU")
    print(
        f"per log: ours {1e3 * per_log:.2f} ms for check and score; official {1e3 * official:.0f} ms for its check alone"
    )
    print(
        f"  ratio {official / per_log:.1f} over all; on the same {len(chosen)} logs {sum(theirs) / together.cpu_s:.1f}, "
    )
    print(f"  and with one process a log on our side too {sum(theirs) / sum(ours):.2f}")
    print(f"one small log: {small:.3f} s CPU (median of 5)")
    mib = logs[-1].stat().st_size / 2**20
    print(f"peak memory: all {check.peak_mib:.0f} MiB, largest log ({mib:.1f} MiB) alone {largest.peak_mib:.0f} MiB")


MLHPC = (sys.executable, "-m", "mlhpc")


def run(command: list[str] | tuple[str, ...], output: Path) -> Cost:
    """Run a command to its end; its CPU time and peak memory are the kernel's account of that process."""
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, process.returncode)


def fingerprint(folder: Path) -> str:
    """One sha256 of all names and contents."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        whole.update(str(path).encode())
        if path.is_file():
            whole.update(path.read_bytes())
    return whole.hexdigest()


def _ruleset(path: Path) -> str:
    return next((name for key, name in RULESETS.items() if f"_{key}" in str(path)), "3.0.0")


if __name__ == "__main__":
    sys.exit(main())
