"""A study as one HTML page, a JSON document and CSV tables, all with the same numbers. Writes nothing.

The page is one file without external resources and works without scripts. It holds no clock, host name or path: the same
logs give the same bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from analysis.figures import figures
from analysis.page.drawing import style, svg
from analysis.page.issues import issues
from analysis.page.questions import Question, goals, question_of
from analysis.published import stated_minutes
from analysis.study import CLASS, NotAnswerableError, Study, heading
from analysis.tables.ingest import parsed
from analysis.tables.workers import mapped
from suite import VERSION

REPORT_VERSION = 1
NOT_VERIFIED = "Result not verified by MLCommons Association"
FINDINGS_SHOWN = 100
POOL_FROM_RESULTS = 8  # fewer are drawn sooner by one process
LAST_DATE_MS = 4102444800000  # 2100-01-01; later is a broken clock


@dataclass(frozen=True)
class Finding:
    """One finding of the compliance check, its file named without the place where the tree lies."""

    rule: str
    severity: str
    file: str
    line: int | None
    message: str


@dataclass(frozen=True)
class Verdict:
    """What suite.compliance said of one path; ``compliant`` is its own word."""

    path: str
    rulesets: tuple[str, ...]
    logs: int
    compliant: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """The page, the JSON text, and the tables by name, as CSV text and as they are."""

    html: str
    json: str
    csv: Mapping[str, str]
    frames: Mapping[str, pd.DataFrame] = field(compare=False)


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown, what it sorts by, and whether it is a number."""

    text: str
    key: str
    number: bool = False

    @property
    def short(self) -> bool:
        """True if it should stay on one line."""
        return len(self.text) <= 24


