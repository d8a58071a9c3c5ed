"""Compares a result with the files of its run folders: run.json and the facts of the nodes.

`mlhpc package` copies both into provenance/run_<n>/ of
benchmarks/<benchmark>/implementations/mlhpc-<version>/<system>/<scenario>/.
"""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from mlhpc.suite import RULESET
from mlhpc.suite.card import FULL, SizeCard
from mlhpc.suite.compliance.package_files import check_kept_files
from mlhpc.suite.compliance.result import Result, count_evaluated_samples, count_trained_samples
from mlhpc.suite.compliance.rules.base import OURS, ResultBreach, render_log_name, result_rule
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log.provenance import find_config_problem, find_kept_folder
from mlhpc.suite.log.reader import convert_to_float
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import SystemFile
from mlhpc.suite.log.score import count_peak_use

# Between the clock of the machine that started the runs and those that ran them.
_CLOCK_SLACK_S = 600.0
# All peaks below are generous: the rule is to find forged times, not slow hardware.
_ACCELERATOR_PEAK_FLOPS = 1e16  # FLOP/s; the fastest of 2025 reach this at 4 bits
_NODE_PEAK_FLOPS = 1e15  # FLOP/s of a node without accelerators, if its cores are unknown
_MOST_PUBLISHED_RATE = 2.5  # times that of the fastest published run: software gets better, by at most 1.5 in a round
_SCALE = ("number_of_nodes", "accelerators_per_node")
_MODELS = ("cosmoflow", "deepcam", "oc20", "openfold")  # of MLPerf HPC: their cards have the model of the rounds
_CORE_HZ = 6e9
_FLOPS_PER_CYCLE, _FLOPS_PER_CYCLE_REDUCED = 128.0, 4096.0  # two 512-bit FMA units, and matrix units at 16 bits


@result_rule(
    "provenance-missing", "a result of this suite has the run.json and the facts of its nodes in the package", OURS
)
def check_provenance_missing(result: Result) -> Iterator[ResultBreach]:
    if result.group.package is None or not result.runs:
        return
    found = result.provenance
    if not found.infos:
        yield None, "no provenance/run_<n>/run.json of this result under benchmarks/<benchmark>/implementations"
    elif not found.facts:
        yield None, "no facts of a node under provenance/run_<n>/facts"
    for document in (*found.infos, *found.facts.values()):
        if document.problem:
            yield document.path, document.problem


@result_rule(
    "provenance-agrees", "run.json and the logs agree: workload, size, mode, version, and when the runs were made", OURS
)
def check_provenance_agrees(result: Result) -> Iterator[ResultBreach]:
    first = result.runs[0] if result.runs else RunRecord()
    logged_values = {
        "workload": result.benchmark.workload if result.benchmark else None,
        "size": first.size,
        "mode": "weak" if result.weak else "strong",
        "suite_version": first.suite_version,
    }
    earliest = min((run for run in result.runs if run.run_start_s is not None), key=_find_start, default=None)
    for document in result.provenance.infos:
        if document.problem:  # rule provenance-missing reports it
            continue
        for name, logged in logged_values.items():
            if logged is not None and document.fields.get(name) != logged:
                yield (
                    document.path,
                    f"{name} is {render_repr(document.fields.get(name))}, the logs say {render_repr(logged)}",
                )
        stated = document.fields.get("created")
        created = _parse_time(stated)
        if created is None:
            yield document.path, f"created = {render_repr(stated)}: expected a time such as 2026-11-20T14:00:00Z"
        # With several run folders nothing says which of them the earliest log is from.
        elif (
            earliest is not None
            and len(result.provenance.infos) == 1
            and _find_start(earliest) < created - _CLOCK_SLACK_S
        ):
            late = render_duration(created - _find_start(earliest))
            yield document.path, f"the run folder was made {late} after {render_log_name(earliest)} began"


@result_rule(
    "provenance-valid",
    "every file that a package keeps of a run folder is whole: its reader takes it, and no digest contradicts it",
    OURS,
)
def check_provenance_valid(result: Result) -> Iterator[ResultBreach]:
    found = result.provenance
    reported = {document.path for document in (*found.infos, *found.facts.values()) if document.problem}
    folders = _list_run_folders(result)
    for folder in folders:
        runs = [
            run for run in result.runs if run.path is not None and find_kept_folder(folders, run.path.name) == folder
        ]
        for path, problem in check_kept_files(folder, runs):
            if path not in reported:  # by rule provenance-missing
                yield path, problem


@result_rule("config-kept", "the file of settings whose sha256 each log states (config_file) is beside run.json", OURS)
def check_config_kept(result: Result) -> Iterator[ResultBreach]:
    folders = _list_run_folders(result)
    for run in (*result.runs, *result.pruned):
        folder = find_kept_folder(folders, run.path.name) if run.path is not None else None
        problem = find_config_problem(folder, run) if folder is not None else None
        if folder is not None and run.config_file is not None and problem is not None:
            yield folder / run.config_file[0], f"{problem} ({render_log_name(run)})"


