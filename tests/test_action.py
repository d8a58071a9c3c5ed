"""action.yml: its bash steps in order, with the variables that a runner gives them. `python` is a stand-in that notes its words."""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def test_the_steps_install_what_lies_beside_them_and_end_with_the_checks_code(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text(
        ':::MLLOG {"key": "run_start", "value": null, "time_ms": 1, "metadata": {}}\n'
    )
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n')
    (folder / "mlhpc").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m mlhpc "$@"\n')
    for path in folder.iterdir():
        path.chmod(0o755)
    inputs = {"paths": f"{tmp_path}/result_0.txt", "options": "--fail-on warning --format json"}
    environment = os.environ | {"PATH": f"{folder}:/usr/bin:/bin", "GITHUB_ACTION_PATH": str(ROOT)}
    codes, said = [], ""
    for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]:
        if "run" in step:
            given = {
                name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: inputs[match[1]], text)
                for name, text in step.get("env", {}).items()
            }
            words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            done = subprocess.run(words, env=environment | given, cwd=tmp_path, capture_output=True, text=True)
            codes.append(done.returncode)
            said = done.stdout
    assert codes == [0, 1]
    assert (tmp_path / "words").read_text() == f"-m pip install --quiet {ROOT}\n"
    assert '"run-unfinished"' in said
