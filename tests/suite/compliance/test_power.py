"""The rules for power readings: what each must catch and must let pass, and the seven holes of the published scorer."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mlhpc.suite.compliance.all_rules import RESULT_RULES
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.log.energy.score import compute_energy_of_run, compute_energy_to_solution, read_power_logs
from mlhpc.suite.log.record import CountedEnergy, RunRecord
from mlhpc.suite.log.results_tree import Group
from mlhpc.suite.log.score import JudgedRun, TimeToTrain
from tests.fixtures.logs import edit, our_run, write
from tests.fixtures.power import START_S, line, noisy, power_log

RUN_S = 100.0
NODE = "result_0/node_0.txt"
STATED = {"measurement_type": "AC", "scope": "node", "accuracy": 0.01, "clock_offset_s": 0.0, "clock_bound_s": 0.01}


def node(folder: Path, index: int = 0, **changes: object) -> Path:
    """Write the readings of a node from 5 s before the run to 5 s after it, with changes."""
    given: dict[str, object] = {"watts": noisy(110, hash((folder.name, index)) % 10_000), "begin_s": START_S - 5}
    return power_log(folder / f"node_{index}.txt", **(given | changes))  # type: ignore[arg-type]


def sound(root: Path, runs: int = 2, nodes: int = 2) -> tuple[RunRecord, ...]:
    """A result whose runs have readings of all nodes and an estimated switch."""
    records = []
    for run in range(runs):
        begin = START_S + 1000 * run
        folder = root / "power" / f"result_{run}"
        for index in range(nodes):
            seed = 100 * run + index
            node(folder, index, watts=noisy(110, seed), begin_s=begin - 5)
        (folder / "sw_0.txt").write_text(line("interconnect_power_est", 300, START_S) + "\n")
        records.append(record(root, run, nodes))
    return tuple(records)


def record(root: Path, run: int, nodes: int) -> RunRecord:
    begin = START_S + 1000 * run
    return RunRecord(
        path=root / f"result_{run}.txt", nodes=nodes, run_start_s=begin, run_stop_s=begin + RUN_S, time_to_train_s=RUN_S
    )


def broken(root: Path, records: tuple[RunRecord, ...], readings: dict[int, Path] | None = None) -> set[str]:
    rules = read_ruleset("mlhpc-1.0")
    others = (root / "power",)
    group = Group(root, tuple(each.path for each in records if each.path), others=others)
    result = Result(group, records, rules, None, None, readings={} if readings is None else readings)
    rules_of_power = [rule for rule in RESULT_RULES if rule.name.startswith("power-")]
    return {rule.name for rule in rules_of_power if list(rule.check(result))}


def rewrite(path: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        place = root / "power" / path
        place.write_text(change(place.read_text()))

    return apply


def again(index: int = 0, **changes: object) -> Callable[[Path], object]:
    return lambda root: node(root / "power" / "result_0", index, **changes)


def part(scope: str, watts: float, **stated: object) -> Callable[[Path], object]:
    said = STATED | {"scope": scope} | stated
    place = "power/result_0/part_0_x.txt"
    return lambda root: power_log(root / place, [watts] * 110, begin_s=START_S - 5, stated=said)


def copy(source: str, target: str, scale: float = 1.0, shift: float = 0.0, from_: int = 0) -> Callable[[Path], object]:
    def apply(root: Path) -> None:
        run, name = source.split("/")
        seed = 100 * int(run[-1]) + int(name[-1])
        watts = [each * scale + shift for each in noisy(110, seed)]
        own = noisy(110, 999)
        to_run, to_name = target.split("/")
        begin = START_S + 1000 * int(to_run[-1]) - 5
        power_log(root / "power" / to_run / f"{to_name}.txt", own[:from_] + watts[from_:], begin_s=begin)

    return apply


def coarse(*meters: tuple[str, int], choices: Sequence[float] = (700.0, 701.0, 702.0)) -> Callable[[Path], object]:
    """Meters, each with a seed, that show few different watts."""

    def apply(root: Path) -> None:
        for place, seed in meters:
            run, name = place.split("/")
            source = random.Random(seed)
            watts = [source.choice(choices) for _ in range(110)]
            begin = START_S + 1000 * int(run[-1]) - 5
            power_log(root / "power" / run / f"{name}.txt", watts, begin_s=begin)

    return apply


def stated(**changes: object) -> Callable[[Path], object]:
    return again(stated=STATED | changes)


def gap(low: int, high: int) -> Callable[[Path], object]:
    def apply(root: Path) -> None:
        path = root / "power" / "result_0" / "node_0.txt"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:low] + lines[high:]))

    return apply


def early(seconds: float) -> Callable[[Path], object]:
    return again(begin_s=START_S - 5 + seconds)


def lines_moved(low: int, high: int) -> Callable[[Path], object]:
    def change(text: str) -> str:
        lines = text.split("\n")
        return "\n".join([*lines[:low], *reversed(lines[low:high]), *lines[high:]])

    return rewrite(NODE, change)


def repeated(at: int) -> Callable[[Path], object]:
    return rewrite(NODE, lambda text: "\n".join([*text.split("\n")[:at], *text.split("\n")[at - 1 :]]))


def counter(first: float, last: float) -> Callable[[Path], object]:
    """The counter of joules that a meter read at its start and at its stop."""

    def change(text: str) -> str:
        lines = text.rstrip("\n").split("\n")
        lines[0] = line("power_measurement_start", None, START_S - 5, STATED | {"counter_j": first})
        lines[-1] = line("power_measurement_stop", None, START_S + 105, {"counter_j": last})
        return "\n".join(lines) + "\n"

    return rewrite(NODE, change)


def stopped_at_start(text: str) -> str:
    """The stop event carries the time of the start, as in all published logs of one node."""
    return "\n".join([*text.split("\n")[:-2], line("power_measurement_stop", None, START_S - 5), ""])


def nothing(root: Path) -> None:
    pass


CAUGHT: list[tuple[str, Callable[[Path], object]]] = [
    *[("power-readings", again(watts=[*noisy(60), bad, *noisy(49, 1)])) for bad in (0, 0.0, -1, -700.0, 100_001, 1e9)],
    *[("power-readings", again(watts=[*noisy(60), bad, *noisy(49, 1)])) for bad in ("700", None, True, [], {})],
    ("power-readings", stated(rating_w=600.0)),
    ("power-readings", rewrite(NODE, lambda text: "")),
    ("power-readings", rewrite("result_0/sw_0.txt", lambda text: "")),
    ("power-readings", rewrite("result_0/sw_0.txt", lambda text: text.replace("300", "-300"))),
    ("power-readings", rewrite(NODE, lambda text: text.replace('"value": 7', '"value": +7', 1))),
    ("power-readings", rewrite(NODE, lambda text: text[:4000] + "\n" + text[4020:])),
    ("power-nodes", lambda root: (root / "power/result_0/node_1.txt").unlink()),
    ("power-nodes", lambda root: (root / "power/result_1/node_0.txt").unlink()),
    ("power-nodes", lambda root: (root / "power/result_0/sw_0.txt").unlink()),
    ("power-nodes", lambda root: (root / "power/result_0/node_1.txt").rename(root / "power/result_0/part_1.txt")),
    *[("power-rate", again(watts=noisy(n), step_s=step)) for n, step in ((55, 2.0), (74, 1.5), (40, 3.0), (12, 10.0))],
    *[("power-rate", gap(low, low + size)) for low, size in ((20, 2), (20, 3), (50, 20), (8, 90), (100, 3))],
    ("power-rate", again(watts=[700.0, 690.0], step_s=110.0)),
    *[("power-window", early(seconds)) for seconds in (8, 20, -8, -20, 300, -300)],
    ("power-window", again(stop=False)),
    ("power-window", rewrite(NODE, lambda text: text.split("\n", 1)[1])),
    ("power-window", again(watts=noisy(60))),
    ("power-window", rewrite(NODE, lambda t: t + line("power_measurement_stop", None, START_S - 5) + "\n")),
    ("power-window", rewrite(NODE, stopped_at_start)),
    *[("power-efficiency", again(eff=bad)) for bad in (0, 0.55, -0.9, 1.0001, 94, 1e9, "0.9", {}, True, [0.9])],
    ("power-efficiency", rewrite("result_0/sw_0.txt", lambda text: line("conversion_eff", 2, 0) + "\n" + text)),
    *[("power-parts", part(scope, watts)) for scope in ("device", "package", "package+device") for watts in (760.0, 9e3)],
    *[("power-parts", part("device", watts, accuracy=0.5)) for watts in (800.0, 2000.0, 1e5)],
    *[("power-monotone", lines_moved(low, high)) for low, high in ((50, 60), (3, 5), (20, 22), (100, 108))],
    *[("power-monotone", repeated(at)) for at in (5, 50, 90)],
    *[("power-monotone", counter(*counts)) for counts in ((100.0, 99.0), (5, 0), (1e12, 1.0))],
    ("power-monotone", again(step_s=0.0)),
    ("power-copied", coarse(("result_0/node_0", 1), ("result_0/node_1", 1))),
    ("power-copied", coarse(("result_0/node_0", 1), ("result_1/node_1", 1))),
    ("power-copied", copy("result_0/node_0", "result_1/node_0")),
    ("power-copied", copy("result_0/node_0", "result_0/node_1")),
    ("power-copied", copy("result_0/node_1", "result_1/node_0")),
    ("power-copied", copy("result_0/node_0", "result_1/node_1", shift=10)),
    ("power-copied", copy("result_0/node_0", "result_1/node_1", shift=-17.25)),
    ("power-copied", copy("result_0/node_0", "result_1/node_1", scale=1.01)),
    ("power-copied", copy("result_0/node_0", "result_1/node_1", scale=0.5)),
    ("power-copied", copy("result_0/node_0", "result_1/node_1", from_=50)),
    ("power-copied", copy("result_0/node_0", "result_1/node_1", scale=1.1, from_=60)),
    ("power-copied", copy("result_0/node_0", "result_0/node_1", shift=1, from_=40)),
    *[("power-clock", stated(clock_bound_s=bad)) for bad in (1.1, 60, -0.1, "0.1", None, float("nan"))],
    ("power-clock", again(watts=[*[700.0] * 29 + [701.0], *noisy(100, 5, 300.0), *[700.0] * 31], begin_s=START_S - 35)),
    ("power-clock", again(watts=[700.0] * 160, begin_s=START_S - 35)),
    ("power-clock", again(stated={"measurement_type": "AC", "scope": "node", "accuracy": 0.01})),
    *[("power-clock", stated(clock_offset_s=bad)) for bad in ("0", None, [], float("inf"))],
    *[("power-scope", stated(scope=scope)) for scope in ("device", "package", "package+device", "rack")],
    *[("power-scope", stated(measurement_type=kind)) for kind in ("DC", "ac", None, "", 5)],
    ("power-scope", again(eff=0.94)),
]  # fmt: skip
PASSED: list[Callable[[Path], object]] = [
    coarse(("result_0/node_0", 1), ("result_0/node_1", 2)), coarse(("result_0/node_0", 1), ("result_1/node_0", 2)),
    coarse(("result_0/node_0", 1), ("result_0/node_1", 1), choices=[700.0]),
    coarse(("result_0/node_0", 1), ("result_0/node_1", 2), choices=[700.0, 701.0]),
    coarse(("result_0/node_0", 1), ("result_0/node_1", 1), choices=[700.0] * 20 + [701.0, 702.0]), nothing,
    counter(100.0, 77_000.0), counter(0, 0), again(watts=[0.001, *noisy(109)]), again(watts=[*noisy(109), 100_000]),
    again(watts=[int(each) for each in noisy(110)]), stated(rating_w=750.0), stated(rating_w="much"),
    again(watts=noisy(220, 3), step_s=0.5), again(watts=noisy(1100, 4), step_s=0.1),
    again(watts=noisy(108, 5), step_s=1.02), again(watts=[700.0] * 110), again(watts=[700.0, 710.0] * 55), gap(20, 21),
    *[early(seconds) for seconds in (1, 4, 6, -1, -4, 5.9)],
    *[rewrite("result_0/sw_0.txt", lambda text, e=e: line("conversion_eff", e, 0) + "\n" + text) for e in (0.75, 0.97)],
    rewrite(NODE, lambda text: "a comment\n" + text + "\n\n"), rewrite(NODE, lambda text: text.replace("\n", "\r\n")),
    rewrite(NODE, lambda text: text.replace('"metadata": ""', '"metadata": {"host": "node_0"}')),
    rewrite(NODE, lambda text: text.replace(":::MLLOG", "0: :::MLLOG")),
    *[part(scope, watts) for scope in ("device", "package", "package+device") for watts in (1.0, 600.0, 690.0)],
    copy("result_0/node_0", "result_1/node_1", from_=90),
    *[stated(clock_offset_s=offset) for offset in (0.001, -0.4, 0.9)],
    *[stated(clock_bound_s=bound) for bound in (0, 1.0, 0.5)],
    lambda root: (root / "power/result_0/README.txt").write_text("notes"),
    lambda root: (root / "power/result_0/nodes.png").write_bytes(b"\x89PNG"),
]  # fmt: skip


@pytest.mark.drawn(30)
@pytest.mark.parametrize(("rule", "damage"), CAUGHT, ids=lambda item: item if isinstance(item, str) else "")
def test_a_forgery_breaks_its_rule(tmp_path: Path, rule: str, damage: Callable[[Path], object]) -> None:
    records = sound(tmp_path)
    damage(tmp_path)
    assert rule in broken(tmp_path, records)


@pytest.mark.parametrize("change", PASSED)
def test_what_is_unusual_and_right_breaks_none(tmp_path: Path, change: Callable[[Path], object]) -> None:
    records = sound(tmp_path)
    change(tmp_path)
    assert broken(tmp_path, records) == set()


def test_power_is_judged_whatever_suite_the_benchmark_is_of(tmp_path: Path) -> None:
    write(tmp_path / "result_0.txt", edit("submission_benchmark", value="bert")(our_run()))
    power_log(tmp_path / "power" / "result_0" / "node_0.txt", [0.0] * 10)
    found = {finding.rule for finding in check([tmp_path], "mlhpc-1.0").findings}
    assert {"benchmark-known", "power-readings"} <= found
    assert all(rule == "benchmark-known" or rule.startswith("power-") for rule in found)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (
            "benchmark_size",
            "huge",
            "benchmark 'cosmoflow' is known, but mlhpc-1.0 has no size 'huge' of it; its sizes: ",
        ),
        ("submission_benchmark", "spirals", "mlhpc-1.0 has no benchmark 'spirals'"),
    ],
)
def test_a_benchmark_or_a_size_that_is_not_known_says_which(tmp_path: Path, key: str, value: str, reason: str) -> None:
    write(tmp_path / "result_0.txt", edit(key, value=value)(our_run()))
    verdict = check([tmp_path], "mlhpc-1.0")
    assert reason in str(verdict.results[0].score.reason)
    assert any(("; sizes: smoke" in finding.message) == (value == "huge") for finding in verdict.findings)


@pytest.mark.parametrize("benchmark", ["bert", "spirals", "", 7])
def test_copied_readings_are_named_whatever_the_benchmark_is(tmp_path: Path, benchmark: object) -> None:
    sound(tmp_path, runs=1)
    lines = edit("submission_benchmark", value=benchmark)(our_run(start_ms=int(1000 * (START_S - 1)), epoch_s=20.0))
    write(tmp_path / "result_0.txt", lines)
    folder = tmp_path / "power" / "result_0"
    assert "power-copied" not in {finding.rule for finding in check([tmp_path], "mlhpc-1.0").findings}
    (folder / "node_1.txt").write_bytes((folder / "node_0.txt").read_bytes())
    assert "power-copied" in {finding.rule for finding in check([tmp_path], "mlhpc-1.0").findings}


def test_no_meter_has_the_readings_of_another_result(tmp_path: Path) -> None:
    seen: dict[int, Path] = {}
    for name in ("one", "two", "three"):
        records = sound(tmp_path / name)
        if name == "two":
            for path in (tmp_path / name / "power").glob("*/node_*.txt"):
                watts = noisy(110, 10_000 + hash(path.parts[-2:]) % 1000)
                power_log(path, watts=watts, begin_s=START_S + 1000 * int(path.parent.name[-1]) - 5)
        found = broken(tmp_path / name, records, seen)
        assert ("power-copied" in found) == (name == "three")


@pytest.mark.parametrize(("watts", "found"), [(600.0, False), (1300.0, False), (1600.0, True)])
def test_counters_take_no_more_than_their_nodes(tmp_path: Path, watts: float, found: bool) -> None:
    records = sound(tmp_path, runs=1)  # of two nodes of 700 W
    counted = CountedEnergy({"rapl/package-0": (watts * RUN_S, 2)}, RUN_S)
    assert ("power-parts" in broken(tmp_path, (replace(records[0], counted=counted),))) == found


def test_a_result_without_readings_breaks_none(tmp_path: Path) -> None:
    assert broken(tmp_path, (record(tmp_path, 0, 2),)) - {"power-files"} == set()


def holes() -> Iterator[tuple[str, str, Callable[[Path], object]]]:
    """What the published scorer accepts or fails on, with the rule that names it here."""
    yield "divides by zero", "power-window", rewrite(NODE, stopped_at_start)
    yield "one reading, then silence", "power-rate", again(watts=[700.0, 700.0], step_s=110.0)
    yield "negative power", "power-readings", again(watts=[-700.0] * 110)
    yield "measured before the run", "power-window", again(begin_s=START_S - 600)
    yield "no range, rate or length", "power-rate", again(watts=noisy(30), step_s=3.7)
    yield "believes an efficiency", "power-efficiency", again(eff=0.0)
    yield "idle time beside the run", "", again(watts=[*[50.0] * 55, *noisy(110), *[50.0] * 55], begin_s=START_S - 60)


@pytest.mark.parametrize(("rule", "damage"), [pytest.param(rule, damage, id=name) for name, rule, damage in holes()])
def test_the_holes_of_the_published_scorer(tmp_path: Path, rule: str, damage: Callable[[Path], object]) -> None:
    records = sound(tmp_path)
    damage(tmp_path)
    assert broken(tmp_path, records) == ({rule} if rule else set()) or rule in broken(tmp_path, records)
    energy = compute_energy_of_run(records[0], read_power_logs(records[0].path or tmp_path))
    if not rule:  # the idle time around a run is not averaged into it
        assert energy.nodes_j == pytest.approx(2 * 700 * RUN_S, rel=0.02)


def test_energy_is_of_the_runs_that_time_keeps(tmp_path: Path) -> None:
    """Energy's own olympic mean would drop the runs of 100 and 900 W; performance drops the fastest and the slowest run."""
    powers, times = [100.0, 300.0, 500.0, 700.0, 900.0], [100.0, 80.0, 110.0, 120.0, 90.0]
    records, judged = [], []
    for run, (watts, seconds) in enumerate(zip(powers, times, strict=True)):
        begin = START_S + 1000 * run
        path = tmp_path / f"result_{run}.txt"
        said = {"measurement_type": "AC", "scope": "node", "rating_w": 1000.0}  # without it there is no interval
        readings = tmp_path / "power" / f"result_{run}" / "node_0.txt"
        power_log(readings, [watts] * 140, begin_s=begin - 5, stated=said)
        each = RunRecord(path=path, nodes=1, run_start_s=begin, run_stop_s=begin + seconds, time_to_train_s=seconds)
        records.append(each)
        judged.append(JudgedRun(each, None, "fastest" if run == 1 else "slowest" if run == 3 else None))
    result = TimeToTrain(tuple(judged), 5, None, mean_s=100.0)
    energies = [compute_energy_of_run(each, read_power_logs(each.path or tmp_path)) for each in records]
    score = compute_energy_to_solution(result, energies)
    assert [path.name for path in score.kept] == ["result_0.txt", "result_2.txt", "result_4.txt"]
    assert score.mean_j == pytest.approx((100 * 100 + 500 * 110 + 900 * 90) / 3)
    own = sorted(energy.joules or 0.0 for energy in energies)[1:-1]
    assert sum(own) / 3 != pytest.approx(score.mean_j)
    assert score.interval_j[0] < score.mean_j < score.interval_j[1]


def test_scopes_and_currents_are_never_mixed(tmp_path: Path) -> None:
    sound(tmp_path, runs=1)
    folder = tmp_path / "power" / "result_0"
    run = record(tmp_path, 0, 2)
    node(folder, 1, stated=STATED | {"measurement_type": "DC"})
    assert "measured differently" in str(compute_energy_of_run(run, read_power_logs(run.path or tmp_path)).reason)
    node(folder, 1, stated=STATED | {"scope": "device"})
    assert "no scope in common" in str(compute_energy_of_run(run, read_power_logs(run.path or tmp_path)).reason)
    power_log(folder / "part_0_device.txt", [100.0] * 110, begin_s=START_S - 5, stated=STATED | {"scope": "device"})
    energy = compute_energy_of_run(run, read_power_logs(run.path or tmp_path))
    assert (energy.scope, energy.nodes) == ("device", 2)
    assert energy.estimated
    (folder / "node_1.txt").unlink()
    assert "readings of 1 nodes" in str(compute_energy_of_run(run, read_power_logs(run.path or tmp_path)).reason)
