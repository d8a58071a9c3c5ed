"""`mlhpc ab steps`: twins are equal, recomputation is more FLOPs and less memory, wrong input is one line before anything runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlhpc.plugins.tune.space import StepError
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.world import World
from tests.fixtures.cli import mlhpc
from tests.fixtures.once import made_once
from tests.fixtures.warm import warm_python
from tests.workloads.tiny import TINY, make

AGAIN = """
version: 1
description: blocks are computed again
mesh: data=1
parameters: {"*": replicate}
recompute: {"stages.?.?": full}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alone = World("none", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    return made_once(tmp_path_factory, "ab_data", lambda folder: make("swinv2_moe", folder / "data", alone)) / "data"


def words(data: Path, *more: object) -> list[object]:
    settings = [*TINY["swinv2_moe"].overrides(read_manifest(data).attributes), f"data={data}", "global_batch_size=20"]
    settings += ["submission.division=open", "device=cpu"]
    return ["ab", "steps", "swinv2_moe", "--size", "smoke", *(w for each in settings for w in ("--set", each)), *more]


def rows(document: dict[str, Any]) -> dict[str, str]:
    return {row["quantity"]: row["verdict"] for row in document["rows"]}


@pytest.mark.long
def test_recomputation_is_more_flops_and_less_memory_with_the_same_loss(data: Path, tmp_path: Path) -> None:
    (tmp_path / "again.yaml").write_text(AGAIN)
    plans = ("--a", "none", "--b", tmp_path / "again.yaml", "--pairs", 2, "--steps", 1)
    done = mlhpc(*words(data, *plans, "-o", tmp_path / "out", "--format", "json"))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    found = rows(document)
    assert found["executed FLOPs"] == "more"
    assert found["peak memory"] == "less"
    assert found["bytes sent"] == found["loss"] == "equivalent"
    assert document == json.loads((tmp_path / "out" / "ab.json").read_text())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ab.json"]  # no checkpoint is left
    assert [len(side["blocks"]["loss"]) for side in document["sides"]] == [2, 2]
    assert document["processor"]
    again = mlhpc(*words(data, *plans, "-o", tmp_path / "out"))
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


WRONG = {
    "nothing to compare": ([], "A and B are the same: give --b PLAN, --set-b KEY=VALUE"),
    "A alone": (["--a", "none"], "A and B are the same: give --b PLAN, --set-b KEY=VALUE"),
    "an unknown setting": (["--set-b", "precison=bfloat16"], "did you mean 'precision'"),
    "a plan as a setting of B": (["--set-b", "plan=sharded"], "--set plan: give plans and meshes with --a"),
    "another batch": (["--set-b", "global_batch_size=10"], "--set-b global_batch_size: both sides must have the same"),
    "other data": (["--set-a", "data=/nowhere"], "--set-a data: both sides must have the same"),
    "a precision that the device lacks": (
        ["--set-b", "precision=tf32", "--set", "device=cpu"],
        "tf32: cpu here has none",
    ),
    "compiled steps": (["--set-b", "compile=true"], "--set-b compile: the FLOPs of compiled code cannot be counted"),
    "steps as graphs": (["--set-b", "graphs=true"], "--set-b graphs: the FLOPs of a replayed graph cannot be counted"),
    "another network": (["--set-b", "hyperparameters.depths=[2, 4]"], "--set-b: .*shape.* in A"),
    "an unknown plan": (["--a", "none", "--b", "shraded"], "unknown plan 'shraded'"),
    "a mesh without a plan": (
        ["--a", "none", "--b", "none", "--mesh-b", "data=1"],
        "a mesh needs a plan: give --b",
    ),
    "ranks that A's mesh lacks": (["--a", "sharded", "--b", "none"], "--a: .*the run has 1"),
    "ranks that B's mesh lacks": (["--a", "none", "--b", "sharded"], "--b: .*the run has 1"),
    "a plan among the settings": (
        ["--a", "none", "--b", "none", "--set", "plan=spatial"],
        "--set plan: give plans and meshes with --a",
    ),
    "a mesh among the settings": (
        ["--a", "none", "--b", "none", "--set", "mesh=data=1"],
        "--set mesh: give plans and meshes with --a",
    ),
    "one pair": (["--a", "none", "--b", "none", "--pairs", "1"], "--pairs: 1 is not in the range"),
    "no steps": (["--a", "none", "--b", "none", "--steps", "0"], "--steps: 0 is not in the range"),
    "no data": (["--a", "none", "--b", "none", "--set", "data=/nowhere"], "/nowhere"),
    "a file that is not there": (["--a", "none", "--b", "./nowhere.yaml"], "nowhere.yaml"),
    "an unknown axis": (["--a", "none", "--b", "sharded", "--mesh-b", "foo=2"], "unknown axis 'foo'"),
    "a batch that ranks do not divide": (["--a", "none", "--b", "none", "--ranks", "3"], "--a: .*split evenly"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line_before_anything_runs(mistake: str, data: Path, tmp_path: Path) -> None:
    options, reason = WRONG[mistake]
    done = mlhpc(*words(data, *options, "-o", tmp_path / "out"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(reason, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_settings_of_one_side_are_compared_with_what_each_chose(data: Path, tmp_path: Path) -> None:
    both = ("--set", "hyperparameters.moe.backend=auto")
    options = (
        *both,
        "--set-b",
        "precision=bfloat16",
        "--pairs",
        2,
        "--steps",
        1,
        "-o",
        tmp_path / "out",
        "--format",
        "json",
    )
    done = mlhpc(*words(data, *options))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    a, b = document["sides"]
    assert (a["precision"], a["settings"], b["precision"], b["settings"]) == (
        *("float32", [], "bfloat16"),
        ["precision=bfloat16"],
    )
    assert a["blocks"]["loss"] != b["blocks"]["loss"]
    assert any(name.startswith("experts") for name in a["choices"])  # as a trial chooses
    assert b["name"].startswith("no plan (data=1), precision=bfloat16")


@pytest.mark.long
def test_a_setting_of_the_optimizer_is_the_sides_own(data: Path, tmp_path: Path) -> None:
    """Both begin at A's checkpoint, which has the settings of A's optimizer: those of B must not become them."""
    decayed = ("--set-b", "hyperparameters.weight_decay=0.9", "--set", "hyperparameters.learning_rate=0.05")
    options = (*decayed, "--pairs", 2, "--steps", 3, "-o", tmp_path / "out", "--format", "json")
    done = mlhpc(*words(data, *options))
    assert done.returncode == 0, done.stderr
    a, b = json.loads(done.stdout)["sides"]
    assert a["blocks"]["loss"] != b["blocks"]["loss"]
    assert all(0 < side["gradient_error"]["error"] < side["gradient_error"]["bound"] for side in (a, b))


@pytest.mark.long
def test_a_side_that_computes_something_else_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([StepError(1e-6, 1e-5), StepError(1e-2, 1e-5)])
    monkeypatch.setattr("mlhpc.plugins.tune.error.measure_error", lambda *_: next(found))
    done = mlhpc(*words(data, "--set-b", "loader_threads=2", "--pairs", 2, "--steps", 1, "-o", tmp_path / "out"))
    assert done.returncode == 1, done.stderr
    assert "gradient 0.01 from float64, rounding gives at most 1e-05: refused" in done.stdout
    assert set(rows(json.loads((tmp_path / "out" / "ab.json").read_text())).values()) == {"refused"}


@pytest.mark.long
def test_twins_on_two_ranks_are_equal_but_for_time_and_pieces_send_half_as_much_again(
    data: Path, tmp_path: Path
) -> None:
    for name, plan, sent in (("twins", "none", "equivalent"), ("pieces", "sharded", "more")):
        given = words(data, "--a", "none", "--b", plan, "--ranks", 2, "--pairs", 4, "-o", tmp_path / name)
        command = [*warm_python(), "-P", "-m", "mlhpc", *map(str, given)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        found = rows(json.loads((tmp_path / name / "ab.json").read_text()))
        assert found["bytes sent"] == sent
        assert name != "twins" or {found[each] for each in ("loss", "executed FLOPs", "peak memory")} == {"equivalent"}


def test_other_ranks_than_a_launcher_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    done = mlhpc("ab", "steps", "cosmoflow", "--b", "sharded", "--ranks", "2")
    assert (done.returncode, "PMI_RANK=0 PMI_SIZE=3" in done.stderr) == (2, True), done.stderr
    assert "env -u PMI_RANK mlhpc" in done.stderr


def test_a_precision_to_choose_must_be_stated(data: Path, tmp_path: Path) -> None:
    done = mlhpc(*words(data, "--set-b", "precision=auto", "--set", "precision=auto", "-o", tmp_path / "out"))
    assert done.returncode == 2
    wanted = "precision is auto, but mlhpc ab steps does not measure which is fastest: give --set precision=float32"
    assert wanted in done.stderr
