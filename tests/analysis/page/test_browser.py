"""The page in a real browser: nothing cut off, covered or too faint in any window, in the dark and on paper; and its script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote

import pytest

from mlhpc.analysis.page.report import Report, render_report
from mlhpc.analysis.study import read_study
from mlhpc.suite.descriptor import list_installed_cards
from tests.fixtures.published import published_results

HERE = Path(__file__).parent
LARGEST = 3.3e6  # bytes of a page of all public rounds
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome to open the page in")
FRAME = """<!DOCTYPE html><meta charset="utf-8">
<iframe src="page.html{hash}" style="border: 0; width: {width}px; height: 1000px"></iframe>
<script>
addEventListener("message", event => fetch("{listener}", { method: "POST", mode: "no-cors", body: JSON.stringify(event.data) }));
</script>"""
# Runs before all scripts of the page.
LISTEN = """<head><script>
const told = [];
addEventListener("error", event => told.push(event.message));
addEventListener("unhandledrejection", event => told.push(String(event.reason?.stack ?? event.reason)));
console.error = (...parts) => told.push(parts.join(" "));
const ACTS = {acts};
</script>"""


def browse(
    folder: Path, page: str, script: str, width: int = 1400, *flags: str, acts: Sequence[str] = (), address: str = ""
) -> dict[str, Any]:
    """Open a page in a frame of that width (a window is never narrower than 500 px), and return what the script tells."""
    listening = page.replace("<head>", LISTEN.replace("{acts}", json.dumps(acts)), 1)
    own = f"<script>{(HERE / script).read_text()}</script></body>"
    (folder / "page.html").write_text(own.join(listening.rsplit("</body>", 1)))
    told: SimpleQueue[bytes] = SimpleQueue()
    with listen(told) as listener:
        frame = FRAME.replace("{width}", str(width)).replace("{hash}", address).replace("{listener}", listener)
        (folder / "frame.html").write_text(frame)
        browser = subprocess.Popen([*command(folder), *flags, f"file://{folder}/frame.html"], stderr=subprocess.DEVNULL)
        try:
            answer = json.loads(told.get(timeout=300))
        finally:
            browser.terminate()
            browser.wait()
    assert isinstance(answer, dict)
    return answer


@pytest.fixture(scope="module")
def used(rich: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a reader finds who does one thing after another on one page: drawing all its figures takes seconds."""
    acts = ("first", "texts", "price", "legend", "search", "table", "click", "keyboard", "zoom", "hover", "downloads")
    return act(rich, tmp_path_factory.mktemp("used"), *acts)


def act(report: Report, folder: Path, *acts: str, width: int = 1400, address: str = "") -> dict[str, Any]:
    """What a reader finds who does ``acts`` of act.js. No act leaves an error or asks the network for anything."""
    told = browse(folder, report.html, "act.js", width, acts=acts, address=address)
    assert told["errors"] == []
    assert told["fetched"] == []
    return told


@contextmanager
def listen(told: SimpleQueue[bytes]) -> Iterator[str]:
    """The address of a server that puts into ``told`` what a page posts to it.

    The browser's own ``--dump-dom --virtual-time-budget`` does not wait for an image that it encodes or decodes.
    """

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def command(folder: Path) -> list[str]:
    return [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1500,1100",
    ]


def printed(page: str) -> str:
    """The page as on paper: its rules for print hold on the screen too."""
    assert "@media print" in page
    return page.replace("@media print", "@media all")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("width", "flag"), [(1400, "--disable-gpu"), (400, "--force-dark-mode")])
def test_nothing_is_cut_off_covered_or_too_faint(rich: Report, tmp_path: Path, width: int, flag: str) -> None:
    told = browse(tmp_path, rich.html, "measure.js", width, flag)
    assert (told["width"], told["dark"]) == (width, flag == "--force-dark-mode")
    assert told["marks"] > 100
    assert "\n".join(told["found"]) == ""
    assert told["texts"] > 500
    assert told["drawn"] == told["views"] > 15


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


def test_an_entry_of_a_legend_filters_all_figures_and_tables(used: dict[str, Any]) -> None:
    told = used["legend"]
    before, during, after = told["before"], told["during"], told["after"]
    assert during["hash"] == f"#{told['filter']}={told['name']}"
    assert during["value"] == told["name"]
    assert during["strangers"] == [0, 0]
    assert 0 < during["rows"] < before["rows"]
    assert 0 < during["marks"] < before["marks"]
    assert after == before


