"""Reads reference points from a file (--rcp), for batch sizes without points in the ruleset.

The ruleset's own points always win. The file has the form of `mlhpc workload rcp record`, or that of MLCommons'
rcp_checker (--custom_rcps).

Reads and applies waivers: reviewers accept findings, by rule, place, reason and name.

A package never brings its own.

waivers:
  - rule: rcp-speed
    path: ACME/results/cluster/weak/cosmoflow
    reason: 59 instances against a threshold for 10 runs
    who: results chair, 2026-11-20
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from mlhpc.suite.card import ReferencePoints
from mlhpc.suite.compliance.all_rules import RULES
from mlhpc.suite.compliance.check import Verdict
from mlhpc.suite.compliance.rules.base import Finding, Waiver, convert_to_fields
from mlhpc.suite.compliance.ruleset import ExtraReferencePoints
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError, explain_near_names
from mlhpc.suite.files import read_json, render_repr
from mlhpc.suite.log.reader import convert_to_float, parse_int64, read_limits


def read_reference_points(path: Path) -> ExtraReferencePoints:
    """Read a file of reference points. InputError names the file and what was expected."""
    try:
        data = read_json(path, read_limits().json)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: expected JSON: {error}") from None
    if not isinstance(data, dict) or not data:
        raise InputError(f"{path}: expected a JSON object of reference points, found {render_repr(data)}")
    points = _parse_own_format(path, data) if "points" in data else _parse_official_format(path, data)
    return ExtraReferencePoints(str(path), points)


def _parse_own_format(path: Path, data: dict[str, Any]) -> dict[tuple[str, str | None, int], tuple[float, ...]]:
    known = YamlSource(path, data, {}).convert(ReferencePoints)
    name = load_descriptor(known.workload).card().mlperf_name
    return {(name, known.size, point.global_batch_size): point.epochs for point in known.points}


def _parse_official_format(path: Path, data: Mapping[str, Any]) -> dict[tuple[str, str | None, int], tuple[float, ...]]:
    found: dict[tuple[str, str | None, int], tuple[float, ...]] = {}
    for name, entry in data.items():
        fields = convert_to_fields(entry)
        benchmark, batch, epochs = fields.get("Benchmark"), fields.get("BS"), fields.get("Epochs to converge")
        numbers = [convert_to_float(item) for item in epochs] if isinstance(epochs, list) else []
        positive = [number for number in numbers if number is not None and number > 0.0]
        all_positive = bool(numbers) and len(positive) == len(numbers)
        sound = type(batch) is int and batch >= 1 and parse_int64(batch) is not None  # of at most 64 bits
        if not isinstance(benchmark, str) or not isinstance(batch, int) or not sound or not all_positive:
            raise InputError(
                f"{path}: entry {render_repr(name)}: expected the fields Benchmark (text), BS (an integer from 1) and "
                "Epochs to converge (a list of positive numbers)"
            )
        # Their file may have several entries of one batch size, each with some runs.
        found[benchmark, None, batch] = (*found.get((benchmark, None, batch), ()), *positive)
    return found


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
