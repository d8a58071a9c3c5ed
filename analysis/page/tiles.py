"""The tiles at the top of the page: compliance, scores, state of the file cache, resumed runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.page.cells import count_text
from analysis.page.checked import CheckedPath, first_error
from analysis.study import Study


@dataclass(frozen=True)
class Tile:
    """One tile. ``state`` is good, warn, bad or info; the page shows it by a sign besides its colour."""

    state: str
    title: str
    value: str
    detail: str


def tiles(study: Study, checked: Sequence[CheckedPath]) -> list[Tile]:
    """The tiles, in the order of the page."""
    return [_compliance(checked), _scored(study), _cache(study), _resumed(study)]


def _compliance(checked: Sequence[CheckedPath]) -> Tile:
    verdicts = [item.verdict for item in checked]
    logs = sum(verdict.logs for verdict in verdicts)
    if not logs:
        return Tile("warn", "Compliance", "not checked", "the check found no log it could judge")
    errors, warnings = (sum(verdict.count(severity) for verdict in verdicts) for severity in ("error", "warning"))
    rules = ", ".join(sorted({name for verdict in verdicts for name in verdict.rulesets}))
    detail = f"{count_text(logs, 'log')} checked by {rules}; {count_text(warnings, 'warning')}"
    if not errors:
        return Tile("warn" if warnings else "good", "Compliance", "no errors", detail)
    return Tile("bad", "Compliance", count_text(errors, "error"), f"{detail}. First: {first_error(checked)}")


def _scored(study: Study) -> Tile:
    rows, runs = study.results, study.runs
    scored = int(rows["score_s"].notna().sum())
    lost = runs[~runs["converged"] & ~runs["resumed"] & ~runs["pruned"]]
    reasons = ", ".join(f"{count} {name}" for name, count in lost["outcome"].value_counts(sort=True).items())
    detail = f"{int(runs['converged'].sum())} of {count_text(len(runs), 'run')} reached the target"
    detail += f"; {reasons}" if reasons else ""
    state = "bad" if not scored else "good" if scored == len(rows) and lost.empty else "warn"
    return Tile(state, "Scored", f"{scored} of {count_text(len(rows), 'result')}", detail)


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
        detail += f"; {count_text(carried, 'run')} already published in an earlier round"
    return Tile("warn" if resumed else "good", "Resumed", count_text(resumed, "run"), detail)
