"""Compares a result with the files of its run folders: run.json and the facts of the nodes.

`mlhpc package` copies both into provenance/run_<n>/ of
benchmarks/<benchmark>/implementations/mlhpc-<version>/<system>/<scenario>/.
"""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from msgspec import structs

from mlhpc.suite import NO_SUBMITTER, RULESET, VERSION
from mlhpc.suite.card import FULL, SizeCard
from mlhpc.suite.compliance.identities import find_broken
from mlhpc.suite.compliance.kept_files import CONFIG, PLAN, KeptFolder
from mlhpc.suite.compliance.rebuild import (
    ABSENT,
    README,
    STATED,
    Difference,
    build_description,
    build_stated_result,
    compare_description,
    compare_values,
    compute_stated_score,
    find_descriptor,
    has_same_code,
    has_same_workloads,
    list_model_words,
    log_config,
    may_be_redacted,
    rebuild_config,
    rebuild_from_command,
    rebuild_info,
    rebuild_work,
    render_readme,
    render_scripts,
    select_runs,
)
from mlhpc.suite.compliance.result import Result, count_evaluated_samples, count_trained_samples
from mlhpc.suite.compliance.rules.base import ResultBreaches, Rule, convert_to_fields, render_log_name, result_rule
from mlhpc.suite.compliance.ruleset import compute_logs_digest, read_ruleset
from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.manifest import Manifest
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes, render_duration, render_repr
from mlhpc.suite.log.mllog import convert_to_json
from mlhpc.suite.log.origin.sources import Environment, Sources, convert_distribution_name
from mlhpc.suite.log.reader import convert_to_float, read_events
from mlhpc.suite.log.record import NOT_HYPERPARAMETERS, RunRecord, summarise_log
from mlhpc.suite.log.results_tree import SystemFile, read_system
from mlhpc.suite.machine.facts import UNKNOWN, Facts
from mlhpc.suite.machine.system import (
    LISTED_PACKAGES,
    PACKAGES_OF_FRAMEWORKS,
    describe_system,
    describe_system_of,
)

# Between the clock of the machine that started the runs and those that ran them.
_CLOCK_SLACK_S = 600.0
_COMPARED = ("mlhpc", *LISTED_PACKAGES, *PACKAGES_OF_FRAMEWORKS)  # that facts and environment both have, or neither
_LATEST_FACTS_S = 86_400.0
_CLOCK_STEP_S = 0.5  # by which a host's clock may be set back between two runs
_LONGEST_WAIT_S = 366 * 86_400.0  # of a run folder for its first run
_SMALLEST_DRAWN = 2147  # of 2^31 seeds one in a million is smaller
# All peaks below are generous: the rule is to find forged times, not slow hardware.
_ACCELERATOR_PEAK_FLOPS = 1e16  # FLOP/s; the fastest of 2025 reach this at 4 bits
_NODE_PEAK_FLOPS = 1e15  # FLOP/s of a node without accelerators, if its cores are unknown
_MOST_PUBLISHED_RATE = 2.5  # times that of the fastest published run: software gets better, by at most 1.5 in a round
_SCALE = ("number_of_nodes", "accelerators_per_node")
_PRECISIONS = ("float32", "bfloat16")
_MODELS = ("cosmoflow", "deepcam", "oc20", "openfold")  # of MLPerf HPC: their cards have the model of the rounds
_CORE_HZ = 6e9
_FLOPS_PER_CYCLE, _FLOPS_PER_CYCLE_REDUCED = 128.0, 4096.0  # two 512-bit FMA units, and matrix units at 16 bits


@result_rule(
    "provenance-missing",
    "a result of this suite has the run.json and the facts of its nodes in the package",
)
def check_provenance_missing(result: Result) -> ResultBreaches:
    if result.group.package is None or not result.runs:
        return
    found = result.provenance
    if not found.folders:
        yield None, "no provenance/run_<n>/run.json of this result under benchmarks/<benchmark>/implementations"
    elif not any(name.startswith("facts/") for folder in found.folders for name in folder.files):
        yield None, "no facts of a node under provenance/run_<n>/facts"
    for folder in found.folders:
        loop = folder.info and folder.info.loop
        for name in ("run.json", CONFIG, *(("card.yaml", f"code/{loop}") if loop else ())):
            if name not in folder.files:
                yield folder.path / name, "there is no such file"


