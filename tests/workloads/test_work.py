"""Every workload's closed forms against what is counted: executed FLOPs of a training step, bytes of its gradients."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.performance.card_counts import count_size
from mlhpc.suite.training.counts.flops import count
from mlhpc.suite.workload import Work, Workload, load_workload
from tests.workloads.open_catalyst.conftest import random_structure
from tests.workloads.open_catalyst.test_model import batch as graph_of
from tests.workloads.tiny import TINY

Batch = dict[str, torch.Tensor]
LOOP = ("hyperparameters.moe.backend=loop",)  # plain products: other back ends round the rows of an expert up


def cosmoflow(config: RunConfig) -> Batch:
    side = config.hyperparameters.input_size
    return {"x": torch.rand(2, side, side, side, 4), "y": torch.rand(2, 4)}


def deepcam(config: RunConfig) -> Batch:
    own = config.hyperparameters
    labels = torch.zeros(2, own.height, own.width, dtype=torch.uint8)
    return {"x": torch.rand(2, own.height, own.width, 16), "y": labels}


def moe_lm(config: RunConfig) -> Batch:
    return {"bytes": torch.randint(0, 256, (2, config.hyperparameters.context + 1), dtype=torch.uint8)}


BATCHES: dict[str, tuple[Callable[[RunConfig], Batch], tuple[str, ...]]] = {
    "cosmoflow": (cosmoflow, ()),
    "deepcam": (deepcam, ()),
    "moe_lm": (moe_lm, LOOP),
}


def step_of(name: str, size: str, *overrides: str) -> tuple[float, Work]:
    """FLOPs of a training step on two samples, per sample, and what the closed form says."""
    batch_of, always = BATCHES[name]
    config = load_config(
        load_descriptor(name), size, ("global_batch_size=2", "instrumentation=false", *always, *overrides)
    )
    workload = load_workload(load_descriptor(name))(config)
    model, batch = workload.build_model(_Alone()), batch_of(config)  # type: ignore[arg-type]
    counted = count(lambda: workload.loss(model, batch).backward())
    assert counted.uncovered == {}
    return counted.flops / 2, workload.work()


class _Alone:
    size, rank = 1, 0


def test_the_forward_pass_of_moe_lm_executes_both_halves_of_its_attention() -> None:
    config = load_config(load_descriptor("moe_lm"), "smoke", ("global_batch_size=2", *LOOP))
    workload: Workload = load_workload(load_descriptor("moe_lm"))(config)
    model, work = workload.build_model(_Alone()), workload.work()  # type: ignore[arg-type]
    with torch.no_grad():
        counted = count(lambda: workload.loss(model, moe_lm(config)), model)
    assert work.forward_flops + work.forward_extra_flops == pytest.approx(counted.by_module[""] / 2, rel=1e-3)
    assert work.forward_extra_flops > 0.05 * work.forward_flops


@pytest.mark.parametrize(
    ("name", "size", "overrides"),
    [
        ("cosmoflow", "smoke", ()),
        ("cosmoflow", "mini", ()),
        ("deepcam", "smoke", ()),
        ("moe_lm", "smoke", ()),
        ("moe_lm", "mini", ()),
        ("moe_lm", "smoke", ("hyperparameters.dense=true",)),
    ],
)
def test_executed_flops_are_those_counted(name: str, size: str, overrides: tuple[str, ...]) -> None:
    flops, work = step_of(name, size, *overrides)
    assert work.executed_flops == pytest.approx(flops, rel=1e-3)
    assert work.model_flops <= work.executed_flops


def test_open_catalyst_executes_what_is_counted() -> None:
    """On structures whose counts are the config's: edges and triplets differ from sample to sample."""
    graph = {k: v.float() if v.is_floating_point() else v for k, v in graph_of(*map(random_structure, (0, 1))).items()}
    means = {"mean_atoms": 7, "mean_edges": len(graph["source"]) / 2, "mean_triplets": len(graph["into"]) / 2}
    sets = [f"hyperparameters.{name}={value}" for name, value in means.items()]
    config = load_config(load_descriptor("open_catalyst"), "smoke", ("global_batch_size=2", *sets))
    workload = load_workload(load_descriptor("open_catalyst"))(config)
    model = workload.build_model(_Alone())  # type: ignore[arg-type]
    counted = count(lambda: model(graph)[1].abs().sum().backward())
    assert counted.uncovered == {}
    assert workload.work().executed_flops == pytest.approx(counted.flops / 2, rel=1e-3)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", sorted(load_descriptors()))
def test_every_size_says_all_of_its_work_and_reduces_its_gradients(name: str) -> None:
    sizes = load_descriptor(name).card().sizes
    for size in sizes:
        config = load_config(load_descriptor(name), size)
        workload: Workload = load_workload(load_descriptor(name))(config)
        work = workload.work()
        assert 0 < work.forward_flops < work.model_flops
        assert sizes[size].forward_flops_per_sample == pytest.approx(work.forward_flops)
        assert sizes[size].training_flops_per_sample == pytest.approx(work.model_flops)
        assert 0 < work.forward_flops + work.forward_extra_flops < work.executed_flops
        assert 0 < work.forward_bytes < work.algorithmic_bytes
        assert 0 < work.optimizer_bytes_per_step / config.global_batch_size < work.algorithmic_bytes
        assert work.optimizer_flops_per_step > 0
        with torch.device("meta"):
            model = workload.build_model(_Alone())  # type: ignore[arg-type]
        sharded = sum(parameter.numel() for parameter in _experts(model)) if work.all_to_all_bytes else 0
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert sizes[size].model_parameters == parameters
        assert work.all_reduce_bytes_per_step == 4 * (parameters - sharded)


