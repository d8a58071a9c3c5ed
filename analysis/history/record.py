"""Keeps results over time in a folder: one JSON file for each result, computed from its logs. Files are only added.

Judges a history.

For each series and quantity: is the newest level slower than the best one, and what is the trend?
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, structs

from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.documents import convert_to_plain_data, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_duration, write_file_atomically
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.log.score import Throughput, find_round_group
from mlhpc.suite.machine.facts import UNKNOWN, Facts, read_facts
from mlhpc.suite.statistics import Outcome, judge_interval
from mlhpc.suite.statistics.changes import (
    CONFIDENCE,
    MIN_LEVEL_RESULTS,
    Change,
    Changes,
    LevelRatio,
    Trend,
    compare_levels,
    compute_change_size,
    compute_min_results,
    find_places,
    find_trend,
    judge_changes,
)

VERSION: Final = 1
SUFFIX = ".json"


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Series(_Document, frozen=True, kw_only=True):
    """What results must share to be one series: like is compared with like. None: the logs do not say."""

    benchmark: str | None
    size: str | None
    scenario: str
    division: str | None
    rules: str
    system: str | None
    nodes: int | None
    ranks: int | None

    @property
    def title(self) -> str:
        """Render the series as text."""
        many = ", ".join(
            f"{'?' if count is None else count} {what}{'' if count == 1 else 's'}"
            for count, what in ((self.nodes, "node"), (self.ranks, "rank"))
        )
        kind = " ".join(filter(None, (self.benchmark or "no known benchmark", self.size, self.scenario, self.division)))
        return f"{kind}, {self.system or 'unknown system'}, {many}, times as in {self.rules}"


class Record(_Document, frozen=True, kw_only=True):
    """Holds one result. Times are in seconds, one for each converged run.

    ``epoch_s`` is the median time of a complete epoch of each run, without its evaluation. ``date`` is that of the
    first run_start. ``facts`` are texts by name, of the nodes or else of the system.
    """

    version: Literal[1] = VERSION
    date: str
    added: str
    source: str
    series: Series
    score: Annotated[str | None, Meta(description="the score as text; None if the runs are none")]
    compliant: bool
    time_s: tuple[float, ...]
    epoch_s: tuple[float, ...]
    logs: Annotated[dict[str, str], Meta(description="sha256 of each log by name")]
    facts: dict[str, str]
    facts_sha256: str
    suite_version: str | None

    @property
    def name(self) -> str:
        """Return the name of its file: date, benchmark, and the beginning of a digest of its logs."""
        stamp = datetime.fromisoformat(self.date).strftime("%Y%m%dT%H%M%SZ")
        # Of the logs and not of the record: the same result added twice gets the same name
        total = hashlib.sha256("".join(sorted(self.logs.values())).encode()).hexdigest()[:8]
        kind = "-".join(part for part in (self.series.benchmark, self.series.size, self.series.scenario) if part)
        return f"{stamp}-{''.join(c if c.isalnum() or c in '-_' else '_' for c in kind)}-{total}{SUFFIX}"


def compute_record(scored: Result, now: datetime) -> Record:
    """Compute the record of a result. InputError if none of its runs converged."""
    first, folder = find_named_run(scored.runs), scored.group.folder
    converged = [run.record for run in scored.score.runs if run.converged]
    starts = [run.run_start_s for run in converged if run.run_start_s is not None]
    if not converged or not starts:
        raise InputError(
            f"{folder}: no run reached the target, so there is no time to add; `mlhpc check` says what each run lacks"
        )
    facts = _facts(scored, first)
    return Record(
        # The date of the runs, not of the command: results may be added later and in any order
        date=datetime.fromtimestamp(min(starts), UTC).isoformat(timespec="seconds"),
        added=now.isoformat(timespec="seconds"),
        source=str(folder),
        series=Series(
            benchmark=first.benchmark,
            size=first.size,
            scenario=scored.scenario,
            division=scored.division,
            rules=find_round_group(scored.group.round or first.ruleset),
            system=scored.group.system or _find_system(first.platform, facts),
            nodes=first.nodes,
            ranks=first.ranks,
        ),
        score=_score(scored),
        compliant=not scored.errors,
        time_s=tuple(run.time_to_train_s for run in converged if run.time_to_train_s is not None),
        epoch_s=tuple(seconds for run in converged if (seconds := compute_epoch_seconds(run)) is not None),
        logs={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in scored.group.logs},
        facts=facts,
        facts_sha256=_compute_digest(facts),
        suite_version=first.suite_version,
    )


def compute_epoch_seconds(run: RunRecord) -> float | None:
    """Compute the median time in seconds that a complete epoch trained; None if the log has none."""
    seconds = [epoch.train_s for epoch in run.epochs if epoch.complete and epoch.train_s > 0.0]
    return statistics.median(seconds) if seconds else None


def read_history(folder: Path) -> list[Record]:
    """Read the records of a folder by date. InputError if there is no folder, or a file in it is not a record."""
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no history here; begin one with: mlhpc history add RUNS -o {shlex.quote(str(folder))}"
        )
    paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))
    records = [_read(path) for path in paths]
    return sorted(records, key=lambda record: (record.date, record.name))


def write_record(folder: Path, record: Record, known: Iterable[Record]) -> Path | None:
    """Add a record to a folder and return its path; None if it is there already. Nothing that is there is changed.

    InputError if some of its logs, but not the same ones, are in another record: the same runs would count twice.
    """
    for earlier in known:
        if shared := set(record.logs.values()) & set(earlier.logs.values()):
            # The same result again: adding it a second time changes nothing, so a nightly job may repeat it
            if shared == set(record.logs.values()) == set(earlier.logs.values()):
                return None
            name = next(name for name, digest in record.logs.items() if digest in shared)
            raise InputError(
                f"{record.source}: {name} is in {folder / earlier.name} already, with other logs; a run counts once"
            )
    path = folder / record.name
    try:
        write_file_atomically(path, json.dumps(convert_to_plain_data(record), indent=1) + "\n", overwrite=False)
    except FileExistsError:  # another process added it meanwhile
        if _read(path).logs != record.logs:
            raise InputError(
                f"{path}: the record exists already, with other logs, and is never overwritten; move it away and add"
                " again"
            ) from None
        return None
    return path


def group_by_series(records: Sequence[Record]) -> dict[Series, list[Record]]:
    """Group records by series; each group stays in order."""
    found: dict[Series, list[Record]] = {}
    for record in records:
        found.setdefault(record.series, []).append(record)
    return found


def list_changed_facts(before: Record, after: Record) -> list[str]:
    """List the facts that differ between two records, each as ``name: old -> new``."""
    names = sorted(before.facts.keys() | after.facts.keys())
    texts = [(name, before.facts.get(name, "none"), after.facts.get(name, "none")) for name in names]
    return [f"{name}: {old} -> {new}" for name, old, new in texts if old != new]


def _read(path: Path) -> Record:
    record = read_json_document(path, Record, "a record of a history", VERSION)
    try:
        when = datetime.fromisoformat(record.date)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise InputError(
            f"{path}: field `date` is {record.date!r}; expected a date and time with its zone, such as"
            " 2026-09-21T02:00:00+00:00"
        )
    # An edited fact would name a false cause of a change
    if record.facts_sha256 != _compute_digest(record.facts):
        raise InputError(
            f"{path}: field `facts_sha256` does not match the facts: the file was edited; restore it, or delete it and"
            " add the result again"
        )
    for name, seconds in (("time_s", record.time_s), ("epoch_s", record.epoch_s)):
        # A judge takes logarithms of these times
        wrong = next((each for each in seconds if not 0.0 < each < math.inf), None)
        if wrong is not None:
            raise InputError(f"{path}: field `{name}` has {wrong}; expected seconds above 0")
    return record


def _find_system(platform: str | None, facts: Mapping[str, str]) -> str | None:
    """Find the name of the system in the logs.

    Without one its hardware is the name, so two machines are never one series.
    """
    # A site that names its system decides what is one series, whatever the hardware says
    if platform not in (None, "", UNKNOWN) or "processor" not in facts:
        return platform
    names = (facts.get("accelerators"), facts["processor"], f"{facts.get('cores', '?')} cores")
    return ", ".join(name for name in names if name)


def _compute_digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def _score(scored: Result) -> str | None:
    result = scored.score
    if not result.valid:
        return None
    if isinstance(result, Throughput):
        return f"{result.models_per_minute or 0.0:.3g} models/min"
    return render_duration(result.mean_s or 0.0)


def _facts(scored: Result, first: RunRecord) -> dict[str, str]:
    """Collect what may explain a change: settings that every log states, and facts of nodes or else of the system."""
    settings = {
        "batch": first.global_batch_size,
        "suite": first.suite_version,
        # The beginning of the digest is enough to see that the data changed
        "data": (first.data_manifest or "")[:12] or None,
        "cache": first.cache_state,
    }
    stated = {name: str(value) for name, value in settings.items() if value is not None}
    nodes = [read_facts(path) for path in RunFolder(scored.group.folder).node_facts()]
    if nodes:
        # What the nodes report comes before the description in a package
        return stated | collect_node_facts(nodes)
    fields: Mapping[str, Any] = scored.system.fields if scored.system else {}
    return stated | {name: str(value) for name, value in fields.items() if value not in (None, "")}


def collect_node_facts(nodes: Sequence[Facts]) -> dict[str, str]:
    """Collect the facts that stay until somebody changes a machine. Values that differ between nodes are joined."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        flat = {
            "processor": node.cpu.model,
            "cores": node.cpu.cores,
            "governor": node.cpu.governor,
            # Rounded, so that a few MiB more or less are no changed fact
            "memory GiB": None if node.memory.total_gib is None else round(node.memory.total_gib),
            "cpus allowed": node.limits.cpus_allowed,
            "accelerators": ", ".join(f"{each.model} (driver {each.driver})" for each in node.accelerators),
            "network": ", ".join(sorted({f"{each.link} {each.speed_gbit_s} Gbit/s" for each in node.network})),
            "operating system": node.software.operating_system,
            "kernel": node.software.kernel,
            "container": node.software.container,
            "python": node.software.python,
            "MPI": node.software.mpi,
            **{f"package {name}": version for name, version in node.software.packages.items()},
            **{f"tuning {name}": value for name, value in node.tuning.items()},
        }
        for name, value in flat.items():
            if value not in (None, ""):
                found.setdefault(name, set()).add(str(value))
    return {name: " | ".join(sorted(values)) for name, values in found.items()}


