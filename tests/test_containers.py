"""The files that make images: one script installs the pinned versions, and what it installs exists."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "containers"
INSTALL = (FOLDER / "install.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Dockerfile", "mlhpc.def"])
def test_an_image_is_made_by_the_one_script(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "containers/install.sh" in text
    assert "pip" not in text.replace("pypi", "")
    assert re.search(r"python:3\.(\d+)-slim", text)
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in text


def test_the_script_installs_pinned_versions_of_parts_that_exist(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.search(r"EXTRAS:-([\w,-]+)", INSTALL)
    assert found is not None
    assert set(found[1].split(",")) <= set(project["optional-dependencies"])
    assert all("-c constraints.txt" in line for line in INSTALL.splitlines() if "pip install" in line)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    assert checker is not None
    assert subprocess.run([checker, FOLDER / "install.sh"], capture_output=True, text=True).stdout == ""
