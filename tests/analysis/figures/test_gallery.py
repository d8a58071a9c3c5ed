"""The gallery has every figure, and says of it what the figure says of itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from analysis.figures import figures

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        import draw_gallery
    finally:
        sys.path.remove(str(DOCS))
    return draw_gallery


def test_the_gallery_is_made_from_the_figures(gallery: ModuleType, tmp_path: Path) -> None:
    page = (DOCS / "gallery.md").read_text("utf-8")
    assert page == gallery.text(gallery.example(tmp_path)), "run: python docs/draw_gallery.py"
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert titles == [module.TITLE for module in figures().values()]
    for name, module in figures().items():
        assert f"![{module.TITLE}](gallery/{name}.svg)" in page
        assert module.CAPTION in page


def test_every_figure_has_a_picture_and_no_picture_is_left_over(gallery: ModuleType) -> None:
    pictures = {path.stem: path for path in (DOCS / "gallery").iterdir()}
    assert set(pictures) == set(figures())
    for name, path in pictures.items():
        root = ElementTree.parse(path).getroot()
        assert root.findtext("{http://www.w3.org/2000/svg}title") == figures()[name].TITLE
        assert gallery.PAPER in path.read_text("utf-8")
