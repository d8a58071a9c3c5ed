"""SuperBench's rule files, baselines and results (microsoft/superbenchmark), read and judged as its analyzer does.

A result is one JSON object per node and line: ``node`` and ``benchmark[:annotation]/metric[:rank]`` with a number each. A rule has
a function (variance: (value - baseline) / baseline; value; failure_check; multi_rules over what other rules stored), criteria that
say what a violation is, categories and patterns of metrics. A node is defective if any rule that is not only stored is violated.
Three errors of its analyzer are not repeated: see docs/fleet.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from analysis.fleet.grammar import Criteria
from suite.errors import InputError, unknown
from suite.files import brief, read_bytes, read_json
from suite.log.limits import limits
from suite.log.values import finite

FUNCTIONS = ("variance", "value", "failure_check", "multi_rules")
NO_BASELINE = -1.0  # what the analyzer takes for a metric without a baseline
FAILED_TEST = "FailedTest"  # category of a metric that is not there
Row = Mapping[str, float]


@dataclass(frozen=True)
class Rule:
    """One rule. ``function`` is None for a rule that only stores values, ``store``: its violations are for multi_rules only."""

    name: str
    function: str | None
    criteria: Criteria | None
    categories: str
    metrics: tuple[str, ...]
    store: bool


@dataclass(frozen=True)
class Diagnosis:
    """What was found of one node: ``details`` in the analyzer's words, sorted ``categories``."""

    node: str
    defective: bool
    categories: tuple[str, ...]
    details: tuple[str, ...]


def read_results(path: Path) -> dict[str, dict[str, float]]:
    """Read results.jsonl: metrics by node. InputError for a line that is no object, or a node given twice."""
    return parse_results(path, read_bytes(path, limits().events))


