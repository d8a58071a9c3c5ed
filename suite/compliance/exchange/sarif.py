"""The verdict as SARIF 2.1.0 (OASIS), which code scanning services read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from suite import VERSION
from suite.compliance.all_rules import RULES
from suite.compliance.check import Verdict
from suite.compliance.explanations import rule_texts
from suite.compliance.rules.base import Finding, link

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def as_sarif(verdict: Verdict) -> str:
    """Render as SARIF: one run with the rules that found something, one result for each finding.

    Files below the working directory are named relative to it, as those services expect, others by file URI. A waiver is
    an external suppression.
    """
    rules = list(dict.fromkeys(finding.rule for finding in verdict.findings))
    driver = {"name": "mlhpc check", "version": VERSION, "rules": [_rule(rule) for rule in rules]}
    run = {
        "tool": {"driver": driver},
        "results": [_result(finding, rules.index(finding.rule)) for finding in verdict.findings],
        "properties": {"compliant": verdict.compliant, "rulesets": list(verdict.rulesets)},
    }
    schema = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=1)


def _rule(rule: str) -> dict[str, Any]:
    info, text = RULES[rule], rule_texts().get(rule)
    entry: dict[str, Any] = {"id": rule, "shortDescription": {"text": info.asks}}
    if text is not None:
        entry |= {"fullDescription": {"text": text.why}, "help": {"text": f"{text.mend} ({link(rule)})"}}
    return entry


def _result(finding: Finding, index: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.file)}}
    if finding.line:
        place["region"] = {"startLine": finding.line}
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": place}],
    }
    if finding.waiver is not None:
        reason = f"{finding.waiver.reason} ({finding.waiver.who})"
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": reason}]
    return result


def _uri(file: str) -> str:
    path = Path(file)
    here = Path.cwd()
    if path.is_absolute() and path.is_relative_to(here) and path != here:
        path = path.relative_to(here)
    return ("file://" if path.is_absolute() else "") + quote(os.fsencode(path.as_posix()))
