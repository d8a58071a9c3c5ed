"""Batches, normalisation, and logged hyperparameters of DeepCAM."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.manifest import read_manifest, write_manifest
from mlhpc.suite.data.shards import ShardReader, count_read_bytes
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam import DESCRIPTOR
from mlhpc.workloads.deepcam import generate as generator
from mlhpc.workloads.deepcam.workload import DeepCam


def test_fields_arrive_scaled_to_the_unit_interval(tiny_data: Path, tiny_config: Callable[..., RunConfig]) -> None:
    data = DeepCam(tiny_config()).dataset("train", tiny_data)
    batch = data.load(range(12), seed=0, epoch=1)
    raw = ShardReader(tiny_data, "train").read(range(12))
    low, high = raw["x"].min(axis=(0, 1, 2)), raw["x"].max(axis=(0, 1, 2))
    np.testing.assert_allclose(batch["x"].numpy(), (raw["x"] - low) / (high - low), atol=1e-6)
    assert batch["x"].amin(dim=(0, 1, 2)).numpy() == pytest.approx(np.zeros(16), abs=1e-6)
    assert batch["x"].amax(dim=(0, 1, 2)).numpy() == pytest.approx(np.ones(16), abs=1e-6)
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.float32, torch.uint8)
    np.testing.assert_array_equal(batch["y"].numpy(), raw["y"])


def test_a_sample_is_the_same_in_any_batch_and_epoch(tiny_data: Path, tiny_config: Callable[..., RunConfig]) -> None:
    data = DeepCam(tiny_config()).dataset("train", tiny_data)
    assert torch.equal(data.load([3], seed=1, epoch=2)["x"][0], data.load([7, 3, 0], seed=5, epoch=9)["x"][1])


def test_a_slab_is_cut_out_of_the_whole_sample(tiny_data: Path, tiny_config: Callable[..., RunConfig]) -> None:
    data = DeepCam(tiny_config()).dataset("train", tiny_data)
    whole, slab = data.load([3, 0], seed=1, epoch=2), ((4, 16), (0, 9))
    before = count_read_bytes()
    part = data.load_slab([3, 0], {"x": (*slab, (0, 16)), "y": slab}, seed=1, epoch=2)
    assert count_read_bytes() - before == part["x"].nbytes + part["y"].nbytes
    for name in ("x", "y"):
        assert torch.equal(part[name], whole[name][:, 4:16, 0:9])
    labels_whole = data.load_slab([3, 0], {"x": (*slab, (0, 16))}, seed=1, epoch=2)
    assert torch.equal(labels_whole["x"], part["x"])
    assert torch.equal(labels_whole["y"], whole["y"])


def test_validation_is_scaled_by_the_training_split(tiny_data: Path, tiny_config: Callable[..., RunConfig]) -> None:
    workload = DeepCam(tiny_config())
    statistics = read_manifest(tiny_data).attributes["statistics"]
    raw = ShardReader(tiny_data, "validation").read([1])["x"]
    low, high = np.array(statistics["minval"]), np.array(statistics["maxval"])
    found = workload.dataset("validation", tiny_data).load([1], seed=0, epoch=0)["x"].numpy()
    np.testing.assert_allclose(found, (raw - low) / (high - low), atol=1e-5)


def test_data_that_do_not_fit_the_config_are_refused(tiny_data: Path, tiny_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(InputError, match="shard_00000.h5: dataset .* expected"):
        DeepCam(load_config(DESCRIPTOR, "smoke")).dataset("train", tiny_data)
    manifest = read_manifest(tiny_data)
    write_manifest(tiny_data, structs.replace(manifest, attributes={}))
    with pytest.raises(InputError, match="no attribute 'statistics'"):
        DeepCam(tiny_config()).dataset("train", tiny_data)
    flat = {"count": 1} | {name: [1.0] * 16 for name in ("mean", "sqmean", "minval", "maxval")}
    write_manifest(tiny_data, structs.replace(manifest, attributes={"statistics": flat}))
    with pytest.raises(InputError, match="channel TMQ has minval 1 and maxval 1"):
        DeepCam(tiny_config()).dataset("train", tiny_data)


OFFICIAL = {  # of the closed division, rules 1.3
    *("global_batch_size", "batchnorm_group_size", "gradient_accumulation_frequency"),
    *("opt_name", "opt_lr", "opt_betas", "opt_eps", "opt_weight_decay"),
    *("scheduler_type", "scheduler_lr_warmup_steps", "scheduler_lr_warmup_factor"),
}
LAMB = {"opt_bias_correction", "opt_grad_averaging", "opt_max_grad_norm"}


@pytest.mark.parametrize("size", list(DESCRIPTOR.card().sizes))
def test_logged_hyperparameters_are_the_official_keys(size: str) -> None:
    logged = DeepCam(load_config(DESCRIPTOR, size)).hyperparameters()
    schedule = {"scheduler_milestones", "scheduler_decay_rate"}
    if logged["scheduler_type"] == "cosine_annealing":
        schedule = {"scheduler_t_max", "scheduler_eta_min"}
    expected = OFFICIAL | schedule | (LAMB if size == "full" else set())
    assert set(logged) == expected
    assert logged["opt_eps"] == 1e-6
    assert len(logged["opt_betas"]) == 2
    assert set(logged) <= set(DESCRIPTOR.card().size(size).constraints)


def test_full_size_is_the_reference_convergence_point_at_batch_128() -> None:
    logged = DeepCam(load_config(DESCRIPTOR, "full")).hyperparameters()
    point = {"global_batch_size": 128, "opt_name": "LAMB", "opt_lr": 0.00155, "opt_weight_decay": 0.01}
    point |= {"opt_bias_correction": True, "opt_grad_averaging": True, "opt_max_grad_norm": 1.0}
    point |= {"scheduler_type": "cosine_annealing", "scheduler_t_max": 9000, "scheduler_eta_min": 0.0}
    assert {key: logged[key] for key in point} == point


def test_a_multistep_schedule_logs_its_own_keys() -> None:
    words = ["schedule=multistep", "t_max=null", "milestones=[5, 9]", "decay_rate=0.5", "optimizer=Adam"]
    run = load_config(DESCRIPTOR, "smoke", [f"hyperparameters.{word}" for word in words])
    logged = DeepCam(run).hyperparameters()
    assert logged["scheduler_milestones"] == [5, 9]
    assert set(logged) == OFFICIAL | {"scheduler_milestones", "scheduler_decay_rate"}


@pytest.fixture(scope="module")
def learnable(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """96 + 32 snapshots of the smoke size: enough to see that a neighbourhood says more than a pixel."""
    root = tmp_path_factory.mktemp("learnable") / "d"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(generator.SIZES, "smoke", generator.DataSize(generator.SIZES["smoke"].domain, 96, 32, 32))
        generator.generate(root, "smoke", seed=0, world=world)
    return root


@pytest.mark.long
def test_a_small_network_learns_from_fields_and_not_from_chance(learnable: Path, world: World) -> None:
    """Labels that belong to other snapshots cannot be learnt: the fields carry the information, nothing else does."""
    steps = 84
    words = ("middle_blocks=1", "learning_rate=0.004", "warmup_steps=12", f"t_max={steps - 12}")
    workload = DeepCam(load_config(DESCRIPTOR, "smoke", [f"hyperparameters.{word}" for word in words]))
    batch = workload.dataset("train", learnable).load(range(96), seed=0, epoch=1)
    validation = workload.dataset("validation", learnable).load(range(32), seed=0, epoch=0)
    found = {}
    for kind in ("true", "shuffled"):
        torch.manual_seed(1)
        model = workload.build_model(world)
        optimization = workload.build_optimizer(model, 12)
        order = np.random.default_rng(0).permutation(96) if kind == "shuffled" else np.arange(96)
        for step in range(steps):
            chosen = np.arange(8) + 8 * (step % 12)
            for group in optimization.optimizer.param_groups:
                group["lr"] = optimization.learning_rate(step, 1)
            optimization.optimizer.zero_grad()
            workload.loss(model, {"x": batch["x"][chosen], "y": batch["y"][order[chosen]]}).backward()
            optimization.optimizer.step()
        model.eval()
        with torch.no_grad():
            stats = workload.eval_stats(model, validation)
        found[kind] = workload.metrics({name: value.item() for name, value in stats.items()})["iou_micro"]
    # Background everywhere: 0.32. Weights of seven seeds reach 0.47 to 0.78, these 0.61; torch's build moves that by 0.04
    assert found["true"] > 0.45
    assert found["shuffled"] < 0.38