def parse_results(path: Path, content: bytes) -> dict[str, dict[str, float]]:
    """The same of what was read from ``path``."""
    nodes: dict[str, dict[str, float]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(
                f"{path}:{number}: {brief(line.decode('utf-8', 'replace'))}: expected a JSON object"
            ) from None
        node = row.pop("node", None) if isinstance(row, dict) else None
        if not isinstance(node, str) or not node:
            raise InputError(f"{path}:{number}: expected an object with the name of a node under 'node'")
        if node in nodes:
            raise InputError(f"{path}:{number}: node {node!r} is there twice")
        nodes[node] = {name: value for name, value in map(_number, row.items()) if value is not None}
    if not nodes:
        raise InputError(f"{path}: no node: expected a JSON object with 'node' in each line")
    return nodes


def read_baseline(path: Path) -> dict[str, float]:
    """Read baseline.json: a number for each metric without its rank."""
    found = read_json(path, limits().json)
    numbers = dict(map(_number, found.items())) if isinstance(found, dict) else {}
    known = {name: value for name, value in numbers.items() if value is not None}
    if not isinstance(found, dict) or len(known) < len(found):
        raise InputError(f"{path}: expected a JSON object with a number for each metric")
    return known


def read_rules(path: Path) -> list[Rule]:
    """Read a rule file. InputError names the rule and what is wrong with it; no part of the file is run."""
    try:
        document = yaml.safe_load(read_bytes(path, limits().json))
        entries = document["superbench"]["rules"]
        items = list(entries.items())
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: expected a YAML file with rules under superbench: rules:") from None
    return [_rule(f"{path}: rule {name!r}", str(name), entry) for name, entry in items]


def diagnose(nodes: Mapping[str, Row], rules: Sequence[Rule], baseline: Mapping[str, float]) -> list[Diagnosis]:
    """Judge every node by the rules. InputError if a variance rule has a baseline of 0, or criteria do not fit."""
    names = sorted({name for row in nodes.values() for name in row})
    matched = {rule.name: _matched(rule, names) for rule in rules}
    return [_diagnose_node(node, row, rules, matched, baseline) for node, row in nodes.items()]


def fixed_threshold_baseline(values: Sequence[float], violated: Criteria) -> float:
    """The mean of what is left once every value that violates a variance rule against the mean is dropped, again and again.

    NaN if nothing is left. SuperBench's algorithm ``fix_threshold``.
    """
    kept = list(values)
    while kept:
        mean = math.fsum(kept) / len(kept)
        good = [value for value in kept if mean == 0.0 or not violated((value - mean) / mean)]
        if len(good) == len(kept):
            return mean
        kept = good
    return math.nan


def _number(item: tuple[str, object]) -> tuple[str, float | None]:
    return item[0], finite(item[1])


def _rule(where: str, name: str, entry: Any) -> Rule:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected function, criteria, categories and metrics")
    function, store, metrics = entry.get("function"), entry.get("store", False), entry.get("metrics", [])
    metrics = [metrics] if isinstance(metrics, str) else metrics
    if not isinstance(store, bool):
        raise InputError(f"{where}: store = {brief(store)}: expected true or false")
    if function not in FUNCTIONS and not (function is None and store):
        raise InputError(f"{where}: {unknown('function', str(function), FUNCTIONS)}")
    if not isinstance(entry.get("categories"), str):
        raise InputError(f"{where}: categories = {brief(entry.get('categories'))}: expected a text")
    if not isinstance(metrics, list) or not all(isinstance(metric, str) for metric in metrics):
        raise InputError(f"{where}: metrics = {brief(metrics)}: expected patterns of metrics")
    if not metrics and function != "multi_rules":
        raise InputError(f"{where}: no metrics")
    for metric in metrics:
        try:
            re.compile(metric)
        except re.error as error:
            raise InputError(f"{where}: metrics has {metric!r}, which is no regular expression: {error}") from None
    criteria = Criteria(entry["criteria"], where) if function is not None and "criteria" in entry else None
    if function is not None and criteria is None:
        raise InputError(f"{where}: no criteria")
    return Rule(name, function, criteria, entry["categories"], tuple(metrics), store)


def _matched(rule: Rule, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The metrics that a rule is for, and those of its patterns that no metric matches.

    The name of the benchmark, without an annotation behind a colon, is no pattern.
    """
    found: list[str] = []
    unmatched = []
    for pattern in rule.metrics:
        own = [name for name in names if _benchmark(name) == _benchmark(pattern)]
        hits = [pattern] if pattern in own else [name for name in own if re.search(pattern, name)]
        if not hits:
            unmatched.append(pattern)
        found += hits
    return list(dict.fromkeys(found)), unmatched


def _benchmark(metric: str) -> str:
    return metric.partition("/")[0].partition(":")[0]


def _diagnose_node(
    node: str,
    row: Row,
    rules: Sequence[Rule],
    matched: Mapping[str, tuple[list[str], list[str]]],
    baseline: Mapping[str, float],
) -> Diagnosis:
    details: list[str] = []
    categories: set[str] = set()
    stored: dict[str, Any] = {}
    defective = False
    for rule in rules:
        metrics, unmatched = matched[rule.name]
        if rule.function is None:
            stored[rule.name] = {name: row[name] for name in metrics if name in row}
            continue
        assert rule.criteria is not None
        if rule.function == "multi_rules":
            if any(value == {} for value in stored.values()):
                defective = True
                categories.add(FAILED_TEST)
                details.append(f"{rule.name}_miss")
            elif rule.criteria(stored):
                defective = True
                categories.add(rule.categories)
                details.append(f"{rule.name}:{rule.criteria.text}")
            continue
        missing = [f"{name}_miss" for name in metrics if name not in row]
        if rule.function == "failure_check":
            missing += [f"{pattern}_miss" for pattern in unmatched]
        violations = list(_violations(rule, metrics, row, baseline))
        details += [*missing, *violations]
        if rule.store:
            stored[rule.name] = len(missing) + len(violations)
            continue
        categories |= {FAILED_TEST} if missing else set()
        categories |= {rule.categories} if violations else set()
        defective |= bool(missing or violations)
    return Diagnosis(node, defective, tuple(sorted(categories)), tuple(details))


def _violations(rule: Rule, metrics: Sequence[str], row: Row, baseline: Mapping[str, float]) -> Iterator[str]:
    assert rule.criteria is not None
    for name in metrics:
        if name not in row:
            continue
        value = row[name]
        if rule.function == "variance":
            normal = baseline.get(name, baseline.get(name.partition(":")[0], NO_BASELINE))
            if normal == 0.0:
                raise InputError(f"rule {rule.name!r}: {name} has the baseline 0, of which no variance can be told")
            variance = (value - normal) / normal
            if rule.criteria(variance):
                yield f"{name}(B/L: {normal:.4f} VAL: {value:.4f} VAR: {variance * 100:.2f}% Rule:{rule.criteria.text})"
        elif rule.criteria(value):
            yield f"{name}(VAL: {value:.4f} Rule:{rule.criteria.text})"