@result_rule(
    "provenance-agrees",
    "run.json and the logs agree: workload, size, mode, version, and when the runs were made",
)
def check_provenance_agrees(result: Result) -> ResultBreaches:
    if result.group.package is None:
        return
    mode, first = "weak" if result.weak else "strong", result.runs[0] if result.runs else RunRecord()
    for run in result.runs:
        if run.mode not in (None, mode):
            yield run.path, f"mode is {render_repr(run.mode)}, of the folder {mode!r}"
    for folder in result.provenance.folders:
        if (info := folder.info) is None:
            continue
        path = folder.path / "run.json"
        roots = {"info": info, "record": first, "benchmark": result.benchmark, "mode": mode}
        yield from ((path, text) for _, text in find_broken("provenance-agrees", roots))
        created = _parse_time(info.created)
        if created is None:
            yield path, f"created = {render_repr(info.created)}: expected a time such as 2026-11-20T14:00:00Z"
            continue
        runs = [run for run in result.runs if result.provenance.folder_of(run) is folder]
        earliest = min((run for run in runs if run.run_start_s is not None), key=_find_start, default=None)
        if earliest is not None and _find_start(earliest) < created - _CLOCK_SLACK_S:
            late = render_duration(created - _find_start(earliest))
            yield path, f"the run folder was made {late} after {render_log_name(earliest)} began"
        elif earliest is not None and _find_start(earliest) > created + _LONGEST_WAIT_S:
            yield path, f"the run folder was made more than a year before {render_log_name(earliest)} began"


@result_rule(
    "provenance-valid",
    "every file that is kept of a run folder is known and whole: its reader takes it, no digest contradicts it",
)
def check_provenance_valid(result: Result) -> ResultBreaches:
    runs: dict[int, list[RunRecord]] = {}
    for run in result.runs:
        runs.setdefault(id(result.provenance.folder_of(run)), []).append(run)
    for folder in result.provenance.folders:
        yield from folder.list_problems(runs.get(id(folder), ()))


@result_rule(
    "trials-whole",
    "the trials of a run folder are 0 to runs - 1, each is there once, has the number of its log's name, and began after "
    "those before it, unless the folder shows that it was made again",
)
def check_trials_whole(result: Result) -> ResultBreaches:
    found = result.provenance
    if not found.folders or not result.runs:
        return
    packaged = result.group.package is not None
    places = {
        name: (folder, log) for folder in found.folders if folder.origin for log, name in folder.origin.logs.items()
    }
    for run in (*result.runs, *result.pruned):
        name = "" if run.path is None else run.path.relative_to(result.group.folder).as_posix()
        _, log = places.get(name, (None, "" if packaged else name))
        number = re.fullmatch(r"result_(\d{1,9})\.txt", log)
        if number is None and packaged:
            yield run.path, "no origin.json in the provenance says which trial of which run folder it is"
        elif number is not None and run.trial is not None and int(number[1]) != run.trial:
            yield run.path, f"is trial {run.trial} by its log, {log} of its run folder"
    for folder in found.folders if packaged else ():
        info, origin = folder.info, folder.origin
        if info is None or origin is None:
            continue
        logs = [*origin.logs, *folder.surplus]
        asked = [f"result_{number}.txt" for number in range(info.runs)]
        gone, more = sorted({*asked} - {*logs}), sorted({*logs} - {*asked})
        if gone and info.loop is None:
            yield (
                folder.path,
                f"run.json asks for {info.runs} runs; of them {', '.join(gone[:5])} is not in the package",
            )
        if (more and info.loop is None) or len(logs) != len({*logs}):
            yield folder.path, f"run.json asks for {info.runs} runs; the package has {', '.join(more[:5])} too"
        if info.loop is None:
            yield from islice(_check_trial_order(result, folder), 1)
        extra = sorted(name for name in origin.logs.values() if not (result.group.folder / name).is_file())
        if extra:
            yield folder.path / "origin.json", f"names {', '.join(extra[:5])}: there is no such log"


def _check_trial_order(result: Result, folder: KeptFolder) -> ResultBreaches:
    """Yield a run that began after the next trials of its job: a better one may have taken the place of another."""
    mine = [run for run in result.runs if run.mode == "strong" and result.provenance.folder_of(run) is folder]
    for run, after in pairwise(sorted(mine, key=lambda run: run.trial or 0)):
        again = any(re.match(rf"(failed|resumed)_{run.trial}_", name) for name in folder.files)
        if _find_start(run) > _find_start(after) > 0.0 and run.job == after.job and not (again or run.replaced):
            yield run.path, f"trial {run.trial} began after trial {after.trial}: it was made again"


