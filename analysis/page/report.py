"""Renders a study as one HTML page, one JSON document and CSV tables, all with the same numbers. Writes no file.

The page has no external resources and works without scripts. It contains no time of day, host name or path: the same
logs give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from mlhpc.analysis.drawing.view import INTERVAL_WORDS, Answer, render_count
from mlhpc.analysis.page.cells import is_absent
from mlhpc.analysis.page.issues import (
    GROUPS_SHOWN,
    CheckedPath,
    Issue,
    build_findings_table,
    build_tiles,
    group_findings,
    group_issues,
    list_failed_steps,
    list_issues,
)
from mlhpc.analysis.page.pictures import (
    NO_CHART_FILES,
    ChartFiles,
    Picture,
    draw_first_panels,
    draw_pictures,
    explain_missing_charts,
    find_top,
    group_pictures,
    render_needs,
)
from mlhpc.analysis.page.summary import (
    COLUMNS,
    Summary,
    build_logs_table,
    build_procurement_section,
    build_score_sections,
    build_setting_differences,
    build_settings_tables,
    build_summary,
    build_system_differences,
    build_systems_table,
)
from mlhpc.analysis.results.index import build_index_tables
from mlhpc.analysis.sources.readers import Step
from mlhpc.analysis.study import Study
from mlhpc.suite import VERSION
from mlhpc.suite.files import encode_csv_cell

REPORT_VERSION = 1
VEGA_PLACEHOLDER = "/* vega */"  # where the page has the script that draws charts
NOT_VERIFIED = "Result not verified by MLCommons Association"
BRIEF_FIGURES = ("waterfall", "time_split", "run_timeline")  # after the first, what a brief would show next
LAST_DATE_MS = 4102444800000  # 2100-01-01; a later date comes from a broken clock


@dataclass(frozen=True)
class Report:
    """Holds the page, the JSON text, and the tables by name: as CSV text and as data frames.

    ``defects`` has the figures that could not be drawn: name and one line. ``figures`` are files by name
    ("pareto.png").
    """

    html: str
    json: str
    csv: Mapping[str, str]
    frames: Mapping[str, pd.DataFrame] = field(compare=False)
    defects: tuple[tuple[str, str], ...] = field(compare=False)
    figures: Mapping[str, bytes] = field(default_factory=dict)
    brief: str = ""


@dataclass(frozen=True)
class _Content:
    """Holds what page and document are both made from."""

    study: Study
    checked: Sequence[CheckedPath]
    issues: Sequence[Issue]
    pictures: Sequence[Picture]

    @property
    def summary(self) -> Summary:
        """Return the summary, which says what the figures say."""
        return build_summary(self.study, self.numbers, {picture.name: picture.answer for picture in self.pictures})

    @property
    def numbers(self) -> dict[str, pd.DataFrame]:
        """Return the tables of the figures that have one, by name."""
        return {picture.name: picture.numbers for picture in self.pictures if picture.numbers is not None}


FORMULAS = (
    ("Score, time to train", "mean of run_stop − run_start over the required runs without the fastest and the slowest; one run "
     "may fail and then is the slowest (MLPerf HPC rules)"),
    ("Score, throughput mode", "instances that reached the target ÷ (last run_stop − first run_start)"),
    ("Score with staging", "as the score, with the staging before run_start added to each run"),
    (INTERVAL_WORDS, "of the geometric mean: Student t (95 %) on log time over all runs of the score that converged, "
     "whose epochs vary at least as much as those of the reference points; other days and other seeds may lie outside"),
    ("Time split", "T = T_staging + E·τ + T_other; E·τ = training + evaluation; cut at run_stop; the parts sum to T"),
    ("Epochs to target", "epoch of the first evaluation that meets the target before run_stop"),
    ("τ, seconds per epoch", "(training + evaluation) ÷ epochs of the run, without what the first one trains longer"),
    ("Training throughput", "epochs × training samples ÷ training time; means of rates are harmonic"),
    ("Combined throughput", "(training samples + evaluations per epoch × evaluation samples) ÷ τ"),
    ("Compute units", "nodes × accelerators per node, or × processors where there are none"),
    ("Unit hours", "compute units × mean run time; throughput mode: units of the system × time to train all"),
    ("Spread", "sample standard deviation (n − 1) of the runs of the mean; fastest – slowest of all that converged"),
    ("Step phases", "wall seconds of all training steps by phase, mean over ranks; the phases sum to the step"),
)  # fmt: skip


def render_report(
    study: Study,
    checked: Sequence[CheckedPath],
    steps: Sequence[Step] = (),
    form: str = "csv",
    files: ChartFiles = NO_CHART_FILES,
    tell: Callable[[int, int], None] = lambda done, total: None,
    *,
    brief: bool = False,
    reload_s: int = 0,
) -> Report:
    """Render the report of a study, of the compliance check's verdicts, and of what failed of the ``steps`` of a demo.

    ``form``: format of the tables, which the page links to. ``files``: the figures' files.
    ``tell`` is called with figures drawn and in total. With ``brief`` there is a page to print, too. A page with
    ``reload_s`` loads itself again after that many seconds.
    """
    undrawn = [Issue("problem", "figures", f"none is drawn: {reason}")] if (reason := explain_missing_charts()) else []
    issues = [*list_failed_steps(steps), *undrawn, *list_issues(study)]
    content = _Content(study, checked, issues, draw_pictures(study, files, tell))
    tables = {**study.tables.named(), "runs": study.runs, "results": study.results}
    tables |= {f"figure_{name}": table for name, table in content.numbers.items()}
    tables |= build_index_tables(study.index) if study.index else {}
    # The full path of a log would name folders of the author's machine
    frames = {name: table.drop(columns=["file"], errors="ignore") for name, table in tables.items()}
    return Report(
        html=_page(content, form, reload_s),
        brief=_brief(content) if brief else "",
        json=_document(content),
        csv={name: _csv(frame) for name, frame in frames.items()},
        frames=frames,
        defects=tuple((picture.name, picture.defect) for picture in content.pictures if picture.defect),
        figures={f"{p.name}.{suffix}": file for p in content.pictures for suffix, file in p.files.items()},
    )


def _page(content: _Content, form: str, reload_s: int) -> str:
    from mlhpc.analysis.page.pictures import build_vega_script

    study, checked, pictures = content.study, content.checked, content.pictures
    unanswered = [picture for picture in pictures if picture.missing]
    summary = content.summary
    html = (
        _make_environment()
        .get_template("report.html")
        .render(
            title=_title(study),
            lead=_lead(study),
            tiles=build_tiles(study, checked),
            not_verified=NOT_VERIFIED if not study.runs["published"].all() else "",
            summary=summary,
            top=find_top(pictures),
            hidden=[picture for picture in pictures if picture.hidden],
            unanswered=unanswered,
            needs=render_needs(unanswered),
            headline=build_score_sections(study),
            procurement=build_procurement_section(study.index),
            sections=group_pictures(pictures),
            issues=group_issues(content.issues),
            findings=build_findings_table(checked),
            findings_hidden=max(0, len(group_findings(checked)) - GROUPS_SHOWN),
            systems=build_systems_table(study),
            systems_differing=build_system_differences(study),
            differing=build_setting_differences(study),
            configs=build_settings_tables(study),
            logs=build_logs_table(study),
            formulas=FORMULAS,
            known=_render_filter_values(study, summary),
            tables=form,
            dark_marks=_render_dark_style() if pictures else "",
            version=VERSION,
            reload_s=reload_s,
        )
    )
    # The script comes last, so that no character of it is replaced
    return hide_paths(_replace_control_characters(html)).replace(
        VEGA_PLACEHOLDER, build_vega_script() if pictures else ""
    )


def _make_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlhpc.analysis.page"),
        # Labels and notes come from logs, which may be a stranger's
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["code"] = _mark_code
    return environment


def _brief(content: _Content) -> str:
    """Render two A4 pages: five sentences, two figures, and what they are of. No script draws on them."""
    study, summary = content.study, content.summary
    rows = [dict(zip(summary.table.columns, (cell.text for cell in row), strict=True)) for row in summary.table.rows[:1]] if (
        summary.table
    ) else []  # fmt: skip
    facts = [f"{row['task']}: {row[name]}." for row in rows for name in COLUMNS[2:]] or list(summary.sentences)
    counts = Counter(issue.severity for issue in content.issues)
    doubts = " and ".join(render_count(counts[name], name) for name in ("problem", "doubt") if counts[name])
    first = f", the first: {content.issues[0].where}: {content.issues[0].text}" if doubts else ""
    shown = [picture for picture in content.pictures if picture.is_shown]
    order = [
        find_top(content.pictures),
        *(each for name in BRIEF_FIGURES for each in shown if each.name == name),
        *shown,
    ]
    figures = list(dict.fromkeys(each.name for each in order if each is not None))[:2]
    by_name = {picture.name: picture for picture in shown}
    html = (
        _make_environment()
        .get_template("brief.html")
        .render(
            headline=summary.headline,
            lead=_lead(study),
            sentences=[
                *facts[:4],
                f"{doubts.capitalize()} in the logs{first}." if doubts else "The logs show no problem and no doubt.",
            ],
            figures=[(by_name[name], Markup(draw_first_panels(by_name[name]))) for name in figures],  # noqa: S704  Vega escapes names
            sources=_list_sources(study),
            checked=content.checked,
            not_verified=NOT_VERIFIED if not study.runs["published"].all() else "",
            version=VERSION,
        )
    )
    return hide_paths(_replace_control_characters(html))


def _list_sources(study: Study) -> list[tuple[str, int, str]]:
    """List of each result the label, the number of its logs, and one checksum of all of them."""
    found = []
    for row in study.results.to_dict("records"):
        digests = sorted(study.runs_of(row["group"])["sha256"].astype(str))
        found.append((row["label"], len(digests), hashlib.sha256("".join(digests).encode()).hexdigest()))
    return found


def _document(content: _Content) -> str:
    index = content.study.index
    document = {
        "version": REPORT_VERSION,
        "suite_version": VERSION,
        "verdicts": [item.as_dict() for item in content.checked],
        "results": _convert_to_records(content.study.results),
        "issues": [vars(issue) for issue in content.issues],
        "index": (
            {name: _convert_to_records(table) for name, table in build_index_tables(index).items()} if index else None
        ),
        "figures": [
            {
                "name": picture.name,
                "question": picture.question.text,
                "answer": picture.answer or None,
                "statements": _convert_to_statements(picture.answer),
                "not_answerable": picture.missing or None,
                "table": _convert_to_records(picture.numbers),
            }
            for picture in content.pictures
        ],
    }
    # allow_nan=False: NaN is no JSON, so one that was left over must fail here and not in a reader
    return hide_paths(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def _convert_to_statements(answer: str) -> list[dict[str, Any]]:
    """List the statements of an answer with the rows of its table (places) that their numbers are of."""
    parts = answer.parts if isinstance(answer, Answer) else ()
    return [{"text": text, "rows": [int(row) for row in rows]} for text, rows in parts]


def _title(study: Study) -> str:
    names = sorted({f"{row.benchmark} ({row.size})" for row in study.results.itertuples()})
    return f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}: {render_count(len(study.results), 'result')}"


def _mark_code(text: object) -> Markup:
    """Mark what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  it is escaped


