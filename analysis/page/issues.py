"""Lists doubts about a study's numbers in words: what a reader should know before believing them.

Compliance is not judged here.

Runs the compliance check (`mlhpc check`) on the paths of a report, and renders what it finds.

Builds the tiles at the top of the page: compliance, scores, state of the file cache, resumed runs, other work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from mlhpc.analysis.drawing.view import list_timed_runs, render_count
from mlhpc.analysis.page.cells import HtmlTable, build_html_table
from mlhpc.analysis.results.names import CLASS_COLUMNS, render_heading
from mlhpc.analysis.sources.readers import Step
from mlhpc.analysis.study import SAME_COURSE_EVALS, Study
from mlhpc.analysis.tables.ingest import parse_mapping
from mlhpc.suite.card import FULL
from mlhpc.suite.compliance.all_rules import RULES
from mlhpc.suite.compliance.check import JudgedLogs, Verdict, check
from mlhpc.suite.compliance.rules.base import Finding
from mlhpc.suite.log.other_work import render_percent
from mlhpc.suite.log.results_tree import CODE, parse_round
from mlhpc.suite.statistics.sessions import describe_order

# Standard deviation / mean of seconds per epoch: below the first their order is not worth words; the second is a note
NAMED_SPREAD, UNSTEADY = 0.01, 0.03
LONGEST_REASON = 300  # characters
SHOWN_PARTS = 6  # of a path: submitter, results, system, scenario, benchmark, log
RUN_COUNT = re.compile(r"(?P<count>\d+ of \d+ runs) (?P<text>.*)", re.DOTALL)
Severity = Literal["problem", "doubt", "note"]


OUTCOME_WORDS = {"target missed": "missed the target", "no run_stop": "did not end"}


@dataclass(frozen=True)
class Issue:
    """Holds one doubt. ``where`` is a result's label or a class of results."""

    severity: Severity
    where: str
    text: str


def list_failed_steps(steps: Sequence[Step]) -> list[Issue]:
    """List an issue for each step of a demo that failed or was left out."""
    return [
        Issue("problem", f"step {step.title!r} ({step.command})", step.reason[:LONGEST_REASON])
        for step in steps
        if step.reason
    ]


def list_issues(study: Study) -> list[Issue]:
    """List every issue, problems first, in a stable order."""
    unsorted = [*_check_skipped(study), *_check_results(study), *_check_classes(study)]
    order = {"problem": 0, "doubt": 1, "note": 2}
    return sorted(unsorted, key=lambda issue: (order[issue.severity], issue.where, issue.text))


@dataclass(frozen=True)
class IssueGroup:
    """Holds the results with one issue, each with its count of runs if there is one."""

    severity: Severity
    text: str
    where: tuple[str, ...]

    @property
    def of_one(self) -> str:
        """Render the whole issue of the first result."""
        place = self.where[0]
        return f"{place} {self.text}" if place.endswith(" runs") else f"{place}: {self.text}"


def group_issues(issues: Sequence[Issue]) -> list[IssueGroup]:
    """Group issues by what they say, in the order of the first of each."""
    groups: dict[tuple[Severity, str], list[str]] = {}
    for issue in issues:
        # The count of runs differs between results; without it their issues have one text
        counted = RUN_COUNT.fullmatch(issue.text)
        text = counted["text"] if counted else issue.text
        where = f"{issue.where}: {counted['count']}" if counted else issue.where
        groups.setdefault((issue.severity, text), []).append(where)
    return [IssueGroup(severity, text, tuple(where)) for (severity, text), where in groups.items()]


@dataclass(frozen=True)
class _Check:
    """Describes a doubt about the runs of a result for which ``holds`` is true.

    ``text`` continues "3 of 5 runs ...".
    """

    severity: Severity
    text: str
    holds: Callable[[pd.DataFrame], pd.Series]


