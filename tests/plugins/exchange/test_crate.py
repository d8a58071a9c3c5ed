"""The RO-Crate of a package: every file, an action for each run, nothing that the package itself does not say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlhpc.plugins.exchange.crate import CRATE, render_crate
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.package_files import check_manifest
from mlhpc.suite.package.build import build_package
from tests.fixtures.logs import drop, our_run, write
from tests.fixtures.runs import node, run_folder

COMPLETED, FAILED = ("http://schema.org/CompletedActionStatus", "http://schema.org/FailedActionStatus")
Entities = dict[str, dict[str, Any]]


def entities(package: Path) -> Entities:
    graph = json.loads((package / CRATE).read_text())["@graph"]
    found = {entity["@id"]: entity for entity in graph}
    assert len(found) == len(graph), "an @id is there once"
    return found


def actions(package: Path) -> Entities:
    return {name: each for name, each in entities(package).items() if each["@type"] == "CreateAction"}


def references(value: Any) -> list[str]:
    """Every @id that a value refers to."""
    if isinstance(value, list):
        return [name for each in value for name in references(each)]
    return [value["@id"]] if isinstance(value, dict) else []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / "a")
    tuning = {"OMP_NUM_THREADS": "4", "UCX_TLS": "rc,self", "TORCH_HOME": "/home/ann/torch", "X": "a:/b"}
    software = {"packages": {"torch": "2.9.0+cpu", "numpy": "2.1"}}
    (folder / "facts" / "node1.json").write_text(msgspec.json.encode(node(tuning=tuning, software=software)).decode())
    return folder


@pytest.fixture
def package(tmp_path: Path, run: Path) -> Path:
    write(run / "resumed_1_1.txt", our_run())
    write(run / "failed_2_1.txt", drop("run_stop")(our_run()))
    return build_package([run], system="bed", out=tmp_path / "out" / "ACME").folder


def test_the_crate_lists_every_file_and_every_reference_is_there(package: Path) -> None:
    found = entities(package)
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()} - {CRATE}
    assert {name for name, each in found.items() if each["@type"] == "File"} == files
    assert set(references(found["./"]["hasPart"])) == files
    named = [name for each in found.values() for value in each.values() for name in references(value)]
    assert {name for name in named if not name.startswith("https://w3id.org/ro/crate")} <= set(found)
    for name in files - {"manifest.sha256"}:
        assert found[name]["contentSize"] == str((package / name).stat().st_size)


def test_each_run_is_an_action_with_what_its_log_says(package: Path) -> None:
    found, runs = entities(package), actions(package)
    assert set(references(found["./"]["mentions"])) == set(runs)
    assert len(runs) == 7
    scored = [each for name, each in runs.items() if "/result_" in name]
    assert len(scored) == 5
    for each in scored:
        assert each["actionStatus"] == COMPLETED
        assert "error" not in each
        log = package / each["result"]["@id"]
        events = [json.loads(line.partition(" ")[2]) for line in log.read_text().splitlines()]
        start = next(event["time_ms"] for event in events if event["key"] == "run_start")
        assert f"{start / 1e3:.3f}"[-3:] in each["startTime"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", each["endTime"])
        assert each["endTime"] > each["startTime"]
        configuration = [name for name in references(each["object"]) if name.endswith("config.yaml")]
        assert len(configuration) == 1
        suite = found[each["instrument"]["@id"]]
        packages = {
            found[name]["name"]: found[name]["softwareVersion"] for name in references(suite["softwareRequirements"])
        }
        assert packages == {"torch": "2.9.0+cpu", "numpy": "2.1"}
        variables = {found[name]["name"]: found[name]["value"] for name in references(each["environment"])}
        assert variables == {"OMP_NUM_THREADS": "4", "UCX_TLS": "rc,self"}, "no variable that names a place"
    (failed,) = (each for name, each in runs.items() if "failed_2_1" in name)
    assert (failed["actionStatus"], failed["error"]) == (FAILED, "the log has no run_stop")
    assert "endTime" not in failed


def test_the_same_package_has_the_same_crate_wherever_it_lies(package: Path, tmp_path: Path) -> None:
    text = (package / CRATE).read_text()
    assert render_crate(package) == text
    assert str(tmp_path) not in text
    other = tmp_path / "elsewhere" / "ACME"
    other.parent.mkdir()
    package.rename(other)
    assert render_crate(other) == text


def test_what_is_redacted_is_not_in_the_crate(run: Path, tmp_path: Path) -> None:
    facts = node("gpu7.site.org", tuning={"API_TOKEN": "abcdefghijklmnop", "NODE": "gpu7.site.org"})
    (run / "facts" / "node1.json").unlink()
    (run / "facts" / "gpu7.site.org.json").write_text(msgspec.json.encode(facts).decode())
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME", redact=["hosts", "paths", "account"])
    text = (built.folder / CRATE).read_text()
    assert "facts/node1.json" in text
    assert "gpu7" not in text
    assert "abcdefghijklmnop" not in text


def test_a_package_that_grows_has_a_crate_of_all(package: Path, tmp_path: Path) -> None:
    before = set(actions(package))
    build_package([run_folder(tmp_path / "b", ranks=4)], system="bed", out=package)
    assert len(set(actions(package)) - before) == 5
    assert before <= set(actions(package))
    assert not list(check_manifest(package))
    errors = {each.rule for each in check([package]).findings if each.severity == "error"}
    assert "run-copied" in errors, "the logs of both are the same but for the ranks"


def test_a_file_of_the_crate_that_is_changed_is_found(package: Path) -> None:
    (package / CRATE).write_text("{}")
    assert [path.name for _, path, _ in check_manifest(package)] == [CRATE]


def test_links_and_strange_files_are_not_followed(package: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("nothing for others")
    (package / "link.txt").symlink_to(secret)
    origin = next(package.rglob("origin.json"))
    outside = tmp_path / "outside"
    origin.parent.rename(outside)
    origin.parent.symlink_to(outside)
    os.mkfifo(package / "systems" / "pipe.json")
    (package / "systems" / "ümlaut name?.txt").write_text("a")
    found = json.loads(render_crate(package))["@graph"]
    names = {entity["@id"] for entity in found}
    assert not any("provenance" in name or "link.txt" in name or "pipe" in name for name in names)
    assert "systems/%C3%BCmlaut%20name%3F.txt" in names


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "damage", ["", "[]", '{"logs": 3}', '{"logs": {"a": 4}}', "{" * 5000, '{"logs": null}', "\xff"]
)
def test_provenance_that_cannot_be_read_is_left_out(package: Path, damage: str) -> None:
    next(package.rglob("origin.json")).write_bytes(damage.encode("latin-1"))
    found = json.loads(render_crate(package))["@graph"]
    assert sum(entity["@type"] == "CreateAction" for entity in found) == 5
    assert not any("object" in entity and "config" in str(entity["object"]) for entity in found)


def test_facts_that_cannot_be_read_cost_only_themselves(package: Path) -> None:
    facts = next(package.rglob("facts/*.json"))
    facts.write_text('{"version": 99}')
    facts.with_name("again.json").symlink_to("again.json")
    graph = {entity["@id"]: entity for entity in json.loads(render_crate(package))["@graph"]}
    runs = [each for each in graph.values() if each["@type"] == "CreateAction"]
    assert len(runs) == 7
    assert all("environment" not in each for each in runs)


def test_an_impossible_time_is_no_error(tmp_path: Path) -> None:
    lines = [
        line if line.key != "run_stop" else type(line)("run_stop", "x", 1e30, {"status": "success"})
        for line in our_run()
    ]
    folder = run_folder(tmp_path / "a")
    package = build_package([folder], system="bed", out=tmp_path / "out" / "ACME").folder
    write(next(package.rglob("result_0.txt")), lines)
    assert '"CreateAction"' in render_crate(package)


def test_rocrate_reads_every_file_and_run(package: Path) -> None:
    rocrate = pytest.importorskip("rocrate.rocrate")
    crate = rocrate.ROCrate(package)
    assert {entity.id for entity in crate.get_entities()} >= set(entities(package)) - {"./", CRATE}
    assert len(crate.get_by_type("CreateAction")) == len(actions(package))
    assert len(crate.root_dataset["hasPart"]) == sum(each["@type"] == "File" for each in entities(package).values())
