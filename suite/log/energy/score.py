"""Computes the energy of a run and of a result: the integral from run_start to run_stop, of the widest scope of all
nodes.

A result's energy is the mean over the runs that its *performance* score keeps (power_measurement.adoc), not over the
middle runs by energy. Scopes are never mixed, nor are AC and DC. An estimate for an unmeasured part is labelled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlhpc.suite.files import render_duration
from mlhpc.suite.log.energy.power_log import (
    GAP_S,
    JOB,
    MIN_READINGS,
    PHASE_LOCK_LIMIT,
    SCOPES,
    UNSTATED_ACCURACY,
    PowerCurve,
    PowerLog,
    build_curve,
    compute_sampling_halfwidth_j,
    estimate_resolution_w,
    measure_phase_lock,
    read_power_log,
)
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import POWER
from mlhpc.suite.log.score import TimeToTrain
from mlhpc.suite.log.timeline import STAGING_BEFORE
from mlhpc.suite.statistics.sessions import compute_log_interval

_IDLE_S = 10.0


@dataclass(frozen=True)
class PowerLogs:
    """The power logs of one run, and files that could not be read (path, reason)."""

    folder: Path
    logs: tuple[PowerLog, ...]
    unread: tuple[tuple[Path, str], ...] = ()

    def of(self, kind: str) -> list[PowerLog]:
        """Return the logs of a kind, by index."""
        return sorted((log for log in self.logs if log.kind == kind), key=lambda log: log.index or 0)


@dataclass(frozen=True)
class RunEnergy:
    """The energy of one run in joules. If it has none, ``reason`` says why.

    ``joules`` is nodes and interconnect together; ``interconnect_j`` is the rules' estimate if ``estimated``.
    ``halfwidth_j`` is half the 95 % interval: sampling, accuracy and clock of the meters, and uncovered time.
    ``phases`` splits the nodes' joules; "staging before" is no part of the run. ``idle_j``: idle power times the run's
    time.
    """

    path: Path | None
    reason: str | None
    joules: float | None = None
    nodes_j: float | None = None
    interconnect_j: float = 0.0
    estimated: bool = False
    scope: str | None = None
    current: str | None = None
    nodes: int = 0
    seconds: float = 0.0
    uncovered_s: float = 0.0
    halfwidth_j: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    idle_j: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple[str | None, str | None]:
        """Scope, and AC or DC. Only energies of the same kind may be compared."""
        return self.scope, self.current


@dataclass(frozen=True)
class EnergyToSolution:
    """The energy of a result.

    ``reason``: why it is no score, or None. There may still be a mean, over the runs with energy.
    """

    runs: tuple[RunEnergy, ...]
    kept: tuple[Path, ...]
    reason: str | None
    mean_j: float | None = None
    interval_j: tuple[float, float] | None = None
    mean_s: float | None = None
    scope: str | None = None
    current: str | None = None
    nodes: int = 0
    estimated: bool = False
    idle_share: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    samples: float | None = None

    @property
    def valid(self) -> bool:
        """True if this is a score."""
        return self.reason is None and self.mean_j is not None

    @property
    def what(self) -> str:
        """What was measured: scope, and AC or DC. Only equal ones may be compared."""
        return " ".join(filter(None, [self.scope, self.current or "(AC or DC not stated)"]))

    @property
    def delay_product_js(self) -> float | None:
        """Energy times delay, in joule seconds."""
        return self.mean_j * self.mean_s if self.mean_j is not None and self.mean_s is not None else None

    @property
    def watts_per_node(self) -> float | None:
        """Mean power of a node with its share of the interconnect, in the kept runs."""
        if self.mean_j is None or not self.mean_s or not self.nodes:
            return None
        return self.mean_j / self.mean_s / self.nodes

    @property
    def joules_per_sample(self) -> float | None:
        """Joules per training sample."""
        return self.mean_j / self.samples if self.mean_j is not None and self.samples else None


def read_power_logs(log: Path) -> PowerLogs | None:
    """Read the power logs of a run's log, ``power/<name of the log>/*.txt`` next to it.

    None without such a folder. Links are not read.
    """
    folder = log.parent / POWER / log.stem
    if folder.is_symlink() or folder.parent.is_symlink() or not folder.is_dir():
        return None
    logs, unread = [], []
    for path in sorted(folder.glob("*.txt")):
        if path.is_symlink() or not path.is_file():
            continue  # rule power-files names it
        try:
            found = read_power_log(path)
        except OSError as error:
            unread.append((path, f"cannot be read: {error.strerror}"))
        else:
            if found.kind:
                logs.append(found)
    return PowerLogs(folder, tuple(logs), tuple(unread))


def find_widest_scope(meters: PowerLogs) -> tuple[str | None, list[PowerLog]]:
    """Return the widest scope that every node has, and one log of it per node. (None, []) if there is no
    common scope.
    """
    by_node: dict[int, dict[str, PowerLog]] = {}
    for log in (*meters.of("node"), *meters.of("part")):
        if log.index is not None and len(log.times_ms):
            by_node.setdefault(log.index, {}).setdefault(log.scope, log)
    whole = next((scopes[JOB] for scopes in by_node.values() if JOB in scopes), None)
    if whole is not None:  # it sees the other nodes too
        return JOB, [whole]
    nodes = {log.index for log in meters.of("node")}
    if not by_node or nodes - by_node.keys():
        return None, []
    for scope in reversed(SCOPES):
        if all(scope in scopes for scopes in by_node.values()):
            return scope, [by_node[index][scope] for index in sorted(by_node)]
    return None, []


def compute_energy_of_run(record: RunRecord, meters: PowerLogs | None) -> RunEnergy:
    """Compute the energy of a run from its meters."""
    if meters is None or not meters.logs:
        return RunEnergy(record.path, "no power readings")
    start, stop = record.run_start_s, record.run_stop_s
    if start is None or stop is None or stop <= start:
        return RunEnergy(record.path, "the run has no time from run_start to run_stop")
    scope, logs = find_widest_scope(meters)
    if scope is None:
        return RunEnergy(record.path, "the nodes have no scope in common, or one has no reading")
    currents = {log.current for log in logs}
    if len(currents) > 1:
        return RunEnergy(record.path, f"the nodes are measured differently: {', '.join(sorted(map(str, currents)))}")
    if any(log.efficiency is None or log.efficiency <= 0.0 for log in logs):
        return RunEnergy(record.path, "a conversion efficiency is no number above 0")
    if record.nodes and len(logs) < record.nodes and scope != JOB:
        return RunEnergy(record.path, f"readings of {len(logs)} nodes, the log says {record.nodes}")
    parts = [_compute_meter_energy(log, start, stop) for log in logs]
    switches = [_compute_interconnect_j(log, start, stop) for log in meters.of("sw")]
    nodes_j = math.fsum(part.joules for part in parts)
    between_j = math.fsum(joules for joules, _ in switches)
    uncovered = max(part.uncovered_s for part in parts)
    worst = max(parts, key=lambda part: part.uncovered_s)
    reason = f"{worst.name} covers all but {render_duration(uncovered)} of the run" if uncovered > GAP_S else None
    if scope == JOB:
        reason = reason or "the meter counts for the whole job, not for each node"
    idle = [part.idle_w for part in parts]
    return RunEnergy(
        record.path,
        reason,
        joules=nodes_j + between_j,
        nodes_j=nodes_j,
        interconnect_j=between_j,
        estimated=any(estimated for _, estimated in switches),
        scope=scope,
        current=next(iter(currents)),
        nodes=(record.nodes or 1) if scope == JOB else len(logs),
        seconds=stop - start,
        uncovered_s=uncovered,
        halfwidth_j=_combine_halfwidths_j(parts),
        phases=_split_by_phase(record, logs, nodes_j),
        idle_j=None if None in idle else math.fsum(w for w in idle if w is not None) * (stop - start),
        notes=tuple(note for part in parts for note in part.notes),
    )


def compute_energy_from_counters(record: RunRecord) -> RunEnergy:
    """Compute the energy of a run from the ``energy`` events of its log, if it has no power log."""
    counted, seconds = record.counted, record.time_to_train_s
    if counted is None or not seconds or seconds <= 0.0:
        return RunEnergy(record.path, "no energy counters in the log")
    nodes = record.nodes or 1
    scope, joules, notes = _find_widest_counted(counted.by_counter, nodes)
    if scope is None:
        return RunEnergy(record.path, "; ".join(notes))
    lacking = [name for name in counted.absent if name.startswith("rapl/") and scope.startswith("package")]
    uncovered = max(seconds - counted.seconds, 0.0)
    worth = joules / counted.seconds if counted.seconds > 0.0 else 0.0
    return RunEnergy(
        record.path,
        f"the counters cover all but {render_duration(uncovered)} of the run" if uncovered > GAP_S else None,
        joules=joules,
        nodes_j=joules,
        scope=scope,
        nodes=nodes,
        seconds=seconds,
        uncovered_s=uncovered,
        halfwidth_j=UNSTATED_ACCURACY * abs(joules) + worth * uncovered,
        notes=(
            *notes,
            *([f"without {', '.join(lacking)}, which cannot be read"] if lacking else []),
            "counters: AC or DC not stated",
            f"accuracy not stated, the rules' {UNSTATED_ACCURACY:.0%} taken",
        ),
    )


def _find_widest_counted(
    counters: Mapping[str, tuple[float, int]], nodes: int
) -> tuple[str | None, float, tuple[str, ...]]:
    """Return (scope, joules, notes) of the widest scope that every node's counters have.

    Never adds a part to its whole.
    """
    whole = counters.get("pm_counters/node")
    if whole is not None and whole[1] == nodes:
        return "node", whole[0], ()
    packages = {name: item for name, item in counters.items() if name.startswith("rapl/")}
    devices = [item for name, item in counters.items() if name.startswith("nvml/")]
    joules = math.fsum(item[0] for item in packages.values())
    on_devices = math.fsum(item[0] for item in devices)
    if packages and all(item[1] == nodes for item in packages.values()):
        return ("package+device", joules + on_devices, ()) if devices else ("package", joules, ())
    if devices:
        return "device", on_devices, ("not every node has a counter of its processors",)
    return None, 0.0, (f"no counter is in all {nodes} nodes",)


def find_energy(result: TimeToTrain, samples: float | None = None) -> EnergyToSolution | None:
    """Compute the energy of a result from its power logs, else from the counters in its logs.

    None if it has neither.
    """
    records = [run.record for run in result.runs]
    meters = [read_power_logs(record.path) if record.path is not None else None for record in records]
    if any(found is not None and found.logs for found in meters):
        energies = [compute_energy_of_run(record, found) for record, found in zip(records, meters, strict=True)]
    elif any(record.counted for record in records):
        energies = [compute_energy_from_counters(record) for record in records]
    else:
        return None
    return compute_energy_to_solution(result, energies, samples)


def compute_energy_to_solution(
    result: TimeToTrain, energies: Sequence[RunEnergy], samples: float | None = None
) -> EnergyToSolution:
    """Compute the energy of a result over the runs that its time keeps. ``energies``: in the order of the result's
    runs.

    The interval comes from all converged runs in the score's window (t on log joules). It is widened by the meters' own
    error, which is the same in every run and does not average out.
    """
    by_path = {energy.path: energy for energy in energies}
    kept = [by_path[run.record.path] for run in result.scored if run.record.path in by_path]
    paths = tuple(energy.path for energy in kept if energy.path is not None)
    if not result.valid:
        return EnergyToSolution(tuple(energies), paths, result.reason)
    lacking = next((energy for energy in kept if energy.joules is None), None)
    if not kept or lacking is not None:
        return EnergyToSolution(tuple(energies), paths, lacking.reason if lacking else "no power readings")
    kinds = {energy.kind for energy in kept}
    if len(kinds) > 1:
        said = " and ".join(sorted(" ".join(str(part) for part in kind if part) for kind in kinds))
        return EnergyToSolution(tuple(energies), paths, f"the runs are measured differently: {said}")
    joules = [energy.joules or 0.0 for energy in kept]
    if min(joules) <= 0.0:
        return EnergyToSolution(tuple(energies), paths, "a run has no positive energy")
    mean = statistics.fmean(joules)
    seconds = statistics.fmean(energy.seconds for energy in kept)
    idle = [energy.idle_j for energy in kept]
    uncovered = next((energy.reason for energy in kept if energy.reason), None)
    return EnergyToSolution(
        tuple(energies),
        paths,
        f"not a score: {uncovered}" if uncovered else None,
        mean_j=mean,
        interval_j=_combine_intervals(result, by_path, kept, mean),
        mean_s=seconds,
        scope=kept[0].scope,
        current=kept[0].current,
        nodes=kept[0].nodes,
        estimated=any(energy.estimated for energy in kept),
        idle_share=None if None in idle else math.fsum(j for j in idle if j is not None) / math.fsum(joules),
        phases={
            name: statistics.fmean(energy.phases.get(name, 0.0) for energy in kept)
            for name in dict.fromkeys(name for energy in kept for name in energy.phases)
        },
        samples=samples,
    )


def _combine_intervals(
    result: TimeToTrain, by_path: Mapping[Path | None, RunEnergy], kept: Sequence[RunEnergy], mean: float
) -> tuple[float, float] | None:
    """Combine the intervals of runs and meters: half widths add in squares, below and above the mean. None if neither
    is known.
    """
    inside = [run for run in result.runs if run.converged and not (run.dropped or "").startswith("outside")]
    joules = [
        energy.joules
        for run in inside
        if (energy := by_path.get(run.record.path)) is not None and energy.joules and energy.kind == kept[0].kind
    ]
    of_runs = compute_log_interval(joules)
    widths = [energy.halfwidth_j for energy in kept]
    if None in widths:
        return None
    meters = statistics.fmean(width for width in widths if width is not None)
    middle = math.exp(statistics.fmean(map(math.log, joules))) if joules else mean
    below, above = (middle - of_runs[0], of_runs[1] - middle) if of_runs else (0.0, 0.0)
    return max(mean - math.hypot(below, meters), 0.0), mean + math.hypot(above, meters)


@dataclass(frozen=True)
class _MeterEnergy:
    """One meter's result for a run. ``bounded_j``: the sum of the errors that have a bound and no distribution."""

    name: str
    joules: float
    uncovered_s: float
    sampling_j: float | None
    accuracy_j: float
    bounded_j: float
    idle_w: float | None
    notes: tuple[str, ...]