QUANTITIES = ("time to train", "training time of an epoch")
DAY_S = 86400.0
MOST_NAMED = 6  # changed facts that are named; --format json has all
MONTH_DAYS = 30.0  # days, the unit of a trend


@dataclass(frozen=True)
class DetectedChange:
    """Holds a change, its size (level after over level before), the first result after it and the facts that changed
    there.

    ``places`` are the first and the last place where the change may be (95 %). ``facts`` are those of all these places.
    """

    change: Change
    places: tuple[int, int]
    size: LevelRatio
    record: Record
    facts: tuple[str, ...]


@dataclass(frozen=True)
class LevelComparison:
    """Holds the ratio of the newest level to the best earlier one.

    Each level is (begin, end), indices of its results.
    """

    newest: tuple[int, int]
    best: tuple[int, int]
    size: LevelRatio


@dataclass(frozen=True)
class SeriesVerdict:
    """Holds the verdict on one quantity of one series.

    ``values`` are in seconds, one for each of ``records``: geometric means over runs. ``rate`` is the share of the
    false-alarm rate that this verdict may use. ``tolerance`` is a share of the time. ``doubtful`` are the changes that
    there would be if results were independent. ``correlation`` is the largest correlation of neighbours that the series
    allows. ``standing`` is None without a change.
    """

    series: Series
    quantity: str
    records: tuple[Record, ...]
    values: tuple[float, ...]
    rate: float
    tolerance: float
    found: tuple[DetectedChange, ...]
    doubtful: tuple[DetectedChange, ...]
    correlation: float
    standing: LevelComparison | None
    trend: Trend | None

    @property
    def word(self) -> Outcome:
        """Compare the newest level with the best earlier one.

        Equivalent: within the tolerance; without one, no change was found, or the newest one led back to the best
        level.
        """
        if len(self.values) < compute_min_results(self.rate):
            return Outcome.INCONCLUSIVE
        if self.standing is None:
            # Without a change there is one level, which equals itself unless a doubtful change would split it
            return Outcome.INCONCLUSIVE if self.doubtful else Outcome.EQUIVALENT
        if self.standing.size.interval is None:
            return Outcome.INCONCLUSIVE
        low, high = self.standing.size.interval
        word = judge_interval(low, high, self.tolerance)
        # A doubtful change may hide a slower level; it cannot undo one that was found
        if word != Outcome.SLOWER and self.doubtful:
            return Outcome.INCONCLUSIVE
        # The newest change was a speed-up, and the best level lies in the interval: the machine is as it was
        back = not self.tolerance and word == Outcome.INCONCLUSIVE and self.found[-1].size.ratio < 1.0
        return Outcome.EQUIVALENT if back else word