@result_rule(
    "statements-agree",
    "what a package states is derived again from its logs and from what it keeps of the runs, and is the same: "
    "settings, command, seeds, system description, result.json, scripts",
)
def check_statements_agree(result: Result) -> ResultBreaches:
    if not result.runs:
        return
    settings = {folder.path: _read_settings(folder) for folder in result.provenance.folders}
    for folder in result.provenance.folders:
        yield from _check_command(folder, settings[folder.path])
    for run in (*result.runs, *result.pruned):
        found = result.provenance.folder_of(run)
        if found is not None:
            yield from islice(_check_run_settings(run, found, settings[found.path]), 1)
            yield from islice(_check_seed(result, run, found), 1)
            yield from islice(_check_read_files(result, run, found), 1)
            yield from islice(_check_installed(result, run, found, settings[found.path]), 1)
            yield from islice(_check_sizes(result, run, found), 1)
    if result.group.package is not None and result.provenance.folders:
        yield from _check_derived(result)


def _read_settings(folder: KeptFolder) -> RunConfig | str | None:
    """Return the settings that are kept, or why they are none."""
    descriptor = find_descriptor(folder)
    try:
        return None if descriptor is None else rebuild_config(folder, descriptor)
    except InputError as error:
        return str(error)


def _check_command(folder: KeptFolder, kept: RunConfig | str | None) -> ResultBreaches:
    """Yield how the command in run.json differs from run.json itself and from config.yaml."""
    info, descriptor, path = folder.info, find_descriptor(folder), folder.path / "run.json"
    if info is None or info.loop is not None:
        return
    try:
        for name, one, other in islice(rebuild_info(info), 1):
            yield path, f"{name}: {render_repr(one)} in run.json, {render_repr(other)} in its command"
        if descriptor is not None and not isinstance(kept, str | None):
            for name, one, other in islice(rebuild_from_command(folder, descriptor, kept), 1):
                yield path, f"{name}: {render_repr(one)} in {CONFIG}, {render_repr(other)} by the command in run.json"
    except (InputError, ValueError) as error:
        yield path, str(error)


def _check_run_settings(run: RunRecord, folder: KeptFolder, kept: RunConfig | str | None) -> ResultBreaches:
    """Yield the settings that the log has in another way than config.yaml, and the ranks."""
    info = folder.info
    if info is None or run.config is None:
        return
    if isinstance(kept, str):
        yield folder.path / CONFIG, kept
    elif kept is not None:
        redacted = folder.origin is not None and CONFIG in folder.origin.redacted
        rebuilt, descriptor = log_config(kept, run.config, own_loop=info.loop is not None), find_descriptor(folder)
        same = descriptor is None or has_same_code(folder, descriptor, "config.py")
        for name, one, other in compare_values(run.config, rebuilt):
            newer = one is ABSENT and other is None and not same  # a setting that the run's version did not have
            if not newer and not (redacted and may_be_redacted(one, other)):
                yield run.path, f"{name}: {render_repr(one)} in the log, {render_repr(other)} in {CONFIG}"


def _check_seed(result: Result, run: RunRecord, folder: KeptFolder) -> ResultBreaches:
    """Yield a seed that nobody draws. Without one in run.json each trial draws 31 random bits."""
    info = folder.info
    if info is None or info.loop is not None or run.seed is None or run.trial is None:
        return
    if info.seed is None and run.seed < _SMALLEST_DRAWN:
        # With one base seed for all of them, the runs were continued with --seed.
        mine = [each for each in result.runs if result.provenance.folder_of(each) is folder]
        bases = {each.seed - each.trial for each in mine if each.seed is not None and each.trial is not None}
        if len(bases) > 1 or len(mine) == 1:
            yield run.path, f"seed: {run.seed}, which nobody draws of 2^31; run.json has no seed"


def _check_read_files(result: Result, run: RunRecord, folder: KeptFolder) -> ResultBreaches:
    """Yield a plan that the package lacks or has in another form, and first weights that are not the size's own."""
    descriptor, sources, kept = find_descriptor(folder), folder.read("sources.json", Sources), folder.files.get(PLAN)
    plan, info = run.plan or {}, folder.info
    if plan and kept is not None:
        if kept.sha256 != plan.get("sha256"):
            yield folder.path / PLAN, "is not the plan that the run read: the log states another sha256"
        content = {key: value for key, value in (kept.value or {}).items() if key not in _PLAN_HEAD}
        for name, one, other in compare_values({key: plan.get(key) for key in content}, content):
            yield run.path, f"parallel_plan: {name}: {render_repr(one)} in the log, {render_repr(other)} in {PLAN}"
    elif plan and sources is not None and info is not None:
        shipped = f"/{info.workload}/plans/{plan.get('name')}.yaml"
        known = [sha256 for name, sha256 in sources.files.items() if name.endswith(shipped)]
        if plan.get("sha256") not in known:
            yield run.path, f"parallel_plan: the package has no {PLAN}, and the suite of the run no such plan"
    if descriptor is None or not result.closed or run.config is None or run.size is None:
        return
    shipped_config = descriptor.folder / "config" / f"{Path(run.size).name}.yaml"
    own = YamlSource.read(shipped_config).data.get("hyperparameters", {}) if shipped_config.is_file() else {}
    stated = convert_to_fields(run.config.get("hyperparameters"))
    for name, value in own.items() if run.loop is None else ():
        if isinstance(value, str) and (descriptor.folder / value).is_file() and stated.get(name) != value:
            yield (
                run.path,
                f"hyperparameters.{name}: {render_repr(stated.get(name))} in the log; the size has {value!r}",
            )


