"""Judges what takes more than one log: the runs of a result, results beside each other, packages.

Importing it enters all rules for them into the tables. The check of a single log does without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from suite.compliance.rules.copy_rules import SeenRuns
from suite.compliance.rules.group_rules import GroupContext, apply_group_rules, is_weak
from suite.compliance.rules.package_rules import judge_package, judge_system
from suite.compliance.rules.table import Finding, weighed
from suite.compliance.ruleset import Benchmark, Ruleset
from suite.log.record import RunRecord
from suite.log.results_tree import Group, list_system_files, read_system


class Together:
    """Judges results one after another, and remembers their runs, to find runs that occur again. One instance per check."""

    is_weak = staticmethod(is_weak)

    def __init__(self) -> None:
        self._seen = SeenRuns()

    def judge_result(
        self,
        group: Group,
        records: tuple[RunRecord, ...],
        pruned: tuple[RunRecord, ...],
        benchmark: Benchmark | None,
        rules: Ruleset,
    ) -> Iterator[Finding]:
        """Judge the runs of a result together, then beside those of earlier results. ``pruned``: its pruned instances."""
        system = read_system(group.package / "systems" / f"{group.system}.json") if group.package else None
        yield from apply_group_rules(GroupContext(group, records, rules, benchmark, system, pruned))
        for rule, where, message in self._seen.compare(group, records):
            yield from weighed(rules, rule, where, message)

    def judge_package(self, package: Path, groups: Sequence[Group], rules: Ruleset) -> Iterator[Finding]:
        """Judge the files of a package beside its results: system descriptions, names, the manifest."""
        for path in list_system_files(package):
            for rule, message in judge_system(read_system(path)):
                yield from weighed(rules, rule, path, message)
        for rule, path, message in judge_package(package, groups):
            yield from weighed(rules, rule, path, message)
        if not groups:
            yield from weighed(rules, "results-empty", package / "results", "the package holds no result_*.txt")
