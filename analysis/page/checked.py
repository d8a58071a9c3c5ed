"""Runs the compliance check (`mlhpc check`) on the paths of a report, and renders what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlhpc.analysis.page.cells import HtmlTable, build_html_table
from mlhpc.suite.compliance.check import JudgedLogs, Verdict, check
from mlhpc.suite.compliance.rules.base import Finding

GROUPS_SHOWN = 100  # rows of the table; a package with one fault in every log has thousands of findings
SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class CheckedPath:
    """Holds one path of the report and its verdict.

    ``path`` is its name; files are named from it on, not from the root.
    """

    path: str
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as report.json has it."""
        return {
            "path": self.path,
            "rulesets": self.verdict.rulesets,
            "logs": self.verdict.logs,
            "compliant": self.verdict.compliant,
            "findings": [asdict(finding) for finding in self.verdict.findings],
        }


def check_paths(paths: Sequence[Path], judged: JudgedLogs | None = None) -> list[CheckedPath]:
    """Check each path that exists. A missing path is left to the reader of logs, which names it.

    ``judged`` has the logs that were judged by themselves already (`mlhpc.analysis.tables.ingest`); others are read.
    """
    return [check_path(path, judged) for path in paths if path.exists()]


def check_path(path: Path, judged: JudgedLogs | None = None) -> CheckedPath:
    """Check one path. The same files give the same verdict in whatever folder they lie."""
    verdict = check([path], judged=judged)
    parent = str(path.resolve().parent) + "/"
    # Paths from the root would tell readers where the author keeps files, and differ between machines
    findings = tuple(replace(finding, file=_strip_parent(finding.file, parent)) for finding in verdict.findings)
    return CheckedPath(path.resolve().name, replace(verdict, findings=findings))


def render_error(error: Finding) -> str:
    """Render an error as one line: the last parts of the file (system, scenario, benchmark, log), and the message."""
    return f"{'/'.join(Path(error.file).parts[-4:])}: {error.message}"


def collect_findings(checked: Sequence[CheckedPath]) -> list[Finding]:
    """Collect the findings of all paths."""
    return [finding for item in checked for finding in item.verdict.findings]


def build_findings_table(checked: Sequence[CheckedPath]) -> HtmlTable | None:
    """Build a table with a row for each rule and result with findings, errors first; None without findings.

    The message is that of the first finding. Beyond GROUPS_SHOWN rows the rest is in report.json.
    """
    groups = group_findings(checked)[:GROUPS_SHOWN]
    if not groups:
        return None
    columns: dict[str, list[Any]] = {
        "rule": [first.rule for first, _ in groups],
        "severity": [first.severity for first, _ in groups],
        "result": [_find_result_folder(first) for first, _ in groups],
        "findings": [count for _, count in groups],
        "the first": [f"{Path(first.file).name}{f':{first.line}' if first.line else ''}" for first, _ in groups],
        "its message": [first.message for first, _ in groups],
    }
    return build_html_table(columns, "Findings of the compliance check")


def group_findings(checked: Sequence[CheckedPath]) -> list[tuple[Finding, int]]:
    """Group findings by severity, rule and result, as (first finding, count): errors first, then by rule."""
    groups: dict[tuple[int, str, str], list[Finding]] = {}
    for finding in collect_findings(checked):
        # An unknown severity comes last
        key = (SEVERITY_ORDER.get(finding.severity, len(SEVERITY_ORDER)), finding.rule, _find_result_folder(finding))
        groups.setdefault(key, []).append(finding)
    return [(groups[key][0], len(groups[key])) for key in sorted(groups)]


def _find_result_folder(finding: Finding) -> str:
    """Find the folder of the result that a finding is about.

    It is the folder of the finding's log, or the path itself if that is a folder.
    """
    path = Path(finding.file)
    is_file = path.suffix[1:].isalpha()  # the "suffix" of a folder such as pytorch1.13 is a number
    return str(path.parent if is_file else path)


def _strip_parent(file: str, parent: str) -> str:
    """Remove ``parent`` from a file's path. What is no path, such as a group of files, stays as it is."""
    if Path(file).is_absolute() or Path(file).exists():
        return str(Path(file).resolve()).removeprefix(parent)
    return file
