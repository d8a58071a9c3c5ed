"""The workflow files of docs/ci, run step by step in a repository with a remote: what fails a job, and what is kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlhpc.suite import VERSION

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "docs" / "ci").glob("*.yml"))
GATES = ["github-actions-gate.yml", "gitlab-ci-gate.yml"]

# Stand-ins for what a runner has: `python -m venv` makes an environment, pip takes files that exist, and mlhpc ends with
# the code that MLHPC_CODES states for a command ("compare=1") and keeps a history.
PROGRAM = r"""#!/bin/bash
name=$(basename "$0")
case "$name $1 $2" in
"python -m venv") mkdir -p "$3/bin"; ln -s "$0" "$3/bin/pip"; ln -s "$0" "$3/bin/mlhpc"; exit 0;;
pip*)
  [ "$2" = -c ] && [ -f "$3" ] || { echo "no constraints: $*"; exit 1; }
  [ -f "${4%%\[*}" ] || { echo "no file: $4"; exit 1; }
  exit 0;;
esac
echo "$name $1 $2" >> "$CALLS"
if [ "$1 $2" = "history add" ]; then mkdir -p "$5"; echo "$3" > "$5/$(basename "$3").json"; fi
for each in $MLHPC_CODES; do
  [ "${each%=*}" = "$1" ] || [ "${each%=*}" = "$1-$2" ] && exit "${each#*=}"
done
exit 0
"""


def steps_of(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The variables of a workflow file, and its steps as GitHub has them: run, if, id."""
    data = yaml.safe_load(path.read_text())
    if "jobs" in data:
        (job,) = data["jobs"].values()
        return data["env"], [step for step in job["steps"] if "run" in step]
    (job,) = (value for value in data.values() if isinstance(value, dict))
    return job["variables"], [{"run": "\n".join(job["script"])}]


