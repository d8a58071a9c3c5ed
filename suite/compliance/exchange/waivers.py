"""Waivers: findings that reviewers accept, with rule, place, reason and who decided. They never come with a package.

waivers:
  - rule: rcp-speed
    path: ACME/results/cluster/weak/cosmoflow
    reason: 59 instances against a threshold for 10 runs
    who: results chair, 2026-11-20
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from suite.compliance.all_rules import RULES
from suite.compliance.check import Verdict
from suite.compliance.rules.base import Finding, Waiver
from suite.errors import InputError, did_you_mean
from suite.files import YamlSource, first_error


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)
    rule: str
    path: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    who: str = Field(min_length=1)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    waivers: tuple[_Entry, ...]


def read_waivers(path: Path, checked: Sequence[Path]) -> tuple[Waiver, ...]:
    """Read a file of waivers. InputError names file, line and value; a file inside of what is checked is refused too."""
    inside = next((item for item in checked if path.resolve().is_relative_to(item.resolve())), None)
    if inside is not None:
        raise InputError(f"{path}: lies in {inside}, which is judged: nobody waives his own findings")
    source = YamlSource.read(path)
    try:
        entries = _File.model_validate(source.data).waivers
    except ValidationError as error:
        raise InputError(first_error(error, source)) from None
    strange = next((entry.rule for entry in entries if entry.rule not in RULES), None)
    if strange is not None:
        raise InputError(
            f"{path}: unknown rule {strange!r}{did_you_mean(strange, RULES) or ';'} mlhpc check --list-rules has them"
        )
    return tuple(Waiver(**entry.model_dump()) for entry in entries)


def waive(verdict: Verdict, waivers: Sequence[Waiver]) -> Verdict:
    """Mark each finding that a waiver covers. A waiver that covers none is a finding of its own (waiver-unused, a note)."""
    used = set()
    findings = []
    for finding in verdict.findings:
        waiver = next((item for item in waivers if _covers(item, finding)), None)
        used.add(waiver)
        findings.append(replace(finding, waiver=waiver))
    for waiver in waivers:
        if waiver not in used:
            text = f"waiver of {waiver.rule} by {waiver.who} covers no finding"
            findings.append(Finding("waiver-unused", "info", waiver.path, None, text))
    return replace(verdict, findings=tuple(findings))


def _covers(waiver: Waiver, finding: Finding) -> bool:
    """True if the rule is the same and the parts of the waiver's path match the last parts of the finding's."""
    patterns, parts = PurePath(waiver.path).parts, PurePath(finding.file).parts
    if waiver.rule != finding.rule or len(patterns) > len(parts):
        return False
    pairs = zip(patterns, parts[len(parts) - len(patterns) :], strict=True)
    return all(fnmatchcase(part, pattern) for pattern, part in pairs)
