"""The environment of a package's runs as a requirements file for pip and uv."""

import hashlib
import json
from pathlib import Path

import pytest

from mlhpc.suite.log.origin.sources import Environment, InstalledPackage, read_environment
from mlhpc.suite.package.build import build_package
from tests.fixtures.cli import mlhpc
from tests.fixtures.reproduction import forge
from tests.fixtures.runs import run_folder


def packaged(folder: Path, *environments: str) -> Path:
    runs = []
    for number, text in enumerate(environments):
        run = run_folder(folder / f"run_{number}", count=5)
        sha256 = hashlib.sha256((run / "environment.json").read_bytes()).hexdigest()
        (run / "environment.json").write_text(text)
        for log in run.glob("result_*.txt"):  # as a run of this environment states it
            log.write_text(log.read_text().replace(sha256, hashlib.sha256(text.encode()).hexdigest()))
        runs.append(run)
    return build_package(runs, system="box", out=folder / "out" / "ACME").folder


def environment(*items: InstalledPackage) -> str:
    here = read_environment(())
    return Environment(python=here.python, machine=here.machine, distributions=items).text()


def test_the_requirements_are_the_distributions_of_the_runs(tmp_path: Path) -> None:
    items = (
        InstalledPackage(name="One_A", version="1.0+cpu"),
        InstalledPackage(name="mine", version="2.0", source="editable"),
        InstalledPackage(name="mlhpc", version="1.0.0"),
    )
    package = packaged(tmp_path, environment(*items))
    done = mlhpc("reproduce", package, "--requirements", tmp_path / "requirements.txt")
    assert done.returncode == 0, done.stderr
    assert f"-r {tmp_path / 'requirements.txt'}" in done.stdout
    first, *lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert first.startswith("# CPython 3.")
    assert lines == [
        "one-a==1.0+cpu",
        "# mine==2.0: was installed from a checkout",
        "# mlhpc 1.0.0: install it from its checkout or wheel",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "one @ https://evil/x.whl"},
        {"name": "-r x"},
        {"version": "1.0 --index-url http://evil"},
        {"version": "1.0\n-e ."},
        {"record_sha256": "../../x"},
        {"code": "import os"},
    ],
)
def test_a_hostile_environment_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    document = {"version": 1, "python": "CPython 3.11.7", "machine": "x"}
    document["distributions"] = [{"name": "one", "version": "1.0"} | change]  # type: ignore[assignment]
    package = packaged(tmp_path, environment())
    forge(package, lambda kept: (kept / "environment.json").write_text(json.dumps(document)))
    done = mlhpc("reproduce", package, "--requirements", tmp_path / "requirements.txt")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "environment.json: " in done.stderr
    assert not (tmp_path / "requirements.txt").exists()


def test_no_environment_and_several_are_one_line(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "environment.json").unlink()
    plain = build_package([run], system="box", out=tmp_path / "plain" / "ACME").folder
    done = mlhpc("reproduce", plain, "--requirements", tmp_path / "requirements.txt")
    assert "no environment.json in its provenance" in done.stderr
    package = packaged(tmp_path, environment(InstalledPackage(name="one", version="1")))
    (path,) = package.glob("benchmarks/*/implementations/*/*/*/provenance/run_0/environment.json")
    path.parent.with_name("run_1").mkdir()
    (path.parent.with_name("run_1") / "environment.json").write_text(
        environment(InstalledPackage(name="one", version="2"))
    )
    done = mlhpc("reproduce", package, "--requirements", tmp_path / "requirements.txt")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "its runs were made with different packages or Pythons" in done.stderr
