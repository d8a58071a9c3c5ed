"""Judges a history: for each series and quantity whether it changed, where, by how much, and its trend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from msgspec import structs

from analysis.history.record import Record, Series, by_series, changed_facts
from suite.files import duration_text
from suite.statistics import Outcome
from suite.statistics.changes import Change, Size, Trend, fewest, find_changes, find_trend, follow_each_other, size_of

QUANTITIES = ("time to train", "training time of an epoch")
DAY_S = 86400.0
NAMED = 6  # changed facts that are named; --format json has all
MONTH = 30.0  # days, the unit of a trend


@dataclass(frozen=True)
class Found:
    """A change, its size (level after over level before), the first result after it and the facts that differ there."""

    change: Change
    size: Size
    record: Record
    facts: tuple[str, ...]


@dataclass(frozen=True)
class SeriesVerdict:
    """One quantity of one series. ``values`` are in seconds, one for each of ``records``: geometric means over runs.

    ``rate`` is the share of the false-alarm rate that this verdict may use. ``follows``: see `follow_each_other`.
    """

    series: Series
    quantity: str
    records: tuple[Record, ...]
    values: tuple[float, ...]
    rate: float
    found: tuple[Found, ...]
    trend: Trend | None
    follows: float | None

    @property
    def word(self) -> Outcome:
        """What the newest change is. Equivalent: the results are enough to find a change, and there is none."""
        if self.found:
            return Outcome.SLOWER if self.found[-1].size.ratio > 1.0 else Outcome.FASTER
        return Outcome.EQUIVALENT if len(self.values) >= fewest(self.rate) else Outcome.INCONCLUSIVE


def judge_all(records: Sequence[Record], rate: float) -> list[SeriesVerdict]:
    """Judge every series and quantity. ``rate`` is the false-alarm rate of all verdicts together.

    The series that have enough results to show a change share the rate. The choice depends on their numbers of results
    and not on the results, so the rate holds.
    """
    chosen = []
    for series, each in by_series(records).items():
        for quantity in QUANTITIES:
            timed = [record for record in each if _times(record, quantity)]
            if timed:
                chosen.append((series, quantity, timed))
    counts = [len(timed) for _, _, timed in chosen]
    # For each count: the number of series among which the rate is divided if those with fewer results get nothing
    sharers = {count: sum(other >= count for other in counts) for count in counts}
    enough = min((count for count, many in sharers.items() if count >= fewest(rate / many)), default=None)
    verdicts = []
    for (series, quantity, timed), count in zip(chosen, counts, strict=True):
        # A series with too few results is inconclusive. Its rate says how many results it would need
        share = rate / sharers[enough if enough is not None and count >= enough else count]
        verdicts.append(_judge(series, quantity, timed, share))
    return verdicts


def _judge(series: Series, quantity: str, records: Sequence[Record], rate: float) -> SeriesVerdict:
    # One value a result: runs of one result are no independent looks at the machine
    values = [math.exp(statistics.fmean(map(math.log, _times(record, quantity)))) for record in records]
    changes = find_changes(values, rate)
    found = tuple(
        Found(
            change,
            size_of(values, change),
            records[change.place],
            tuple(changed_facts(records[change.place - 1], records[change.place])),
        )
        for change in changes
    )
    begin = changes[-1].place if changes else 0  # the trend is of the results since the newest change
    days = [datetime.fromisoformat(record.date).timestamp() / DAY_S for record in records]
    return SeriesVerdict(
        series,
        quantity,
        tuple(records),
        tuple(values),
        rate,
        found,
        find_trend(days[begin:], values[begin:]),
        follow_each_other(values, changes),
    )


def _times(record: Record, quantity: str) -> tuple[float, ...]:
    return record.time_s if quantity == QUANTITIES[0] else record.epoch_s


def lines(verdict: SeriesVerdict, rate: float) -> list[str]:
    """Render a verdict as a line, and a note if its false-alarm rate is doubtful."""
    count = len(verdict.values)
    head = f"{verdict.series.title}: {verdict.quantity}: {verdict.word}"
    if verdict.found:
        newest = verdict.found[-1]
        text = f"{head}: {_change_text(newest, count)}"
    elif verdict.word == Outcome.INCONCLUSIVE:
        text = f"{head}: {count} of at least {fewest(verdict.rate)} results that a false-alarm rate of {rate:g} needs"
    else:
        text = f"{head}: no change in {count} results"
    return [text, *_doubts(verdict)]


def _doubts(verdict: SeriesVerdict) -> list[str]:
    if verdict.follows is None or verdict.word == Outcome.INCONCLUSIVE:
        return []
    return [
        f"  note: a result is like the one before it (correlation {verdict.follows:.2f}): "
        "there are more false alarms than stated"
    ]


def _change_text(found: Found, count: int) -> str:
    size, change = found.size, found.change
    low, high = (100 * (bound - 1) for bound in size.interval or (1.0, 1.0))
    interval = f"95 % [{low:+.1f}, {high:+.1f}]" if size.interval else "no interval of so few results"
    more = f"; {len(found.facts) - NAMED} more" if len(found.facts) > NAMED else ""
    facts = f"; changed there: {'; '.join(found.facts[:NAMED])}{more}" if found.facts else "; no fact changed there"
    return (
        f"{100 * (size.ratio - 1):+.1f} % of the time, {interval}, since {found.record.date} "
        f"(result {change.place + 1} of {count}, p = {change.p:.2g}){facts}"
    )


def table(verdict: SeriesVerdict, rate: float) -> list[str]:
    """Render a verdict with all of its results, newest last. ``|`` marks the first result after a change."""
    text = [f"{verdict.series.title}: {verdict.quantity}: {verdict.word}"]
    places = {found.change.place for found in verdict.found}
    top = max(verdict.values)
    for index, (record, value) in enumerate(zip(verdict.records, verdict.values, strict=True)):
        mark = "|" if index in places else " "
        runs = len(_times(record, verdict.quantity))
        bar = "#" * round(30 * value / top)
        text.append(
            f"  {mark} {record.date[:16]}  {duration_text(value):>10}  n={runs:<3} {bar:30}  {record.score or 'no score'}"
        )
    text += [f"  change: {_change_text(found, len(verdict.values))}" for found in verdict.found]
    if verdict.word == Outcome.INCONCLUSIVE:
        text.append(
            f"  changes: inconclusive: a false-alarm rate of {rate:g} needs at least {fewest(verdict.rate)} results"
        )
    if verdict.trend is not None:
        since = " since the newest change" if verdict.found else ""
        slope, low, high = (_percent(each) for each in (verdict.trend.slope, verdict.trend.low, verdict.trend.high))
        text.append(f"  trend{since}: {slope:+.2g} % in 30 days, 95 % [{low:+.2g}, {high:+.2g}]")
    return text + _doubts(verdict)


def _percent(slope: float) -> float:
    """Convert a slope of logs per day to percent in 30 days."""
    return 100.0 * math.expm1(max(-700.0, min(slope * MONTH, 700.0)))  # exp of more is no float


def as_data(verdicts: Sequence[SeriesVerdict], rate: float) -> dict[str, Any]:
    """Render the verdicts as data, version 1. A bound that does not exist is null."""
    return {"version": 1, "false_alarms": rate, "series": [_verdict_data(verdict) for verdict in verdicts]}


def _verdict_data(verdict: SeriesVerdict) -> dict[str, Any]:
    trend = verdict.trend
    return {
        **structs.asdict(verdict.series),
        "quantity": verdict.quantity,
        "verdict": verdict.word,
        "rate": verdict.rate,
        "results_needed": fewest(verdict.rate),
        "follows_the_one_before": verdict.follows,
        "trend_percent_in_30_days": None
        if trend is None
        else {
            "slope": _percent(trend.slope),
            "interval": [_percent(each) if math.isfinite(each) else None for each in (trend.low, trend.high)],
        },
        "changes": [
            {
                "date": found.record.date,
                "result": found.change.place + 1,
                "p": found.change.p,
                "ratio": found.size.ratio,
                "interval": found.size.interval,
                "facts": list(found.facts),
            }
            for found in verdict.found
        ],
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