def judge_all(records: Sequence[Record], rate: float, tolerance: float = 0.0) -> list[SeriesVerdict]:
    """Judge every series and quantity. ``rate`` is the false-alarm rate of all verdicts together.

    The series that have enough results to show a change share the rate. The choice depends on their numbers of results
    and not on the results, so the rate holds.
    """
    chosen = []
    for series, each in group_by_series(records).items():
        for quantity in QUANTITIES:
            timed = [record for record in each if _times(record, quantity)]
            # A series without epoch times, for example, has no second quantity to judge
            if timed:
                chosen.append((series, quantity, timed))
    counts = [len(timed) for _, _, timed in chosen]
    # For each count: the number of series among which the rate is divided if those with fewer results get nothing
    sharers = {count: sum(other >= count for other in counts) for count in counts}
    enough = min((count for count, many in sharers.items() if count >= compute_min_results(rate / many)), default=None)
    verdicts = []
    for (series, quantity, timed), count in zip(chosen, counts, strict=True):
        # A series with too few results is inconclusive. Its rate says how many results it would need
        share = rate / sharers[enough if enough is not None and count >= enough else count]
        verdicts.append(_judge(series, quantity, timed, share, tolerance))
    return verdicts


def _judge(series: Series, quantity: str, records: Sequence[Record], rate: float, tolerance: float) -> SeriesVerdict:
    # One value a result: runs of one result are no independent looks at the machine
    values = [math.exp(statistics.fmean(map(math.log, _times(record, quantity)))) for record in records]
    changes = judge_changes(values, rate)
    # A trend across a change would only show the change
    begin = changes.sure[-1].place if changes.sure else 0  # the trend is of the results since the newest change
    days = [datetime.fromisoformat(record.date).timestamp() / DAY_S for record in records]
    return SeriesVerdict(
        series=series,
        quantity=quantity,
        records=tuple(records),
        values=tuple(values),
        rate=rate,
        tolerance=tolerance,
        found=tuple(_describe(values, records, change, changes.correlation) for change in changes.sure),
        doubtful=tuple(_describe(values, records, change, changes.correlation) for change in changes.doubtful),
        correlation=changes.correlation,
        standing=_compare_newest(values, changes),
        trend=find_trend(days[begin:], values[begin:]),
    )