def _compute_meter_energy(log: PowerLog, start: float, stop: float) -> _MeterEnergy:
    line = build_offset_curve(log)
    factor = log.efficiency or 1.0
    inside = list(line.within(start, stop, hold=not log.integrates))
    uncovered = line.uncovered_s(start, stop)
    rating = log.number("rating_w")
    most = max(rating or 0.0, max(log.watts))
    duty, accuracy = log.number("duty"), log.number("accuracy")
    sampling = compute_sampling_halfwidth_j(
        inside, duty=1.0 if duty is None else duty, integrates=log.integrates, most_w=most if rating else None
    )
    shift, cut = _estimate_cut_ends_j(line, start, stop, most) if log.integrates else (0.0, 0.0)
    joules = math.fsum(seconds * watts for seconds, watts in inside) + shift
    joules += _estimate_edges_j(line, start, stop) if uncovered <= GAP_S else 0.0
    bounded = cut + most * uncovered + line.clock_error_j(start, stop, abs(log.number("clock_bound_s") or 0.0))
    share = UNSTATED_ACCURACY if accuracy is None else accuracy
    return _MeterEnergy(
        log.path.name,
        factor * joules,
        uncovered,
        None if sampling is None else factor * sampling,
        factor * max(share * abs(joules), estimate_resolution_w(log.watts) / 2 * (stop - start)),
        factor * bounded,
        _estimate_idle_w(line, start, stop, factor),
        tuple(_list_assumptions(log, inside, most)),
    )


