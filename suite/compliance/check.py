"""Judges a log, a folder of logs, a package or a round: reads each log once, applies the rules, returns findings.

It only reads. Of each log it keeps the record and the findings, so memory is bounded by the largest log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

# The rules of a log are applied, and their findings listed, in the order of these imports.
import suite.compliance.eval_rules
import suite.compliance.log_rules
import suite.compliance.mlhpc_rules
import suite.compliance.provenance_rules
import suite.compliance.stated_rules
import suite.compliance.training_rules  # noqa: F401  importing them enters their rules into the table
from suite.compliance.copy_rules import SeenRuns
from suite.compliance.group_rules import GroupContext, apply_group_rules, is_weak
from suite.compliance.metric import record_of
from suite.compliance.package_rules import judge_package, judge_system
from suite.compliance.rules import Finding, LogContext, apply_log_rules, of_another_suite
from suite.compliance.ruleset import (
    Benchmark,
    GivenPoints,
    KnownResult,
    Ruleset,
    Severity,
    guess_ruleset,
    ruleset,
    ruleset_names,
    ruleset_of_round,
)
from suite.log.reader import Log, read_events
from suite.log.record import RunRecord, summarise
from suite.log.results_tree import LINK, Group, SystemFile, Tree, find, list_files, list_system_files, read_system
from suite.log.score import failure

_FORGIVEN = frozenset(
    {"run-unfinished", "run-aborted", "target-missed", "last-eval", "interval-open", "training-missing"}
)
"""Rules that a run which did not converge may break, if it is the only one of its result."""
_FORGIVEN_TO_OTHERS = _FORGIVEN | {"status-true", "run-status"}
"""The same in MLPerf HPC rounds, whose codes logged success whether or not the target was reached."""


@dataclass(frozen=True)
class Verdict:
    """What was checked, by which rulesets, and all findings in the order of the tree."""

    rulesets: tuple[str, ...]
    logs: int
    packages: int
    findings: tuple[Finding, ...]

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

    @property
    def converged(self) -> bool:
        """True if the run reached its target."""
        return self.benchmark is not None and failure(self.record, self.benchmark) is None


def check(paths: list[Path], ruleset_name: str | None = None, given: GivenPoints | None = None) -> Verdict:
    """Judge everything under the paths by one ruleset, or each result by the ruleset it was made for.

    ``given`` adds reference points for batch sizes that the ruleset has none for.

    ValueError for a path that is no file or folder, such as a device.
    """
    findings: list[Finding] = []
    used: list[str] = []
    seen = SeenRuns()
    logs = packages = 0
    for path in {path.absolute(): path for path in paths}.values():  # a path given twice is one
        tree = find(path, partly=True)
        findings += [_unread(error, path) for error in tree.unread]
        of_package = _by_package(tree)
        for package in (*tree.packages, None):
            groups = of_package.get(package, [])
            if not groups and package is None:
                continue
            rules = replace(ruleset(ruleset_name or _newest(groups)), given=given)
            used.append(rules.name)
            logs += sum(len(group.logs) + len(group.pruned) for group in groups)
            packages += package is not None
            findings += _check_groups(groups, rules, seen, alone=path.is_file())
            if package is not None:
                findings += _check_package(package, groups, rules)
        findings += _behind_links(tree)
    if not logs:
        where = ", ".join(str(path) for path in paths)
        text = f"no result_*.txt found: nothing was checked{_named_otherwise(paths)}"
        findings.append(Finding("nothing-checked", "error", where, None, text))
    names = tuple(name for name in ruleset_names() if name in used) or (ruleset_name or "none",)
    return Verdict(names, logs, packages, tuple(findings))


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
        return stream.read(_HEAD_BYTES)


def check_log(path: Path, rules: Ruleset) -> CheckedLog:
    """Read one log and judge it by itself. A log that cannot be read is a finding."""
    name = str(path)
    try:
        log = read_events(path, steps=False)
    except OSError as error:
        unread = Finding("log-empty", "error", name, None, f"cannot be read: {error.strerror}")
        return CheckedLog(RunRecord(path=path), None, (unread,))
    return judge_log(log, rules, name)


def judge_log(log: Log, rules: Ruleset, name: str) -> CheckedLog:
    """Judge the events of one log; ``name`` is the name of its file in findings."""
    record, benchmark = record_of(log, rules)
    suite = rules.other_suite(record.benchmark)
    if suite is not None:
        return CheckedLog(record, None, (of_another_suite(log, rules, suite, name),))
    context = LogContext(log, record, rules, benchmark)
    return CheckedLog(record, benchmark, tuple(apply_log_rules(context, name)))


def _by_package(tree: Tree) -> dict[Path | None, list[Group]]:
    """The groups of each of the tree's packages; None: those that belong to none of them."""
    known, found = set(tree.packages), dict[Path | None, list[Group]]()
    for group in tree.groups:
        found.setdefault(group.package if group.package in known else None, []).append(group)
    return found


