"""Power readings in a package: those beside the run, the estimate of a network, and the energy that is scored from them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.log.energy.power_log import read_power_log
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.package.build import build_package, write_package_manifest
from tests.fixtures.cli import mlhpc
from tests.fixtures.power import noisy, power_log
from tests.fixtures.runs import run_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder without readings."""
    return run_folder(tmp_path / "run")


def ends(log: Path) -> tuple[float, float]:
    record = summarise_log(read_events(log, steps=False))
    assert record.run_start_s is not None
    assert record.run_stop_s is not None
    return record.run_start_s, record.run_stop_s


def packaged(run: Path, folder: Path, *options: object, watts: float = 250.0, **stated: object) -> Path:
    """Build a package of a copy of the run that has readings of its node, two a second."""
    measured = shutil.copytree(run, folder / "run")
    said = {"scope": "node", "measurement_type": "AC", "accuracy": 0.02, "clock_offset_s": 0.0, "clock_bound_s": 0.1}
    for seed, log in enumerate(sorted(measured.glob("result_*.txt"))):
        start, stop = ends(log)
        readings = noisy(int(2 * (stop - start + 120)), seed, watts)
        path = measured / "power" / log.stem / "node_0.txt"
        power_log(path, readings, begin_s=start - 60, step_s=0.5, stated=said | stated)
    package = folder / "ACME"
    done = mlhpc("package", measured, "--system", "box", "-o", package, *options)
    assert done.returncode == 0, done.stderr
    return package


def energy(*paths: Path) -> dict[str, Any]:
    group: dict[str, Any] = json.loads(mlhpc("score", *paths, "--energy", "--format", "json").stdout)["groups"][0]
    return group["energy"]  # type: ignore[no-any-return]


def test_nothing_measured_is_said(run: Path) -> None:
    done = mlhpc("score", run, "--energy")
    assert done.returncode == 1
    assert "no power readings and no counters" in done.stdout
    assert energy(run) == {"valid": False, "reason": "no power readings and no counters"}
    assert mlhpc("score", run).returncode == 0


def test_a_network_is_estimated_and_said_to_be(run: Path, tmp_path: Path) -> None:
    words = ("package", run, "--system", "box", "-o", tmp_path / "no" / "ACME", "--network-power", 300)
    assert "--network-power alone gives no energy" in mlhpc(*words).stderr
    package = packaged(run, tmp_path / "out", "--network-power", 300)
    assert read_power_log(next(package.rglob("result_0/sw_0.txt"))).estimate_w == 300.0
    first = energy(package)["run_list"][0]
    start, stop = ends(run / "result_0.txt")
    assert first["interconnect_j"] == pytest.approx(300.0 * (stop - start))
    assert "the network is estimated" in mlhpc("score", package, "--energy").stdout


def test_a_throughput_result_has_no_energy(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", mode="weak")
    done = mlhpc("package", run, "--system", "box", "-o", tmp_path / "out" / "ACME", "--network-power", 300)
    assert "a throughput result has no energy" in done.stderr


def test_the_package_carries_readings_and_one_without_is_the_same(run: Path, tmp_path: Path) -> None:
    def built(out: str) -> dict[str, bytes]:
        package = build_package([run], system="box", out=tmp_path / out / "ACME")
        return {str(p.relative_to(package.folder)): p.read_bytes() for p in package.folder.rglob("*") if p.is_file()}

    plain = built("plain")
    power_log(run / "power" / "result_0" / "node_0.txt", [100.0] * 5)
    (run / "power" / "result_0" / "node_1.txt").symlink_to("/etc/passwd")
    measured = built("measured")
    extra = set(measured) - set(plain)
    assert {Path(name).name for name in extra} == {"node_0.txt"}
    assert all("/power/result_0/" in name for name in extra)
    changed = {name for name in plain if plain[name] != measured[name]}
    assert {Path(name).name for name in changed} <= {"manifest.sha256", "ro-crate-metadata.json"}


def test_energies_are_compared_where_they_are_of_one_kind(run: Path, tmp_path: Path) -> None:
    def compared(*paths: Path) -> tuple[str, dict[str, Any]]:
        text = mlhpc("compare", *paths).stdout
        return text, json.loads(mlhpc("compare", *paths, "--format", "json").stdout)["comparisons"][0]

    text, data = compared(run, run)
    assert "energy" not in text
    assert data["energy"] is None
    # A load in step with single readings would leave no lower end
    one = packaged(run, tmp_path / "one", reads="mean")
    text, data = compared(one, run)
    assert "energy is not compared: B has none" in text
    assert data["energy"] is None
    two = packaged(run, tmp_path / "two", watts=500.0, reads="mean")
    text, data = compared(one, two)
    ratio = data["energy"]
    assert ratio["ratio"] == pytest.approx(2.0, rel=0.05)
    assert ratio["interval"][0] < ratio["ratio"] < ratio["interval"][1]
    assert ratio["b_j"] == pytest.approx(ratio["ratio"] * ratio["a_j"])
    assert f"energy {ratio['ratio']:.4g} times" in text
    assert "node AC" in text
    assert compared(two, one)[1]["energy"]["ratio"] == pytest.approx(1 / ratio["ratio"])
    three = packaged(run, tmp_path / "three", reads="mean", measurement_type="DC")
    text, data = compared(one, three)
    assert "energy is not compared: A is of node AC, B of node DC" in text
    assert data["energy"] is None


def test_a_package_states_its_energy_and_its_reproduction_computes_it_anew(run: Path, tmp_path: Path) -> None:
    def level_0(package: Path) -> tuple[int, str]:
        write_package_manifest(package)
        done = mlhpc("reproduce", package, "--level", 0, "-o", tmp_path / f"out_{next(numbers)}")
        return done.returncode, done.stdout

    numbers = iter(range(9))
    plain = build_package([run], system="box", out=tmp_path / "plain" / "ACME").folder
    assert "energy" not in next(plain.rglob("result.json")).read_text()
    measured = packaged(run, tmp_path / "measured")
    stated = next(measured.rglob("result.json"))
    document = json.loads(stated.read_text())
    assert document["energy_j"] == energy(measured)["joules"]
    assert document["energy_of"] == "node AC"
    assert level_0(measured)[0] == 0
    stated.write_text(json.dumps(document | {"energy_j": document["energy_j"] * 0.9}))
    code, text = level_0(measured)
    assert code == 1
    assert "result.json: energy_j" in text
