"""Power readings in a package: those of an external meter, those beside the run, and the energy that is scored from them."""

from __future__ import annotations

import json
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

COLUMNS = """\
scope: node
current: AC
time: time
time_form: s
power: w
unit: W
accuracy: 0.02
clock_offset_s: 0
clock_bound_s: 0.1
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder without readings."""
    return run_folder(tmp_path / "run")


def ends(log: Path) -> tuple[float, float]:
    record = summarise_log(read_events(log, steps=False))
    assert record.run_start_s is not None
    assert record.run_stop_s is not None
    return record.run_start_s, record.run_stop_s


def meter(folder: Path, run: Path, *, watts: float = 250.0, columns: str = COLUMNS) -> tuple[str, Path, str, Path]:
    """Write the readings of all runs into one file, two a second, and return the options that name it."""
    logs = sorted(run.glob("result_*.txt"))
    begin, end = ends(logs[0])[0] - 70, ends(logs[-1])[1] + 70
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{begin + 0.5 * n},{each}" for n, each in enumerate(noisy(int(2 * (end - begin)), 5, watts))]
    (folder / "pdu.csv").write_text("time,w\n" + "\n".join(rows) + "\n")
    (folder / "pdu.yaml").write_text(columns)
    return "--power", folder / "pdu.csv", "--power-columns", folder / "pdu.yaml"


def packaged(run: Path, folder: Path, *options: object) -> Path:
    package = folder / "ACME"
    done = mlhpc("package", run, "--system", "box", "-o", package, *options)
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


def test_readings_of_a_meter_are_cut_for_each_run_and_scored(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rated = COLUMNS + "rating_w: 800\n"  # without it, readings in step have no interval
    package = packaged(run, tmp_path / "out", *meter(tmp_path / "m", run, columns=rated))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    found = energy(package)
    first = found["run_list"][0]
    start, stop = ends(run / "result_0.txt")
    assert first["joules"] == pytest.approx(250.0 * (stop - start), rel=0.1)
    assert first["nodes_j"] == first["joules"]
    assert found["valid"], found["reason"]
    assert found["interval95_j"][0] < found["joules"] < found["interval95_j"][1]
    assert sum(v for k, v in found["phases_j"].items() if k != "staging before") == pytest.approx(found["joules"])
    assert found["idle_share"] == pytest.approx(1, rel=0.1), "readings before and after the run are kept"
    done = mlhpc("score", package, "--energy")
    assert done.returncode == 0
    assert "result_0.txt" in done.stdout
    assert "node AC" in done.stdout
    assert mlhpc("check", package).returncode == 0


def test_what_was_measured_beside_the_run_becomes_a_part(run: Path, tmp_path: Path) -> None:
    for number in range(5):
        start, _ = ends(run / f"result_{number}.txt")
        said = {"scope": "package", "measurement_type": "DC", "clock_offset_s": 0.0, "clock_bound_s": 0.1}
        path = run / "power" / f"result_{number}" / "node_0.txt"
        power_log(path, noisy(70, number, 90.0), begin_s=start - 20, stated=said)
    package = packaged(run, tmp_path / "out", *meter(tmp_path / "m", run))
    (folder,) = package.rglob("power/result_0")
    assert sorted(path.name for path in folder.iterdir()) == ["node_0.txt", "part_0_package.txt"]
    assert energy(package)["scope"] == "node"
    narrow = meter(tmp_path / "n", run, columns=COLUMNS.replace("scope: node", "scope: package"))
    done = mlhpc("package", run, "--system", "box", "-o", tmp_path / "no" / "ACME", *narrow)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "expected a meter of a wider scope" in done.stderr


def test_readings_of_another_time_and_half_a_pair_of_options_are_one_line(run: Path, tmp_path: Path) -> None:
    words = ("package", run, "--system", "box", "-o", tmp_path / "out" / "ACME")
    options = meter(tmp_path / "m", run)
    (tmp_path / "m" / "pdu.csv").write_text("time,w\n1000,5\n1001,5\n")
    done = mlhpc(*words, *options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no readings of node 0 from 2026-" in done.stderr
    assert "(is the time zone right?)" in done.stderr
    assert not (tmp_path / "out" / "ACME").exists()
    assert "give both" in mlhpc(*words, *options[:2]).stderr


def test_a_network_is_estimated_and_said_to_be(run: Path, tmp_path: Path) -> None:
    words = ("package", run, "--system", "box", "-o", tmp_path / "no" / "ACME", "--network-power", 300)
    assert "--network-power alone gives no energy" in mlhpc(*words).stderr
    package = packaged(run, tmp_path / "out", *meter(tmp_path / "m", run), "--network-power", 300)
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
    means = COLUMNS + "reads: mean\n"  # a load in step with single readings would leave no lower end
    one = packaged(run, tmp_path / "one", *meter(tmp_path / "m1", run, columns=means))
    text, data = compared(one, run)
    assert "energy is not compared: B has none" in text
    assert data["energy"] is None
    two = packaged(run, tmp_path / "two", *meter(tmp_path / "m2", run, watts=500.0, columns=means))
    text, data = compared(one, two)
    ratio = data["energy"]
    assert ratio["ratio"] == pytest.approx(2.0, rel=0.05)
    assert ratio["interval"][0] < ratio["ratio"] < ratio["interval"][1]
    assert ratio["b_j"] == pytest.approx(ratio["ratio"] * ratio["a_j"])
    assert f"energy {ratio['ratio']:.4g} times" in text
    assert "node AC" in text
    assert compared(two, one)[1]["energy"]["ratio"] == pytest.approx(1 / ratio["ratio"])
    direct = means.replace("current: AC", "current: DC")
    three = packaged(run, tmp_path / "three", *meter(tmp_path / "m3", run, columns=direct))
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
    measured = packaged(run, tmp_path / "measured", *meter(tmp_path / "m", run))
    stated = next(measured.rglob("result.json"))
    document = json.loads(stated.read_text())
    assert document["energy_j"] == energy(measured)["joules"]
    assert document["energy_of"] == "node AC"
    assert level_0(measured)[0] == 0
    stated.write_text(json.dumps(document | {"energy_j": document["energy_j"] * 0.9}))
    code, text = level_0(measured)
    assert code == 1
    assert "result.json: energy_j" in text
