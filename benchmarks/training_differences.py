"""What our checker and MLCommons' say of a published round of MLPerf Training: every log, every result, every difference.

    python -m benchmarks.training_differences ROUND [--ruleset 5.0.0] [--logging FOLDER] [--first N] > benchmarks/results/...

ROUND is a checkout of a results repository (training_results_v5.0). Their compliance_checker judges every log, their
seed_checker, power_checker and rcp_checker every result, in one child process and on a copy: their tools write into what they
judge. A result is accepted by theirs as package_checker does it: one log may be bad. ``--logging`` is a checkout of
mlcommons/logging; without it the installed package is used. Exit code 1 if a difference has no explanation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.compliance.check import check, check_log
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.log.results_tree import Group, find_results

# Why the two verdicts differ: (place, rule of ours or the beginning of their complaint, reason). The first that fits is printed.
EXPLAINED = (
    (
        "log",
        "eval-schedule",
        "evaluated at another interval than the round prescribes, which theirs does not check; the ruleset names these results",
    ),
    (
        "result",
        "run-drift",
        "one run has another learning rate than the others, which theirs does not compare",
    ),
    (
        "result",
        "init-limit",
        "one log breaks a rule; theirs accepts any one bad log of a result, ours only one that did not converge",
    ),
    (
        "score",
        "init-limit",
        "theirs leaves the log that breaks the rule out as the slowest; ours scores it, and the result is not compliant",
    ),
)
CHILD = """
import glob, json, logging, os, sys
logging.disable(logging.CRITICAL)
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.power_checker import PowerChecker
from mlperf_logging.package_checker.seed_checker import SeedChecker
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer import result_summarizer
root, version = sys.argv[1:]
out = sys.stdout
RCP = {"rcp_pass": "pruned_rcps", "set_scaling": True}
sys.stdout = open(os.devnull, "w")
for folder in sorted(glob.glob(f"{root}/*/results/*/*")):
    files = sorted(glob.glob(f"{folder}/result_*.txt"))
    logs = {}
    for name in files:
        mlp_compliance.enqueued_configs.clear()
        checker = mlp_compliance.make_checker("training", version, True, False)
        try:
            mlp_compliance.main(name, f"training_{version}/common.yaml", checker)
            found = [*checker.overwritable.values(), *checker.not_overwritable]
        except BaseException as error:
            found = [f"crash: {error!r}"]
        logs[os.path.basename(name)] = [text.splitlines()[0][:100] for text in found]
    if os.path.exists(f"{folder}/scaling.json"):
        os.remove(f"{folder}/scaling.json")
    answers = {"power": (True, set())}
    for what, ask in (
        ("score", lambda: result_summarizer._compute_strong_score_standalone(
            os.path.basename(folder), "", False, folder, "training", version)),
        ("seed", lambda: SeedChecker(version).check_seeds(files, False)),
        ("rcp", lambda: rcp_checker.check_directory(folder, "training", version, False, False, **RCP)),
        ("power", lambda: PowerChecker(version).check_power(f"{folder}/power", files)),
    ):
        if what == "power" and not os.path.isdir(f"{folder}/power"):
            continue
        try:
            answers[what] = ask()
        except BaseException as error:
            answers[what] = (False, f"crash: {error!r}")
    rcp, power = answers["rcp"], answers["power"]
    seed, score = answers["seed"], answers["score"]
    record = {"folder": os.path.relpath(folder, root), "logs": logs, "seed": seed if isinstance(seed, bool) else False,
              "rcp": [bool(rcp[0]), str(rcp[1]), float(rcp[2]) if len(rcp) > 2 else None], "power": sorted(power[1]),
              "score": score[0] if isinstance(score[0], float) else None}
    print(json.dumps(record), file=out, flush=True)