def _collect_events(kept: RunConfig) -> dict[str, Any] | None:
    """Return what the file of settings makes a run log. None if the workload or its ranks decide a part of it."""
    try:
        alone, shared = (kept.hyperparameters.collect_logged(kept, ranks) for ranks in (1, 2))
    except OSError:  # it names a file of the machine that ran
        return None
    return alone if alone == shared else None


def _check_installed(
    result: Result, run: RunRecord, folder: KeptFolder, kept: RunConfig | str | None
) -> ResultBreaches:
    """Yield what a log states in another way than the files of the suite say, where the run had those of this suite."""
    descriptor, card = find_descriptor(folder), result.benchmark.card if result.benchmark is not None else None
    if has_same_code(folder, None, "__init__.py") and run.suite_version != VERSION:
        yield run.path, f"suite_version: {render_repr(run.suite_version)} in the log, {VERSION!r} by sources.json"
    if descriptor is None or card is None or run.run_start_s is None or run.loop is not None:
        return
    events = None
    if not isinstance(kept, str | None) and has_same_code(folder, descriptor, "config.py"):
        events = _collect_events(kept)
    due = convert_to_json(events or {})
    logged = {key: run.hyperparameters.get(key, ABSENT) for key in due}
    for name, one, other in compare_values(logged, due):
        yield run.path, f"{name}: {render_repr(one)} in the log, {render_repr(other)} by {CONFIG}"
    unknown = sorted(run.keys - NOT_HYPERPARAMETERS - {*(events or run.keys), *card.constraints})
    if unknown:
        yield run.path, f"logs {', '.join(unknown[:3])}, which the workload does not log"
    if not has_same_code(folder, descriptor, "card.yaml"):
        return
    logged = {"baseline": run.baselines, "oracle": run.oracle_baselines}
    simple = card.baselines
    due = {each: {} if simple is None else simple.metrics(oracle=each == "oracle") for each in logged}
    if not isinstance(kept, str | None) and run.plan is None:
        chosen = str((run.config or {}).get("precision"))  # where config.yaml has auto
        # Of other code the work may be another one, but none that this code has in another precision.
        for each in (chosen,) if has_same_workloads(folder, descriptor) else {*_PRECISIONS} - {chosen}:
            work = rebuild_work(descriptor, structs.replace(kept, precision=each), card)
            if work is not None and (each == chosen or dict(run.work_per_sample) == work):
                due |= {"work_per_sample": work, "precision": each}
                logged |= {"work_per_sample": run.work_per_sample, "precision": chosen}
    for name, one, other in compare_values(logged, due):
        yield run.path, f"{name}: {render_repr(one)} in the log, {render_repr(other)} by the card and code of the suite"


def _check_sizes(result: Result, run: RunRecord, folder: KeptFolder) -> ResultBreaches:
    """Yield what a log states otherwise than run.json, data.json, sources.json or facts."""
    manifest, nodes = folder.read("data.json", Manifest), folder.nodes
    roots: dict[str, Any] = {"log": run, "info": folder.info, "sources": folder.read("sources.json", Sources)}
    card = result.benchmark and result.benchmark.card
    unknown = folder.packaged and "data.json" not in folder.files and run.data_manifest is not None
    if unknown and run.loop is None and card and card.data_sha256 is None:
        yield folder.path / "data.json", "there is no such file, and the card has no checksum of the data"
    if manifest:
        roots["data"] = {"bytes": manifest.bytes, "files": len(manifest.shards)}
    memory = {round(node.memory.total_gib, 1) for node in nodes if node.memory.total_gib is not None}
    threads = max((node.cpu.threads or 0 for node in nodes), default=0)
    roots["facts"] = {"threads": threads, "memory_bytes": min(memory) * 2**30 if len(memory) == 1 else None}
    yield from ((run.path, text) for _, text in find_broken("statements-agree", roots))


