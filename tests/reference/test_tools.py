"""What we write for other tools, judged by these tools: validators of metadata, readers of every exported form, test frameworks.

They run in Pythons of their own (``MLHPC_REFERENCE_PYTHONS``); what is not there is skipped with one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.data.manifest import Manifest, write_manifest
from mlhpc.suite.data.shards import write_shard
from tests.fixtures.cli import mlhpc
from tests.fixtures.package_mutations import example

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "submissions" / "plugins"
Find = Callable[..., str]


def ask(python: str, program: str, *arguments: object, **environment: str) -> str:
    """What a program prints in another Python; it must succeed."""
    done = subprocess.run(
        [python, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=1500,  # a framework runs five trials; on two shared cores 300 s were not enough
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rocrate_validator_accepts_a_package(
    tmp_path: Path, python_with: Find, reference: Callable[[str], Path]
) -> None:
    pytest.importorskip("mlhpc.plugins.exchange")
    python = python_with("rocrate_validator")
    contexts = (
        reference("ResearchObject/ro-crate") / "docs" / "_specification" / "1.1" / "context.jsonld",
        reference("ResearchObject/ro-terms") / "workflow-run" / "context.jsonld",
    )
    judge = Path(__file__).parent / "judge_crate.py"
    done = subprocess.run(
        [python, str(judge), str(example(tmp_path)), *map(str, contexts)], capture_output=True, text=True, timeout=300
    )
    *issues, last = done.stdout.splitlines()
    assert last.startswith("checked "), done.stderr
    assert int(last.split()[1]) > 50
    assert not [issue for issue in issues if not issue.startswith("RECOMMENDED")]
    told = {"process-run-crate-0.5_3.2", "process-run-crate-0.5_5.1", "ro-crate-1.1_31.2"}  # addresses nobody has told
    assert {issue.split()[1] for issue in issues} <= told, issues


def test_mlcroissant_accepts_a_data_set(tmp_path: Path, python_with: Find) -> None:
    pytest.importorskip("mlhpc.plugins.exchange")
    python = python_with("mlcroissant")
    rows = np.array([0, 2, 5])
    arrays = {"x": np.zeros((2, 4, 3), np.int16), "atom.offsets": rows, "atom.position": np.zeros((5, 3), np.float32)}
    entries = {split: (write_shard(tmp_path / split / "shard_00000.h5", arrays),) for split in ("train", "validation")}
    write_manifest(tmp_path, Manifest(workload="toy", size="mini", seed=3, generator={"version": 2}, splits=entries))
    assert mlhpc("data", "describe", tmp_path).returncode == 0
    program = (
        "import sys, mlcroissant\n"
        "data = mlcroissant.Dataset(jsonld=sys.argv[1])\n"
        "print(not data.metadata.ctx.issues.errors, len(data.metadata.distribution), len(data.metadata.record_sets))"
    )
    assert ask(python, program, tmp_path / "croissant.json").split() == ["True", "4", "2"]


def test_cffconvert_accepts_the_citation(python_with: Find) -> None:
    python = python_with("cffconvert")
    program = "import sys; from cffconvert.cli.cli import cli; sys.argv = ['x', '--validate', '-i', sys.argv[1]]; cli()"
    assert "valid" in ask(python, program, ROOT / "CITATION.cff")


def test_jsonschema_accepts_every_score(tmp_path: Path, python_with: Find) -> None:
    python = python_with("jsonschema", "referencing")  # from 4.18 on
    groups = json.loads(mlhpc("score", example(tmp_path), "--format", "json").stdout)["groups"]
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    program = (
        "import json, sys, jsonschema\n"
        "schema = json.load(open(sys.argv[1]))\n"
        "jsonschema.Draft202012Validator.check_schema(schema)\n"
        "print(sum(jsonschema.validate(group, schema) is None for group in json.load(open(sys.argv[2]))))"
    )
    schema = ROOT / "suite" / "compliance" / "exchange" / "result.schema.json"
    assert int(ask(python, program, schema, tmp_path / "groups.json")) == len(groups)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What the frameworks' jobs need: our commands on the PATH, one thread, and a place for the data."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "OMP_NUM_THREADS": "1", "MLHPC_DATA": str(tmp_path / "data")}


@pytest.mark.long
def test_reframe_runs_a_workload(tmp_path: Path, python_with: Find, environment: dict[str, str]) -> None:
    python = python_with("reframe")
    program = "import sys; from reframe.frontend.cli import main; sys.argv = ['reframe', *sys.argv[1:]]; main()"
    words = ["--prefix", tmp_path, "-c", PLUGINS / "reframe" / "rfm_mlhpc.py", "-r", "-S", "workload=swinv2_moe"]
    printed = ask(python, program, *words, "--performance-report", **environment)
    assert "Ran 1/1 test case(s)" in printed
    assert "time_to_train_mean" in printed


@pytest.mark.long
def test_jube_runs_a_workload(tmp_path: Path, python_with: Find, environment: dict[str, str]) -> None:
    python = python_with("jube")
    text = (PLUGINS / "jube" / "mlhpc.yaml").read_text().replace("_: moe_lm", "_: swinv2_moe")
    (tmp_path / "mlhpc.yaml").write_text(text)
    program = "import os, sys; os.chdir(sys.argv.pop(1)); from jube.main import main; main()"
    ask(python, program, tmp_path, "run", "mlhpc.yaml", **environment)
    table = ask(python, program, tmp_path, "result", "-a", "mlhpc_runs", **environment)
    lines = [line for line in table.splitlines() if "swinv2" in line or "workload" in line]
    header, row = ([cell.strip() for cell in line.split("|")] for line in lines)
    found = dict(zip(header, row, strict=True))
    assert (found["workload"], float(found["runs"])) == ("swinv2_moe", 5)
    assert any(name.startswith("mean") and float(value) > 0 for name, value in found.items())
