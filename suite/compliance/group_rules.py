"""The rules for the runs of one result together, and for what a package adds: system description, layout, manifest."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.compliance import convergence
from suite.compliance.rules import OURS, Finding, explain
from suite.compliance.ruleset import Benchmark, Ruleset
from suite.files import brief
from suite.log.record import RunRecord, first_reaching
from suite.log.results_tree import MANIFEST, PRUNED, SCENARIOS, Group, SystemFile
from suite.log.score import JudgedRun, concurrent, failure, instance_scale

SYSTEM_FIELDS = (
    *("submitter", "division", "status", "system_name", "number_of_nodes", "host_processors_per_node"),
    *("host_processor_model_name", "host_processor_core_count", "host_processor_vcpu_count"),
    *("host_processor_frequency", "host_processor_caches", "host_processor_interconnect", "host_memory_capacity"),
    *("host_storage_type", "host_storage_capacity", "host_networking", "host_networking_topology"),
    *("host_memory_configuration", "accelerators_per_node", "accelerator_model_name"),
    *("accelerator_host_interconnect", "accelerator_frequency", "accelerator_on-chip_memories"),
    *("accelerator_memory_configuration", "accelerator_memory_capacity", "accelerator_interconnect"),
    *("accelerator_interconnect_topology", "cooling", "hw_notes", "framework", "other_software_stack"),
    *("operating_system", "sw_notes"),
)  # mlperf_logging 4.1.68, system_desc_checker
PACKAGE = "mlperf_logging package_checker"
_BYPASS = "package_checker_params"
HPC = "hpc_training_rules.adoc"


@dataclass(frozen=True)
class GroupContext:
    """The runs of one result. ``benchmark`` is that of the first log that names a known one."""

    group: Group
    runs: tuple[RunRecord, ...]
    ruleset: Ruleset
    benchmark: Benchmark | None
    system: SystemFile | None

    @property
    def weak(self) -> bool:
        """True for throughput results."""
        return is_weak(self.group, self.runs)

    @property
    def closed(self) -> bool:
        """True if the result is in the closed division, by the system description first."""
        stated = self.system.fields.get("division") if self.system else None
        division = stated if stated in ("open", "closed") else self.runs[0].division if self.runs else None
        return division != "open"

    def judged(self) -> list[JudgedRun]:
        """The runs and whether they converged."""
        assert self.benchmark is not None
        return [JudgedRun(run, failure(run, self.benchmark)) for run in self.runs]


def is_weak(group: Group, runs: Sequence[RunRecord]) -> bool:
    """True if these are the instances of a throughput result: its place says so, else its logs."""
    return group.scenario == "weak" or (
        group.scenario is None and bool(runs) and all(run.mode == "weak" for run in runs)
    )


Found = tuple[Path | None, str]
GroupCheck = Callable[[GroupContext], Iterable[Found]]
GROUP_RULES: dict[str, GroupCheck] = {}


def group_rule(rule: str, explanation: str, reference: str) -> Callable[[GroupCheck], GroupCheck]:
    """Enter a function into the rules that the runs of a result are judged by."""

    def enter(check: GroupCheck) -> GroupCheck:
        GROUP_RULES[explain(rule, explanation, reference)] = check
        return check

    return enter


def judge_group(context: GroupContext, shown: Callable[[Path], str]) -> Iterator[Finding]:
    """Everything the rules find in the runs of one result; ``shown`` is how a path is printed."""
    for rule, check in GROUP_RULES.items():
        severity = context.ruleset.severity(rule)
        if severity is not None:
            for path, message in check(context):
                yield Finding(rule, severity, shown(path or context.group.folder), None, message)


# The runs of a result


@group_rule(
    "run-count", "a time-to-train result has exactly the required runs, a throughput result at least as many", PACKAGE
)
def run_count(context: GroupContext) -> Iterator[Found]:
    if context.benchmark is None or not context.runs:
        return
    need, runs = context.benchmark.required_runs, len(context.runs)
    if runs < need:
        yield None, f"{runs} runs; {context.benchmark.name} needs {need}"
    elif runs > need and not context.weak:
        yield None, f"{runs} runs; a time-to-train result of {context.benchmark.name} has exactly {need}"


@group_rule("runs-failed", "at most one run of a result fails", f"{HPC} 6; {PACKAGE}")
def runs_failed(context: GroupContext) -> Iterator[Found]:
    failed = [run for run in context.judged() if not run.converged] if context.benchmark else []
    if len(failed) > 1:
        names = ", ".join(f"{_name(run.record)} ({run.failure})" for run in failed[:5])
        yield None, f"{len(failed)} runs did not converge, one may: {names}"


@group_rule("run-failed", "a run that fails counts as the slowest", f"{HPC} 6")
def run_failed(context: GroupContext) -> Iterator[Found]:
    failed = [run for run in context.judged() if not run.converged] if context.benchmark else []
    if len(failed) == 1 and not context.weak:
        yield (
            failed[0].record.path,
            f"did not converge ({failed[0].failure}): the one run that may, counts as the slowest",
        )
    elif len(failed) == 1:
        yield failed[0].record.path, f"did not converge ({failed[0].failure}): it belongs into {PRUNED}"


@group_rule("seed-distinct", "no two runs have the same seed", "mlperf_logging seed_checker")
def seed_distinct(context: GroupContext) -> Iterator[Found]:
    yield from _repeats(context.runs, lambda run: run.seed, lambda run: f"seed {run.seed} is also that of")


@group_rule("run-copied", "no run is a copy of another, not even with new time stamps", OURS)
def run_copied(context: GroupContext) -> Iterator[Found]:
    yield from _repeats(context.runs, _course, lambda run: "has the same durations and evaluations as")


@group_rule("run-repeated", "runs with different seeds have different evaluations", OURS)
def run_repeated(context: GroupContext) -> Iterator[Found]:
    seeded = [run for run in context.runs if run.seed is not None and len(run.evals) >= _TELLING]
    values = _repeats(seeded, _values, lambda run: f"has another seed ({run.seed}) but the same evaluations as")
    yield from (item for item in values if len({run.seed for run in seeded}) == len(seeded))


@group_rule("hyperparameter-drift", "all runs have the same hyperparameters and batch size", HPC)
def hyperparameter_drift(context: GroupContext) -> Iterator[Found]:
    if context.benchmark is None or not context.runs:
        return
    keys = {*context.benchmark.closed, "global_batch_size", "dropout", "opt_weight_decay"} - {"seed"}
    for key in sorted(keys):
        values = [(run, run.hyperparameters[key]) for run in context.runs if key in run.hyperparameters]
        other = next(((run, value) for run, value in values if value != values[0][1]), None)
        if other is not None:
            yield other[0].path, f"{key} = {brief(other[1])}, in {_name(values[0][0])} it is {brief(values[0][1])}"


@group_rule("data-drift", "all runs read one data set", OURS)
def data_drift(context: GroupContext) -> Iterator[Found]:
    yield from _drift(context.runs, "data_manifest", lambda run: run.data_manifest)


@group_rule("config-drift", "all runs have one model, optimizer and precision in their configuration", OURS)
def config_drift(context: GroupContext) -> Iterator[Found]:
    for name in ("precision", "gradient_accumulation_steps", "hyperparameters"):
        known = [(run, run.config[name]) for run in context.runs if run.config is not None and name in run.config]
        other = next(((run, value) for run, value in known if value != known[0][1]), None)
        if other is not None:
            named, differing = _name(known[0][0]), _unlike(other[1], known[0][1])
            yield other[0].path, f"run_config has another {name} than {named}{differing}"


@group_rule("trial-gap", "the trials of a result follow one another: none was left out in between", OURS)
def trial_gap(context: GroupContext) -> Iterator[Found]:
    trials = sorted({run.trial for run in context.runs if run.trial is not None})
    if not context.weak and len(trials) == len(context.runs) and trials and trials[-1] - trials[0] >= len(trials):
        yield None, f"the runs are trials {', '.join(map(str, trials))}: others were run and are not here"


@group_rule("strong-pruned", "only instances of a throughput result can be pruned", "training_policies PR#499")
def strong_pruned(context: GroupContext) -> Iterator[Found]:
    if not context.weak:
        yield from ((path, "a pruned run of a time-to-train result") for path in context.group.pruned)


@group_rule("scale-drift", "all runs used the same number of nodes and accelerators", HPC)
def scale_drift(context: GroupContext) -> Iterator[Found]:
    yield from _drift(
        context.runs,
        "nodes x accelerators per node, ranks",
        lambda run: (run.nodes, run.accelerators_per_node, run.ranks),
    )


@group_rule("org-drift", "all runs name one organisation", OURS)
def org_drift(context: GroupContext) -> Iterator[Found]:
    yield from _drift(context.runs, "submission_org", lambda run: run.org)


@group_rule("version-drift", "all runs were made by one version of the suite", OURS)
def version_drift(context: GroupContext) -> Iterator[Found]:
    yield from _drift(context.runs, "suite_version", lambda run: run.suite_version)


@group_rule("size-mixed", "all runs have one benchmark and one size: sizes are never ranked together", OURS)
def size_mixed(context: GroupContext) -> Iterator[Found]:
    yield from _drift(context.runs, "benchmark and size", lambda run: (run.benchmark, run.size))


@group_rule(
    "rcp-speed", "a closed submission converges no faster than the reference, by a t test", "mlperf_logging rcp_checker"
)
def rcp_speed(context: GroupContext) -> Iterator[Found]:
    mean, bound = _convergence(context)
    if mean is not None and bound is not None and mean < bound.minimum:
        yield (
            None,
            (
                f"converges in {_seen(mean, context)} (mean without best and worst); the reference at batch "
                f"{bound.global_batch_size} ({bound.kind}) needs {_seen(bound.mean, context)}, "
                f"at least {_seen(bound.minimum, context)} are credible"
            ),
        )


@group_rule(
    "rcp-slower",
    "a submission faster than the reference's mean would be slowed by MLPerf",
    "mlperf_logging rcp_checker",
)
def rcp_slower(context: GroupContext) -> Iterator[Found]:
    mean, bound = _convergence(context)
    if mean is not None and bound is not None and bound.minimum <= mean < bound.mean:
        yield (
            None,
            f"converges in {_seen(mean, context)}, the reference in {_seen(bound.mean, context)}: factor {bound.mean / mean:.4f}",
        )


@group_rule("rcp-missing", "there is a reference point for the batch size", "mlperf_logging rcp_checker")
def rcp_missing(context: GroupContext) -> Iterator[Found]:
    benchmark = context.benchmark
    if benchmark is None or not context.closed or not context.runs or context.ruleset.name == "0.7.0":
        return
    batch = context.runs[0].global_batch_size
    if batch is not None and convergence.limit(benchmark.reference_points, batch, benchmark.required_runs) is None:
        known = ", ".join(map(str, sorted(benchmark.reference_points))) or "none"
        yield None, f"no reference point for batch size {batch}; there are: {known}"


# A result in its package


@group_rule(
    "results-layout", "results stand in results/<system>/{strong,weak}/<benchmark>/", f"{HPC} submission layout"
)
def results_layout(context: GroupContext) -> Iterator[Found]:
    group = context.group
    if group.package is not None and (group.old_layout or group.scenario not in SCENARIOS):
        found = "no scenario" if group.old_layout else f"scenario {brief(group.scenario)}"
        yield None, f"{found} in the path; expected results/<system>/strong|weak/<benchmark>"


@group_rule("results-empty", "a result's folder holds result_*.txt files", PACKAGE)
def results_empty(context: GroupContext) -> Iterator[Found]:
    if not context.group.logs:
        others = ", ".join(path.name for path in context.group.others[:3])
        yield None, "no result_*.txt here" + (f", only {others}" if others else "")


@group_rule("result-names", "a result's folder holds nothing but result_*.txt, pruned_results and power", PACKAGE)
def result_names(context: GroupContext) -> Iterator[Found]:
    known = {"power", "scaling.json", _BYPASS}
    if context.group.package is not None:
        yield from (
            (path, "not a result_*.txt: it is not judged") for path in context.group.others if path.name not in known
        )


@group_rule("result-link", "results are files, not symbolic links", OURS)
def result_link(context: GroupContext) -> Iterator[Found]:
    yield from ((path, "is a symbolic link: not followed") for path in context.group.links)


@group_rule(
    "scaling-file", "nobody scales his own score: scaling.json is written by a review", "mlperf_logging rcp_checker"
)
def scaling_file(context: GroupContext) -> Iterator[Found]:
    yield from ((path, "scales the score") for path in context.group.others if path.name == "scaling.json")


@group_rule("bypass-file", "no check is switched off by the package", PACKAGE)
def bypass_file(context: GroupContext) -> Iterator[Found]:
    yield from (
        (path, "asks the official tool to skip checks") for path in context.group.others if path.name == _BYPASS
    )


@group_rule("benchmark-folder", "the folder names the benchmark that the logs name", PACKAGE)
def benchmark_folder(context: GroupContext) -> Iterator[Found]:
    folder = context.group.benchmark
    if folder is None:
        return
    names = context.ruleset.benchmark_names()
    if folder not in names:
        yield None, f"unknown benchmark {brief(folder)}; {context.ruleset.name} knows {', '.join(names)}"
    for run in context.runs:
        if run.benchmark is not None and run.benchmark != folder:
            yield run.path, f"a log of {brief(run.benchmark)} in the folder of {brief(folder)}"


@group_rule("system-missing", "every result has its systems/<system>.json", PACKAGE)
def system_missing(context: GroupContext) -> Iterator[Found]:
    system = context.system
    if system is not None and system.problem == "there is no such file":
        yield system.path, "there is no such file"


@group_rule("division-agrees", "system description and logs name one division, closed or open", OURS)
def division_agrees(context: GroupContext) -> Iterator[Found]:
    if context.system is None or context.system.problem:
        return
    stated = context.system.fields.get("division")
    if stated not in ("closed", "open"):
        yield context.system.path, f"division = {brief(stated)}: expected 'closed' or 'open'"
        return
    for run in context.runs:
        if run.division is not None and run.division != stated:
            yield run.path, f"submission_division is {brief(run.division)}, the system description says {stated}"
            return


@group_rule("submitter-agrees", "folder, system description and logs name one submitter", OURS)
def submitter_agrees(context: GroupContext) -> Iterator[Found]:
    if context.system is None or context.system.problem:
        return
    stated, folder = context.system.fields.get("submitter"), context.group.submitter
    if stated != folder:
        yield context.system.path, f"submitter is {brief(stated)}, the folder {brief(folder)}"
    run = next((run for run in context.runs if run.org is not None and run.org != folder), None)
    if run is not None:
        yield run.path, f"submission_org is {brief(run.org)}, the folder {brief(folder)}"


@group_rule(
    "scale-agrees", "the system description has the nodes and accelerators that the logs of a strong result claim", OURS
)
def scale_agrees(context: GroupContext) -> Iterator[Found]:
    if context.system is None or context.system.problem or context.weak:
        return
    stated = (context.system.number("number_of_nodes"), context.system.number("accelerators_per_node"))
    for run in context.runs:
        claimed = (run.nodes, run.accelerators_per_node)
        if None not in claimed and claimed != stated:
            yield (
                run.path,
                f"{run.nodes} nodes x {run.accelerators_per_node} accelerators, the system description says "
                f"{stated[0]} x {stated[1]}",
            )
            return


@group_rule(
    "weak-scale", "instances fit into the system: S <= T, and those that overlap in time use S each", f"{HPC} 6.2"
)
def weak_scale(context: GroupContext) -> Iterator[Found]:
    if not context.weak or context.system is None:
        return
    total = context.system.compute_units
    scale = max((run.compute_units or 0 for run in context.runs), default=0)
    if total is None or not scale:
        return
    at_once = concurrent(context.runs)
    started = len(context.runs) + len(context.group.pruned)
    plausible = instance_scale(context.runs, total)
    instead = f"; {plausible} would fit" if plausible is not None and plausible != scale else ""
    if scale > total:
        yield None, f"one instance claims {scale} units, the system has {total}{instead}"
    elif at_once * scale > total:
        yield None, f"{at_once} instances at a time claim {scale} units each, the system has {total}{instead}"
    elif total > started * scale:
        yield None, f"{started} instances of {scale} units are fewer than the system's {total} units"


explain("system-valid", "a system description is a JSON object", PACKAGE)
explain("system-field", "a system description has all 33 fields, as text", "mlperf_logging system_desc_checker")
explain("system-blank", "the fields of a system description are filled in", OURS)
explain(
    "weak-without-strong",
    "a throughput result stands beside a time-to-train result of the same benchmark",
    f"{HPC} 6.2",
)
explain("pruned-compliant", "pruned instances are compliant, but for their convergence", "training_policies PR#499")
explain("implementation-missing", "a package holds the code under benchmarks/<benchmark>/implementations", PACKAGE)
explain("manifest-missing", "a package of this suite has its manifest", OURS)
explain("manifest-changed", "the files of a package are those of its manifest", OURS)
explain("nothing-checked", "there is something to check", OURS)
explain("folder-unread", "every folder below a path can be read: what was not seen was not judged", OURS)
explain("run-reused", "no run, nor a copy of it with new time stamps, counts in two results", OURS)
explain("carried-over", "a result that an earlier package holds already is not a new one", OURS)


class SeenRuns:
    """The runs of all results judged so far, to find those that come again: one instance for everything that is checked."""

    def __init__(self) -> None:
        self._places: dict[object, tuple[Group, RunRecord]] = {}

    def compare(self, group: Group, runs: Sequence[RunRecord]) -> Iterator[tuple[str, Path, str]]:
        """(rule, path, message) for runs that an earlier result holds; then the runs are remembered."""
        carried: list[Group] = []
        fresh: dict[object, tuple[Group, RunRecord]] = {}
        for run in runs:
            mark = _course(run)
            if mark is None:
                continue
            if mark not in self._places:
                fresh[mark] = group, run
                continue
            other, earlier = self._places[mark]
            if other.package != group.package and earlier.run_start_s == run.run_start_s:
                carried.append(other)
            else:
                again = "is also" if earlier.run_start_s == run.run_start_s else "has the durations and evaluations of"
                yield "run-reused", run.path or group.folder, f"{again} {earlier.path}"
        if carried:
            yield "carried-over", group.folder, f"{len(carried)} of {len(runs)} runs are those of {carried[0].folder}"
        self._places |= fresh


def judge_system(system: SystemFile) -> Iterator[tuple[str, str]]:
    """(rule, message) for what is wrong with a system description itself."""
    if system.problem:
        if system.problem != "there is no such file":
            yield "system-valid", system.problem
        return
    missing = [name for name in SYSTEM_FIELDS if name not in system.fields]
    if missing:
        yield "system-field", f"{len(missing)} fields are missing: {', '.join(missing)}"
    texts = (str, dict) if "other_software_stack" in system.fields else (str,)
    for name in SYSTEM_FIELDS:
        value = system.fields.get(name, "")
        if not isinstance(value, texts if name == "other_software_stack" else str):
            yield "system-field", f"{name} = {brief(value)}: expected a text"
    must = ("submitter", "division", "status", "system_name", "number_of_nodes")
    for name in must:
        if system.fields.get(name) == "":
            yield "system-field", f"{name} is empty"
    blank = [name for name in blank_fields(system.fields) if name not in must]
    if blank:
        yield "system-blank", f"{len(blank)} fields are empty or unknown: {', '.join(blank)}"


def blank_fields(fields: Mapping[str, object]) -> list[str]:
    """The fields of a system description that are there and say nothing."""
    return [name for name in SYSTEM_FIELDS if str(fields.get(name, "x")).strip().lower() in ("", "unknown")]


def judge_package(package: Path, groups: Sequence[Group]) -> Iterator[tuple[str, Path, str]]:
    """(rule, path, message) for what is wrong with a package as a whole."""
    strong = {group.benchmark for group in groups if group.scenario != "weak" and group.logs}
    for group in groups:
        if group.scenario == "weak" and group.logs and group.benchmark not in strong:
            yield (
                "weak-without-strong",
                group.folder,
                f"no time-to-train result of {brief(group.benchmark)} in the package",
            )
    for benchmark in sorted({group.benchmark for group in groups if group.benchmark and group.logs}):
        code = package / "benchmarks" / Path(benchmark).name / "implementations"
        if not any(path.is_file() for path in code.rglob("*")):
            yield "implementation-missing", package, f"no benchmarks/{benchmark}/implementations"
    for path in (package / _BYPASS, *sorted((package / "results").glob(f"*/{_BYPASS}"))):
        if path.is_file():
            yield "bypass-file", path, "asks the official tool to skip checks"
    yield from changed_files(package)


def read_manifest(path: Path) -> dict[str, str] | None:
    """sha256 by relative path of a manifest in the form of sha256sum; None if it is not one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    pairs = [line.split("  ", 1) for line in lines if line and not line.startswith("#")]
    if any(len(pair) != 2 or len(pair[0]) != 64 for pair in pairs):
        return None
    return {pair[1]: pair[0] for pair in pairs}


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_files(package: Path) -> Iterator[tuple[str, Path, str]]:
    """(rule, path, message) for every way in which a package's files are not those of its manifest."""
    path = package / MANIFEST
    if not path.is_file():
        yield "manifest-missing", package, f"no {MANIFEST}"
        return
    listed = read_manifest(path)
    if listed is None:
        yield "manifest-changed", path, "not a manifest in the form of sha256sum"
        return
    present = {item.relative_to(package).as_posix(): item for item in _entries(package)}
    present.pop(MANIFEST, None)
    for name in sorted(listed.keys() - present.keys()):
        yield "manifest-changed", path, f"{brief(name)} is listed but not there"
    for name in sorted(present.keys() - listed.keys()):
        yield "manifest-changed", present[name], "is not in the manifest"
    for name in sorted(present.keys() & listed.keys()):
        item = present[name]
        if item.is_symlink() or not item.is_file() or digest(item) != listed[name]:
            yield "manifest-changed", item, "differs from its sha256 in the manifest"


