"""Steps in the tier: files of the plan's sizes, through the cache of a run, and nothing is left."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mlhpc.plugins.offload import measure, tier
from mlhpc.suite.workload import ExpertLayer
from tests.fixtures.cli import mlhpc
from tests.fixtures.wings import needs_axes
from tests.plugins.offload.conftest import configure, in_files

LAYERS = [ExpertLayer(f"layer {number}", 3, parameters, 8.0) for number, parameters in enumerate((512, 1300, 2048))]


def test_steps_move_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write, moved = tier.FileTier.read, tier.FileTier.write, Counter[tuple[str, tier.Key]]()

    def count_read(self: tier.FileTier, key: tier.Key) -> tier.Entry:
        moved["read", key] += 1
        return read(self, key)

    def count_write(self: tier.FileTier, key: tier.Key, entry: tier.Entry) -> None:
        factor = 2 if key.kind == "states" else 1
        size = sum(tensor.numel() for tensor in entry.values()) / factor
        assert size == pytest.approx(LAYERS[key.layer].parameters, rel=0.02)
        moved["write", key] += 1
        write(self, key, entry)

    monkeypatch.setattr(tier.FileTier, "read", count_read)
    monkeypatch.setattr(tier.FileTier, "write", count_write)
    least = 11 * 2048 * 4 + 3 * 1024 * 4  # of the last layer
    config = configure("moe_lm", *in_files(tmp_path / "tier", cache=least))
    idle, computing = measure.measure_waits(config, LAYERS, 1e-4)
    assert len(idle) == len(computing) == measure.STEPS
    for step in (*idle, *computing):
        assert len(step.forward) == len(step.backward) == len(LAYERS)
        assert step.update > 0
    steps = measure.SKIPPED + 2 * measure.STEPS
    for layer in range(len(LAYERS)):
        for expert in range(3):
            for kind, least in (("weights", steps), ("states", steps), ("gradients", 0)):
                assert moved["write", tier.Key(layer, expert, kind)] >= least
    assert sum(count for (act, key), count in moved.items() if act == "read" and key.kind == "states") > steps
    assert not list((tmp_path / "tier").iterdir())


@needs_axes
def test_the_wait_of_a_plan_is_that_of_its_steps(tmp_path: Path) -> None:
    file = tmp_path / "ceilings.json"
    head = {"version": 1, "kind": "ceilings", "system": "x", "date": "2026-11-30", "ranks": 1, "nodes": 1}
    roofs = [("compute", "gemm", "FLOP/s"), ("storage_read", "/", "B/s"), ("storage_write", "/", "B/s")]
    each = [
        {"resource": resource, "name": name, "unit": unit, "value": 1e12, "n": 1, "mode": "cold", "dtype": "float32"}
        for resource, name, unit in roofs
    ]
    file.write_text(json.dumps(head | {"device": {"type": "cpu", "name": "x"}, "roofs": each}))
    sets = [f"hyperparameters.moe.{setting}" for setting in in_files(tmp_path / "tier", cache=30_000_000)]
    words = ["plan", "moe_lm", "--size", "smoke", "--mesh", "data=1", "--ceilings", file, "--offload", "file"]
    words += ["--measure", "--format", "json"]
    words += [word for each in ("precision=float32", *sets) for word in ("--set", each)]
    done = mlhpc(*map(str, words))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["offload"]
    assert found["wait_s"] == pytest.approx(sum(layer["wait_s"] for layer in found["layers"]) + found["update_s"])
    assert found["rates"]["load"]["value"] != 1e12
    assert "steps without computing" in found["rates"]["source"]
    assert not list((tmp_path / "tier").iterdir())
