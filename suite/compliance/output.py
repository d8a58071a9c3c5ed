"""Renders a verdict as a table, as JUnit (for CI) or as JSON. Only `print_table` prints.

Renders explanations of the rules for --explain, --list-rules and docs/rules.md.

A rule's code states its request and source. Rulesets state severity and thresholds, rules.yaml the rest.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.all_rules import LOG_RULES, RESULT_RULES, RULES
from mlhpc.suite.compliance.check import Verdict
from mlhpc.suite.compliance.rules.base import EMPTY_LOG_RULE, OURS, Finding, Rule, render_rule_link
from mlhpc.suite.compliance.ruleset import Ruleset, Severity, list_rulesets, read_ruleset
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError, explain_near_names
from mlhpc.suite.files import render_printable

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


# Errors are always listed in full: each one has to be mended.
_LISTED_PER_RULE = 5


def render_table(verdict: Verdict) -> str:
    """Render as lines, errors first. Many warnings or notes of one rule are shortened to the first few and a count.

    A single file that is no log has one line only: the summary would say nothing.
    """
    empty = _find_empty_log(verdict)
    if empty is not None:
        return (
            f"{_render_level(empty):7}  {empty.rule:20}  {render_location(empty)}:"
            f" {render_printable(_render_message(empty))}"
        )
    lines = []
    for finding, more in _order_findings(verdict):
        text = (
            _MORE.format(more) if more else f"{render_location(finding)}: {render_printable(_render_message(finding))}"
        )
        lines.append(f"{_render_level(finding):7}  {finding.rule:20}  {text}")
    return "\n".join([*lines, *_render_advice(verdict), summarise_verdict(verdict)])


def print_table(verdict: Verdict) -> None:
    """Print the findings as a table as wide as the terminal, errors first, in colour."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if _find_empty_log(verdict) is not None:
        console.print(Text(render_table(verdict), style="bold red"))
        return
    colour = {"error": "bold red", "warning": "yellow", "info": "dim", "waived": "dim"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("severity", "rule", "where", "what"):
        table.add_column(name, overflow="fold", no_wrap=name in ("severity", "rule"))
    shared = _find_shared_folder(verdict)
    for finding, more in _order_findings(verdict):
        level = Text(_render_level(finding), style=colour[_render_level(finding)])
        place = "" if more else render_location(finding).removeprefix(shared)
        message = _MORE.format(more) if more else render_printable(_render_message(finding))
        # Text, because rich would read brackets in a str as its markup.
        table.add_row(level, Text(finding.rule), Text(place), Text(message))
    if verdict.findings:
        console.print(Text(shared, style="bold"))
        console.print(table)
        console.print(Text("\n".join(_render_advice(verdict)), style="dim"))
    console.print(Text(summarise_verdict(verdict), style="bold green" if verdict.compliant else "bold red"))


def _find_empty_log(verdict: Verdict) -> Finding | None:
    """Return the log-empty finding if the only checked file is not a log, else None."""
    errors = verdict.counted("error")
    alone = verdict.logs == 1 and not verdict.packages and len(errors) == 1 and not verdict.counted("warning")
    return errors[0] if alone and errors[0].rule == EMPTY_LOG_RULE else None


def render_junit(verdict: Verdict) -> str:
    """Render as JUnit XML: one test case per finding; errors are failures, the rest is output."""
    from xml.etree import ElementTree

    errors = verdict.counted("error")
    others = [finding for finding in verdict.findings if finding.severity != "error" or finding.waiver]
    suite = ElementTree.Element("testsuite", name="mlhpc check", failures=str(len(errors)))
    for finding in (*errors, *others):
        # XML cannot hold the control characters that `render_printable` replaces.
        case = ElementTree.SubElement(suite, "testcase", classname=render_printable(finding.file), name=finding.rule)
        if finding in others:
            ElementTree.SubElement(case, "system-out").text = render_printable(
                f"{_render_level(finding)}: {_render_message(finding)}"
            )
        else:
            failure = ElementTree.SubElement(case, "failure", message=render_printable(finding.message))
            failure.text = f"{render_location(finding)} ({render_rule_link(finding.rule)})"
    if not errors:
        ElementTree.SubElement(
            suite, "testcase", classname="mlhpc check", name=render_printable(summarise_verdict(verdict))
        )
    suite.set("tests", str(len(suite)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def render_json(verdict: Verdict) -> str:
    """Render as JSON, version 1: exchange/verdict.schema.json. A name that is not UTF-8 has escaped surrogates."""
    document = {
        "version": 1,
        "compliant": verdict.compliant,
        "ruleset": ", ".join(verdict.rulesets),
        "checked": {"logs": verdict.logs, "packages": verdict.packages},
        "findings": [_build_entry(finding) for finding in verdict.findings],
    }
    return json.dumps(document, indent=1)


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


_HELP = "more about a rule: mlhpc check --explain RULE"
_MORE = "... and {} more (--format json has all)"


def _render_advice(verdict: Verdict) -> list[str]:
    """Render how to mend the errors and warnings, one line for each rule, and where to read more."""
    if not verdict.findings:
        return []
    counted = [
        finding for finding, _ in _order_findings(verdict) if finding.waiver is None and finding.severity != "info"
    ]
    texts = read_rule_texts()
    rules = [rule for rule in dict.fromkeys(finding.rule for finding in counted) if rule in texts]
    return [*(f"to mend {rule}: {texts[rule].mend}" for rule in rules), _HELP]


def _render_level(finding: Finding) -> str:
    """Return the severity, or "waived"."""
    return "waived" if finding.waiver is not None else finding.severity


def _render_message(finding: Finding) -> str:
    """Return the message, with who waived it and why. It may hold any character, because it quotes logs."""
    waiver = finding.waiver
    return finding.message + (f" [waived by {waiver.who}: {waiver.reason}]" if waiver is not None else "")


def render_location(finding: Finding) -> str:
    """Render the place of a finding as printable text: ``file:line``, or the file alone."""
    file = render_printable(finding.file)
    return f"{file}:{finding.line}" if finding.line else file


def summarise_verdict(verdict: Verdict) -> str:
    """Render the verdict in one line."""
    findings = ", ".join(_render_count(verdict.count(level), name) for level, name in _NAMES)
    waived = sum(finding.waiver is not None for finding in verdict.findings)
    findings += f"; {_render_count(waived, 'finding')} waived" if waived else ""
    checked = f"{_render_count(verdict.logs, 'log')}, {_render_count(verdict.packages, 'package')}"
    compliant = "compliant" if verdict.compliant else "NOT compliant"
    if not verdict.logs and not verdict.packages:
        compliant = "nothing checked"
    if verdict.rulesets == ("none",) and verdict.logs:
        compliant = "not judged, for lack of rules"
    going_on = [text for result in verdict.results if (text := result.under_way)]
    if going_on and not verdict.compliant:
        compliant = f"not judged yet ({render_printable('; '.join(going_on))})"
    return f"{compliant}: {checked}, ruleset {', '.join(verdict.rulesets)}: {findings}"


_NAMES: tuple[tuple[Severity, str], ...] = (("error", "error"), ("warning", "warning"), ("info", "note"))


def _render_count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _find_shared_folder(verdict: Verdict) -> str:
    """Return the common folder of all findings, with its slash. Empty if there is only one path."""
    paths = [render_location(finding) for finding in verdict.findings]
    if len(set(paths)) < 2:
        return ""
    return os.path.commonprefix(paths).rpartition("/")[0] + "/"  # noqa: RUF071  cut at "/"


def _order_findings(verdict: Verdict) -> Iterator[tuple[Finding, int]]:
    """Yield (finding, 0) by severity and rule.

    After the first few of many warnings, yield (finding, number left out).
    """
    kinds: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in verdict.findings:
        kinds[finding.severity, finding.rule].append(finding)
    for severity in ("error", "warning", "info"):
        for (level, _), findings in kinds.items():
            if level == severity:
                listed = findings if severity == "error" else findings[:_LISTED_PER_RULE]
                yield from ((finding, 0) for finding in listed)
                if len(findings) > len(listed):
                    yield findings[-1], len(findings) - len(listed)
