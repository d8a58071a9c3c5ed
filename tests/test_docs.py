"""The pages of docs/: all are in the site, and every link leads somewhere."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from docs.pages import events, gallery
from mlhpc.suite.cli.main import group
from tests.fixtures.wings import MISSING_COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LOADED = re.compile(  # what a browser would load from the network
    r"""<(?:script|img|iframe|link(?! rel="canonical"))\b[^>]*(?:src|href)=["'](?:https?:)?//[^>]*>"""
)
CALL = re.compile(r"# ([\w/]+\.py): ([\w.]+)$", re.MULTILINE)
GENERATED = {"baselines.md", "commands.md", "events.md", "gallery.md", "rules.md"}


def test_every_page_is_in_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = set(re.findall(r"[a-z0-9_]+\.md", str(nav)))
    assert named - GENERATED == {path.name for path in DOCS.glob("*.md")}


@pytest.mark.long
def test_the_site_builds_and_every_link_leads_somewhere(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    drawn_gallery: tuple[str, dict[str, str]],
) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (mlhpc[docs])")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    page, pictures = drawn_gallery
    monkeypatch.setattr(gallery, "example", lambda folder: None)
    monkeypatch.setattr(gallery, "screenshots", lambda example, folder: {})
    monkeypatch.setattr(gallery, "page", lambda example, shots: page)
    monkeypatch.setattr(gallery, "pictures", lambda example: pictures)
    with caplog.at_level(logging.WARNING, "mkdocs"):
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=False))
    assert [record.message for record in caplog.records] == []
    site = tmp_path / "site"
    assert (site / "index.html").stat().st_size > 1000
    assert {tag for path in site.rglob("*.html") for tag in LOADED.findall(path.read_text(encoding="utf-8"))} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)[ \"']*(?:https?:)?//", styles) == []
    assert (site / "search" / "search_index.js").stat().st_size > 10_000  # searched where pages are opened as files


def test_the_map_names_every_folder() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `((?:suite|analysis|workloads|plugins)[\w/]*)/` \| [^|]+ \|$", text, re.MULTILINE)
    packages = (
        init.parent
        for top in ("suite", "analysis", "workloads", "plugins")
        for init in (ROOT / top).rglob("__init__.py")
    )
    named = [folder for folder in named if not folder.startswith("plugins/") or (ROOT / folder).exists()]  # wings
    assert sorted(named) == sorted(str(folder.relative_to(ROOT)) for folder in packages)


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words after mlhpc) of each command line in the code blocks of the pages."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        indented = re.findall(r"^    (mlhpc .*)$", text, re.MULTILINE)
        for line in "\n".join([*fenced, *indented]).splitlines():
            if re.match(r"mlhpc [a-z]", line):
                yield page.name, re.split(r"\s#|\s{3,}|[;|>&]", line)[0].split()[1:]


def test_every_command_of_a_page_exists_with_its_options() -> None:
    lines = list(command_lines())
    assert len(lines) > 50
    for page, words in lines:
        if words[0] in MISSING_COMMANDS:
            continue
        command: click.Command | None = group
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            command = command.get_command(click.Context(command), words.pop(0))
        assert command is not None, f"{page}: no such command before {words}"
        if (command.help or "").startswith("(the wing "):
            continue  # not installed here
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        written = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert written <= known | {"--help", "-h"}, f"{page}: {command.name}: {written - known}"


def test_every_dated_table_that_is_named_is_kept() -> None:
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    named = {
        (page.name, table)
        for page in (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")
        for table in re.findall(r"20\d\d-\d\d-\d\d-[\w-]+\.(?:txt|json)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {(page, table) for page, table in named if table not in kept} == set()


def test_every_door_has_a_test() -> None:
    rows = [row for row in (DOCS / "doors.md").read_text().splitlines() if row.startswith("|")][2:]
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", row)
        assert named, row
        for path, name in named:
            if not path.startswith("tests/plugins/") or (DOCS.parent / path).exists():  # else the wing is not here
                assert f"def {name}(" in (DOCS.parent / path).read_text(), name


def test_the_page_of_the_loop_names_files_and_functions_that_exist() -> None:
    page = (DOCS / "training_loop.md").read_text(encoding="utf-8")
    ((program,),) = [re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
    calls = CALL.findall(program)
    assert len(program.splitlines()) == 25
    assert len(calls) >= 22
    assert [call for call in calls if call[1] not in defined(ROOT / call[0])] == []
    named = re.findall(r"`((?:suite|workloads)/[\w/]+(?:\.py|/))`", page.replace("/NAME/", "/cosmoflow/"))
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def defined(path: Path) -> set[str]:
    """Return the functions of a file and, as Class.method, those of its classes."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
    return names


def test_the_page_of_events_has_a_remark_for_each() -> None:
    for _, rows in events.sections():
        assert len(rows) > 15
        assert all(remark for _, remark in rows), rows
    known = {key for _, rows in events.sections() for key, _ in rows}
    assert set(events.VALUES) <= known
    stated = {events.split_remark(key) for keys in events.STATED for key in keys.split(", ")}
    assert {name for name, remark in stated if not remark} <= known
