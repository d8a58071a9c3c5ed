"""Legal ways to write a package: other spellings, optional events, files of a person. None of them is an error."""

import json
import random
import re
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.log.mllog import convert_to_json
from mlhpc.suite.package.build import write_package_manifest
from mlhpc.suite.training.parallel.plan import read_plan
from tests.suite.compliance.forge.forgeries import (
    TOKEN,
    Events,
    change_document,
    edit_logs,
    find_kept,
    find_logs,
    restate,
    state_digest,
)
from tests.suite.compliance.forge.test_forgeries import package as package

Variant = Callable[[Path], object]
COUNT = 120


def _of_events(edit: Callable[[Events], Events]) -> Variant:
    return lambda package: edit_logs(package, edit)


def _of_lines(edit: Callable[[str], str]) -> Variant:
    """Write each line of the logs in another way."""

    def apply(package: Path) -> None:
        for path in find_logs(package):
            path.write_bytes("".join(map(edit, path.read_text().splitlines(keepends=True))).encode())

    return apply


def _of_spelling(spell: Callable[[dict[str, Any]], str]) -> Variant:
    """Spell the JSON of each event in another way."""
    return _of_lines(lambda line: f"{TOKEN}{spell(json.loads(line.partition(TOKEN)[2]))}\n" if TOKEN in line else line)


def _reverse(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reverse(value[key]) for key in reversed(value)}
    return list(map(_reverse, value)) if isinstance(value, list) else value


def _beside(before: str, **event: Any) -> Variant:
    """Add an event that a run may log, before another one."""

    def apply(events: Events) -> Events:
        place = next(number for number, each in enumerate(events) if each["key"] == before)
        more = {**events[place], "value": None, "event_type": "POINT_IN_TIME", "metadata": {}, **event}
        return [*events[:place], more, *events[place:]]

    return _of_events(apply)


def _later(events: Events) -> Events:
    return [{**event, "time_ms": event["time_ms"] + 86_400_000} for event in events]


def _spell_documents(spell: Callable[[Any], str]) -> Variant:
    """Spell the documents whose bytes no log states in another way."""

    def apply(package: Path) -> None:
        kept = find_kept(package)
        restate(package)
        documents = [
            kept / "run.json",
            kept / "origin.json",
            kept.parent.parent / "result.json",
            package / "ro-crate-metadata.json",
        ]
        for path in (*documents, *(kept / "facts").glob("*.json"), *(package / "systems").glob("*.json")):
            path.write_text(spell(json.loads(path.read_text())))

    return apply


def _in_another_zone(package: Path) -> None:
    for path in (find_kept(package) / "facts").glob("*.json"):
        facts = json.loads(path.read_text())
        zone = timezone(timedelta(hours=9, minutes=30))
        path.write_text(
            json.dumps(facts | {"collected": datetime.fromisoformat(facts["collected"]).astimezone(zone).isoformat()})
        )


def _describe(**more: str) -> Variant:
    """Add words to fields of the description."""

    def apply(package: Path) -> None:
        for path in (package / "systems").glob("*.json"):
            fields = json.loads(path.read_text())
            path.write_text(json.dumps(fields | {name: f"{fields.get(name, '')}{text}" for name, text in more.items()}))

    return apply


def _add(name: str, content: str = "text\n") -> Variant:
    return lambda package: (package / name).write_text(content)


def _spell_manifest(edit: Callable[[list[str]], list[str]], end: str = "\n") -> Variant:
    """The last of all: it states what the package is by then."""

    def apply(package: Path) -> None:
        write_package_manifest(package)
        path = package / "manifest.sha256"
        path.write_bytes("".join(f"{line}{end}" for line in edit(path.read_text().splitlines())).encode())

    return apply


def _fail_one(events: Events) -> Events:
    """A run that ends without its target, as one may."""
    number = max(event["metadata"].get("epoch_num", 0) for event in events)
    stop = next(event for event in events if event["key"] == "run_stop")
    kept = [e for e in events if e["key"] not in ("target_accuracy_reached", "goodput", "run_stop")]
    for event in kept:
        if event["key"] == "eval_error" and event["metadata"]["epoch_num"] == number:
            event["value"] = event["metadata"]["metrics"]["eval_error"] = 0.40123
    return [*kept, {**stop, "metadata": {**stop["metadata"], "status": "aborted", "reason": "the last epoch"}}]


