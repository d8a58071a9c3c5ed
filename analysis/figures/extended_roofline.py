"""Figure: the extended roofline, for every resource the time its work would take at its ceiling, beside the measured
step.
"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, bars, clip, listed
from analysis.drawing.rooflines import si_scale
from analysis.roofline.bounds import NAMES, RESOURCES, UNITS, at_roof, binds, si
from analysis.roofline.cases import Case, by_class, measured_cases, published_cases
from analysis.study import NotAnswerableError, Study

TITLE = "Which resource bounds a step"
CAPTION = (
    "Extended roofline: T = Q / C of one rank and training step for each resource, Q what the step asked for, C the "
    "ceiling "
    "in its regime. The grey band runs from the largest T (everything overlaps) to their sum (nothing overlaps). The "
    "bar is "
    "the step: measured, or of published results derived (mean time of an epoch over its steps). Filled signs: "
    "quantities "
    "logged or counted. Hollow signs: algorithmic bytes, or modelled ones. Small thin signs: ceilings of vendors or "
    "literature, "
    "of which no percentage is taken. A T longer than the step is an input error: it is not drawn, and the table says "
    "why. "
    "A resource binds if its T is at least half of the step. Sources of all ceilings are in the table."
)
SHOWN = 14  # published results of a class
LOOKS = dict(
    zip(
        RESOURCES,
        ((BLUE, "o"), (GREEN, "s"), (ORANGE, "^"), (PURPLE, "D"), (VERMILION, "v"), (SKY, "P")),
        strict=True,
    )
)


def table(study: Study) -> pd.DataFrame:
    """A row per result and resource."""
    return pd.DataFrame([line for case in _cases(study) for line in _lines(case)])


def answer(study: Study) -> str:
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


def draw(study: Study) -> Figure:
    """A panel per benchmark, size and kind of ceiling; a row per result."""
    classes = [(title, cases[:SHOWN]) for title, cases in by_class(_cases(study))]
    figure, axes = bars([len(cases) for _, cases in classes], 1, legend=True)
    seen: set[str] = set()
    for (title, cases), [axis] in zip(classes, axes, strict=True):
        ordered = list(reversed(cases))
        for place, case in enumerate(ordered):
            seen |= _row(axis, place, case)
        axis.set_yticks(range(len(ordered)), [_name(case) for case in ordered])
        _scale(axis, ordered)
        axis.set_title(clip(title, 80))
        axis.set_xlabel("seconds of one training step")
    last = axes[-1][0]
    for resource in RESOURCES:
        if resource in seen:
            colour, marker = LOOKS[resource]
            last.plot([], [], marker, color=colour, markersize=8, label=NAMES[resource])
    last.plot([], [], "-", color=GREY, linewidth=9, alpha=0.4, label="largest to sum")
    last.plot([], [], "|", color=INK, markersize=14, markeredgewidth=3, label="step")
    figure.legend(*last.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _row(axis: Axes, place: int, case: Case) -> set[str]:
    bounds = case.bounds
    if bounds.terms:
        axis.barh([place], [bounds.upper_s - bounds.lower_s], left=bounds.lower_s, height=0.5, color=GREY, alpha=0.4)
    for term in bounds.terms:
        colour, marker = LOOKS[term.resource]
        known = term.demand.basis in {"counted", "logged"}
        thin = term.roof.origin != "measured"
        axis.plot(
            [term.seconds], [place], marker, color=colour, markerfacecolor=colour if known else "none",
            markersize=6 if thin else 9, markeredgewidth=0.9 if thin else 1.8,
        )  # fmt: skip
    axis.plot([bounds.step_s], [place], "|", color=INK, markersize=17, markeredgewidth=3)
    text = "no roof known"
    if bounds.nearest is not None:
        text = f"{si(bounds.step_s)}s = {bounds.distance:.3g} × {NAMES[bounds.nearest.resource]}"
    if bounds.refused:
        text += f"; refused: {', '.join(NAMES[refusal.term.resource] for refusal in bounds.refused)}"
    axis.annotate(text, (bounds.step_s, place), xytext=(9, 0), textcoords="offset points", va="center", ha="left")
    return {term.resource for term in bounds.terms}


def _scale(axis: Axes, cases: list[Case]) -> None:
    seconds = [t.seconds for c in cases for t in c.bounds.terms] + [c.bounds.step_s for c in cases]
    low, high = max(min(seconds), max(seconds) * 1e-6), max(seconds)
    axis.set_xscale("log")
    axis.set_xlim(low / 2, high * (high / low) ** 0.55 * 1.5)  # room for what is written right of the step
    si_scale(axis.xaxis, "s")
    axis.grid(visible=False, axis="y")


def _name(case: Case) -> str:
    scale = "" if case.modelled else f", {case.ranks:g} rank{'s' * (case.ranks > 1)}"
    return clip(case.label, 34) + scale + f", batch {case.batch:g}"


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
