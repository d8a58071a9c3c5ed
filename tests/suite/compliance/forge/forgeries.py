"""Generates forgeries of a package of this suite: every event, field, option and file of it is attacked in several ways.

A new event or field is attacked as soon as a package has it. Each forgery is what a careful forger leaves: the checksums in
the logs, result.json and the manifest fit to what was changed, unless they are the subject.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlhpc.suite import RULESET
from mlhpc.suite.commands.run import run
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.kept_files import KeptFolder
from mlhpc.suite.compliance.rebuild import (
    README,
    STATED,
    build_stated_result,
    compute_stated_score,
    render_readme,
    render_scripts,
)
from mlhpc.suite.compliance.ruleset import read_ruleset, summarise_for_benchmark
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.results_tree import CRATE
from mlhpc.suite.package.build import write_package_manifest

_crate = pytest.importorskip(
    "mlhpc.plugins.exchange.crate", reason="the wing exchange is not installed: no crate to forge"
)

Change = Callable[[Any], Any]  # of a value; GONE takes it away
Events = list[dict[str, Any]]
GONE = object()
TOKEN = ":::MLLOG "
ALL, ONE = "all", "one"  # runs
SLIGHT = "a tenth less"  # within the slack of a comparison, or tied to no other number
DERIVED = ("result.json", "systems/", ".sh", "README.md", "ro-crate")  # not stated again where they are the subject


@dataclass(frozen=True)
class Forgery:
    """One forgery. ``name`` is KIND: PLACE: HOW."""

    name: str
    apply: Callable[[Path], object]
    restate: bool = True

    def make(self, package: Path, folder: Path) -> Path:
        """A copy of the package with this forgery."""
        forged = Path(shutil.copytree(package, folder / package.name))
        self.change(forged)
        return forged

    def change(self, package: Path) -> None:
        """Forge a package in its place."""
        self.apply(package)
        if self.restate:
            restate(package)
        write_package_manifest(package)

    def errors(self, package: Path, folder: Path, *, known: frozenset[tuple[str, str]] = frozenset()) -> list[str]:
        """The rules whose errors the forgery causes, beside ``known`` ones of the package itself."""
        found = check([self.make(package, folder)]).counted("error")
        return [item.rule for item in found if (item.rule, item.message) not in known]


def restate(package: Path) -> None:
    """Write result.json, the scripts, README and crate again, from the logs and kept files as they are now."""
    rules, kept = read_ruleset(RULESET), KeptFolder(find_kept(package))
    logs = find_logs(package)
    read = [summarise_for_benchmark(read_events(path, steps=False), rules) for path in logs]
    records, benchmark = [record for record, _ in read], next((found for _, found in read if found is not None), None)
    above = kept.path.parent.parent
    if benchmark is not None:
        score = compute_stated_score(records, benchmark, weak=False)
        stated = build_stated_result(score, benchmark, {path: path.name for path in logs}, logs[0].parent)
        (above / STATED).write_text(json.dumps(stated))
        place = logs[0].parent.relative_to(package).as_posix()
        readme = render_readme([kept], benchmark, (tuple(records), (), ()), place, package.name)
        (above / README).write_text(readme)
    for name, text in render_scripts([kept], records[0].data_manifest).items():
        (above / name).write_text(text)
    (package / CRATE).write_text(_crate.render_crate(package))


def list_forgeries(package: Path) -> list[Forgery]:
    """List all forgeries of a package."""
    found = [*_forge_events(package), *_forge_files(package), *_forge_command(package), *_forge_times(package)]
    return [*found, *_forge_whole_files(package)]


def find_logs(package: Path) -> list[Path]:
    """The logs of all results."""
    return sorted(package.glob("results/*/*/*/result_*.txt"))


def find_kept(package: Path) -> Path:
    """What the package keeps of the first run folder."""
    return next(package.glob("benchmarks/*/implementations/*/*/*/provenance/run_0"))


def read_log(path: Path) -> Events:
    """The events of a log."""
    return [json.loads(line.partition(TOKEN)[2]) for line in path.read_text().splitlines() if TOKEN in line]


def edit_logs(package: Path, edit: Callable[[Events], Events], runs: str = ALL) -> None:
    """Change the events of all logs, or of the second one."""
    logs = find_logs(package)
    for path in logs if runs == ALL else logs[min(1, len(logs) - 1) :][:1]:
        path.write_text("".join(f"{TOKEN}{json.dumps(event)}\n" for event in edit(read_log(path))))


def list_changes(value: Any) -> Iterator[tuple[str, Change]]:
    """Yield ways to change a value: gone, null, and others of its kind."""
    yield "gone", lambda _: GONE
    if value is not None:
        yield "null", lambda _: None
    if isinstance(value, bool):
        yield "not", lambda old: not old
    elif isinstance(value, int | float):
        yield "larger", lambda old: old * 2 + 3 if isinstance(old, int) else old * 1.7 + 0.1
        yield "smaller", lambda old: old // 3 - 1 if isinstance(old, int) else old * 0.4 - 0.01
        yield "text", lambda _: "REDACTED"
        if isinstance(value, float) and value:
            yield SLIGHT, lambda old: old * 0.9
    elif isinstance(value, str):
        yield "other", lambda old: f"{old}x"
        yield "redacted", lambda _: "REDACTED"
    elif isinstance(value, list):
        yield "shorter", lambda old: old[:-1] if old else [7]
        yield "longer", lambda old: [*old, 7]
    elif isinstance(value, dict):
        yield "more", lambda old: {**old, "forged": 1}
    elif value is None:
        yield "stated", lambda _: 7


def list_places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every part of a document. Of a long list or mapping the first and the last."""
    yield at
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    for key in keys if len(keys) <= 40 else (keys[0], keys[-1]):
        yield from list_places(value[key], (*at, key))


