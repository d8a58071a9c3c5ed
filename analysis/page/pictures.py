"""Draws the figures of the page and answers the questions of their views.

A view without data states what is missing.

Makes the script that draws charts on the page, and charts as files, both by vl-convert: no browser, no network.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any, NamedTuple

import pandas as pd
import vl_convert

from mlhpc.analysis.drawing.view import FIRST, GOALS, TOP_OF_ONE, Answer, Goal, Question, View, render_count
from mlhpc.analysis.page.cells import HtmlTable, build_html_table
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.analysis.tables.ingest import run_in_processes
from mlhpc.suite.errors import explain_not_installed, write_traceback
from mlhpc.suite.files import find_cache_folder, read_bytes, render_error, write_file_atomically
from mlhpc.suite.plugins import OURS

MOST_BESIDE = 2  # panels of a figure that has another one beside it
POOL_FROM_RESULTS = 8  # with fewer results one process draws the figures faster than a pool starts


@dataclass(frozen=True)
class ChartFiles:
    """Holds the forms of charts as files (svg, png, pdf), and their theme: that of the page, or "slides"."""

    forms: tuple[str, ...] = ()
    theme: str = "page"


NO_CHART_FILES = ChartFiles()


@dataclass(frozen=True)
class Picture:
    """Holds a view of the page, or says why it is missing. ``numbers`` is its table, which a missing one lacks.

    ``defect`` says that drawing it failed, and where the traceback is. A ``hidden`` one has an answer, but a chart of
    its table would add nothing. A ``wide`` one has the page's width, ``height`` is that of its charts in pixels, about.
    ``specification`` is the Vega-Lite document as JSON that is safe inside of a page.
    ``files`` has the chart in the forms that were asked for ("png": bytes).
    """

    name: str
    title: str
    question: Question
    caption: str
    specification: str = ""
    numbers: pd.DataFrame | None = field(default=None, compare=False)
    table: HtmlTable | None = None
    missing: str = ""
    answer: str = ""
    statements: tuple[Statement, ...] = ()
    defect: str = ""
    hidden: bool = False
    wide: bool = False
    height: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def is_shown(self) -> bool:
        """Return True if the page has its chart."""
        return not self.missing and not self.hidden

    @property
    def why(self) -> str:
        """Render ``missing`` as a phrase for the page."""
        return self.missing if self.missing.startswith(("no ", "needs ")) else f"missing {self.missing}"


class Statement(NamedTuple):
    """Holds a sentence of an answer, and the places of the results that it is about; none: of all."""

    text: str
    of: tuple[int, ...] = ()


@dataclass(frozen=True)
class PageSection:
    """Holds the figures of one goal."""

    name: str
    title: str
    viewpoint: str
    views: tuple[Picture, ...]


def explain_missing_charts() -> str:
    """Explain why no figure can be drawn; "" if they can."""
    missing = [name for name in ("altair", "vl_convert") if importlib.util.find_spec(name) is None]
    return explain_not_installed(missing[0]) if missing else ""


def draw_pictures(
    study: Study, wanted: ChartFiles = NO_CHART_FILES, tell: Callable[[int, int], None] = lambda done, total: None
) -> list[Picture]:
    """Draw every view. Empty if charts cannot be drawn.

    ``wanted`` are the files to make of each. ``tell`` is called with views done and in total.
    """
    if explain_missing_charts():
        return []
    from mlhpc.analysis.figures import list_views

    names = list(list_views())
    many = len(study.results) >= POOL_FROM_RESULTS
    return run_in_processes(partial(_picture, study, wanted), names, tell=tell, alone=not many)


def find_top(pictures: Sequence[Picture]) -> Picture | None:
    """Find the figure on top of the page: who is fastest, or where the time of a single result goes."""
    shown = {picture.name: picture for picture in pictures if picture.is_shown}
    return shown.get(FIRST) or shown.get(TOP_OF_ONE)


def group_pictures(pictures: Sequence[Picture]) -> list[PageSection]:
    """Group the figures of the page but the first by their goals, in the order of the page."""
    top, groups = find_top(pictures), dict[Goal, list[Picture]]()
    order = {goal: place for place, goal in enumerate(GOALS)}
    for picture in pictures:
        if picture.is_shown and picture is not top:
            groups.setdefault(picture.question.goal, []).append(picture)
    # Goals of other packages come last
    goals = sorted(groups, key=lambda goal: order.get(goal, len(order)))
    return [
        PageSection(f"goal-{place}", goal.name, goal.viewpoint, tuple(groups[goal]))
        for place, goal in enumerate(goals, start=1)
    ]


def _picture(study: Study, wanted: ChartFiles, name: str) -> Picture:
    from mlhpc.analysis.drawing.charts import build_specification
    from mlhpc.analysis.figures import list_views

    view = list_views()[name]
    picture = Picture(name, view.title, view.question, view.caption)
    try:
        numbers, answer = view.table(study), view.answer(study)
        of = _find_results(study, numbers)
        if not view.worth(numbers):
            return replace(
                picture, numbers=numbers, answer=answer, statements=_find_statements(answer, of), hidden=True
            )
        # `_row` and `_of` tie a mark of the chart to its row and results, for the page's filters
        marked = numbers.reset_index(drop=True).assign(_row=range(len(numbers)))
        drawn = build_specification(view.chart(marked.assign(_of=of) if of else marked))
        table = build_html_table(numbers.to_dict("list"), f"{view.title}: the numbers", of=of)
        files = {form: encode_chart(drawn, form, wanted.theme) for form in wanted.forms}
    except NotAnswerableError as missing:
        return replace(picture, missing=str(missing))
    except Exception as error:  # one faulty figure must not cost the reader the other ones
        why = f"{type(error).__name__}: {render_error(error)}"
        defect = f"figure {name!r} failed: {why} ({write_traceback(_authors(view))})"
        return replace(picture, missing=f"a figure that works: it failed with {why}", defect=defect)
    # "<" escaped: a name from a log must not end the page's script element
    text = json.dumps(drawn, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    panels = drawn.get("concat", [drawn])
    return replace(
        picture,
        specification=text,
        numbers=numbers,
        table=table,
        answer=answer,
        statements=_find_statements(answer, of),
        wide=len(panels) > MOST_BESIDE,
        height=int(max((panel.get("height", 0) for panel in panels), default=0)),
        files=files,
    )


def _find_statements(answer: str, of: Sequence[Sequence[int]]) -> tuple[Statement, ...]:
    """Divide an answer into its sentences, each with its results, so that a filter holds for them too."""
    parts = answer.parts if isinstance(answer, Answer) else ((answer, ()),)
    if not of or "; ".join(text for text, _ in parts) != answer:  # words of no row stand between or after them
        return (Statement(answer),)
    return tuple(Statement(text, tuple(sorted({place for row in rows for place in of[row]}))) for text, rows in parts)


def _authors(view: View) -> str:
    package = view.table.__module__.partition(".")[0]
    return "" if package == OURS else f" to the authors of {package}"


def _find_results(study: Study, numbers: pd.DataFrame) -> list[list[int]]:
    """Find for each row of a view's table the places of its results: those of the same label, benchmark and size.

    A row about a change from one result to another is about the other.
    """
    label = next((name for name in ("label", "to") if name in numbers), None)
    if label is None:
        return []
    # In the table of factors (waterfall) the column size is a factor and no size of a problem
    keys = [
        name
        for name in ("benchmark", "size", "mode")
        if name in numbers and numbers[name].isin(study.results[name]).all()
    ]
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, of in enumerate(zip(*(study.results[name] for name in ("label", *keys)), strict=True)):
        places.setdefault(of, []).append(place)
    return [places.get(row, []) for row in zip(*(numbers[name] for name in (label, *keys)), strict=True)]


def render_needs(pictures: Sequence[Picture]) -> str:
    """Render what would answer how many of the questions without an answer, what most of them need first."""
    # A broken figure needs a repair, not the data that the question asks for
    counts = Counter(each.missing if each.defect else each.question.needs or each.missing for each in pictures)
    needs = " · ".join(f"{need}{f' ({count})' if count > 1 else ''}" for need, count in counts.most_common())
    return f"{render_count(len(pictures), 'more question')} would be answered by: {needs}"


PNG_SCALE = 2.0  # pixels of a file for one of the page
SLIDES = "slides"
# Times the size on the page: of a slide's texts, and of its charts
SLIDE_TEXT_SCALE, SLIDE_WIDTH_SCALE, SLIDE_HEIGHT_SCALE = 1.6, 1.25, 1.5
LARGEST_SCRIPT = 2**23  # bytes of the script


@cache
def build_vega_script() -> str:
    """Build Vega, Vega-Lite and vega-embed as one text for a page.

    It is cached for the user: making it takes three seconds.
    """
    folder = find_cache_folder()
    # The version in the name: an update of the package makes a new file
    kept = folder / f"vega-{version('vl-convert-python')}.js" if folder else None
    if kept is not None:
        with suppress(OSError, ValueError):
            return read_bytes(kept, LARGEST_SCRIPT).decode()
    # "</script" inside of a string would end the page's script element
    made = str(vl_convert.javascript_bundle("window.vegaEmbed=vegaEmbed;")).replace("</script", "<\\/script")
    if kept is not None:
        with suppress(OSError):
            write_file_atomically(kept, made)
    return made


def draw_first_panels(picture: Picture) -> str:
    """Draw the panels of a figure that the page shows first, as SVG for a page of its own."""
    document = json.loads(picture.specification)
    if "first" in document.get("usermeta", {}):
        document["concat"] = document["concat"][: document["usermeta"]["first"]]
    return str(vl_convert.vegalite_to_svg(json.dumps(document)))


def encode_chart(specification: dict[str, Any], form: str, theme: str = "page") -> bytes:
    """Encode a chart as the bytes of an SVG, PNG or PDF file, on white."""
    drawn = _for_slides(specification) if theme == SLIDES else specification
    document = json.dumps(drawn | {"config": drawn["config"] | {"background": "white"}})
    if form == "svg":
        return str(vl_convert.vegalite_to_svg(document)).encode()
    if form == "png":
        return bytes(vl_convert.vegalite_to_png(document, scale=PNG_SCALE))
    return bytes(vl_convert.vegalite_to_pdf(document))


def _for_slides(specification: dict[str, Any]) -> dict[str, Any]:
    """Return the chart with texts that the last row of an audience can read, and room for them."""
    document = deepcopy(specification)
    for part in document["config"].values():
        for name in part if isinstance(part, dict) else ():
            if name.lower().endswith(("fontsize", "limit")):
                part[name] = round(SLIDE_TEXT_SCALE * part[name])
    # Panels have sizes of their own; a single chart is its own panel
    for panel in document.get("concat", [document]):
        for name, times in (("width", SLIDE_WIDTH_SCALE), ("height", SLIDE_HEIGHT_SCALE)):
            if isinstance(panel.get(name), int | float):
                panel[name] = round(times * panel[name])
    return document