PLAN = """\
version: 1
description: gradients of ranks with samples of their own
mesh: data=2
parameters: {"*": shard}
extents: {position: 16}
inputs: {x: {dims: [sample, position], dtype: uint8}}
"""


def _with_an_own_plan(package: Path) -> None:
    """Runs with a plan of one's own, which leaves out what has a default."""
    kept, plan = find_kept(package), find_kept(package) / "plan.yaml"
    plan.write_text(PLAN)
    value, sha256 = convert_to_json(convert_to_plain_data(read_plan(plan)[0])), compute_sha256(plan)
    named = {key: each for key, each in value.items() if key not in ("version", "description")}
    mesh = {"data": 2, "shard": 1, "tensor": 1, "spatial": []}
    named |= {"name": "plan", "sha256": sha256, "mesh": mesh, "engine": {"torch": "2.13.0", "used": []}}
    _beside("train_samples", key="parallel_plan", value=named)(package)
    change_document(kept / "run.json", ("command",), lambda old: [*old[:-2], "--plan", "plan.yaml", *old[-2:]])
    (kept / "config.yaml").write_text((kept / "config.yaml").read_text() + "plan: plan.yaml\n")

    def state(events: Events) -> Events:
        next(each for each in events if each["key"] == "run_config")["value"]["plan"] = "plan.yaml"
        return events

    edit_logs(package, state)
    state_digest(package, kept / "config.yaml")


