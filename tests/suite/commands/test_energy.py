"""`mlhpc energy`: scores of runs with power readings, meters that are brought in, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from suite.errors import InputError
from suite.log.energy.carbon import read_carbon
from suite.log.energy.power_log import read_power_log
from suite.log.reader import read_events
from suite.log.record import summarise
from suite.package.build import build_package, write_package_manifest
from tests.fixtures.cli import mlhpc
from tests.fixtures.power import noisy, power_log
from tests.fixtures.runs import run_folder


@pytest.fixture
def smoke_run(tmp_path: Path) -> Path:
    """A run folder without readings."""
    return run_folder(tmp_path / "plain_run")


def test_nothing_measured_is_said(smoke_run: Path) -> None:
    done = mlhpc("energy", "show", smoke_run)
    assert done.returncode == 1
    assert "no power readings and no counters" in done.stdout


@pytest.fixture
def run(smoke_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(smoke_run, tmp_path / "run"))


def ends(log: Path) -> tuple[float, float]:
    record = summarise(read_events(log, steps=False))
    assert record.run_start_s is not None
    assert record.run_stop_s is not None
    return record.run_start_s, record.run_stop_s


def meter(path: Path, start: float, stop: float, watts: float = 250.0) -> Path:
    rows = [f"{start - 40 + 0.5 * n},{each}" for n, each in enumerate(noisy(int(2 * (stop - start)) + 160, 5, watts))]
    path.write_text("time_s,power_w\n" + "\n".join(rows) + "\n")
    return path


def bring(run: Path, tmp_path: Path, *more: object, watts: float = 250.0, current: str = "AC") -> list[str]:
    said = []
    for trial, log in enumerate(sorted(run.glob("result_*.txt"))):
        file = meter(tmp_path / f"pdu_{trial}.csv", *ends(log), watts=watts + trial)
        done = mlhpc("energy", "import", file, "--run", run, "--trial", trial, "--current", current, *more)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout + done.stderr)
    return said


CLOCK = ("--scope", "node", "--accuracy", 0.02, "--clock-offset", 0, "--clock-bound", 0.1)


def test_a_meter_is_brought_in_and_scored(run: Path, tmp_path: Path) -> None:
    said = bring(run, tmp_path, *CLOCK)
    assert "result_0/node_0.txt" in said[0]
    done = mlhpc("energy", "show", run, "--format", "json", "--price", 0.25, "--carbon", 400)
    group = json.loads(done.stdout)["groups"][0]
    first = group["run_list"][0]
    start, stop = ends(run / "result_0.txt")
    assert first["joules"] == pytest.approx(250.0 * (stop - start), rel=0.1)
    assert first["nodes_j"] == first["joules"]
    assert group["valid"], group["reason"]
    assert group["cost"] == pytest.approx(0.25 * group["joules"] / 3.6e6)
    assert group["carbon_g"] == pytest.approx(400 * group["joules"] / 3.6e6)
    assert group["interval95_j"][0] < group["joules"] < group["interval95_j"][1]
    assert sum(v for k, v in group["phases_j"].items() if k != "staging before") == pytest.approx(group["joules"])
    text = mlhpc("energy", "show", run).stdout
    assert "result_0.txt" in text


def test_readings_are_never_written_over(run: Path, tmp_path: Path) -> None:
    bring(run, tmp_path, *CLOCK)
    before = (run / "power" / "result_0" / "node_0.txt").read_bytes()
    again = mlhpc("energy", "import", tmp_path / "pdu_0.csv", "--run", run, "--current", "AC", *CLOCK)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert (run / "power" / "result_0" / "node_0.txt").read_bytes() == before


def test_what_is_not_stated_is_asked_for(run: Path, tmp_path: Path) -> None:
    file = meter(tmp_path / "pdu.csv", *ends(run / "result_0.txt"))
    place = ("energy", "import", file, "--run", run)
    assert "--current" in mlhpc(*place).stderr
    assert "expected --scope" in mlhpc(*place, "--current", "AC").stderr
    assert "give both" in mlhpc(*place, "--current", "AC", "--scope", "node", "--clock-offset", 1).stderr
    assert "no such run" in mlhpc(*place, "--current", "AC", "--scope", "node", "--trial", 99).stderr
    early = meter(tmp_path / "early.csv", 1000.0, 1060.0)
    done = mlhpc("energy", "import", early, "--run", run, "--current", "AC", "--scope", "node")
    assert "they do not cover the run" in done.stderr
    assert "rule power-clock" in done.stderr


def test_a_network_is_estimated_and_said_to_be(run: Path, tmp_path: Path) -> None:
    assert "no run has power readings" in mlhpc("energy", "network", 300, "--run", run).stderr
    bring(run, tmp_path, *CLOCK)
    assert mlhpc("energy", "network", 300, "--run", run).returncode == 0
    assert read_power_log(run / "power" / "result_0" / "sw_0.txt").estimate_w == 300.0
    first = json.loads(mlhpc("energy", "show", run, "--format", "json").stdout)["groups"][0]["run_list"][0]
    start, stop = ends(run / "result_0.txt")
    assert first["interconnect_j"] == pytest.approx(300.0 * (stop - start))
    assert mlhpc("energy", "network", 300, "--run", run).returncode == 2


def test_the_package_carries_readings_and_one_without_is_the_same(run: Path, smoke_run: Path, tmp_path: Path) -> None:
    def built(folder: Path, out: str) -> dict[str, bytes]:
        package = build_package([folder], system="box", out=tmp_path / out / "ACME")
        return {str(p.relative_to(package.folder)): p.read_bytes() for p in package.folder.rglob("*") if p.is_file()}

    plain = built(smoke_run, "plain")
    power_log(run / "power" / "result_0" / "node_0.txt", [100.0] * 5)
    (run / "power" / "result_0" / "node_1.txt").symlink_to("/etc/passwd")
    measured = built(run, "measured")
    extra = set(measured) - set(plain)
    assert {Path(name).name for name in extra} == {"node_0.txt"}
    assert all("/power/result_0/" in name for name in extra)
    changed = {name for name in plain if plain[name] != measured[name]}
    assert {Path(name).name for name in changed} <= {
        "manifest.sha256",
        "ro-crate-metadata.json",
        "origin.json",
    }  # the crate lists all files, origin.json names the run folder


def test_energies_are_compared_where_they_are_of_one_kind(run: Path, smoke_run: Path, tmp_path: Path) -> None:
    def compared(*paths: Path) -> tuple[str, dict[str, Any]]:
        text = mlhpc("compare", *paths).stdout
        return text, json.loads(mlhpc("compare", *paths, "--format", "json").stdout)["comparisons"][0]

    other, third = (Path(shutil.copytree(run, tmp_path / name)) for name in ("other", "third"))
    text, data = compared(run, other)
    assert "energy" not in text
    assert data["energy"] is None
    bring(run, tmp_path, *CLOCK)
    text, data = compared(run, other)
    assert "energy is not compared: B has none" in text
    assert data["energy"] is None
    bring(other, tmp_path, *CLOCK, watts=500.0)
    text, data = compared(run, other)
    energy = data["energy"]
    assert energy["ratio"] == pytest.approx(2.0, rel=0.05)
    assert energy["interval"][0] < energy["ratio"] < energy["interval"][1]
    assert energy["b_j"] == pytest.approx(energy["ratio"] * energy["a_j"])
    assert f"energy {energy['ratio']:.4g} times" in text
    assert "node AC" in text
    assert compared(other, run)[1]["energy"]["ratio"] == pytest.approx(1 / energy["ratio"])
    bring(third, tmp_path, *CLOCK, current="DC")
    text, data = compared(run, third)
    assert "energy is not compared: A is of node AC, B of node DC" in text
    assert data["energy"] is None


def test_a_package_states_its_energy_and_its_reproduction_computes_it_anew(
    run: Path, smoke_run: Path, tmp_path: Path
) -> None:
    def level_0(package: Path) -> tuple[int, str]:
        write_package_manifest(package)
        done = mlhpc("reproduce", package, "--level", 0, "-o", tmp_path / f"out_{next(numbers)}")
        return done.returncode, done.stdout

    numbers = iter(range(9))
    bring(run, tmp_path, *CLOCK)
    plain = build_package([smoke_run], system="box", out=tmp_path / "plain" / "ACME").folder
    assert "energy" not in next(plain.rglob("result.json")).read_text()
    measured = build_package([run], system="box", out=tmp_path / "measured" / "ACME").folder
    stated = next(measured.rglob("result.json"))
    document = json.loads(stated.read_text())
    shown = json.loads(mlhpc("energy", "show", run, "--format", "json").stdout)["groups"][0]
    assert document["energy_j"] == shown["joules"]
    assert document["energy_of"] == "node AC"
    assert level_0(measured)[0] == 0
    stated.write_text(json.dumps(document | {"energy_j": document["energy_j"] * 0.9}))
    code, text = level_0(measured)
    assert code == 1
    assert "result.json: energy_j" in text


def test_carbon_is_only_what_is_given(tmp_path: Path) -> None:
    assert read_carbon("300").mean(5, 10) == 300
    hours = tmp_path / "hours.csv"
    hours.write_text("hour,g\n1970-01-01T00:00:00Z,100\n1970-01-01T01:00:00Z,300\n1970-01-01T02:00:00Z,0\n")
    assert read_carbon(str(hours)).mean(1800, 5400) == pytest.approx(200)
    assert read_carbon(str(hours)).mean(3600, 3600 + 900) == 300
    with pytest.raises(InputError, match="ends before the run"):
        read_carbon(str(hours)).mean(0, 30000)
    for text, message in (("-1", "expected grams"), ("nan", "expected grams"), (str(tmp_path / "no"), "No such file")):
        with pytest.raises(InputError, match=message):
            read_carbon(text)
    hours.write_text("1970-01-01T01:00:00Z,1\n1970-01-01T00:00:00Z,1\n")
    with pytest.raises(InputError, match=":2: its hour is not after"):
        read_carbon(str(hours))
