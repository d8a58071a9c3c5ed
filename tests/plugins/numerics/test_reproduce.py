"""One training step against float64: changes of the system are rounding, faults in drawn places are not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mlhpc.plugins.numerics.judge import FEWEST_RUNS
from mlhpc.plugins.numerics.reproduce import Reference, make_reference, read_reference, run_change, write_reference
from mlhpc.plugins.numerics.step import compute_errors, make_case, run_step, run_truth
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.launcher import Launch
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World
from tests.fixtures.cli import mlhpc

ABOUT = "cosmoflow smoke"


def open_reference(name: str, parts: int = 1) -> Reference:
    chosen = load_descriptor(name)
    workload = load_workload(chosen)(load_config(chosen, "smoke", ["instrumentation=false"]))
    batch = workload.example(2 * parts)
    assert batch is not None
    return make_reference(make_case(workload, World.create(Launch("none", 0, 1)), batch, parts=parts), FEWEST_RUNS)


@pytest.fixture(scope="module")
def cosmoflow() -> Reference:
    return open_reference("cosmoflow", 2)


@pytest.mark.parametrize(
    "name",
    [
        "as set",
        "other number of threads",
        "native convolutions",
        "denormals flushed",
        "other memory format",
        "recomputed",
    ],
)
def test_a_change_of_arithmetic_is_rounding(cosmoflow: Reference, name: str) -> None:
    found = run_change(cosmoflow, name)
    assert found.outcome == "rounding", found.render()
    assert found.tensors > 20


def test_a_drawn_product_in_fewer_bits_is_named(cosmoflow: Reference) -> None:
    modules = [name for name, each in cosmoflow.case.model.named_modules() if isinstance(each, nn.Conv3d | nn.Linear)]
    place = random.choice(modules)

    def shorten(model: nn.Module) -> None:
        model.get_submodule(place).register_forward_pre_hook(lambda module, inputs: inputs[0].bfloat16().float())

    found = cosmoflow.judge("short", run_step(cosmoflow.case, alter=shorten))
    assert (found.outcome, found.module, found.first.split()[0]) == ("not rounding", place, "output")


def test_a_gradient_of_one_part_that_is_stale_is_named(cosmoflow: Reference) -> None:
    name = random.choice([name for name, _ in cosmoflow.case.model.named_parameters()])
    seen: list[torch.Tensor] = []

    def keep_first(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient)
        return seen[0]

    found = cosmoflow.judge(
        "stale", run_step(cosmoflow.case, alter=lambda model: model.get_parameter(name).register_hook(keep_first))
    )
    assert (found.outcome, found.first, found.beyond) == ("not rounding", f"gradient {name}", 1)


def test_float64_draws_the_numbers_of_float32() -> None:
    """A dropout and a router's noise are the same in both, so errors are those of rounding."""
    reference = open_reference("swinv2_moe")
    errors = compute_errors(run_step(reference.case), run_truth(reference.case))
    assert max(errors.values()) < 1e-3
    assert run_change(reference, "other number of threads").outcome == "rounding"


def test_a_reference_judges_another_machine(cosmoflow: Reference, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_reference(path, cosmoflow, ABOUT)
    other = replace(cosmoflow.case, model=cosmoflow.case.workload.build_model(World.create(Launch("none", 0, 1))))
    again = read_reference(path, other, ABOUT)
    assert run_change(again, "other number of threads") == run_change(cosmoflow, "other number of threads")
    mirrored = replace(again.case, parts=tuple(part | {"x": part["x"].flip(1)} for part in again.case.parts))
    found = run_change(again, "as set", case=mirrored)
    assert (found.outcome, found.first) == ("not rounding", "data x")
    with pytest.raises(InputError, match="it is a reference of cosmoflow smoke"):
        read_reference(path, other, "cosmoflow mini")
    whole = path.read_bytes()
    for content in (b"PK", b"", whole[: len(whole) // 2], b"x" * 99, b'{"version": 1}'):
        path.write_bytes(content)
        with pytest.raises(
            InputError, match="npz: not a reference, or one of another model; `mlhpc numerics reproduce --r"
        ):
            read_reference(path, other, ABOUT)


def test_the_command_says_what_is_rounding_and_writes_it(tmp_path: Path) -> None:
    words = (
        "numerics",
        "reproduce",
        "cosmoflow",
        "--size",
        "smoke",
        "--runs",
        "20",
        "--change",
        "other number of threads",
    )
    done = mlhpc(*words, "--record", "a.npz", "-o", "a.json", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["other", "number", "of"]), done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["reproduced"][0]["outcome"] == "rounding"
    fewer = mlhpc(*words, "--against", "a.npz", "--set", "hyperparameters.base_learning_rate=0.02", cwd=tmp_path)
    assert fewer.returncode == 1
    assert "not rounding: first differs in `schedule`" in fewer.stdout
    unknown = mlhpc(*words, "--change", "two threads", cwd=tmp_path)
    assert (unknown.returncode, "unknown change" in unknown.stderr) == (2, True)


@pytest.mark.long
def test_a_compiled_model_with_experts_is_rounding(tmp_path: Path) -> None:
    words = ["numerics", "reproduce", "moe_lm", "--size", "smoke", "--runs", "20", "--change", "compiled"]
    # A process of its own: the compiler warns
    done = subprocess.run([sys.executable, "-m", "mlhpc", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compiled                 rounding: at most" in done.stdout
