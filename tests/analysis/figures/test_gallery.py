"""The gallery has every figure, and says of it what the figure says of itself."""

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

import mlhpc.analysis.figures as figure_package
from docs.pages import gallery
from mlhpc.analysis.figures import FIGURES, list_views
from mlhpc.analysis.figures import load_figure_modules as figure_modules


def test_every_module_of_the_folder_is_a_figure_of_the_page() -> None:
    modules = {path.stem for path in Path(figure_package.__path__[0]).glob("*.py")} - {"__init__"}
    assert sorted(FIGURES) == sorted(modules)
    names = [view.name for module in figure_modules().values() for view in module.VIEWS]
    assert names == list(list_views())


@pytest.mark.long
def test_the_gallery_has_every_view_with_a_picture(drawn_gallery: tuple[str, dict[str, str]]) -> None:
    page, pictures = drawn_gallery
    titles = [line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")]
    assert titles == [view.title for view in list_views().values()]
    for name, view in list_views().items():
        assert f"![{view.title}](gallery/{name}.svg)" in page
        assert view.caption in page
    assert set(pictures) == set(list_views())
    for picture in pictures.values():
        assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
        assert 'fill="white"' in picture


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to open the report in")
def test_the_gallery_shows_the_report_wide_narrow_dark_and_on_paper(tmp_path: Path) -> None:
    example = gallery.example(tmp_path)
    shots = gallery.screenshots(example, tmp_path)
    widths = {name: int.from_bytes(shot[16:20], "big") for name, shot in shots.items()}  # of a PNG's header
    assert widths == {"light": 1400, "dark": 1400, "narrow": 500, "paper": 1040}
    assert shots["light"] != shots["dark"]
    page = gallery.page(example, shots)
    for name in widths:
        assert f"(gallery/page_{name}.png)" in page