def _experts(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".experts." in name]


@pytest.mark.parametrize(("templates", "checkpointing"), [(0, False), (2, False), (0, True)])
def test_openfold_executes_what_is_counted(
    made_once: Callable[[str], Path], templates: int, checkpointing: bool
) -> None:
    """One iteration: the number of recycles is drawn per sample. Recomputed blocks leave out what nothing needs."""
    checkpointed = str(checkpointing).lower()
    sets = (
        "init_checkpoint=null",
        "num_recycling_iters=0",
        f"max_templates={templates}",
        f"checkpointing={checkpointed}",
    )
    overrides = ["global_batch_size=2", *(f"hyperparameters.{text}" for text in sets)]
    config = load_config(load_descriptor("openfold"), "smoke", overrides)
    workload = load_workload(load_descriptor("openfold"))(config)
    model = workload.build_model(_Alone())  # type: ignore[arg-type]
    batch: Any = workload.dataset("train", made_once("openfold")).load([0, 1], seed=0, epoch=1)
    counted = count(lambda: workload.loss(model, batch).backward(), model)
    assert counted.uncovered == {}
    work = workload.work()
    assert work.executed_flops == pytest.approx(counted.flops / 2, rel=0.01 if checkpointing else 1e-3)
    if not checkpointing:  # the model's are the network's, without losses
        executed = work.forward_flops + work.forward_extra_flops
        assert executed == pytest.approx(counted.by_module[""] / 2, rel=1e-3)


OF_COUNT = {"openfold": ["hyperparameters.num_recycling_iters=0"], "swinv2_moe": LOOP}


@pytest.mark.parametrize("name", ["cosmoflow", "open_catalyst", "openfold", "swinv2_moe"])
def test_a_card_s_count_is_compared_with_the_closed_form_of_the_samples_that_were_counted(
    name: str, made_once: Callable[[str], Path]
) -> None:
    """OpenCatalyst's first samples are not of mean size; SwinV2-MoE computes position biases once per batch, of 8 here, not 20."""
    data = made_once(name)
    overrides = [*TINY[name].overrides(read_manifest(data).attributes), *OF_COUNT.get(name, ())]
    counts = count_size(load_descriptor(name), load_config(load_descriptor(name), "smoke", overrides), data)
    form, network = counts.counted_form, counts.forward_flops_per_sample
    assert counts.uncovered == ()
    assert counts.training_flops_per_sample == pytest.approx(form.executed_flops, rel=1e-3)
    assert network == pytest.approx(form.forward_flops + form.forward_extra_flops, rel=1e-3)
    assert set(counts.means) == ({"mean_atoms", "mean_edges", "mean_triplets"} if name == "open_catalyst" else set())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("moe_lm") / "data"
    words = ("data", "generate", "moe_lm", "--size", "smoke", "-o", str(root))
    subprocess.run([sys.executable, "-m", "mlhpc", *words], check=True, capture_output=True)
    return root


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "moe"),
    [
        (2, ()),
        (2, ("dispatch=capacity", "capacity_factor=1.3", "overlap_degree=2")),  # 332 rows of 2 * 512 / 4, aligned
        (4, ("dispatch=capacity", "capacity_factor=0.7", "all_to_all=2dh", "ranks_per_node=2")),  # two hops, drops
    ],
)
def test_ranks_communicate_what_the_closed_form_says(
    ranks: int, moe: tuple[str, ...], tmp_path: Path, text: Path
) -> None:
    """Experts spread over ranks: every byte the run counts, but for the counts of rows that go before the rows."""
    run = tmp_path / "run"
    settings = [f"data={text}", "max_epochs=1"]
    settings += [f"hyperparameters.moe.{item}" for item in ("expert_parallel=true", *moe)]
    words = ["run", "moe_lm", "--size", "smoke", "--ranks", str(ranks), "-o", str(run)]
    words += [word for setting in settings for word in ("--set", setting)]
    subprocess.run([sys.executable, "-m", "mlhpc", *words], capture_output=True, timeout=300)
    events = read_events(run / "result_0.txt").events
    by_key = {event.key: event for event in events}
    work, counted = by_key["work_per_sample"].value, by_key["rank_stats"]
    steps, samples = counted.metadata["steps"], by_key["global_batch_size"].value / ranks
    assert counted.value["all_reduce_bytes"]["mean"] / steps == work["all_reduce_bytes_per_step"]
    assert counted.value["all_to_all_bytes"]["mean"] / steps == pytest.approx(
        work["all_to_all_bytes"] * samples, rel=1e-3
    )
    assert counted.value["loader_bytes"]["mean"] / steps == pytest.approx(work["sample_bytes"] * samples, rel=1e-2)
