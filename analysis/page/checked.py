"""What the compliance check (`mlhpc check`) says of the paths of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from analysis.page.cells import HtmlTable, html_table
from suite.compliance.check import JudgedLogs, Verdict, check
from suite.compliance.rules.base import Finding

FINDINGS_SHOWN = 100


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
    findings = tuple(replace(finding, file=_below(finding.file, parent)) for finding in verdict.findings)
    return CheckedPath(path.resolve().name, replace(verdict, findings=findings))


def error_text(error: Finding) -> str:
    """An error as one line: the file by its last parts (system, scenario, benchmark, log), and the message."""
    return f"{'/'.join(Path(error.file).parts[-4:])}: {error.message}"


def findings(checked: Sequence[CheckedPath]) -> list[Finding]:
    """The findings of all paths."""
    return [finding for item in checked for finding in item.verdict.findings]


def findings_table(checked: Sequence[CheckedPath]) -> HtmlTable | None:
    """The first FINDINGS_SHOWN findings, errors first; None without findings."""
    order = {"error": 0, "warning": 1, "info": 2}
    chosen = sorted(findings(checked), key=lambda finding: order.get(finding.severity, 3))[:FINDINGS_SHOWN]
    if not chosen:
        return None
    names = ("severity", "rule", "file", "line", "message")
    return html_table({name: [getattr(f, name) for f in chosen] for name in names}, "Findings of the compliance check")


def _below(file: str, parent: str) -> str:
    """A file's path without ``parent``. What is no path (a group of files that a finding is about) stays as it is."""
    if Path(file).is_absolute() or Path(file).exists():
        return str(Path(file).resolve()).removeprefix(parent)
    return file
