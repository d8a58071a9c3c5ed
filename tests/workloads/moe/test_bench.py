"""`mlhpc moe`: what it prints adds up, and given loads are what they say."""

import json
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from click.testing import CliRunner

from mlhpc.suite.errors import InputError
from mlhpc.workloads.commands.moe import moe
from mlhpc.workloads.moe.bench import Shape, choose_fixed_experts, list_grid_sizes
from mlhpc.workloads.moe.config import Backend, MoEConfig
from tests.fixtures.cli import mlhpc
from tests.fixtures.warm import warm_python

SMALL = ["--tokens", "64", "--width", "16", "--hidden", "32", "--experts", "4", "--repeats", "2"]


def test_layer_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = CliRunner().invoke(moe, [*SMALL, "--dispatch", "capacity", "--capacity", "1", "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "ratio" in done.output
    result = json.loads(path.read_text())
    kept = result["useful_tflops"] / result["executed_tflops"]
    assert kept == pytest.approx(1 - result["load"]["padding_waste"])
    assert result["load"]["drop_rate"] == pytest.approx(1 - kept)  # capacity 1: as many places as assignments
    assert result["phases_s"]["experts"] > 0
    assert result["phases_s"]["a2a_dispatch"] == 0
    ratios = [dense_s / layer_s for layer_s, dense_s in result["pairs_s"]]
    assert (len(ratios), result["ratio_low"], result["ratio_high"]) == (2, min(ratios), max(ratios))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--experts", "4", "--top-k", "5"), "top_k is 5, expected at most the number of experts, 4"),
        (("--capacity", "1.0"), "capacity_factor belongs to dispatch capacity or einsum; dropless has no capacity"),
        (
            ("--experts", "4", "--dispatch", "capacity", "--capacity", "5"),
            "capacity_factor 5 is more than the 4 experts",
        ),
    ],
)
def test_the_layer_obeys_the_rules_that_a_run_has(words: tuple[str, ...], expected: str) -> None:
    done = CliRunner().invoke(moe, [*words])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(expected)


@pytest.mark.parametrize("number", ["nan", "inf", "1e300", "0", "-1"])
def test_the_largest_message_is_a_size(number: str) -> None:
    done = CliRunner().invoke(moe, ["--sweep-network", "--ranks", "2", "--up-to-mib", number])
    assert done.exit_code == 2
    assert "--up-to-mib" in done.output


def test_too_little_memory_is_no_defect() -> None:
    done = mlhpc("moe", "--tokens", "100000000000")
    assert (done.returncode, "not enough memory here" in done.stderr) == (1, True), done.stderr


def test_a_sweep_needs_ranks() -> None:
    done = CliRunner().invoke(moe, ["--sweep-network"])
    assert "is on 1 rank, expected several" in str(done.exception)


def sweep(path: Path, ranks: int, per_node: int) -> dict[str, Any]:
    """The document of a sweep of the network by ranks that the command starts itself."""
    words = ["--experts", "2", "--top-k", "1", "--sweep-network", "--ranks-per-node", str(per_node)]
    words += ["--up-to-mib", "0.002", "-o", str(path)]
    done = subprocess.run(
        [*warm_python(), "-m", "mlhpc", "moe", "--ranks", str(ranks), *SMALL, *words],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"layer on {ranks} ranks: fastest r" in done.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_it_starts_its_own_ranks_and_sweeps_a_grid_of_two_nodes(tmp_path: Path) -> None:
    (grid,) = sweep(tmp_path / "sweep.json", 2, 1)["grids"]
    assert (grid["ranks"], grid["ranks_per_node"]) == (2, 1)
    assert {row["bytes"] for row in grid["all_to_all"]} == {1024, 2048}
    assert {(run["r"], run["degree"]) for run in grid["layer"]["runs"]} == {
        (0, 1),
        *((1, degree) for degree in (1, 2, 4)),
    }


@pytest.mark.long
def test_it_sweeps_ever_larger_grids(tmp_path: Path) -> None:
    result = sweep(tmp_path / "sweep.json", 4, 2)
    assert [(grid["ranks"], grid["ranks_per_node"]) for grid in result["grids"]] == [(2, 2), (4, 2)]
    inside, across = result["grids"]
    assert {row["algorithm"] for row in inside["all_to_all"]} == {"linear"}  # one node has no second level
    assert {row["bytes"] for row in across["all_to_all"]} == {1024, 2048}
    assert {(run["r"], run["degree"], run["algorithm"]) for run in across["layer"]["runs"]} == {
        (0, 1, "linear"),
        *((r, degree, algorithm) for r in (1, 2) for degree in (1, 2, 4) for algorithm in ("linear", "2dh")),
    }


@pytest.mark.parametrize(
    ("ranks", "per_node", "sizes"),
    [(4, 4, [2, 4]), (6, 2, [2, 4, 6]), (16, 4, [2, 4, 8, 16]), (12, 3, [2, 3, 6, 12]), (2, 1, [2])],
)
def test_grids(ranks: int, per_node: int, sizes: list[int]) -> None:
    assert list_grid_sizes(ranks, per_node) == sizes


def test_given_loads() -> None:
    config = MoEConfig(experts=64, top_k=2, hidden=8)
    for load, least, most in (("uniform", 1.0, 1.0), ("skewed", 20.0, 23.0)):
        chosen = choose_fixed_experts(Shape(4096, 8, config, load), torch.Generator().manual_seed(0))
        counts = torch.bincount(chosen.flatten(), minlength=64)
        assert least <= float(counts.max()) / (4096 * 2 / 64) <= most
        assert (chosen[:, 0] != chosen[:, 1]).all()


def test_every_backend_of_the_configuration_is_a_value_of_the_option() -> None:
    option = next(each for each in moe.params if each.name == "backend")
    assert list(option.type.choices) == list(get_args(Backend))  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels in Triton run on a GPU")
def test_triton_without_a_gpu_is_refused_with_the_ways_that_work() -> None:
    shape = ("--tokens", "8", "--width", "8", "--hidden", "8", "--experts", "2", "--device", "cpu")
    refused = CliRunner().invoke(moe, ["--backend", "triton", *shape])
    assert isinstance(refused.exception, InputError)
    assert "backend triton: " in str(refused.exception)
    assert str(refused.exception).endswith("choose auto, grouped_mm or loop")
