"""Judges logs, packages and rounds: reads each log once, applies the rules, returns findings. Writes nothing.

It keeps each log's record and findings, not its events. So the largest log bounds the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from mlhpc.suite.compliance.all_rules import LOG_RULES, RESULT_RULES
from mlhpc.suite.compliance.forensics.copy_rules import SeenRuns
from mlhpc.suite.compliance.forensics.provenance_rules import RUNS_AT_ONCE, find_shared_hosts
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import (
    EMPTY_LOG_RULE,
    Finding,
    LogContext,
    judge_breach,
    make_other_suite_finding,
)
from mlhpc.suite.compliance.rules.package_rules import judge_package, judge_system
from mlhpc.suite.compliance.rules.result_rules import NUMBERS_ALIKE, find_odd_numbers
from mlhpc.suite.compliance.ruleset import (
    Benchmark,
    ExtraReferencePoints,
    KnownResult,
    Ruleset,
    Severity,
    list_rulesets,
    read_ruleset,
    summarise_for_benchmark,
)
from mlhpc.suite.compliance.selection import SelectedRuleset, select_ruleset
from mlhpc.suite.errors import explain_attribute
from mlhpc.suite.files import print_line
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Log, read_events
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import (
    LINK,
    UNREAD,
    Group,
    Tree,
    describe_near_logs,
    find_results,
    list_system_files,
    read_system,
)
from mlhpc.suite.log.score import find_failure


@dataclass(frozen=True)
class Verdict:
    """The rulesets that were used, all findings in the order of the tree, and the results that have logs."""

    rulesets: tuple[str, ...]
    logs: int
    packages: int
    findings: tuple[Finding, ...]
    results: tuple[Result, ...] = ()

    @property
    def compliant(self) -> bool:
        """True if no finding is an error. Nothing checked is an error too (rule nothing-checked)."""
        return not self.counted("error")

    def count(self, severity: Severity) -> int:
        """Count the findings of a severity that no waiver covers."""
        return len(self.counted(severity))

    def counted(self, severity: Severity) -> list[Finding]:
        """List the findings of a severity that no waiver covers."""
        return [finding for finding in self.findings if finding.severity == severity and finding.waiver is None]

    def print_unread(self) -> bool:
        """Print what could not be read, to the standard error. True if there is any: it may be a whole result."""
        unread = [finding for finding in self.findings if finding.message.startswith(UNREAD)]
        for finding in unread:
            print_line(f"mlhpc: {finding.file}: {finding.message}", error=True)
        return bool(unread)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(explain_attribute(self, name))


@dataclass(frozen=True)
class CheckedLog:
    """What the check keeps of a log: its record and its findings."""

    record: RunRecord
    benchmark: Benchmark | None
    findings: tuple[Finding, ...]
    cut_line: int | None = None  # the last line, if it is broken and the run has no end

    @property
    def converged(self) -> bool:
        """True if the run reached its target."""
        return self.benchmark is not None and find_failure(self.record, self.benchmark) is None


# What the log of a run that failed may lack. One run of a result may fail, whenever and however it ended. Only breaches
# that follow from the end itself become warnings: a failed run with another optimizer is still an error.
_CONVERGENCE_RULES = frozenset({"target-missed", "run-aborted"})
_FAILURE_RULES = _CONVERGENCE_RULES | {"run-unfinished", "interval-open", "training-missing"}
_ROUND_FAILURE_RULES = frozenset({"status-true", "run-status"})  # MLPerf HPC's codes logged success in any case
_ALLOWED_FAILURE_NOTE = " (the one run that may fail)"
_EARLY_FAILURE_RULES = frozenset({"key-missing", "seed-missing"})  # of a run that ended before run_start

_OF_TRAINING = frozenset({"epoch_num", "epoch", "step", "step_num", "first_step"})  # in an event's metadata
_RANKS_APART_MS = 1000.0  # the clocks of ranks that log one event
_MOST_FINDINGS = 100  # of one rule in one log, one result or one package
POWER_PREFIX = "power-"  # begins the names of the rules for power readings

JudgedLogs = Mapping[Path, CheckedLog]


def check(
    paths: list[Path],
    ruleset_name: str | None = None,
    given: ExtraReferencePoints | None = None,
    judged: JudgedLogs | None = None,
) -> Verdict:
    """Judge everything under the paths by one ruleset, or each result by that of its round.

    ``given`` adds reference points for batch sizes without points in the ruleset. ``judged`` has logs that the caller
    has already read and judged, by the rulesets of `find_rulesets_of_logs`. InputError for a path that is neither a
    file nor a folder.
    """
    findings: list[Finding] = []
    results: list[Result] = []
    used: list[str | None] = []
    seen = SeenRuns()
    packages = logs = 0
    for path in {path.absolute(): path for path in paths}.values():  # a path given twice is checked once
        tree = find_results(path, partly=True)
        unread = [_make_unreadable_finding(error, path) for error in tree.unread]
        findings += unread
        if tree.no_rules:
            logs += len(tree.loadgen)
            findings.append(
                Finding("round-known", "error", str(path), None, f"{tree.no_rules}, nothing below is judged")
            )
        for package, groups in _group_by_package(tree):
            packages += package is not None
            logs += sum(len(group.logs) + len(group.pruned) for group in groups)
            try:
                selected = SelectedRuleset(ruleset_name) if ruleset_name else select_ruleset(groups, path)
                # A single file is judged by the rules for one log only.
                several = None if path.is_file() else seen
                found, scored = _check_results(package, groups, selected, given, several, judged or {})
            except OSError as error:  # one package never stops the others
                selected, scored = SelectedRuleset(None), []
                found = [_make_unreadable_finding(error, package or groups[0].folder)]
            used.append(selected.name)
            # One finding says that there is no ruleset, for all packages of a round.
            findings += found if selected.name else [finding for finding in found if finding not in findings]
            lost = sum(_may_belong_to(Path(finding.file), package, tree) for finding in unread)
            unread_rule = ("folder-unread",) if lost else ()
            results += [
                replace(result, errors=result.errors + lost, broken=result.broken + unread_rule)
                for result in scored
                if result.runs
            ]
        findings += _check_folder_links(tree)
    if not logs:
        where = ", ".join(str(path) for path in paths)
        text = f"no result_*.txt found: nothing was checked{describe_near_logs(paths)}"
        findings.append(Finding("nothing-checked", "error", where, None, text))
    names = tuple(name for name in list_rulesets() if name in used) or (ruleset_name or "none",)
    return Verdict(names, logs, packages, tuple(findings), tuple(results))


def _may_belong_to(unread: Path, package: Path | None, tree: Tree) -> bool:
    """Return True if what cannot be read may be of this package: it lies in no other one."""
    return not any(unread.is_relative_to(other) for other in tree.packages if other != package)


def find_rulesets_of_logs(path: Path) -> dict[Path, str]:
    """Map each log below a path, pruned ones too, to the ruleset by which `check` judges it. Links are resolved."""
    names: dict[Path, str] = {}
    place = path.resolve()
    for _, groups in _group_by_package(find_results(place, partly=True)):
        name = select_ruleset(groups, place).name
        if name is not None:
            names.update({log: name for group in groups for log in (*group.logs, *group.pruned)})
    return names


def _check_results(
    package: Path | None,
    groups: Sequence[Group],
    selected: SelectedRuleset,
    given: ExtraReferencePoints | None,
    seen: SeenRuns | None,
    judged: JudgedLogs,
) -> tuple[list[Finding], list[Result]]:
    """Judge the results of one package, or of one folder of logs, and the files of the package."""
    if selected.name is None:
        return [Finding(rule, "error", str(where), None, text) for rule, where, text in selected.breaches], []
    rules = replace(read_ruleset(selected.name), given=given)
    shared = [
        finding for rule, folder, text in selected.breaches for finding in judge_breach(rules, rule, folder, text)
    ]
    judgements = [_check_group(group, rules, seen, judged) for group in groups]
    of_package: list[Finding] = []
    for path, text in find_odd_numbers([result for result, _ in judgements]) if seen is not None else ():
        of_package += judge_breach(rules, NUMBERS_ALIKE.name, path or groups[0].folder, text)
    if package is not None and seen is not None:
        of_package += _limit_findings(_check_package(package, groups, rules), str(package))
        for path, text in find_shared_hosts([result for result, _ in judgements]):
            of_package += judge_breach(rules, RUNS_AT_ONCE.name, path, text)
    findings = list(shared)
    results = []
    for result, own in judgements:
        findings += own
        errors = [finding.rule for finding in (*shared, *of_package, *own) if finding.severity == "error"]
        broken = tuple(dict.fromkeys(errors))
        results.append(replace(result, errors=len(errors), broken=broken, power=_list_broken_power_rules(own)))
    return findings + of_package, results


def _list_broken_power_rules(findings: Sequence[Finding]) -> tuple[str, ...]:
    """List the rules for power readings that a result breaks, warnings too. They cost its energy, not its time."""
    broken = dict.fromkeys(finding.rule for finding in findings if finding.severity != "info")
    return tuple(rule for rule in broken if rule.startswith(POWER_PREFIX) and rule != "power-scope")


def _make_unreadable_finding(error: OSError, path: Path) -> Finding:
    return Finding("folder-unread", "error", str(error.filename or path), None, f"cannot be read: {error.strerror}")


def _check_folder_links(tree: Tree) -> Iterator[Finding]:
    """Yield a finding for each link to a folder outside of packages. Links inside a package have rules of their own."""
    packages = set(tree.packages)
    for item in tree.skipped:
        if item.reason == LINK and item.path.is_dir() and packages.isdisjoint(item.path.parents):
            yield Finding("link-unfollowed", "warning", str(item.path), None, "is a symbolic link: not followed")


def check_log(path: Path, rules: Ruleset) -> CheckedLog:
    """Read one log and judge it by itself. A log that cannot be read is a finding."""
    name = str(path)
    try:
        log = read_events(path, steps=False)
    except OSError as error:
        unread = Finding(EMPTY_LOG_RULE, "error", name, None, f"cannot be read: {error.strerror}")
        return CheckedLog(RunRecord(path=path), None, (unread,))
    return judge_log(log, rules, name)


def judge_log(log: Log, rules: Ruleset, name: str, known: RunRecord | None = None) -> CheckedLog:
    """Judge the events of one log.

    ``name`` names its file in findings. `summarise_for_benchmark` explains ``known``.
    """
    log = merge_ranks(log)
    record, benchmark = summarise_for_benchmark(log, rules, known)
    suite = rules.other_suite(record.benchmark)
    if suite is not None:
        # Rules of one suite would find only nonsense in a log of another.
        return CheckedLog(record, None, (make_other_suite_finding(log, rules, suite, name),))
    context = LogContext(log, record, rules, benchmark)
    return CheckedLog(record, benchmark, tuple(_check_log_rules(context, name)), _find_truncated_line(log))


def merge_ranks(log: Log) -> Log:
    """Return the log with each event of training once, where several ranks log each event. Others are as they are.

    A log with one run_start has one writer: there a value that stands twice was logged twice.
    """
    if len(log.places.get(mllog.RUN_START, ())) < 2:
        return log
    latest: dict[tuple[str, str], float] = {}
    events = []
    for event in log.events:
        about = {name: value for name, value in event.metadata.items() if name not in ("file", "lineno", "rank")}
        again = event.key, repr((event.value, sorted(about.items())))
        if _OF_TRAINING.isdisjoint(about) or abs(event.time_ms - latest.get(again, -math.inf)) > _RANKS_APART_MS:
            events.append(event)
            latest[again] = event.time_ms
    return replace(log, events=tuple(events)) if len(events) < len(log.events) else log


def _check_log_rules(context: LogContext, file: str) -> Iterator[Finding]:
    for rule in LOG_RULES:
        severity = context.ruleset.severity(rule.name)
        if severity is not None:
            breaches = (Finding(rule.name, severity, file, line, text) for line, text in rule.check(context))
            yield from _limit_findings(breaches, file)


def _check_result_rules(result: Result, prefix: str) -> Iterator[Finding]:
    for rule in RESULT_RULES:
        severity = result.ruleset.severity(rule.name)
        if severity is not None and rule.name.startswith(prefix):
            folder = str(result.group.folder)
            found = (Finding(rule.name, severity, str(path or folder), None, text) for path, text in rule.check(result))
            yield from _limit_findings(found, folder)


def _limit_findings(findings: Iterable[Finding], file: str) -> Iterator[Finding]:
    """Yield the first findings of each rule, then one for all others of the rule, at ``file``."""
    counts: dict[str, tuple[int, Finding]] = {}
    for finding in findings:
        number = counts.get(finding.rule, (0, finding))[0] + 1
        counts[finding.rule] = number, finding
        if number <= _MOST_FINDINGS:
            yield finding
    for number, last in counts.values():
        if number > _MOST_FINDINGS:
            yield replace(last, file=file, line=None, message=f"... and {number - _MOST_FINDINGS:,} more")


def _check_package(package: Path, groups: Sequence[Group], rules: Ruleset) -> Iterator[Finding]:
    """Judge the files of a package other than its logs: system descriptions, names, the manifest."""
    for path in list_system_files(package):
        for rule, message in judge_system(read_system(path)):
            yield from judge_breach(rules, rule, path, message)
    for rule, path, message in judge_package(package, groups, named=rules.complete):
        yield from judge_breach(rules, rule, path, message)
    if not groups:
        yield from judge_breach(rules, "results-empty", package / "results", "the package holds no result_*.txt")


def _group_by_package(tree: Tree) -> Iterator[tuple[Path | None, list[Group]]]:
    """Yield what one ruleset judges: each package with its results, then each folder of logs outside of packages."""
    of_package: dict[Path, list[Group]] = {package: [] for package in tree.packages}
    elsewhere = [group for group in tree.groups if group.package not in of_package]
    for group in tree.groups:
        if group.package in of_package:
            of_package[group.package].append(group)
    yield from of_package.items()
    yield from ((None, [group]) for group in elsewhere)


def _check_group(
    group: Group, rules: Ruleset, seen: SeenRuns | None, judged: JudgedLogs
) -> tuple[Result, list[Finding]]:
    """Judge the logs of a result one by one.

    Unless ``seen`` is None, judge them together and against earlier results too.
    """
    checked = [judged.get(path) or check_log(path, rules) for path in group.logs]
    pruned = [judged.get(path) or check_log(path, rules) for path in group.pruned]
    records = tuple(log.record for log in checked)
    # A log that broke off early names none.
    benchmark = next((log.benchmark for log in checked if log.benchmark is not None), None)
    system = read_system(group.package / "systems" / f"{group.system}.json") if group.package else None
    result = Result(group, records, rules, benchmark, system, tuple(log.record for log in pruned))
    if seen is not None:
        result = replace(result, readings=seen.readings[group.package or group.folder])

    findings = list(_list_log_findings(result, checked, together=seen is not None))
    # Runs that are not scored decide which of all are.
    surplus = [check_log(folder.path / name, rules) for folder in result.provenance.folders for name in folder.surplus]
    for what, logs, may_die in (("pruned instance", pruned, rules.foreign), ("surplus run", surplus, True)):
        for log in logs:
            findings += _check_unscored_log(log, rules, what, may_die=may_die)
    of_another_suite = bool(records) and all(rules.other_suite(record.benchmark) for record in records)
    if seen is not None:
        # Power is measured in one way, whatever ran; all other rules are of one suite.
        together = list(_check_result_rules(result, POWER_PREFIX if of_another_suite else ""))
        for rule, where, message in () if of_another_suite else seen.compare(group, records):
            together += judge_breach(rules, rule, where, message)
        # Some published results break a rule and were accepted; the ruleset lists them with the reason.
        known = rules.known(records)
        findings = [_downgrade_known(finding, known) for finding in findings]
        unfinished = {str(log) for log in result.unfinished_logs}
        together = [_mark_unfinished(finding) if finding.file in unfinished else finding for finding in together]
        findings += [_downgrade_known(finding, known) for finding in together]
    return result, findings


def _list_log_findings(result: Result, checked: Sequence[CheckedLog], *, together: bool) -> Iterator[Finding]:
    """Yield the findings in the logs of a result. Consequences of the one allowed failure are warnings."""
    rules = result.ruleset
    failed = [log for log in checked if not log.converged]
    # An instance of a throughput result that failed belongs into pruned_results instead.
    one_may_fail = together and len(checked) > 1 and len(failed) == 1 and not result.weak
    for log in checked:
        may_fail = one_may_fail and log is failed[0]
        for finding in log.findings:
            found = _downgrade_failed_run(finding, log, rules) if may_fail else finding
            yield _mark_unfinished(found) if log.record.path in result.unfinished_logs else found


def _downgrade_known(finding: Finding, known: KnownResult | None) -> Finding:
    """Return the finding. A known breach of a published result becomes a warning with the reason."""
    reason = known.rules.get(finding.rule) if known is not None else None
    if reason is None or finding.severity != "error":
        return finding
    return replace(finding, severity="warning", message=f"{finding.message} (published so: {reason})")


def _mark_unfinished(finding: Finding) -> Finding:
    """Mark a finding in the log of a run that still goes on. It may be gone at the end."""
    return replace(finding, message=f"{finding.message.removesuffix(_ALLOWED_FAILURE_NOTE)} (the run is under way)")


def _downgrade_failed_run(finding: Finding, log: CheckedLog, rules: Ruleset) -> Finding:
    if finding.severity == "error" and _is_failure_consequence(finding, log, foreign=rules.foreign):
        return replace(finding, severity="warning", message=f"{finding.message}{_ALLOWED_FAILURE_NOTE}")
    return finding


def _check_unscored_log(log: CheckedLog, rules: Ruleset, what: str, *, may_die: bool) -> Iterator[Finding]:
    """Yield the findings in a log that is not scored with the severity of rule pruned-compliant. It need not converge.

    In MLPerf HPC rounds a dead instance is a warning. Nine published ones have no end, or log success without it.
    """
    severity = rules.severity("pruned-compliant")
    for finding in log.findings:
        if severity and finding.severity == "error" and finding.rule not in _CONVERGENCE_RULES:
            died = may_die and _is_failure_consequence(finding, log, foreign=rules.foreign)
            yield replace(finding, severity="warning" if died else severity, message=f"{what}: {finding.message}")


def _is_failure_consequence(finding: Finding, log: CheckedLog, *, foreign: bool) -> bool:
    """Return True if a finding in the log of a failed run follows from its failure."""
    if finding.rule in _FAILURE_RULES or (foreign and finding.rule in _ROUND_FAILURE_RULES):
        return True
    if finding.rule == "event-valid":
        return finding.line is not None and finding.line == log.cut_line
    if log.record.run_start_s is not None:
        return False
    unnamed = finding.rule == "benchmark-known" and log.record.size is None and not foreign
    return unnamed or finding.rule in _EARLY_FAILURE_RULES


def _find_truncated_line(log: Log) -> int | None:
    """Return the number of the last line if only that is broken and run_stop is missing.

    Then the process was killed.
    """
    return log.cut_line if log.first(mllog.RUN_STOP) is None else None