def find_part(value: Any, at: tuple[Any, ...]) -> Any:
    """The part at a path."""
    for key in at:
        value = value[key]
    return value


def change_part(value: Any, at: tuple[Any, ...], change: Change) -> Any:
    """The document with one part changed in its place."""
    if not at:
        return change(value)
    above = find_part(value, at[:-1])
    changed = change(above[at[-1]])
    if changed is GONE:
        del above[at[-1]]
    else:
        above[at[-1]] = changed
    return value


def _forge_events(package: Path) -> Iterator[Forgery]:
    events = read_log(find_logs(package)[0])
    for key in dict.fromkeys(event["key"] for event in events):
        sample = next(event for event in events if event["key"] == key)
        many = sum(event["key"] == key for event in events) > 1
        for runs in (ALL, ONE):
            yield Forgery(
                f"event: {key}: dropped in {runs}",
                _edit(lambda all_, key=key: [e for e in all_ if e["key"] != key], runs),
            )
            if many:
                yield Forgery(
                    f"event: {key}: one dropped in {runs}", _edit(lambda all_, key=key: _drop_second(all_, key), runs)
                )
            yield Forgery(f"event: {key}: another one beside it in {runs}", _edit(_doubled(key), runs))
            yield Forgery(f"event: {key}: at the end in {runs}", _edit(_at_the_end(key), runs))
            yield Forgery(f"event: {key}: of another type in {runs}", _edit(_of_another_type(key), runs))
        about = {name: value for name, value in sample["metadata"].items() if name not in ("file", "lineno")}
        for at in list_places({"value": sample["value"], "metadata": about}):
            if at in ((), ("metadata",)):
                continue
            for how, change in list_changes(find_part({"value": sample["value"], "metadata": about}, at)):
                if at == ("value",) and how == "gone":
                    continue
                for runs in (ONE,) if how == SLIGHT else (ALL, ONE):
                    where = ".".join(map(str, at))
                    yield Forgery(
                        f"event: {key}.{where}: {how} in {runs}",
                        _edit(_change_events(key, at, change, every=True), runs),
                    )
                if many:
                    yield Forgery(
                        f"event: {key}.{where}: {how} in one event",
                        _edit(_change_events(key, at, change, every=False), ONE),
                    )


def _edit(edit: Callable[[Events], Events], runs: str) -> Callable[[Path], None]:
    return lambda package: edit_logs(package, edit, runs)


def _drop_second(events: Events, key: str) -> Events:
    place = [number for number, event in enumerate(events) if event["key"] == key][1]
    return events[:place] + events[place + 1 :]


def _doubled(key: str) -> Callable[[Events], Events]:
    def apply(events: Events) -> Events:
        place = next(number for number, event in enumerate(events) if event["key"] == key)
        again = json.loads(json.dumps(events[place]))
        change = next(change for how, change in list_changes(again["value"]) if how not in ("gone", "null"))
        again["value"] = change(again["value"])
        return [*events[:place], again, *events[place:]]

    return apply


