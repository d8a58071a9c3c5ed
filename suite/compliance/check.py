"""Judges a log, a folder of logs, a package or a round: reads each log once, applies the rules, returns findings.

It only reads. Of each log it keeps the record and the findings, so memory is bounded by the largest log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from suite.compliance.all_rules import LOG_RULES, RESULT_RULES
from suite.compliance.choice import Choice, choose
from suite.compliance.failed_run import cut_line, follows_from_failure
from suite.compliance.forensics.copy_rules import SeenRuns
from suite.compliance.metric import record_of
from suite.compliance.result import Result
from suite.compliance.rules.base import NO_LOG, Finding, LogContext, of_another_suite, weighed
from suite.compliance.rules.package_rules import judge_package, judge_system
from suite.compliance.ruleset import (
    Benchmark,
    GivenPoints,
    KnownResult,
    Ruleset,
    Severity,
    ruleset,
    ruleset_names,
)
from suite.log.limits import HEAD_BYTES
from suite.log.reader import Log, read_events
from suite.log.record import RunRecord
from suite.log.results_tree import LINK, Group, Tree, find, list_files, list_system_files, read_system
from suite.log.score import failure


@dataclass(frozen=True)
class Verdict:
    """What was checked, by which rulesets, and all findings in the order of the tree. ``results``: those that have logs."""

    rulesets: tuple[str, ...]
    logs: int
    packages: int
    findings: tuple[Finding, ...]
    results: tuple[Result, ...] = ()

    @property
    def compliant(self) -> bool:
        """True if no finding is an error. If nothing was checked, that is an error too (rule nothing-checked)."""
        return not self.counted("error")

    def count(self, severity: Severity) -> int:
        """Number of findings of a severity, those that a waiver covers left out."""
        return len(self.counted(severity))

    def counted(self, severity: Severity) -> list[Finding]:
        """The findings of a severity that no waiver covers."""
        return [finding for finding in self.findings if finding.severity == severity and finding.waiver is None]


@dataclass(frozen=True)
class CheckedLog:
    """What remains of a log after its check."""

    record: RunRecord
    benchmark: Benchmark | None
    findings: tuple[Finding, ...]
    cut_line: int | None = None  # the last line, if it is broken and the run has no end

    @property
    def converged(self) -> bool:
        """True if the run reached its target."""
        return self.benchmark is not None and failure(self.record, self.benchmark) is None


Judged = Mapping[Path, CheckedLog]


def check(
    paths: list[Path], ruleset_name: str | None = None, given: GivenPoints | None = None, judged: Judged | None = None
) -> Verdict:
    """Judge everything under the paths by one ruleset, or each result by that of its round.

    ``given`` adds reference points for batch sizes that the ruleset has none for. ``judged`` has logs that somebody read
    and judged already, by the rulesets that `rulesets_of_logs` names.

    InputError for a path that is no file or folder, such as a device.
    """
    findings: list[Finding] = []
    results: list[Result] = []
    used: list[str] = []
    seen = SeenRuns()
    packages = logs = 0
    for path in {path.absolute(): path for path in paths}.values():  # a path given twice is one
        tree = find(path, partly=True)
        unread = [_unread(error, path) for error in tree.unread]
        findings += unread
        for package, groups in _judged_together(tree):
            choice = Choice(ruleset_name) if ruleset_name else choose(groups, path)
            rules = replace(ruleset(choice.ruleset), given=given)
            used.append(rules.name)
            shared = [item for rule, folder, text in choice.breaches for item in weighed(rules, rule, folder, text)]
            findings += shared
            # A single file is judged by the rules for one log only.
            several = None if path.is_file() else seen
            judgements = [_check_group(group, rules, several, judged or {}) for group in groups]
            for _, own in judgements:
                findings += own
            if package is not None:
                packages += 1
                of_package = list(_check_package(package, groups, rules)) if several is not None else []
                findings += of_package
                shared += of_package
            for result, own in judgements:
                logs += len(result.group.logs) + len(result.group.pruned)
                if result.runs:
                    errors = sum(finding.severity == "error" for finding in (*unread, *shared, *own))
                    results.append(replace(result, errors=errors, power=_broken_power_rules(own)))
        findings += _behind_links(tree)
    if not logs:
        where = ", ".join(str(path) for path in paths)
        text = f"no result_*.txt found: nothing was checked{_named_otherwise(paths)}"
        findings.append(Finding("nothing-checked", "error", where, None, text))
    names = tuple(name for name in ruleset_names() if name in used) or (ruleset_name or "none",)
    return Verdict(names, logs, packages, tuple(findings), tuple(results))


def rulesets_of_logs(path: Path) -> dict[Path, str]:
    """The name of the ruleset that judges each log below a path, pruned ones too, for who reads the logs anyway."""
    return {
        log: choice.ruleset
        for _, groups in _judged_together(find(path.absolute(), partly=True))
        for choice in [choose(groups, path.absolute())]
        for group in groups
        for log in (*group.logs, *group.pruned)
    }


def _broken_power_rules(findings: Sequence[Finding]) -> tuple[str, ...]:
    broken = (finding.rule for finding in findings if finding.severity != "info" and finding.waiver is None)
    return tuple(dict.fromkeys(rule for rule in broken if rule.startswith("power-") and rule != "power-scope"))


def _unread(error: OSError, path: Path) -> Finding:
    return Finding("folder-unread", "error", str(error.filename or path), None, f"cannot be read: {error.strerror}")


def _behind_links(tree: Tree) -> Iterator[Finding]:
    """Links to folders outside of packages, whose own rules name theirs: what lies behind them is not judged."""
    packages = set(tree.packages)
    for item in tree.skipped:
        if item.reason == LINK and item.path.is_dir() and packages.isdisjoint(item.path.parents):
            yield Finding("link-unfollowed", "warning", str(item.path), None, "is a symbolic link: not followed")


def _named_otherwise(paths: list[Path]) -> str:
    """A hint if one of the first 100 files is a log that is not named result_<n>.txt."""
    files = (file for path in paths for file in list_files(path))
    for file in islice(files, 100):
        with suppress(OSError):
            if file.is_file() and b":::MLLOG" in _head(file):
                return f"; {file} holds MLLOG events but is not named result_<n>.txt"
    return ""


def _head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def check_log(path: Path, rules: Ruleset) -> CheckedLog:
    """Read one log and judge it by itself. A log that cannot be read is a finding."""
    name = str(path)
    try:
        log = read_events(path, steps=False)
    except OSError as error:
        unread = Finding(NO_LOG, "error", name, None, f"cannot be read: {error.strerror}")
        return CheckedLog(RunRecord(path=path), None, (unread,))
    return judge_log(log, rules, name)


def judge_log(log: Log, rules: Ruleset, name: str, known: RunRecord | None = None) -> CheckedLog:
    """Judge the events of one log; ``name`` is the name of its file in findings, ``known`` as `record_of` takes it."""
    record, benchmark = record_of(log, rules, known)
    suite = rules.other_suite(record.benchmark)
    if suite is not None:
        return CheckedLog(record, None, (of_another_suite(log, rules, suite, name),))
    context = LogContext(log, record, rules, benchmark)
    return CheckedLog(record, benchmark, tuple(_log_findings(context, name)), cut_line(log))


def _log_findings(context: LogContext, file: str) -> Iterator[Finding]:
    for rule in LOG_RULES:
        severity = context.ruleset.severity(rule.name)
        if severity is not None:
            for line, message in rule.check(context):
                yield Finding(rule.name, severity, file, line, message)


def _result_findings(result: Result) -> Iterator[Finding]:
    for rule in RESULT_RULES:
        severity = result.ruleset.severity(rule.name)
        if severity is not None:
            for path, message in rule.check(result):
                yield Finding(rule.name, severity, str(path or result.group.folder), None, message)


def _check_package(package: Path, groups: Sequence[Group], rules: Ruleset) -> Iterator[Finding]:
    """Judge the files of a package beside its results: system descriptions, names, the manifest."""
    for path in list_system_files(package):
        for rule, message in judge_system(read_system(path)):
            yield from weighed(rules, rule, path, message)
    for rule, path, message in judge_package(package, groups):
        yield from weighed(rules, rule, path, message)
    if not groups:
        yield from weighed(rules, "results-empty", package / "results", "the package holds no result_*.txt")


def _judged_together(tree: Tree) -> Iterator[tuple[Path | None, list[Group]]]:
    """What is judged by one ruleset: each package with its results, then each folder of logs that is in no package."""
    of_package: dict[Path, list[Group]] = {package: [] for package in tree.packages}
    elsewhere = [group for group in tree.groups if group.package not in of_package]
    for group in tree.groups:
        if group.package in of_package:
            of_package[group.package].append(group)
    yield from of_package.items()
    yield from ((None, [group]) for group in elsewhere)


def _check_group(group: Group, rules: Ruleset, seen: SeenRuns | None, judged: Judged) -> tuple[Result, list[Finding]]:
    """Judge the logs of a result one by one and then, unless ``seen`` is None, together and beside earlier results."""
    findings: list[Finding] = []
    checked = [judged.get(path) or check_log(path, rules) for path in group.logs]
    pruned = [judged.get(path) or check_log(path, rules) for path in group.pruned]
    records = tuple(log.record for log in checked)
    benchmark = next((log.benchmark for log in checked if log.benchmark is not None), None)
    system = read_system(group.package / "systems" / f"{group.system}.json") if group.package else None
    result = Result(group, records, rules, benchmark, system, tuple(log.record for log in pruned))
    failed = [log for log in checked if not log.converged]
    one_may_fail = seen is not None and len(checked) > 1 and len(failed) == 1 and (rules.foreign or not result.weak)
    for log in checked:
        if one_may_fail and log is failed[0]:
            findings += [_downgrade_failed_run(finding, log, rules) for finding in log.findings]
        else:
            findings += log.findings
    for log in pruned:
        findings += _pruned(log, rules)
    of_another_suite = bool(records) and all(rules.other_suite(record.benchmark) for record in records)
    if seen is not None and not of_another_suite:
        known = rules.known(records)
        found = list(_result_findings(result))
        for rule, where, message in seen.compare(group, records):
            found += weighed(rules, rule, where, message)
        findings += [_downgrade_known(finding, known) for finding in found]
    return result, findings


def _downgrade_known(finding: Finding, known: KnownResult | None) -> Finding:
    """The finding, as a warning with the reason if it is a known breach of a published result."""
    reason = known.rules.get(finding.rule) if known is not None else None
    if reason is None or finding.severity != "error":
        return finding
    return replace(finding, severity="warning", message=f"{finding.message} (published so: {reason})")


def _downgrade_failed_run(finding: Finding, log: CheckedLog, rules: Ruleset) -> Finding:
    if finding.severity == "error" and follows_from_failure(finding, log.record, log.cut_line, foreign=rules.foreign):
        return replace(finding, severity="warning", message=f"{finding.message} (the one run that may fail)")
    return finding


_OF_CONVERGENCE = ("target-missed", "run-aborted", "last-eval")


def _pruned(log: CheckedLog, rules: Ruleset) -> Iterator[Finding]:
    """Findings in a pruned instance, which need not converge. Their severity is that of rule pruned-compliant.

    In MLPerf HPC rounds an instance that died is a warning: nine published ones have no end, or say success without it.
    """
    severity = rules.severity("pruned-compliant")
    for finding in log.findings:
        if severity and finding.severity == "error" and finding.rule not in _OF_CONVERGENCE:
            died = rules.foreign and follows_from_failure(finding, log.record, log.cut_line, foreign=True)
            message = f"pruned instance: {finding.message}"
            yield replace(finding, severity="warning" if died else severity, message=message)