@dataclass(frozen=True)
class HtmlTable:
    """A table of the page; the first column holds row headings."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    strong: frozenset[str] = frozenset()

    def numeric(self, column: int) -> bool:
        """True if the column holds numbers (and perhaps gaps), so that it is set flush right."""
        cells = [row[column] for row in self.rows]
        return any(cell.number for cell in cells) and all(cell.number or not cell.key for cell in cells)


@dataclass(frozen=True)
class Tile:
    """One statement of the verdict strip; ``state`` is good, warn, bad or info, and has a sign besides its colour."""

    state: str
    title: str
    value: str
    detail: str


@dataclass(frozen=True)
class Picture:
    """A figure of the page, or why it is missing."""

    name: str
    title: str
    question: str
    caption: str
    svg: str = ""
    table: HtmlTable | None = None
    missing: str = ""
    answer: str = ""

    @property
    def tall(self) -> bool:
        """True if the figure is too tall to be shrunk to one printed page; it is continued on the next."""
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', self.svg)
        return box is not None and float(box[2]) > LARGEST_PRINTED * float(box[1])


@dataclass(frozen=True)
class Answered:
    """A question of questions.yaml with its answer and the figure behind it, or what is missing."""

    question: str
    answer: str
    missing: str
    figure: str
    decision: str

    @property
    def why(self) -> str:
        """``missing`` as the page says it."""
        return self.missing if self.missing.startswith(("no ", "needs ")) else f"missing {self.missing}"


@dataclass(frozen=True)
class AnsweredGoal:
    """A goal and its questions."""

    goal: str
    viewpoint: str
    questions: tuple[Answered, ...]


@dataclass(frozen=True)
class Section:
    """A headline table with its heading and remarks."""

    title: str
    table: HtmlTable
    details: HtmlTable
    remarks: tuple[str, ...] = field(default=())


def build(study: Study, verdicts: Sequence[Verdict]) -> Report:
    """The report of a study and of what the compliance check said."""
    found = issues(study)
    pictures, numbers = _pictures(study)
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    html = environment.get_template("report.html").render(
        title=_title(study),
        dates=_dates(study),
        tiles=_tiles(study, verdicts),
        not_verified=NOT_VERIFIED if not study.runs["published"].all() else "",
        goals=_answers(pictures),
        headline=_headline(study),
        pictures=pictures,
        issues=found,
        findings=_findings_table(findings),
        findings_hidden=max(0, len(findings) - FINDINGS_SHOWN),
        systems=_systems(study),
        systems_differing=_systems_differing(study),
        differing=_differing(study),
        configs=_configs(study),
        logs=_logs(study),
        formulas=FORMULAS,
        version=VERSION,
    )
    document = {
        "version": REPORT_VERSION,
        "suite_version": VERSION,
        "verdicts": [vars(v) | {"findings": [vars(f) for f in v.findings]} for v in verdicts],
        "results": _records(study.results),
        "issues": [vars(issue) for issue in found],
        "figures": [
            {
                "name": p.name,
                "question": p.question,
                "answer": p.answer or None,
                "not_answerable": p.missing or None,
                "table": _records(numbers.get(p.name)),
            }
            for p in pictures
        ],
    }
    tables = {**study.tables.named(), "runs": study.runs, "results": study.results}
    tables |= {f"figure_{name}": table for name, table in numbers.items()}
    frames = {name: table.drop(columns=["file"], errors="ignore") for name, table in tables.items()}
    return Report(
        html=_printable(html),
        json=json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        csv={name: frame.to_csv(index=False) for name, frame in frames.items()},
        frames=frames,
    )


LARGEST_PRINTED = 1.8  # height over width: at two thirds of the paper's width, 11 px text is 6 pt
FORMULAS = (
    ("Score, time to train", "mean of run_stop − run_start over the required runs without the fastest and the slowest; one run "
     "may fail and then is the slowest (MLPerf HPC rules)"),
    ("Score, throughput mode", "instances that reached the target ÷ (last run_stop − first run_start)"),
    ("Score with staging", "as the score, with the staging before run_start added to each run"),
    ("95 % interval", "Student t on log time over the scored runs; of the geometric mean"),
    ("Time split", "T = T_staging + E·τ + T_other; E·τ = training + evaluation; cut at run_stop; the parts sum to T"),
    ("Epochs to target", "epoch of the first evaluation that meets the target before run_stop"),
    ("τ, seconds per epoch", "(training + evaluation) ÷ epochs of the run"),
    ("Training throughput", "epochs × training samples ÷ training time; means of rates are harmonic"),
    ("Combined throughput", "(training samples + evaluations per epoch × evaluation samples) ÷ τ"),
    ("Compute units", "nodes × accelerators per node, or × processors where there are none"),
    ("Unit hours", "compute units × mean run time; throughput mode: units of the system × time to train all"),
    ("Spread", "sample standard deviation (n − 1) over the runs the mean is of; fastest – slowest of the same runs"),
    ("Step phases", "wall seconds of all training steps by phase, mean over ranks; the phases sum to the step"),
)  # fmt: skip


def _title(study: Study) -> str:
    names = sorted({f"{row.benchmark} ({row.size})" for row in study.results.itertuples()})
    return f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}: {_count(len(study.results), 'result')}"


def _dates(study: Study) -> str:
    known = pd.to_numeric(study.runs["run_start_ms"])
    starts = pd.to_datetime(known[known.between(0, LAST_DATE_MS)], unit="ms", utc=True)
    if starts.empty:
        return "no log has a run_start"
    first, last = starts.min().strftime("%Y-%m-%d"), starts.max().strftime("%Y-%m-%d")
    return f"runs of {first}" if first == last else f"runs from {first} to {last}"


def _tiles(study: Study, verdicts: Sequence[Verdict]) -> list[Tile]:
    return [_compliance(verdicts), _scored(study), _cache(study), _resumed(study)]


def _compliance(verdicts: Sequence[Verdict]) -> Tile:
    errors = [finding for verdict in verdicts for finding in verdict.findings if finding.severity == "error"]
    warnings = sum(f.severity == "warning" for v in verdicts for f in v.findings)
    rules = ", ".join(sorted({name for verdict in verdicts for name in verdict.rulesets}))
    logs = sum(verdict.logs for verdict in verdicts)
    if not logs:
        return Tile("warn", "Compliance", "not checked", "the check found no log it could judge")
    detail = f"{_count(logs, 'log')} checked by {rules}; {_count(warnings, 'warning')}"
    if all(verdict.compliant for verdict in verdicts):
        return Tile("warn" if warnings else "good", "Compliance", "no errors", detail)
    return Tile(
        "bad", "Compliance", _count(len(errors), "error"), f"{detail}. First: {_said(errors[0])}" if errors else detail
    )


def _said(finding: Finding) -> str:
    place = "/".join(Path(finding.file).parts[-4:])  # a line, not a path: system, scenario, benchmark, log
    return f"{place}: {finding.message}"


def _scored(study: Study) -> Tile:
    rows, runs = study.results, study.runs
    scored = int(rows["score_s"].notna().sum())
    lost = runs[~runs["converged"] & ~runs["resumed"] & ~runs["pruned"]]
    reasons = ", ".join(f"{count} {name}" for name, count in lost["outcome"].value_counts(sort=True).items())
    detail = f"{int(runs['converged'].sum())} of {_count(len(runs), 'run')} reached the target"
    state = "bad" if not scored else "good" if scored == len(rows) and lost.empty else "warn"
    return Tile(
        state, "Scored", f"{scored} of {_count(len(rows), 'result')}", detail + (f"; {reasons}" if reasons else "")
    )


def _cache(study: Study) -> Tile:
    states = study.runs["cache_state"].fillna("not logged").value_counts().sort_index()
    detail = "; ".join(f"{count} {name}" for name, count in states.items())
    known = states.index.isin(["dropped", "cold-by-size"])
    if known.all():
        return Tile("good", "File cache", "cold", detail)
    if "unverified" in states.index:
        return Tile("warn", "File cache", "unverified", detail + " (the first epoch may have read from memory)")
    return Tile("info", "File cache", "partly known" if known.any() else "not logged", detail)


def _resumed(study: Study) -> Tile:
    resumed = int(study.runs["resumed"].sum())
    carried = int(study.runs["carried_over_from"].notna().sum())
    detail = "no run was continued from a checkpoint" if not resumed else "continued from a checkpoint, never scored"
    if carried:
        detail += f"; {_count(carried, 'run')} already published in an earlier round"
    return Tile("warn" if resumed else "good", "Resumed", _count(resumed, "run"), detail)


def _headline(study: Study) -> list[Section]:
    """One table per benchmark, size, mode and division; rounds stand one after the other, never ranked together."""
    sections = []
    for key, rows in study.results.groupby([*CLASS, "division"], sort=True):
        ordered = rows.sort_values(["round", "score_s", "label"], na_position="last")
        title = f"{heading(*key[:3])} · {key[3]} division"
        sections.append(
            Section(title, _headline_table(ordered, title), _details_table(ordered, title), tuple(_remarks(ordered)))
        )
    return sections


def _remarks(rows: pd.DataFrame) -> Iterable[str]:
    first = rows.iloc[0]
    if pd.notna(first["target"]):
        sign = "≤" if first["target_direction"] == "min" else "≥"
        yield f"Target: {first['metric_name']} {sign} {first['target']:g}."
    if rows["round"].nunique() > 1:
        yield "Rounds differ in rules and data; rows are ordered within a round."
    if first["size"] != "full":
        yield f"Size {first['size']} is not the MLPerf problem; it compares with nothing but itself."


def _headline_table(rows: pd.DataFrame, caption: str) -> HtmlTable:
    """What fits a screen: each score under the name of what it is, scale, convergence, cost."""
    weak = rows["mode"].iloc[0] == "weak"
    carried = [
        f"{name} (from {since})" if since else name
        for name, since in zip(rows["name"], _text(rows["carried_over_from"]), strict=True)
    ]
    columns: dict[str, list[Any]] = {"system": carried}
    if rows["round"].nunique() > 1:
        columns["round"] = list(rows["round"])
    if weak:
        columns["models/min"] = list(rows["models_per_min"])
    minutes = rows["score_s"] / 60.0
    columns["time to train all [min]" if weak else "score by the rules [min]"] = [
        value if pd.notna(value) else f"no score: {note}"
        for value, note in zip(minutes, rows["score_note"], strict=True)
    ]
    if rows["published"].any():
        columns["official tool prints [min]"] = list(
            (rows["score_tool_s"] / 60.0).where(rows["published"] & (rows["round"] != "v0.7"))  # no tool for that round
        )
        stated = stated_minutes()
        columns["submitter stated [min]"] = [stated[group][0] if group in stated else None for group in rows["group"]]
    if (rows["staging_before_run_s.mean"] > 0).any():
        columns["with staging [min]"] = list(rows["score_with_staging_s"] / 60.0)
    if not weak:
        columns["95 % interval [min]"] = _ranges(rows["score_low_s"] / 60.0, rows["score_high_s"] / 60.0)
    columns["mean run [min]"] = list((rows["run_s.mean"] / 60.0).where(rows["score_s"].isna() | weak))
    columns["runs: averaged / reached / started"] = [
        f"{row.n_averaged} / {row.n_reached} / {row.n_started}" for row in rows.itertuples()
    ]
    columns["compute units"] = list(rows["units"])
    columns["global batch"] = list(rows["global_batch_size"])
    columns["epochs to target"] = _spread(rows["epochs_to_target.mean"], rows["epochs_to_target.std"])
    columns["training [samples/s]"] = list(rows["train_rate.mean"])
    columns["unit hours"] = list(rows["unit_hours"])
    return _table(_present(columns), caption, strong={"score by the rules [min]", "models/min"})


def _details_table(rows: pd.DataFrame, caption: str) -> HtmlTable:
    """What the headline table has no room for."""
    columns: dict[str, list[Any]] = {
        "system": list(rows["name"]),
        "round": list(rows["round"]),
        "submitter": list(rows["submitter"]),
        "folder": list(rows["system"]),
        "device": list(rows["device"]),
        "nodes": list(rows["nodes"]),
        "ranks": list(rows["ranks"]),
        "precision": list(rows["precision"]),
        "fastest – slowest [min]": _ranges(rows["fastest_s"] / 60.0, rows["slowest_s"] / 60.0),
        "models trained": list(rows["models"]),
        "metric reached": list(rows["reached_value.mean"]),
        "target": list(rows["target"]),
        "trivial baselines": [_baselines(text) for text in rows["baselines"]],
        "scaling factor shipped": list(rows["scaling_factor"]),
        "the stated score's source": [stated_minutes().get(group, (0.0, ""))[1] for group in rows["group"]],
    }
    return _table(_present(columns), f"{caption}: more")


def _present(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: values for name, values in columns.items() if any(not _absent(value) for value in values)}


def _text(values: pd.Series) -> list[str]:
    return ["" if _absent(value) or value != value else str(value) for value in values]


def _baselines(text: object) -> str | None:
    return "; ".join(f"{name} {_number(value)}" for name, value in parsed(text).items()) or None


def _pictures(study: Study) -> tuple[list[Picture], dict[str, pd.DataFrame]]:
    names = list(figures())
    many = len(study.results) >= POOL_FROM_RESULTS
    made = mapped(_picture, study, names) if many else [_picture(study, name) for name in names]
    return [picture for picture, _ in made], {picture.name: numbers for picture, numbers in made if numbers is not None}


def _picture(study: Study, name: str) -> tuple[Picture, pd.DataFrame | None]:
    module = figures()[name]
    try:
        with style():
            drawn = module.draw(study)
        numbers, said = module.table(study), module.answer(study)
    except NotAnswerableError as missing:
        return Picture(name, module.TITLE, question_of(name), module.CAPTION, missing=str(missing)), None
    picture = svg(drawn, name.replace("_", "-"), module.TITLE, module.CAPTION)
    table = _table(numbers.to_dict("list"), f"{module.TITLE}: the numbers")
    return Picture(name, module.TITLE, question_of(name), module.CAPTION, picture, table, answer=said), numbers


def _answers(pictures: Sequence[Picture]) -> list[AnsweredGoal]:
    """Every question of questions.yaml, answered by its figure or not."""
    known = {picture.name: picture for picture in pictures}

    def answered(question: Question) -> Answered:
        picture = known.get(question.figure or "")
        missing = question.missing or "" if picture is None else picture.missing
        figure = picture.name if picture and not picture.missing else ""
        return Answered(question.question, picture.answer if picture else "", missing, figure, question.decision or "")

    return [AnsweredGoal(goal.goal, goal.viewpoint, tuple(answered(q) for q in goal.questions)) for goal in goals()]


def _findings_table(findings: Sequence[Finding]) -> HtmlTable | None:
    order = {"error": 0, "warning": 1, "info": 2}
    shown = sorted(findings, key=lambda f: order.get(f.severity, 3))[:FINDINGS_SHOWN]
    if not shown:
        return None
    names = ("severity", "rule", "file", "line", "message")
    return _table({name: [getattr(f, name) for f in shown] for name in names}, "Findings of the compliance check")


SYSTEM_FIELDS = (
    "system", "round", "submitter", "name", "nodes", "accelerators_per_node", "accelerator", "accelerator_memory",
    "processors_per_node", "processor", "memory", "storage", "network", "topology", "framework",
    "operating_system", "described_by", "problem",
)  # fmt: skip


def _systems(study: Study) -> HtmlTable:
    table = study.tables.systems
    kept = {name.replace("_", " "): list(table[name]) for name in SYSTEM_FIELDS if table[name].notna().any()}
    return _table(kept, "Systems as described by their packages, or as the run collected them")


def _systems_differing(study: Study) -> list[HtmlTable]:
    """Per class with several results, the fields of the description in which their systems differ."""
    systems = study.tables.systems.set_index("system_key")
    tables = []
    for title, rows in study.classes():
        described = systems.loc[list(rows["system_key"])]
        unlike = [name for name in SYSTEM_FIELDS[4:-2] if described[name].astype(str).nunique() > 1]
        if len(rows) > 1 and unlike:
            columns: dict[str, list[Any]] = {"system": list(rows["label"])}
            columns |= {name.replace("_", " "): list(described[name]) for name in unlike}
            tables.append(_table(_present(columns), f"{title}: descriptions that differ"))
    return tables


def _settings(study: Study) -> dict[str, dict[str, Any]]:
    """Flat settings by group: hyperparameters and run_config, where all runs of the result agree."""
    found: dict[str, dict[str, Any]] = {}
    for group, runs in study.runs.groupby("group", sort=True):
        flat = [
            _flat(parsed(given)) | _flat(parsed(config))
            for given, config in zip(runs["hyperparameters"], runs["config"], strict=True)
        ]
        names = sorted({name for settings in flat for name in settings})
        found[str(group)] = {
            name: values.pop() if len(values) == 1 else "differs between runs"
            for name in names
            if (values := {json.dumps(settings.get(name)) for settings in flat})
        }
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _differing(study: Study) -> list[HtmlTable]:
    """Per class with several results, the settings in which they differ."""
    settings = _settings(study)
    tables = []
    for title, rows in study.classes():
        if len(rows) < 2:
            continue
        groups = dict(zip(rows["group"], rows["label"], strict=True))
        names = sorted({name for group in groups for name in settings[group]})
        unlike = [name for name in names if len({settings[group].get(name) for group in groups}) > 1]
        columns: dict[str, list[Any]] = {"system": list(groups.values())}
        columns |= {name: [settings[group].get(name) for group in groups] for name in unlike}
        if unlike:
            tables.append(_table(columns, f"{title}: settings that differ"))
    return tables


def _configs(study: Study) -> list[tuple[str, HtmlTable]]:
    labels = study.results.set_index("group")["label"]
    return [
        (
            f"{labels[group]} ({group})",
            _table({"setting": list(s), "value": list(s.values())}, f"Settings of {labels[group]}"),
        )
        for group, s in _settings(study).items()
        if s
    ]


def _logs(study: Study) -> HtmlTable:
    runs = study.runs
    columns = {
        "log": list(runs["run"]),
        "outcome": list(runs["outcome"]),
        "in the score": list(runs["fate"]),
        "status logged": list(runs["status_logged"]),
        "run [s]": list(runs["run_s"]),
        "epochs to target": list(runs["epochs_to_target"]),
        "last metric": list(runs["last_value"]),
        "seed": list(runs["seed"]),
        "events": list(runs["event_count"]),
        "damaged lines": list(runs["damaged_lines"]),
        "sha256": list(runs["sha256"]),
    }
    return _table(columns, "Every log that was read")


def _table(columns: Mapping[str, Sequence[Any]], caption: str, strong: Iterable[str] = ()) -> HtmlTable:
    rows = zip(*columns.values(), strict=True)
    return HtmlTable(tuple(columns), tuple(tuple(_cell(v) for v in row) for row in rows), caption, frozenset(strong))


def _cell(value: Any) -> Cell:
    if _absent(value):
        return Cell("–", "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(_number(value), repr(float(value)), number=True)
    text = str(value)
    leading = re.match(r"-?\d+(\.\d+)?(?= [±–] )", text)
    return Cell(text, leading.group() if leading else text, number=leading is not None)


def _number(value: float | None) -> str:
    """Four significant digits; whole numbers in full, grouped from five digits on."""
    if value is None or not math.isfinite(value):
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}" if abs(value) >= 10000 else str(int(value))
    if abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _ranges(low: pd.Series, high: pd.Series) -> list[str | None]:
    """Ranges with four significant digits of the larger end, and as many decimals in both."""
    return [
        f"{_fixed(a, b, 4)} – {_fixed(b, b, 4)}" if pd.notna(a) and pd.notna(b) else None
        for a, b in zip(low, high, strict=True)
    ]


def _spread(mean: pd.Series, std: pd.Series) -> list[str | float | None]:
    """Mean ± standard deviation, to two significant digits of the deviation."""
    return [
        (f"{_fixed(m, s, 2)} ± {_fixed(s, s, 2)}" if s else f"{_number(m)} ± 0") if pd.notna(s) else m
        for m, s in zip(mean, std, strict=True)
    ]


def _fixed(value: float, like: float, digits: int) -> str:
    """A number with the decimals that ``like`` has when written with so many significant digits."""
    if not math.isfinite(value) or not math.isfinite(like) or not like or abs(value) >= 1e15:
        return _number(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(like))))
    return f"{value:.{min(decimals, 12)}f}"


def _absent(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value)) or value is pd.NA


def _records(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    if table is None:
        return []
    return [{str(name): None if _absent(v) else v for name, v in row.items()} for row in table.to_dict("records")]


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _printable(html: str) -> str:
    """The page without control characters, which HTML forbids and hostile logs may contain."""
    return re.sub(
        r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]",
        "\N{REPLACEMENT CHARACTER}",
        html,
    )
