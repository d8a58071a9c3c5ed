"""However an MoE layer is executed, it computes what dense float64 FFNs on every token give, drops included."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.warm import warm_python
from tests.fixtures.wings import needs_axes

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("exact_worker.py")


def run(worker: Path, *arguments: str, timeout_s: int) -> str:
    """What a worker prints."""
    done = subprocess.run(
        [*warm_python(), "-W", "error", str(worker), *arguments], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_worker(ranks: str, amount: str, timeout_s: int) -> list[int]:
    """For each number of ranks how many cases agreed."""
    printed = run(WORKER, ranks, amount, timeout_s=timeout_s)
    print(printed)  # pytest -rP shows it
    return [int(number) for number in re.findall(r"(\d+) cases", printed)]


def test_every_mode_equals_the_dense_reference() -> None:
    """Four ranks: with the full matrix, in `make test-long`."""
    counts = run_worker("1,2", "quick", 250)
    assert len(counts) == 2
    assert all(found >= wanted for found, wanted in zip(counts, (120, 140), strict=True)), counts


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "at_least"), [(1, 1960), (2, 3590), (4, 5860), (6, 8130)])
def test_the_full_matrix_equals_the_dense_reference(ranks: int, at_least: int) -> None:
    (cases,) = run_worker(str(ranks), "long", 3500)
    assert cases >= at_least


def test_losses_and_metric_do_not_depend_on_how_experts_lie_on_ranks() -> None:
    """One rank, data parallel and expert parallel in every form: parallel_worker.py compares them."""
    printed = run(WORKER.with_name("parallel_worker.py"), "moe_lm,swinv2_moe", "2", timeout_s=200)
    assert printed.count("moe_lm has the same losses") == printed.count("swinv2_moe has the same losses") == 5


@pytest.mark.long
def test_experts_over_some_ranks_train_as_experts_on_all() -> None:
    """Two copies of a mesh of two ranks; a mesh of all four is what it was to the last bit: copies_worker.py."""
    printed = run(WORKER.with_name("copies_worker.py"), timeout_s=200)
    assert printed.count("is the same with experts over two of four ranks") == 7


@needs_axes
@pytest.mark.long
def test_experts_over_groups_that_divide_products_train_as_one_rank() -> None:
    """Losses, metric, counts, checkpoints that other meshes and one rank continue: divided_worker.py."""
    printed = run(WORKER.with_name("divided_worker.py"), "quick", timeout_s=200)
    assert printed.count("is the same with experts over two groups of two ranks") == 2
    assert "blocks that are computed again give the same bits" in printed


@needs_axes
@pytest.mark.long
def test_experts_over_groups_train_as_one_rank_in_every_form() -> None:
    printed = run(WORKER.with_name("divided_worker.py"), "long", timeout_s=300)
    assert printed.count("is the same with experts over two groups of two ranks") == 5


@pytest.mark.long
def test_switching_phases_tuning_and_evaluation_over_ranks() -> None:
    """The facts are in layer_worker.py."""
    printed = run(WORKER.with_name("layer_worker.py"), "4", timeout_s=200)
    assert printed.count("ok ") == 12