def test_a_system_of_the_score_table_filters_all_and_an_empty_figure_says_so(used: dict[str, Any]) -> None:
    told = used["table"]
    during = told["during"]
    assert during["hash"] == f"#system={quote(told['system'])}"
    assert during["strangers"] == [0, 0]
    assert 0 < during["marks"] < told["after"]["marks"]
    assert during["missing"]
    assert set(during["missing"]) == {"Nothing of this figure is in the selection."}
    assert told["linked"] == f"{during['hash']}&at=behind"
    assert told["after"]["hash"] == ""


def test_a_link_with_a_filter_opens_the_page_filtered(rich: Report, tmp_path: Path) -> None:
    told = act(rich, tmp_path, "opened", address="#round=v9.8")["opened"]
    assert told["value"] == "v9.8"
    assert told["strangers"] == [0, 0]
    assert 0 < told["rows"] < told["all"]


def test_a_search_finds_rows_by_their_words_and_those_of_their_heading(used: dict[str, Any]) -> None:
    none, some, every = used["search"]
    assert none == []
    assert [name.split()[0] for name in some] == ["older"]
    assert len(every) == 6


def test_values_of_a_mark_are_those_of_its_row(used: dict[str, Any]) -> None:
    told = used["hover"]
    assert told["faults"] == []
    assert told["marks"] > 100
    assert told["values"] > 200


def test_a_click_opens_details_beside_the_figure_and_back_returns(used: dict[str, Any]) -> None:
    told = used["click"]
    assert told["opened"]["values"]
    assert told["opened"]["links"] > 1
    assert told["opened"]["pushed"] == 1
    assert told["back"] == [0, True]
    assert told["hit"]
    assert told["open"]
    assert told["hash"] == "#logs"
    assert told["returned"] == ["", 1]  # from the log to the details


def test_a_chart_and_its_rows_are_downloaded(used: dict[str, Any]) -> None:
    told = used["downloads"]
    assert told["svg"] == ["svg", True, True]
    assert told["png"] == ["image/png", True]
    rows, shown, head, column = told["csv"]
    assert (rows, head) == (shown, column)
    assert told["cells"] == told["table"]


def test_the_wheel_with_ctrl_zooms_and_alone_scrolls(used: dict[str, Any]) -> None:
    told = used["zoom"]
    assert told == {"alone": True, "scrolls": True, "zoomed": True, "taken": True}


def test_a_keyboard_reaches_every_mark(used: dict[str, Any]) -> None:
    told = used["keyboard"]
    assert told.pop("skip") == ["skip", True]
    stops = told.pop("stops")
    assert set(stops) == {1}
    assert len(stops) > 15
    assert told.pop("still") == 1
    assert told == dict.fromkeys(("moved", "told", "left", "there", "inBox", "closed", "returned"), True)


def test_charts_have_texts_and_headings_are_in_order(used: dict[str, Any]) -> None:
    told = used["texts"]
    assert told["without"] == []
    assert told["charts"] > 15
    assert told["skipped"] == 0


def test_the_first_table_needs_no_scrolling(used: dict[str, Any]) -> None:
    assert used["texts"]["fits"]


def find_axe() -> Path | None:
    """The script of the npm package axe-core: in a node_modules here or above, or where MLHPC_AXE says."""
    stated = os.environ.get("MLHPC_AXE")
    places = [Path(stated)] if stated else [each / "node_modules/axe-core/axe.min.js" for each in HERE.parents]
    return next((place for place in places if place.is_file()), None)


@pytest.mark.skipif(find_axe() is None, reason="no axe-core (npm install axe-core)")
def test_axe_finds_nothing_serious(rich: Report, tmp_path: Path) -> None:
    axe = find_axe()
    assert axe is not None
    page = rich.html.replace("</head>", f"<script>{axe.read_text()}</script></head>", 1)
    told = browse(tmp_path, page, "act.js", acts=("axe",))
    assert told["errors"] == []
    assert told["axe"] == []


def test_the_headline_and_a_figure_are_in_sight_first(used: dict[str, Any]) -> None:
    told = used["first"]
    assert told["headline"] < told["figure"] < told["table"]
    assert told["drawn"]
    assert told["figure"] < 500
    assert told["sections"] <= 7


def test_a_price_is_tried_with_a_slider(used: dict[str, Any]) -> None:
    told = used["price"]
    if told is not None:  # where devices differ
        assert told[0] != told[1]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("width", [1400, 400])
def test_filters_stay_in_sight_and_cover_no_heading(rich: Report, tmp_path: Path, width: int) -> None:
    told = act(rich, tmp_path, "sticky", width=width)["sticky"]
    assert told["top"] == 0
    assert told["clear"]
    assert told["height"] < 90


