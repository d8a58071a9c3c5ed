"""Scores results as the checker judged them: no score without its verdict. The arithmetic of scores is in suite.log.score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from suite.compliance.check import CheckedResult, check_results
from suite.compliance.rules.group_rules import is_weak
from suite.compliance.rules.provenance_rules import trained_samples
from suite.compliance.ruleset import Benchmark, ruleset
from suite.log.record import RunRecord
from suite.log.results_tree import Group, SystemFile, read_system
from suite.log.score import JudgedRun, Throughput, TimeToTrain, throughput, time_to_train
from suite.log.values import finite

if TYPE_CHECKING:
    from suite.log.energy.score import EnergyToSolution


@dataclass(frozen=True)
class ScoredGroup:
    """One result, its score, and the number of errors that the checker found in it and in its package."""

    group: Group
    records: tuple[RunRecord, ...]
    system: SystemFile | None
    result: TimeToTrain | Throughput
    errors: int
    benchmark: Benchmark | None = None
    power: tuple[str, ...] = ()

    @cached_property
    def energy(self) -> EnergyToSolution | None:
        """The energy of a time-to-train result: of its power logs, else of the counters in its logs. None if it has neither."""
        return _energy(self)

    @property
    def valid(self) -> bool:
        """True if this is the score of a compliant result."""
        return self.result.valid and not self.errors

    @property
    def verdict(self) -> str | None:
        """The line that says that the result is not compliant; None if it is."""
        many = "1 error" if self.errors == 1 else f"{self.errors} errors"
        return f"NOT compliant: {many}, see mlhpc check" if self.errors else None

    @property
    def scenario(self) -> str:
        """``weak`` for throughput, ``strong`` for time to train."""
        return "weak" if isinstance(self.result, Throughput) else "strong"

    @property
    def division(self) -> str | None:
        """The division in the system description, else that in the logs."""
        stated = self.system.fields.get("division") if self.system else None
        return stated if isinstance(stated, str) else first_named(self.records).division

    @property
    def scale_factor(self) -> float | None:
        """The factor in the scaling.json of the package. None if the package has none."""
        path = self.group.folder / "scaling.json"
        return finite(read_system(path).fields.get("scaling_factor")) if path in self.group.others else None


def score_results(paths: list[Path], ruleset_name: str | None = None) -> list[ScoredGroup]:
    """Check everything under the paths and score each result that has logs, by the ruleset that it is judged by.

    ``ruleset_name`` is for all; None: see suite.compliance.choice. InputError for a path that is no file or folder.
    """
    _, results = check_results(paths, ruleset_name)
    return [_score(result) for result in results if result.records]


def _score(checked: CheckedResult) -> ScoredGroup:
    group, records, rules = checked.group, checked.records, ruleset(checked.ruleset)
    benchmark = next((known for run in records if (known := rules.benchmark(run.benchmark, run.size))), None)
    system = read_system(group.package / "systems" / f"{group.system}.json") if group.package else None
    return ScoredGroup(
        group, records, system, _result(group, records, benchmark, system), checked.errors, benchmark, checked.power
    )


def _energy(scored: ScoredGroup) -> EnergyToSolution | None:
    if not isinstance(scored.result, TimeToTrain):
        return None
    card = scored.benchmark.card if scored.benchmark else None
    kept = [run.record for run in scored.result.scored]
    every = card.eval_every_steps if card else None
    samples = sum(trained_samples(record, every) for record in kept) / len(kept) if kept else None
    from suite.log.energy.score import find_energy

    found = find_energy(scored.result, samples or None)
    if found is None or not scored.power or found.reason is not None:
        return found
    return replace(found, reason=f"not a score: breaks {', '.join(scored.power)} (mlhpc check)")


def first_named(records: Sequence[RunRecord]) -> RunRecord:
    """The first record that names a benchmark, else the first: a run that died before run_start names none."""
    return next((record for record in records if record.benchmark is not None), records[0])


def _result(
    group: Group, records: tuple[RunRecord, ...], benchmark: Benchmark | None, system: SystemFile | None
) -> TimeToTrain | Throughput:
    if benchmark is None:
        runs = tuple(JudgedRun(run, "benchmark not known") for run in records)
        return TimeToTrain(runs, 0, f"not a score: {_unknown_benchmark(records)}")
    named = [run for run in records if run.run_start_s is not None]  # others broke off before they had said it all
    other = next((run for run in named if (run.benchmark, run.size) != (benchmark.name, benchmark.size)), None)
    if other is not None:
        why = f"not a score: benchmarks or sizes are mixed ({other.path}: {other.benchmark} {other.size})"
        return TimeToTrain(tuple(JudgedRun(run, None) for run in records), benchmark.required_runs, why)
    if is_weak(group, records):
        return throughput(records, benchmark, system.compute_units if system else None)
    return time_to_train(records, benchmark)


def _unknown_benchmark(records: Sequence[RunRecord]) -> str:
    first = first_named(records)
    if not first.benchmark:
        return "no log names a benchmark"
    return f"benchmark {first.benchmark!r}{f' of size {first.size!r}' if first.size else ''} is not known"