def _entries(folder: Path) -> Iterator[Path]:
    """Everything in a folder that is no folder; links are listed, not followed."""
    return (item for item in sorted(folder.rglob("*")) if item.is_symlink() or not item.is_dir())


def _seen(amount: float, context: GroupContext) -> str:
    """A convergence in the benchmark's own unit."""
    samples = context.benchmark is not None and context.benchmark.epoch_counts_samples
    return f"{amount:,.0f} samples" if samples else f"{amount:.4g} epochs"


def _convergence(context: GroupContext) -> tuple[float | None, convergence.Limit | None]:
    """Mean epochs to target without best and worst, and the limit it is held against; None where there is none."""
    benchmark = context.benchmark
    if benchmark is None or not context.closed or len(context.runs) < benchmark.required_runs:
        return None, None
    batch = context.runs[0].global_batch_size
    firsts = [first_reaching(run, benchmark) for run in context.runs]
    epochs = sorted(item.epoch if item is not None and item.epoch is not None else float("inf") for item in firsts)
    bound = None
    if batch is not None:
        confidence = context.ruleset.data.rcp_confidence
        bound = convergence.limit(benchmark.reference_points, batch, benchmark.required_runs, confidence)
    mean = convergence.trimmed_mean(epochs)
    return (mean, bound) if mean != float("inf") else (None, None)