def test_without_scripts_nothing_is_hidden(rich: Report) -> None:
    page = re.sub(r"<script.*?</script>", "", rich.html, flags=re.DOTALL)
    assert not re.search(r"<[^>]* hidden[ >=]", page)
    assert "numbers as CSV" in page
    assert page.count("<tr data-of=") > 20
    assert page.count('<p class="answer') == page.count("<figure>") > 15


def test_the_page_refers_to_nothing_elsewhere(rich: Report) -> None:
    page = re.sub(r"<script>.*?</script>", "", rich.html, flags=re.DOTALL)
    assert not re.search(r"""(src|srcset|action)\s*=|<link|@import|url\(""", page.split("<body>")[1])
    assert not re.search(r"""<script[^>]*src|<link|@import|url\(""", page.split("<body>")[0])


@pytest.mark.long
@pytest.mark.parametrize("width", [1400, 800, 400])
@pytest.mark.parametrize("medium", ["light", "dark", "paper"])
def test_every_window_and_medium(rich: Report, tmp_path: Path, width: int, medium: str) -> None:
    page = printed(rich.html) if medium == "paper" else rich.html
    told = browse(
        tmp_path, page, "measure.js", 1040 if medium == "paper" else width, *["--force-dark-mode"] * (medium == "dark")
    )
    assert told["found"] == []
    assert told["dark"] is (medium == "dark")


def print_words(page: str, folder: Path) -> list[list[tuple[float, float, float, float, str]]]:
    """Each page on paper as its words: left, top, right and bottom, and the text."""
    (folder / "page.html").write_text(page)
    paper = folder / "page.pdf"
    flags = ["--no-pdf-header-footer", "--virtual-time-budget=60000", f"--print-to-pdf={paper}"]
    browser = [*command(folder), *flags, f"file://{folder}/page.html"]
    subprocess.run(browser, capture_output=True, timeout=300, check=True)
    told = subprocess.run(
        ["pdftotext", "-bbox", paper, "-"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    word = re.compile(r'<word xMin="(.+?)" yMin="(.+?)" xMax="(.+?)" yMax="(.+?)">(.*?)</word>')
    found = [word.findall(sheet) for sheet in told.split("<page ")[1:]]
    return [[(float(a), float(b), float(c), float(d), text) for a, b, c, d, text in words] for words in found]


def find_overprinted(sheets: Sequence[Sequence[tuple[float, float, float, float, str]]]) -> list[tuple[str, str]]:
    """Pairs of words of which one covers more than a quarter of the other."""
    pairs = []
    for words in sheets:
        for place, (a, b, c, d, text) in enumerate(words):
            for e, f, g, h, other in words[place + 1 :]:
                both = max(0, min(c, g) - max(a, e)) * max(0, min(d, h) - max(b, f))
                if both > 0.25 * min((c - a) * (d - b), (g - e) * (h - f)):
                    pairs.append((text, other))
    return pairs


needs_pdftotext = pytest.mark.skipif(
    shutil.which("pdftotext") is None, reason="no pdftotext (apt install poppler-utils)"
)


@needs_pdftotext
def test_on_paper_nothing_is_printed_over_a_heading(rich: Report, tmp_path: Path) -> None:
    sheets = print_words(rich.html, tmp_path)
    assert find_overprinted(sheets) == []
    printed_text = " ".join(word[4] for words in sheets for word in words)
    # The title of the first figure is for those who hear the page: the headline says it
    headings = re.findall(r'<h3 id="[^"]*">([\w ]+)</h3>', rich.html)
    assert len(headings) > 15
    assert [text for text in headings if text not in printed_text] == []


@needs_pdftotext
def test_words_printed_over_a_heading_are_found(tmp_path: Path) -> None:
    page = "<h2>Convergence</h2><p style='margin-top: {}'>answers</p>"
    assert find_overprinted(print_words(page.format("0"), tmp_path)) == []
    assert find_overprinted(print_words(page.format("-3em"), tmp_path)) == [("answers", "Convergence")]


@needs_pdftotext
@pytest.mark.long
def test_a_public_round_has_at_most_ten_sheets(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    rounds = [published_results(tmp_path_factory) / "hpc_results_v3.0"]
    sheets = print_words(render_report(read_study(rounds, list_installed_cards()), []).html, tmp_path)
    assert len(sheets) <= 10
    assert find_overprinted(sheets) == []


@pytest.mark.long
@pytest.mark.parametrize("width", [1400, 400])
def test_public_rounds_together(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, width: int) -> None:
    rounds = sorted(published_results(tmp_path_factory).glob("hpc_results_v*"))
    made = render_report(read_study(rounds, list_installed_cards()), [])
    assert len(made.html.encode()) < LARGEST
    told = browse(tmp_path, made.html, "measure.js", width)
    assert told["found"] == []
