"""The rules for power readings: every node, the whole run, plausible watts, one clock.

A result without a power folder breaks none of them. Findings name the file, and the first line if one line is wrong.
mlhpc.suite.log.energy explains which readings count and how they are integrated.
"""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import ResultBreaches, result_rule
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log.energy.power_log import EFFICIENCY, GAP_S, START, STOP, UNSTATED_ACCURACY
from mlhpc.suite.log.energy.score import (
    build_offset_curve,
    compute_energy_from_counters,
    compute_energy_of_run,
)
from mlhpc.suite.log.reader import convert_to_float
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import POWER, list_files

if TYPE_CHECKING:  # few results have power readings
    from mlhpc.suite.log.energy.power_log import PowerLog
    from mlhpc.suite.log.energy.score import PowerLogs

POWER_RULES = "mlperf_logging power_checker; training_policies power_measurement.adoc"
_MAX_NODE_W = 1e5  # of a node that states no rating
_MIN_RATE_HZ = 0.95  # one a second, and what a timer is late
_MIN_READINGS = 60  # readings that the rules ask of a run
_CLOCK_TOLERANCE_S = 1.0  # of a meter against the run: one reading
_SHORTEST_RUN_S, _SHORTEST_PAUSE_S = 10.0, 30.0
_LEAST_RUN_POWER = 0.8  # of the power in the pauses, which other programs may use
_SHINGLE, _DISTINCT = 16, 13  # readings in a row that two meters never share by chance, and how many of them differ
_FEWEST_CHANGES = 30  # of a meter that shows few different watts
_LEAST_EFFICIENCY = 0.7  # of a supply; the least that 80 PLUS admits is 0.8, from a fifth of its load on
_FEWEST_WATTS = 3  # different ones, of a whole run: a meter that shows fewer says nothing


@result_rule(
    "power-files", "a result with power readings has those of every run, from the same nodes and switches", POWER_RULES
)
def check_power_files(result: Result) -> ResultBreaches:
    for folder in (path for path in result.group.others if path.name == POWER and path.is_dir()):
        sound = {}
        for path in result.group.logs:
            nodes, switches, problem = _count_meters(folder / path.stem)
            if problem:
                yield folder / path.stem, problem
            elif not nodes:
                yield folder / path.stem, "no readings of this run: expected node_<i>.txt"
            else:
                sound[path.stem] = nodes, switches
        # Nothing else says how many meters there are: the most common number counts as right.
        usual = Counter(sound.values()).most_common(1)
        for name, counts in sound.items():
            if counts != usual[0][0]:
                (nodes, switches), (most, more) = counts, usual[0][0]
                yield folder / name, f"{nodes} nodes and {switches} switches; the other runs have {most} and {more}"


def _list_metered_runs(result: Result) -> Iterator[tuple[RunRecord, PowerLogs, float, float]]:
    """Yield the runs that have power readings and a time, with run_start and run_stop in Unix seconds."""
    for run in result.runs:
        meters = result.meters.get(run.path)
        if meters is not None and run.run_start_s is not None and run.run_stop_s is not None:
            yield run, meters, run.run_start_s, run.run_stop_s


def _list_readable_logs(meters: PowerLogs) -> list[PowerLog]:
    """List the logs of a run that hold readings."""
    return [log for log in meters.logs if len(log.times_ms)]


@result_rule(
    "power-readings",
    "every reading is a number of watts, more than 0 and at most what the node is rated for; a switch may be estimated",
    POWER_RULES,
)
def check_power_readings(result: Result) -> ResultBreaches:
    for meters in filter(None, result.meters.values()):
        yield from meters.unread
        for log in meters.logs:
            yield from ((log.path, text) for text in _check_readings(log))


def _check_readings(log: PowerLog) -> Iterator[str]:
    """Yield what is wrong with the readings of one meter: damaged lines, none at all, watts out of range."""
    estimated = log.kind == "sw" and (log.estimate_w or 0.0) > 0.0
    if log.damaged:
        line, message = log.problems[0]
        yield f"line {line}: {message}{_render_more(log.damaged)}"
    elif not len(log.times_ms) and not estimated:
        yield "no power_reading"
    rating = log.number("rating_w") or _MAX_NODE_W
    wrong = [index for index, watts in enumerate(log.watts) if not 0.0 < watts <= rating]
    if wrong:
        first = f"power_reading = {log.watts[wrong[0]]:g}{_render_more(len(wrong))}"
        yield f"line {log.lines[wrong[0]]}: {first}: expected more than 0, at most {rating:g} W"