def _drift(runs: Sequence[RunRecord], name: str, value: Callable[[RunRecord], object]) -> Iterator[Found]:
    known = [run for run in runs if value(run) is not None and set(_parts(value(run))) != {None}]
    other = next((run for run in known if value(run) != value(known[0])), None)
    if other is not None:
        yield other.path, f"{name}: {brief(value(other))}, in {_name(known[0])} {brief(value(known[0]))}"


def _parts(value: object) -> Iterable[object]:
    return value if isinstance(value, tuple) else (value,)


def _repeats(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], object], text: Callable[[RunRecord], str]
) -> Iterator[Found]:
    seen: dict[object, RunRecord] = {}
    for run in runs:
        mark = key(run)
        if mark is None:
            continue
        if mark in seen:
            yield run.path, f"{text(run)} {_name(seen[mark])}"
        else:
            seen[mark] = run


_TELLING = 3  # evaluations that two runs with different seeds cannot have in common by chance


def _course(run: RunRecord) -> object:
    """What a copy keeps when it is stamped anew: values and times of the evaluations, counted from run_start."""
    if not run.evals or run.time_to_train_s is None:
        return None
    return tuple((item.value, round(item.time_s, 3)) for item in run.evals), round(run.time_to_train_s, 3)


def _values(run: RunRecord) -> object:
    """The evaluations' values to six digits, which two seeds cannot share and a copy keeps when its last digits are changed."""
    return tuple(f"{item.value:.6g}" for item in run.evals)


def _unlike(value: object, other: object) -> str:
    """The names that two mappings have differently."""
    if not isinstance(value, dict) or not isinstance(other, dict):
        return ""
    names = sorted(name for name in value.keys() | other.keys() if value.get(name) != other.get(name))
    return ": " + ", ".join(brief(name) for name in names[:5])


def _name(run: RunRecord) -> str:
    return run.path.name if run.path else "a run"
