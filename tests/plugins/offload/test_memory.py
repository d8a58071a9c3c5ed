"""A model four times as large as the memory of a control group: it is killed there without offload, and ends with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlhpc.suite.world import World
from mlhpc.workloads.moe_lm import generate
from tests.plugins.offload.conftest import in_files

ROOT = Path(__file__).resolve().parents[3]
LIMIT, CACHE = 660_000_000, 110_000_000
LAYERS, EXPERTS, WIDTH, HIDDEN = 20, 128, 128, 256
STATES = 16 * LAYERS * EXPERTS * 2 * WIDTH * HIDDEN  # weights, gradients and two moments in float32


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1 below this process's own, with a limit of memory, page cache included."""
    own = re.search(r"^\d+:memory:(\S+)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    if own is None:
        pytest.skip("no control group of version 1 for memory")
    folder = Path(f"/sys/fs/cgroup/memory{own[1]}") / f"offload_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
        (folder / "memory.memsw.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.long
def test_a_model_of_four_times_the_memory_ends_with_offload_alone(
    group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert STATES > 4 * LIMIT
    rows = replace(generate.SIZES["smoke"], train_rows=16, validation_rows=16)
    monkeypatch.setitem(generate.SIZES, "smoke", rows)
    generate.generate(tmp_path / "data", "smoke", seed=1, world=World.create(None))
    model = {
        "layers": LAYERS, "width": WIDTH, "moe_every": 1, "moe.experts": EXPERTS, "moe.hidden": HIDDEN, "moe.top_k": 1,
        "moe.backend": "loop",
    }  # fmt: skip
    sets = [f"hyperparameters.{name}={value}" for name, value in model.items()]
    sets += [f"data={tmp_path / 'data'}", "max_epochs=1", "global_batch_size=8", "precision=float32"]
    sets += ["submission.division=open"]

    def run(name: str, *more: str) -> tuple[str, str]:
        words = [word for each in (*sets, *more) for word in ("--set", each)]
        command = [
            sys.executable,
            "-m",
            "mlhpc",
            "run",
            "moe_lm",
            "--size",
            "smoke",
            "--runs",
            "1",
            "-o",
            tmp_path / name,
        ]
        text = 'echo $$ > "$0"; exec "$@"'
        done = subprocess.run(
            ["sh", "-c", text, group / "cgroup.procs", *map(str, command), "--ranks", "1", *words],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800, check=False,
        )  # fmt: skip
        log = tmp_path / name / "result_0.txt"
        return done.stdout + done.stderr, log.read_text() if log.exists() else ""

    said, log = run("without")
    assert "signal 9" in said
    assert "run_stop" not in log
    said, log = run("with", *(f"hyperparameters.moe.{each}" for each in in_files(tmp_path / "tier", CACHE)))
    assert "target not reached in 1 epochs" in log, said
    peak = max(map(float, re.findall(r'"peak_bytes": ([\d.]+)', log)))
    assert 0 < peak <= CACHE
    assert not list((tmp_path / "tier").iterdir())
