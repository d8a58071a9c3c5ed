"""Training under shipped plans on real ranks: losses of the unsplit run, and collectives to the byte."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.warm import warm_python

ROOT = Path(__file__).parents[3]
UNSCALED = ("hyperparameters.input_norm=log1p", "hyperparameters.input_mean=null", "hyperparameters.input_std=null")
COSMOFLOW = ("hyperparameters.conv_channels=[4,8]", "global_batch_size=8", *UNSCALED)
DEEPCAM = ("hyperparameters.height=32", "hyperparameters.width=48", "hyperparameters.middle_blocks=1")


def rows(
    workload: str, ranks: int, meshes: list[str], steps: int, settings: tuple[str, ...], *options: str, code: int = 0
) -> list[dict[str, Any]]:
    """What the benchmark says of each mesh. Its exit code is 1 if losses differ."""
    words = [each for mesh in meshes for each in ("--mesh", mesh)] + [
        each for one in settings for each in ("--set", one)
    ]
    command = [
        *warm_python(),
        str(ROOT / "benchmarks" / "plans.py"),
        workload,
        "--ranks",
        str(ranks),
        "--steps",
        str(steps),
    ]
    done = subprocess.run(
        [*command, *words, *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(found: list[dict[str, Any]], meshes: list[str]) -> None:
    assert len(found) == len(meshes)
    for row in found:
        assert row["loss"] <= 1e-12, row
        assert row["gradient"] <= 1e-11, row
        assert row["planned_is_counted"], row
        assert row["counted"] or row["mesh"].count("=") == 1, row


def test_two_ranks_that_share_a_sample_train_as_one() -> None:
    """12^3 voxels end in 3^3: the parts differ."""
    meshes = ["spatial=2x1x1", "spatial=1x1x2"]
    check(rows("cosmoflow", 2, meshes, 3, (*COSMOFLOW, "hyperparameters.input_size=12")), meshes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "ranks", "meshes", "settings"),
    [
        (
            "cosmoflow",
            4,
            ["spatial=4x1x1", "spatial=2x1x2", "data=2,spatial=1x2x1"],
            ("hyperparameters.input_size=16",),
        ),
        (
            "cosmoflow",
            8,
            ["spatial=2x2x2", "spatial=1x4x2", "data=4,spatial=1x1x2"],
            ("hyperparameters.input_size=16",),
        ),
        ("cosmoflow", 8, ["spatial=2x2x2", "data=2,spatial=2x1x2"], ("hyperparameters.input_size=12",)),
        ("deepcam", 2, ["spatial=2x1", "spatial=1x2"], ()),
        ("deepcam", 4, ["spatial=2x2"], ()),
    ],
)
def test_every_split_trains_as_one(workload: str, ranks: int, meshes: list[str], settings: tuple[str, ...]) -> None:
    own = COSMOFLOW if workload == "cosmoflow" else DEEPCAM
    check(rows(workload, ranks, meshes, 20, (*own, *settings)), meshes)


@pytest.mark.long
def test_shards_sum_gradients_in_the_type_of_the_compression(tmp_path: Path) -> None:
    plan = (ROOT / "workloads" / "moe_lm" / "plans" / "sharded.yaml").read_text() + "compress: {kind: bf16}\n"
    (tmp_path / "half.yaml").write_text(plan)
    (row,) = rows("moe_lm", 2, ["shard=2"], 3, (), "--plan", str(tmp_path / "half.yaml"), code=1)
    assert row["planned_is_counted"], row
    assert row["counted"]["reduce_scatter_bytes"] == 2 * 115264  # 2 bytes for each parameter of the card
    assert 0 < row["loss"] < 1e-4  # rounded, not other gradients
