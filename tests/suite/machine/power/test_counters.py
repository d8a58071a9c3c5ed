"""Energy counters from made-up /sys trees: units, wrap-around, what is counted once, what is absent and why."""

import sys
from pathlib import Path

import pytest

from mlhpc.suite.machine.power.counters import (
    PM_COUNTERS,
    POWERCAP,
    EnergyCounter,
    EnergyMeter,
    EnergyReading,
    FoundCounters,
    find_gpu_counter,
    find_node_counters,
    sum_readings,
)


def zone(root: Path, place: str, name: str, microjoules: int) -> Path:
    folder = root / POWERCAP / place
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")
    return folder


def test_rapl_counts_packages_and_their_dram_but_not_cores_twice(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 4_000_000)
    zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 7_500_000)
    found = find_node_counters(tmp_path)
    assert {counter.name: counter.read() for counter in found.counters} == {
        "rapl/package-0": 5.0,
        "rapl/package-0/dram": 1.0,
        "rapl/package-1": 7.5,
    }
    assert found.absent == {"pm_counters": f"{tmp_path / PM_COUNTERS}: No such file or directory"}


def test_a_counter_that_starts_anew_loses_nothing(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 262_143_000_000)
    meter = EnergyMeter(find_node_counters(tmp_path).counters)
    (package / "energy_uj").write_text("1000000\n")
    assert meter.take().joules == {"rapl/package-0": pytest.approx(1.32885)}
    assert meter.take().joules == {"rapl/package-0": 0.0}


def test_samples_between_two_events_add_up() -> None:
    readings = iter([10.0, 12.0, 17.0, 20.0])
    meter = EnergyMeter((EnergyCounter("x", lambda: next(readings)),))
    meter.sample()
    meter.sample()
    assert meter.take().joules == {"x": 10.0}


def test_pm_counters_name_the_node_and_its_parts(tmp_path: Path) -> None:
    for name, text in (("energy", "500 J 17 us"), ("accel0_energy", "200 J 17 us"), ("power", "90 W 17 us")):
        path = tmp_path / PM_COUNTERS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = find_node_counters(tmp_path)
    assert {counter.name: counter.read() for counter in found.counters} == {
        "pm_counters/accel0": 200.0,
        "pm_counters/node": 500.0,
    }
    assert list(found.absent) == ["rapl"]


