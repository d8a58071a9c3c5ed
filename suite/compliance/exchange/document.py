"""Renders a verdict as JSON, version 1, and the schema of the document, verdict.schema.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mlhpc.suite.compliance.check import Verdict
from mlhpc.suite.compliance.rules.base import Finding, render_rule_link
from mlhpc.suite.compliance.ruleset import Severity

SCHEMA = Path(__file__).parent / "verdict.schema.json"


class _StrictStruct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class WaivedEntry(_StrictStruct, frozen=True, kw_only=True):
    """Who accepted a finding, and why."""

    reason: str
    who: str


class FindingEntry(_StrictStruct, frozen=True, kw_only=True):
    """One breach of a rule."""

    rule: str
    severity: Severity
    file: str
    line: Annotated[int | None, Meta(description="line number in the file; null for a file or folder as a whole")]
    message: str
    # A stable link, so that a CI system can show it beside the finding.
    help: Annotated[str, Meta(description="where the rule is explained")]
    waived: Annotated[WaivedEntry | None, Meta(description="null unless a waiver covers the finding")]


class CheckedEntry(_StrictStruct, frozen=True, kw_only=True):
    """The numbers of logs and packages that were judged."""

    logs: int
    packages: int


class VerdictDocument(_StrictStruct, frozen=True, kw_only=True):
    """The document that `mlhpc check --format json` prints."""

    version: Literal[1]
    compliant: Annotated[bool, Meta(description="no finding is an error, those that a waiver covers left out")]
    ruleset: Annotated[str, Meta(description="the rulesets that were used, with commas between them")]
    checked: CheckedEntry
    findings: list[FindingEntry]


def render_json(verdict: Verdict) -> str:
    """Render as JSON, version 1. A name that is not UTF-8 has escaped surrogates."""
    document = {
        "version": 1,
        "compliant": verdict.compliant,
        "ruleset": ", ".join(verdict.rulesets),
        "checked": {"logs": verdict.logs, "packages": verdict.packages},
        "findings": [_build_entry(finding) for finding in verdict.findings],
    }
    return json.dumps(document, indent=1)


def render_schema() -> str:
    """Render verdict.schema.json."""
    return json.dumps(msgspec.json.schema(VerdictDocument), indent=1) + "\n"


def _build_entry(finding: Finding) -> dict[str, Any]:
    waiver = finding.waiver
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "file": finding.file,
        "line": finding.line,
        "message": finding.message,
        "help": render_rule_link(finding.rule),
        "waived": None if waiver is None else {"reason": waiver.reason, "who": waiver.who},
    }
