"""The page in a real browser: nothing cut off, covered or too faint in any window, in the dark and on paper; and its script."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from analysis.page.report import Report, render_report
from analysis.study import study
from suite.descriptor import installed_cards
from tests.fixtures.published import published_results

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome to open the page in")
FRAME = """<!DOCTYPE html><meta charset="utf-8">
<iframe src="page.html" style="border: 0; width: {width}px; height: 1000px"></iframe><pre id="told"></pre>
<script>
const told = document.getElementById("told");
addEventListener("message", event => told.append(JSON.stringify(event.data)));
</script>"""


def browse(folder: Path, page: str, script: str, width: int = 1400, *flags: str) -> dict[str, Any]:
    """Open a page in a frame of that width (a window is never narrower than 500 px), and return what the script tells."""
    (folder / "page.html").write_text(page.replace("</body>", f"<script>{(HERE / script).read_text()}</script></body>"))
    (folder / "frame.html").write_text(FRAME.replace("{width}", str(width)))
    dom = chromium(folder, *flags, "--virtual-time-budget=60000", "--dump-dom", f"file://{folder}/frame.html")
    told = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
    assert told is not None, dom[:2000]
    assert told[1], "the page told nothing"
    answer = json.loads(html.unescape(told[1]))
    assert isinstance(answer, dict)
    return answer


def chromium(folder: Path, *flags: str) -> str:
    base = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1500,1100",
    ]
    done = subprocess.run([str(CHROMIUM), *base, *flags], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


def printed(page: str) -> str:
    """The page as on paper: its rules for print hold on the screen too."""
    assert "@media print" in page
    return page.replace("@media print", "@media all")


def test_nothing_is_cut_off_covered_or_too_faint_in_a_wide_window(rich: Report, tmp_path: Path) -> None:
    told = browse(tmp_path, rich.html, "measure.js")
    assert told["found"] == []
    assert told["texts"] > 500
    assert told["scrolled"] == 0


def test_on_a_phone_the_page_fits_and_figures_say_that_they_scroll(rich: Report, tmp_path: Path) -> None:
    told = browse(tmp_path, rich.html, "measure.js", 400)
    assert told["width"] == 400
    assert told["found"] == []
    assert told["hidden"] == 0
    assert told["scrolled"] > 15


def test_the_measure_finds_what_is_wrong(tmp_path: Path) -> None:
    """One page without a fault, and one with a fault of each kind."""

    def page(first: str, last: str, **faults: str) -> str:
        texts = (
            f'<text x="10" y="40">{first}</text><text x="150" y="40">second</text><text x="700" y="40">{last}</text>'
        )
        svg = f'<figure><div class="scroll"><svg viewBox="0 0 792 100" style="font-size: 11px">{texts}</svg></div></figure>'
        style = "body { background: #fff; color: #000 }"
        words = "".join(f'<{tag} style="{fault}">some words of text</{tag}>' for tag, fault in faults.items())
        return f"<!DOCTYPE html><meta charset=utf-8><style>{style}</style><body>{words}{svg}</body>"

    fine = page("first", "last", h1="", p="", dd="")
    assert browse(tmp_path, fine, "measure.js")["found"] == []
    faults = {"h1": "width: 60px; white-space: nowrap", "p": "width: 2000px", "dd": "color: #bbb"}
    found = browse(
        tmp_path,
        page(
            "a first text that is much too long for its place", "a last one that is too long for the figure", **faults
        ),
        "measure.js",
    )["found"]
    kinds = {line.split(":")[0] for line in found}
    assert kinds == {
        "covers another text", "cut off by the figure", "wider than the page", "runs over its box", "too faint"
    }  # fmt: skip


def test_a_reader_searches_filters_points_and_downloads(rich: Report, tmp_path: Path) -> None:
    told = browse(tmp_path, rich.html, "act.js")
    assert told["errors"] == []
    assert told["none"] == [0, 0, 0]
    assert [name.split()[0] for name in told["searched"]] == ["older"]
    assert told["rows"] == told["reset"] == 6
    assert told["rounds"] == ["", "mlhpc-1.0", "v9.7", "v9.8", "v9.9"]
    assert told["filtered"] == 1
    assert told["dimmed"] > 5
    assert told["undimmed"] == 0
    assert re.fullmatch(r"\d+ of \d+ rows", told["output"])
    text, shown, hidden = told["tip"]
    assert (shown.removesuffix("\n(click: its logs)"), hidden) == (text, False)
    assert "time ÷ time of" in text
    assert told["open"]
    assert len({name.rsplit("/", 1)[0] for name in told["hits"]}) == 1
    assert len(told["hits"]) == 10
    (log,) = told["hit"]
    assert log == rich.frames["runs"]["run"].iloc[int(told["dot"][1])]
    assert log in told["dot"][0]
    assert told["sorted"]
    assert told["svg"] == ["svg", True, 792]
    assert told["png"] == ["image/png", True]
    assert told["buttons"] == 2 * rich.html.count("<figure>")


def test_without_scripts_nothing_is_hidden(rich: Report) -> None:
    page = re.sub(r"<script.*?</script>", "", rich.html, flags=re.DOTALL)
    assert not re.search(r"<[^>]* hidden[ >=]", page)
    assert "numbers as CSV" in page
    assert page.count("<tr data-of=") > 20
    assert page.count("</title>") > 200  # browsers show what a mark says by themselves


@pytest.mark.long
@pytest.mark.parametrize("width", [1400, 800, 400])
@pytest.mark.parametrize("medium", ["light", "dark", "paper"])
def test_every_window_and_medium(rich: Report, tmp_path: Path, width: int, medium: str) -> None:
    page = printed(rich.html) if medium == "paper" else rich.html
    told = browse(
        tmp_path, page, "measure.js", 718 if medium == "paper" else width, *["--force-dark-mode"] * (medium == "dark")
    )
    assert told["found"] == []
    assert told["dark"] is (medium == "dark")


@pytest.mark.long
def test_on_paper_the_page_is_a_readable_file(rich: Report, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(rich.html)
    chromium(
        tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'page.pdf'}", f"file://{tmp_path}/page.html"
    )
    pages = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes()))
    assert rich.html.count("<figure>") / 2 < pages < 2 * rich.html.count("<figure>")


@pytest.mark.long
@pytest.mark.parametrize("width", [1400, 400])
def test_public_rounds_together(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, width: int) -> None:
    rounds = sorted(published_results(tmp_path_factory).glob("hpc_results_v*"))
    made = render_report(study(rounds, installed_cards()), [])
    told = browse(tmp_path, made.html, "measure.js", width)
    assert told["found"] == []