def _list_run_folders(result: Result) -> list[Path]:
    """List what the package keeps of the run folders. Outside of a package: the run folder itself, if it is one."""
    if result.group.package is not None:
        return [document.path.parent for document in result.provenance.infos]
    folder = result.group.folder
    return [folder] if (folder / "run.json").is_file() else []


@result_rule(
    "facts-agree", "the system description and the logs claim the hardware that the facts of the nodes name", OURS
)
def check_facts_agree(result: Result) -> Iterator[ResultBreach]:
    facts = result.provenance.sound_facts()
    if not facts:
        return
    most = max((run.nodes or 0 for run in result.runs), default=0)
    if most > len(facts):
        yield None, f"the logs claim {most} nodes, the provenance has the facts of {len(facts)}"
    # If the probe of the accelerators failed on a node, its facts say nothing of them.
    surveyed = not any(_has_failed_probe(document) for document in facts)
    if surveyed:
        yield from islice(_check_accelerator_counts(result, facts), 1)
    if result.system is not None and not result.system.problem:
        yield from ((result.system.path, text) for text in _check_models(result.system, facts, surveyed=surveyed))
    if any(document.fields.get("simulated") is True for document in facts):
        yield None, "the facts are those of a simulated machine"


def _check_accelerator_counts(result: Result, facts: Sequence[SystemFile]) -> Iterator[ResultBreach]:
    """Yield the runs that claim more accelerators per node than the facts of a node list."""
    fewest = min(len(_list_accelerators(document)) for document in facts)
    for run in result.runs:
        if (run.accelerators_per_node or 0) > fewest:
            claim = f"accelerators_per_node = {run.accelerators_per_node}"
            yield run.path, f"{claim}, the facts of a node name {fewest}"


def _check_models(system: SystemFile, facts: Sequence[SystemFile], *, surveyed: bool) -> Iterator[str]:
    """Compare the models that a system description names with those in the facts of the nodes."""
    models = [str(item.get("model")) for document in facts for item in _list_accelerators(document)]
    named = system.fields.get("accelerator_model_name")
    if _has_name(named) and not models and surveyed:
        yield f"accelerator_model_name = {render_repr(named)}, the facts of the nodes name no accelerator"
    elif _has_name(named) and models and not _may_be_same_model(str(named), models):
        yield f"accelerator_model_name = {render_repr(named)}, the facts say {render_repr(models[0])}"
    processors = [str(_convert_to_mapping(document.fields.get("cpu")).get("model")) for document in facts]
    processor = system.fields.get("host_processor_model_name")
    if _has_name(processor) and not _may_be_same_model(str(processor), processors):
        yield f"host_processor_model_name = {render_repr(processor)}, the facts say {render_repr(processors[0])}"


@result_rule("code-changed", "the code of a run is that of its commit: nothing was changed locally", OURS)
def check_code_changed(result: Result) -> Iterator[ResultBreach]:
    for document in result.provenance.infos:
        git = _convert_to_mapping(document.fields.get("git"))
        # An unknown state counts as changed: only a clean check-out can be repeated.
        if git and git.get("dirty") is not False:
            yield document.path, f"the code was commit {render_repr(git.get('commit'))} with local changes"


@result_rule(
    "series-complete",
    "all runs that run.json asked for are in the package, those that do not count in its provenance",
    OURS,
)
def check_series_complete(result: Result) -> Iterator[ResultBreach]:
    found = result.provenance
    asked = sum(
        int(convert_to_float(document.fields.get("runs")) or 0) for document in found.infos if not document.problem
    )
    there = len(result.runs) + len(result.pruned) + found.logs
    if asked > there:
        yield None, f"run.json asks for {asked} runs, the package has {there}"


@result_rule(
    "runs-at-once",
    "time-to-train runs that go on at one moment have together no more nodes than the package has facts of",
    OURS,
)
def check_runs_at_once(result: Result) -> Iterator[ResultBreach]:
    there = len(result.provenance.sound_facts())
    nodes = [replace(run, accelerators_per_node=0) for run in result.runs]
    at_once, claimed = count_peak_use(nodes)
    if there and not result.weak and at_once > 1 and claimed > there:
        yield (
            None,
            f"{at_once} runs go on at one moment and claim {claimed} nodes; the package has the facts of {there}",
        )


@result_rule(
    "speed-possible",
    "no run trains faster than its processors can compute, nor 2.5 times as fast as the fastest published run did on "
    "as many of the same accelerators",
    OURS,
)
def check_speed_possible(result: Result) -> Iterator[ResultBreach]:
    for run in result.runs:
        seconds, (nodes, accelerators) = run.time_to_train_s, _find_scale(result, run)
        if seconds and seconds > 0.0 and nodes is not None:
            yield from islice(_check_run_speed(result, run, seconds, (nodes, accelerators)), 1)


