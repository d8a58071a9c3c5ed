"""The rules that only logs and results of MLPerf Training are judged by: when a run is evaluated, and its power readings."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from suite.compliance.rules.group_rules import GroupBreach, GroupContext, group_rule
from suite.compliance.rules.table import LogBreach, LogContext, log_rule
from suite.files import brief
from suite.log import mllog
from suite.log.reader import read_events
from suite.log.results_tree import POWER, list_files
from suite.log.values import finite, whole

RULES = "mlperf_logging training_*/closed_*.yaml"
POWER_RULES = "mlperf_logging power_checker; mlcommons/training_policies, power"


@log_rule("eval-schedule", "evaluations come after as many samples as the benchmark prescribes", RULES)
def eval_schedule(context: LogContext) -> Iterator[LogBreach]:
    schedule = context.benchmark.schedule if context.benchmark is not None else None
    batch = whole(context.logged(mllog.GLOBAL_BATCH_SIZE))
    if schedule is None or context.division == "open" or batch is None or not 0 < batch < 10**9:
        return
    events = list(context.every(context.benchmark.metric)) if context.benchmark is not None else []
    breach = schedule.breach(batch, [finite(event.metadata.get("samples_count")) for event in events])
    if breach is not None:
        event, due = events[breach[0]], breach[1]
        yield event.line, f"evaluated after {brief(event.metadata.get('samples_count'))} samples; {due} are due"


@group_rule(
    "power-files", "a result with power readings has those of every run, from the same nodes and switches", POWER_RULES
)
def power_files(context: GroupContext) -> Iterator[GroupBreach]:
    for folder in (path for path in context.group.others if path.name == POWER and path.is_dir()):
        counts = {path.stem: _meters(folder / path.stem) for path in context.group.logs}
        for name, (nodes, _, problem) in counts.items():
            if problem:
                yield folder / name, problem
            elif not nodes:
                yield folder / name, "no readings of this run: expected node_<i>.txt"
        usual = Counter((nodes, switches) for nodes, switches, problem in counts.values() if not problem and nodes)
        for name, (nodes, switches, problem) in counts.items():
            most = usual.most_common(1)[0][0] if usual else None
            if most is not None and nodes and not problem and (nodes, switches) != most:
                yield (
                    folder / name,
                    f"{nodes} nodes and {switches} switches; the other runs have {most[0]} and {most[1]}",
                )


@group_rule(
    "power-readings",
    "power is read from run_start to run_stop, in watts that are not negative; no supply gives more than it takes",
    POWER_RULES,
)
def power_readings(context: GroupContext) -> Iterator[GroupBreach]:
    for run in context.runs:
        folder = context.group.folder / POWER / (run.path.stem if run.path else "")
        for path in list_files(folder) if folder.is_dir() and not folder.is_symlink() else ():
            if path.suffix == ".txt" and not path.is_symlink() and path.is_file():
                yield from ((path, text) for text in _wrong_readings(path, run.run_start_s, run.run_stop_s))


def _meters(folder: Path) -> tuple[int, int, str | None]:
    """(nodes, switches, what is wrong with the names of their files) in the folder of a run's readings."""
    if folder.is_symlink() or not folder.is_dir():
        return 0, 0, None
    found: dict[str, list[str]] = {"node": [], "sw": []}
    for path in list_files(folder):
        stem, _, number = path.stem.rpartition("_")
        if path.is_symlink() or not path.is_file():
            return 0, 0, f"{brief(path.name)} is no file: it is not read"
        if stem in found and path.suffix == ".txt":
            found[stem].append(number)
    for stem, numbers in found.items():
        if sorted(numbers) != sorted(str(index) for index in range(len(numbers))):
            return 0, 0, f"{stem}_<i>.txt are {brief(', '.join(sorted(numbers)))}; expected 0 to {len(numbers) - 1}"
    return len(found["node"]), len(found["sw"]), None


def _wrong_readings(path: Path, start_s: float | None, stop_s: float | None) -> Iterator[str]:
    """What is wrong with the readings of one meter during a run; its ends are in Unix seconds."""
    try:
        log = read_events(path, steps=False)
    except OSError as error:
        yield f"cannot be read: {error.strerror}"
        return
    readings = [(event.time_ms / 1e3, finite(event.value)) for event in log.every("power_reading")]
    if not readings:
        yield "no power_reading"
        return
    wrong = next(((time, watts) for time, watts in readings if watts is None or watts < 0.0), None)
    if wrong is not None:
        yield f"power_reading = {brief(wrong[1])}: expected watts, 0 or more"
    efficiency = log.first("conversion_eff")
    share = finite(efficiency.value) if efficiency is not None else None
    if efficiency is not None and (share is None or not 0.0 < share <= 1.0):
        yield f"conversion_eff = {brief(efficiency.value)}: expected more than 0, at most 1"
    times = [time for time, _ in readings]
    if start_s is not None and stop_s is not None and (min(times) > start_s + _GAP_S or max(times) < stop_s - _GAP_S):
        late, early = max(min(times) - start_s, 0.0), max(stop_s - max(times), 0.0)
        yield f"readings begin {late:.0f} s after run_start and end {early:.0f} s before run_stop"


_GAP_S = 2.0  # readings are one a second