def _at_the_end(key: str) -> Callable[[Events], Events]:
    def apply(events: Events) -> Events:
        last = events[-1]["time_ms"]
        mine = [{**event, "time_ms": last} for event in events if event["key"] == key]
        return [*(event for event in events if event["key"] != key), *mine]

    return apply


def _of_another_type(key: str) -> Callable[[Events], Events]:
    return lambda events: [
        {**event, "event_type": "INTERVAL_END" if event["event_type"] != "INTERVAL_END" else "POINT_IN_TIME"}
        if event["key"] == key
        else event
        for event in events
    ]


def _change_events(key: str, at: tuple[Any, ...], change: Change, *, every: bool) -> Callable[[Events], Events]:
    def apply(events: Events) -> Events:
        mine = [event for event in events if event["key"] == key]
        for event in mine if every else mine[len(mine) // 2 :][:1]:
            try:
                change_part(event, at, change)
            except (KeyError, IndexError, TypeError):  # this event has no such part
                continue
        return events

    return apply


def _forge_files(package: Path) -> Iterator[Forgery]:
    """Change each field of each document beside the logs."""
    kept = find_kept(package)
    documents = [path for path in sorted(kept.rglob("*.json")) if "preflight" not in path.parts]
    documents += [
        kept / "config.yaml",
        kept.parent.parent / "result.json",
        *sorted((package / "systems").glob("*.json")),
    ]
    for path in documents:
        name = path.relative_to(package)
        document = _load(path)
        for at in list_places(document):
            for how, change in list_changes(find_part(document, at)):
                if not at and how == "gone":
                    continue
                restate = not any(mark in name.as_posix() for mark in DERIVED)
                where = ".".join(map(str, at))
                yield Forgery(f"file: {path.name}: {where}: {how}", _change_document(name, at, change), restate)


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.suffix == ".yaml" else json.loads(path.read_text())


def change_document(path: Path, at: tuple[Any, ...], change: Change) -> None:
    """Change one part of a document."""
    document = change_part(_load(path), at, change)
    path.write_text(yaml.safe_dump(document, sort_keys=False) if path.suffix == ".yaml" else json.dumps(document))


def _change_document(name: Path, at: tuple[Any, ...], change: Change) -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        change_document(package / name, at, change)
        state_digest(package, package / name)

    return apply


def state_digest(package: Path, path: Path) -> None:
    """Let the logs state the sha256 that a file has now."""
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()

    def edit(events: Events) -> Events:
        for event in events:
            if event["key"] == "config_file" and event["value"] == path.name:
                event["metadata"]["sha256"] = sha256
            if event["key"] == "run_files" and isinstance(event["value"], dict) and path.name in event["value"]:
                event["value"][path.name] = sha256
            if event["key"] == "data_manifest" and path.name == "data.json":
                event["value"] = sha256
        return events

    edit_logs(package, edit)


def _forge_command(package: Path) -> Iterator[Forgery]:
    """Change, drop and add each option of the command."""
    words = _load(find_kept(package) / "run.json")["command"]
    name = (find_kept(package) / "run.json").relative_to(package)

    def with_words(made: list[str]) -> Callable[[Path], None]:
        return _change_document(name, ("command",), lambda _: made)

    for number, word in enumerate(words[1:], start=1):
        yield Forgery(f"command: {word}: dropped", with_words(words[:number] + words[number + 1 :]))
        yield Forgery(f"command: {word}: other", with_words([*words[:number], f"{word}9", *words[number + 1 :]]))
        if word.startswith("-"):
            yield Forgery(f"command: {word}: with its value dropped", with_words(words[:number] + words[number + 2 :]))
    options = {word for parameter in run.params for word in parameter.opts[-1:] if word.startswith("--")}
    flags = {word for parameter in run.params if getattr(parameter, "is_flag", False) for word in parameter.opts}
    for more in (
        *([word] if word in flags else [word, "5"] for word in sorted(options - {*words})),
        ["--seed", "3"], ["--runs", "9"], ["--ranks", "64"], ["--size", "mini"], ["--mode", "weak"],
        ["--set", "precision=bfloat16"], ["--set", "hyperparameters.dropout=0.3"], ["--set", "submission.org=Other"],
        ["--set", "global_batch_size=8"], ["--plan", "spatial"], ["--mesh", "data=2"], ["--set", "no.such=1"], ["--forged"],
    ):  # fmt: skip
        yield Forgery(f"command: {' '.join(more)}: added", with_words([*words, *more]))


def _forge_times(package: Path) -> Iterator[Forgery]:
    """Move time stamps and measured seconds, alone and together with their neighbours."""
    keys = dict.fromkeys(event["key"] for event in read_log(find_logs(package)[0]))
    for key in keys:
        for by_ms in (-4000, 4000):
            yield Forgery(f"time: {key}: moved by {by_ms} ms", _edit(_moved(key, by_ms), ONE))
    for factor in (0.5, 0.9):
        for key, names in _MEASURED.items():
            yield Forgery(f"time: {key}: measured x {factor}", _edit(_scaled_values(key, names, factor), ALL))
        yield Forgery(f"time: all stamps x {factor}", _edit(_scaled_stamps(factor), ALL))
        both = [_scaled_stamps(factor), _scaled_values("tracked_stats", ("throughput",), 1 / factor)]
        yield Forgery(f"time: all stamps and rates x {factor}", _edit(_chained(both), ALL))


_MEASURED = {
    "step_phases": (), "rank_phases": (), "tracked_stats": ("throughput",), "energy": (), "first_losses": (),
    "eval_stop": (), "startup": (), "goodput": (),
}  # fmt: skip


def _moved(key: str, by_ms: int) -> Callable[[Events], Events]:
    def apply(events: Events) -> Events:
        place = next(number for number, event in enumerate(events) if event["key"] == key)
        return [
            {**event, "time_ms": event["time_ms"] + by_ms} if number == place else event
            for number, event in enumerate(events)
        ]

    return apply


def _scaled_stamps(factor: float) -> Callable[[Events], Events]:
    def apply(events: Events) -> Events:
        first = next(event["time_ms"] for event in events if event["key"] == "run_start")
        return [
            {
                **event,
                "time_ms": round(first + (event["time_ms"] - first) * factor)
                if event["time_ms"] > first
                else event["time_ms"],
            }
            for event in events
        ]

    return apply


def _scaled_values(key: str, names: tuple[str, ...], factor: float) -> Callable[[Events], Events]:
    def scale(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: scale(item) if not names or name in names else item for name, item in value.items()}
        if isinstance(value, list):
            return [scale(item) for item in value]
        return value * factor if isinstance(value, float) else value

    def apply(events: Events) -> Events:
        return [
            {**event, "value": scale(event["value"]), "metadata": scale(event["metadata"])}
            if event["key"] == key
            else event
            for event in events
        ]

    return apply


def _chained(edits: list[Callable[[Events], Events]]) -> Callable[[Events], Events]:
    def apply(events: Events) -> Events:
        for edit in edits:
            events = edit(events)
        return events

    return apply


def _forge_whole_files(package: Path) -> Iterator[Forgery]:
    """Take each file away, empty it, and add others."""
    kept = find_kept(package)
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package)
        if path.is_file() and path.name != "manifest.sha256":
            restate = not any(mark in name.as_posix() for mark in DERIVED)
            yield Forgery(f"whole: {path.name}: gone", lambda folder, name=name: (folder / name).unlink(), restate)
            yield Forgery(
                f"whole: {path.name}: empty", lambda folder, name=name: (folder / name).write_text(""), restate
            )
    for more in (
        "changes.diff",
        "result_9.txt",
        "notes.md",
        "facts/node9.json",
        "card.yaml",
        "code/train.py",
        "job.sbatch",
        "plan.yaml",
    ):
        target = (kept / more).relative_to(package)
        yield Forgery(f"whole: {more}: added", lambda folder, name=target: _add(folder / name))


def _add(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("forged\n")


def draw(forgeries: list[Forgery], count: int, seed: int) -> list[Forgery]:
    """Draw some of the forgeries, of each kind as many."""
    kinds: dict[str, list[Forgery]] = {}
    for each in forgeries:
        kinds.setdefault(each.name.partition(":")[0], []).append(each)
    drawn = random.Random(seed)
    share = -(-count // len(kinds))
    return [each for of_kind in kinds.values() for each in drawn.sample(of_kind, min(share, len(of_kind)))][:count]