def _check_run_speed(result: Result, run: RunRecord, seconds: float, scale: tuple[int, int]) -> Iterator[ResultBreach]:
    """Yield how a run is too fast for its machine: by its FLOPs, or by the published runs."""
    nodes, accelerators = scale
    card = _find_work_card(result)
    if card is not None:
        rate = _count_samples(result, run, card) * card.training_flops_per_sample / seconds
        most = nodes * _compute_peak_flops(run, accelerators, result.provenance.sound_facts())
        if rate > most:
            yield run.path, f"trains at {rate:.2g} FLOP/s; its {nodes} nodes can do at most {most:.2g}"
    benchmark, known = result.benchmark, _find_published_rate(result)
    if benchmark is not None and known is not None:
        model, fastest = known
        each = (count_evaluated_samples(run, benchmark) or 0.0) / seconds / (nodes * max(accelerators, 1))
        if each > _MOST_PUBLISHED_RATE * fastest:
            yield run.path, f"trains {each:.3g} samples/s on each {model}; the fastest published run {fastest:.3g}"


def _find_published_rate(result: Result) -> tuple[str, float] | None:
    """Return the model of the accelerator that a description names, and the samples/s of one in the fastest run.

    The model of the processor where nodes have no accelerators. None if no published run used it, or if the division is
    open, which may train another model.
    """
    system, benchmark = result.system, result.benchmark
    if system is None or system.problem or benchmark is None or not result.closed:
        return None
    name = "accelerator_model_name" if system.number("accelerators_per_node") else "host_processor_model_name"
    words = _list_model_words(str(system.fields.get(name) or ""))
    return next(((model, rate) for model, rate in benchmark.fastest.items() if model.lower() in words), None)


def _find_scale(result: Result, run: RunRecord) -> tuple[int | None, int]:
    """Return the nodes of a run and the accelerators of a node: the larger of what log and description say."""
    system = result.system
    nodes, accelerators = (system.number(name) if system is not None else None for name in _SCALE)
    found = max(run.nodes or 0, nodes or 0)
    # Logs of v0.7 state no nodes; a log of this suite without them breaks other rules.
    unknown = None if result.ruleset.foreign else 1
    return found or unknown, max(run.accelerators_per_node or 0, accelerators or 0)


def _find_work_card(result: Result) -> SizeCard | None:
    """Return the card that says how much work a sample is: the benchmark's own, or the full size of a round's."""
    benchmark = result.benchmark
    if benchmark is None:
        return None
    if benchmark.card is not None:
        return benchmark.card
    if benchmark.name not in _MODELS or not result.closed:  # the open division may train another model
        return None
    known = read_ruleset(RULESET).benchmark(benchmark.name, FULL)
    return None if known is None else known.card


def _count_samples(result: Result, run: RunRecord, card: SizeCard) -> float:
    """Count the samples that a run was trained on."""
    if result.benchmark is not None and result.benchmark.epoch_counts_samples:
        return max((epoch.number or 0.0 for epoch in run.epochs if epoch.complete), default=0.0)
    return count_trained_samples(run, card.eval_every_steps)


def _compute_peak_flops(run: RunRecord, accelerators: int, facts: Sequence[SystemFile]) -> float:
    """Return the largest possible FLOP/s of one node."""
    if accelerators:
        return accelerators * _ACCELERATOR_PEAK_FLOPS
    cores = [convert_to_float(_convert_to_mapping(document.fields.get("cpu")).get("cores")) for document in facts]
    known = [count for count in cores if count]
    if not known:
        return _NODE_PEAK_FLOPS
    full = (run.config or {}).get("precision", "float32") in ("float32", "float64")
    return max(known) * _CORE_HZ * (_FLOPS_PER_CYCLE if full else _FLOPS_PER_CYCLE_REDUCED)


def _list_accelerators(document: SystemFile) -> list[Mapping[str, Any]]:
    listed = document.fields.get("accelerators")
    return [_convert_to_mapping(item) for item in listed] if isinstance(listed, list) else []


def _has_failed_probe(document: SystemFile) -> bool:
    """Return True if the probe of a node's accelerators failed."""
    problems = document.fields.get("problems")
    return not _list_accelerators(document) and bool(problems) and "accelerator" in str(problems).lower()


def _convert_to_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _has_name(value: object) -> bool:
    return str(value or "").strip().lower() not in ("", "n/a", "na", "none", "unknown", "-", "0")


def _may_be_same_model(name: str, models: Sequence[str]) -> bool:
    """Return True if a name and a model share a word such as H100 or 7763. True also if one has no such word."""
    words = _list_model_words(name)
    return not words or any(not _list_model_words(model) or words & _list_model_words(model) for model in models)


def _list_model_words(text: str) -> set[str]:
    """List the words that identify a model: with a letter and a digit, or with four digits."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    return {word for word in found if re.fullmatch(r"[0-9]{4}[a-z0-9]*|[a-z]+[0-9]{2,}[a-z]*", word)}


def _find_start(run: RunRecord) -> float:
    return run.run_start_s or 0.0


def _parse_time(text: object) -> float | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