def test_two_zones_of_one_name_are_two_counters(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-0", 900_000_000)
    zone(tmp_path, "intel-rapl:0:0", "dram", 3_000_000)
    zone(tmp_path, "intel-rapl:1:0", "dram", 4_000_000)
    zone(tmp_path, "intel-rapl:2", "package-2", 5_000_000)
    found = find_node_counters(tmp_path)
    meter = EnergyMeter(found.counters)
    for folder, microjoules in ((first, 2_500_000), (second, 902_000_000)):
        (folder / "energy_uj").write_text(f"{microjoules}\n")
    assert meter.take().joules == {
        "rapl/package-0 (intel-rapl:0)": 1.5,
        "rapl/package-0 (intel-rapl:1)": 2.0,
        "rapl/package-0/dram (intel-rapl:0:0)": 0.0,
        "rapl/package-0/dram (intel-rapl:1:0)": 0.0,
        "rapl/package-2": 0.0,
    }
    assert "rapl" not in found.absent


@pytest.mark.parametrize("broken", ["range gone", "range is text", "range is empty", "count gone", "name gone"])
def test_an_unreadable_zone_is_named_and_the_readable_ones_count(tmp_path: Path, broken: str) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    bad = zone(tmp_path, "intel-rapl:1", "package-1", 6_000_000)
    zone(tmp_path, "intel-rapl:2", "package-2", 7_000_000)
    what, _, how = broken.partition(" ")
    path = bad / {"range": "max_energy_range_uj", "count": "energy_uj", "name": "name"}[what]
    if how == "gone":
        path.unlink()
    else:
        path.write_text("" if how == "is empty" else "many\n")
    found = find_node_counters(tmp_path)
    assert {counter.name: counter.read() for counter in found.counters} == {
        "rapl/package-0": 5.0,
        "rapl/package-2": 7.0,
    }
    (name,) = set(found.absent) - {"pm_counters"}
    assert name == ("rapl/intel-rapl:1" if what == "name" else "rapl/package-1")
    assert str(path) in found.absent[name]


def test_an_unreadable_part_of_a_node_hides_no_other_of_crays_counters(tmp_path: Path) -> None:
    for name, text in (("energy", "500 J 17 us"), ("accel0_energy", "none"), ("cpu_energy", "90 J 17 us")):
        path = tmp_path / PM_COUNTERS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = find_node_counters(tmp_path)
    assert [counter.name for counter in found.counters] == ["pm_counters/cpu", "pm_counters/node"]
    assert "is not a number" in found.absent["pm_counters/accel0"]


@pytest.mark.parametrize("text", ["", "many\n"])
def test_a_counter_that_cannot_be_read_is_absent_with_its_reason(tmp_path: Path, text: str) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (package / "energy_uj").write_text(text)
    found = find_node_counters(tmp_path)
    assert list(found.counters) == []
    assert found.absent["rapl"].startswith(str(tmp_path))
    (package / "energy_uj").unlink()
    assert find_node_counters(tmp_path).absent["rapl"] == f"{package}/energy_uj: No such file or directory"


def test_a_counter_that_fails_on_the_way_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 1_000_000)
    meter = EnergyMeter(find_node_counters(tmp_path).counters)
    (first / "energy_uj").unlink()
    (second / "energy_uj").write_text("3000000")
    assert meter.take().joules == {"rapl/package-1": 2.0}
    assert "No such file" in meter.lost["rapl/package-0"]
    assert meter.take().joules == {"rapl/package-1": 0.0}


def test_a_folder_without_counters_says_so(tmp_path: Path) -> None:
    for folder in (POWERCAP, PM_COUNTERS):
        (tmp_path / folder).mkdir(parents=True)
    assert find_node_counters(tmp_path).absent == {
        "rapl": f"{tmp_path / POWERCAP}: no counter of energy there",
        "pm_counters": f"{tmp_path / PM_COUNTERS}: no counter of energy there",
    }


def test_a_counter_that_goes_back_and_has_no_range_is_lost_and_never_negative() -> None:
    readings = iter([100.0, 120.0, 5.0, 30.0])
    meter = EnergyMeter((EnergyCounter("pm_counters/node", lambda: next(readings)),))
    meter.sample()
    meter.sample()
    assert meter.take().joules == {}
    assert meter.lost == {"pm_counters/node": "went back from 120 to 5 J"}


class Nvml:
    """What the package pynvml is to us."""

    class NVMLError(Exception):
        pass

    def __init__(self, millijoules: list[int]) -> None:
        self._millijoules = iter(millijoules)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-aa":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return next(self._millijoules)


def test_a_gpu_is_found_by_its_uuid_and_counts_millijoules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([0, 5_000, 12_000]))
    found = find_gpu_counter("aa")
    assert found.absent == {}
    assert EnergyMeter(found.counters).take().joules == {"nvml/gpu": 7.0}
    assert find_gpu_counter("bb") == FoundCounters(absent={"nvml": "Not Found"})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = find_gpu_counter("aa")
    assert list(found.counters) == []
    assert found.absent["nvml"].startswith("nvidia-ml-py is not installed")


@pytest.mark.parametrize(
    ("joules", "total"),
    [
        ({"pm_counters/node": 100.0, "pm_counters/cpu": 40.0, "rapl/package-0": 39.0, "nvml/gpu": 50.0}, 100.0),
        ({"rapl/package-0": 39.0, "rapl/package-0/dram": 5.0, "nvml/gpu": 50.0}, 94.0),
        ({"rapl/package-0": 0.0}, None),
        ({}, None),
    ],
)
def test_the_widest_scope_counts_no_part_twice(joules: dict[str, float], total: float | None) -> None:
    assert sum_readings([EnergyReading(joules, {})], 1.0, {}).sum_widest() == total
