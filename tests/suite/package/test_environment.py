"""Locks: wheels are matched by what they hold, hashes that are not known are said, other environments are found."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from suite.log.origin.installed import Environment, Installed, digest_record, read_environment
from tests.fixtures.cli import mlhpc


def wheel(folder: Path, name: str, version: str, code: str = "x = 1\n") -> tuple[Path, str]:
    """A wheel of one module, and the digest of its RECORD."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"vendored/{info}/RECORD": "of another wheel,sha256=AAA,1\n",
    }
    lines = []
    for path, text in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}")
    record = "\n".join([*lines, f"{info}/RECORD,,"]) + "\n"
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as file:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            file.writestr(path, text)
    return target, str(digest_record(record))


def environment(path: Path, *items: Installed) -> Path:
    here = read_environment(())
    path.write_text(Environment(python=here.python, machine=here.machine, distributions=items).text())
    return path


def test_a_lock_has_the_hash_of_the_wheel_that_holds_the_files(tmp_path: Path) -> None:
    made, record = wheel(tmp_path / "wheels", "one", "1.0+cpu")
    source = environment(tmp_path / "environment.json", Installed(name="one", version="1.0+cpu", record_sha256=record))
    done = mlhpc("environment", "lock", source, "--find-links", tmp_path / "wheels", "-o", tmp_path / "lock.txt")
    assert done.returncode == 0, done.stderr
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    assert f"one==1.0+cpu \\\n    --hash=sha256:{sha256}\n" in (tmp_path / "lock.txt").read_text()


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "one", "1.0", "x = 2\n")
    (tmp_path / "wheels" / "two-1.0-py3-none-any.whl").write_bytes(b"no zip")
    _, record = wheel(tmp_path / "other", "one", "1.0")
    source = environment(
        tmp_path / "environment.json",
        Installed(name="one", version="1.0", record_sha256=record),
        Installed(name="two", version="1.0", record_sha256=record),
        Installed(name="three", version="1.0", source="editable"),
        Installed(name="four", version="1.0", source="file", wheel_sha256="b" * 64),
    )
    done = mlhpc("environment", "lock", source, "--find-links", tmp_path / "wheels", "-o", tmp_path / "lock.txt")
    assert done.returncode == 1
    assert "one: one-1.0-py3-none-any.whl holds other files" in done.stderr
    assert "two: no wheel of two 1.0" in done.stderr
    assert "three: was installed from a checkout" in done.stderr
    text = (tmp_path / "lock.txt").read_text()
    assert "four==1.0 \\\n    --hash=sha256:bbb" in text
    assert "# one==1.0: no known hash" in text
    refused = mlhpc("environment", "create", source, "--find-links", tmp_path / "wheels", "-o", tmp_path / "venv")
    assert (refused.returncode, (tmp_path / "venv").exists()) == (2, False)


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
    path = tmp_path / "environment.json"
    path.write_text(json.dumps(document))
    for command in ("show", "lock", "create"):
        done = mlhpc("environment", command, path, *([] if command == "show" else ["-o", tmp_path / "out"]))
        assert done.returncode == 2
        assert "not an environment of version 1: distributions.0." in done.stderr
        assert not (tmp_path / "out").exists()


def test_an_environment_of_another_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    path.write_text(Environment(python="CPython 3.4.1", machine="x", distributions=()).text())
    done = mlhpc("environment", "create", path, "-o", tmp_path / "venv")
    assert (done.returncode, "the environment is of CPython 3.4.1" in done.stderr) == (2, True)


def test_show_says_what_is_otherwise_here(tmp_path: Path) -> None:
    mine = read_environment().by_name()["click"]
    source = environment(
        tmp_path / "environment.json",
        mine,
        Installed(name="absent", version="1.0"),
        Installed(name="PyYAML", version="0.1"),
    )
    out = mlhpc("environment", "show", source).stdout
    assert f"  click {mine.version}\n" in out
    assert "  absent 1.0  here: none\n" in out
    assert "  PyYAML 0.1  here: " in out
    assert (
        json.loads(mlhpc("environment", "show", source, "--format", "json").stdout)["distributions"][1]["name"]
        == "absent"
    )


@pytest.mark.long
def test_an_environment_is_made_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    _, record = wheel(tmp_path / "wheels", "one", "1.0")
    source = environment(tmp_path / "environment.json", Installed(name="one", version="1.0", record_sha256=record))
    done = mlhpc("environment", "create", source, "--find-links", tmp_path / "wheels", "-o", tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 distributions are those of the package" in done.stdout
    subprocess.run([tmp_path / "venv" / "bin" / "python", "-c", "import one; assert one.x == 1"], check=True)