_PLAN_HEAD = ("description", "version", "mesh")  # of a plan: not in the log, or resolved there


def _check_derived(result: Result) -> ResultBreaches:
    """Yield what the package states in another way than `mlhpc package` derives it from the same files."""
    folders, system, benchmark = result.provenance.folders, result.system, result.benchmark
    first = result.runs[0]
    if system is not None and not system.problem and folders[0].nodes:
        names = {name: str(system.fields.get(name)) for name in ("submitter", "division", "status")}
        rebuilt = build_description(folders, first, weak=result.weak, names=names)
        described = describe_system(folders[0].nodes, folders[0].origin.description if folders[0].origin else None)
        for difference in islice(compare_description(system.fields, rebuilt, described), 3):
            yield system.path, _render_difference(difference, "the description", "the facts of the nodes")
    named = all(run.org not in (None, NO_SUBMITTER) for run in (*result.runs, *result.pruned))
    for folder in folders:
        if named and folder.origin is not None and folder.origin.late_submitter is not None:
            yield folder.path / "origin.json", f"late_submitter: {folder.origin.late_submitter!r}; the logs name one"
    where = folders[0].path.parent.parent
    if benchmark is not None and compute_logs_digest(result.runs) is not None:  # else a rule for logs reports it
        names_of_logs = {run.path: run.path.name for run in result.runs if run.path is not None}
        score = compute_stated_score(result.runs, benchmark, weak=result.weak)
        due = build_stated_result(score, benchmark, names_of_logs, result.group.folder)
        stated = read_system(where / STATED)
        if stated.problem:
            yield stated.path, stated.problem
        else:
            for difference in islice(compare_values(stated.fields, due), 3):
                yield stated.path, _render_difference(difference, STATED, "the logs")
    texts = render_scripts(folders, first.data_manifest)
    records = list_records(result)
    if benchmark is not None and records is not None:
        selection = select_runs(records, benchmark, weak=result.weak)
        for record in selection[0]:
            if record not in result.runs:
                yield record.path, "is not scored; of these runs mlhpc package scores it"
        place = result.group.folder.relative_to(result.group.package or result.group.folder).as_posix()
        texts |= {README: render_readme(folders, benchmark, selection, place, result.group.submitter or "")}
    for name, text in texts.items():
        path = where / name
        try:
            same = not path.is_symlink() and read_bytes(path, len(text.encode()) + 1) == text.encode()
        except OSError:
            same = False
        if not same:
            yield path, f"is not what follows from {'the logs' if name == README else 'run.json'}"
    for folder in folders:
        yield from islice(_check_unstated(folder, records or result.runs), 1)
    for path in where.iterdir():
        if path.name not in {*texts, STATED, README, "provenance"}:
            yield path, "is no file that mlhpc package writes: nobody reads it"


def _check_unstated(folder: KeptFolder, runs: Sequence[RunRecord]) -> ResultBreaches:
    """Yield a kept file whose event no log has: of a job, of a preflight, of a run that was interrupted."""
    redacted = folder.origin.redacted if folder.origin is not None else {}
    for name, file in folder.files.items():
        verdict = redacted.get(name, file.sha256) if name.endswith("/verdict.json") else None
        trial = re.match(r"resumed_(\d{1,9})_", name)
        of_trial = [run for run in runs if trial is not None and run.trial == int(trial[1])]
        if name == "job.sbatch" and not any(run.job for run in runs):
            yield folder.path / name, "no log names a job"
        elif verdict is not None and not any(run.preflight == verdict for run in runs):
            yield folder.path / name, "no log states this verdict of a preflight"
        elif any(run.status == "success" for run in of_trial):
            yield folder.path / name, f"continues trial {of_trial[0].trial}, whose own log reached the target"


def list_records(result: Result) -> list[RunRecord] | None:
    """List the records of all runs of the run folders in order, surplus ones too. None if a log is missing."""
    known = {run.path: run for run in (*result.runs, *result.pruned)}
    found: list[RunRecord | None] = []
    for folder in result.provenance.folders:
        logs = {log: result.group.folder / name for log, name in (folder.origin.logs if folder.origin else {}).items()}
        logs |= {log: folder.path / log for log in folder.surplus}
        for log in sorted(logs, key=lambda name: (len(name), name)):
            surplus = log in folder.surplus
            found.append(summarise_log(read_events(logs[log], steps=False)) if surplus else known.get(logs[log]))
    return None if None in found else [record for record in found if record is not None]


