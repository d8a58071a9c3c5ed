"""What our checker and MLCommons' say of damaged logs and packages of the suite's own runs, one row a mutation.

    MLHPC_ORG=ACME mlhpc run cosmoflow --size smoke --ranks 2 --runs 12 --set submission.platform=bed \\
      --set staging.directory=STAGE -o RUN
    python -m benchmarks.checker_differences RUN

RUN needs eleven logs that reached the target, one of them after four epochs. Each mutation is one of `tests/fixtures`. Logs
are judged by `mlhpc check` and by mlperf_logging's compliance engine with the rules generated from mlhpc-1.0; packages by
`mlhpc check` and by all that `mlhpc check --official` runs, whose complaints count unless they follow from the size. Their
tools run in a child process each, so that a crash or a name that leaks into the next file harms no other row. The table
is kept in benchmarks/results. Exit code 1 if we accept an invalid input or reject a legal one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not installed

from mlhpc.suite.compliance import official
from mlhpc.suite.compliance.check import check, check_log
from mlhpc.suite.compliance.official import render_official_rules
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.score import find_failure
from tests.fixtures.logs import START_MS, Lines, digest, our_run, render_config, write
from tests.fixtures.mutations import ours
from tests.fixtures.package_mutations import lines_of, package_cases, package_of

TIMEOUT_S = 20


@dataclass(frozen=True)
class Row:
    subject: str
    mutation: str
    legal: bool
    ours: str
    theirs: str

    @property
    def agrees(self) -> bool:
        return (self.ours == "accepts") == (self.theirs == "accepts")

    def line(self) -> str:
        kind = "legal" if self.legal else "invalid"
        return f"| {self.subject} | {self.mutation.replace('|', '/')} | {kind} | {self.ours} | {self.theirs} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    official._run_tool = forked_tool  # the same tools, started by fork instead of 2 s of imports each
    for name in ("package_checker", "system_desc_checker", "compliance_checker"):
        importlib.import_module(f"mlperf_logging.{name}")
    logs = usable(args.run)
    with tempfile.TemporaryDirectory(prefix="mlhpc-differences-") as folder:
        rows = [*log_rows(logs, Path(folder)), *package_rows(logs, Path(folder))]
    print(page(rows))
    wrong = [row for row in rows if row.legal != (row.ours == "accepts")]
    for row in wrong:
        print(f"WRONG: {row.line()}", file=sys.stderr)
    return 1 if wrong else 0


def usable(run: Path) -> list[Lines]:
    """The logs of a run that reached the target, in order of time. ValueError if there are fewer than eleven."""
    benchmark = read_ruleset("mlhpc-1.0").benchmark("cosmoflow", "smoke")
    assert benchmark is not None
    paths = (
        path for path in run.glob("result_*.txt") if find_failure(summarise_log(read_events(path)), benchmark) is None
    )
    found = [lines_of(path) for path in sorted(paths, key=lambda path: int(path.stem.rpartition("_")[2]))]
    later_ms = min((lines[0].time_ms for lines in found), default=0) - START_MS  # kept files are of that day
    found = [[replace(line, time_ms=line.time_ms - later_ms) for line in lines] for lines in found]
    if len(found) < 11 or not any(map(has_four_epochs, found)):
        raise ValueError(
            f"{run}: expected eleven logs of cosmoflow smoke that converged, one of them after four epochs"
        )
    return found


def has_four_epochs(lines: Lines) -> bool:
    return sum(line.key == "eval_stop" for line in lines) == 4


def as_trial(lines: Lines, trial: int) -> Lines:
    """The log as if it were of this trial, of a run folder that keeps the files of the fixture."""
    config = next(line.value for line in lines if line.key == "run_config")
    files = next(line.value for line in our_run() if line.key == "run_files")
    changed = []
    for line in lines:
        if "trial" in (line.metadata or {}):
            line = replace(line, metadata=dict(line.metadata or {}) | {"trial": trial})
        if line.key == "config_file":
            line = replace(line, value="config.yaml", metadata={"sha256": digest(render_config(config))})
        changed.append(replace(line, value=files) if line.key == "run_files" else line)
    return changed


def log_rows(logs: Sequence[Lines], folder: Path) -> list[Row]:
    rules = read_ruleset("mlhpc-1.0")
    benchmark = rules.benchmark("cosmoflow", "smoke")
    assert benchmark is not None
    config = folder / "rules.yaml"
    config.write_text(render_official_rules(benchmark), encoding="utf-8")
    rows = []
    for case in ours(as_trial(next(filter(has_four_epochs, logs)), 0)):
        path = write(folder / "result_0.txt", case.lines())
        errors = [item.rule for item in check_log(path, rules).findings if item.severity == "error"]
        rows.append(Row("log", case.name, case.rule is None, said(errors), their_verdict(path, config)))
    return rows


def their_verdict(path: Path, config: Path) -> str:
    def judge() -> None:
        checker = mlp_compliance.make_checker("hpc", "3.0.0", False, False)
        sys.exit(0 if mlp_compliance.main(str(path), str(config), checker)[0] else 7)

    _, _, code = isolated(judge, path.parent)
    return {0: "accepts", 7: "rejects", None: "hangs"}.get(code, "crashes")


def package_rows(logs: Sequence[Lines], folder: Path) -> list[Row]:
    strong, weak = ([as_trial(log, number) for number, log in enumerate(some)] for some in (logs[:5], logs[5:11]))
    base = package_of(folder / "base", strong, weak)
    rows = []
    for number, case in enumerate(package_cases()):
        if case.name == "a slower machine":  # which stretches what logs of the fixture have, and no more
            continue
        copy = folder / str(number) / base.name
        shutil.copytree(base, copy)
        case.apply(copy)
        errors = [item.rule for item in check([copy]).findings if item.severity == "error"]
        try:
            verdict = official.run_official([copy])
            theirs = "accepts" if verdict.accepted else "crashes" if "crashed" in verdict.text() else "rejects"
            if not verdict.runs:
                theirs = "sees nothing"
        except (OSError, ValueError) as error:
            theirs = f"fails: {type(error).__name__}"
        rows.append(Row("package", case.name, case.rule is None, said(errors), theirs))
        shutil.rmtree(folder / str(number))
    return rows


def said(errors: Sequence[str]) -> str:
    names = list(dict.fromkeys(errors))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "accepts"


def page(rows: Sequence[Row]) -> str:
    """A sentence of totals and the table, disagreements first."""
    parts = []
    for subject in ("log", "package"):
        some = [row for row in rows if row.subject == subject]
        invalid, legal = [row for row in some if not row.legal], [row for row in some if row.legal]
        parts.append(
            f"- {len(some)} mutations of a {subject}, {len(invalid)} of them invalid: ours accepts "
            f"{accepted(invalid, 'ours')} of the invalid and rejects {len(legal) - accepted(legal, 'ours')} of the {len(legal)} "
            f"legal ones; the official tools accept {accepted(invalid, 'theirs')}, reject {len(legal) - accepted(legal, 'theirs')} "
            f"and crash or hang on {sum(row.theirs in ('crashes', 'hangs') for row in some)}."
        )
    ordered = [row for row in rows if not row.agrees] + [row for row in rows if row.agrees]
    head = ["| of a | mutation | it is | ours | official |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*parts, "", *head, *(row.line() for row in ordered)])


def accepted(rows: Sequence[Row], side: str) -> int:
    return sum(getattr(row, side) == "accepts" for row in rows)


def forked_tool(folder: Path, name: str, *arguments: str) -> str:
    """`mlhpc.suite.compliance.official._run_tool` without the start of an interpreter: same arguments, same text."""

    def run() -> None:
        logged = [] if name == "system_desc_checker" else ["--log_output", str(folder / "tool.log")]
        sys.argv = [name, *arguments, *logged]
        runpy.run_module(f"mlperf_logging.{name}", run_name="__main__", alter_sys=True)

    out, err, code = isolated(run, folder)
    if code is None:
        return f"ERROR - no verdict within {TIMEOUT_S} s"
    text = out + err
    return text if code == 0 or "FAILED" in text else f"{text}\nERROR - exit code {code}"


def isolated(work: Callable[[], None], folder: Path) -> tuple[str, str, int | None]:
    """stdout, stderr and exit code of ``work`` in a child of its own in ``folder``; None: killed after the time limit."""
    out, err = folder / ".out", folder / ".err"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(folder)
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
            work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    limit = time.monotonic() + TIMEOUT_S
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "", "", None
        time.sleep(0.002)
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in (out, err)]
    return texts[0], texts[1], os.waitstatus_to_exitcode(done[1])


if __name__ == "__main__":
    sys.exit(main())
