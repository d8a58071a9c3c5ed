"""Reads one log into rows of the tables: run, epochs, evals, phases, ranks, experts. No pandas: worker processes start fast."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from analysis.tables.epochs import LARGEST_PLAUSIBLE, EpochCount
from analysis.tables.run_row import (
    BESIDE_STEP,
    STEP_PARTS,
    UNKNOWN,
    LogContent,
    encodable,
    identity,
    run_row,
    scaling_factor,
    text,
)
from suite.card import FULL, Card, Target
from suite.compliance.check import CheckedLog, judge_log
from suite.compliance.ruleset import find_target, ruleset
from suite.files import opened
from suite.log import mllog
from suite.log.limits import limits
from suite.log.reader import Log, read_events
from suite.log.record import RunRecord, summarise_with_timeline
from suite.log.results_tree import LogFile
from suite.log.timeline import Timeline, timeline
from suite.log.values import number

EPOCH_COLUMNS = ["run", "epoch", "epoch_num", "start_s", "stop_s", "duration_s", "after_run_stop", "samples_per_s"]
EVAL_COLUMNS = [
    "run", "evaluation", "epoch_num", "step_num", "epochs", "start_s", "stop_s", "duration_s", "reported_s",
    "value", "reached", "after_run_stop", "overlaps_training",
]  # fmt: skip
PHASE_COLUMNS = ["run", "source", "epoch_num", "first_step", "steps", "phase", "seconds", "loss"]
RANK_COLUMNS = [
    "run", "epoch_num", "steps", "quantity", "min", "median", "mean", "max", "min_rank", "max_rank", "values",
]  # fmt: skip
EXPERT_COLUMNS = [
    "run", "epoch_num", "first_step", "steps", "layer", "experts", "tokens", "imbalance", "drop_rate", "needed_capacity",
    "padding_waste", "exposed_communication_s", "tokens_per_expert",
]  # fmt: skip


Columns = Sequence[Sequence[Any]]  # of a table, but for its first, the name of the run; empty if there are no rows


@dataclass(frozen=True)
class Reading:
    """What the tables take from one log. Equal logs share all but ``run``: the path in ``record`` is that of the first."""

    run: dict[str, Any]
    epochs: Columns
    evals: Columns
    phases: Columns
    ranks: Columns
    experts: Columns
    record: RunRecord
    target: Target | None
    checked: CheckedLog | None = None


class Reader:
    """Reads logs into rows, one after another.

    A log that is equal to the one before, byte for byte, is not parsed again: two fifths of the published logs are in several
    rounds. They meet where logs are given in the order of their sizes.
    """

    def __init__(self, cards: Mapping[str, Card], rules: Mapping[Path, str]) -> None:
        self._cards, self._rules = cards, rules
        self._last: _Last | None = None
        self._scaling: dict[Path, float | None] = {}

    def read_all(self, files: Sequence[LogFile]) -> list[Reading]:
        """Read several logs as `read` does."""
        return [self.read(file) for file in files]

    def read(self, file: LogFile) -> Reading:
        """Read one log. The content of a log never raises. Where its ruleset is known, it is judged as well: it is read once."""
        folder, rules = file.path.parent, self._rules.get(file.path)
        if folder not in self._scaling:
            self._scaling[folder] = scaling_factor(folder)
        size = os.stat(file.path).st_size  # noqa: PTH116  a third of the time of Path.stat
        if self._last is not None and _alike(file, size, self._last):
            known, checked = self._last.reading, None
            if rules:
                log, record = replace(self._last.log, path=file.path), replace(known.record, path=file.path)
                checked = judge_log(log, ruleset(rules), str(file.path), record)
            row = identity(file, known.record, known.run["benchmark"], known.run["sha256"], self._scaling[folder])
            return replace(known, run=known.run | encodable(row), checked=checked)
        self._last = _read(file, size, self._cards, rules, self._scaling[folder])
        return self._last.reading


class _Seen:
    """The checksum and the first bytes of a log, which is read piece by piece."""

    def __init__(self) -> None:
        self._digest, self.head = hashlib.sha256(), b""

    def __call__(self, piece: bytes) -> None:
        self._digest.update(piece)
        self.head = self.head or piece[:_HEAD_BYTES]

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class _Last(NamedTuple):
    """A log that was read."""

    file: LogFile
    size: int
    head: bytes
    log: Log
    reading: Reading


def _alike(file: LogFile, size: int, last: _Last) -> bool:
    """True if two files hold the same, and their rows follow from it in the same way."""
    if size != last.size or (file.benchmark, file.resumed) != (last.file.benchmark, last.file.resumed):
        return False
    seen = _Seen()
    with opened(file.path, limits().file) as stream:
        if (head := stream.read(_HEAD_BYTES)) != last.head:  # as of two runs, whose times differ
            return False
        seen(head)
        while piece := stream.read(_PIECE_BYTES):
            seen(piece)
    return bool(seen.sha256 == last.reading.run["sha256"])


_PIECE_BYTES = 2**17  # stays in the cache
_HEAD_BYTES = 2**12


def _read(file: LogFile, size: int, cards: Mapping[str, Card], rules: str | None, scaling: float | None) -> _Last:
    seen = _Seen()
    log = read_events(file.path, steps=False, seen=seen)
    record, line = summarise_with_timeline(log)
    checked = judge_log(log, ruleset(rules), str(file.path), record) if rules else None
    benchmark = file.benchmark or record.benchmark or UNKNOWN
    target = find_target(benchmark, record.size or FULL, cards)
    if target is not None and record.metric_key not in (None, target.metric):
        record, line = summarise_with_timeline(log, target.metric)
    summarised = record.metric_key or mllog.EVAL_ERROR
    metric = target.metric if target else summarised
    if metric != summarised or log.until(mllog.RUN_STOP) is not log:
        line = timeline(log, metric)  # also of what came after run_stop
    content = LogContent(file, log, record, line, benchmark, target, EpochCount.of(record, line), scaling)
    experts = _expert_rows(log)
    row = encodable(run_row(content, seen.sha256) | _expert_load(experts))
    reading = Reading(
        run=row,
        epochs=_epoch_columns(line, log),
        evals=_eval_columns(content),
        phases=_columns(_phase_rows(log)),
        ranks=_columns(_rank_rows(log)),
        experts=_columns(experts),
        record=record,
        target=target,
        checked=checked,
    )
    return _Last(file, size, seen.head, log, reading)


def _columns(rows: Iterable[tuple[Any, ...]]) -> Columns:
    return tuple(zip(*rows, strict=True))


def _epoch_columns(line: Timeline, log: Log) -> Columns:
    """Columns of `EPOCH_COLUMNS`."""
    if not line.epochs:
        return ()
    rates = {
        number(event.metadata.get("epoch_num")): number(event.value.get("throughput"))
        for event in log.every(mllog.TRACKED_STATS)
        if isinstance(event.value, dict) and "epoch_num" in event.metadata
    }
    end_s = math.inf if line.run_s is None else line.run_s
    labels, starts, stops = zip(*line.epochs, strict=True)
    return (
        range(1, len(labels) + 1),
        labels,
        starts,
        stops,
        _durations(starts, stops),
        [start_s >= end_s for start_s in starts],
        list(map(rates.get, labels)),
    )


def _eval_columns(content: LogContent) -> Columns:
    """Columns of `EVAL_COLUMNS`."""
    line, target, at = content.line, content.target, content.epochs.at
    if not line.evals:
        return ()
    labels, steps, starts, stops, reports, values, overlaps = zip(*line.evals, strict=True)
    end_s = math.inf if line.run_s is None else line.run_s
    return (
        range(1, len(labels) + 1),
        labels,
        steps,
        list(map(at, line.evals)),
        starts,
        stops,
        _durations(starts, stops),
        reports,
        values,
        [target is not None and value is not None and target.reached(value) for value in values],
        [(report_s or stop_s or 0.0) > end_s for report_s, stop_s in zip(reports, stops, strict=True)],
        overlaps,
    )


def _durations(starts: Iterable[float | None], stops: Iterable[float | None]) -> list[float | None]:
    return [None if a is None or b is None else b - a for a, b in zip(starts, stops, strict=True)]


def _phase_rows(log: Log) -> list[tuple[Any, ...]]:
    """Rows of `PHASE_COLUMNS` but for the run."""
    rows = []
    for event in log.every(mllog.STEP_PHASES, mllog.RANK_PHASES):
        if not isinstance(event.value, dict):
            continue
        where = [number(event.metadata.get(name)) for name in ("epoch_num", "first_step", "steps")]
        loss = number(event.metadata.get("loss"))
        source = "rank 0, window" if event.key == mllog.STEP_PHASES else "mean over ranks, epoch"
        for phase in (*STEP_PARTS, *BESIDE_STEP):
            seconds = number(event.value.get(phase))
            if seconds is not None:
                rows.append((source, *where, phase, seconds, loss))
    return rows


def _rank_rows(log: Log) -> list[tuple[Any, ...]]:
    """Rows of `RANK_COLUMNS` but for the run; ``values`` is JSON, in rank order, where the log has every rank's."""
    rows: list[tuple[Any, ...]] = []
    for event in log.every(mllog.RANK_STATS):
        where = [number(event.metadata.get(name)) for name in ("epoch_num", "steps")]
        for quantity, spread in event.value.items() if isinstance(event.value, dict) else ():
            if isinstance(spread, dict):
                numbers = [number(spread.get(name)) for name in RANK_COLUMNS[4:10]]
                rows.append((*where, quantity, *numbers, text(spread.get("values"))))
    return rows


