"""Derives what a package states from its logs and from what it keeps of the run folders. Pure functions.

`mlhpc package` writes what they return, and the checker compares the package with what they return again.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from mlhpc.suite import NO_SUBMITTER, REDACTED
from mlhpc.suite.card import SizeCard
from mlhpc.suite.cli.commands import SECTIONS
from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    add_shared,
    choose_config_name,
    convert_plan_to_settings,
    is_config_path,
)
from mlhpc.suite.compliance.kept_files import CONFIG, KeptFolder
from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.compliance.ruleset import Benchmark
from mlhpc.suite.config import RunConfig, resolve_config
from mlhpc.suite.descriptor import Descriptor, describe_card, load_descriptor
from mlhpc.suite.documents import Fields, YamlSource, convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_printable, render_repr
from mlhpc.suite.log.energy.score import find_energy
from mlhpc.suite.log.mllog import convert_to_json
from mlhpc.suite.log.origin.sources import Sources
from mlhpc.suite.log.reader import convert_to_float
from mlhpc.suite.log.record import RunRecord, find_first_on_target
from mlhpc.suite.log.results_tree import PRUNED
from mlhpc.suite.log.run_folder import SCRIPT, JobInfo, RunInfo, has_run_start
from mlhpc.suite.log.score import Throughput, TimeToTrain, compute_throughput, compute_time_to_train, find_failure
from mlhpc.suite.machine.facts import UNKNOWN
from mlhpc.suite.machine.secrets import remove_secrets
from mlhpc.suite.machine.system import System, describe_system, make_system_description
from mlhpc.suite.workload import load_workload

ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()  # the value of what a file does not state
_SAME = 1e-9  # of a number: files may be written with fewer digits than a float has
MOST_WORDS = 1000  # of a command
RUN, SUBMIT = "run", "submit"
Difference = tuple[str, Any, Any]  # name, value in one file, value in the other
Differences = Iterator[Difference]


def compare_values(one: Any, other: Any, at: str = "") -> Differences:
    """Yield the parts of two plain values that differ. What one of them lacks is `ABSENT` there."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}, key=str):
            yield from compare_values(one.get(key, ABSENT), other.get(key, ABSENT), f"{at}.{key}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from compare_values(a, b, f"{at}[{number}]")
    elif not _is_same(one, other):
        yield at, one, other


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        a, b = convert_to_float(one), convert_to_float(other)  # None: also of an integer that no float holds
        near = a is not None and b is not None and math.isclose(a, b, rel_tol=_SAME)
        return bool(one == other or (one != one and other != other) or near)
    return type(one) is type(other) and bool(one == other)


def may_be_redacted(said: Any, found: Any) -> bool:
    """Return True if a text may be another one after redaction: each host, path, account or secret has its own mark.

    A log has the last part of a path only, which redaction keeps.
    """
    if not isinstance(said, str) or not isinstance(found, str) or not re.search(rf"{REDACTED}|\bnode\d+\b", found):
        return False
    parts = re.split(rf"/{REDACTED}(?=/)|{REDACTED}-ACCOUNT|{REDACTED}|\bnode\d+\b", found)
    return re.fullmatch(r"[^\n]+?".join(map(re.escape, parts)), said) is not None or said == found.rpartition("/")[2]


def find_descriptor(folder: KeptFolder) -> Descriptor | None:
    """Find the workload of a run folder: of an own loop by its own card. None if it is not installed."""
    info = folder.info
    if info is None:
        return None
    card = folder.path / "card.yaml"
    with suppress(InputError):
        own = info.loop is not None and "card.yaml" in folder.files
        found = describe_card(card) if own else load_descriptor(info.workload)
        return replace(found, hyperparameters=None) if info.loop is not None else found
    return None


def rebuild_config(folder: KeptFolder, descriptor: Descriptor) -> RunConfig | None:
    """Resolve the settings that are kept, as the run did. InputError if they are no settings; None without any."""
    data = folder.read(CONFIG, dict)
    return None if data is None else _resolve(descriptor, data, folder.path / CONFIG)


def log_config(config: RunConfig, logged: Fields, *, own_loop: bool) -> dict[str, Any]:
    """Return what a log has as run_config. A person's own loop logs what was stated."""
    found: dict[str, Any] = convert_to_json(config.logged())
    return {key: value for key, value in found.items() if key in logged} if own_loop else found


def _resolve(descriptor: Descriptor, data: Fields, path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    # Not by `mlhpc.suite.config`'s default: the environment of the checker names nobody's submitter.
    data = {"submission": {}} | copy.deepcopy(dict(data))
    if isinstance(data["submission"], dict):
        data["submission"] = {"org": NO_SUBMITTER} | data["submission"]
    return resolve_config(descriptor, YamlSource(path, data, {}), overrides)


# Options of a command that begins no run folder, so that none has it in its run.json.
_CONTINUE = frozenset({"resume", "replace_failed"})
_BEGIN_NO_RUN = _CONTINUE | {"detect", "within", "dry_run"}


def parse_command(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Parse the command of run.json by the program's own parser: the command's name, and what was given by parameter.

    InputError if it is no command that writes a run folder.
    """
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        rest.pop(0)
    entry = next(
        (each.entry for each in SECTIONS["Run"] if rest[:1] == [each.name] and each.name in (RUN, SUBMIT)), None
    )
    if entry is None or len(words) > MOST_WORDS:
        what = f"{len(words):,} words" if len(words) > MOST_WORDS else render_repr(" ".join(rest[:1]))
        raise InputError(f"the command is {what}; expected mlhpc {RUN} or mlhpc {SUBMIT}")
    module, _, name = entry.partition(":")
    command = add_shared(getattr(import_module(module), name))
    try:
        given, more, _ = command.make_parser(click.Context(command)).parse_args(rest[1:])
    except click.UsageError as error:
        raise InputError(f"mlhpc {rest[0]} does not take the command: {error.format_message()}") from None
    if more:
        raise InputError(f"mlhpc {rest[0]} does not take {render_repr(more[0])} in the command")
    return rest[0], given


def rebuild_info(info: RunInfo) -> Differences:
    """Yield what run.json says in its fields and in its command, where they differ."""
    name, given = parse_command(info.command)
    instances = int(given.get("instances") or 1)
    expected: dict[str, Any] = {
        "workload": given.get("workload"),
        "mode": given.get("mode") or ("weak" if instances > 1 else "strong"),
        "runs": instances if instances > 1 else int(given.get("runs") or 1),
        "seed": None if given.get("seed") is None else int(given["seed"]),
    }
    if name == RUN and (given.get("ranks") is not None or given.get("trial") is None):
        expected["ranks"] = int(given.get("ranks") or 1)
    yield from ((key, getattr(info, key), value) for key, value in expected.items() if getattr(info, key) != value)
    # Only a job's script, which names the trial, passes --resume to runs that begin. The others begin none.
    begins_none = _BEGIN_NO_RUN if given.get("trial") is None else _BEGIN_NO_RUN - _CONTINUE
    yield from ((key, ABSENT, given[key]) for key in sorted(begins_none & given.keys()))


def rebuild_from_command(folder: KeptFolder, descriptor: Descriptor, kept: RunConfig) -> Differences:
    """Yield the settings of config.yaml that the command gives in another way.

    What was not given is that of the size, if its file is the one that the run had; else that of config.yaml.
    """
    assert folder.info is not None
    given = parse_command(folder.info.command)[1]
    path, data = folder.path / CONFIG, folder.read(CONFIG, dict) or {}
    overrides = (*(given.get("overrides") or ()), *convert_plan_to_settings(given.get("plan_name"), given.get("mesh")))
    base: Fields = data
    try:
        name = choose_config_name(given.get("size"), given.get("config")) or DEFAULT_SIZE
    except click.UsageError as error:
        raise InputError(f"the command: {error.format_message()}") from None
    if not is_config_path(name):
        if data.get("size") != name:
            yield "size", data.get("size", ABSENT), name
            return
        base = _find_shipped(folder, descriptor, name) or data
    # The run wrote all settings that are not null.
    yield from compare_values(data, convert_to_json(convert_to_plain_data(kept, without_none=True)))
    try:
        asked = _resolve(descriptor, base, path, overrides)
    except InputError as error:
        raise InputError(f"the command: {error}") from None
    named = any(text.startswith("submission.org=") for text in overrides)
    for key, one, other in compare_values(convert_to_json(kept.logged()), convert_to_json(asked.logged())):
        # The submitter may be a person's or a site's default.
        if (named or key != "submission.org") and one != other:
            yield key, one, other


def _find_shipped(folder: KeptFolder, descriptor: Descriptor, size: str) -> Fields | None:
    """Return the settings of a size. None unless the run had the file and the defaults that are installed here."""
    name = f"config/{Path(size).name}.yaml"
    same = has_same_code(folder, descriptor, name, "config.py") and has_same_code(folder, None, "config.py")
    return YamlSource.read(descriptor.folder / name).data if same else None


def has_same_code(folder: KeptFolder, descriptor: Descriptor | None, *names: str) -> bool:
    """Return True if a run had these files of a workload, or of the suite, as they are installed here."""
    sources = folder.read("sources.json", Sources)
    at = Path(__file__).parents[1] if descriptor is None else descriptor.folder
    own = "suite" if descriptor is None else f"workloads/{descriptor.name}"
    return sources is not None and all(_has_digest(at / name, sources.files.get(f"{own}/{name}")) for name in names)


def _has_digest(path: Path, sha256: str | None) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def has_same_workloads(folder: KeptFolder, descriptor: Descriptor) -> bool:
    """Return True if a run had the workloads that are installed here."""
    sources, above = folder.read("sources.json", Sources), descriptor.folder.parent
    had = sources.files if sources is not None else {}
    shipped = {name: sha256 for name, sha256 in had.items() if name.startswith(f"{above.name}/")}
    return bool(shipped) and all(_has_digest(above.parent / name, sha256) for name, sha256 in shipped.items())


def rebuild_work(descriptor: Descriptor, config: RunConfig, size: SizeCard) -> dict[str, Any] | None:
    """Compute work_per_sample of the workload that is installed here. None without torch."""
    try:
        work = load_workload(descriptor)(config).work()
    except (ImportError, OSError):  # a setting may name a file of the machine that ran
        return None
    return asdict(work) | {"sample_bytes": size.sample_bytes}


# The description of the system

# A person's own words, which facts do not have; models are compared by rule facts-agree.
FREE_FIELDS = frozenset({"submitter", "division", "status", "system_name", "cooling"})
_COUNTS = frozenset(
    {
        *("host_processors_per_node", "host_processor_core_count", "host_processor_vcpu_count", "host_memory_capacity"),
        *("accelerators_per_node", "number_of_nodes"),
    }
)
_MEMORY_SHARE = 0.25  # of a node's memory: 256 GB are 238 GiB, of which the system shows 5 % less


def build_description(
    folders: Sequence[KeptFolder], first: RunRecord, *, weak: bool, system: str = "", names: Mapping[str, str]
) -> dict[str, Any]:
    """Build the system description of a result from the facts of its nodes and what the system file states.

    ``names`` has submitter, division and status; ``system`` is the name where neither facts nor file have one.
    """
    origin = folders[0].origin
    described = describe_system(folders[0].nodes, origin.description if origin is not None else None)
    # Instances of a throughput result run on parts of the system, so its nodes are those of all instances.
    nodes = len({node.node for folder in folders for node in folder.nodes}) if weak else first.nodes
    return make_system_description(
        structs.replace(described, system_name=described.system_name or system),
        **names,
        nodes=nodes or 1,
        accelerators_per_node=first.accelerators_per_node,
    )


def compare_description(stated: Fields, rebuilt: Fields, described: System) -> Differences:
    """Yield the fields of a description that are not those of the facts and the system file.

    A person may fill in what is not known, but no count. Cores may be those of a processor or of the node, without or
    with threads; memory may be as it is sold; a model or a note may be longer.
    """
    for key, one, other in compare_values(dict(stated), dict(rebuilt)):
        name, text, due = key.partition(".")[0], str(one).strip(), str(other)
        known = due not in (UNKNOWN, "N/A") or name in _COUNTS
        cores = name == "host_processor_core_count" and text in _list_core_counts(described)
        memory = name == "host_memory_capacity" and _is_memory(text, described.memory_per_node_gib)
        longer = name.endswith(("_model_name", "_notes")) and (due in text or text in due or _share_model(text, due))
        added = name not in rebuilt  # MLPerf has no such field
        if known and text != due and name not in FREE_FIELDS and not (cores or memory or longer or added):
            yield key, one, other


def _share_model(text: str, other: str) -> bool:
    return bool(list_model_words(text) & list_model_words(other))


def list_model_words(text: str) -> set[str]:
    """List the words that identify a model: with a letter and a digit, or with four digits."""
    plain = "".join(each for each in unicodedata.normalize("NFKC", text) if unicodedata.category(each) != "Cf")
    found = re.findall(r"[a-z0-9]+", plain.lower())
    return {word for word in found if re.fullmatch(r"[0-9]{4}[a-z0-9]*|[a-z]+[0-9]{2,}[a-z]*", word)}


def _list_core_counts(described: System) -> set[str]:
    cores, sockets, threads = (
        described.cores_per_processor,
        described.processors_per_node,
        described.threads_per_node,
    )
    if not cores or not sockets:
        return set()
    return {str(count) for each in (cores * sockets, threads or cores) for count in (each, each // sockets)}


def _is_memory(text: str, gib: float | None) -> bool:
    match = re.match(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])i?B\b", text)
    if match is None or gib is None:
        return False
    return abs(float(match[1]) * 1024.0 ** ("KMGT".index(match[2]) - 2) - gib) <= _MEMORY_SHARE * gib


# Which runs count

Selection = tuple[tuple[RunRecord, ...], tuple[RunRecord, ...], tuple[tuple[RunRecord, str], ...]]


def select_runs(records: Sequence[RunRecord], benchmark: Benchmark, *, weak: bool) -> Selection:
    """Select the runs that a package scores, the pruned ones, and the ones left out with the reason.

    Of a time-to-train result with more than required, the N consecutive runs with the median score. Of a throughput
    result, instances that did not converge or repeat a seed are pruned, if enough remain.
    """
    if weak:
        first = {record.seed: record for record in reversed(records) if find_failure(record, benchmark) is None}
        scored = tuple(record for record in records if first.get(record.seed) is record)
        if len(scored) < benchmark.required_runs:
            return tuple(records), (), ()
        return scored, tuple(record for record in records if record not in scored), ()
    if len(records) <= benchmark.required_runs:
        return tuple(records), (), ()
    score = compute_time_to_train(records, benchmark)
    # The reasons why the score leaves a run out; the fastest and the slowest are left out of the mean only.
    outside = [run for run in score.runs if run.dropped is not None and run.dropped.startswith(("outside", "resumed"))]
    kept = tuple(run.record for run in score.runs if run not in outside)
    return kept, (), tuple((run.record, str(run.dropped)) for run in outside)


# result.json

STATED, STATED_VERSION = "result.json", 1
ENERGY = ("energy_j", "energy_of")  # only in a result whose energy was measured


def compute_stated_score(runs: Sequence[RunRecord], benchmark: Benchmark, *, weak: bool) -> TimeToTrain | Throughput:
    """Compute the score that a package states of its runs."""
    return (compute_throughput if weak else compute_time_to_train)(runs, benchmark)


def build_stated_result(
    result: TimeToTrain | Throughput,
    benchmark: Benchmark,
    names: Mapping[Path, str] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Return the content of result.json: seconds, joules, epochs; null for what does not exist.

    ``names`` maps paths of logs to their names in the package. ``folder`` holds them there, with power readings.
    """
    rate = result if isinstance(result, Throughput) else None
    time = result if isinstance(result, TimeToTrain) else None
    return {
        "version": STATED_VERSION,
        "benchmark": benchmark.name,
        "size": benchmark.size,
        "score_s": time.mean_s if time else None,
        "score_with_staging_s": time.mean_with_staging_s if time else None,
        "models_per_min": rate.models_per_minute if rate else None,
        "reason": result.reason,
        "runs": [
            _build_run(run.record, benchmark, names)
            for run in sorted(result.runs, key=lambda run: str(run.record.path))
        ],
        **_build_energy(time, names or {}, folder),
    }


def find_epochs_to_target(record: RunRecord, benchmark: Benchmark) -> float | None:
    """Return the epoch_num at which the target was reached first; None if it was not."""
    first = find_first_on_target(record, benchmark)
    return None if first is None else first.epoch


def _build_energy(result: TimeToTrain | None, names: Mapping[Path, str], folder: Path | None) -> dict[str, Any]:
    if result is not None and folder is not None:
        # An external meter's readings are in the package only, so the energy is that of the logs there.
        runs = []
        for run in result.runs:
            assert run.record.path is not None  # a log of a run folder always has a path
            packaged = replace(run.record, path=folder / names[run.record.path])
            runs.append(replace(run, record=packaged))
        result = replace(result, runs=tuple(runs))
    found = find_energy(result) if result is not None else None
    return {} if found is None or found.mean_j is None else dict(zip(ENERGY, (found.mean_j, found.what), strict=True))


def _build_run(record: RunRecord, benchmark: Benchmark, names: Mapping[Path, str] | None) -> dict[str, Any]:
    assert record.path is not None
    return {
        "file": (names or {}).get(record.path, record.path.name),
        "sha256": compute_sha256(record.path),
        "seed": record.seed,
        "time_s": record.time_to_train_s,
        "epochs": find_epochs_to_target(record, benchmark),
        "converged": find_first_on_target(record, benchmark) is not None,
    }


# The scripts that repeat a result

_SETUP = """\
#!/bin/bash
# Installs mlhpc {version} at the commit this result was made with. MLHPC_REPO: URL or path of its repository.
set -euo pipefail
: "${{MLHPC_REPO:?set it to the URL or path of the mlhpc repository}}"
git clone "$MLHPC_REPO" mlhpc
git -C mlhpc checkout {commit}
python3 -I -m venv mlhpc-env
mlhpc-env/bin/pip install -c mlhpc/constraints.txt './mlhpc[run]'
"""

_DATASETS = """\
#!/bin/bash
# Makes the data set: the same bytes on any machine.
set -euo pipefail
mlhpc data generate {workload} --size {size}
"""


_OWN_LOOP_SETUP = """\
#!/bin/bash
# Installs mlhpc {version}, which logged the runs, and gets the code that trained.
# MLHPC_REPO, CODE_REPO: URL or path of the two repositories; the commit is that of the code. The program itself is in
# provenance/run_*/code/.
set -euo pipefail
: "${{MLHPC_REPO:?set it to the URL or path of the mlhpc repository}}" "${{CODE_REPO:?set it to that of the code}}"
git clone "$CODE_REPO" code
git -C code checkout {commit}
git clone "$MLHPC_REPO" mlhpc
python3 -I -m venv mlhpc-env
mlhpc-env/bin/pip install -c mlhpc/constraints.txt './mlhpc[run]'
"""

_OWN_LOOP_DATASETS = """\
#!/bin/bash
# The data of {workload} {size} are the submitter's. DATA: their file or folder.
# Fails if they are not those of the runs.
set -euo pipefail
: "${{DATA:?set it to the file or folder of the data}}"
found=$(python3 -I - "$DATA" <<'END'
import sys
from pathlib import Path
from mlhpc.suite.data.manifest import compute_fingerprint
from mlhpc.suite.world import World
print(compute_fingerprint(Path(sys.argv[1]), World.create())[0])
END
)
test "$found" = {manifest}
"""


def render_scripts(folders: Sequence[KeptFolder], manifest: str | None) -> dict[str, str]:
    """Render the scripts that repeat a result, by file name. ``manifest`` is the checksum of its data."""
    infos = [(folder, folder.info) for folder in folders if folder.info is not None]
    if not infos:
        return {}
    first = infos[0][1]
    setup, data = (_SETUP, _DATASETS) if first.loop is None else (_OWN_LOOP_SETUP, _OWN_LOOP_DATASETS)
    # Texts of run.json become words of a bash script.
    named = {"workload": first.workload, "size": first.size, "manifest": str(manifest), "commit": render_commit(first)}
    words = {key: shlex.quote(render_printable(text)) for key, text in named.items()}
    lines = [
        "#!/bin/bash",
        "# The command of each run folder of this result; its events carry the times.",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
    ]
    for number, (folder, info) in enumerate(infos):
        job = folder.read("job.json", JobInfo) or JobInfo(job_ids=(), submitted="")
        script = f"{job.command} provenance/run_{number}/{SCRIPT}"
        lines.append(script if SCRIPT in folder.files else _render_command(info))
    return {
        "setup.sh": setup.format(version=render_printable(first.suite_version), **words),
        "init_datasets.sh": data.format(**words),
        "run_and_time.sh": "\n".join(lines) + "\n",
    }


def _render_command(info: RunInfo) -> str:
    """Render the command of a run without the path that the program had on its machine."""
    program, *rest = info.command or ("mlhpc",)
    return shlex.join([Path(program).name, *rest])


def render_commit(info: RunInfo) -> str:
    """Return the commit of a run, or HEAD if it is not known."""
    return info.git.commit if info.git and info.git.commit else "HEAD"


README = "README.md"


def render_readme(
    folders: Sequence[KeptFolder], card: Benchmark, selection: Selection, place: str, submitter: str
) -> str:
    """Render the README of a result: what it is, and which logs do not count. ``place`` is the folder of its logs."""
    scored, pruned, left_out = selection
    info = folders[0].info
    if info is None or not scored:
        return ""
    first = scored[0]
    own = f"{info.loop}, a loop of the submitter's own logged by " if info.loop else ""
    changes = " with local changes" if info.git and info.git.dirty else ""
    text = (
        f"# {card.name}, size {card.size}\n\n"
        f"Target: {card.target_text}. Ruleset {first.ruleset}, {card.required_runs} runs required. "
        f"Logs: `{place}/result_0.txt` to `result_{len(scored) - 1}.txt`.\n\n"
        f"Made by {own}mlhpc {info.suite_version}, commit {render_commit(info)}{changes}, on {info.created}: "
        f"{first.nodes} node{'s' * (first.nodes != 1)}, {first.ranks} rank{'s' * (first.ranks != 1)}, "
        f"{first.accelerators_per_node} accelerators per node, "
        f"global batch size {first.global_batch_size}.\n\n"
        "- `setup.sh` installs the suite as it was\n"
        "- `init_datasets.sh` makes the data set\n"
        "- `run_and_time.sh` runs it\n"
        f"- `{STATED}` has the score and the times of the runs, to be compared with the logs by `mlhpc reproduce`\n"
        "- `provenance/` holds what each run left: run.json, config.yaml, facts of every node, the job script, "
        "the uncommitted\n"
        "  changes, the digests of the suite's files, the environment, the data set's manifest\n"
    )
    if info.loop:
        text += "- `provenance/run_*/code/` is the program, `card.yaml` beside it what it was made for\n"
    if pruned:
        text += f"- `{PRUNED}/` beside the logs: {len(pruned)} instances that were pruned\n"
    if any(folder.origin is not None and folder.origin.late_submitter is not None for folder in folders):
        text += f"\nThe logs name no submitter. {submitter} was stated late, when this package was built.\n"
    names = [(record.path.name, why) for record, why in left_out if record.path]
    names += [(name, "a continuation of an interrupted run") for name in _list_names(folders, "resumed_")]
    for folder in folders:
        for name in _list_names([folder], "failed_"):
            began = has_run_start(folder.path / name)
            names.append(
                (name, "a run that began, failed and was replaced" if began else "an attempt that never began")
            )
    lines = "".join(f"- `{name}`: {why}\n" for name, why in names)
    return remove_secrets(text + (f"\nNot scored, in `provenance/`:\n\n{lines}" if lines else ""))


def _list_names(folders: Sequence[KeptFolder], stem: str) -> list[str]:
    return [name for folder in folders for name in folder.files if name.startswith(stem)]