_CHECKS = (
    _Check("problem", "ended without run_stop: killed or running, not scored", lambda r: r["outcome"] == "no run_stop"),
    _Check("problem", "never reached the target", lambda r: r["outcome"] == "target missed"),
    _Check("problem", "logged status success without reaching the target", lambda r: r["success_without_target"]),
    _Check("problem", "contain lines that cannot be read as events", lambda r: r["damaged_lines"] > 0),
    _Check("problem", "log numbers that cannot be; they are left out", lambda r: r["implausible"].notna()),
    _Check("problem", "have no known target, neither card nor public round", lambda r: r["target"].isna()),
    _Check("doubt", "log another scale than they had; what was used is in the table", lambda r: r["scale_suspect"]),
    _Check("doubt", "started with the file cache in an unverified state", lambda r: r["cache_state"] == "unverified"),
    _Check(
        "doubt", "log another division than the system description", lambda r: r["division"] != r["division_logged"]
    ),
    _Check(
        "doubt",
        "log another benchmark name than their folder has",
        lambda r: r["benchmark_logged"].notna() & (r["benchmark_logged"] != r["benchmark"]),
    ),
    _Check("note", "were resumed from a checkpoint, so not scored", lambda r: r["resumed"]),
    _Check("note", "lie in pruned_results, so not scored", lambda r: r["pruned"]),
    _Check("note", "were published in an earlier round already", lambda r: r["carried_over_from"].notna()),
    _Check(
        "note",
        "repeat a run that another result of the same round counts",
        lambda r: r["repeats"].notna() & r["carried_over_from"].isna(),
    ),
    _Check(
        "note", "staged before run_start, which the score does not count", lambda r: r["staging_before_run_s"] > 1.0
    ),
    _Check("note", "evaluated beside the next epoch: that time is hidden, not zero", lambda r: r["async_eval"]),
    _Check("note", "went on logging after run_stop; cut there", lambda r: r["events_after_run_stop_s"] > 1.0),
    _Check("note", "were logged by all ranks; the first of repeated events counts", lambda r: r["logged_by_all_ranks"]),
    _Check("note", "count epochs in samples; converted by train_samples", lambda r: r["epoch_num_counts_samples"]),
)


def _check_skipped(study: Study) -> Iterator[Issue]:
    """Yield the paths that were not read. The code of a package never holds results, so it is no issue."""
    for item in study.tables.skipped:
        if item.reason != CODE:
            yield Issue("problem", "/".join(item.path.parts[-SHOWN_PARTS:]), f"not read: {item.reason}")


def _check_results(study: Study) -> Iterator[Issue]:
    for row in study.results.to_dict("records"):
        runs = study.runs_of(row["group"])
        where = f"{row['label']} ({row['benchmark']} {row['size']})"
        for doubt in _CHECKS:
            # A comparison with a missing value is missing too, which is no doubt
            count = int(doubt.holds(runs).fillna(False).astype(bool).sum())
            if count:
                yield Issue(doubt.severity, where, f"{count} of {len(runs)} runs {doubt.text}")
        if pd.isna(row["score_s"]):
            yield Issue("problem", where, f"no score: {row['score_note']}")
        yield from _check_other_processes(where, runs)
        if pd.isna(row["same_as"]):
            yield from _order(where, row, study)
        yield from _seeds(where, runs)
        yield from _courses(where, runs, study.courses)
        yield from _baselines(where, row, runs)
        if pd.notna(row["scaling_factor"]) and row["scaling_factor"] != 1.0:
            text = f"the package ships scaling factor {row['scaling_factor']:.5g}; the score here is without it"
            yield Issue("note", where, text)


def _check_other_processes(where: str, runs: pd.DataFrame) -> Iterator[Issue]:
    """Yield an issue if runs shared their CPUs: they are slower and spread more than runs on idle machines."""
    beside = runs[runs["had_company"]]
    if not beside.empty:
        most = f"up to {render_percent(float(beside['other_work_share'].max()))}"
        yield Issue(
            "doubt",
            where,
            f"{len(beside)} of {len(runs)} runs shared their CPUs with other programs, which used {most}",
        )


