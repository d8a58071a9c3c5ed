"""Readings of an external meter in a package: cut for each run, beside those of the run itself, and scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
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
    assert "for other tables give --power-columns" in mlhpc(*words, *options[:2]).stderr