LOGS: dict[str, Variant] = {
    "a plan of one's own": _with_an_own_plan,
    "other order of keys": _of_spelling(lambda event: json.dumps(_reverse(event))),
    "no blanks": _of_spelling(lambda event: json.dumps(event, separators=(",", ":"))),
    "many blanks": _of_spelling(lambda event: json.dumps(event, separators=(" ,  ", " :\t"))),
    "letters as escapes": _of_spelling(
        lambda event: re.sub('([a-z])(?=[a-z]*")', lambda m: f"\\u{ord(m[1]):04x}", json.dumps(event))
    ),
    "floats with 17 digits": _of_spelling(
        lambda event: re.sub(r"(?<=[ \[])\d+\.\d+(?=[,\]}])", lambda m: f"{float(m[0]):.17e}", json.dumps(event))
    ),
    "whole time stamps as floats": _of_events(lambda events: [{**e, "time_ms": float(e["time_ms"])} for e in events]),
    "time stamps with fractions": _of_events(lambda events: [{**e, "time_ms": e["time_ms"] + 0.25} for e in events]),
    "lines end with CR and LF": _of_lines(lambda line: line.replace("\n", "\r\n")),
    "text between the events": _of_lines(lambda line: f"epoch \x1b[1m3\x1b[0m 50 %\r{'#' * 30}\n\n{line}"),
    "a rank before each event": _of_lines(lambda line: f"[1,0]<stdout>: {line}"),
    "blanks at the end of lines": _of_lines(lambda line: line.replace("\n", "  \t\n")),
    "a byte order mark": lambda package: [
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()) for path in find_logs(package)
    ],
    "another namespace": _of_events(lambda events: [{**e, "namespace": "worker_0"} for e in events]),
    "other lines of the code": _of_events(
        lambda events: [{**e, "metadata": {**e["metadata"], "lineno": 7}} for e in events]
    ),
    "no goodput": _of_events(lambda events: [e for e in events if e["key"] != "goodput"]),
    "one more choice": _beside(
        "data_verified", key="measured_choice", value={"name": "layout", "chosen": "plain"}, metadata={"source": "rule"}
    ),
    "a choice of each name": _beside(
        "data_verified",
        key="measured_choice",
        value={"name": "collectives", "chosen": "gloo"},
        metadata={"source": "rule", "shape": {"ranks": 2}},
    ),
    "a suspended second": _beside("run_stop", key="suspended", value=1.5),
    "a checkpoint, and no goodput": lambda package: [
        LOGS["no goodput"](package),
        _beside(
            "target_accuracy_reached",
            key="checkpoint_saved",
            value={"stall_s": 0.1, "write_s": 0.2, "bytes": 10**6, "files": 2},
            metadata={"epoch_num": 5, "next_step": 0},
        )(package),
    ],
    "a day later": _of_events(_later),
    "one run fails": lambda package: edit_logs(package, _fail_one, "one"),
    "a run killed after run_stop": lambda package: [
        path.write_text(path.read_text() + TOKEN + '{"namespace": "", "ti') for path in find_logs(package)[:1]
    ],
}
DOCUMENTS: dict[str, Variant] = {
    "documents without blanks": _spell_documents(lambda value: json.dumps(value, separators=(",", ":"))),
    "documents in another order": _spell_documents(lambda value: json.dumps(_reverse(value), indent=4)),
    "documents with CR and LF": _spell_documents(lambda value: json.dumps(value, indent=1).replace("\n", "\r\n")),
    "facts in another time zone": _in_another_zone,
    "facts in Zulu time": lambda package: change_document(
        find_kept(package) / "facts" / "node1.json", ("collected",), lambda old: re.sub(r"\+00:00$", "Z", old)
    ),
    "the cooling by hand": _describe(cooling=" and liquid"),
    "a longer model": _describe(host_processor_model_name=", boost on"),
    "a note": _describe(hw_notes="; two racks", sw_notes="; tuned"),
    "a field of the submitter's own": _describe(contact="hpc@example.org"),
    "a README of the submitter": _add("README.md"),
    "a license of the submitter": _add("LICENSE"),
    "an empty folder": lambda package: (package / "docs").mkdir(exist_ok=True),
    "nobody may write": lambda package: [path.chmod(0o444) for path in find_logs(package)],
    "no description for other tools": lambda package: (package / "ro-crate-metadata.json").unlink(missing_ok=True),
}
MANIFESTS: dict[str, Variant] = {
    "sums in capitals": _spell_manifest(
        lambda lines: [re.sub("^[0-9a-f]{64}", lambda m: m[0].upper(), line) for line in lines]
    ),
    "a manifest in another order": _spell_manifest(lambda lines: sorted(lines, reverse=True)),
    "a manifest with comments": _spell_manifest(lambda lines: ["# made by us", "", *lines, "", "# end"]),
    "a manifest with CR and LF": _spell_manifest(lambda lines: lines, "\r\n"),
    "a manifest of paths with ./": _spell_manifest(
        lambda lines: [re.sub("^([0-9a-f]{64}  )", r"\1./", line) for line in lines]
    ),
    "a manifest of sha256sum --tag": _spell_manifest(
        lambda lines: [re.sub("^([0-9a-f]{64})  (.*)", r"SHA256 (\2) = \1", line) for line in lines]
    ),
    "a manifest of binary mode": _spell_manifest(
        lambda lines: [re.sub("^([0-9a-f]{64})  ", r"\1 *", line) for line in lines]
    ),
}


def draw_names() -> list[tuple[str, ...]]:
    """Draw variants: each one alone, then one of the logs with one of the documents and one of the manifest."""
    found: list[tuple[str, ...]] = [(name,) for name in (*LOGS, *DOCUMENTS, *MANIFESTS)]
    drawn = random.Random(20261129)
    while len(found) < COUNT:
        names = tuple(drawn.choice(list(each)) for each in (LOGS, DOCUMENTS, MANIFESTS))
        if names not in found:
            found.append(names)
    return found


def change(names: tuple[str, ...], package: Path) -> None:
    """Make the variants: of the logs, then of the documents that follow from them, then of the manifest."""
    for table in (LOGS, DOCUMENTS, MANIFESTS):
        for name in names:
            if name in table:
                table[name](package)
                if table is LOGS:
                    restate(package)
        if table is not MANIFESTS:
            write_package_manifest(package)


@pytest.mark.drawn(16)
@pytest.mark.parametrize("names", draw_names(), ids=" + ".join)
def test_a_legal_variant_is_no_error(names: tuple[str, ...], package: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(package, tmp_path / package.name))
    change(names, copy)
    assert [f"{item.rule}: {item.message}" for item in check([copy]).counted("error")] == []