def _render_more(count: int) -> str:
    return f", and {count - 1} more" if count > 1 else ""


@result_rule(
    "power-nodes", "there are readings of every node that took part, and of the network between them", POWER_RULES
)
def check_power_nodes(result: Result) -> ResultBreaches:
    stated = result.system.number("number_of_nodes") if result.system is not None else None
    for run, meters, _, _ in _list_metered_runs(result):
        there = len(meters.of("node"))
        took_part = run.nodes or (None if result.weak else stated)
        if took_part is not None and there < took_part:
            yield meters.folder, f"readings of {there} nodes; {took_part} took part"
        if there > 1 and not meters.of("sw"):
            yield meters.folder, f"{there} nodes and no sw_<i>.txt: the network is neither measured nor estimated"


@result_rule(
    "power-rate", "a meter is read once a second, at least 60 times, without a gap of more than 2 s", POWER_RULES
)
def check_power_rate(result: Result) -> ResultBreaches:
    for _, meters, start, stop in _list_metered_runs(result):
        for log in _list_readable_logs(meters):
            line = build_offset_curve(log)
            low, high = max(start, line.begin_s), min(stop, line.end_s)
            if high - low <= GAP_S:
                continue  # rule power-window
            rate, gap, count = line.rate_hz(low, high), line.largest_gap_s(low, high), len(line.times_s)
            if rate < _MIN_RATE_HZ or gap > GAP_S:
                found = f"{rate:.2f} readings a second, the largest gap is {render_duration(gap)}"
                yield log.path, f"{found}; expected 1 and {render_duration(GAP_S)}"
            elif count < _MIN_READINGS:
                yield log.path, f"{count} readings; expected {_MIN_READINGS}: measure longer on the same code path"


@result_rule(
    "power-window", "readings begin before run_start and end after run_stop: nothing is extrapolated", POWER_RULES
)
def check_power_window(result: Result) -> ResultBreaches:
    for _, meters, start, stop in _list_metered_runs(result):
        for log in _list_readable_logs(meters):
            line = build_offset_curve(log)
            late, early = line.times_s[0] - start, stop - line.end_s
            if late > GAP_S or early > GAP_S:
                begin = f"readings begin {render_duration(max(late, 0.0))} after run_start"
                yield log.path, f"{begin} and end {render_duration(max(early, 0.0))} before run_stop"
            yield from ((log.path, text) for text in _check_marks(log))


def _check_marks(log: PowerLog) -> Iterator[str]:
    """Yield how the readings contradict the events of the start and the stop of measuring."""
    start, stop = log.first(START), log.first(STOP)
    for key in (START, STOP):
        lines = [item.line for item in log.statements if item.key == key]
        if len(lines) > 1:
            yield f"line {lines[1]}: a second {key}"
    if start is None:
        yield f"no {START}"
    if stop is None:
        yield f"no {STOP}: the meter did not end by itself, or the end is cut off"
    elif stop.time_ms < max(log.times_ms):
        after = (max(log.times_ms) - stop.time_ms) / 1e3
        same = " and has the time of the start" if start is not None and stop.time_ms == start.time_ms else ""
        yield f"line {stop.line}: {STOP} is {render_duration(after)} before the last reading{same}"
    if start is not None and start.time_ms > min(log.times_ms):
        yield f"line {start.line}: {START} is after the first reading"


@result_rule("power-efficiency", "a supply gives no more than it takes: an efficiency is 0.7 to 1", POWER_RULES)
def check_power_efficiency(result: Result) -> ResultBreaches:
    for meters in filter(None, result.meters.values()):
        for log in meters.logs:
            for item in log.statements:
                if item.key == EFFICIENCY and not _LEAST_EFFICIENCY <= (convert_to_float(item.value) or 0.0) <= 1.0:
                    found = f"line {item.line}: conversion_eff = {render_repr(item.value)}"
                    yield log.path, f"{found}: expected {_LEAST_EFFICIENCY:g} to 1"
                    break