def _estimate_cut_ends_j(line: PowerCurve, start: float, stop: float, most_w: float) -> tuple[float, float]:
    """Return (joules to add, largest error) for intervals that an end of the run cuts, of a meter that reads means.

    A mean does not show when the energy was used. The inner part is assumed to have the power of the next reading, as
    far as the energy of the interval allows.
    """
    shift = error = 0.0
    for inside_s, seconds, watts, near_w in line.cut_intervals(start, stop):
        joules = watts * seconds
        low = max(joules - most_w * (seconds - inside_s), 0.0)
        high = min(joules, most_w * inside_s)
        taken = min(max(near_w * inside_s, low), high)
        shift += taken - watts * inside_s
        error += max(high - taken, taken - low)
    return shift, error


def _list_assumptions(log: PowerLog, inside: Sequence[tuple[float, float]], most_w: float) -> Iterator[str]:
    """Yield the assumptions that the interval makes about a meter."""
    name = log.path.name
    if log.number("accuracy") is None:
        yield f"{name}: accuracy not stated, the rules' {UNSTATED_ACCURACY:.0%} taken"
    if log.current is None:
        yield f"{name}: AC or DC not stated"
    steps = [seconds for seconds, _ in inside[1:-1] if seconds > 0.0]
    if not log.integrates and len(inside) < MIN_READINGS:
        yield f"{name}: fewer than {MIN_READINGS} readings in the run have no interval"
    elif not log.integrates and len(steps) > 1:
        rated = bool(log.number("rating_w"))
        if measure_phase_lock(steps) > PHASE_LOCK_LIMIT:
            wide = "the interval is wide" if rated else "there is no interval"
            limit = "" if rated else ", and no rating_w limits it"
            yield (
                f"{name}: {wide} because a load in step with the readings, every"
                f" {render_duration(statistics.median(steps))}, would not show{limit}; read means (reads: mean), or at"
                " random intervals"
            )
        elif not rated:
            yield f"{name}: no power above {most_w:.4g} W, the highest reading, is assumed; rating_w states the limit"
    absent = log.stated.get("absent")
    if isinstance(absent, dict) and absent and log.scope.startswith("package"):
        yield f"{name}: without {', '.join(sorted(absent))}, which cannot be read"


