"""The rules for the runs of one result together."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from suite.compliance import convergence
from suite.compliance.rules.table import HPC, OURS, PACKAGE, Finding, explain
from suite.compliance.ruleset import Benchmark, Ruleset
from suite.files import brief
from suite.log.provenance import Provenance, read_provenance
from suite.log.record import RunRecord, first_reaching
from suite.log.results_tree import PRUNED, Group, SystemFile
from suite.log.score import JudgedRun, failure

if TYPE_CHECKING:  # few results have power readings
    from suite.log.energy.score import Meters


@dataclass(frozen=True)
class GroupContext:
    """The runs of one result, kept and pruned. ``benchmark`` is that of the first log that names a known one."""

    group: Group
    runs: tuple[RunRecord, ...]
    ruleset: Ruleset
    benchmark: Benchmark | None
    system: SystemFile | None
    pruned: tuple[RunRecord, ...] = ()

    @property
    def weak(self) -> bool:
        """True for throughput results."""
        return is_weak(self.group, self.runs)

    @property
    def closed(self) -> bool:
        """True unless the system description, or else the first log, says open."""
        stated = self.system.fields.get("division") if self.system else None
        division = stated if stated in ("open", "closed") else self.runs[0].division if self.runs else None
        return division != "open"

    @cached_property
    def provenance(self) -> Provenance:
        """What the package keeps of the run folders."""
        return read_provenance(self.group)

    @cached_property
    def meters(self) -> Mapping[Path | None, Meters | None]:
        """The power logs of each run, by the path of its log."""
        from suite.log.energy.score import read_meters

        return {run.path: read_meters(run.path) for run in self.runs if run.path is not None}

    def judged(self) -> list[JudgedRun]:
        """The runs, each with the reason why it failed or None."""
        assert self.benchmark is not None
        return [JudgedRun(run, failure(run, self.benchmark)) for run in self.runs]


def is_weak(group: Group, runs: Sequence[RunRecord]) -> bool:
    """True if these are the instances of a throughput result: the folder decides, or else the logs."""
    return group.scenario == "weak" or (
        group.scenario is None and bool(runs) and all(run.mode == "weak" for run in runs)
    )


GroupBreach = tuple[Path | None, str]  # file, or None for the result's folder; message
GroupCheck = Callable[[GroupContext], Iterable[GroupBreach]]
GROUP_RULES: dict[str, GroupCheck] = {}


def group_rule(rule: str, explanation: str, reference: str) -> Callable[[GroupCheck], GroupCheck]:
    """Add the decorated function to the rules that the runs of a result are judged by."""

    def enter(check: GroupCheck) -> GroupCheck:
        GROUP_RULES[explain(rule, explanation, reference)] = check
        return check

    return enter


def apply_group_rules(context: GroupContext) -> Iterator[Finding]:
    """Apply every rule to the runs of one result."""
    for rule, check in GROUP_RULES.items():
        severity = context.ruleset.severity(rule)
        if severity is not None:
            for path, message in check(context):
                yield Finding(rule, severity, str(path or context.group.folder), None, message)


@group_rule(
    "run-count", "a time-to-train result has exactly the required runs, a throughput result at least as many", PACKAGE
)
def run_count(context: GroupContext) -> Iterator[GroupBreach]:
    if context.benchmark is None or not context.runs:
        return
    need, runs = context.benchmark.required_runs, len(context.runs)
    if runs < need:
        yield None, f"{runs} runs; {context.benchmark.name} needs {need}"
    elif runs > need and not context.weak:
        yield None, f"{runs} runs; a time-to-train result of {context.benchmark.name} has exactly {need}"


@group_rule("runs-failed", "at most one run of a result fails", f"{HPC} 6; {PACKAGE}")
def runs_failed(context: GroupContext) -> Iterator[GroupBreach]:
    failed = [run for run in context.judged() if not run.converged] if context.benchmark else []
    if len(failed) > 1:
        names = ", ".join(f"{name_of(run.record)} ({run.failure})" for run in failed[:5])
        yield None, f"{len(failed)} runs did not converge, one may: {names}"


@group_rule("run-failed", "a run that fails counts as the slowest", f"{HPC} 6")
def run_failed(context: GroupContext) -> Iterator[GroupBreach]:
    failed = [run for run in context.judged() if not run.converged] if context.benchmark else []
    if len(failed) == 1:
        then = f"it belongs into {PRUNED}" if context.weak else "the one run that may, counts as the slowest"
        yield failed[0].record.path, f"did not converge ({failed[0].failure}): {then}"


@group_rule("seed-distinct", "no two runs have the same seed", "mlperf_logging seed_checker")
def seed_distinct(context: GroupContext) -> Iterator[GroupBreach]:
    yield from repeats(context.runs, lambda run: run.seed, lambda run: f"seed {brief(run.seed)} is also that of")


@group_rule("hyperparameter-drift", "all runs have the same hyperparameters and batch size", HPC)
def hyperparameter_drift(context: GroupContext) -> Iterator[GroupBreach]:
    if context.benchmark is None or not context.runs:
        return
    keys = {*context.benchmark.closed, "global_batch_size", "dropout", "opt_weight_decay"} - {"seed"}
    for key in sorted(keys):
        values = [(run, run.hyperparameters[key]) for run in context.runs if key in run.hyperparameters]
        other = next(((run, value) for run, value in values if value != values[0][1]), None)
        if other is not None:
            yield other[0].path, f"{key} = {brief(other[1])}, in {name_of(values[0][0])} it is {brief(values[0][1])}"


@group_rule("data-drift", "all runs read the same data set", OURS)
def data_drift(context: GroupContext) -> Iterator[GroupBreach]:
    yield from _drift(context.runs, "data_manifest", lambda run: run.data_manifest)


@group_rule("config-drift", "all runs have the same model, optimizer and precision in their configuration", OURS)
def config_drift(context: GroupContext) -> Iterator[GroupBreach]:
    for name in ("precision", "gradient_accumulation_steps", "hyperparameters"):
        known = [(run, run.config[name]) for run in context.runs if run.config is not None and name in run.config]
        other = next(((run, value) for run, value in known if value != known[0][1]), None)
        if other is not None:
            named, differing = name_of(known[0][0]), _unlike(other[1], known[0][1])
            yield other[0].path, f"run_config has another {name} than {named}{differing}"


@group_rule("trial-gap", "the trials of a result are consecutive: none in between was left out", OURS)
def trial_gap(context: GroupContext) -> Iterator[GroupBreach]:
    trials = sorted({run.trial for run in context.runs if run.trial is not None})
    if not context.weak and len(trials) == len(context.runs) and trials and trials[-1] - trials[0] >= len(trials):
        yield None, f"the runs are trials {', '.join(map(str, trials))}: others were run and are not here"


@group_rule("strong-pruned", "only instances of a throughput result can be pruned", "training_policies PR#499")
def strong_pruned(context: GroupContext) -> Iterator[GroupBreach]:
    if not context.weak:
        yield from ((path, "a pruned run of a time-to-train result") for path in context.group.pruned)


@group_rule("scale-drift", "all runs used the same number of nodes and accelerators", HPC)
def scale_drift(context: GroupContext) -> Iterator[GroupBreach]:
    yield from _drift(
        context.runs,
        "nodes x accelerators per node, ranks",
        lambda run: (run.nodes, run.accelerators_per_node, run.ranks),
    )


@group_rule("org-drift", "all runs name the same organisation", OURS)
def org_drift(context: GroupContext) -> Iterator[GroupBreach]:
    yield from _drift(context.runs, "submission_org", lambda run: run.org)


@group_rule("version-drift", "all runs were made by the same version of the suite", OURS)
def version_drift(context: GroupContext) -> Iterator[GroupBreach]:
    yield from _drift(context.runs, "suite_version", lambda run: run.suite_version)


@group_rule("size-mixed", "all runs have the same benchmark and size: sizes are never ranked together", OURS)
def size_mixed(context: GroupContext) -> Iterator[GroupBreach]:
    yield from _drift((*context.runs, *context.pruned), "benchmark and size", lambda run: (run.benchmark, run.size))


@group_rule(
    "rcp-speed", "a closed submission converges no faster than the reference, by a t test", "mlperf_logging rcp_checker"
)
def rcp_speed(context: GroupContext) -> Iterator[GroupBreach]:
    mean, bound = _convergence(context)
    if mean is not None and bound is not None and mean < bound.minimum:
        message = (
            f"converges in {_amount(mean, context)} (mean without best and worst); the reference at batch "
            f"{bound.global_batch_size} ({bound.kind}) needs {_amount(bound.mean, context)}, "
            f"at least {_amount(bound.minimum, context)} are credible"
        )
        yield None, message


@group_rule(
    "rcp-slower",
    "a submission faster than the reference's mean would be slowed by MLPerf",
    "mlperf_logging rcp_checker",
)
def rcp_slower(context: GroupContext) -> Iterator[GroupBreach]:
    mean, bound = _convergence(context)
    if mean is not None and bound is not None and bound.minimum <= mean < bound.mean:
        ours, theirs = _amount(mean, context), _amount(bound.mean, context)
        yield None, f"converges in {ours}, the reference in {theirs}: factor {bound.mean / mean:.4f}"


@group_rule("rcp-given", "reference points that did not come with the ruleset are named", "mlperf_logging rcp_checker")
def rcp_given(context: GroupContext) -> Iterator[GroupBreach]:
    given, benchmark = context.ruleset.given, context.benchmark
    if given is None or benchmark is None or not context.closed:
        return
    own = replace(context.ruleset, given=None).benchmark(benchmark.name, benchmark.size)
    added = given.added(own) if own is not None else {}
    if added:
        batches = ", ".join(map(str, sorted(added)))
        yield None, f"reference points for batch size {batches} are those of {given.source}, not of the ruleset"


@group_rule("rcp-missing", "there are reference points of the benchmark", "mlperf_logging rcp_checker")
def rcp_missing(context: GroupContext) -> Iterator[GroupBreach]:
    if _has_references(context) and context.benchmark and not convergence.pruned(context.benchmark.reference_points):
        yield None, f"no reference point for batch size {batch_size(context.runs)}"


@group_rule("rcp-above", "the batch size is not above those of all reference points", "mlperf_logging rcp_checker")
def rcp_above(context: GroupContext) -> Iterator[GroupBreach]:
    points = convergence.pruned(context.benchmark.reference_points) if context.benchmark else []
    batch = batch_size(context.runs)
    if _has_references(context) and points and batch is not None and batch > points[-1].batch:
        known = ", ".join(map(str, sorted(context.benchmark.reference_points))) if context.benchmark else ""
        yield None, f"batch size {batch} is above all reference points, which are of {known}"


def _has_references(context: GroupContext) -> bool:
    """True where the rules compare with a reference: the closed division."""
    return context.benchmark is not None and context.closed and bool(context.runs)


def batch_size(runs: Sequence[RunRecord]) -> int | None:
    """The batch size of the first run that logs one. Rule hyperparameter-drift finds another."""
    return next((run.global_batch_size for run in runs if run.global_batch_size is not None), None)


def _amount(amount: float, context: GroupContext) -> str:
    """How long a convergence took as text, in the unit of the benchmark's epoch_num: epochs or samples."""
    samples = context.benchmark is not None and context.benchmark.epoch_counts_samples
    return f"{amount:,.0f} samples" if samples else f"{amount:.4g} epochs"


