"""Compares what a package states in several files. One table names each statement and the files that make it.

A new file in the package is a new reader in the rows that it speaks of.
"""

# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import OURS, ResultBreach, result_rule
from mlhpc.suite.documents import YamlSource, parse_yaml
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_repr
from mlhpc.suite.log.provenance import find_kept_folder, may_be_redacted
from mlhpc.suite.log.reader import convert_to_float
from mlhpc.suite.log.record import RunRecord, find_first_on_target
from mlhpc.suite.log.results_tree import SystemFile, read_system
from mlhpc.suite.log.score import Throughput

_SAME = 1e-9  # of a number: files may be written with fewer digits than a float has
_MEMORY_SHARE = 0.25  # of a node's memory: 256 GB are 238 GiB, of which the system shows 5 % less
RESULT_FILE = "result.json"
_NOTHING = "none"  # the value of what the logs do not have and another file states

# Settings that change what a run computes. Others, such as the folder of the data, may change when a run is resumed.
_SETTINGS = (
    *("workload", "size", "global_batch_size", "gradient_accumulation_steps", "precision"),
    *("compile", "channels_last", "plan", "mesh", "hyperparameters"),
)


@dataclass(frozen=True)
class KeptRun:
    """A run of a result, and the files that the package keeps of it. Without a run: the result as a whole."""

    result: Result
    run: RunRecord | None
    folder: Path | None

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """The fields of run.json; none if it cannot be read."""
        return {} if self.folder is None else read_system(self.folder / "run.json").fields

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The settings in config.yaml; none if it cannot be read."""
        path = None if self.folder is None else self.folder / "config.yaml"
        with suppress(InputError):
            return YamlSource.read(path).data if path is not None and path.is_file() and not path.is_symlink() else {}
        return {}

    @cached_property
    def stated(self) -> Mapping[str, Any]:
        """The fields of result.json, which lies two folders above run.json."""
        return {} if self.folder is None else read_system(self.folder.parent.parent / RESULT_FILE).fields

    @cached_property
    def row(self) -> Mapping[str, Any]:
        """What result.json says of the run."""
        rows = self.stated.get("runs")
        name = self.run.path.name if self.run is not None and self.run.path is not None else None
        known = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        return next((row for row in known if row.get("file") == name), {})

    @cached_property
    def options(self) -> Mapping[str, str]:
        """The options of the command in run.json, by name; a setting of --set by its key. The last of a kind counts.

        The command of a person's own loop has no options of `mlhpc run`.
        """
        words = self.info.get("command")
        if not isinstance(words, list) or self.info.get("loop") is not None:
            return {}
        found: dict[str, str] = {}
        texts = [word for word in words if isinstance(word, str)]
        for word, after in pairwise([*texts, ""]):
            name, equals, value = word.partition("=")
            value = value if equals else after
            if name == "--set":
                key, _, setting = value.partition("=")
                found[key] = setting
            elif name.startswith("--"):
                found[name] = value
        return found

    def option(self, name: str) -> object:
        """Return the value of an option as YAML reads it. None without the option."""
        text = self.options.get(name)
        try:
            return None if text is None else parse_yaml(text)
        except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError, InputError):
            return text

    def compute_seed(self, base: object) -> int | None:
        """Compute the seed of this run from the base seed: trial i has the base seed + i."""
        number = convert_to_float(base)
        trial = self.run.trial if self.run is not None else None
        return None if number is None or trial is None else int(number) + trial


Reader = Callable[[KeptRun], object]
LOG, CONFIG, INFO, COMMAND = "the log", "config.yaml", "run.json", "the command in run.json"


class Statement(NamedTuple):
    """A statement, and its value in each file that makes it. None: that file does not state it.

    ``agree`` compares the values of two files; the first is that of the upper one.
    """

    name: str
    readers: Mapping[str, Reader]
    agree: Callable[[object, object], bool] = lambda value, other: is_same_statement(value, other)


def is_same_statement(value: object, other: object) -> bool:
    """Compare two values of a statement. Numbers may differ by rounding, texts by redaction."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return all(is_same_statement(item, other[key]) for key, item in value.items() if key in other)
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    one, two = convert_to_float(value), convert_to_float(other)
    if one is not None and two is not None:
        return math.isclose(one, two, rel_tol=_SAME)
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(is_same_statement, value, other))
    return value == other or may_be_redacted(value, other)