def build_offset_curve(log: PowerLog) -> PowerCurve:
    """Return the readings of a log on the run's clock: shifted by the offset that the file states."""
    return build_curve(log, log.number("clock_offset_s") or 0.0)


def _estimate_edges_j(line: PowerCurve, start: float, stop: float) -> float:
    """Estimate joules of up to `GAP_S` without a reading at an end of the run, from the nearest reading.

    Longer stretches are not filled.
    """
    if not line.times_s:
        return 0.0
    before, after = max(line.begin_s - start, 0.0), max(stop - line.end_s, 0.0)
    return line.watts[0] * before + line.watts[-1] * after


def _combine_halfwidths_j(parts: Sequence[_MeterEnergy]) -> float | None:
    """Combine errors of nodes: sampling in squares, as it is independent; accuracy and bounds as plain sums.

    All meters of one make may be wrong in the same way.
    """
    if any(part.sampling_j is None for part in parts):
        return None
    sampling = math.sqrt(math.fsum((part.sampling_j or 0.0) ** 2 for part in parts))
    accuracy = math.fsum(part.accuracy_j for part in parts)
    return math.hypot(sampling, accuracy) + math.fsum(part.bounded_j for part in parts)


def _compute_interconnect_j(log: PowerLog, start: float, stop: float) -> tuple[float, bool]:
    """Return (joules, estimated) of a switch: its readings, else its stated power times the run's time."""
    factor = log.efficiency or 1.0
    if len(log.times_ms):
        return factor * build_offset_curve(log).between(start, stop), False
    return factor * (log.estimate_w or 0.0) * (stop - start), True


