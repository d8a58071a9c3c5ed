"""The pages of docs/: all are in the site, and every link leads somewhere."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import yaml

from docs.pages import events, gallery

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GENERATED = {"baselines.md", "commands.md", "events.md", "gallery.md", "rules.md"}


def test_every_page_is_in_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = set(re.findall(r"[a-z0-9_]+\.md", str(nav)))
    assert named - GENERATED == {path.name for path in DOCS.glob("*.md")}


def test_the_site_builds_and_every_link_leads_somewhere(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    drawn_gallery: tuple[str, dict[str, str]],
) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (mlhpc[docs])")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    page, pictures = drawn_gallery
    monkeypatch.setattr(gallery, "example", lambda folder: None)
    monkeypatch.setattr(gallery, "page", lambda example: page)
    monkeypatch.setattr(gallery, "pictures", lambda example: pictures)
    with caplog.at_level(logging.WARNING, "mkdocs"):
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=False))
    assert [record.message for record in caplog.records] == []
    assert (tmp_path / "site" / "tutorial.html").stat().st_size > 1000


def test_every_dated_table_that_is_named_is_kept() -> None:
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    named = {
        (page.name, table)
        for page in (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")
        for table in re.findall(r"20\d\d-\d\d-\d\d-[\w-]+\.(?:txt|json)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {(page, table) for page, table in named if table not in kept} == set()


def test_the_page_of_events_has_a_remark_for_each() -> None:
    for _, rows in events.sections():
        assert len(rows) > 15
        assert all(remark for _, remark in rows), rows
