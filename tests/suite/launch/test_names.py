"""Run folders may be called anything: the name arrives as it is at the worker, at Slurm and on the disk, or is refused."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mlhpc.suite.commands.submit import plan_job
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.launch.job import Job, SystemFile
from mlhpc.suite.launch.script import render_script
from tests.fixtures.cli import mlhpc
from tests.fixtures.runs import run_folder

CONFIG = load_config(load_descriptor("cosmoflow"), "smoke", ())
NAMES = (80, 500)  # every part first, at both ends of a name, then what chance makes of them
PYTHON = "/opt/my $python/it's/bin/python"
PARTS = [
    *"$`\"'{}()[]<>|&;#!~*?^=,:@+%- .",
    *("$5", "$HOME", "${HOME}", "$(touch spoiled)", "`touch spoiled`", '"; touch spoiled; "', "'; touch spoiled; '"),
    *("%j", "%%", "%A_%a", "%x", "%5t", "}", "}}", "{{ run }}", "$((1+1))", "&&", "||", "!!", "~root", "*.py"),
    *("ä", "運行", "🙂", "--help", "-n", "#SBATCH --nodes=9", "a", "b c", "$'x'", '$"x"', "@Q", "_"),
]
REFUSED = ["\n", "\r", "\t", "\\", "\\n", "\x1b[31m", "\x7f", "\u2028", "\udcff", "a\nb", "\\%j"]
SRUN = """#!/bin/bash
printf '%s\\0' "$@" >> "$CALLS"
"""


def names(count: int) -> list[str]:
    """Names from hostile parts, the same each time."""
    random.seed(8)
    made = [f"{part}x{part}" for part in PARTS]
    while len(made) < count:
        made.append("".join(random.choices(PARTS, k=random.randint(2, 6))))
    return [name for name in made if name not in (".", "..")][:count]


def template(**changes: object) -> Job:
    base = Job(
        workload="cosmoflow", size="smoke", config="", nodes=1,
        system=SystemFile(name="any $(touch spoiled) system"), ranks_per_node=1, python=PYTHON,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def output_of(script: str) -> str:
    """The value of --output in a script."""
    (line,) = re.findall(r"^#SBATCH (--output=.*)$", script, re.MULTILINE)
    (word,) = shlex.split(line)
    return word.removeprefix("--output=")


def expanded(pattern: str) -> str:
    """A path as Slurm expands it for job 17."""
    return re.sub(r"%([%j])", lambda match: {"%": "%", "j": "17"}[match[1]], pattern)


@pytest.mark.parametrize("count", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.long)])
def test_bash_and_slurm_get_every_name_as_it_is(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Job scripts of many names are run by bash, with an srun that keeps its words."""
    monkeypatch.setattr("sys.executable", PYTHON)
    (tools := tmp_path / "tools").mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (work := tmp_path / "work").mkdir()
    calls = tmp_path / "calls"
    slurm = {"JOB_ID": "17", "JOB_NODELIST": "n1", "JOB_NUM_NODES": "1", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "1"}
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(calls), "HOME": "/h", "LC_ALL": "C.UTF-8"}
    environment |= {f"SLURM_{name}": value for name, value in slurm.items()}
    for name in names(count):
        folder = work / name
        script = render_script(plan_job(template(overrides=(f"a.b={name.replace(' ', '_')}",)), CONFIG, 1, folder))
        assert expanded(output_of(script)) == f"{folder}/output/job_17.log"
        calls.write_bytes(b"")
        done = subprocess.run(
            ["bash"], input=script, env=environment, cwd=work, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stderr) == (0, ""), name
        words = calls.read_text().split("\0")
        assert words[words.index("--output") + 1] == str(folder)
        assert words[words.index("--config") + 1] == str(folder / "config.yaml")
        assert words[words.index("--set") + 1] == f"a.b={name.replace(' ', '_')}"
        assert PYTHON in words
        assert (folder / "output" / "trial_0.log").read_text() == ""
        assert (folder / "exit" / "17").read_text() == "0\n"
        shutil.rmtree(folder)
        assert list(work.iterdir()) == [], name
    assert [path.name for path in tmp_path.rglob("spoiled")] == []


def test_sbatch_reads_the_name_as_it_is(tmp_path: Path) -> None:
    """Slurm's own reader of #SBATCH lines, of which no controller answers."""
    if (sbatch := shutil.which("sbatch")) is None:
        pytest.skip("no sbatch on this machine")
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nSlurmctldPort=9\nAuthType=auth/none\nCredType=cred/none\n"
        "MessageTimeout=2\nNodeName=n1 CPUs=1\nPartitionName=p Nodes=n1 Default=YES\n"
    )
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    hostile = "".join(part for part in PARTS if part.isascii())
    for name in (hostile[:100], hostile[100:], "a b", 'q"x', "#x", "it's", "a%jb", " "):
        job = plan_job(template(), CONFIG, 1, tmp_path / name)
        (script := tmp_path / "job.sbatch").write_text(render_script(job))
        words = [sbatch, "-v", "--test-only", script]
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
            told = iter(process.stderr.readline, "")  # it then asks the controller, for long
            line = next(line for line in told if "output  " in line)
            assert line.partition(" : ")[2] == f"{output_of(script.read_text())}\n"
            process.kill()


@pytest.mark.parametrize("part", REFUSED, ids=repr)
def test_a_name_that_cannot_be_quoted_is_refused_in_one_line(part: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"printable|backslash") as caught:
        plan_job(template(), CONFIG, 1, tmp_path / f"run{part}x")
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).isprintable()


def test_submit_names_a_folder_with_a_dollar(tmp_path: Path) -> None:
    words = ["submit", "cosmoflow", "--system", "example", "--size", "smoke", "--nodes", "1", "--dry-run"]
    done = mlhpc(*words, "-o", "runs/cost$5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f': "${{MLHPC_RUN:={tmp_path}/runs/cost\\$5}}"' in done.stdout
    refused = mlhpc(*words, "-o", "runs/a\nb", cwd=tmp_path)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_printed_can_be_given_to_a_shell(tmp_path: Path) -> None:
    """The paths in it are quoted where they must be."""
    hostile = "it's $(touch spoiled) &"
    said = mlhpc("history", "show", hostile, cwd=tmp_path).stderr
    command = said.partition("begin one with: ")[2].strip()
    assert shlex.split(command)[-2:] == ["-o", hostile]
    data = {"MLHPC_DATA": str(tmp_path / "a b"), "PATH": os.environ["PATH"]}
    missing = mlhpc("run", "cosmoflow", "--size", "smoke", cwd=tmp_path, environment=data).stderr
    command = missing.partition("make it with: ")[2].strip()
    assert shlex.split(command)[-2:] == ["-o", str(tmp_path / "a b" / "cosmoflow-smoke")]


def test_scripts_of_a_package_take_no_command_from_a_name(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "R")
    info = json.loads((folder / "run.json").read_text())
    info["git"]["commit"] = "$(touch spoiled)"
    (folder / "run.json").write_text(json.dumps(info))
    made = mlhpc("package", folder, "--system", "x", "--submitter", "ACME", "-o", tmp_path / "ACME")
    assert made.returncode == 0, made.stderr
    (setup,) = (tmp_path / "ACME").rglob("setup.sh")
    assert "checkout '$(touch spoiled)'" in setup.read_text()
    assert not [line for line in setup.read_text().splitlines() if line.startswith("touch")]