def _setting(name: str) -> Statement:
    """Return the statement of a setting: logged as run_config, kept as config.yaml, given with --set."""

    def read(source: Callable[[KeptRun], Mapping[str, Any] | None], kept: KeptRun) -> object:
        found: object = source(kept)
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    readers: dict[str, Reader] = {
        LOG: partial(read, lambda kept: kept.run.config if kept.run is not None else None),
        CONFIG: partial(read, lambda kept: kept.config),
        COMMAND: lambda kept: _read_given(kept, name),
    }
    return Statement(name, readers)


def _read_given(kept: KeptRun, name: str) -> object:
    """Return what --set gave to a setting, or to the parts of a mapping."""
    parts = {key.removeprefix(f"{name}."): kept.option(key) for key in kept.options if key.startswith(f"{name}.")}
    flat = {key: value for key, value in parts.items() if "." not in key}
    return kept.option(name) if name in kept.options else flat or None


def _of_run(read: Callable[[RunRecord], object]) -> Reader:
    return lambda kept: None if kept.run is None else read(kept.run)


def _find_epochs(kept: KeptRun, run: RunRecord) -> object:
    if kept.result.benchmark is None or kept.row.get("epochs") is None:
        return None
    first = find_first_on_target(run, kept.result.benchmark)
    return _NOTHING if first is None else first.epoch


def _compute_log_sha256(kept: KeptRun) -> str | None:
    path = kept.run.path if kept.run is not None else None
    with suppress(OSError):
        return compute_sha256(path) if path is not None and kept.row.get("sha256") is not None else None
    return None


# Statements of one run
RUN_STATEMENTS = (
    *map(_setting, _SETTINGS),
    Statement("size", {LOG: _of_run(lambda run: run.size), COMMAND: lambda kept: kept.option("--size")}),
    Statement(
        "seed",
        {
            LOG: _of_run(lambda run: run.seed),
            INFO: lambda kept: kept.compute_seed(kept.info.get("seed")),
            COMMAND: lambda kept: kept.compute_seed(kept.option("--seed")),
            RESULT_FILE: lambda kept: kept.row.get("seed"),
        },
    ),
    Statement(
        "time_s", {LOG: _of_run(lambda run: run.time_to_train_s), RESULT_FILE: lambda kept: kept.row.get("time_s")}
    ),
    Statement(
        "epochs",
        {
            LOG: lambda kept: _find_epochs(kept, kept.run) if kept.run is not None else None,
            RESULT_FILE: lambda kept: kept.row.get("epochs"),
        },
    ),
    Statement(
        "sha256",
        {
            LOG: _compute_log_sha256,
            RESULT_FILE: lambda kept: kept.row.get("sha256"),
        },
    ),
)


def _read_score(kept: KeptRun, name: str) -> object:
    """Return a figure of the score that follows from the logs, if result.json states it."""
    if kept.stated.get(name) is None:
        return None
    score = kept.result.score
    if isinstance(score, Throughput):
        figures = {"models_per_min": score.models_per_minute}
    else:
        figures = {"score_s": score.mean_s, "score_with_staging_s": score.mean_with_staging_s}
    found = figures.get(name)
    return _NOTHING if found is None else found


def _score(name: str) -> Statement:
    return Statement(
        name,
        {
            "the logs": lambda kept: _read_score(kept, name),
            RESULT_FILE: lambda kept: kept.stated.get(name),
        },
    )


def _of_first(name: str) -> Reader:
    """Return the reader of a field that all runs have in common. Rule size-mixed finds runs that differ."""
    return lambda kept: getattr(kept.result.runs[0], name) if kept.result.runs else None


def _count_runs(kept: KeptRun) -> object:
    """Return the number of runs in the package, if they are more than the one run folder of the result was made for."""
    infos = kept.result.provenance.infos
    asked = convert_to_float(kept.info.get("runs"))
    there = len(kept.result.runs) + len(kept.result.pruned) + kept.result.provenance.logs
    # Fewer runs than were asked for break rule series-complete.
    return there if len(infos) == 1 and asked is not None and there > asked else None