def _render_difference(difference: Difference, one: str, other: str) -> str:
    name, stated, due = difference
    return f"{name}: {render_repr(stated)} in {one}, {render_repr(due)} by {other}"


@result_rule(
    "facts-agree",
    "description and logs claim the hardware that the facts of nodes name; no library there changes clock or numbers",
)
def check_facts_agree(result: Result) -> ResultBreaches:
    facts = result.provenance.facts if result.group.package is not None else []
    if not facts:
        return
    first = result.runs[0] if result.runs else RunRecord()
    # If the probe of the accelerators failed on a node, its facts say nothing of them.
    surveyed = not any(not node.accelerators and "accelerator" in str(node.problems).lower() for node in facts)
    allowed, quotas = ([getattr(node.limits, name) or 0 for node in facts] for name in ("cpus_allowed", "cpu_quota"))
    known = {
        "nodes": len(facts),
        "threads": max(node.cpu.threads or 0 for node in facts),
        "allowed": max(allowed) if all(allowed) else None,  # of one rank
        "quota": math.fsum(quotas) if all(quotas) else None,
        "accelerators": min(len(node.accelerators) for node in facts) if surveyed else None,
    }
    broken = (find_broken("facts-of-runs", {"run": run, "facts": known}) for run in result.runs)
    yield from islice(((run.path, text) for run, rows in zip(result.runs, broken, strict=True) for _, text in rows), 1)
    for folder in result.provenance.folders:
        mine = [run for run in result.runs if result.provenance.folder_of(run) is folder]
        # An array, several jobs and runs that were continued may each have had other nodes.
        moved = len({run.job for run in mine}) > 1 or any(re.match("(resumed|failed)_", name) for name in folder.files)
        whole = folder.info is not None and folder.info.same_allocation and not (moved or result.weak)
        most = max((run.nodes or 0 for run in mine), default=math.inf)
        if whole and len(folder.nodes) > most:
            yield folder.path / "facts", f"has {len(folder.nodes)} nodes; its runs had {most}"
    if result.system is not None and not result.system.problem:
        yield from ((result.system.path, text) for text in _check_models(result.system, facts, surveyed=surveyed))
    yield from islice(((None, text) for node in facts for text in _check_node(node, first)), 1)
    for folder in result.provenance.folders:
        yield from islice(_check_environment(folder, max(map(_find_start, result.runs), default=0.0)), 1)
    yield from _check_stated_hardware(result, facts)


def _check_environment(folder: KeptFolder, last_s: float) -> ResultBreaches:
    """Yield facts in a file that is not their node's, or of another time than the runs', the last of which began at
    ``last_s``; and software that the facts and the environment have otherwise.
    """
    environment = folder.read("environment.json", Environment)
    for name, file in folder.files.items():
        if not isinstance(node := file.value, Facts):
            continue
        if Path(name).stem != node.node.replace("/", "_"):
            yield folder.path / name, f"has the facts of node {render_repr(node.node)}"
        yield from ((folder.path / name, text) for text in _check_collected(folder, node, last_s))
        if environment is None:
            continue
        known: dict[str, str] = {key: item.version for key, item in environment.by_name().items()}
        if len(known) < len(environment.distributions):
            yield folder.path / "environment.json", "has two distributions of one name"
        packages = {convert_distribution_name(key): text for key, text in node.software.packages.items()}
        # Of others the facts may name a second one that is not imported.
        pairs = [(key, packages.get(key), known.get(key)) for key in map(convert_distribution_name, _COMPARED)]
        machine, python = environment.machine.rpartition(" ")[2], node.software.python
        stated = [("the architecture", node.cpu.architecture, machine), ("Python", python, environment.python)]
        for key, text, other in [*(pairs if packages else ()), *(each for each in stated if each[1] != UNKNOWN)]:
            if text != other:
                yield folder.path / name, f"has {key} {render_repr(text)}, environment.json {render_repr(other)}"


def _check_collected(folder: KeptFolder, node: Facts, last_s: float) -> Iterator[str]:
    """Yield facts that were collected before the run folder was made, or a day after its last run began."""
    created = _parse_time(folder.info.created) if folder.info is not None else None
    try:
        seconds = datetime.fromisoformat(node.collected).timestamp()
    except (ValueError, OverflowError):
        yield f"was collected at {render_repr(node.collected)}: expected a time such as 2026-11-20T14:00:00+00:00"
        return
    latest = min(
        time.time() + _CLOCK_SLACK_S, (last_s or time.time()) + _LATEST_FACTS_S
    )  # another attempt may have failed
    if created is not None and not created - _CLOCK_SLACK_S <= seconds <= latest:
        yield f"was collected at {node.collected}; the run folder was made at {folder.info.created if folder.info else None}"