def _describe(values: Sequence[float], records: Sequence[Record], change: Change, correlation: float) -> DetectedChange:
    """Compute the size of a change, and list the facts that changed at any place where it may be.

    Facts at the likeliest place come first.
    """
    places = find_places(values, change, correlation)
    # From the likeliest place outwards: an error message has room for the first facts only
    inside = sorted(range(places[0], places[-1] + 1), key=lambda place: abs(place - change.place))
    facts = [fact for place in inside for fact in list_changed_facts(records[place - 1], records[place])]
    return DetectedChange(
        change,
        (places[0], places[-1]),
        compute_change_size(values, change, correlation),
        records[change.place],
        tuple(dict.fromkeys(facts)),  # each once, in order
    )


def _compare_newest(values: Sequence[float], changes: Changes) -> LevelComparison | None:
    """Compare the newest level with the best earlier one that has enough results for an interval, if any has."""
    levels = list(itertools.pairwise([0, *(change.place for change in changes.sure), len(values)]))
    *earlier, newest = levels
    if not earlier:
        return None
    # Levels of fewer results have no interval; if all are short, their means are compared without one
    long = [level for level in earlier if level[1] - level[0] >= MIN_LEVEL_RESULTS]
    best = min(long or earlier, key=lambda level: statistics.fmean(map(math.log, values[slice(*level)])))
    # The best of several levels is lower by chance as well: the interval holds for each of them at once
    confidence = 1.0 - (1.0 - CONFIDENCE) / len(earlier)
    size = compare_levels(values[slice(*best)], values[slice(*newest)], changes.correlation, confidence)
    return LevelComparison(newest, best, size)


