"""A package that PYTHONPATH hides, and addresses and ports that cannot be, are the environment's: one line, exit code 2."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from mlhpc.__main__ import USAGE
from mlhpc.suite import VERSION
from mlhpc.suite.commands.machine import doctor
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.shadowed import describe_location
from mlhpc.suite.world import resolve_address
from tests.fixtures.warm import warm_python

MOE = ["moe", "--tokens", "8", "--width", "8", "--hidden", "8", "--experts", "2", "--repeats", "1"]


def suite(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable], words, environ)


def on_a_rank(**environ: str) -> subprocess.CompletedProcess[str]:
    """A command that connects ranks, in a Python that has loaded torch."""
    return run(warm_python(), MOE, environ)


def run(python: list[str], words: Sequence[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*python, "-P", "-m", "mlhpc", *words]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["torch.py", "click.py", "numpy/__init__.py", "msgspec.py"])
def test_a_package_that_pythonpath_hides_is_named_with_its_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x = 1\n")
    done = suite(*MOE, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert f" is loaded from {tmp_path / name}, which PYTHONPATH puts before" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", ["click", "msgspec", "json", "random", "typing", "signal", "statistics"])
@pytest.mark.parametrize("content", ["", "raise RuntimeError('a program of mine')\n", "def\n"])
def test_a_module_that_cannot_be_imported_is_named_too(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(content)
    done = suite("workload", "list", PYTHONPATH=str(tmp_path))
    assert "Traceback" not in done.stderr
    if done.returncode:  # nothing may need what an empty module lacks
        assert done.returncode == 2, done.stderr
        assert f"mlhpc: {name} is loaded from {tmp_path}/{name}.py, which PYTHONPATH puts before" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_folder_that_holds_the_environment_itself_hides_nothing() -> None:
    """As PYTHONPATH=$HOME with a .venv there. The error is about memory."""
    environment = Path(sys.prefix).parent
    done = run(warm_python(), ["moe", "--tokens", "100000000000"], {"PYTHONPATH": str(environment)})
    assert (done.returncode, "not enough memory here" in done.stderr) == (1, True), done.stderr


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["suite", "workloads", "analysis", "submissions", "plugins"])
def test_folders_of_a_user_that_have_our_names_hide_nothing(name: str, tmp_path: Path) -> None:
    """They once were top-level packages of ours."""
    for file in (tmp_path / "there" / f"{name}.py", tmp_path / name / "__init__.py"):
        file.parent.mkdir()
        file.write_text("raise RuntimeError('a program of mine')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    program = "import mlhpc, mlhpc.suite, mlhpc.workloads, mlhpc.analysis; print(mlhpc.published().shape[0] > 80)"
    for words in (["-m", "mlhpc", "workload", "list"], ["-c", program]):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "cosmoflow" in done.stdout or done.stdout == "True\n"


def test_the_program_is_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("mlhpc"), "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (f"mlhpc, version {VERSION}\n", "")


def test_a_module_that_is_merely_loaded_is_not_blamed_for_a_plug_in(tmp_path: Path) -> None:
    (tmp_path / "yaml").mkdir()
    shutil.copytree(Path(yaml.__file__).parent, tmp_path / "yaml", dirs_exist_ok=True)
    code = (
        "import yaml, mlhpc.suite.plugins as p; print(p.explain_unusable(ValueError('x'))); from mlhpc.suite.shadowed import *; "
        "print(explain_shadowed(ValueError('x')))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True)
    alone, with_loaded = done.stdout.splitlines()
    assert alone == "x"
    assert with_loaded.startswith(f"yaml is loaded from {tmp_path}/yaml/__init__.py, which PYTHONPATH puts before")


@pytest.mark.parametrize("name", ["mine.py", "helpers/__init__.py"])
def test_other_modules_of_a_pythonpath_are_nobodys_mistake(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x = 1\n")
    done = suite("workload", "list", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_imports_what_it_reports_and_says_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("x = 1\n")
    (tmp_path / "h5py.py").write_text("raise OSError('libhdf5.so: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checks = {check.name: check for check in doctor.check_python()}
    assert not checks["torch"].ok
    assert f"from {tmp_path}/torch.py: hides the package that is installed in " in checks["torch"].found
    assert not checks["h5py"].ok
    assert "OSError: libhdf5.so: no such file" in checks["h5py"].found
    assert checks["numpy"].ok
    assert "PYTHONPATH" in checks["torch"].fix
    assert "PYTHONPATH" in checks["h5py"].fix
    assert describe_location(str(tmp_path / "torch.py")) == f" from {tmp_path}/torch.py"


def test_doctor_names_what_hides_a_module_that_a_package_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("x = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    checks = {check.name: check for check in doctor.check_python()}
    assert f"numpy is loaded from {tmp_path}/numpy.py, which PYTHONPATH puts before" in checks["h5py"].found
    assert checks["h5py"].fix == "env -u PYTHONPATH mlhpc …"
    assert checks["google-crc32c"].ok


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "MASTER_ADDR='' and MASTER_PORT=''"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        ({"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29999"}, "'no.such.host.invalid' does not resolve"),
        ({"MASTER_ADDR": "1.2.3.4.5", "MASTER_PORT": "29999"}, "'1.2.3.4.5' does not resolve"),
        ({"MASTER_ADDR": "[::zz]", "MASTER_PORT": "29999"}, "'::zz' does not resolve"),
    ],
)
def test_an_address_that_cannot_be_is_one_line(environ: dict[str, str], said: str) -> None:
    done = on_a_rank(**{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "", **environ})
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_a_port_that_another_program_uses_ends_every_rank_soon(rank: str) -> None:
    """Half an hour is torch's limit, five minutes that of a test."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
        done = on_a_rank(**{"RANK": rank, "WORLD_SIZE": "2", **place})
    assert done.returncode == 2, done.stderr
    assert "another program" in done.stderr


def test_names_resolve_to_either_kind_of_address() -> None:
    assert resolve_address("127.0.0.1") == "127.0.0.1"
    assert resolve_address("::1") == "::1"
    for name in ("a b", "x" * 300, "..", "ü" * 70):
        with pytest.raises(InputError, match="does not resolve"):
            resolve_address(name)


def test_the_exit_code_without_the_enumeration_is_that_of_usage() -> None:
    assert ExitCode.USAGE == USAGE
