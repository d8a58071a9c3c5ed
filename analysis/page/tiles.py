"""Builds the tiles at the top of the page: compliance, scores, state of the file cache, resumed runs, other work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlhpc.analysis.drawing.digits import render_count
from mlhpc.analysis.page.checked import CheckedPath, render_error
from mlhpc.analysis.study import Study
from mlhpc.suite.compliance.rules.base import Finding
from mlhpc.suite.log.other_work import render_percent
from mlhpc.suite.log.results_tree import parse_round


@dataclass(frozen=True)
class Tile:
    """Holds one tile. ``state`` is good, warn, bad or info; the page shows it by a symbol besides its colour."""

    state: str
    title: str
    value: str
    detail: str


def build_tiles(study: Study, checked: Sequence[CheckedPath]) -> list[Tile]:
    """Build the tiles in the order of the page. Other work comes first if there was any."""
    others = [_compliance(study, checked), _build_scores_tile(study), _cache(study), _build_resumed_tile(study)]
    work = _other_work(study)
    return [work, *others] if work.state == "bad" else [*others, work]


def _other_work(study: Study) -> Tile:
    """Say whether other programs may have slowed a run. If they did, the times on the page say little."""
    runs = study.runs
    busy, logged = runs[runs["had_company"]], int(runs["other_work_share"].notna().sum())
    if len(busy):
        share = render_percent(float(busy["other_work_share"].max()))
        detail = f"other programs used up to {share} of the CPUs: times on a busy machine say little"
        return Tile("bad", "Busy machine", f"{len(busy)} of {render_count(len(runs), 'run')}", detail)
    if not logged:
        return Tile("info", "Busy machine", "not logged", "no log says whether other programs used the machine")
    detail = f"{logged} of {render_count(len(runs), 'run')} log it; none shared its CPUs with other programs"
    return Tile("good" if logged == len(runs) else "info", "Busy machine", "no", detail)


def _compliance(study: Study, checked: Sequence[CheckedPath]) -> Tile:
    """Count errors.

    Those of own results are bad; those of results that MLCommons reviewed and published are questions.
    """
    logs = sum(item.verdict.logs for item in checked)
    # Zero errors of zero logs would look like a success
    if not logs:
        return Tile("warn", "Compliance", "not checked", "the check found no log it could judge")
    errors = [finding for item in checked for finding in item.verdict.counted("error")]
    theirs = [finding for finding in errors if _is_published(study, finding)]
    own = [finding for finding in errors if finding not in theirs]
    warnings = sum(item.verdict.count("warning") for item in checked)
    rules = ", ".join(sorted({name for item in checked for name in item.verdict.rulesets}))
    detail = f"{render_count(logs, 'log')} checked by {rules}; {render_count(warnings, 'warning')}"
    if theirs:
        detail += (
            f"; {render_count(len(theirs), 'question')} about published results, which MLCommons reviewed and accepted"
        )
    if own:
        return Tile("bad", "Compliance", render_count(len(own), "error"), f"{detail}. First: {render_error(own[0])}")
    if theirs:
        value = "published" if study.runs["published"].all() else "no errors of yours"
        return Tile("info", "Compliance", value, f"{detail} (listed under Issues)")
    return Tile("warn" if warnings else "good", "Compliance", "no errors", detail)


def _is_published(study: Study, finding: Finding) -> bool:
    """Return True if the finding is about a submitter of a public round whose runs in the report are all published."""
    parts = Path(finding.file).parts
    # The folder after that of the round is the submitter's
    place = next((at for at, part in enumerate(parts[:-1]) if parse_round(Path(part))), None)
    if place is None:
        return False
    runs = study.runs
    about = runs[(runs["round"] == parse_round(Path(parts[place]))) & (runs["submitter"] == parts[place + 1])]
    return bool(len(about) and about["published"].all())


def _build_scores_tile(study: Study) -> Tile:
    rows, runs = study.results, study.runs
    scored = int(rows["score_s"].notna().sum())
    # Resumed and pruned runs are never scored, so they are not counted as lost
    lost = runs[~runs["converged"] & ~runs["resumed"] & ~runs["pruned"]]
    reasons = ", ".join(f"{count} {name}" for name, count in lost["outcome"].value_counts(sort=True).items())
    detail = f"{int(runs['converged'].sum())} of {render_count(len(runs), 'run')} reached the target"
    detail += f"; {reasons}" if reasons else ""
    state = "bad" if not scored else "good" if scored == len(rows) and lost.empty else "warn"
    return Tile(state, "Scored", f"{scored} of {render_count(len(rows), 'result')}", detail)


def _cache(study: Study) -> Tile:
    states = study.runs["cache_state"].fillna("not logged").value_counts().sort_index()
    detail = "; ".join(f"{count} {name}" for name, count in states.items())
    known = states.index.isin(["dropped", "cold-by-size"])
    if known.all():
        return Tile("good", "File cache", "cold", detail)
    if "unverified" in states.index:
        return Tile("warn", "File cache", "unverified", detail + " (the first epoch may have read from memory)")
    return Tile("info", "File cache", "partly known" if known.any() else "not logged", detail)


def _build_resumed_tile(study: Study) -> Tile:
    resumed = int(study.runs["resumed"].sum())
    carried = int(study.runs["carried_over_from"].notna().sum())
    detail = "no run was continued from a checkpoint" if not resumed else "continued from a checkpoint, never scored"
    if carried:
        detail += f"; {render_count(carried, 'run')} already published in an earlier round"
    return Tile("warn" if resumed else "good", "Resumed", render_count(resumed, "run"), detail)
