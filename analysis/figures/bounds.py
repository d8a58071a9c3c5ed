"""Figure: what bounds a training step, and how long it would take on another machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import altair as alt
import pandas as pd

from analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Chart,
    names_axis,
    number,
    panels,
    row_pixels,
    span,
)
from analysis.drawing.digits import listed, seconds_with_interval
from analysis.drawing.view import View
from analysis.roofline.bounds import NAMES, RESOURCES, UNITS, at_roof, binds, si
from analysis.roofline.cases import Case, measured_cases, published_cases
from analysis.roofline.regime import terms_there
from analysis.roofline.whatif import Phase, Prediction, exactly, predict, scaled_work, solution, total
from analysis.sources.ceilings import Ceilings
from analysis.study import NotAnswerableError, Study

TITLE = "What bounds a step"
SHOWN = 14  # results of a panel
COLOURS = dict(zip(RESOURCES, (BLUE, GREEN, ORANGE, PURPLE, VERMILION, SKY), strict=True))


@dataclass(frozen=True)
class Elsewhere:
    """One result on one other machine. ``solution_s`` is None for a result that reached no target."""

    case: Case
    there: Ceilings
    phases: list[Phase]
    step: Prediction
    measured_solution_s: float | None
    solution: Prediction | None


def bounds_table(study: Study) -> pd.DataFrame:
    """A row per result and resource."""
    return pd.DataFrame([line for case in _cases(study) for line in _lines(case)])


def bounds_answer(study: Study) -> str:
    """Which resource binds each result, and how far it is from it."""
    cases = _cases(study)
    own = [case for case in cases if not case.modelled]
    sentences = [sentence(case) for case in own]
    remarks = list(dict.fromkeys(case.remark for case in own if case.remark))
    if not own:
        missing = _why_no_own(study)
        best = {case.benchmark: case for case in sorted(cases, key=lambda c: -c.bounds.distance)}
        sentences = [f"modelled, {sentence(case)}" for case in best.values()]
        sentences += [f"own results: {missing}"] if missing else []
    return ". ".join([listed(sentences), *remarks])


def sentence(case: Case) -> str:
    """One result in one sentence."""
    bounds = case.bounds
    if bounds.nearest is None:
        refused = "; ".join(refusal.reason for refusal in bounds.refused)
        return f"{case.label}: {bounds.verdict}" + (f" ({refused})" if refused else "")
    result = f"{case.label} ({case.benchmark} {case.size})"
    roof = at_roof(NAMES[bounds.nearest.resource], 1 / bounds.distance, "modelled" if case.modelled else "known")
    text = f"{result}, step of {si(bounds.step_s)}s: {roof}; {bounds.verdict}"
    if case.scale is not None:
        few, many = map(_two_digits, case.scale)
        text += f"; with links as fast as measured, the network's roof is reached at {few} to {many} ranks"
    for refusal in bounds.refused:
        text += f"; refused: {refusal.reason}"
    return text


def _two_digits(ranks: int) -> str:
    """Ranks with two digits: more would claim what no model of a network knows."""
    return f"{float(f'{ranks:.2g}'):,.0f}"


def bounds_chart(table: pd.DataFrame) -> Chart:
    """A row per result: the time of each resource at its ceiling, the band from the largest to their sum, and the step."""
    names = [NAMES[resource] for resource in RESOURCES if NAMES[resource] in set(table["resource"])]
    colours = alt.Scale(domain=names, range=[COLOURS[r] for r in RESOURCES if NAMES[r] in names])
    shapes = alt.Scale(domain=names)

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows[rows["label"].isin(list(dict.fromkeys(rows["label"]))[:SHOWN])]
        base = alt.Chart(rows).encode(y=names_axis(rows))
        title = "seconds of one training step"
        x = number(alt.X, "T = Q / C [s]", title, log=True, prefix=True)
        first = base.transform_filter("datum._first")
        ends = span("x", "band from [s]", "band to [s]", title)
        band = first.mark_bar(color=GREY, opacity=0.3, height={"band": 0.5}).encode(**ends)
        step = first.mark_tick(color=INK, thickness=3).encode(x=number(alt.X, "step [s]", title, log=True, prefix=True))
        marks = base.mark_point(size=80, strokeWidth=2).encode(
            x=x, color=alt.Color("resource:N", scale=colours), shape=alt.Shape("resource:N", scale=shapes)
        )
        return alt.layer(band, step, marks).properties(height=row_pixels(rows["label"].nunique(), 26))

    shown = table[table["T = Q / C [s]"].notna() & ~table["state"].str.startswith("refused")]
    shown = shown.assign(_first=~shown.duplicated(["benchmark", "size", "label", "ceilings"]))
    return panels(shown, ["benchmark", "size", "step is"], draw, columns=1)


def elsewhere_table(study: Study) -> pd.DataFrame:
    """A row per result, machine and phase, then step and solution."""
    lines = []
    for item in _predictions(study):
        head = {
            "label": item.case.label,
            "benchmark": item.case.benchmark,
            "size": item.case.size,
            "ranks": item.case.ranks,
            "on": item.there.title,
        }
        rows = [
            (phase.name.replace("_", " "), phase.measured_s, phase.predicted, phase.because) for phase in item.phases
        ]
        rows.append(("training step", item.case.bounds.step_s, item.step, "sum of the phases"))
        if item.solution is not None and item.measured_solution_s is not None:
            rows.append(("solution", item.measured_solution_s, item.solution, "as many steps and evaluations"))
        lines += [
            head
            | {
                "of": name,
                "measured [s]": measured,
                "predicted [s]": predicted.seconds,
                "from [s]": predicted.low_s,
                "to [s]": predicted.high_s,
                "carried over by": why,
            }
            for name, measured, predicted, why in rows
        ]
    return pd.DataFrame(lines)


def elsewhere_answer(study: Study) -> str:
    """The predicted step and solution of each result."""
    sentences = []
    for item in _predictions(study):
        text = (
            f"{item.case.label} ({item.case.benchmark} {item.case.size}) on {item.there.system}: a step of "
            f"{_range(item.step)} "
            f"instead of {si(item.case.bounds.step_s)}s"
        )
        if item.solution is not None and item.measured_solution_s is not None:
            text += f", the solution in {_range(item.solution)} instead of {si(item.measured_solution_s)}s"
        unchanged = [
            phase.name.replace("_", " ") for phase in item.phases if phase.because == "kept" and phase.measured_s > 0
        ]
        sentences.append(text + (f"; kept as measured: {', '.join(unchanged)}" if unchanged else ""))
    return listed(sentences)


def elsewhere_chart(table: pd.DataFrame) -> Chart:
    """A row per result and machine: the prediction with its band, and the measured time as a tick."""

    def draw(rows: pd.DataFrame) -> Chart:
        base = alt.Chart(rows).encode(y=names_axis(rows))
        title = f"seconds of the {rows['of'].iloc[0]}"
        ends = span("x", "from [s]", "to [s]", title)
        band = base.mark_bar(color=GREY, opacity=0.4, height={"band": 0.5}).encode(**ends)
        point = base.mark_point(color=BLUE, filled=True, size=90, opacity=1, shape="diamond")
        here = base.mark_tick(color=INK, thickness=3).encode(
            x=number(alt.X, "measured [s]", title, log=True, prefix=True)
        )
        predicted = point.encode(x=number(alt.X, "predicted [s]", title, log=True, prefix=True))
        return alt.layer(band, here, predicted).properties(height=row_pixels(rows["label"].nunique(), 26))

    shown = table[table["of"].isin(["training step", "solution"])]
    return panels(shown.assign(label=shown["label"] + " on " + shown["on"]), ["of"], draw, columns=1)


def _lines(case: Case) -> list[dict[str, object]]:
    bounds = case.bounds
    head: dict[str, object] = {"label": case.label, "benchmark": case.benchmark, "size": case.size}
    tail: dict[str, object] = {
        "ranks": case.ranks,
        "global batch": case.batch,
        "n": case.n,
        "step [s]": bounds.step_s,
        "step is": "derived from epoch times" if case.modelled else "measured",
        "band from [s]": bounds.lower_s,
        "band to [s]": bounds.upper_s,
        "step lies": bounds.verdict.split(":")[0],
        "network roof from [ranks]": case.scale[0] if case.scale else None,
        "network roof to [ranks]": case.scale[1] if case.scale else None,
        "ceilings": f"{case.ceilings.system}, {case.ceilings.date[:10]}" if case.ceilings else "modelled",
    }
    nearest = "binds" if bounds.nearest and binds(1 / bounds.distance) else "nearest, does not bind"
    terms = [(term, nearest if term is bounds.nearest else "in the band") for term in bounds.terms]
    terms += [(refusal.term, f"refused: {refusal.reason}") for refusal in bounds.refused]
    lines = []
    for term, state in sorted(terms, key=lambda item: RESOURCES.index(item[0].resource)):
        measured = term.roof.origin == "measured"
        resource = {
            "resource": NAMES[term.resource],
            "T = Q / C [s]": term.seconds,
            "T / step": term.seconds / bounds.step_s if measured and not state.startswith("refused") else math.nan,
            "state": state,
            "Q": term.demand.amount,
            "unit": UNITS[term.resource],
            "Q is": term.demand.basis,
            "Q from": term.demand.note,
            "C [unit/s]": term.roof.per_s,
            "C is": term.roof.name,
            "source of C": term.roof.source if measured else f"{term.roof.origin}: {term.roof.source}",
        }
        lines.append(head | resource | tail)
    lines += [head | {"resource": NAMES[r], "state": f"unknown: {why}"} | tail for r, why in bounds.unknown.items()]
    return lines


def _cases(study: Study) -> list[Case]:
    """Own and published cases. NotAnswerableError where there are neither."""
    theirs = published_cases(study)
    try:
        return measured_cases(study) + theirs
    except NotAnswerableError:
        if not theirs:
            raise
        return theirs


def _why_no_own(study: Study) -> str:
    if study.distinct["published"].all():
        return ""
    try:
        measured_cases(study)
    except NotAnswerableError as missing:
        return str(missing)
    return ""


def _range(predicted: Prediction) -> str:
    return seconds_with_interval(predicted.seconds, predicted.low_s, predicted.high_s)


def _predictions(study: Study) -> list[Elsewhere]:
    if not study.inputs.what_if:
        raise NotAnswerableError("ceilings of another machine: mlhpc report PATH... ceilings.json --what-if other.json")
    rows = study.results.set_index("group")
    return [
        _elsewhere(case, there, rows.loc[case.group])
        for case in measured_cases(study)
        for there in study.inputs.what_if
    ]


def _elsewhere(case: Case, there: Ceilings, row: pd.Series) -> Elsewhere:
    assert case.work is not None
    assert case.ceilings is not None
    phases = predict(case.work.phases, terms_there(case.ceilings, case.work), terms_there(there, case.work))
    step = total(phases)
    train_s, eval_s, measured = (float(row[f"{name}.mean"]) for name in ("train_s", "eval_s", "run_s"))
    predicted = None
    if measured == measured and train_s > 0:
        evaluation = scaled_work(phases, "forward_backward").times(eval_s if eval_s == eval_s else 0.0)
        predicted = solution(step, train_s / case.bounds.step_s, evaluation=evaluation) + exactly(
            measured - train_s - eval_s
        )
    return Elsewhere(case, there, phases, step, measured if predicted else None, predicted)


VIEWS = (
    View(
        "extended_roofline", "Which resource bounds a step",
        "T = Q / C of one rank and training step for each resource, Q what the step asked for, C the ceiling in "
        "its regime. The grey band runs from the largest T (everything overlaps) to their sum (nothing "
        "overlaps). The tick is the step: measured, or of published results derived (mean time of an epoch over "
        "its steps). A T longer than the step is an input error: it is not drawn, and the table says why. A "
        "resource binds if its T is at least half of the step. Sources of all ceilings are in the table.",
        bounds_table, bounds_answer, bounds_chart,
    ),
    View(
        "what_if", "What if it ran elsewhere",
        "Seconds of a training step and to the solution: measured here (tick), predicted for the other machine "
        "with as many ranks (diamond) and the band of the prediction. Each phase keeps its efficiency and "
        "changes as its resources' times at the ceilings do; the band is from the slowest- to the fastest- "
        "changing resource, and to the case that what the roofs do not explain stays. Staging, phases without a "
        "resource and the number of steps stay. docs/roofline.md has the errors of such predictions where both "
        "sides were measured.",
        elsewhere_table, elsewhere_answer, elsewhere_chart,
    ),
)  # fmt: skip
