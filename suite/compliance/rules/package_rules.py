"""The rules for a result's place in its package, for system descriptions, and for a package as a whole."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.package_files import check_manifest
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import (
    HPC,
    NAMES,
    PACKAGE,
    ResultBreaches,
    Rule,
    cite,
    convert_to_fields,
    result_rule,
)
from mlhpc.suite.files import read_json, render_repr
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.log.results_tree import CRATE, POWER, SCENARIOS, Group, SystemFile, list_files
from mlhpc.suite.log.score import compute_instance_scale, count_peak_use
from mlhpc.suite.plugins import EXCHANGE, list_missing_wings, load_export

_WEAK = cite(HPC, "7.2")
NO_SUCH_FILE = "there is no such file"  # the problem of a missing system description (mlhpc.suite.log.results_tree)
_MOST_CODE = 2**20  # bytes of a file that are searched
BYPASS_FILE = "package_checker_params"  # a file of this name switches checks of MLCommons' package_checker off

SYSTEM_FIELDS, _OPTIONAL = (tuple(NAMES[name].split()) for name in ("description", "optional"))
_REQUIRED = ("submitter", "division", "status", "system_name", "number_of_nodes")
_CORES = ("host_processor_core_count", "host_processor_vcpu_count")  # one of the two is enough
_NUMBERS = ("number_of_nodes", "accelerators_per_node")
_NO_NETWORK = ("none", "no", "-", "0")  # published descriptions of several nodes have N/A, and none of these
_TERABYTES = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*Ti?B", re.IGNORECASE)
_MOST_TERABYTES = 64  # of memory in a node or an accelerator; the most of a published node is 2
_COUNTS = (*_NUMBERS, "host_processors_per_node", *_CORES)  # a whole number is as good as a text here


# A result in its package


@result_rule(
    "results-layout",
    "results are in results/<system>/{strong,weak}/<benchmark>/ (v0.7: results/<system>/<benchmark>/)",
    PACKAGE,
)
def check_results_layout(result: Result) -> ResultBreaches:
    group = result.group
    if group.package is None:
        return
    if not result.ruleset.data.scenario_folders:
        if not group.old_layout:
            yield None, f"scenario {render_repr(group.scenario)} in the path; expected results/<system>/<benchmark>"
    elif group.old_layout or group.scenario not in SCENARIOS:
        scenario = "no scenario" if group.old_layout else f"scenario {render_repr(group.scenario)}"
        yield None, f"{scenario} in the path; expected results/<system>/strong|weak/<benchmark>"


@result_rule("results-empty", "a result's folder holds result_*.txt files", PACKAGE)
def check_results_empty(result: Result) -> ResultBreaches:
    if not result.group.logs:
        others = ", ".join(path.name for path in result.group.others[:3])
        yield None, "no result_*.txt here" + (f", only {others}" if others else "")


@result_rule("result-names", "a result's folder holds nothing but result_*.txt, pruned_results and power", PACKAGE)
def check_result_names(result: Result) -> ResultBreaches:
    known = {POWER, "scaling.json", BYPASS_FILE}  # they have rules of their own
    for path in result.group.others if result.group.package is not None else ():
        if path.name not in known:
            yield path, "not a result_*.txt: it is not judged"


@result_rule("result-link", "results are files, not symbolic links")
def check_result_link(result: Result) -> ResultBreaches:
    yield from ((path, "is a symbolic link: not followed") for path in result.group.links)


@result_rule(
    "scaling-file",
    "a package does not scale its own scores: only a review writes scaling.json",
    "mlperf_logging rcp_checker",
)
def check_scaling_file(result: Result) -> ResultBreaches:
    yield from ((path, "scales the score") for path in result.group.others if path.name == "scaling.json")


@result_rule("bypass-file", "a package switches no check off", PACKAGE)
def check_bypass_file(result: Result) -> ResultBreaches:
    yield from (
        (path, "asks the official tool to skip checks") for path in result.group.others if path.name == BYPASS_FILE
    )


@result_rule("benchmark-folder", "the folder names the benchmark that the logs name, and so does the code", PACKAGE)
def check_benchmark_folder(result: Result) -> ResultBreaches:
    folder = result.group.benchmark
    if folder is None:
        return
    names = result.ruleset.benchmark_names()
    if folder not in names and result.ruleset.other_suite(folder) is None:  # rule benchmark-known says that of each log
        yield None, f"unknown benchmark {render_repr(folder)}; {result.ruleset.name} knows {', '.join(names)}"
    for run in (*result.runs, *result.pruned):
        if run.benchmark is not None and run.benchmark != folder:
            yield run.path, f"a log of {render_repr(run.benchmark)} in the folder of {render_repr(folder)}"


@result_rule("system-missing", "every result has its systems/<system>.json", PACKAGE)
def check_system_missing(result: Result) -> ResultBreaches:
    system = result.system
    if system is not None and system.problem == NO_SUCH_FILE:
        yield system.path, NO_SUCH_FILE


@result_rule(
    "division-agrees",
    "system description and logs name the same division, closed or open, and the same status: available, preview or research",
)
def check_division_agrees(result: Result) -> ResultBreaches:
    if result.system is None or result.system.problem:
        return
    stated = result.system.fields.get("division")
    if stated not in ("closed", "open"):
        yield result.system.path, f"division = {render_repr(stated)}: expected 'closed' or 'open'"
        return
    status = result.system.fields.get("status")
    for run in result.runs:
        logged = run.submission_status if result.ruleset.complete else None
        if run.division not in (None, stated):
            yield run.path, f"submission_division is {render_repr(run.division)}, the system description says {stated}"
            return
        if logged is not None and _classify(logged) != _classify(status):
            what = f"submission_status is {render_repr(logged)}"
            yield run.path, f"{what}, the system description says {render_repr(status)}"
            return


def _classify(status: object) -> str:
    """Return the class of a status. What is on premises or in a cloud is available."""
    return next((name for name in ("preview", "research") if name in str(status).lower()), "available")


@result_rule("submitter-agrees", "folder, system description and logs name the same submitter")
def check_submitter_agrees(result: Result) -> ResultBreaches:
    if result.system is None or result.system.problem:
        return
    stated, folder = result.system.fields.get("submitter"), result.group.submitter or ""
    # Published packages spell a submitter in several ways; ours are made by one command.
    agrees = is_same_submitter if result.ruleset.foreign else str.__eq__
    names = [folder]
    if isinstance(stated, str) and agrees(stated, folder):
        names.append(stated)
    else:
        yield result.system.path, f"submitter is {render_repr(stated)}, the folder {render_repr(folder)}"
    for path, org in result.organisations.items():
        if org is not None and not any(agrees(org, name) for name in names):
            yield path, f"submission_org is {render_repr(org)}, the folder {render_repr(folder)}"
            return


@result_rule("submitter-late", "the submitter was stated before the runs, not when they were packaged")
def check_submitter_late(result: Result) -> ResultBreaches:
    late = [run.path for run in result.runs if run.org != result.organisations[run.path]]
    if late:
        name = render_repr(result.organisations[late[0]])
        yield None, f"{len(late)} of {len(result.runs)} logs name no submitter; the package states {name} late"


def is_same_submitter(name: str, other: str) -> bool:
    """True if two names mean one submitter: TACC and tacc, or a joint one such as Fujitsu/RIKEN and Fujitsu+RIKEN.

    The words of a short name may be the first words of the full name.
    """
    some, others = _split_submitters(name), _split_submitters(other)
    return _begins_one_of(some, others) or _begins_one_of(others, some)


def _split_submitters(name: str) -> list[str]:
    """Split a name into submitters, sorted, each as its words with a blank after each."""
    found = ["".join(f"{word} " for word in re.findall(r"\w+", part.casefold())) for part in re.split(r"[/+&,]", name)]
    return sorted(filter(None, found))


def _begins_one_of(some: Sequence[str], others: Sequence[str]) -> bool:
    """True if one text begins another, which in sorted order is the first one that is not before it."""
    places = ((text, bisect_left(others, text)) for text in some)
    return any(place < len(others) and others[place].startswith(text) for text, place in places)


@result_rule(
    "scale-agrees",
    "the nodes and accelerators in the logs of a strong result are those of the system description",
)
def check_scale_agrees(result: Result) -> ResultBreaches:
    if result.system is None or result.system.problem or result.weak:
        return
    system = result.system
    nodes, accelerators = system.number("number_of_nodes"), system.number("accelerators_per_node")
    for run in result.runs:
        if None in (run.nodes, run.accelerators_per_node) or [run.nodes, run.accelerators_per_node] == [
            nodes,
            accelerators,
        ]:
            continue
        # Other codes count an accelerator as a node, or half a node as one: only their product must agree.
        equal = result.ruleset.foreign and run.compute_units == system.compute_units
        if not (equal and bool(run.accelerators_per_node) == bool(accelerators)):
            claim = f"{run.nodes} nodes x {run.accelerators_per_node} accelerators"
            yield run.path, f"{claim}, the system description says {nodes} x {accelerators}"
            return


@result_rule(
    "weak-scale",
    "instances fit into the system, pruned ones too: all that run at one moment together claim no more than it has",
    _WEAK,
)
def check_weak_scale(result: Result) -> ResultBreaches:
    total = result.total_units
    if not result.weak or total is None:
        return
    scale = result.run_units
    fitting = compute_instance_scale(result.runs, total)
    hint = f"; {fitting} would fit" if fitting is not None and fitting != scale else ""
    at_once, claimed = count_peak_use((*result.runs, *result.pruned))
    if scale > total:
        yield None, f"one instance claims {scale} units, the system has {total}{hint}"
    elif claimed > total:
        yield None, f"{at_once} instances at a time claim {claimed} units, the system has {total}{hint}"


@result_rule("weak-idle", "all instances together claim the whole system: T <= M S", _WEAK)
def check_weak_idle(result: Result) -> ResultBreaches:
    total = result.total_units
    scale = result.run_units
    started = len(result.runs) + len(result.pruned)
    if result.weak and total is not None and 0 < started * scale < total:
        yield None, f"{started} instances of {scale} units are fewer than the system's {total} units"


_FIELDS = "mlperf_logging system_desc_checker"
_POLICIES = "mlcommons/policies submission_rules.adoc, system description"
# Rules without a function of their own: `judge_system`, `judge_package` and mlhpc.suite.compliance.check apply them.
PACKAGE_RULES: tuple[Rule, ...] = (
    Rule("system-valid", "a system description is a JSON object", PACKAGE),
    Rule("system-field", "a system description has all 33 fields, each a visible text or a count", _FIELDS),
    Rule("system-blank", "the fields of a system description that need a meaningful response are filled in", _POLICIES),
    Rule(
        "weak-without-strong", "a throughput result stands beside a time-to-train result of the same benchmark", _WEAK
    ),
    Rule("pruned-compliant", "pruned instances are compliant in all but their convergence", "training_policies PR#499"),
    Rule("implementation-missing", "a package holds the code under benchmarks/<benchmark>/implementations", PACKAGE),
    Rule("manifest-missing", "a package of this suite has its manifest"),
    Rule("manifest-changed", "the files of a package are those of its manifest"),
    Rule("link-outside", "no symbolic link in a package leads out of it or to nothing"),
    Rule("link-unfollowed", "what is judged is no symbolic link to a folder"),
    Rule("waiver-unused", "every waiver covers a finding"),
    Rule("special-file", "a package holds files and folders, no FIFO, socket or device"),
    Rule("nothing-checked", "there is something to check"),
    Rule("folder-unread", "every folder below a path can be read: what cannot be read is not judged"),
)


def judge_system(system: SystemFile) -> Iterator[tuple[str, str]]:
    """Check a system description by itself and yield (rule, message)."""
    if system.problem:
        if system.problem != NO_SUCH_FILE:  # rule system-missing reports it
            yield "system-valid", system.problem
        return
    for name in system.fields.keys() - {*SYSTEM_FIELDS}:
        plain = "".join(
            each for each in unicodedata.normalize("NFKC", name) if unicodedata.category(each) != "Cf"
        ).strip()
        if plain.lower() in SYSTEM_FIELDS:
            yield "system-field", f"{render_repr(name)} looks like {plain.lower()}, and nobody reads it"
    missing = [name for name in SYSTEM_FIELDS if name not in system.fields]
    if missing:
        yield "system-field", f"{_render_fields(missing)} missing: {', '.join(missing)}"
    for name in SYSTEM_FIELDS:
        if not _is_text_or_count(name, system.fields.get(name, "")):
            yield "system-field", f"{name} = {render_repr(system.fields[name])}: expected a text"
        elif any(unicodedata.category(each) == "Cf" for each in str(system.fields.get(name, ""))):
            yield "system-field", f"{name} = {render_repr(system.fields[name])}: has characters that nobody sees"
    for name in _REQUIRED:
        if system.fields.get(name) == "":
            yield "system-field", f"{name} is empty"
    for name in _NUMBERS:
        if system.fields.get(name, "") != "" and system.number(name) is None:
            yield "system-field", f"{name} = {render_repr(system.fields[name])}: expected an integer in digits"
    for name in ("host_memory_capacity", "accelerator_memory_capacity"):
        if any(float(each) > _MOST_TERABYTES for each in _TERABYTES.findall(str(system.fields.get(name)))):
            yield (
                "system-field",
                f"{name} = {render_repr(system.fields[name])}: no node has more than {_MOST_TERABYTES} TB",
            )
    network = system.fields.get("host_networking")
    if (system.number("number_of_nodes") or 1) > 1 and str(network).strip().lower() in _NO_NETWORK:
        yield "system-field", f"host_networking = {render_repr(network)}: expected what connects the nodes"
    blank = [name for name in list_blank_fields(system.fields) if name not in _REQUIRED]
    if blank:
        yield "system-blank", f"{_render_fields(blank)} empty or unknown: {', '.join(blank)}"


def _render_fields(names: Sequence[str]) -> str:
    return f"{len(names)} field{'s are' if len(names) > 1 else ' is'}"


def _is_text_or_count(name: str, value: object) -> bool:
    if name in _COUNTS and isinstance(value, int):
        return not isinstance(value, bool)
    # Some submitters list their software as an object, by name and version.
    return isinstance(value, str | dict | list) if name == "other_software_stack" else isinstance(value, str)


def list_blank_fields(fields: Mapping[str, object]) -> list[str]:
    """List the fields of a system description that need a meaningful response and are empty or "unknown".

    Missing fields do not count, nor do fields of accelerators if the nodes have none.
    """
    empty = [name for name in SYSTEM_FIELDS if str(fields.get(name, "x")).strip().lower() in ("", "unknown")]
    excused = set(_OPTIONAL)
    if str(fields.get("accelerators_per_node", "")).strip() == "0":
        excused |= {name for name in empty if name.startswith("accelerator_")}
    if any(name in fields and name not in empty for name in _CORES):
        excused |= set(_CORES)
    return [name for name in empty if name not in excused]


def judge_package(package: Path, groups: Sequence[Group], *, named: bool) -> Iterator[tuple[str, Path, str]]:
    """Check a whole package and yield (rule, path, message). ``named``: code names the benchmark that it logs."""
    strong = {group.benchmark for group in groups if group.scenario != "weak" and group.logs}
    for group in groups:
        if group.scenario == "weak" and group.logs and group.benchmark not in strong:
            message = f"no time-to-train result of {render_repr(group.benchmark)} in the package"
            yield "weak-without-strong", group.folder, message
    for benchmark in sorted({group.benchmark for group in groups if group.benchmark and group.logs}):
        # The name alone: a benchmark's name comes from a log and must not lead out of the package.
        code = package / "benchmarks" / Path(benchmark).name / "implementations"
        files = [path for path in list_files(code) if path.is_file()]
        if not files:
            yield "implementation-missing", package, f"no benchmarks/{benchmark}/implementations"
        elif named and not any(_names(path, code, benchmark) for path in files):
            yield "benchmark-folder", code, f"no file names {render_repr(benchmark)}, which the code logs"
    for path in (package / BYPASS_FILE, *sorted((package / "results").glob(f"*/{BYPASS_FILE}"))):
        if path.is_file():
            yield "bypass-file", path, "asks the official tool to skip checks"
    yield from _check_crate(package)
    yield from _check_special_files(package, groups)
    yield from check_manifest(package)


def _names(path: Path, code: Path, benchmark: str) -> bool:
    """Return True if a file that is not empty names a benchmark, in its path below the code or in its first bytes."""
    with suppress(OSError), path.open("rb") as file:
        text = file.read(_MOST_CODE).lower()
        return bool(text) and (benchmark.encode() in text or benchmark in path.relative_to(code).as_posix().lower())
    return False


def _check_crate(package: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield a description for other tools that is not that of the package's runs. It may lack files added later."""
    path = package / CRATE
    if not path.is_file() or path.is_symlink() or EXCHANGE in list_missing_wings():
        return
    try:
        rendered = load_export("ro-crate", "RO-Crate")(package)
    except OSError:  # a log that cannot be read: other rules report it
        return
    stated, due = (
        {str(item.get("@id")): item | {"hasPart": None} for item in document if item.get("@type") != "File"}
        for document in (_read_graph(path), json.loads(rendered)["@graph"])
    )
    for name in sorted(due.keys() | stated.keys()):
        if stated.get(name) != due.get(name):
            yield "statements-agree", path, f"describes {render_repr(name)} otherwise than the runs of the package"
            return


def _read_graph(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        document = read_json(path, read_limits().json)
        found = convert_to_fields(document).get("@graph")
        return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    return []


def _check_special_files(package: Path, groups: Sequence[Group]) -> Iterator[tuple[str, Path, str]]:
    """Yield a breach for each entry of a package that is neither a file nor a folder."""
    reported = {link for group in groups for link in group.links}  # by `check_result_link`
    inside, results = package.resolve(), package / "results"
    for path in list_files(package):
        if not path.is_symlink():
            if not path.is_file() and path.exists():
                yield "special-file", path, "is neither a file nor a folder: not opened"
            continue
        if path in reported:
            continue
        target = _resolve_link(path)
        if target is None:
            yield "link-outside", path, "is a symbolic link to nothing"
        elif not target.is_relative_to(inside):
            yield "link-outside", path, "is a symbolic link that leads out of the package: not followed"
        elif path.is_relative_to(results):
            yield "result-link", path, "is a symbolic link: not followed"


def _resolve_link(link: Path) -> Path | None:
    """Return the target of a link. None if there is nothing, or if the link leads to itself."""
    try:
        return link.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
