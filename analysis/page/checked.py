"""What the compliance check (`mlhpc check`) says of the paths of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from analysis.page.cells import HtmlTable, build_html_table
from suite.compliance.check import JudgedLogs, Verdict, check
from suite.compliance.rules.base import Finding

GROUPS_SHOWN = 100
SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class CheckedPath:
    """One path of the report and its verdict. ``path`` is a name, and files are named from it on, not from the root."""

    path: str
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """The verdict as report.json holds it."""
        return {
            "path": self.path,
            "rulesets": self.verdict.rulesets,
            "logs": self.verdict.logs,
            "compliant": self.verdict.compliant,
            "findings": [asdict(finding) for finding in self.verdict.findings],
        }


def check_paths(paths: Sequence[Path], judged: JudgedLogs | None = None) -> list[CheckedPath]:
    """Check each path that exists. A missing path is left to the reader of logs, which names it.

    ``judged`` has the logs that were judged by themselves already (`analysis.tables.ingest`); others are read.
    """
    return [check_path(path, judged) for path in paths if path.exists()]


def check_path(path: Path, judged: JudgedLogs | None = None) -> CheckedPath:
    """Check one path; the same tree gives the same verdict wherever it lies."""
    verdict = check([path], judged=judged)
    parent = str(path.resolve().parent) + "/"
    findings = tuple(replace(finding, file=_strip_parent(finding.file, parent)) for finding in verdict.findings)
    return CheckedPath(path.resolve().name, replace(verdict, findings=findings))


def render_error(error: Finding) -> str:
    """An error as one line: the file by its last parts (system, scenario, benchmark, log), and the message."""
    return f"{'/'.join(Path(error.file).parts[-4:])}: {error.message}"


def collect_findings(checked: Sequence[CheckedPath]) -> list[Finding]:
    """The findings of all paths."""
    return [finding for item in checked for finding in item.verdict.findings]


def build_findings_table(checked: Sequence[CheckedPath]) -> HtmlTable | None:
    """A row for each rule and result with findings, errors first; None without findings.

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
    """The first finding of each severity, rule and result, and how many there are: errors first, then by rule."""
    groups: dict[tuple[int, str, str], list[Finding]] = {}
    for finding in collect_findings(checked):
        key = (SEVERITY_ORDER.get(finding.severity, len(SEVERITY_ORDER)), finding.rule, _find_result_folder(finding))
        groups.setdefault(key, []).append(finding)
    return [(groups[key][0], len(groups[key])) for key in sorted(groups)]


def _find_result_folder(finding: Finding) -> str:
    """The folder of the result that a finding is about: that of its log, or the path itself if it is none."""
    path = Path(finding.file)
    is_file = path.suffix[1:].isalpha()  # the "suffix" of a folder such as pytorch1.13 is a number
    return str(path.parent if is_file else path)


def _strip_parent(file: str, parent: str) -> str:
    """A file's path without ``parent``. What is no path (a group of files that a finding is about) stays as it is."""
    if Path(file).is_absolute() or Path(file).exists():
        return str(Path(file).resolve()).removeprefix(parent)
    return file
