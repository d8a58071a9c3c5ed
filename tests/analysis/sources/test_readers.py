"""Each path of a report is a log or a JSON file of a known kind; what it is not is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mlhpc.analysis.sources.readers import READERS, list_readers, read_file, read_sources
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import SOURCES, Plugin

Build = Callable[..., Path]


def test_every_reader_refuses_another_version_in_one_line(tmp_path: Path) -> None:
    assert list(READERS) == ["ceilings", "counters", "steps"]
    path = tmp_path / "x.json"
    for kind in READERS:
        path.write_text(json.dumps({"kind": kind, "version": 99}))
        with pytest.raises(InputError, match=r"x\.json: field `version` of .* is 99; ") as caught:
            read_file(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{}", "[]", '{"kind": ["steps"]}', '{"kind": "profile"}'])
def test_a_json_file_of_no_known_kind_is_told_the_kinds(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"x\.json: field `kind` is .*; expected one of 'ceilings', "):
        read_file(tmp_path / "x.json")


def test_paths_are_sorted_by_what_they_hold(tmp_path: Path, run_folder: Build, ceilings: Build) -> None:
    log = tmp_path / "late.txt"  # an event that lies across two pieces of the file
    log.write_bytes(b"x" * (2**20 - 3) + b":::MLLOG {}\n")
    run, file = run_folder(tmp_path, "one"), ceilings(tmp_path / "c.json")
    found = read_sources([run, file, log])
    assert found.logs == (run, log)
    assert [each.system for each in found.inputs.ceilings] == ["testbed"]
    assert (found.steps, found.documents) == ((), {})


def test_a_file_without_events_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")
    with pytest.raises(InputError, match=r"notes\.txt: no MLLOG event in this file"):
        read_sources([tmp_path / "notes.txt"])


def test_a_reader_of_another_package_that_ends_the_program_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = Plugin(EntryPoint("odd", "ending:read", SOURCES), "stranger")
    monkeypatch.setattr("mlhpc.analysis.sources.readers.find_plugins", lambda group: {"odd": plugin})
    with pytest.raises(InputError, match="kind 'odd' of package stranger: SystemExit: 3"):
        list_readers()["odd"](Path("odd.json"), {})
