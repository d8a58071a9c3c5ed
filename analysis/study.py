"""Makes the `Study` from which figures and report are made: tables of logs, runs decomposed, results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path

import pandas as pd

from mlhpc.analysis.results.decompose import add_time_parts, build_results, find_copies, list_rounds, select_scored_runs
from mlhpc.analysis.results.index import Index, Prices
from mlhpc.analysis.results.machine_size import find_unit_names
from mlhpc.analysis.results.names import (
    CLASS_COLUMNS,
    Task,
    build_result_names,
    describe_systems,
    find_pairs,
    group_tasks,
    render_heading,
)
from mlhpc.analysis.results.selection import Selection, add_energy
from mlhpc.analysis.sources.readers import Inputs
from mlhpc.analysis.tables.ingest import Tables, read_tables
from mlhpc.suite.card import Card
from mlhpc.suite.compliance.check import Verdict
from mlhpc.suite.compliance.verdict import assess
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.score import find_round_group

SAME_COURSE_EVALS = 3  # two runs may agree in one or two rounded values by chance


class NotAnswerableError(InputError):
    """A figure lacks data; the message names what is missing."""


@dataclass(frozen=True)
class Study:
    """Holds the runs (`decompose.add_time_parts`: one row per log) and the results (one row per group of runs).

    Both have a ``label``. ``inputs`` are the ceilings and counters files of the command line; ``documents`` has the
    files of wings and other packages by kind. ``between`` has the pairs of results that the user named: groups of one
    class, from and to. With ``prices`` of devices the results have a ``cost``. ``index`` is that of systems against a
    reference, if the user gave weights.
    """

    tables: Tables
    runs: pd.DataFrame
    results: pd.DataFrame
    selections: Mapping[str, Selection]
    inputs: Inputs = field(default_factory=Inputs)
    documents: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    between: tuple[tuple[str, str], ...] = ()
    prices: Prices | None = None
    index: Index | None = None
    made: dict[object, pd.DataFrame] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def in_rounds(self) -> pd.DataFrame:
        """Return the results, each once in every group of rounds that has it.

        A copy stays where the rules are not those of the first publication; ``carried`` then has the round of that.
        """
        rows = self.results
        first = rows["same_as"].map(rows.set_index("group")["round"])
        here, there = (rounds.map(find_round_group, na_action="ignore") for rounds in (rows["round"], first))
        again = pd.DataFrame({"of": rows["same_as"], "in": here}).duplicated()
        return rows.assign(carried=first)[first.isna() | ((here != there) & ~again)]

    @property
    def ranked(self) -> pd.DataFrame:
        """Return the results in their rounds that may be ranked: compliant ones that no other programs disturbed."""
        rows = self.in_rounds
        return rows[rows["not_ranked"].isna()]

    @property
    def distinct(self) -> pd.DataFrame:
        """Return the results that do not repeat one of an earlier round.

        Figures and tables of results show these.
        """
        return self.results[self.results["same_as"].isna()]

    def classes(self) -> list[tuple[str, pd.DataFrame]]:
        """Return results by benchmark, size and mode, each with a heading.

        Only results of one class may share a panel.
        """
        return [(render_heading(*key), group) for key, group in self.distinct.groupby(CLASS_COLUMNS, sort=True)]

    def tasks(self) -> list[Task]:
        """Return results that may be ranked against each other, each group with its headings."""
        return group_tasks(self.ranked)

    def ordered_tasks(self) -> list[tuple[Task, bool]]:
        """List the tasks: one's own, those of the newest rounds, then older ones, for which the flag is false.

        With only older rounds in the study these are the newest.
        """
        published = self.distinct[self.distinct["published"]]
        newest = published.groupby(CLASS_COLUMNS)["round"].max().to_dict()

        def rank(task: Task) -> int:
            if not task.rows["published"].all():
                return 0
            return 2 - (newest.get(tuple(task.rows.iloc[0][CLASS_COLUMNS])) in set(task.rows["round"]))

        ranked = sorted(((rank(task), task) for task in self.tasks()), key=lambda each: each[0])
        several = [place for place, task in ranked if len(task.rows) > 1]
        return [(task, place < 2 or min(several, default=2) == 2) for place, task in ranked]

    def documents_of(self, kind: str, what: str) -> tuple[object, ...]:
        """Return the files of a kind. Raises NotAnswerableError, which names ``what`` is missing, without one."""
        if not self.documents.get(kind):
            raise NotAnswerableError(what)
        return self.documents[kind]

    def runs_of(self, group: str) -> pd.DataFrame:
        """Return the runs of one result."""
        return self._by_group[group]

    def converged_of(self, group: str) -> pd.DataFrame:
        """Return the runs of one result that reached the target and were not pruned by its submitter."""
        return self._converged_by_group[group]

    @cached_property
    def _converged_by_group(self) -> Mapping[str, pd.DataFrame]:
        return {group: runs[runs["converged"] & ~runs["pruned"]] for group, runs in self._by_group.items()}

    @cached_property
    def courses(self) -> Mapping[str, tuple[float, ...]]:
        """Return the metric of each run at its evaluations, in order. Runs with an equal course are one sample."""
        return {str(run): tuple(values) for run, values in self.tables.evals.groupby("run")["value"]}

    def count_courses(self, group: str) -> tuple[int, int]:
        """Count the different courses of the runs of one result that reached the target, and these runs.

        Short courses may agree by chance, so each of them counts.
        """
        runs = self._converged_by_group.get(group, self.runs.head(0))["run"]
        courses = [self.courses.get(run, ()) for run in runs]
        long = [course for course in courses if len(course) >= SAME_COURSE_EVALS]
        return len(courses) - len(long) + len(set(long)), len(courses)

    def repeats_courses(self, group: str) -> bool:
        """Return True if runs of a result repeat a course, so that their epochs vary less than those of seeds."""
        different, runs = self.count_courses(group)
        return different < runs

    @property
    def sampled(self) -> pd.DataFrame:
        """Return the distinct results that say how epochs vary: they may be ranked, and do not repeat one course."""
        rows = self.distinct[self.distinct["not_ranked"].isna()]
        counts = [self.count_courses(group) for group in rows["group"]]
        several = [different != 1 or runs == 1 for different, runs in counts]
        return rows[pd.Series(several, index=rows.index, dtype=bool)]  # an empty list would choose no column

    @cached_property
    def _by_group(self) -> Mapping[str, pd.DataFrame]:
        """Split the runs by group once: figures ask for the runs of a result thousands of times."""
        return {str(group): runs for group, runs in self.runs.groupby("group", sort=False)}


def build_once(build: Callable[[Study], pd.DataFrame]) -> Callable[[Study], pd.DataFrame]:
    """Let a table that takes long be built once for each study: chart, answer and other figures ask for it."""

    @wraps(build)
    def get(study: Study) -> pd.DataFrame:
        if build not in study.made:
            study.made[build] = build(study)
        return study.made[build].copy()

    return get


def read_study(
    paths: Sequence[Path],
    cards: Mapping[str, Card],
    inputs: Inputs | None = None,
    documents: Mapping[str, tuple[object, ...]] | None = None,
    between: Sequence[tuple[str, str]] = (),
    prices: Prices | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
    *,
    judging: bool = False,
) -> Study:
    """Read and decompose all logs below the paths. ``tell`` and ``judging`` are those of `read_tables`.

    Raises InputError as `read_tables` does, and for names in ``between`` that fit no result or several of one class.
    """
    tables = read_tables(paths, cards, tell, judging=judging)
    runs = add_time_parts(tables.runs)
    selections = select_scored_runs(tables)
    runs["fate"] = [selections[group].fate[run] for group, run in zip(runs["group"], runs["run"], strict=True)]
    rows = build_results(runs, selections)
    # The order matters below: names need machines, labels need rounds, and rounds need copies
    rows["unit"] = find_unit_names(rows, tables.systems)
    rows["device"], rows["machine"] = describe_systems(rows, tables.systems)
    rows["same_as"] = find_copies(rows, runs)
    rows["rounds"] = list_rounds(rows)
    rows["name"], rows["label"] = build_result_names(rows)
    rows["not_ranked"] = None  # until the results are judged
    # The column exists without prices too, so that figures need not ask
    rows["cost"] = prices.cost(rows) if prices else None
    rows = add_energy(rows, selections)
    # After the results have their labels, which may depend on each other
    runs["label"] = runs["group"].map(rows.set_index("group")["label"])
    pairs = tuple(pair for names in between for pair in find_pairs(rows, *names))
    return Study(tables, runs, rows, selections, inputs or Inputs(), documents or {}, pairs, prices)


def mark_not_ranked(study: Study, verdicts: Iterable[Verdict], *, busy: bool = False) -> Study:
    """Return the study with the reason why a result is not ranked (column ``not_ranked``), as every door sees it.

    ``busy``: also rank results during which other programs used the CPUs. A result without a score has a note already.
    """
    runs = study.runs.set_index("run")["group"]
    groups = {record.path: str(runs[name]) for name, record in study.tables.records.items() if record.path}
    reasons = {}
    for result in (result for verdict in verdicts for result in verdict.results):
        standing = assess(result)
        of = {groups[run.path.absolute()] for run in result.runs if run.path and run.path.absolute() in groups}
        reason = standing.not_compliant or (None if busy else standing.disturbed)
        reasons.update(dict.fromkeys(of, reason) if reason else {})
    found = study.results["group"].map(reasons).astype(object)
    return replace(study, results=study.results.assign(not_ranked=found.where(found.notna(), None)))