def _estimate_idle_w(line: PowerCurve, start: float, stop: float, factor: float) -> float | None:
    """Return the lowest mean power over ten seconds outside of the run. None if no such time was measured."""
    spans = [(line.begin_s, min(start, line.end_s)), (max(stop, line.begin_s), line.end_s)]
    found = []
    for low, high in spans:
        steps = int((high - low) // _IDLE_S)
        found += [line.between(low + n * _IDLE_S, low + (n + 1) * _IDLE_S) / _IDLE_S for n in range(min(steps, 10_000))]
    return factor * min(found) if found else None


def _split_by_phase(record: RunRecord, logs: Sequence[PowerLog], nodes_j: float) -> dict[str, float]:
    """Split the nodes' joules by phase of the run. Without "staging before" they sum to ``nodes_j``.

    Readings that the ends of the run cut change the total. All phases of the run share the difference.
    """
    begin = record.run_start_s or 0.0
    lines = [(build_offset_curve(log), log.efficiency or 1.0) for log in logs]

    def joules(stretches: Sequence[tuple[float, float]]) -> float:
        return math.fsum(f * line.between(begin + a, begin + b) for line, f in lines for a, b in stretches)

    found = {name: joules(stretches) for name, stretches in record.stretches.items() if stretches}
    within = math.fsum(spent for name, spent in found.items() if name != STAGING_BEFORE)
    share = nodes_j / within if within > 0.0 else 1.0
    return {name: spent if name == STAGING_BEFORE else share * spent for name, spent in found.items()}