def _check_node(node: Facts, run: RunRecord) -> Iterator[str]:
    """Yield how the facts of a node contradict themselves, and what a run states of its numbers."""
    caches = sum(each.instances for each in node.cpu.caches if each.level == 1 and each.kind != "instruction")
    roots: dict[str, Any] = {"cpu": node.cpu, "limits": node.limits, "first_caches": caches, "tuning": node.tuning}
    preloaded = f"{node.software.preloaded} {node.tuning.get('LD_PRELOAD', '')}"
    roots["node"] = {
        "preloaded": preloaded,
        "precision": (run.config or {}).get("precision"),
        "simulated": node.simulated,
    }
    for _, text in find_broken("facts-agree", roots):
        yield f"the facts of node {render_repr(node.node)}: {text}"


def _check_stated_hardware(result: Result, facts: Sequence[Facts]) -> ResultBreaches:
    """Yield the hardware that the system file states against the probes of the nodes."""
    origin = result.provenance.folders[0].origin
    if origin is not None and origin.description is not None:
        roots = {"stated": origin.description, "found": describe_system_of(facts[0])}
        yield from ((None, text) for _, text in find_broken("system-file", roots))


def _check_models(system: SystemFile, facts: Sequence[Facts], *, surveyed: bool) -> Iterator[str]:
    """Compare the models that a system description names with those in the facts of the nodes."""
    accelerators = [item.model for node in facts for item in node.accelerators]
    processors = [node.cpu.model for node in facts]
    for name, models in (("accelerator_model_name", accelerators), ("host_processor_model_name", processors)):
        named = system.fields.get(name)
        unlike = not _may_be_same_model(str(named), models) if models else surveyed
        if _has_name(named) and unlike:
            found = f"say {render_repr(models[0])}" if models else "of the nodes name no accelerator"
            yield f"{name} = {render_repr(named)}, the facts {found}"


@result_rule("code-changed", "the code of a run is that of its commit: nothing was changed locally")
def check_code_changed(result: Result) -> ResultBreaches:
    for folder in result.provenance.folders if result.group.package is not None else ():
        git = folder.info and folder.info.git
        # An unknown state counts as changed: only a clean check-out can be repeated.
        if git and git.dirty is not False:
            yield folder.path / "run.json", f"the code was commit {render_repr(git.commit)} with local changes"


RUNS_AT_ONCE = Rule(
    "runs-at-once",
    "runs that go on at one moment, of whatever results, have together no more nodes than the package has facts of, "
    "from the start of their processes to their end",
)


def find_shared_hosts(results: Sequence[Result]) -> Iterator[tuple[Path, str]]:
    """Yield (path, message) for the first run that begins while others have its hosts, of each set of hosts.

    Instances of one throughput result may share hosts, but with nobody else.
    """
    marks = []
    for number, result in enumerate(results):
        for run in (*result.runs, *result.pruned):
            folder, begin, end = result.provenance.folder_of(run), run.run_start_s, run.run_stop_s
            hosts = frozenset(folder.list_hosts() if folder is not None else ())
            if run.path is None or not hosts or begin is None or end is None:
                continue
            parts = [(run.startup or {}).get(name) for name in ("interpreter", "imports")]
            least = [convert_to_float(part.get("min")) or 0.0 for part in parts if isinstance(part, dict)]
            # One process may make several runs of a person's own loop.
            begin -= (run.init_s or 0.0) + (sum(least) if run.loop is None else 0.0)
            owner = (number, len(hosts)) if result.weak else (run.path, run.nodes or 0)
            for time_s, change in ((begin, run.nodes or 0), (max(begin, end - _CLOCK_STEP_S), -(run.nodes or 0))):
                marks.append((time_s, change, owner, run.path, hosts))
    marks.sort(key=lambda mark: mark[:2])
    for there in dict.fromkeys(mark[4] for mark in marks):
        claims: dict[tuple[object, int], int] = {}
        for _, change, owner, path, hosts in marks:
            if hosts <= there:
                claims[owner] = claims.get(owner, 0) + change
                if not claims[owner]:
                    del claims[owner]
                claimed = sum(min(nodes, most) for (_, most), nodes in claims.items())
                if claimed > len(there):
                    yield (
                        path,
                        f"was started while others went on: they claim {claimed} nodes; there are facts of {len(there)}",
                    )
                    break


