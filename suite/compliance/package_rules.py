"""The rules for a result's place in its package, for system descriptions, and for a package as a whole."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from suite.compliance.group_rules import GroupBreach, GroupContext, group_rule
from suite.compliance.manifest import changed_files
from suite.compliance.rules import HPC, OURS, PACKAGE, explain
from suite.files import brief
from suite.log.results_tree import SCENARIOS, Group, SystemFile, list_files
from suite.log.score import claimed_at_once, instance_scale

BYPASS = "package_checker_params"  # a file of this name switches checks of MLCommons' package_checker off

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


# A result in its package


@group_rule("results-layout", "results are in results/<system>/{strong,weak}/<benchmark>/", f"{HPC} submission layout")
def results_layout(context: GroupContext) -> Iterator[GroupBreach]:
    group = context.group
    if group.package is not None and (group.old_layout or group.scenario not in SCENARIOS):
        scenario = "no scenario" if group.old_layout else f"scenario {brief(group.scenario)}"
        yield None, f"{scenario} in the path; expected results/<system>/strong|weak/<benchmark>"


@group_rule("results-empty", "a result's folder holds result_*.txt files", PACKAGE)
def results_empty(context: GroupContext) -> Iterator[GroupBreach]:
    if not context.group.logs:
        others = ", ".join(path.name for path in context.group.others[:3])
        yield None, "no result_*.txt here" + (f", only {others}" if others else "")


@group_rule("result-names", "a result's folder holds nothing but result_*.txt, pruned_results and power", PACKAGE)
def result_names(context: GroupContext) -> Iterator[GroupBreach]:
    known = {"power", "scaling.json", BYPASS}  # the last two have rules of their own
    if context.group.package is not None:
        yield from (
            (path, "not a result_*.txt: it is not judged") for path in context.group.others if path.name not in known
        )


@group_rule("result-link", "results are files, not symbolic links", OURS)
def result_link(context: GroupContext) -> Iterator[GroupBreach]:
    yield from ((path, "is a symbolic link: not followed") for path in context.group.links)


@group_rule(
    "scaling-file",
    "a package does not scale its own scores: only a review writes scaling.json",
    "mlperf_logging rcp_checker",
)
def scaling_file(context: GroupContext) -> Iterator[GroupBreach]:
    yield from ((path, "scales the score") for path in context.group.others if path.name == "scaling.json")


@group_rule("bypass-file", "a package switches no check off", PACKAGE)
def bypass_file(context: GroupContext) -> Iterator[GroupBreach]:
    yield from ((path, "asks the official tool to skip checks") for path in context.group.others if path.name == BYPASS)


@group_rule("benchmark-folder", "the folder names the benchmark that the logs name", PACKAGE)
def benchmark_folder(context: GroupContext) -> Iterator[GroupBreach]:
    folder = context.group.benchmark
    if folder is None:
        return
    names = context.ruleset.benchmark_names()
    if folder not in names:
        yield None, f"unknown benchmark {brief(folder)}; {context.ruleset.name} knows {', '.join(names)}"
    for run in (*context.runs, *context.pruned):
        if run.benchmark is not None and run.benchmark != folder:
            yield run.path, f"a log of {brief(run.benchmark)} in the folder of {brief(folder)}"


@group_rule("system-missing", "every result has its systems/<system>.json", PACKAGE)
def system_missing(context: GroupContext) -> Iterator[GroupBreach]:
    system = context.system
    if system is not None and system.problem == "there is no such file":
        yield system.path, "there is no such file"


@group_rule("division-agrees", "system description and logs name the same division, closed or open", OURS)
def division_agrees(context: GroupContext) -> Iterator[GroupBreach]:
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


@group_rule("submitter-agrees", "folder, system description and logs name the same submitter", OURS)
def submitter_agrees(context: GroupContext) -> Iterator[GroupBreach]:
    if context.system is None or context.system.problem:
        return
    stated, folder = context.system.fields.get("submitter"), context.group.submitter
    if stated != folder:
        yield context.system.path, f"submitter is {brief(stated)}, the folder {brief(folder)}"
    run = next((run for run in context.runs if run.org is not None and run.org != folder), None)
    if run is not None:
        yield run.path, f"submission_org is {brief(run.org)}, the folder {brief(folder)}"


@group_rule(
    "scale-agrees",
    "the nodes and accelerators in the logs of a strong result are those of the system description",
    OURS,
)
def scale_agrees(context: GroupContext) -> Iterator[GroupBreach]:
    if context.system is None or context.system.problem or context.weak:
        return
    system = context.system
    nodes, accelerators = system.number("number_of_nodes"), system.number("accelerators_per_node")
    for run in context.runs:
        if run.nodes is None or run.accelerators_per_node is None:
            continue
        same = (run.nodes, run.accelerators_per_node) == (nodes, accelerators)
        # Other codes count an accelerator as a node, or half a node as one: only their product must agree.
        equal = context.ruleset.foreign and run.compute_units == system.compute_units
        if not same and not (equal and bool(run.accelerators_per_node) == bool(accelerators)):
            claim = f"{run.nodes} nodes x {run.accelerators_per_node} accelerators"
            yield run.path, f"{claim}, the system description says {nodes} x {accelerators}"
            return


@group_rule(
    "weak-scale",
    "instances fit into the system, pruned ones too: all that run at one moment together claim no more than it has",
    f"{HPC} 6.2",
)
def weak_scale(context: GroupContext) -> Iterator[GroupBreach]:
    total = context.system.compute_units if context.system is not None else None
    if not context.weak or total is None:
        return
    scale = max((run.compute_units or 0 for run in context.runs), default=0)
    fitting = instance_scale(context.runs, total)
    hint = f"; {fitting} would fit" if fitting is not None and fitting != scale else ""
    at_once, claimed = claimed_at_once((*context.runs, *context.pruned))
    if scale > total:
        yield None, f"one instance claims {scale} units, the system has {total}{hint}"
    elif claimed > total:
        yield None, f"{at_once} instances at a time claim {claimed} units, the system has {total}{hint}"


@group_rule("weak-idle", "all instances together claim the whole system: T <= M S", f"{HPC} 6.2")
def weak_idle(context: GroupContext) -> Iterator[GroupBreach]:
    total = context.system.compute_units if context.system is not None else None
    scale = max((run.compute_units or 0 for run in context.runs), default=0)
    started = len(context.runs) + len(context.pruned)
    if context.weak and total is not None and 0 < started * scale < total:
        yield None, f"{started} instances of {scale} units are fewer than the system's {total} units"


explain("system-valid", "a system description is a JSON object", PACKAGE)
explain("system-field", "a system description has all 33 fields, each a text", "mlperf_logging system_desc_checker")
explain("system-blank", "the fields of a system description are filled in", OURS)
explain(
    "weak-without-strong",
    "a throughput result stands beside a time-to-train result of the same benchmark",
    f"{HPC} 6.2",
)
explain("pruned-compliant", "pruned instances are compliant in all but their convergence", "training_policies PR#499")
explain("implementation-missing", "a package holds the code under benchmarks/<benchmark>/implementations", PACKAGE)
explain("manifest-missing", "a package of this suite has its manifest", OURS)
explain("manifest-changed", "the files of a package are those of its manifest", OURS)
explain("nothing-checked", "there is something to check", OURS)
explain("folder-unread", "every folder below a path can be read: what cannot be read is not judged", OURS)


def judge_system(system: SystemFile) -> Iterator[tuple[str, str]]:
    """Check a system description by itself; yields (rule, message)."""
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
    required = ("submitter", "division", "status", "system_name", "number_of_nodes")
    for name in required:
        if system.fields.get(name) == "":
            yield "system-field", f"{name} is empty"
    for name in ("number_of_nodes", "accelerators_per_node"):
        if system.fields.get(name, "") != "" and system.number(name) is None:
            yield "system-field", f"{name} = {brief(system.fields[name])}: expected an integer in digits"
    blank = [name for name in blank_fields(system.fields) if name not in required]
    if blank:
        yield "system-blank", f"{len(blank)} fields are empty or unknown: {', '.join(blank)}"


def blank_fields(fields: Mapping[str, object]) -> list[str]:
    """The fields of a system description that are empty or "unknown"; fields that are missing do not count."""
    return [name for name in SYSTEM_FIELDS if str(fields.get(name, "x")).strip().lower() in ("", "unknown")]


def judge_package(package: Path, groups: Sequence[Group]) -> Iterator[tuple[str, Path, str]]:
    """Check a package as a whole; yields (rule, path, message)."""
    yield from _throughput_alone(groups)
    yield from _implementation_missing(package, groups)
    for path in (package / BYPASS, *sorted((package / "results").glob(f"*/{BYPASS}"))):
        if path.is_file():
            yield "bypass-file", path, "asks the official tool to skip checks"
    yield from changed_files(package)


def _throughput_alone(groups: Sequence[Group]) -> Iterator[tuple[str, Path, str]]:
    strong = {group.benchmark for group in groups if group.scenario != "weak" and group.logs}
    for group in groups:
        if group.scenario == "weak" and group.logs and group.benchmark not in strong:
            message = f"no time-to-train result of {brief(group.benchmark)} in the package"
            yield "weak-without-strong", group.folder, message


def _implementation_missing(package: Path, groups: Sequence[Group]) -> Iterator[tuple[str, Path, str]]:
    for benchmark in sorted({group.benchmark for group in groups if group.benchmark and group.logs}):
        # The name alone: a benchmark's name comes from a log and must not lead out of the package.
        code = package / "benchmarks" / Path(benchmark).name / "implementations"
        if not any(path.is_file() for path in list_files(code)):
            yield "implementation-missing", package, f"no benchmarks/{benchmark}/implementations"
