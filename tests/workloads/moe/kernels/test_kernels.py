"""The kernels compute what dense experts do, in Triton's interpreter; compiled for GPUs that are elsewhere they fit without spills.

Triton is no part of the test environment (190 MB, 1 GB unpacked): `pip install 'mlhpc[kernels]'`. On a machine with a GPU the same
worker runs there.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.kernel_traffic import Sizes
from mlhpc.suite.errors import InputError
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.kernels.blocks import FLOAT_BLOCKS, HALF_BLOCKS
from mlhpc.workloads.moe.layer import MoELayer
from tests.test_imports import imports

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (mlhpc[kernels])")


def run(worker: Path, *arguments: str, timeout_s: int, **environment: str) -> str:
    """What a worker prints, in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [sys.executable, str(worker), *arguments], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def exact_cases(amount: int, layers: int, timeout_s: int) -> int:
    """How many drawn cases agreed."""
    printed = run(HERE / "exact_worker.py", str(amount), "--layers", str(layers), timeout_s=timeout_s)
    print(printed)  # pytest -rP shows it
    return int(re.findall(r"(\d+) cases exact", printed)[0])


@with_triton
def test_drawn_cases_equal_dense_experts() -> None:
    assert exact_cases(14, layers=1, timeout_s=290) == 14


@with_triton
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_hundreds_of_drawn_cases_equal_dense_experts() -> None:
    assert exact_cases(600, layers=4, timeout_s=3500) == 600


@with_triton
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_layers_on_one_and_more_ranks_equal_the_dense_reference() -> None:
    """Every execution of `exact_worker.py`, that of the kernels among the back ends."""
    worker = HERE.parent / "exact_worker.py"
    printed = run(worker, "1,2,4", "quick", timeout_s=3500, TRITON_INTERPRET="1")
    print(printed)
    assert printed.count("triton") == 3


@with_triton
def test_the_race_of_back_ends_lets_the_kernels_gather_where_a_layer_does() -> None:
    printed = run(HERE / "race_worker.py", timeout_s=290).splitlines()
    assert printed == ["tokens: gathered True", "other ranks: gathered False", "capacity: gathered False"]


@with_triton
@pytest.mark.long
def test_the_kernels_move_the_bytes_of_the_closed_form() -> None:
    assert run(HERE / "traffic_worker.py", timeout_s=290).count("as the closed form") == 3


def test_fusing_moves_fewer_bytes_the_more_the_narrower_the_experts() -> None:
    """What SonicMoE is about: the share of what fusing saves grows as experts become narrow."""
    ratios = []
    for hidden in (14336, 4096, 1024, 256):
        sizes = Sizes(32768, 8 * 32768, 64, 2048, hidden, "swiglu")
        assert sizes.fused().forward < sizes.separate().forward
        ratios.append(sizes.separate().both / sizes.fused().both)
    assert ratios == sorted(ratios)
    assert ratios[0] > 1.1
    assert ratios[-1] > 1.8


@with_triton
def test_programs_for_other_machines_fit_and_spill_nothing() -> None:
    printed = run(HERE / "ahead_worker.py", "quick", timeout_s=290)
    print(printed)
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} <= set(printed.split())


@with_triton
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_program_for_other_machines() -> None:
    print(run(HERE / "ahead_worker.py", "long", timeout_s=3500))


def test_a_machine_that_cannot_run_the_kernels_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layer = MoELayer(8, MoEConfig(experts=4, hidden=8, backend="triton"))
    wanted = "it is for GPUs, not for cpu" if find_spec("triton") else "triton is not installed"
    with pytest.raises(InputError, match=f"backend triton: {wanted}.*choose auto, grouped_mm or loop"):
        layer(torch.randn(3, 8))


def test_only_the_kernels_import_triton_when_they_are_imported() -> None:
    """A layer on a CPU once would have loaded it, or failed where it is not installed."""
    allowed = {"products", "gradients", "ahead"}
    forbidden = {"triton", *(f"mlhpc.workloads.moe.kernels.{name}" for name in allowed)}
    for path in (ROOT / "workloads").rglob("*.py"):
        named = set(imports(path, top_level_only=True))
        loads = any(name == each or name.startswith(f"{each}.") for name in named for each in forbidden)
        assert not loads or (path.parent.name == "kernels" and path.stem in allowed), path


def test_every_kernel_has_blocks_that_every_gpu_can_take() -> None:
    """What is taken without measuring needs no copy engine."""
    for listed in (*HALF_BLOCKS.values(), *FLOAT_BLOCKS.values()):
        assert not listed[0].described
        assert len(set(listed)) == len(listed)