@result_rule(
    "power-parts", "the accelerators of a node, or another part, take no more than the node, nor do its counters"
)
def check_power_parts(result: Result) -> ResultBreaches:
    for run, meters, start, stop in _list_metered_runs(result):
        whole = {log.index: log for log in meters.of("node")}
        for log in meters.of("part"):
            node = whole.get(log.index)
            if node is None or log.scope == node.scope:
                continue
            part_j, node_j = (_compute_energy_j(each, start, stop) for each in (log, node))
            # Both meters may be wrong by their accuracy, in opposite directions.
            slack = 1.0 + _find_accuracy(log) + _find_accuracy(node)
            if node_j is not None and part_j is not None and part_j > node_j * slack:
                part = f"{log.scope}: {part_j:.4g} J in the run"
                yield log.path, f"{part}, more than the {node_j:.4g} J of {node.path.name}"
        measured, counted_j = compute_energy_of_run(run, meters), compute_energy_from_counters(run).joules or 0.0
        if measured.scope == "node" and counted_j > (1.0 + 2.0 * UNSTATED_ACCURACY) * (measured.nodes_j or math.inf):
            yield (
                meters.folder,
                f"{counted_j:.4g} J are counted in the log, more than the {measured.nodes_j:.4g} J of its nodes",
            )


def _compute_energy_j(log: PowerLog, start: float, stop: float) -> float | None:
    factor = log.efficiency
    return None if factor is None or not len(log.times_ms) else factor * build_offset_curve(log).between(start, stop)


def _find_accuracy(log: PowerLog) -> float:
    stated = log.number("accuracy")
    return UNSTATED_ACCURACY if stated is None else min(abs(stated), UNSTATED_ACCURACY)


@result_rule("power-monotone", "times of readings rise and a counter of joules never goes back")
def check_power_monotone(result: Result) -> ResultBreaches:
    for meters in filter(None, result.meters.values()):
        for log in _list_readable_logs(meters):
            back = next((n for n in range(1, len(log.times_ms)) if log.times_ms[n] <= log.times_ms[n - 1]), None)
            if back is not None:
                by = log.times_ms[back - 1] - log.times_ms[back]
                yield log.path, f"line {log.lines[back]}: {by:g} ms before the reading above it, or at the same time"
            counts = [convert_to_float(value) for value in log.counts]
            fell = next((n for n in range(1, len(counts)) if (counts[n] or 0.0) < (counts[n - 1] or 0.0)), None)
            if fell is not None:
                yield log.path, f"the counter goes from {counts[fell - 1]:g} J back to {counts[fell]:g} J"


@result_rule("power-copied", "no meter repeats the readings of another run or node, of whatever result of the package")
def check_power_copied(result: Result) -> ResultBreaches:
    seen = result.readings
    for _, meters, start, stop in _list_metered_runs(result):
        own: dict[int, Path] = {}
        for log in _list_readable_logs(meters):
            if log.kind == "part":
                continue  # two scopes of one node may have one meter
            shingles = set(_compute_shingles(log, start, stop))
            source = next((seen.get(each) or own.get(each) for each in shingles if each in seen or each in own), None)
            if source is not None:
                where = "/".join(source.parts[-4:])
                yield log.path, f"{_SHINGLE} or more readings in a row are those of {where}, shifted or scaled at most"
            own.update(dict.fromkeys(shingles, log.path))
        seen.update(own)


def _compute_shingles(log: PowerLog, start: float, stop: float) -> Iterator[int]:
    """Yield a hash of the differences, and one of the ratios, of every `_SHINGLE` readings in a row within the run.

    A copy with a constant added keeps its differences, a scaled copy keeps its ratios. Readings of few different watts
    repeat themselves, so of those all together count, if they change often enough.
    """
    low, high = start * 1e3, stop * 1e3
    watts = [w for t, w in zip(log.times_ms, log.watts, strict=True) if low <= t <= high and w > 0.0]
    pairs = list(itertools.pairwise(watts))
    differences = [round(b - a, 3) + 0.0 for a, b in pairs]  # + 0.0 makes -0.0 and 0.0 one value
    ratios = [round(math.log(b / a), 5) + 0.0 for a, b in pairs]
    for kind, steps in enumerate((differences, ratios)):
        for at in range(len(steps) - _SHINGLE + 2):
            row = tuple(steps[at : at + _SHINGLE - 1])
            if len(set(row)) >= _DISTINCT:  # an idle node repeats itself
                yield hash((kind, row))
    changes = sum(difference != 0.0 for difference in differences)
    if changes >= _FEWEST_CHANGES and len(set(watts)) >= _FEWEST_WATTS:
        yield hash(("all", tuple(differences)))