def _convergence(context: GroupContext) -> tuple[float | None, convergence.Limit | None]:
    """The mean of epochs to target without best and worst, and the limit it is compared with; None if there is none."""
    benchmark = context.benchmark
    if benchmark is None or not context.closed or len(context.runs) < benchmark.required_runs:
        return None, None
    batch = batch_size(context.runs)
    firsts = [first_reaching(run, benchmark) for run in context.runs]
    epochs = sorted(item.epoch if item is not None and item.epoch is not None else float("inf") for item in firsts)
    mean = convergence.trimmed_mean(epochs)
    if mean == float("inf"):
        return None, None
    if batch is None:
        return mean, None
    confidence = context.ruleset.data.rcp_confidence
    own = not context.ruleset.foreign  # MLPerf's rounds are judged as they were
    apart = benchmark.card.between_evals(batch) if own and benchmark.card else 0.0
    bound = convergence.limit(
        benchmark.reference_points, batch, benchmark.required_runs, confidence, hull=own, between_evals=apart
    )
    return mean, bound and replace(bound, minimum=bound.minimum - benchmark.reference_slack)


def _drift(runs: Sequence[RunRecord], name: str, value: Callable[[RunRecord], object]) -> Iterator[GroupBreach]:
    """The first run whose value differs from that of the run that says most. What a run does not say is no difference."""
    said = [(run, _parts(value(run))) for run in runs]
    first, most = max(said, key=lambda item: sum(part is not None for part in item[1]), default=(None, ()))
    for run, parts in said:
        if first is not None and any(None not in (x, y) and x != y for x, y in zip(parts, most, strict=True)):
            yield run.path, f"{name}: {brief(value(run))}, in {name_of(first)} {brief(value(first))}"
            return


def _parts(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def repeats(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], object], text: Callable[[RunRecord], str]
) -> Iterator[GroupBreach]:
    """Every run whose key an earlier run has already; a key of None is no key."""
    first: dict[object, RunRecord] = {}
    for run in runs:
        identity = key(run)
        if identity is None:
            continue
        if identity in first:
            yield run.path, f"{text(run)} {name_of(first[identity])}"
        else:
            first[identity] = run


def _unlike(value: object, other: object) -> str:
    """The names whose values differ between two mappings, as the end of a message."""
    if not isinstance(value, dict) or not isinstance(other, dict):
        return ""
    names = sorted(name for name in value.keys() | other.keys() if value.get(name) != other.get(name))
    return ": " + ", ".join(brief(name) for name in names[:5])


def name_of(run: RunRecord) -> str:
    """The name of a run's log, for messages."""
    return run.path.name if run.path else "a run"
