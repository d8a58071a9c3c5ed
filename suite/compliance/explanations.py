"""Renders explanations of the rules for --explain, --list-rules and docs/rules.md.

A rule's code states its request and source. Rulesets state severity and thresholds, rules.yaml the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.all_rules import LOG_RULES, RESULT_RULES, RULES
from mlhpc.suite.compliance.rules.base import OURS, Rule, render_rule_link
from mlhpc.suite.compliance.ruleset import Ruleset, Severity, list_rulesets, read_ruleset
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError, explain_near_names

RULE_TEXTS_FILE = Path(__file__).parent / "rules.yaml"
SCOPES = ("one log", "the runs of a result", "a package")


@dataclass(frozen=True)
class RuleText:
    """Why a rule exists, what to do about a finding, and the fields of the ruleset that it compares with."""

    why: str
    mend: str
    thresholds: tuple[str, ...] = ()


@cache
def read_rule_texts() -> dict[str, RuleText]:
    """Read the texts of all rules, by rule."""
    texts = _read_data()["rules"].items()
    return {rule: RuleText(text["why"], text["mend"], tuple(text.get("thresholds", ()))) for rule, text in texts}


def explain_rule(rule: str) -> str:
    """Render the text that `--explain` prints. InputError, with the nearest rule, for an unknown one."""
    if rule not in RULES:
        near = explain_near_names(rule, RULES) or ";"
        raise InputError(f"unknown rule {rule!r}{near} mlhpc check --list-rules prints all")
    lines = [f"{rule} ({find_rule_scope(rule)})", *(f"  {name}: {text}" for name, text in _list_fields(RULES[rule]))]
    return "\n".join([*lines, f"  page: {render_rule_link(rule)}"])


def render_rule_list() -> str:
    """Render the text that `--list-rules` prints: one line per rule."""
    widest = max(map(len, RULES))
    lines = []
    for name in SCOPES:
        lines += [f"{name}:", *(f"  {rule:{widest}}  {RULES[rule].asks}" for rule in _list_rules_of_scope(name))]
    return "\n".join([*lines, f"{len(RULES)} rules; mlhpc check --explain RULE says more"])


def render_rules_page() -> str:
    """Render the page of rules, which `make docs` puts into the site."""
    documents = [f"- {name}: {_render_url(url)}" for name, url in _read_data()["documents"].items()]
    head = "How the checker works: [checker.md](checker.md). Where rules come from:"
    lines = ["# Rules of the checker", "", head, "", *documents]
    for name in SCOPES:
        lines += ["", f"## {name[0].upper()}{name[1:]}"]
        for rule in _list_rules_of_scope(name):
            fields = [f"- {field}: {text}" for field, text in _list_fields(RULES[rule])]
            lines += ["", f"### {rule}", "", *fields]
    return "\n".join(lines) + "\n"


def find_rule_scope(rule: str) -> str:
    """Return what a rule judges, one of `SCOPES`."""
    one_log, runs, package = SCOPES
    if RULES[rule] in LOG_RULES:
        return one_log
    return runs if RULES[rule] in RESULT_RULES else package


@cache
def _read_data() -> dict[str, Any]:
    return YamlSource.read(RULE_TEXTS_FILE).data


def _render_url(url: str) -> str:
    return f"[{url.removeprefix('https://')}]({url})" if url.startswith("https://") else url


def _list_rules_of_scope(name: str) -> list[str]:
    """List the rules of a scope: first those in rules.yaml, in its order, then rules without a text."""
    return [rule for rule in {**read_rule_texts(), **RULES} if find_rule_scope(rule) == name]


def _list_fields(info: Rule) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each field of a rule's explanation, in order."""
    text = read_rule_texts().get(info.name)
    yield "asks", info.asks
    if text is not None:
        yield "why" if info.source == OURS else "published rules", text.why
    yield "source", info.source
    yield "severity", _render_severities(info.name)
    for name in text.thresholds if text is not None else ():
        for value, rulesets in _list_threshold_values(name).items():
            yield f"{name.replace('_', ' ')} in {', '.join(rulesets)}", value
    if text is not None:
        yield "to mend", text.mend


def _render_severities(rule: str) -> str:
    levels: tuple[Severity | None, ...] = ("error", "warning", "info", None)
    found = {
        level: [name for name in list_rulesets() if read_ruleset(name).severity(rule) == level] for level in levels
    }
    return "; ".join(f"{level or 'not looked for'} in {', '.join(names)}" for level, names in found.items() if names)


def _list_threshold_values(name: str) -> dict[str, list[str]]:
    """List the values of a threshold, each with its rulesets."""
    values: dict[str, list[str]] = {}
    for known in list_rulesets():
        values.setdefault(_render_threshold_value(name, read_ruleset(known)), []).append(known)
    return values


def _render_threshold_value(name: str, rules: Ruleset) -> str:
    if name == "init_minutes":
        return ", ".join(f"{division} {minutes:g} minutes" for division, minutes in rules.data.init_minutes.items())
    if name == "rcp_confidence":
        return f"one-sided t test at {rules.data.rcp_confidence:g}"
    known = [benchmark for item in rules.benchmark_names() if (benchmark := rules.benchmark(item, None)) is not None]
    if not known:
        return "the card's"
    if name == "required_runs":
        return ", ".join(f"{benchmark.name} {benchmark.required_runs}" for benchmark in known)
    assert name == "target", name
    return ", ".join(f"{benchmark.name} {benchmark.target_text}" for benchmark in known)