def _times(record: Record, quantity: str) -> tuple[float, ...]:
    return record.time_s if quantity == QUANTITIES[0] else record.epoch_s


def render_verdict(verdict: SeriesVerdict, rate: float) -> list[str]:
    """Render a verdict: a line, then a line for each change and for what was assumed."""
    count = len(verdict.values)
    if count < compute_min_results(verdict.rate):
        text = (
            f"{count} of at least {compute_min_results(verdict.rate)} results that a false-alarm rate of {rate:g} needs"
        )
    elif verdict.standing is not None:
        text = _render_comparison(verdict.standing, verdict.tolerance)
    elif verdict.doubtful:
        text = f"no change is sure in {count} results"
    else:
        text = f"no change in {count} results"
    return [f"{verdict.series.title}: {verdict.quantity}: {verdict.word}: {text}", *_details(verdict)]


def _details(verdict: SeriesVerdict) -> list[str]:
    """Render the changes of a verdict, and what it assumes."""
    count = len(verdict.values)
    text = [f"  change: {_change_text(found, count)}" for found in verdict.found]
    text += [f"  not sure: {_change_text(found, count)}" for found in verdict.doubtful]
    if verdict.doubtful:
        text.append(f"  {_reason(verdict)}")
    if verdict.found:
        text.append(
            f"  assumed: neighbouring results correlate by at most {verdict.correlation:.1f}, as these allow; "
            "sessions do not differ"
        )
    return text


def _reason(verdict: SeriesVerdict) -> str:
    """Say why a change is not sure."""
    if verdict.correlation > 0.0:
        return (
            f"reason: neighbouring results may correlate by {verdict.correlation:.1f}; such results look like this "
            "without a change. Add more results (mlhpc history add)"
        )
    return "reason: too few results lie on one level. Add more results (mlhpc history add)"


def _render_comparison(standing: LevelComparison, tolerance: float) -> str:
    begin, end = standing.best
    within = f", tolerance {100 * tolerance:g} %" if tolerance else ""
    return (
        f"{_size_text(standing.size)} against the best level (results {begin + 1} to {end}); "
        f"the newest level has {standing.newest[1] - standing.newest[0]} results{within}"
    )


def _size_text(size: LevelRatio) -> str:
    if size.interval is None:
        return f"{100 * (size.ratio - 1):+.1f} % of the time, no interval of fewer than {MIN_LEVEL_RESULTS} results"
    low, high = (100 * (bound - 1) for bound in size.interval)
    return f"{100 * (size.ratio - 1):+.1f} % of the time, interval [{low:+.1f}, {high:+.1f}]"


