"""Level 0 of every published package: scores from the logs, those of the rounds, and those of MLCommons' own tool.

    python benchmarks/published_reproduction.py ROUNDS [--scores published_scores_expected.csv]

ROUNDS has folders named after rounds (v0.7, hpc_results_v3.0). ``--scores`` has what MLCommons' summarizer prints.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not installed

from mlhpc.suite.log.results_tree import find_results, parse_round
from mlhpc.suite.package.reproduction.judge import LevelVerdict, read_reproduction
from tests.fixtures.cli import mlhpc

OFFICIAL = 1e-3  # relative: the tool prints minutes with three to five digits


def official_minutes(path: Path | None) -> dict[tuple[str, str, str, str, str], float]:
    """What MLCommons' tool prints, by round, submitter, system, scenario and benchmark."""
    if path is None:
        return {}
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {
        (row["round"], row["submitter"], row["system"], row["scaling"].partition("/")[0], row["benchmark"]): float(
            row["official_tool_min"]
        )
        for row in rows
        if row["official_tool_min"]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=Path)
    parser.add_argument("--scores", type=Path)
    options = parser.parse_args()
    tool = official_minutes(options.scores)
    counts: Counter[str] = Counter()
    packages = [
        path
        for folder in sorted(options.rounds.iterdir())
        if parse_round(folder)
        for path in find_results(folder).packages
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for number, package in enumerate(packages):
            out = Path(scratch) / str(number)
            done = mlhpc("reproduce", package, "--level", 4, "--run", "-o", out, "-q")
            assert done.returncode == 1, done.stderr
            for result in read_reproduction(out / "reproduction.json").results:
                zero, *rest = result.levels
                counts["results"] += 1
                counts[f"level 0 {zero.verdict}"] += 1
                counts["levels 1 to 4 cannot"] += all(level.verdict == "cannot" for level in rest)
                _, system, *between, benchmark = Path(result.result).parts
                key = (
                    str(parse_round(package.parent)),
                    package.name,
                    system,
                    between[0] if between else "strong",
                    benchmark,
                )
                beside = compare_tool(zero, tool.get(key), counts)
                print(f"{'/'.join(key):90} level 0 {zero.verdict}: {zero.reason}{beside}; level 1 {rest[0].verdict}")
    print("; ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return int(counts["level 0 reproduced"] != counts["results"])


def compare_tool(zero: LevelVerdict, minutes: float | None, counts: Counter[str]) -> str:
    """What MLCommons' tool prints of the result, and whether it is the same."""
    score = zero.compared.get("score_s")
    if minutes is None or score is None:
        return ""
    same = math.isclose(score / 60.0, minutes, rel_tol=OFFICIAL)
    counts[f"MLCommons' tool {'agrees' if same else 'scales it'}"] += 1
    return f"; MLCommons' tool {minutes:g} min, here {score / 60.0:.6g}"


if __name__ == "__main__":
    sys.exit(main())