@result_rule(
    "speed-possible",
    "no run trains faster than its processors can compute, nor 2.5 times as fast as the fastest published run did on "
    "as many of the same accelerators",
)
def check_speed_possible(result: Result) -> ResultBreaches:
    system = result.system
    named = str(system.fields.get("accelerator_model_name") or "") if system is not None and not system.problem else "?"
    unread = not any(each.isprintable() and not each.isspace() for each in named)
    if unread and system is not None and system.number("accelerators_per_node"):
        what = f"accelerator_model_name = {render_repr(named)}"
        yield system.path, f"{what}: nobody can read which accelerators trained"
    yield from islice(_check_platform(result), 1)
    for run in result.runs:
        seconds, (nodes, accelerators) = run.time_to_train_s, _find_scale(result, run)
        if seconds and seconds > 0.0 and nodes is not None:
            yield from islice(_check_run_speed(result, run, seconds, (nodes, accelerators)), 1)


def _check_platform(result: Result) -> ResultBreaches:
    """Yield a run whose platform, or a system whose name, has other accelerators than the description names."""
    known = result.benchmark.fastest if result.benchmark is not None else {}
    system = result.system

    def find(text: object) -> set[str]:
        return {model for model in known if model.lower() in str(text).lower()}

    stated = find(system.fields.get("accelerator_model_name")) if system is not None else set()
    names = ((run.path, run.platform) for run in result.runs)
    for path, name in (*names, (None, result.group.system)) if stated else ():
        if find(name) and not find(name) & stated:
            yield path, f"{render_repr(name)} has {', '.join(find(name))}; the description names {', '.join(stated)}"


def _check_run_speed(result: Result, run: RunRecord, seconds: float, scale: tuple[int, int]) -> ResultBreaches:
    """Yield how a run is too fast for its machine: by its FLOPs, or by the published runs."""
    nodes, accelerators = scale
    card = _find_work_card(result)
    if card is not None:
        rate = _count_samples(result, run, card) * card.training_flops_per_sample / seconds
        most = nodes * _compute_peak_flops(run, accelerators, result.provenance.facts)
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

    The model of the processor where nodes have no accelerators. A model that no published run used, or that nobody can
    read, is bounded by the fastest one. None in the open division, which may train another model.
    """
    system, benchmark = result.system, result.benchmark
    if system is None or system.problem or benchmark is None or not result.closed or not benchmark.fastest:
        return None
    accelerated = system.number("accelerators_per_node") or any(run.accelerators_per_node for run in result.runs)
    name = str(system.fields.get("accelerator_model_name" if accelerated else "host_processor_model_name") or "")
    words = list_model_words(name)
    model = next((model for model in benchmark.fastest if model.lower() in words), None)
    if model is not None:
        return model, benchmark.fastest[model]
    model = max(benchmark.fastest, key=lambda each: benchmark.fastest[each])
    return f"{render_repr(name)}, which no published run used and {model} bounds", benchmark.fastest[model]


def _find_scale(result: Result, run: RunRecord) -> tuple[int | None, int]:
    """Return the nodes of a run and the accelerators of a node: the larger of what log and description say."""
    system = result.system
    nodes, accelerators = (system.number(name) if system is not None else None for name in _SCALE)
    found = max(run.nodes or 0, nodes or 0)
    # Logs of v0.7 state no nodes; a log of this suite without them breaks other rules.
    return found or (None if result.ruleset.foreign else 1), max(run.accelerators_per_node or 0, accelerators or 0)


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


def _compute_peak_flops(run: RunRecord, accelerators: int, facts: Sequence[Facts]) -> float:
    """Return the largest possible FLOP/s of one node."""
    if accelerators:
        return accelerators * _ACCELERATOR_PEAK_FLOPS
    # Where the run counted the CPUs that it may use, those; a core has at least one.
    known = (
        [run.other_work.cpus] if run.other_work is not None else [node.cpu.cores for node in facts if node.cpu.cores]
    )
    if not known:
        return _NODE_PEAK_FLOPS
    full = (run.config or {}).get("precision", "float32") in ("float32", "float64")
    return max(known) * _CORE_HZ * (_FLOPS_PER_CYCLE if full else _FLOPS_PER_CYCLE_REDUCED)


def _has_name(value: object) -> bool:
    return str(value or "").strip().lower() not in ("", "n/a", "na", "none", "unknown", "-", "0")


def _may_be_same_model(name: str, models: Sequence[str]) -> bool:
    """Return True if a name and a model share a word such as H100 or 7763. True also if one has no such word."""
    words = list_model_words(name)
    return not words or any(not list_model_words(model) or words & list_model_words(model) for model in models)


def _find_start(run: RunRecord) -> float:
    return run.run_start_s or 0.0


def _parse_time(text: object) -> float | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