class Runner:
    """A runner with a clone of a repository, which has the wheel and its constraints."""

    def __init__(self, tmp_path: Path) -> None:
        self.origin, self.clone, self.bin = tmp_path / "origin.git", tmp_path / "clone", tmp_path / "bin"
        self.calls = tmp_path / "calls"
        self.bin.mkdir()
        for name in ("python", "pip", "mlhpc"):
            (self.bin / name).write_text(PROGRAM)
            (self.bin / name).chmod(0o755)
        self.git("init", "-q", "--bare", "-b", "main", str(self.origin), cwd=tmp_path)
        self.git("config", "receive.advertisePushOptions", "true", cwd=self.origin)  # as GitLab
        self.git("clone", "-q", str(self.origin), str(self.clone), cwd=tmp_path)
        self.git("checkout", "-q", "-b", "main")
        (self.clone / "wheels").mkdir()
        (self.clone / "wheels" / f"mlhpc-{VERSION}-py3-none-any.whl").touch()
        (self.clone / "wheels" / "constraints.txt").touch()
        self.git("add", "-f", ".")
        self.git("commit", "-q", "-m", "wheels")
        self.git("push", "-q", "origin", "main")

    def git(self, *words: str, cwd: Path | None = None) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", *who, *words]
        return subprocess.run(command, cwd=cwd or self.clone, check=True, capture_output=True, text=True).stdout

    def run(self, name: str, codes: str = "", event: str = "schedule", number: int = 1) -> bool:
        """Run all steps as the platform does: after a failure only those that always run. True if none failed."""
        variables, steps = steps_of(ROOT / "docs" / "ci" / name)
        temp, paths = self.clone.parent / f"temp{number}", self.clone.parent / f"path{number}"
        temp.mkdir()
        environment = {
            "HOME": str(temp), "CALLS": str(self.calls), "MLHPC_CODES": codes, "RUNNER_TEMP": str(temp),
            "GITHUB_PATH": str(paths), "GITHUB_RUN_ID": str(number), "GITHUB_RUN_ATTEMPT": "1", "CI_JOB_ID": str(number),
            "GITHUB_REF_NAME": "main", "CI_COMMIT_BRANCH": "main", "CI_SERVER_HOST": "git.example.org",
            "CI_PROJECT_PATH": "acme/runs", "HISTORY_TOKEN": "glpat-secret",
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{self.origin}.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://mlhpc-gate:glpat-secret@git.example.org/acme/runs.git",
        }  # fmt: skip
        fine, outcomes = True, {}
        for step in steps:
            condition = step.get("if", "success()")
            wanted = fine or "always()" in condition
            if "steps.runs.outcome == 'success'" in condition:
                wanted = wanted and outcomes.get("runs") == "success"
            if "github.event_name != 'pull_request'" in condition:
                wanted = wanted and event != "pull_request"
            if not wanted:
                continue
            added = paths.read_text().splitlines() if paths.exists() else []
            path = ":".join((*reversed(added), str(self.bin), os.environ["PATH"]))
            done = subprocess.run(
                ["bash", "-e", "-c", step["run"]],
                cwd=self.clone, env={**variables, **environment, "PATH": path}, capture_output=True, text=True,
            )  # fmt: skip
            outcomes[step.get("id", "")] = "success" if done.returncode == 0 else "failure"
            fine = fine and done.returncode == 0
        return fine

    def kept(self) -> list[str]:
        """The files of the history that the remote has."""
        listed = self.git("ls-tree", "-r", "--name-only", "main", cwd=self.origin).splitlines()
        return [Path(each).name for each in listed if each.startswith("history/")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_suite_is_a_file_of_the_users_own_on_a_python_that_is_tried(path: Path) -> None:
    text = path.read_text()
    variables, steps = steps_of(path)
    assert variables["MLHPC"] == f"wheels/mlhpc-{VERSION}-py3-none-any.whl"
    installs = re.findall(r"pip\"? install (.*)", "\n".join(step["run"] for step in steps))
    assert installs
    assert all(re.fullmatch(r'-c "\$CONSTRAINTS" "\./\$MLHPC(\[run,mpi\])?"', words) for words in installs)
    tried = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert set(re.findall(r"python(?:-version)?: ?\"?(?:python:)?(\d+\.\d+)|image: python:(\d+\.\d+)", text)) <= {
        (tried, ""), ("", tried),
    }  # fmt: skip
    assert tried in text
    assert "|| true" not in text
    assert "continue-on-error" not in text
    assert "allow_failure" not in text
    assert "after_script" not in text, "its failures fail no job"


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(
    ("codes", "fine", "kept"),
    [
        ("", True, True),
        ("compare=4", True, True),
        ("history-check=4", True, True),
        ("compare=1", False, True),
        ("history-check=1", False, True),
        ("compare=2", False, True),
        ("run=1", False, False),
        ("data=2", False, False),
        ("history-add=1", False, None),
    ],
)
def test_a_gate_fails_for_what_is_slower_and_keeps_the_history(
    tmp_path: Path, name: str, codes: str, fine: bool, kept: bool | None
) -> None:
    runner = Runner(tmp_path)
    assert runner.run(name, codes) is fine
    if kept is not None:
        assert runner.kept() == (["gate-1.json" if "gitlab" in name else "gate-1-1.json"] if kept else [])


@pytest.mark.parametrize("name", GATES)
def test_a_history_that_cannot_be_kept_fails_the_job(tmp_path: Path, name: str) -> None:
    runner = Runner(tmp_path)
    hook = runner.origin / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    assert not runner.run(name)
    assert runner.kept() == []


@pytest.mark.parametrize("name", GATES)
def test_a_second_night_adds_to_the_history_though_somebody_pushed(tmp_path: Path, name: str) -> None:
    runner = Runner(tmp_path)
    assert runner.run(name)
    other = tmp_path / "other"
    runner.git("clone", "-q", str(runner.origin), str(other), cwd=tmp_path)
    (other / "README").write_text("x")
    runner.git("add", ".", cwd=other)
    runner.git("commit", "-q", "-m", "x", cwd=other)
    runner.git("push", "-q", cwd=other)
    assert runner.run(name, number=2)
    assert len(runner.kept()) == 2


def test_a_pull_request_pushes_nothing(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    assert runner.run("github-actions-gate.yml", event="pull_request")
    assert runner.kept() == []
    assert "mlhpc history check" in runner.calls.read_text()


@pytest.mark.parametrize("name", GATES)
def test_a_wheel_that_is_not_there_fails_the_job(tmp_path: Path, name: str) -> None:
    runner = Runner(tmp_path)
    next((runner.clone / "wheels").glob("*.whl")).unlink()
    assert not runner.run(name)


@pytest.mark.parametrize("name", GATES)
def test_the_baseline_that_is_kept_is_a_whole_run_folder(name: str) -> None:
    """Without sources.json and its like the checker finds the baseline not compliant (provenance-valid)."""
    text = (ROOT / "docs" / "ci" / name).read_text()
    assert re.findall(r"git add -f (baseline\S*)", text) == ["baseline:"]
