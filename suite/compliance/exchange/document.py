"""The verdict as JSON, version 1, and the schema of that document, verdict.schema.json (docs/write_rules.py writes it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from suite.compliance.check import Verdict
from suite.compliance.rules.base import Finding, link
from suite.compliance.ruleset import Severity

SCHEMA = Path(__file__).parent / "verdict.schema.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WaivedEntry(_Strict):
    """Who accepted a finding, and why."""

    reason: str
    who: str


class FindingEntry(_Strict):
    """One thing that is wrong."""

    rule: str
    severity: Severity
    file: str
    line: int | None = Field(description="line number in the file; null for a file or folder as a whole")
    message: str
    help: str = Field(description="where the rule is explained")
    waived: WaivedEntry | None = Field(description="null unless a waiver covers the finding")


class CheckedEntry(_Strict):
    """How much was judged."""

    logs: int
    packages: int


class VerdictDocument(_Strict):
    """What `mlhpc check --format json` prints."""

    version: Literal[1]
    compliant: bool = Field(description="no finding is an error, those that a waiver covers left out")
    ruleset: str = Field(description="the rulesets that were used, with commas between them")
    checked: CheckedEntry
    findings: list[FindingEntry]


def as_json(verdict: Verdict) -> str:
    """Render as JSON, version 1. A name that is not UTF-8 has escaped surrogates."""
    document = {
        "version": 1,
        "compliant": verdict.compliant,
        "ruleset": ", ".join(verdict.rulesets),
        "checked": {"logs": verdict.logs, "packages": verdict.packages},
        "findings": [_entry(finding) for finding in verdict.findings],
    }
    return json.dumps(document, indent=1)


def schema() -> str:
    """The content of verdict.schema.json."""
    return json.dumps(VerdictDocument.model_json_schema(), indent=1) + "\n"


def _entry(finding: Finding) -> dict[str, Any]:
    waiver = finding.waiver
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "file": finding.file,
        "line": finding.line,
        "message": finding.message,
        "help": link(finding.rule),
        "waived": None if waiver is None else {"reason": waiver.reason, "who": waiver.who},
    }
