"""Holds the runs of one result, their ruleset and their score. Rules read it; `check` returns it with its errors.

A score exists only together with a verdict. The arithmetic of scores is in mlhpc.suite.log.score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mlhpc.suite.compliance.kept_files import Provenance, read_provenance
from mlhpc.suite.compliance.ruleset import Benchmark, Ruleset
from mlhpc.suite.log.energy.score import find_energy, read_power_logs
from mlhpc.suite.log.reader import convert_to_float
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import Group, SystemFile, read_system
from mlhpc.suite.log.run_folder import RunFolder, parse_trial
from mlhpc.suite.log.score import (
    JudgedRun,
    Throughput,
    TimeToTrain,
    compute_throughput,
    compute_time_to_train,
    find_failure,
)

if TYPE_CHECKING:  # few results have power readings
    from mlhpc.suite.log.energy.score import EnergyToSolution, PowerLogs


@dataclass(frozen=True)
class Result:
    """The runs of one result, kept and pruned. ``benchmark`` is that of the first log that names a known one.

    ``errors`` counts the errors in its logs, in its runs together, and in its package; ``broken`` names their rules.
    ``power`` lists the rules for
    power readings that it breaks, warnings too. Such a result may have a time as its score, but no energy.
    ``readings`` has the meters of earlier results of the package by what they read.
    """

    group: Group
    runs: tuple[RunRecord, ...]
    ruleset: Ruleset
    benchmark: Benchmark | None
    system: SystemFile | None
    pruned: tuple[RunRecord, ...] = ()
    errors: int = 0
    broken: tuple[str, ...] = ()
    power: tuple[str, ...] = ()
    readings: dict[int, Path] = field(default_factory=dict, compare=False)

    @property
    def weak(self) -> bool:
        """True for the instances of a throughput result: the folder decides, or else the logs."""
        # Logs of other codes do not state the mode.
        if self.group.scenario is not None:
            return self.group.scenario == "weak"
        return bool(self.runs) and all(run.mode == "weak" for run in self.runs)

    @property
    def closed(self) -> bool:
        """True unless the system description, or else the first log, says open."""
        stated = self.system.fields.get("division") if self.system else None
        division = stated if stated in ("open", "closed") else self.runs[0].division if self.runs else None
        # Closed, which is stricter, if nothing states a division.
        return division != "open"

    @property
    def total_units(self) -> int | None:
        """The accelerators of the whole system, or its nodes without any. None if nothing says so."""
        return self.system.compute_units if self.system is not None else None

    @property
    def run_units(self) -> int:
        """What the largest run claims of them."""
        return max((run.compute_units or 0 for run in self.runs), default=0)

    @cached_property
    def provenance(self) -> Provenance:
        """The files of the run folders that the package has."""
        return read_provenance(self.group)

    @cached_property
    def organisations(self) -> Mapping[Path | None, str | None]:
        """The submitter of each run, by the path of its log: as logged, or as the package states late."""
        return {run.path: self.provenance.find_added_submitter(run) or run.org for run in self.runs}

    @cached_property
    def meters(self) -> Mapping[Path | None, PowerLogs | None]:
        """The power logs of each run, by the path of its log."""
        return {run.path: read_power_logs(run.path) for run in self.runs if run.path is not None}

    def judged(self) -> list[JudgedRun]:
        """Return the runs, each with the reason why it failed, or None."""
        assert self.benchmark is not None
        return [JudgedRun(run, find_failure(run, self.benchmark)) for run in self.runs]

    @cached_property
    def score(self) -> TimeToTrain | Throughput:
        """Time to train, or the throughput of a weak result; with a reason if there is no score."""
        if self.benchmark is None:
            why = _describe_unknown_benchmark(self.runs, self.ruleset)
            runs = tuple(JudgedRun(run, "benchmark or size not known") for run in self.runs)
            return TimeToTrain(runs, 0, f"not a score: {why}")
        expected = (self.benchmark.name, self.benchmark.size)
        for run in self.runs:
            # A run that broke off before run_start may not have stated its benchmark and size.
            if run.run_start_s is not None and (run.benchmark, run.size) != expected:
                why = f"not a score: benchmarks or sizes are mixed ({run.path}: {run.benchmark} {run.size})"
                return TimeToTrain(tuple(JudgedRun(run, None) for run in self.runs), self.benchmark.required_runs, why)
        if self.weak:
            return compute_throughput(self.runs, self.benchmark, self.total_units)
        return compute_time_to_train(self.runs, self.benchmark, self.benchmark.reference_points)

    @cached_property
    def energy(self) -> EnergyToSolution | None:
        """The energy of a time-to-train result, from power logs, else from counters in the logs, else None."""
        if not isinstance(self.score, TimeToTrain):
            return None
        card = self.benchmark.card if self.benchmark else None
        every = card.eval_every_steps if card else None
        scored = [run.record for run in self.score.scored]
        samples = sum(count_trained_samples(record, every) for record in scored) / len(scored) if scored else None
        found = find_energy(self.score, samples or None)
        if found is None or not self.power or found.reason is not None:
            return found
        return replace(found, reason=f"not a score: breaks {', '.join(self.power)} (mlhpc check)")

    @property
    def valid(self) -> bool:
        """True if this is the score of a compliant result."""
        return self.score.valid and not self.errors

    @cached_property
    def under_way(self) -> str | None:
        """The runs of a run folder that go on now, in words, or None. An error may then be of an unfinished run."""
        return RunFolder(self.group.folder).under_way_text() if self.group.package is None else None

    @cached_property
    def unfinished_logs(self) -> frozenset[Path]:
        """The logs of runs that go on now."""
        if self.group.package is not None:
            return frozenset()
        # A package is finished by definition, and holds no locks.
        trials = set(RunFolder(self.group.folder).under_way())
        return frozenset(log for log in self.group.logs if parse_trial(log) in trials)

    @property
    def verdict(self) -> str | None:
        """One line if the result is not compliant, or cannot be because its runs go on, else None."""
        if self.errors and self.under_way:
            return f"not judged yet: {self.under_way}"
        many = "1 error" if self.errors == 1 else f"{self.errors} errors"
        return f"NOT compliant: {many}, see mlhpc check" if self.errors else None

    @property
    def scenario(self) -> str:
        """``weak`` for throughput, ``strong`` for time to train."""
        return "weak" if isinstance(self.score, Throughput) else "strong"

    @property
    def division(self) -> str | None:
        """The division in the system description, else that in the logs."""
        stated = self.system.fields.get("division") if self.system else None
        return stated if isinstance(stated, str) else find_named_run(self.runs).division

    @property
    def scale_factor(self) -> float | None:
        """The factor in the scaling.json of the package. None if the package has none."""
        path = self.group.folder / "scaling.json"
        return convert_to_float(read_system(path).fields.get("scaling_factor")) if path in self.group.others else None


def find_named_run(runs: Sequence[RunRecord]) -> RunRecord:
    """Return the first run that names a benchmark, else the first. A run that died before run_start names none."""
    return next((run for run in runs if run.benchmark is not None), runs[0])


def count_trained_samples(run: RunRecord, eval_every_steps: int | None) -> float:
    """Count the samples trained on in all epochs that ended."""
    ended = sum(epoch.complete for epoch in run.epochs)
    if eval_every_steps is not None:
        return float(ended * eval_every_steps * (run.global_batch_size or 0))
    return float(ended * (run.train_samples or 0))


def count_evaluated_samples(run: RunRecord, benchmark: Benchmark) -> float | None:
    """Count the samples trained on before the last evaluation. None if the log does not say it."""
    last = run.evals[-1].epoch if run.evals else None
    if not last:
        return None
    return last if benchmark.epoch_counts_samples else last * (run.train_samples or 0)


def _describe_unknown_benchmark(runs: Sequence[RunRecord], rules: Ruleset) -> str:
    first = find_named_run(runs)
    if not first.benchmark:
        return "no log names a benchmark"
    sizes = rules.sizes(first.benchmark)
    if not sizes:
        return f"{rules.name} has no benchmark {first.benchmark!r}"
    stated = f"{rules.name} has no size {first.size!r} of it" if first.size else "the log states no size of it"
    return f"benchmark {first.benchmark!r} is known, but {stated}; its sizes: {', '.join(sizes)}"
