"""The gallery has every figure, and says of it what the figure says of itself."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import analysis.figures as figure_package
from analysis.figures import FIGURES, views
from docs.pages import gallery


def test_every_module_of_the_folder_is_a_figure_of_the_page() -> None:
    modules = {path.stem for path in Path(figure_package.__path__[0]).glob("*.py")} - {"__init__"}
    assert sorted(FIGURES) == sorted(modules)


def test_the_gallery_has_every_figure_with_a_picture(tmp_path: Path) -> None:
    example = gallery.example(tmp_path)
    page = gallery.page(example)
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert titles == [module.TITLE for module in views().values()]
    for name, module in views().items():
        assert f"![{module.TITLE}](gallery/{name}.svg)" in page
        assert module.CAPTION in page
    pictures = gallery.pictures(example)
    assert set(pictures) == set(views())
    for name, picture in pictures.items():
        root = ElementTree.fromstring(picture)
        assert root.findtext("{http://www.w3.org/2000/svg}title") == views()[name].TITLE
        assert gallery.PAPER in picture
