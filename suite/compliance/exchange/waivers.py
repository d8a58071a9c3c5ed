"""Reads and applies waivers: reviewers accept findings, by rule, place, reason and name.

A package never brings its own.

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
from typing import Annotated

from msgspec import Meta, Struct, structs

from mlhpc.suite.compliance.all_rules import RULES
from mlhpc.suite.compliance.check import Verdict
from mlhpc.suite.compliance.rules.base import Finding, Waiver
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError, explain_near_names


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rule: str
    path: Annotated[str, Meta(pattern=r"\S")]
    reason: Annotated[str, Meta(pattern=r"\S")]
    who: Annotated[str, Meta(pattern=r"\S")]


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    waivers: tuple[_Entry, ...]


def read_waivers(path: Path, checked: Sequence[Path]) -> tuple[Waiver, ...]:
    """Read a file of waivers. InputError names file, line and value, and refuses a file inside of a checked path."""
    # A submitter must not waive findings in his own package.
    inside = next((item for item in checked if path.resolve().is_relative_to(item.resolve())), None)
    if inside is not None:
        raise InputError(
            f"{path}: lies in {inside}, which is checked, so its submitter may have written it; "
            "move the file of waivers out of there"
        )
    entries = YamlSource.read(path).convert(_File).waivers
    strange = next((entry.rule for entry in entries if entry.rule not in RULES), None)
    if strange is not None:
        raise InputError(
            f"{path}: field rule: unknown rule {strange!r}{explain_near_names(strange, RULES) or ';'} "
            "mlhpc check --list-rules prints all"
        )
    return tuple(Waiver(**{name: text.strip() for name, text in structs.asdict(entry).items()}) for entry in entries)


def add_waivers(verdict: Verdict, waivers: Sequence[Waiver]) -> Verdict:
    """Mark each finding that a waiver covers. A waiver without one is itself a note (waiver-unused)."""
    used = set()
    findings = []
    for finding in verdict.findings:
        # The first in the file: a reviewer can put a special waiver before a general one.
        waiver = next((item for item in waivers if _covers(item, finding)), None)
        used.add(waiver)
        findings.append(replace(finding, waiver=waiver))
    for waiver in waivers:
        if waiver not in used:
            text = f"waiver of {waiver.rule} by {waiver.who} covers no finding"
            findings.append(Finding("waiver-unused", "info", waiver.path, None, text))
    return replace(verdict, findings=tuple(findings))


def _covers(waiver: Waiver, finding: Finding) -> bool:
    """Return True if the rule is the same and the waiver's path matches the end of the finding's path."""
    patterns, parts = PurePath(waiver.path).parts, PurePath(finding.file).parts
    if waiver.rule != finding.rule or len(patterns) > len(parts):
        return False
    pairs = zip(patterns, parts[len(parts) - len(patterns) :], strict=True)
    # Part by part, so that * does not match a slash.
    return all(fnmatchcase(part, pattern) for pattern, part in pairs)