@result_rule(
    "power-clock",
    "the clock of a meter is known against that of the run, to one second, and a node takes more in a run than between "
    "the runs",
)
def check_power_clock(result: Result) -> ResultBreaches:
    for meters in filter(None, result.meters.values()):
        for log in _list_readable_logs(meters):
            offset, bound = (log.stated.get(name) for name in ("clock_offset_s", "clock_bound_s"))
            if offset is None and bound is None:
                if not result.ruleset.foreign:
                    yield log.path, "no clock_offset_s: nobody compared its clock with that of the run"
                continue
            known = convert_to_float(bound)
            if convert_to_float(offset) is None or known is None or not 0.0 <= known <= _CLOCK_TOLERANCE_S:
                text = f"clock_offset_s = {render_repr(offset)}, clock_bound_s = {render_repr(bound)}"
                yield log.path, f"{text}: expected seconds, known to {render_duration(_CLOCK_TOLERANCE_S)}"
    yield from _check_pauses(result)


def _check_pauses(result: Result) -> ResultBreaches:
    """Yield a node that takes less power in its run than in the pauses before and after it, or always the same."""
    spans = [(start, stop) for _, _, start, stop in _list_metered_runs(result)]
    for _, meters, start, stop in _list_metered_runs(result):
        for log in filter(lambda each: each.kind == "node", _list_readable_logs(meters)):
            line = build_offset_curve(log)
            parts = [(max(low, line.begin_s), min(high, line.end_s)) for low, high in spans]
            parts = [(low, high) for low, high in parts if high > low]
            pause_s = line.end_s - line.begin_s - math.fsum(high - low for low, high in parts)
            pause_j = line.energy_j[-1] - math.fsum(line.between(*part) for part in parts)
            run_w = line.between(start, stop) / max(stop - start, 1e-3)
            # Of a run of a few readings chance decides
            less = stop - start > _SHORTEST_RUN_S and run_w < _LEAST_RUN_POWER * pause_j / max(
                pause_s, _SHORTEST_PAUSE_S
            )
            if pause_s > _SHORTEST_PAUSE_S and (less or len({*log.watts}) == 1):
                yield log.path, f"{run_w:.4g} W in the run, {pause_j / pause_s:.4g} W in the pauses: check the clock"


@result_rule("power-scope", "all nodes of all runs are measured at the same place: whole nodes, AC or DC", POWER_RULES)
def check_power_scope(result: Result) -> ResultBreaches:
    logs = [log for meters in filter(None, result.meters.values()) for log in meters.of("node")]
    part = next((log for log in logs if log.scope not in ("node", "rack")), None)
    if part is not None:
        yield part.path, f"measures {part.scope}; the rules ask for the whole node"
    yield from _check_all_equal(logs, lambda log: log.scope, "scope")
    yield from _check_all_equal(logs, lambda log: log.current or "not stated", "AC or DC")


def _check_all_equal(logs: Sequence[PowerLog], of: Callable[[PowerLog], str], what: str) -> ResultBreaches:
    """Yield the first log whose value differs from that of the first log."""
    other = next((log for log in logs if of(log) != of(logs[0])), None)
    if other is not None:
        yield other.path, f"{what}: {of(other)}; {logs[0].path.parent.name}/{logs[0].path.name} has {of(logs[0])}"


def _count_meters(folder: Path) -> tuple[int, int, str | None]:
    """Count the nodes and switches in the folder of a run's readings, and say what is wrong with the names."""
    if folder.is_symlink() or not folder.is_dir():
        return 0, 0, None
    found: dict[str, list[str]] = {"node": [], "sw": []}
    for path in list_files(folder):
        stem, _, number = path.stem.rpartition("_")
        if path.is_symlink() or not path.is_file():
            return 0, 0, f"{render_repr(path.name)} is no file: it is not read"
        if stem in found and path.suffix == ".txt":
            found[stem].append(number)
    for stem, numbers in found.items():
        if sorted(numbers) != sorted(str(index) for index in range(len(numbers))):
            return (
                0,
                0,
                f"{stem}_<i>.txt are {render_repr(', '.join(sorted(numbers)))}; expected 0 to {len(numbers) - 1}",
            )
    return len(found["node"]), len(found["sw"]), None