def _expert_rows(log: Log) -> list[tuple[Any, ...]]:
    """Rows of `EXPERT_COLUMNS` but for the run; ``imbalance`` is computed from the tokens, ``tokens_per_expert`` is JSON."""
    rows: list[tuple[Any, ...]] = []
    for event in log.every(mllog.WINDOW_STATS):
        stats = event.value if isinstance(event.value, dict) else {}
        where = [number(event.metadata.get(name)) for name in ("epoch_num", "first_step", "steps")]
        layers, efficiency = stats.get("load"), stats.get("efficiency")
        exposed = number(efficiency.get("exposed_communication_s")) if isinstance(efficiency, dict) else None
        for layer, entry in layers.items() if isinstance(layers, dict) else ():
            tokens = _counts(entry.get("tokens_per_expert")) if isinstance(entry, dict) else []
            if tokens and sum(tokens) > 0:
                rates = [number(entry.get(name)) for name in ("drop_rate", "needed_capacity", "padding_waste")]
                name = layer.encode("utf-8", "replace").decode()
                even = max(tokens) * len(tokens) / sum(tokens)
                rows.append((*where, name, len(tokens), sum(tokens), even, *rates, exposed, json.dumps(tokens)))
    return rows


def _expert_load(experts: list[tuple[Any, ...]]) -> dict[str, float | None]:
    """Expert load of a run: means over its windows and layers; seconds are the sum over windows."""
    windows = {row[:3]: row[10] for row in experts}  # logged once a window, for all layers
    return {
        "expert_imbalance": _mean(row[6] for row in experts),
        "expert_drop_rate": _mean(row[7] for row in experts),
        "expert_padding_waste": _mean(row[9] for row in experts),
        "exposed_all_to_all_s": sum(filter(None, windows.values())) if windows else None,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _counts(values: Any) -> list[int]:
    """A list of counts, or nothing if any of it cannot be one."""
    numbers = [number(value) for value in values] if isinstance(values, list) else []
    known = [round(value) for value in numbers if value is not None and 0.0 <= value <= LARGEST_PLAUSIBLE]
    return known if len(known) == len(numbers) else []
