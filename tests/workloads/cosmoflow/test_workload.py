"""Batches, augmentation and metric of CosmoFlow."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.manifest import read_manifest, write_manifest
from mlhpc.suite.data.sampling import draws
from mlhpc.suite.data.shards import count_read_bytes
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow import DESCRIPTOR
from mlhpc.workloads.cosmoflow import generate as generator
from mlhpc.workloads.cosmoflow.config import TARGETS
from mlhpc.workloads.cosmoflow.cosmology import Simulation
from mlhpc.workloads.cosmoflow.data import augment
from mlhpc.workloads.cosmoflow.workload import CosmoFlow
from tests.workloads.tiny import TINY


def config(root: Path, *overrides: str) -> RunConfig:
    """The smoke config for the tiny data set of 8^3 voxels and its own input constants."""
    own = TINY["cosmoflow"].overrides(read_manifest(root).attributes)
    return load_config(DESCRIPTOR, "smoke", (*own, *overrides))


def grid(n: int) -> np.ndarray:
    """Distinct values: a sample that shows where each voxel went."""
    return np.arange(4 * n**3, dtype=np.int16).reshape(1, n, n, n, 4)


def test_augmentation_reaches_exactly_the_symmetries_and_shifts_of_the_periodic_cube() -> None:
    n = 2
    reached = {augment(grid(n), np.array([d], np.uint64)).tobytes() for d in range(48 * n**3)}
    expected = set()
    for order in permutations(range(3)):
        for flips in np.ndindex(2, 2, 2):
            for shifts in np.ndindex(n, n, n):
                moved = grid(n)[0].transpose(*order, 3)
                moved = np.flip(moved, [axis for axis in range(3) if flips[axis]])
                expected.add(np.roll(moved, shifts, (0, 1, 2)).tobytes())
    assert reached == expected


def test_augmentation_moves_voxels_and_changes_none() -> None:
    x = np.random.default_rng(0).poisson(5, (64, 8, 8, 8, 4)).astype(np.int16)
    moved = augment(x, draws(1, 2, np.arange(64)))
    voxels = [np.sort(each.reshape(64, -1, 4).copy().view(np.int64)[..., 0], axis=1) for each in (x, moved)]
    np.testing.assert_array_equal(*voxels)
    assert (moved != x).any(axis=(1, 2, 3, 4)).mean() > 0.9


def test_augmentation_keeps_neighbours_on_the_periodic_box() -> None:
    x = np.random.default_rng(0).poisson(5, (8, 8, 8, 8, 4)).astype(np.int64)
    moved = augment(x.astype(np.int16), draws(1, 2, np.arange(8))).astype(np.int64)
    correlation = [
        sum((each * np.roll(each, 1, axis)).sum(axis=(1, 2, 3)) for axis in (1, 2, 3)) for each in (x, moved)
    ]
    np.testing.assert_array_equal(*correlation)


def test_augmentation_is_keyed_by_seed_epoch_and_sample(tiny_data: Path) -> None:
    data = CosmoFlow(config(tiny_data)).dataset("train", tiny_data)
    one = data.load([3], seed=1, epoch=2)["x"][0]
    assert torch.equal(one, data.load([7, 3, 0], seed=1, epoch=2)["x"][1])
    others = [data.load([3], seed=s, epoch=e)["x"][0] for s, e in ((1, 3), (2, 2), (2, 1))]
    assert not any(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("split", ["train", "validation"])  # augmented, and not
def test_a_slab_is_cut_out_of_the_whole_sample_and_nothing_else_is_read(tiny_data: Path, split: str) -> None:
    data = CosmoFlow(config(tiny_data)).dataset(split, tiny_data)
    chosen, size = [3, 0, 4], data.load([0], seed=1, epoch=2)["x"].shape[1]
    whole = data.load(chosen, seed=1, epoch=2)
    for slab in (((0, 1), (0, size), (0, size)), ((2, 5), (1, size), (0, 3)), ((0, size),) * 3):
        before = count_read_bytes()
        part = data.load_slab(chosen, {"x": (*slab, (0, 4))}, seed=1, epoch=2)
        (a, b), (c, d), (e, f) = slab
        assert torch.equal(part["x"], whole["x"][:, a:b, c:d, e:f])
        assert torch.equal(part["y"], whole["y"])
        assert count_read_bytes() - before == part["x"].nbytes + part["y"].nbytes


def test_validation_is_never_augmented(tiny_data: Path) -> None:
    data = CosmoFlow(config(tiny_data)).dataset("validation", tiny_data)
    assert torch.equal(data.load([1], seed=0, epoch=0)["x"], data.load([1], seed=5, epoch=3)["x"])


def test_data_that_do_not_fit_the_config_are_refused(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shard_00000.h5: dataset .* expected"):
        CosmoFlow(load_config(DESCRIPTOR, "smoke")).dataset("train", tiny_data)
    with pytest.raises(InputError, match="other data than the config is for"):
        CosmoFlow(config(tiny_data, "hyperparameters.input_mean=[2, 2, 2, 2]")).dataset("train", tiny_data)
    manifest = read_manifest(tiny_data)
    write_manifest(tiny_data, structs.replace(manifest, attributes=manifest.attributes | {"periodic": False}))
    with pytest.raises(InputError, match="not periodic"):
        CosmoFlow(config(tiny_data)).dataset("train", tiny_data)


def test_the_metric_is_the_mean_absolute_error_over_samples_and_targets(tiny_data: Path, world: World) -> None:
    workload = CosmoFlow(config(tiny_data))
    model = workload.build_model(world).eval()
    everything = workload.dataset("validation", tiny_data).load(range(5), seed=0, epoch=0)
    with torch.no_grad():
        stats = {name: value.item() for name, value in workload.eval_stats(model, everything).items()}
        direct = (model(everything["x"]) - everything["y"]).abs().mean().item()
    assert workload.metrics(stats)["eval_error"] == pytest.approx(direct, rel=1e-6)


def test_the_metrics_state_an_uncertainty_per_target(tiny_data: Path, world: World) -> None:
    workload = CosmoFlow(config(tiny_data))
    model = workload.build_model(world).eval()
    data = workload.dataset("validation", tiny_data)
    totals: dict[str, float] = {}
    with torch.no_grad():
        for part in (range(2), range(2, 5)):  # sums of batches, as the harness adds them
            for name, value in workload.eval_stats(model, data.load(part, seed=0, epoch=0)).items():
                totals[name] = totals.get(name, 0.0) + value.item()
        everything = data.load(range(5), seed=0, epoch=0)
        error = (model(everything["x"]).double() - everything["y"].double()).numpy()
    metrics = workload.metrics(totals)
    spread = np.abs(error).std(axis=0, ddof=1) / np.sqrt(5)
    for position, name in enumerate(TARGETS):
        assert metrics[f"mae_{name}"] == pytest.approx(np.abs(error[:, position]).mean(), rel=1e-5)
        assert metrics[f"mae_se_{name}"] == pytest.approx(spread[position], rel=1e-4)
        assert metrics[f"rmse_{name}"] == pytest.approx(np.sqrt((error[:, position] ** 2).mean()), rel=1e-5)
    of_samples = np.abs(error).mean(axis=1)
    assert metrics["eval_error_se"] == pytest.approx(of_samples.std(ddof=1) / np.sqrt(5), rel=1e-4)
    assert metrics["mse"] == pytest.approx((error**2).mean(), rel=1e-5)


@pytest.fixture(scope="module")
def learnable(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """300 + 100 universes: enough for a regression to find sigma_8."""
    root = tmp_path_factory.mktemp("learnable") / "d"
    size = generator.DataSize(Simulation(16, 8, 128.0, "2lpt"), 8, 300, 100, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(generator.SIZES, "smoke", size)
        generator.generate(root, "smoke", seed=0, world=world)
    return root


@pytest.mark.long
def test_a_tiny_network_learns_from_counts_alone(learnable: Path, world: World) -> None:
    """Targets that belong to other samples cannot be learnt: the counts carry the information, nothing else does."""
    workload = CosmoFlow(config(learnable, "hyperparameters.base_learning_rate=0.01"))
    data = workload.dataset("train", learnable)
    errors = {}
    for kind in ("true", "shuffled"):
        torch.manual_seed(0)
        model = workload.build_model(world)
        optimizer = workload.build_optimizer(model, 1).optimizer
        order = np.random.default_rng(0).permutation(300) if kind == "shuffled" else np.arange(300)
        targets = data.load(range(300), seed=0, epoch=0)["y"][order]
        for epoch in range(1, 9):
            for begin in range(0, 300, 15):
                chosen = range(begin, begin + 15)
                optimizer.zero_grad()
                batch = {"x": data.load(chosen, seed=0, epoch=epoch)["x"], "y": targets[begin : begin + 15]}
                workload.loss(model, batch).backward()
                optimizer.step()
        validation = workload.dataset("validation", learnable).load(range(100), seed=0, epoch=0)
        with torch.no_grad():
            errors[kind] = workload.metrics(
                {name: value.item() for name, value in workload.eval_stats(model, validation).items()}
            )["mae_sigma_8"]
    assert errors["true"] < 0.35
    assert errors["shuffled"] > 0.42
