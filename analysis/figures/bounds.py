"""Figure: what bounds a training step, and how long it would take on another machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    TEXT_COLOUR,
    VERMILION,
    Chart,
    compute_chart_height,
    draw_panels,
    layer_charts,
    make_kind_channels,
    make_names_axis,
    make_number_channel,
    make_span_channels,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements, render_seconds_interval
from mlhpc.analysis.roofline.bounds import RESOURCE_NAMES, RESOURCES, UNITS, describe_roof_share, is_binding, render_si
from mlhpc.analysis.roofline.regime import Case, compute_term_seconds, list_measured_cases, list_published_cases
from mlhpc.analysis.roofline.whatif import (
    Phase,
    Prediction,
    compute_phase_factor,
    make_exact_prediction,
    predict,
    predict_solution,
    sum_phases,
)
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.suite.performance.ceilings_file import Ceilings

TITLE = "What bounds a step"
MEASURED, SMOKE = "measured", "smoke"
MOST_SHOWN = 14  # results of a panel
COLOURS = dict(zip((RESOURCE_NAMES[r] for r in RESOURCES), (BLUE, GREEN, ORANGE, PURPLE, VERMILION, SKY), strict=True))


@dataclass(frozen=True)
class WhatIf:
    """Holds one result on one other machine. ``solution`` is None for a result that reached no target."""

    case: Case
    there: Ceilings
    phases: list[Phase]
    step: Prediction
    measured_solution_s: float | None
    solution: Prediction | None


def build_bounds_table(study: Study) -> pd.DataFrame:
    """Build a row per result and resource."""
    return pd.DataFrame([line for case in _cases(study) for line in _build_rows(case)])


def render_bounds_answer(study: Study) -> str:
    """Say which resource binds each result, and how far the step is from that roof."""
    cases = _cases(study)
    own = [case for case in cases if not case.modelled]
    sentences = [describe_case(case) for case in own]
    remarks = list(dict.fromkeys(case.remark for case in own if case.remark))
    if not own:
        missing = _explain_missing(study)
        # Of each benchmark the case nearest to its roof: later ones replace earlier ones in the dict
        best = {case.benchmark: case for case in sorted(cases, key=lambda c: -c.bounds.distance)}
        sentences = [_describe_modelled_case(case) for case in best.values()]
        sentences += [f"own results: {missing}"] if missing else []
    return ". ".join([join_statements(sentences), *remarks])


def describe_case(case: Case) -> str:
    """Describe one result in one sentence."""
    bounds = case.bounds
    if bounds.nearest is None:
        refused = "; ".join(refusal.reason for refusal in bounds.refused)
        return f"{case.label}: {bounds.verdict}" + (f" ({refused})" if refused else "")
    result = f"{case.label} ({case.benchmark} {case.size})"
    roof = describe_roof_share(
        RESOURCE_NAMES[bounds.nearest.resource], 1 / bounds.distance, "modelled" if case.modelled else "known"
    )
    text = f"{result}, step of {render_si(bounds.step_s)}s: {roof}; {bounds.verdict}"
    text += _describe_scale(case)
    for refusal in bounds.refused:
        text += f"; refused: {refusal.reason}"
    return text


def _describe_modelled_case(case: Case) -> str:
    """Describe a published result, whose roofs are modelled, by its nearest roof."""
    if case.bounds.nearest is None:
        return f"modelled, {describe_case(case)}"
    nearest = case.bounds.nearest
    resource = f"{RESOURCE_NAMES[nearest.resource]} at the peak of {nearest.roof.name}"
    text = (
        f"{case.benchmark}: a step of {case.label} takes {case.bounds.distance:.2g} times as long as its {resource}"
        " alone would allow (modelled)"
    )
    return text + _describe_scale(case)


def _describe_scale(case: Case) -> str:
    """Say from how many ranks on the network would be the limit, with at least one sample a rank."""
    if case.scale is None:
        return ""
    few, many = case.scale
    if few > case.batch:
        return (
            "; by bandwidth, latency left out, the network would not be the limit on any number of ranks up to the "
            f"global batch of {case.batch:,.0f}"
        )
    last = _render_ranks(many) if many <= case.batch else f"more than the global batch of {case.batch:,.0f}"
    return f"; from {_render_ranks(few)} to {last} ranks on the network would be the limit by bandwidth"


def _render_ranks(ranks: int) -> str:
    """Render a number of ranks with two digits."""
    # More digits would claim what no model of a network knows
    return f"{float(f'{ranks:.2g}'):,.0f}"


def draw_bounds_chart(table: pd.DataFrame) -> Chart:
    """Draw a row per result: the time of each resource at its ceiling, the band from largest to sum, and the step."""
    known = set(table["resource"])
    kinds = make_kind_channels("resource", {name: colour for name, colour in COLOURS.items() if name in known})

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows[rows["label"].isin(list(dict.fromkeys(rows["label"]))[:MOST_SHOWN])]
        base = alt.Chart(rows).encode(y=make_names_axis(rows))
        title = "seconds of one training step"
        x = make_number_channel(alt.X, "T = Q / C [s]", title, log=True, prefix=True)
        # Band and step once for each result, whatever the number of its resources
        first = base.transform_filter("datum._first")
        ends = make_span_channels("x", "band from [s]", "band to [s]", title)
        band = first.mark_bar(color=GREY, opacity=0.3, height={"band": 0.5}).encode(**ends)
        step = first.mark_tick(color=TEXT_COLOUR, thickness=3).encode(
            x=make_number_channel(alt.X, "step [s]", title, log=True, prefix=True)
        )
        marks = base.mark_point(size=80, strokeWidth=2).encode(x=x, **kinds)
        return layer_charts(band, step, marks, height=compute_chart_height(rows["label"].nunique(), 26))

    own = table[table["step is"] == MEASURED]
    shown = own if len(own) else table  # modelled roofs stand in the table
    shown = shown[shown["T = Q / C [s]"].notna() & ~shown["state"].str.startswith("refused")]
    shown = shown.assign(_first=~shown.duplicated(["benchmark", "size", "label", "ceilings"]))
    return draw_panels(shown, ["benchmark", "size", "step is"], draw, columns=1)


def build_whatif_table(study: Study) -> pd.DataFrame:
    """Build a row per result, machine and phase, then for step and solution."""
    lines = []
    for item in _predict_all(study):
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


def render_whatif_answer(study: Study) -> str:
    """Name the predicted step and solution of each result."""
    sentences = []
    for item in _predict_all(study):
        text = (
            f"{item.case.label} ({item.case.benchmark} {item.case.size}) on {item.there.system}: a step of "
            f"{_range(item.step)} "
            f"instead of {render_si(item.case.bounds.step_s)}s"
        )
        if item.solution is not None and item.measured_solution_s is not None:
            text += f", the solution in {_range(item.solution)} instead of {render_si(item.measured_solution_s)}s"
        unchanged = [
            phase.name.replace("_", " ") for phase in item.phases if phase.because == "kept" and phase.measured_s > 0
        ]
        sentences.append(text + (f"; kept as measured: {', '.join(unchanged)}" if unchanged else ""))
    return join_statements(sentences)


def draw_whatif_chart(table: pd.DataFrame) -> Chart:
    """Draw a row per result and machine: the prediction with its band, and the measured time as a tick."""

    def draw(rows: pd.DataFrame) -> Chart:
        base = alt.Chart(rows).encode(y=make_names_axis(rows))
        title = f"seconds of the {rows['of'].iloc[0]}"
        ends = make_span_channels("x", "from [s]", "to [s]", title)
        band = base.mark_bar(color=GREY, opacity=0.4, height={"band": 0.5}).encode(**ends)
        point = base.mark_point(color=BLUE, filled=True, size=90, opacity=1, shape="diamond")
        here = base.mark_tick(color=TEXT_COLOUR, thickness=3).encode(
            x=make_number_channel(alt.X, "measured [s]", title, log=True, prefix=True)
        )
        predicted = point.encode(x=make_number_channel(alt.X, "predicted [s]", title, log=True, prefix=True))
        return layer_charts(band, here, predicted, height=compute_chart_height(rows["label"].nunique(), 26))

    shown = table[table["of"].isin(["training step", "solution"])]
    return draw_panels(shown.assign(label=shown["label"] + " on " + shown["on"]), ["of"], draw, columns=1)


def _build_rows(case: Case) -> list[dict[str, object]]:
    bounds = case.bounds
    head: dict[str, object] = {"label": case.label, "benchmark": case.benchmark, "size": case.size}
    tail: dict[str, object] = {
        "ranks": case.ranks,
        "global batch": case.batch,
        "n": case.n,
        "step [s]": bounds.step_s,
        "step is": "derived from epoch times" if case.modelled else MEASURED,
        "band from [s]": bounds.lower_s,
        "band to [s]": bounds.upper_s,
        "step lies": bounds.verdict.split(":")[0],
        "network roof from [ranks]": case.scale[0] if case.scale else None,
        "network roof to [ranks]": case.scale[1] if case.scale else None,
        "ceilings": f"{case.ceilings.system}, {case.ceilings.date[:10]}" if case.ceilings else "modelled",
    }
    nearest = "binds" if bounds.nearest and is_binding(1 / bounds.distance) else "nearest, does not bind"
    terms = [(term, nearest if term is bounds.nearest else "in the band") for term in bounds.terms]
    terms += [(refusal.term, f"refused: {refusal.reason}") for refusal in bounds.refused]
    lines = []
    for term, state in sorted(terms, key=lambda item: RESOURCES.index(item[0].resource)):
        # A vendor's peak is no measured rate, so the share of it that was reached is not stated
        measured = term.roof.origin == "measured"
        resource = {
            "resource": RESOURCE_NAMES[term.resource],
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
    lines += [
        head | {"resource": RESOURCE_NAMES[r], "state": f"unknown: {why}"} | tail for r, why in bounds.unknown.items()
    ]
    return lines


def _cases(study: Study) -> list[Case]:
    """List own and published cases. NotAnswerableError if there are neither."""
    theirs = list_published_cases(study)
    try:
        # Published cases exist in every report of an MLPerf benchmark, own ones only with ceilings
        return list_measured_cases(study) + theirs
    except NotAnswerableError:
        # The shipped results of others do not answer for a study of own results alone
        if not theirs or not study.distinct["published"].any():
            raise
        return theirs


def _explain_missing(study: Study) -> str:
    if study.distinct["published"].all():
        return ""
    try:
        list_measured_cases(study)
    except NotAnswerableError as missing:
        return str(missing)
    return ""


def _range(predicted: Prediction) -> str:
    return render_seconds_interval(predicted.seconds, predicted.low_s, predicted.high_s)


def _predict_all(study: Study) -> list[WhatIf]:
    if not study.inputs.what_if:
        raise NotAnswerableError("ceilings of another machine: mlhpc report PATH... ceilings.json --what-if other.json")
    rows = study.results.set_index("group")
    return [
        _predict_case(case, there, rows.loc[case.group])
        for case in list_measured_cases(study)
        for there in study.inputs.what_if
    ]


def _predict_case(case: Case, there: Ceilings, row: pd.Series) -> WhatIf:
    assert case.work is not None
    assert case.ceilings is not None
    phases = predict(
        case.work.phases, compute_term_seconds(case.ceilings, case.work), compute_term_seconds(there, case.work)
    )
    step = sum_phases(phases)
    train_s, eval_s, measured = (float(row[f"{name}.mean"]) for name in ("train_s", "eval_s", "run_s"))
    predicted = None
    if measured == measured and train_s > 0:
        # Evaluation is forward passes: it changes as they do
        evaluation = compute_phase_factor(phases, "forward_backward").times(eval_s if eval_s == eval_s else 0.0)
        predicted = predict_solution(step, train_s / case.bounds.step_s, evaluation=evaluation) + make_exact_prediction(
            measured - train_s - eval_s
        )
    return WhatIf(case, there, phases, step, measured if predicted else None, predicted)


def _is_measured(table: pd.DataFrame) -> bool:
    """Return True if a step was measured on a problem of more than seconds; modelled roofs bind nothing."""
    return bool(((table["step is"] == MEASURED) & (table["size"] != SMOKE)).any())


VIEWS = (
    View(
        "extended_roofline", "Which resource bounds a step",
        Question(
            UNDERSTAND_TIME,
            "Which resource bounds a step, compute, memory, network or storage?",
            ("executed_flops_per_sample", "algorithmic_bytes_per_sample"),
            needs="ceilings of the machine",
        ),
        "T = Q / C of one rank and training step for each resource, Q what the step asked for, C the ceiling in "
        "its regime. The grey band runs from the largest T (everything overlaps) to their sum (nothing "
        "overlaps). The tick is the step: measured, or of published results derived (mean time of an epoch over "
        "its steps). A T longer than the step is an input error: it is not drawn, and the table says why. A "
        "resource binds if its T is at least half of the step. Sources of all ceilings are in the table.",
        build_bounds_table, render_bounds_answer, draw_bounds_chart, _is_measured,
    ),
    View(
        "what_if", "What if it ran elsewhere",
        Question(
            UNDERSTAND_TIME,
            "How long would it take on another machine?",
            ("run_s.mean", "executed_flops_per_sample"),
            needs="ceilings of another machine",
        ),
        "Seconds of a training step and to the solution: measured here (tick), predicted for the other machine "
        "with as many ranks (diamond) and the band of the prediction. Each phase keeps its efficiency and "
        "changes as its resources' times at the ceilings do; the band is from the slowest- to the fastest- "
        "changing resource, and to the case that what the roofs do not explain stays. Staging, phases without a "
        "resource and the number of steps stay. docs/roofline.md has the errors of such predictions where both "
        "sides were measured.",
        build_whatif_table, render_whatif_answer, draw_whatif_chart,
    ),
)  # fmt: skip
