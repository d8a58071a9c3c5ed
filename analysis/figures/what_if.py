"""Figure: own runs as predicted for machines whose ceilings were given with --what-if."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREY, INK, bars, clip, listed
from analysis.drawing.digits import seconds_with_interval
from analysis.drawing.rooflines import si_scale
from analysis.roofline.bounds import si
from analysis.roofline.cases import Case, measured_cases
from analysis.roofline.regime import terms_there
from analysis.roofline.whatif import Phase, Prediction, exactly, predict, scaled_work, solution, total
from analysis.sources.ceilings import Ceilings
from analysis.study import NotAnswerableError, Study

TITLE = "What if it ran elsewhere"
CAPTION = (
    "Seconds of a training step (left) and to the solution (right): measured here (bar), predicted for the other "
    "machine with as "
    "many ranks (diamond) and the band of the prediction. Each phase keeps its efficiency and changes as its "
    "resources' times at "
    "the ceilings do; the band is from the slowest- to the fastest-changing resource, and to the case that what the "
    "roofs do not "
    "explain stays. Staging, phases without a resource and the number of steps stay. docs/roofline.md has the errors "
    "of such "
    "predictions where both sides were measured."
)


@dataclass(frozen=True)
class Elsewhere:
    """One result on one other machine. ``solution_s`` is None for a result that reached no target."""

    case: Case
    there: Ceilings
    phases: list[Phase]
    step: Prediction
    measured_solution_s: float | None
    solution: Prediction | None


def table(study: Study) -> pd.DataFrame:
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


def answer(study: Study) -> str:
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


def draw(study: Study) -> Figure:
    """A row per result and machine."""
    items = list(reversed(_predictions(study)))
    figure, [axes] = bars([len(items)], 2, legend=True)
    for place, item in enumerate(items):
        pairs = [(item.case.bounds.step_s, item.step)]
        if item.solution is not None and item.measured_solution_s is not None:
            pairs.append((item.measured_solution_s, item.solution))
        for axis, (measured, predicted) in zip(axes, pairs, strict=False):
            axis.barh(
                [place], [predicted.high_s - predicted.low_s], left=predicted.low_s, height=0.45, color=GREY, alpha=0.4
            )
            axis.plot([predicted.seconds], [place], "D", color=BLUE, markersize=8)
            axis.plot([measured], [place], "|", color=INK, markersize=17, markeredgewidth=3)
    for axis, text in zip(axes, ("seconds of a training step", "seconds to the solution"), strict=True):
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        axis.set_xlim(low / 1.5, high * 1.5)
        si_scale(axis.xaxis, "s")
        axis.set_xlabel(text)
        axis.grid(visible=False, axis="y")
    axes[0].set_yticks(range(len(items)), [f"{clip(i.case.label, 24)} on {clip(i.there.system, 20)}" for i in items])
    axes[1].set_yticks(range(len(items)), [""] * len(items))
    axes[0].plot([], [], "|", color=INK, markersize=14, markeredgewidth=3, label="measured here")
    axes[0].plot([], [], "D", color=BLUE, markersize=8, label="predicted there")
    axes[0].plot([], [], "-", color=GREY, linewidth=9, alpha=0.4, label="band of the prediction")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


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