"""


@dataclass(frozen=True)
class Difference:
    place: str  # log or result
    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    @property
    def reason(self) -> str | None:
        said = (*self.ours, *self.theirs)
        return next(
            (why for place, what, why in EXPLAINED if place == self.place and any(s.startswith(what) for s in said)),
            None,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("round", type=Path)
    parser.add_argument("--ruleset", default="5.0.0")
    parser.add_argument("--logging", type=Path)
    parser.add_argument("--first", type=int, help="judge the first N results only")
    args = parser.parse_args()
    groups = [group for group in find_results(args.round).groups if group.logs][: args.first]
    theirs = {item["folder"]: item for item in official(groups, args.round, args.ruleset, args.logging)}
    differences, counts = [], Counter[str]()
    for group in groups:
        differences += compare(
            group, theirs[str(group.folder.relative_to(args.round))], f"training-{args.ruleset}", counts
        )
    for line in page(args.round.name, args.ruleset, counts, differences):
        print(line)
    return int(any(item.reason is None for item in differences))


def official(groups: Iterable[Group], root: Path, version: str, logging: Path | None) -> list[dict[str, object]]:
    """What their tools say of copies of the results, one record a result."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-training-") as copy:
        for group in groups:
            shutil.copytree(group.folder, Path(copy) / group.folder.relative_to(root))
        command = [sys.executable, "-B", "-c", CHILD, copy, version]
        paths = os.environ | ({"PYTHONPATH": str(logging)} if logging else {})
        done = subprocess.run(command, env=paths, capture_output=True, text=True, check=True, cwd=copy)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(group: Group, theirs: dict[str, object], name: str, counts: Counter[str]) -> list[Difference]:
    """The differences in one result; counts verdicts and scores."""
    rules = read_ruleset(name)
    label = f"{group.submitter}/{group.system}/{group.benchmark}"
    found = []
    logs = theirs["logs"]
    assert isinstance(logs, dict)
    for path in group.logs:
        ours = tuple(sorted({f.rule for f in check_log(path, rules).findings if f.severity == "error"}))
        said = tuple(logs[path.name])
        counts[f"log: ours {verdict(ours)}, theirs {verdict(said)}"] += 1
        if bool(ours) != bool(said):
            found.append(Difference("log", f"{label}/{path.name}", ours, said))
    bad = {file.removesuffix(".txt") for file, said in logs.items() if said} | set(theirs["power"])  # type: ignore[call-overload]
    said = [f"{len(bad)} logs do not comply"] if len(bad) > 1 else []
    said += [] if theirs["seed"] else ["seed_checker fails"]
    passed, message, factor = theirs["rcp"]  # type: ignore[misc]
    said += [] if passed else [f"rcp_checker fails: {message}"]
    verdicts = check([group.folder], name).findings
    ours = tuple(
        sorted({f.rule for f in verdicts if f.severity == "error" and f.rule not in ("system-field", "system-missing")})
    )
    counts[f"result: ours {verdict(ours)}, theirs {verdict(said)}"] += 1
    slower = any(f.rule == "rcp-slower" for f in verdicts)
    if passed:
        counts[
            "scaled by both" if slower and factor > 1 else "scaled by one" if slower or factor > 1 else "scaled by none"
        ] += 1
    if bool(ours) != bool(said):
        found.append(Difference("result", label, ours, tuple(said)))
    (scored,) = check([group.folder], name).results
    result = scored.score
    minutes, other = getattr(result, "mean_s", None), theirs["score"]
    equal = minutes is not None and isinstance(other, float) and math.isclose(minutes / 60.0, other, rel_tol=1e-9)
    counts["scores equal to nine digits" if equal else "scores differ"] += 1
    if not equal:
        shown = "no score" if minutes is None else f"{minutes / 60.0:.3f} min"
        found.append(
            Difference(
                "score", label, (*ours, shown), (f"{other:.3f} min" if isinstance(other, float) else "no score",)
            )
        )
    return found


def verdict(complaints: Iterable[str]) -> str:
    return "reject" if any(complaints) else "accept"


def page(round_: str, version: str, counts: Counter[str], differences: list[Difference]) -> Iterable[str]:
    yield f"{datetime.date.today()}  {round_}: mlhpc's ruleset training-{version} beside mlperf_logging's training_{version}"
    yield ""
    yield from (f"{count:6d}  {what}" for what, count in sorted(counts.items()))
    yield ""
    yield "| what | ours | theirs | why |"
    yield "| --- | --- | --- | --- |"
    rows: dict[tuple[str, ...], list[str]] = {}  # the logs of a result share one
    for item in differences:
        folder, _, log = item.name.rpartition("/") if item.place == "log" else (item.name, "", "")
        ours, theirs = ", ".join(item.ours) or "accepts", "; ".join(item.theirs) or "accepts"
        rows.setdefault((folder, ours, theirs, item.reason or "NOT EXPLAINED"), []).append(log)
    for (folder, *columns), logs in rows.items():
        many = f"{folder}, {len(logs)} logs" if len(logs) > 1 else "/".join(filter(None, (folder, *logs)))
        yield f"| {' | '.join((many, *columns))} |"


if __name__ == "__main__":
    sys.exit(main())
