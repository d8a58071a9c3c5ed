"""The sampler: what it writes, and what it leaves when it is killed, starves, or its counters fail."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from mlhpc.suite.log.energy.power_log import START, STOP, PowerLog, build_curve, read_power_log
from mlhpc.suite.machine.power import beside
from mlhpc.suite.machine.power.beside import measure_clock_offset, run_power_sampler
from mlhpc.suite.machine.power.counters import POWERCAP, EnergyCounter, EnergyMeter, find_node_counters
from mlhpc.suite.machine.power.sampler import Sampler, list_scopes
from mlhpc.suite.machine.probes.processor import VARIABLE
from mlhpc.suite.world import World
from tests.fixtures.zoo import machine


def counter(name: str, values: Iterator[float | Exception], range_j: float | None = None) -> EnergyCounter:
    def read() -> float:
        value = next(values)
        if isinstance(value, Exception):
            raise value
        return value

    return EnergyCounter(name, read, range_j)


def sample(tmp_path: Path, counters: list[EnergyCounter], times: list[float]) -> dict[str, PowerLog]:
    """Sample at the given times (seconds), the first of which is the start of measuring."""
    scopes = list_scopes(counters)
    for scope in scopes:
        scope.file = os.open(tmp_path / f"part_0_{scope.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    clock, left = iter(times), iter([True] * (len(times) - 2) + [False])
    Sampler(scopes, EnergyMeter(counters), lambda: next(clock), lambda _: next(left)).run({"clock_offset_s": 0.0})
    for scope in scopes:
        os.close(scope.file)
    return {scope.name: read_power_log(tmp_path / f"part_0_{scope.name}.txt") for scope in scopes}


def test_a_counter_that_wraps_and_a_device_make_three_scopes(tmp_path: Path) -> None:
    package = counter("rapl/package-0", iter([90.0, 95.0, 5.0, 25.0]), 100.0)
    device = counter("nvml/gpu0", iter([0.0, 100.0, 200.0, 300.0]))
    logs = sample(tmp_path, [package, device], [1000.0, 1001.0, 1002.0, 1004.0])
    assert {name: list(log.watts) for name, log in logs.items()} == {
        "package+device": [105.0, 110.0, 60.0],
        "package": [5.0, 10.0, 10.0],
        "device": [100.0, 100.0, 50.0],
    }
    both = logs["package+device"]
    assert build_curve(both).between(1000.0, 1004.0) == pytest.approx(335.0)
    assert (both.scope, both.integrates, both.current) == ("package+device", True, "DC")
    assert list(both.counts) == [0.0, 335.0]


def test_cray_parts_are_not_added_to_their_node(tmp_path: Path) -> None:
    whole = counter("pm_counters/node", iter([0.0, 500.0]))
    part = counter("pm_counters/accel0", iter([0.0, 300.0]))
    logs = sample(tmp_path, [whole, part], [10.0, 11.0])
    assert {name: list(log.watts) for name, log in logs.items()} == {"node": [500.0]}


@pytest.mark.parametrize(
    "failing",
    [OSError("gone"), PermissionError("root only"), ValueError("no count")],
    ids=["vanishes", "denied", "garbage"],
)
def test_a_scope_that_loses_a_counter_ends_without_a_stop_and_the_others_go_on(
    tmp_path: Path, failing: Exception
) -> None:
    package = counter("rapl/package-0", iter([0.0, 5.0, failing]))
    device = counter("nvml/gpu0", iter([0.0, 7.0, 14.0, 21.0]))
    logs = sample(tmp_path, [package, device], [0.0, 1.0, 2.0, 3.0])
    assert list(logs["device"].watts) == [7.0, 7.0, 7.0]
    assert logs["device"].first(STOP) is not None
    for name in ("package", "package+device"):
        assert len(logs[name].watts) == 1
        assert logs[name].first(STOP) is None


def test_the_intervals_between_readings_are_random(tmp_path: Path) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) < 40

    Sampler([], EnergyMeter([]), lambda: 0.0, wait).run({}, 0.9)
    steps = [b - a for a, b in pairwise([0.0, *waits])]
    assert len({round(step, 4) for step in steps}) > 30
    assert all(-0.01 <= step <= 1.35 for step in steps)


def test_a_clock_that_is_set_back_loses_no_joule(tmp_path: Path) -> None:
    logs = sample(tmp_path, [counter("nvml/gpu0", iter([0.0, 10.0, 20.0, 30.0]))], [100.0, 101.0, 99.0, 102.0])
    assert list(logs["device"].times_ms) == [101_000.0, 102_000.0]
    assert list(logs["device"].watts) == [10.0, 20.0]


def test_missed_samples_are_said(tmp_path: Path) -> None:
    log = sample(tmp_path, [counter("nvml/gpu0", iter([0.0, 1.0, 9.0]))], [0.0, 1.0, 9.0])["device"]
    stop = log.first(STOP)
    assert (stop.metadata["late"], stop.metadata["largest_gap_s"]) == (1, 8.0)


@pytest.fixture
def rooted(tmp_path: Path) -> Path:
    """A machine with two packages, their nested zones, and one more zone that only root may read."""
    return machine("xeon_with_counters").lay_out(tmp_path / "root")


def test_the_machine_with_counters_has_packages_and_dram_only(rooted: Path) -> None:
    found = find_node_counters(rooted)
    assert sorted(item.name for item in found.counters) == [
        "rapl/package-0",
        "rapl/package-0/dram",
        "rapl/package-1",
    ]
    hot = rooted / POWERCAP / "intel-rapl:2"
    hot.mkdir()
    for name, text in (("name", "package-2"), ("energy_uj", "1"), ("max_energy_range_uj", "100")):
        (hot / name).write_text(text)
    meter = EnergyMeter(found.counters)
    assert set(meter.take().joules) == {item.name for item in found.counters}  # plugged in later: not in this run
    assert "rapl/package-2" in {item.name for item in find_node_counters(rooted).counters}


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("kill", [False, True], ids=["ended", "killed"])
def test_the_process_leaves_whole_lines_however_it_ends(tmp_path: Path, rooted: Path, kill: bool) -> None:
    words = [
        sys.executable, "-P", "-m", "mlhpc.suite.machine.power.sampler", str(tmp_path / "power"), "3", "--root",
        str(rooted),
    ]  # fmt: skip
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        file = tmp_path / "power" / "node_3.txt"
        wait_for(lambda: file.exists() and b"power_reading" in file.read_bytes())
        process.send_signal(signal.SIGTERM)  # Slurm sends it to every process of a step: the run decides
        assert process.poll() is None
        if kill:
            process.kill()
        process.stdin.close()
        process.wait(300)
    log = read_power_log(file)
    assert (log.damaged, log.index, log.scope) == (0, 3, "package")
    assert log.first(START) is not None
    assert (log.first(STOP) is None) is kill


def test_a_full_disk_costs_readings_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, budget = os.write, [500]

    def write(file: int, data: bytes) -> int:
        if budget[0] <= 0:
            budget[0] = 10_000  # space again
            raise OSError(28, "No space left on device")
        part = data[: budget[0]]
        budget[0] -= len(part)
        return real(file, part)

    monkeypatch.setattr(os, "write", write)
    device = counter("nvml/gpu0", iter(range(0, 100, 10)))
    log = sample(tmp_path, [device], [float(n) for n in range(10)])["device"]
    assert log.damaged == 1
    assert 5 <= len(log.watts) < 9
    assert log.first(STOP) is not None


def test_beside_a_run_one_process_per_node_writes_the_nodes_log(
    tmp_path: Path, rooted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(rooted))
    world = World.create()
    file = tmp_path / "power" / "result_0" / "node_0.txt"
    with run_power_sampler(tmp_path / "result_0.txt", world, None, tmp_path / "trial_0.lock", wanted=True):
        wait_for(file.exists)
        time.sleep(0.1)
    log = read_power_log(file)
    assert log.first(STOP) is not None
    assert (log.number("clock_offset_s"), log.number("clock_bound_s")) == (0.0, 0.0)
    assert measure_clock_offset(world) == (0.0, 0.0)


def test_without_counters_or_where_it_is_not_wanted_nothing_is_written(
    tmp_path: Path, rooted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_power_sampler(tmp_path / "result_0.txt", World.create(), None, tmp_path / "trial_0.lock", wanted=False):
        pass
    monkeypatch.setenv(VARIABLE, str(machine("two_gib").lay_out(tmp_path / "bare")))
    with run_power_sampler(tmp_path / "result_0.txt", World.create(), None, tmp_path / "trial_0.lock", wanted=True):
        pass
    assert not (tmp_path / "power").exists()


def test_a_sampler_that_cannot_start_is_a_line_and_no_end(
    tmp_path: Path, rooted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(rooted))
    monkeypatch.setattr(beside, "make_python_command", lambda *words: [str(tmp_path / "no-python"), *words])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with run_power_sampler(tmp_path / "result_0.txt", World.create(), None, tmp_path / "trial_0.lock", wanted=True):
        pass
    assert not (tmp_path / "power").exists()


def test_a_log_names_the_package_that_cannot_be_read(tmp_path: Path, rooted: Path) -> None:
    (rooted / POWERCAP / "intel-rapl:1" / "max_energy_range_uj").unlink()
    words = ["mlhpc.suite.machine.power.sampler", str(tmp_path / "power"), "0", "--root", str(rooted)]
    subprocess.run([sys.executable, "-P", "-m", *words], stdin=subprocess.DEVNULL, check=True, timeout=300)
    log = read_power_log(tmp_path / "power" / "node_0.txt")
    assert list(log.stated["absent"]) == ["rapl/package-1"]
    assert log.first(STOP) is not None
