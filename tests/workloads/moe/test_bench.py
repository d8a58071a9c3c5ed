"""`mlhpc moe-bench`: what it prints adds up, and given loads are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from workloads.moe.bench import Shape, given_experts
from workloads.moe.command import moe_bench
from workloads.moe.config import MoEConfig

SMALL = ["--tokens", "64", "--width", "16", "--hidden", "32", "--experts", "4", "--repeats", "2"]


def test_layer_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = CliRunner().invoke(moe_bench, [*SMALL, "--mode", "capacity", "--capacity", "1", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "ratio" in done.output
    result = json.loads(path.read_text())
    kept = result["useful_tflops"] / result["executed_tflops"]
    assert kept == pytest.approx(1 - result["load"]["padding_waste"])
    assert result["load"]["drop_rate"] == pytest.approx(1 - kept)  # capacity 1: as many places as assignments
    assert result["phases_s"]["experts"] > 0
    assert result["phases_s"]["a2a_dispatch"] == 0


def test_a_sweep_needs_ranks() -> None:
    done = CliRunner().invoke(moe_bench, ["--sweep-network"])
    assert "start several ranks" in str(done.exception)


def test_given_loads() -> None:
    config = MoEConfig(experts=64, top_k=2, hidden=8)
    for load, least, most in (("uniform", 1.0, 1.0), ("skewed", 20.0, 23.0)):
        chosen = given_experts(Shape(4096, 8, config, load), torch.Generator().manual_seed(0))
        counts = torch.bincount(chosen.flatten(), minlength=64)
        assert least <= float(counts.max()) / (4096 * 2 / 64) <= most
        assert (chosen[:, 0] != chosen[:, 1]).all()