def made_for(record: RunRecord, group: Group) -> str:
    """The ruleset a run was made for: for logs of this suite what they say, else by the round's folder or the year."""
    by_folder = ruleset_of_round(group.round)
    of_this_suite = record.ruleset is not None or record.size is not None
    return by_folder if by_folder is not None and not of_this_suite else guess_ruleset(record)


_HEAD_BYTES = 2**18  # enough for the events that name the ruleset and for run_start


def _newest(groups: list[Group]) -> str:
    """The newest ruleset among those of the groups; the first log of a group that names a benchmark decides for it."""
    known = ruleset_names()
    firsts = [(group, next(_beginnings(group), None)) for group in groups if group.logs]
    names = [made_for(first, group) if first is not None else known[-1] for group, first in firsts]
    return max(names, key=known.index, default=known[-1])


def _beginnings(group: Group) -> Iterator[RunRecord]:
    """Records of the beginnings of a group's logs. Logs that name no benchmark, as those that died early, come last."""
    nameless = []
    for path in group.logs:
        with suppress(OSError):
            record = summarise(read_events(path, steps=False, first_bytes=_HEAD_BYTES))
            if record.benchmark is not None:
                yield record
            else:
                nameless.append(record)
    yield from nameless


def _check_groups(groups: list[Group], rules: Ruleset, seen: SeenRuns, *, alone: bool) -> Iterator[Finding]:
    for group in groups:
        checked = [check_log(path, rules) for path in group.logs]
        failed = [log for log in checked if not log.converged]
        for log in checked:
            only_failure = not alone and len(failed) == 1 and log is failed[0] and len(checked) > 1
            forgiven = only_failure and (rules.foreign or not is_weak(group, [item.record for item in checked]))
            yield from (_forgive(finding, rules) for finding in log.findings) if forgiven else log.findings
        pruned = [check_log(path, rules) for path in group.pruned]
        for log in pruned:
            yield from _pruned(log, rules)
        if not alone:
            records = [log.record for log in checked]
            known = rules.known(records)
            for finding in _cross_checks(group, checked, pruned, rules):
                yield _excused(finding, known)
            for rule, path, message in seen.compare(group, records):
                yield from (_excused(finding, known) for finding in _finding(rules, rule, path, message))


def _excused(finding: Finding, known: KnownResult | None) -> Finding:
    """The finding, as a warning with the reason if it is a known breach of a published result."""
    reason = known.rules.get(finding.rule) if known is not None else None
    if reason is None or finding.severity != "error":
        return finding
    return replace(finding, severity="warning", message=f"{finding.message} (published so: {reason})")


def _forgive(finding: Finding, rules: Ruleset) -> Finding:
    if finding.rule in (_FORGIVEN_TO_OTHERS if rules.foreign else _FORGIVEN) and finding.severity == "error":
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
            died = rules.foreign and finding.rule in _FORGIVEN_TO_OTHERS
            message = f"pruned instance: {finding.message}"
            yield replace(finding, severity="warning" if died else severity, message=message)


def _cross_checks(
    group: Group, checked: list[CheckedLog], pruned: list[CheckedLog], rules: Ruleset
) -> Iterator[Finding]:
    system = read_system(group.package / "systems" / f"{group.system}.json") if group.package else None
    benchmark = next((log.benchmark for log in checked if log.benchmark is not None), None)
    records, pruned_records = (tuple(log.record for log in logs) for logs in (checked, pruned))
    context = GroupContext(group, records, rules, benchmark, system, pruned_records)
    yield from apply_group_rules(context)


def _check_package(package: Path, groups: list[Group], rules: Ruleset) -> Iterator[Finding]:
    for path in list_system_files(package):
        system: SystemFile = read_system(path)
        for rule, message in judge_system(system):
            yield from _finding(rules, rule, path, message)
    for rule, path, message in judge_package(package, groups):
        yield from _finding(rules, rule, path, message)
    if not groups:
        yield from _finding(rules, "results-empty", package / "results", "the package holds no result_*.txt")


def _finding(rules: Ruleset, rule: str, path: Path, message: str) -> Iterator[Finding]:
    severity = rules.severity(rule)
    if severity is not None:
        yield Finding(rule, severity, str(path), None, message)