def _order(where: str, row: dict[Any, Any], study: Study) -> Iterator[Issue]:
    """Yield issues if seconds per epoch differ between runs: the score is then a mean of unlike states."""
    yield from (Issue("doubt", where, f"seconds per epoch: {text}") for text in describe_epochs_order(study, row))
    runs = list_timed_runs(study, row["group"])
    beside = sum(later.begin_s < run.begin_s + run.time_s for run, later in pairwise(runs) if run.begin_s)
    if row["mode"] == "strong" and beside:
        text = f"{beside} of {len(runs)} runs began before the one before them ended: they may have slowed each other"
        yield Issue("doubt", where, text)
    if row["mode"] == "strong" and _vary(study, row, UNSTEADY):
        yield Issue("note", where, f"seconds per epoch vary by more than {100 * UNSTEADY:g} % between runs")


def _vary(study: Study, row: Mapping[Any, Any], least: float) -> bool:
    """Return True if seconds per epoch vary by more than ``least`` of their mean."""
    tau_s = study.converged_of(row["group"])["tau_s"]
    return bool(tau_s.std(ddof=1) > least * tau_s.mean())


def describe_epochs_order(study: Study, row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Say which runs of a result have other seconds per epoch than those before them. Empty in throughput mode."""
    if row["mode"] != "strong" or not _vary(study, row, NAMED_SPREAD):
        return ()
    return describe_order(list_timed_runs(study, row["group"], "tau_s"), row["label"]).texts


def _seeds(where: str, runs: pd.DataFrame) -> Iterator[Issue]:
    # A resumed run has the seed of its first part
    seeds = runs.loc[~runs["resumed"], "seed"].dropna()
    if seeds.empty:
        yield Issue("doubt", where, "no run logs its seed, so equal runs cannot be told from repeated ones")
    elif (same := seeds.duplicated(keep=False)).any():
        yield Issue("doubt", where, f"{int(same.sum())} of {len(seeds)} runs share a seed with another")


def _courses(where: str, runs: pd.DataFrame, courses: Mapping[str, tuple[float, ...]]) -> Iterator[Issue]:
    """Yield an issue if runs have equal metrics in all evaluations: they are no independent samples."""
    known = pd.Series([courses[run] for run in runs["run"] if run in courses], dtype=object)
    same = known[known.map(len) >= SAME_COURSE_EVALS].duplicated(keep=False)
    if same.any():
        yield Issue(
            "doubt", where, f"{int(same.sum())} of {len(runs)} runs have the metric of another in every evaluation"
        )


def _baselines(where: str, row: dict[str, object], runs: pd.DataFrame) -> Iterator[Issue]:
    """Yield an issue if predictors that train nothing reach the target, which then proves no learning."""
    target, minimise = row["target"], row["target_direction"] == "min"
    if not isinstance(target, float):
        return
    known = {name: value for text in runs["baselines"].dropna().unique() for name, value in parse_mapping(text).items()}
    # A missing value reaches nothing
    meet = {name: v for name, v in known.items() if v is not None and (v <= target if minimise else v >= target)}
    if meet:
        names = ", ".join(f"{name} ({value:.4g})" for name, value in sorted(meet.items()))
        text = (
            f"the target {target:g} proves no learning: simple predictors without a network reach it as well: {names}"
        )
        # A small size shows that everything works; only the MLPerf problem shows what a network learns
        yield Issue("doubt" if row["size"] == FULL else "note", where, text)


def _check_classes(study: Study) -> Iterator[Issue]:
    for key, rows in study.results.groupby(CLASS_COLUMNS, sort=True):
        runs = study.runs[study.runs["group"].isin(rows["group"])]
        samples = sorted(runs["train_samples"].dropna().unique())
        if len(samples) > 1:
            counts = ", ".join(f"{int(count):,}" for count in samples)
            yield Issue("doubt", render_heading(*key), f"results train on different numbers of samples: {counts}")
        if rows["round"].nunique() > 1:
            rounds = ", ".join(sorted(rows["round"].unique()))
            yield Issue("note", render_heading(*key), f"results come from rounds with different rules: {rounds}")


GROUPS_SHOWN = 100  # rows of the table; a package with one fault in every log has thousands of findings
SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class CheckedPath:
    """Holds one path of the report and its verdict.

    ``path`` is its name; files are named from it on, not from the root.
    """

    path: str
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as report.json has it."""
        return {
            "path": self.path,
            "rulesets": self.verdict.rulesets,
            "logs": self.verdict.logs,
            "compliant": self.verdict.compliant,
            "findings": [asdict(finding) for finding in self.verdict.findings],
        }


def check_paths(paths: Sequence[Path], judged: JudgedLogs | None = None) -> list[CheckedPath]:
    """Check each path that exists. A missing path is left to the reader of logs, which names it.

    ``judged`` has the logs that were judged by themselves already (`mlhpc.analysis.tables.ingest`); others are read.
    """
    return [check_path(path, judged) for path in paths if path.exists()]


def check_path(path: Path, judged: JudgedLogs | None = None) -> CheckedPath:
    """Check one path. The same files give the same verdict in whatever folder they lie."""
    place = path.resolve()  # as the reader of logs names them: ``judged`` is by path
    verdict = check([place], judged=judged)
    # Paths from the root would tell readers where the author keeps files, and differ between machines
    own_name = re.compile(rf"(?<!\w){re.escape(str(place))}(?!\w)")

    def strip(text: str) -> str:
        return own_name.sub(lambda _: place.name, text)

    findings = tuple(replace(item, file=strip(item.file), message=strip(item.message)) for item in verdict.findings)
    return CheckedPath(place.name, replace(verdict, findings=findings))


def render_error(error: Finding) -> str:
    """Render an error as one line: the last parts of the file (system, scenario, benchmark, log), and the message."""
    return f"{'/'.join(Path(error.file).parts[-4:])}: {error.message}"


def collect_findings(checked: Sequence[CheckedPath]) -> list[Finding]:
    """Collect the findings of all paths."""
    return [finding for item in checked for finding in item.verdict.findings]


def build_findings_table(checked: Sequence[CheckedPath]) -> HtmlTable | None:
    """Build a table with a row for each rule and result with findings, errors first; None without findings.

    The message is that of the first finding. Beyond GROUPS_SHOWN rows the rest is in report.json.
    """
    groups = group_findings(checked)[:GROUPS_SHOWN]
    if not groups:
        return None
    columns: dict[str, list[Any]] = {
        "rule": [first.rule for first, _ in groups],
        "severity": [first.severity for first, _ in groups],
        "result": [_find_result_folder(first) for first, _ in groups],
        "findings": [count for _, count in groups],
        "the first": [f"{Path(first.file).name}{f':{first.line}' if first.line else ''}" for first, _ in groups],
        "its message": [first.message for first, _ in groups],
    }
    return build_html_table(columns, "Findings of the compliance check")


def group_findings(checked: Sequence[CheckedPath]) -> list[tuple[Finding, int]]:
    """Group findings by severity, rule and result, as (first finding, count): errors first, then by rule."""
    groups: dict[tuple[int, str, str], list[Finding]] = {}
    for finding in collect_findings(checked):
        # An unknown severity comes last
        key = (SEVERITY_ORDER.get(finding.severity, len(SEVERITY_ORDER)), finding.rule, _find_result_folder(finding))
        groups.setdefault(key, []).append(finding)
    return [(groups[key][0], len(groups[key])) for key in sorted(groups)]


def _find_result_folder(finding: Finding) -> str:
    """Find the folder of the result that a finding is about.

    It is the folder of the finding's log, or the path itself if that is a folder.
    """
    path = Path(finding.file)
    is_file = path.suffix[1:].isalpha()  # the "suffix" of a folder such as pytorch1.13 is a number
    return str(path.parent if is_file else path)


@dataclass(frozen=True)
class Tile:
    """Holds one tile. ``state`` is good, warn, bad or info; the page shows it by a symbol besides its colour."""

    state: str
    title: str
    value: str
    detail: str


def build_tiles(study: Study, checked: Sequence[CheckedPath]) -> list[Tile]:
    """Build the tiles, what is wrong first."""
    tiles = [
        _compliance(study, checked), _build_scores_tile(study), _cache(study), _build_resumed_tile(study),
        _other_work(study), *_build_unranked_tile(study),
    ]  # fmt: skip
    return sorted(tiles, key=lambda tile: ("bad", "warn", "good", "info").index(tile.state))


def _other_work(study: Study) -> Tile:
    """Say whether other programs may have slowed a run. If they did, the times on the page say little."""
    runs = study.runs
    busy, logged = runs[runs["had_company"]], int(runs["other_work_share"].notna().sum())
    if len(busy):
        share = render_percent(float(busy["other_work_share"].max()))
        names = sorted(set(study.results.set_index("group").loc[busy["group"], "label"]))
        of = f"{', '.join(names)}: " if len(names) <= 3 and len(study.results) > 1 else ""
        detail = f"{of}other programs used up to {share} of the CPUs: times on a busy machine say little"
        return Tile("bad", "Busy machine", f"{len(busy)} of {render_count(len(runs), 'run')}", detail)
    if not logged:
        return Tile("info", "Busy machine", "not logged", "no log says whether other programs used the machine")
    detail = f"{logged} of {render_count(len(runs), 'run')} log it; none shared its CPUs with other programs"
    return Tile("good" if logged == len(runs) else "info", "Busy machine", "no", detail)


def _build_unranked_tile(study: Study) -> list[Tile]:
    """Say how many results are not ranked; nothing if all are."""
    reasons = study.distinct["not_ranked"].dropna()
    why = "; ".join(
        f"{reason}{f' ({count})' if count > 1 else ''}" for reason, count in reasons.value_counts().head(3).items()
    )
    accepted = int(study.distinct.loc[reasons.index, "published"].sum())
    if accepted:
        why += (
            f"; MLCommons' review accepted {'it' if accepted == 1 else accepted if accepted < len(reasons) else 'them'}"
        )
    named = {name for reason in reasons for name in re.findall(r"[a-z]+(?:-[a-z]+)+", reason) if name in RULES}
    if len(named) == 1:
        why += f"; the rule: {RULES[named.pop()].asks}"  # what a stranger to the rules cannot know
    return [Tile("warn", "Not ranked", render_count(len(reasons), "result"), why)] if len(reasons) else []


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
    return Tile("info" if warnings else "good", "Compliance", "no errors", detail)


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
    aside = runs["resumed"] | runs["pruned"]
    lost = runs[~runs["converged"] & ~aside]
    counts = [
        *((OUTCOME_WORDS.get(name, name), count) for name, count in lost["outcome"].value_counts(sort=True).items()),
        *((name, int((~runs["converged"] & runs[name]).sum())) for name in ("resumed", "pruned")),
    ]
    reasons = ", ".join(f"{count} {name}" for name, count in counts if count)
    detail = f"{int(runs['converged'].sum())} of {render_count(len(runs), 'run')} reached the target"
    detail += f"; of the others {reasons}" if reasons else ""
    state = "bad" if not scored else "good" if scored == len(rows) and lost.empty else "warn"
    return Tile(state, "With a score", f"{scored} of {render_count(len(rows), 'result')}", detail)


def _cache(study: Study) -> Tile:
    states = study.runs["cache_state"].fillna("not logged").value_counts().sort_index()
    detail = "; ".join(f"{count} {name}" for name, count in states.items())
    known = states.index.isin(["dropped", "cold-by-size"])
    if known.all():
        return Tile("good", "File cache", "cold", detail)
    if "unverified" in states.index:
        # Data of a small size lie in memory anyway
        is_full = (study.runs["size"] == FULL).any()
        return Tile(
            "warn" if is_full else "info",
            "File cache",
            "unverified",
            f"{detail} (epoch 1 may have read from memory)",
        )
    return Tile("info", "File cache", "partly known" if known.any() else "not logged", detail)


def _build_resumed_tile(study: Study) -> Tile:
    resumed = int(study.runs["resumed"].sum())
    carried = int(study.runs["carried_over_from"].notna().sum())
    detail = "no run was continued from a checkpoint" if not resumed else "continued from a checkpoint, never scored"
    if carried:
        detail += f"; {render_count(carried, 'run')} already published in an earlier round"
    return Tile("warn" if resumed else "good", "Resumed", render_count(resumed, "run"), detail)
