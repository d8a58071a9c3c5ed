"""Judges a history.

For each series and quantity: is the newest level slower than the best one, or do times grow slowly? Each verdict says
what it could have seen, and an inconclusive one how many more results decide.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from msgspec import structs

from mlhpc.analysis.history.record import Record, Series, group_by_series, list_changed_facts
from mlhpc.suite.files import render_duration
from mlhpc.suite.statistics import CONFIDENCE, LARGEST_LOG, Outcome, compute_t_quantile, exponentiate, judge_interval
from mlhpc.suite.statistics.changes import (
    MIN_LEVEL_RESULTS,
    RATE_SHARES,
    Change,
    Changes,
    LevelRatio,
    clip_outliers,
    compare_levels,
    compute_min_results,
    find_places,
    is_slowed,
    judge_changes,
)
from mlhpc.suite.statistics.dependence import STEP, compute_variance_factor, draw_blocks
from mlhpc.suite.statistics.power import POWER, find_smallest_effect
from mlhpc.suite.statistics.sessions import TimedRun, find_sessions, fit_slope, render_sessions

QUANTITIES = ("time to train", "training time of an epoch")
DAY_S = 86400.0
NEWEST = 3  # results of the change that a verdict says it would have found
LARGEST_EFFECT = 25.0  # of such a change, in deviations of the results
POWER_DRAWS, MOST_MISSED = 29, 5  # fewer than 5: this series is one of many, and its own noise is luck too
MOST_MORE = 10  # results that are tried, to say how many more decide
MOST_NAMED = 6  # changed facts that are named; --format json has all
MONTH_DAYS = 30.0  # days, the unit of a trend


@dataclass(frozen=True)
class Trend:
    """A slope of log values, per step of ``times``, with its 95 % interval."""

    slope: float
    low: float
    high: float


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
class Growth:
    """Times that grow or fall slowly, from result ``begin`` on. ``size``: the newest time over that of ``begin``."""

    sure: bool
    begin: int
    size: LevelRatio


@dataclass(frozen=True)
class SeriesVerdict:
    """Holds the verdict on one quantity of one series.

    ``values`` are in seconds, one for each of ``records``: geometric means over runs. ``rate`` is the share of the
    false-alarm rate that this verdict may use. ``tolerance`` is a share of the time. ``doubtful`` are the changes that
    there would be if results were independent. ``changes.correlation`` is the correlation of neighbours that the series
    shows. ``standing`` is None without a change.
    """

    series: Series
    quantity: str
    records: tuple[Record, ...]
    values: tuple[float, ...]
    rate: float
    tolerance: float
    found: tuple[DetectedChange, ...]
    doubtful: tuple[DetectedChange, ...]
    changes: Changes
    standing: LevelComparison | None
    growth: Growth | None
    trend: Trend | None

    @property
    def word(self) -> Outcome:
        """Compare the newest level with the best earlier one.

        Equivalent: within the tolerance; without one, no change was found, or the newest one led back to the best
        level.
        """
        if len(self.values) < compute_min_results(self.rate):
            return Outcome.INCONCLUSIVE
        size = self.growth.size if self.growth and self.growth.sure else self.standing.size if self.standing else None
        if size is None:
            # Without a change there is one level, which equals itself unless a doubtful change would split it
            return Outcome.INCONCLUSIVE if self.doubtful or self.growth else Outcome.EQUIVALENT
        if size.interval is None:
            return Outcome.INCONCLUSIVE
        word = judge_interval(*size.interval, self.tolerance)
        # A doubtful change may hide a slower level; it cannot undo one that was found
        if word != Outcome.SLOWER and self.doubtful:
            return Outcome.INCONCLUSIVE
        # The newest change was a speed-up, and the best level lies in the interval: the machine is as it was
        back = not self.tolerance and word == Outcome.INCONCLUSIVE and self.found and self.found[-1].size.ratio < 1.0
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
    # A trend across a change would only show the change: it is of the results since then
    begin = changes.sure[-1].place if changes.sure else changes.begin
    days = [datetime.fromisoformat(record.date).timestamp() / DAY_S for record in records]
    trend, growth = find_trend(days[begin:], values[begin:], changes.correlation), None
    if changes.line and trend is not None:
        span = days[-1] - days[begin]
        ratio, low, high = (exponentiate(each * span) for each in (trend.slope, trend.low, trend.high))
        growth = Growth(changes.line == "sure", begin, LevelRatio(ratio, (low, high)))
    return SeriesVerdict(
        series=series,
        quantity=quantity,
        records=tuple(records),
        values=tuple(values),
        rate=rate,
        tolerance=tolerance,
        found=tuple(_describe(values, records, change, changes.correlation) for change in changes.sure),
        doubtful=tuple(_describe(values, records, change, changes.correlation) for change in changes.doubtful),
        changes=changes,
        standing=_compare_newest(values, changes),
        growth=growth,
        trend=trend,
    )


def find_trend(times: Sequence[float], values: Sequence[float], correlation: float = 0.0) -> Trend | None:
    """Fit a line to the log values, without outliers. None for fewer than four different times."""
    if len(set(times)) < 4:
        return None
    slope, error = fit_slope([times], [clip_outliers([math.log(value) for value in values])])
    half = compute_t_quantile(0.5 + CONFIDENCE / 2, len(times) - 2) * error
    half *= math.sqrt(compute_variance_factor(len(times), correlation))
    return Trend(slope, slope - half, slope + half)


def find_smallest_change(verdict: SeriesVerdict) -> tuple[int, float] | None:
    """Find the smallest growth of the last results that this check would find in 8 of 10 cases.

    Series with the noise of this one are drawn and their last results are slowed. Returns the number of last results,
    `NEWEST` or as many as the rule needs, and the growth. None: no growth is found.
    """
    import numpy as np

    noise, share = _compute_noise(verdict), RATE_SHARES[STEP] * verdict.rate
    most = math.expm1(min(LARGEST_EFFECT * float(noise.std()), LARGEST_LOG))
    # A series knows its own spread as well as its number of results allows, so that is drawn too
    dof, chance = len(noise) - 1, np.random.default_rng(len(noise))
    spreads = np.quantile(chance.chisquare(dof, 4000), (np.arange(POWER_DRAWS) + 0.5) / POWER_DRAWS)
    drawn = draw_blocks(noise, POWER_DRAWS) * np.sqrt(dof / chance.permutation(spreads))[:, None]
    for last in range(NEWEST, len(verdict.values) // 2 + 1):
        newest = np.arange(len(verdict.values)) >= len(verdict.values) - last

        def find_share(effect: float, newest: Any = newest) -> float:
            missed = (not is_slowed(each, share) for each in drawn + math.log1p(effect) * newest)
            few = sum(itertools.islice(filter(None, missed), MOST_MISSED)) < MOST_MISSED  # then no more are judged
            return POWER if few else 0.0

        if (smallest := find_smallest_effect(find_share, most)) is not None:
            return last, smallest
    return None


def _compute_noise(verdict: SeriesVerdict) -> Any:
    """Compute log values without the changes and the growth that were found or may be there."""
    import numpy as np

    logs = np.log(verdict.values)
    places = sorted(each.change.place for each in (*verdict.found, *verdict.doubtful))
    for begin, end in itertools.pairwise([0, *places, len(logs)]):
        logs[begin:end] -= logs[begin:end].mean()
    if verdict.growth is not None:
        times = np.maximum(np.arange(len(logs)) - verdict.growth.begin, 0.0)
        logs -= np.polyval(np.polyfit(times, logs, 1), times)
    return logs


def count_deciding_results(verdict: SeriesVerdict) -> int | None:
    """Count how many more results, like the newest ones, end an inconclusive verdict. None above `MOST_MORE`."""
    values = verdict.values
    place = verdict.doubtful[-1].change.place if verdict.doubtful else len(values) - NEWEST
    for more in range(1, MOST_MORE + 1):
        added = list(itertools.islice(itertools.cycle(values[place:]), more))
        changes = judge_changes([*values, *added], verdict.rate)
        if (
            len(values) + more >= compute_min_results(verdict.rate)
            and not changes.doubtful
            and changes.line != "doubtful"
        ):
            return more
    return None


def _describe(values: Sequence[float], records: Sequence[Record], change: Change, correlation: float) -> DetectedChange:
    """Compute the size of a change, and list the facts that changed at any place where it may be.

    Facts at the likeliest place come first.
    """
    places = find_places(values, change)
    # From the likeliest place outwards: an error message has room for the first facts only
    inside = sorted(range(places[0], places[-1] + 1), key=lambda place: abs(place - change.place))
    facts = [fact for place in inside for fact in list_changed_facts(records[place - 1], records[place])]
    return DetectedChange(
        change,
        (places[0], places[-1]),
        compare_levels(values[change.begin : change.place], values[change.place : change.end], correlation),
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
    elif verdict.growth and verdict.growth.sure:
        text = f"{_render_growth(verdict)}: {_size_text(verdict.growth.size)}"
    elif verdict.standing is not None:
        text = _render_comparison(verdict.standing, verdict.tolerance)
    elif verdict.doubtful or verdict.growth:
        text = f"no change is sure in {count} results"
    else:
        text = f"no change in {count} results"
    return [f"{verdict.series.title}: {verdict.quantity}: {verdict.word}: {text}", *_details(verdict)]


def _details(verdict: SeriesVerdict) -> list[str]:
    """Render the changes of a verdict, and what it assumes."""
    count = len(verdict.values)
    text = [f"  change: {_change_text(found, count)}" for found in verdict.found]
    text += [f"  not sure: {_change_text(found, count)}" for found in verdict.doubtful]
    if verdict.growth and not verdict.growth.sure:
        text.append(f"  not sure: {_render_growth(verdict)}")
    if verdict.word == Outcome.INCONCLUSIVE and (verdict.doubtful or verdict.growth):
        text.append(f"  reason: {_reason(verdict)}")
    if verdict.found or (verdict.growth and verdict.growth.sure):
        changes = verdict.changes
        text.append(
            f"  assumed: neighbouring results correlate by at most {changes.held:.1f} (these show"
            f" {changes.correlation:.1f}): with more, a machine without a change looks like this"
        )
    return [*text, *_render_power(verdict)]


def _reason(verdict: SeriesVerdict) -> str:
    """Say why a change is not sure, and how many more results decide."""
    more = count_deciding_results(verdict)
    decide = (
        f"{more} more such result{'s decide' if more != 1 else ' decides'}"
        if more
        else (f"{MOST_MORE} more such results would not decide")
    )
    return (
        "neighbouring results may depend on each other, or too few lie on one level; such results look like this "
        f"without a change. {decide} (mlhpc history add)"
    )


def _render_power(verdict: SeriesVerdict) -> Iterator[str]:
    """Say what the check could have seen."""
    if len(verdict.values) < compute_min_results(verdict.rate) or verdict.word == Outcome.SLOWER:
        return
    found = find_smallest_change(verdict)
    if found is None:
        yield f"  power: no change of the last results is found in {len(verdict.values)} such results"
        return
    last, growth = found
    fewer = f"; a change of fewer than {last} is not found" if last > NEWEST else ""
    yield (
        f"  power: a change of the last {last} results by {100 * growth:.2g} % or more would have been found in 8 of 10"
        f" cases{fewer}"
    )


def _render_growth(verdict: SeriesVerdict) -> str:
    """Render a slow change: ``times grow by 11 % in 30 days [8.6, 14] from result 1 on``."""
    growth, trend = verdict.growth, verdict.trend
    assert growth is not None
    assert trend is not None, "growth is that of a trend"
    slope, low, high = (_convert_slope(each) for each in (trend.slope, trend.low, trend.high))
    if slope < 0.0:
        slope, low, high = -slope, -high, -low
    return (
        f"times {'grow' if trend.slope > 0.0 else 'fall'} by {slope:.2g} % in 30 days, interval [{low:.2g}, "
        f"{high:.2g}], from result {growth.begin + 1} of {len(verdict.values)} on"
    )


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
        runs = _render_runs(record, verdict.quantity)
        bar = "#" * round(30 * value / top)
        text.append(
            f"  {mark} {record.date[:16]}  {render_duration(value):>10}  {runs} {bar:30}  {record.score or 'no score'}"
        )
    text += details
    if verdict.trend is not None:
        since = " since the newest change" if verdict.found else ""
        slope, low, high = (
            _convert_slope(each) for each in (verdict.trend.slope, verdict.trend.low, verdict.trend.high)
        )
        text.append(f"  trend{since}: {slope:+.2g} % in 30 days, 95 % [{low:+.2g}, {high:+.2g}]")
    return text


def _render_runs(record: Record, quantity: str) -> str:
    """Render the number of runs, and of their sessions if there are two or more and their starts are known."""
    times = _times(record, quantity)
    if len(record.begin_s) != len(times):
        return f"n={len(times):<3}"
    sessions = find_sessions([TimedRun(*each) for each in zip(record.begin_s, times, strict=True)])
    return render_sessions(len(times), len(sessions)) if len(sessions) > 1 else f"n={len(times):<3}"


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
        "correlation": verdict.changes.correlation,
        "assumed_correlation": verdict.changes.held,
        "smallest_change_found": _power_data(verdict),
        "growth": (
            None
            if verdict.growth is None
            else {
                "sure": verdict.growth.sure,
                "since": verdict.growth.begin + 1,
                "ratio": verdict.growth.size.ratio,
                "interval": verdict.growth.size.interval,
            }
        ),
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


def _power_data(verdict: SeriesVerdict) -> dict[str, float] | None:
    enough = len(verdict.values) >= compute_min_results(verdict.rate) and verdict.word != Outcome.SLOWER
    found = find_smallest_change(verdict) if enough else None
    return None if found is None else {"last_results": found[0], "percent": 100.0 * found[1]}


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