FACTS, SYSTEM = "the facts of the nodes", "the system description"


def _read_facts(read: Callable[[Mapping[str, Any]], object], kept: KeptRun) -> object:
    """Return the values of all nodes. None if one of them does not know it."""
    values = [read(document.fields) for document in kept.result.provenance.sound_facts()]
    return None if not values or None in values else values


def _read_fact(part: str, name: str, fields: Mapping[str, Any]) -> float | None:
    inner = fields.get(part)
    return convert_to_float(inner.get(name)) if isinstance(inner, dict) else None


def _list_core_counts(fields: Mapping[str, Any]) -> list[float] | None:
    """List what a description may call the cores: those of a processor, or of the node; without or with threads."""
    cores, threads, sockets = (_read_fact("cpu", name, fields) for name in ("cores", "threads", "sockets"))
    if not cores or not sockets:
        return None
    return [count / each for count in (cores, threads or cores) for each in (1.0, sockets)]


def _read_system(name: str, kept: KeptRun) -> object:
    system: SystemFile | None = kept.result.system
    return None if system is None else system.number(name)


def _read_memory(kept: KeptRun) -> float | None:
    """Return the memory of a node in GiB, as the description states it."""
    text = str(kept.result.system.fields.get("host_memory_capacity", "")) if kept.result.system is not None else ""
    match = re.match(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])i?B\b", text)
    return None if match is None else float(match[1]) * 1024.0 ** ("KMGT".index(match[2]) - 2)


def _is_in_any(values: object, stated: object) -> bool:
    return any(stated in value for value in values) if isinstance(values, list) else True


def _is_near_any(values: object, stated: object) -> bool:
    number = convert_to_float(stated)
    return number is None or not isinstance(values, list) or any(abs(number - v) <= _MEMORY_SHARE * v for v in values)


# Statements of a result as a whole
RESULT_STATEMENTS = (
    *map(_score, ("score_s", "score_with_staging_s", "models_per_min")),
    Statement(
        "benchmark", {"the logs": _of_first("benchmark"), RESULT_FILE: lambda kept: kept.stated.get("benchmark")}
    ),
    Statement("size", {"the logs": _of_first("size"), RESULT_FILE: lambda kept: kept.stated.get("size")}),
    Statement("runs", {"the package": _count_runs, INFO: lambda kept: kept.info.get("runs")}),
    Statement("runs", {INFO: lambda kept: kept.info.get("runs"), COMMAND: lambda kept: kept.option("--runs")}),
    Statement(
        "cores",
        {FACTS: partial(_read_facts, _list_core_counts), SYSTEM: partial(_read_system, "host_processor_core_count")},
        _is_in_any,
    ),
    Statement(
        "memory in GiB",
        {FACTS: partial(_read_facts, partial(_read_fact, "memory", "total_gib")), SYSTEM: _read_memory},
        _is_near_any,
    ),
)


@result_rule(
    "statements-agree",
    "what a package states in several files is the same in all: settings, seeds, times, score, cores, memory within"
    " 25 %",
    OURS,
)
def check_statements_agree(result: Result) -> Iterator[ResultBreach]:
    if not result.runs:
        return
    folders = [document.path.parent for document in result.provenance.infos]
    whole = KeptRun(result, None, folders[0] if folders else None)
    yield from _walk(whole, RESULT_STATEMENTS)
    for run in (*result.runs, *result.pruned):
        folder = find_kept_folder(folders, run.path.name) if run.path is not None else None
        yield from _walk(KeptRun(result, run, folder), RUN_STATEMENTS)


def _walk(kept: KeptRun, statements: tuple[Statement, ...]) -> Iterator[ResultBreach]:
    """Yield the first two files that contradict each other in each statement."""
    path = kept.run.path if kept.run is not None else None
    for statement in statements:
        known = [(place, value) for place, read in statement.readers.items() if (value := read(kept)) is not None]
        for (place, value), (other_place, other) in pairwise(known):
            if not statement.agree(value, other):
                text = f"{statement.name}: {render_repr(value)} in {place}, {render_repr(other)} in {other_place}"
                yield path, text
                break
