"""The gallery has every figure, and says of it what the figure says of itself."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from analysis.figures import figures
from docs.pages import gallery


def test_the_gallery_has_every_figure_with_a_picture(tmp_path: Path) -> None:
    example = gallery.example(tmp_path)
    page = gallery.page(example)
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert titles == [module.TITLE for module in figures().values()]
    for name, module in figures().items():
        assert f"![{module.TITLE}](gallery/{name}.svg)" in page
        assert module.CAPTION in page
    pictures = gallery.pictures(example)
    assert set(pictures) == set(figures())
    for name, picture in pictures.items():
        root = ElementTree.fromstring(picture)
        assert root.findtext("{http://www.w3.org/2000/svg}title") == figures()[name].TITLE
        assert gallery.PAPER in picture