def _change_text(found: DetectedChange, count: int) -> str:
    change = found.change
    first, last = found.places[0] + 1, found.places[1] + 1
    where = f", 95 %: {first} to {last}" if first < last else ""
    more = f"; {len(found.facts) - MOST_NAMED} more" if len(found.facts) > MOST_NAMED else ""
    facts = f"changed there: {'; '.join(found.facts[:MOST_NAMED])}{more}" if found.facts else "no fact changed there"
    return (
        f"{_size_text(found.size)}, since {found.record.date} "
        f"(result {change.place + 1} of {count}{where}; p = {change.p:.2g}); {facts}"
    )


def render_table(verdict: SeriesVerdict, rate: float) -> list[str]:
    """Render a verdict with all of its results, newest last. ``|`` marks the first result after a change."""
    head, *details = render_verdict(verdict, rate)
    text = [head]
    places = {found.change.place for found in verdict.found}
    top = max(verdict.values)
    for index, (record, value) in enumerate(zip(verdict.records, verdict.values, strict=True)):
        mark = "|" if index in places else " "
        runs = len(_times(record, verdict.quantity))
        bar = "#" * round(30 * value / top)
        text.append(
            f"  {mark} {record.date[:16]}  {render_duration(value):>10}  n={runs:<3} {bar:30} "
            f" {record.score or 'no score'}"
        )
    text += details
    if verdict.trend is not None:
        since = " since the newest change" if verdict.found else ""
        slope, low, high = (
            _convert_slope(each) for each in (verdict.trend.slope, verdict.trend.low, verdict.trend.high)
        )
        text.append(f"  trend{since}: {slope:+.2g} % in 30 days, 95 % [{low:+.2g}, {high:+.2g}]")
    return text


def _convert_slope(slope: float) -> float:
    """Convert a slope of logs per day to percent in 30 days."""
    # Logs per day times 30 days, as a ratio
    return 100.0 * math.expm1(max(-700.0, min(slope * MONTH_DAYS, 700.0)))  # exp of more is no float


def convert_verdicts_to_dict(verdicts: Sequence[SeriesVerdict], rate: float, tolerance: float) -> dict[str, Any]:
    """Render the verdicts as data, version 1. A bound that does not exist is null."""
    return {
        "version": 1,
        "false_alarms": rate,
        "tolerance_percent": tolerance,
        "series": [_verdict_data(verdict) for verdict in verdicts],
    }


def _verdict_data(verdict: SeriesVerdict) -> dict[str, Any]:
    trend, standing = verdict.trend, verdict.standing
    return {
        **structs.asdict(verdict.series),
        "quantity": verdict.quantity,
        "verdict": verdict.word,
        "rate": verdict.rate,
        "results_needed": compute_min_results(verdict.rate),
        "largest_correlation": verdict.correlation,
        "newest_to_best": (
            None
            if standing is None
            else {
                "ratio": standing.size.ratio,
                "interval": standing.size.interval,
                "newest": [standing.newest[0] + 1, standing.newest[1]],
                "best": [standing.best[0] + 1, standing.best[1]],
            }
        ),
        "trend_percent_in_30_days": (
            None
            if trend is None
            else {
                "slope": _convert_slope(trend.slope),
                "interval": [_convert_slope(each) if math.isfinite(each) else None for each in (trend.low, trend.high)],
            }
        ),
        "changes": [_change_data(found) for found in verdict.found],
        "not_sure": [_change_data(found) for found in verdict.doubtful],
        "results": [
            {
                "date": record.date,
                "seconds": value,
                "score": record.score,
                "compliant": record.compliant,
                "source": record.source,
            }
            for record, value in zip(verdict.records, verdict.values, strict=True)
        ],
    }


def _change_data(found: DetectedChange) -> dict[str, Any]:
    return {
        "date": found.record.date,
        "result": found.change.place + 1,
        "results": [place + 1 for place in found.places],
        "p": found.change.p,
        "ratio": found.size.ratio,
        "interval": found.size.interval,
        "facts": list(found.facts),
    }