def _lead(study: Study) -> str:
    """Say what the page is of: rounds, results and systems."""
    rows = study.results
    rounds = sorted(set(rows.loc[rows["published"], "round"]))
    again = int(study.runs["repeats"].notna().sum())  # of results that were carried over, or are in two divisions
    parts = [f"MLPerf HPC {', '.join(map(str, rounds))}"] if rounds else []
    parts += [
        f"{render_count(len(rows), 'result')} of {render_count(rows['machine'].nunique(), 'system')}",
        render_count(len(study.runs), "run") + (f", {again} of them repeated from another result" if again else ""),
        _dates(study),
    ]
    if len(rounds) > 1:
        parts.append("the first figure has the newest round of each task")
    return " · ".join(parts)


def _render_dark_style() -> str:
    """Render the style that gives marks of charts their colours on a dark page."""
    from mlhpc.analysis.drawing.charts import DARK_COLOURS

    rules = [
        f'.chart [{how}="{light}"] {{ {how}: {dark}; }}'
        for light, dark in DARK_COLOURS.items()
        for how in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


FILTERS = {name: name for name in ("benchmark", "size", "round", "division", "device")} | {"system": "machine"}


def _render_filter_values(study: Study, summary: Summary) -> str:
    """Render what the page's script filters results by, and prices that matter, as JSON that is safe inside of a
    page.
    """
    results = [
        {"label": row["label"], "name": row["name"]} | {name: str(row[column]) for name, column in FILTERS.items()}
        for row in study.results.to_dict("records")
    ]
    breaks = [vars(each) for each in summary.breaks]
    return json.dumps({"filters": list(FILTERS), "results": results, "breaks": breaks}).replace("<", "\\u003c")


def _dates(study: Study) -> str:
    known = pd.to_numeric(study.runs["run_start_ms"])
    # pandas cannot hold every number of milliseconds that a log may state
    starts = pd.to_datetime(known[known.between(0, LAST_DATE_MS)], unit="ms", utc=True)
    if starts.empty:
        return "no log has a run_start"
    first, last = starts.min().strftime("%Y-%m-%d"), starts.max().strftime("%Y-%m-%d")
    return f"runs of {first}" if first == last else f"runs from {first} to {last}"


def _convert_to_records(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    if table is None:
        return []
    return [{str(name): None if is_absent(v) else v for name, v in row.items()} for row in table.to_dict("records")]


def _csv(frame: pd.DataFrame) -> str:
    """Render a table as CSV without cells that a spreadsheet would run.

    Texts of logs and names of folders may be a stranger's.
    """
    known: dict[object, object] = {}  # a text stands in thousands of rows

    def encode(value: object) -> object:
        if not isinstance(value, str):
            return hide_paths(str(value)) if isinstance(value, list | tuple | dict) else value
        if value not in known:
            known[value] = hide_paths(str(encode_csv_cell(value)))
        return known[value]

    written = frame.rename(columns=encode_csv_cell)
    for place, (_, column) in enumerate(frame.items()):
        if not pd.api.types.is_numeric_dtype(column):
            written.isetitem(place, column.map(encode))
    return str(written.to_csv(index=False))


# Of a disk: a folder and what is below; not a part of an address or of a fraction
_PATH = re.compile(r"(?:file://|(?<![\w.:/<]))/(?:[\w.+@~%{}-]+/)+([\w.+@~%{}-]*)")


def hide_paths(text: str) -> str:
    """Replace the folders of absolute paths, which tell where an author keeps files: "/home/me/runs/a" is "…/a"."""
    return _PATH.sub(r"…/\1", text)


def _replace_control_characters(html: str) -> str:
    """Replace control characters, which HTML forbids, and marks that turn text around. A hostile log may have some."""
    return re.sub(
        r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069"
        r"\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]",
        "\N{REPLACEMENT CHARACTER}",
        html,
    )
