"""All forgeries that tests/suite/compliance/forge generates of a package of this suite: which are errors of `mlhpc check`.

    python -m benchmarks.generated_forgeries KEPT > benchmarks/results/DATE-generated_forgeries.txt

KEPT is a JSON Lines file of the cases that were judged; a run that was ended goes on after the last of them, and
--report prints the table of what it has. Takes half an hour of CPU time. Exit code 1
if a forgery passes that is not on the list of what nobody can detect.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not installed

from tests.suite.compliance.forge.forgeries import list_forgeries
from tests.suite.compliance.forge.test_forgeries import UNDETECTED, is_undetected, make_package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--report", action="store_true", help="judge nothing more")
    args = parser.parse_args()
    kept: Path = args.kept
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    judged: dict[str, list[str]] = {row["name"]: row["errors"] for row in rows}
    with tempfile.TemporaryDirectory(prefix="mlhpc-forgeries-") as folder:
        package = make_package(Path(folder) / "own")
        forgeries = list_forgeries(package)
        for number, forgery in enumerate(forgeries):
            if forgery.name in judged or args.report:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as place:
                judged[forgery.name] = sorted({*forgery.errors(package, Path(place))})
            with kept.open("a") as file:
                file.write(json.dumps({"name": forgery.name, "errors": judged[forgery.name]}) + "\n")
            print(f"{number + 1} of {len(forgeries)}", end="\r", file=sys.stderr)
    known = {forgery.name: judged[forgery.name] for forgery in forgeries if forgery.name in judged}
    return report(known, len({forgery.name for forgery in forgeries}))


def report(judged: dict[str, list[str]], count: int) -> int:
    """Print the counts by kind and by reason, and what passes unlisted. Return the exit code."""
    passed = [name for name, errors in judged.items() if not errors]
    missed = [name for name in passed if not is_undetected(name)]
    print(f"{datetime.date.today()}  python -m benchmarks.generated_forgeries KEPT: no timing was taken\n")
    print(f"{len(judged):,} of {count:,} forgeries were judged: {len(judged) - len(passed):,} are errors,")
    print(
        f"{len(passed) - len(missed)} pass and are on the list of what nobody can detect, {len(missed)} pass and are not.\n"
    )
    print("| kind | forgeries | errors | pass, listed | pass, not listed |\n| --- | --- | --- | --- | --- |")
    for kind, number in Counter(name.partition(":")[0] for name in judged).items():
        mine = [name for name in passed if name.startswith(f"{kind}:")]
        more = [name for name in missed if name.startswith(f"{kind}:")]
        print(f"| {kind} | {number} | {number - len(mine)} | {len(mine) - len(more)} | {len(more)} |")
    print("\n| reason on the list | forgeries | of them errors |\n| --- | --- | --- |")
    for row in UNDETECTED:
        named = [name for name in judged if any(re.match(pattern, name) for pattern in row["forgeries"])]
        print(f"| {row['reason']} | {len(named)} | {sum(bool(judged[name]) for name in named)} |")
    print("\n| pass and are not listed |\n| --- |")
    print("\n".join(f"| {name} |" for name in missed or ("none",)))
    rules = Counter(rule for errors in judged.values() for rule in errors)
    alone = Counter(errors[0] for errors in judged.values() if len(errors) == 1)
    print("\n| rule | errors | alone |\n| --- | --- | --- |")
    print("\n".join(f"| {rule} | {number} | {alone[rule]} |" for rule, number in rules.most_common()))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
