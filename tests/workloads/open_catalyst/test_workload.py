"""Batches, loss, metric, schedule and balance of OpenCatalyst, on one rank and on two."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.manifest import read_manifest, write_manifest
from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.suite.data.shards import ShardReader, build_shard_path, write_shard
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.open_catalyst import DESCRIPTOR
from mlhpc.workloads.open_catalyst.config import OpenCatalystConfig
from mlhpc.workloads.open_catalyst.schedule import learning_rate
from mlhpc.workloads.open_catalyst.workload import OpenCatalyst
from tests.fixtures.warm import warm_python

MPIEXEC = Path(sys.executable).parent / "mpiexec"


def config(*overrides: str) -> RunConfig:
    return load_config(DESCRIPTOR, "smoke", overrides)


def a_workload(*overrides: str) -> OpenCatalyst:
    return OpenCatalyst(config(*overrides))


def a_model(workload: OpenCatalyst, world: World) -> torch.nn.Module:
    torch.manual_seed(0)
    model = workload.build_model(world)
    for output in model.outputs:  # type: ignore[union-attr]
        torch.nn.init.normal_(output.lin.weight)
    return model


def test_a_batch_is_one_graph_of_separate_parts(tiny_data: Path) -> None:
    data = a_workload().dataset("train", tiny_data)
    batch = data.load([3, 11, 0], seed=0, epoch=1)
    atoms, edges, triplets = len(batch["number"]), len(batch["source"]), len(batch["into"])
    structure = batch["structure"]
    assert (structure[batch["source"]] == structure[batch["target"]]).all()
    assert (batch["target"][batch["into"]] == batch["source"][batch["out"]]).all()
    assert torch.equal(batch["counts"], torch.tensor([batch["free"].sum(), triplets, batch["free"].sum()]).long())
    for name, order, begins in (("out", torch.arange(triplets), "out_begin"), ("into", batch["by_into"], "into_begin")):
        in_order = batch[name][order]
        assert (in_order.diff() >= 0).all()
        assert torch.equal(torch.bincount(in_order, minlength=edges), batch[begins].diff())
    assert batch["position"].shape == batch["force"].shape == (atoms, 3)
    vector = batch["position"][batch["source"]] + batch["shift"] - batch["position"][batch["target"]]
    assert vector.norm(dim=1).max() <= 4.5 + 1e-5


def test_a_sample_is_the_same_in_any_batch(tiny_data: Path) -> None:
    data = a_workload().dataset("validation", tiny_data)
    alone, among = data.load([5], seed=0, epoch=0), data.load([2, 5], seed=1, epoch=7)
    first = int((among["structure"] == 0).sum())
    for name in ("position", "force", "number", "free"):
        assert torch.equal(alone[name], among[name][first:])
    assert torch.equal(alone["shift"], among["shift"][-len(alone["shift"]) :])


def test_the_metric_is_the_mean_absolute_error_of_the_components_on_free_atoms(tiny_data: Path, world: World) -> None:
    workload = a_workload()
    model = a_model(workload, world).eval()
    everything = workload.dataset("validation", tiny_data).load(range(8), seed=0, epoch=0)
    with torch.no_grad():
        stats = {name: value.item() for name, value in workload.eval_stats(model, everything).items()}
    _, force = model(everything)
    free = everything["free"] == 1
    direct = (force - everything["force"])[free].abs().mean().item()
    assert workload.metrics(stats)["eval_error"] == pytest.approx(direct, rel=1e-5)


def test_fixed_atoms_count_neither_in_the_loss_nor_in_the_metric(tiny_data: Path, world: World) -> None:
    workload = a_workload()
    model = a_model(workload, world)
    batch = dict(workload.dataset("train", tiny_data).load(range(4), seed=0, epoch=1))
    before = workload.loss(model, batch).item(), workload.eval_stats(model, batch)["absolute"].item()
    batch["force"] = batch["force"] + 100 * (1 - batch["free"][:, None])
    after = workload.loss(model, batch).item(), workload.eval_stats(model, batch)["absolute"].item()
    assert after == before
    assert 0 < batch["free"].sum() < len(batch["free"])


def test_the_loss_is_the_references_formula(tiny_data: Path, world: World) -> None:
    four = ("global_batch_size=4", "hyperparameters.energy_coefficient=3.0")
    workload = a_workload("hyperparameters.target_std_ev=2.0", *four)
    model = a_model(workload, world)
    batch = workload.dataset("train", tiny_data).load(range(4), seed=0, epoch=1)
    energy, force = model(batch)
    free = batch["free"] == 1
    forces = (force - batch["force"] / 2.0)[free].abs().sum() / free.sum()
    energies = (energy - batch["energy"] / 2.0).abs().mean()
    assert workload.loss(model, batch).item() == pytest.approx((50 * forces + 3 * energies).item(), rel=1e-5)


@pytest.mark.parametrize("balanced", [False, True])
def test_the_loss_in_parts_is_that_of_the_whole_batch(tiny_data: Path, world: World, balanced: bool) -> None:
    """The parts have different numbers of free atoms; the mean is over those of the batch, not over those of a part."""
    energies = ("hyperparameters.energy_coefficient=3.0", f"hyperparameters.balanced_batches={balanced}")
    gradients, losses, samples, parts = [], [], 8, 4
    for step_parts in (1, parts):
        workload = a_workload(f"global_batch_size={samples}", f"gradient_accumulation_steps={step_parts}", *energies)
        model, data = a_model(workload, world), workload.dataset("train", tiny_data)
        (chosen, *_) = list_train_batches(len(data), samples, seed=5, epoch=2, rank=0, size=1)
        batches = [data.load(chosen[part::step_parts], seed=5, epoch=2) for part in range(step_parts)]
        assert len({batch["counts"][2].item() for batch in batches}) == 1
        values = [workload.loss(model, batch) / step_parts for batch in batches]
        for value in values:
            value.backward()
        losses.append(sum(value.item() for value in values))
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    assert len({batch["counts"][0].item() for batch in batches}) > 1  # else the test could not fail
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5 * float(gradients[0].abs().max()))


def test_an_energy_error_is_reported_only_if_energies_are_trained(tiny_data: Path, world: World) -> None:
    for coefficient, reported in (("0.0", False), ("1.0", True)):
        workload = a_workload(f"hyperparameters.energy_coefficient={coefficient}")
        model = a_model(workload, world).eval()
        batch = workload.dataset("validation", tiny_data).load(range(8), seed=0, epoch=0)
        totals = {name: value.item() for name, value in workload.eval_stats(model, batch).items()}
        assert ("energy_mae" in workload.metrics(totals)) is reported


def test_the_schedule_is_the_references() -> None:
    own = load_config(DESCRIPTOR, "full").hyperparameters
    assert isinstance(own, OpenCatalystConfig)
    rates = {step: learning_rate(own, step) for step in (0, 15_626, 31_252, 125_007, 125_008, 187_512, 250_016)}
    expected = [0.2 * 4e-4, 0.6 * 4e-4, 4e-4, 4e-4, 4e-5, 4e-6, 4e-7]
    assert list(rates.values()) == pytest.approx(expected)


def test_the_optimizer_is_adamw_with_torchs_defaults_and_a_rate_by_step(world: World) -> None:
    workload = a_workload()
    optimization = workload.build_optimizer(workload.build_model(world), 60)
    assert type(optimization.optimizer) is torch.optim.AdamW
    group = optimization.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.01, (0.9, 0.999), 1e-8)
    own = workload.config.hyperparameters
    assert isinstance(own, OpenCatalystConfig)
    assert optimization.learning_rate(17, 1) == optimization.learning_rate(17, 9) == learning_rate(own, 17)


@pytest.mark.parametrize("size", ["smoke", "mini", "small", "full"])
def test_what_is_logged_satisfies_the_cards_constraints_and_the_official_keys(size: str) -> None:
    logged = OpenCatalyst(load_config(DESCRIPTOR, size)).hyperparameters()
    official = {"global_batch_size", "opt_name", "opt_base_learning_rate", "opt_learning_rate_warmup_steps"}
    official |= {"opt_learning_rate_warmup_factor", "opt_learning_rate_decay_boundary_steps"}
    assert official | {"opt_learning_rate_decay_factor"} <= logged.keys()
    assert logged["opt_name"] == "AdamW"
    card = DESCRIPTOR.card().size(size)
    for key, constraint in card.constraints.items():
        if constraint.equals is not None:
            assert logged[key] == constraint.equals, key
    target = DESCRIPTOR.card().target(size)
    assert target.reached(card.threshold)
    assert not target.reached(0.0)


def test_the_full_size_is_the_benchmark_of_the_rules() -> None:
    card = DESCRIPTOR.card().size("full")
    own = load_config(DESCRIPTOR, "full").hyperparameters
    assert isinstance(own, OpenCatalystConfig)
    assert (card.threshold, card.required_runs, card.train_samples, card.eval_samples) == (0.036, 5, 2_000_000, 999_866)
    assert card.official.identical
    model = {
        key: value
        for key, value in convert_to_plain_data(own).items()
        if key in {"hidden_channels", "blocks", "cutoff_angstrom", "max_neighbours", "num_spherical"}
    }
    assert list(model.values()) == [192, 3, 7, 6.0, 50]
    assert (own.target_std_ev, own.force_coefficient, own.energy_coefficient) == (2.887317180633545, 50.0, 0.0)


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(InputError, match="cannot differentiate twice"):
        a_workload("compile=true")
    with pytest.raises(InputError, match="decay_boundary_steps is .*, expected increasing steps"):
        config("hyperparameters.decay_boundary_steps=[5, 5]")


def test_a_damaged_sample_is_named(tiny_data: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_data)
    arrays = ShardReader(tiny_data, "train").read(range(8))
    arrays["cell"][3] = 0
    entry = write_shard(build_shard_path(tmp_path, "train", 0), arrays)
    write_manifest(tmp_path, structs.replace(manifest, splits={"train": (entry,)}))
    data = a_workload().dataset("train", tmp_path)
    data.load([0, 1, 2], seed=0, epoch=1)
    with pytest.raises(InputError, match=rf"^{tmp_path}/train: sample 3: the cell .* has no volume"):
        data.load([1, 3], seed=0, epoch=1)


def test_data_of_another_workload_are_refused(tiny_data: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_data)
    entry = write_shard(build_shard_path(tmp_path, "train", 0), {"x": np.zeros((3, 2))})
    write_manifest(tmp_path, structs.replace(manifest, splits={"train": (entry,)}))
    with pytest.raises(InputError, match="has no dataset 'atom.position'"):
        a_workload().dataset("train", tmp_path)


TWO_RANKS = """
import dataclasses, json, sys
from pathlib import Path
import torch
from mlhpc.suite.config import load_config
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.world import World
from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.workloads.open_catalyst import DESCRIPTOR
from mlhpc.workloads.open_catalyst.workload import OpenCatalyst

torch.set_num_threads(1)
world = World.create()
alone = dataclasses.replace(world, rank=0, size=1, transport=SingleProcessTransport(), peers=SingleProcessTransport())

def train(world, balanced):
    config = load_config(DESCRIPTOR, "smoke", [f"hyperparameters.balanced_batches={balanced}", "global_batch_size=8"])
    workload = OpenCatalyst(config)
    data = workload.dataset("train", Path(sys.argv[1]))
    torch.manual_seed(0)
    model = workload.build_model(world).train()
    parallel = model if world.size == 1 else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = workload.build_optimizer(model, 2).optimizer
    losses, triplets, samples = [], [], []
    for epoch in (1, 2):
        for indices in list_train_batches(len(data), 8, seed=5, epoch=epoch, rank=world.rank, size=world.size):
            batch = data.load(indices, seed=5, epoch=epoch)
            optimizer.zero_grad()
            loss = workload.loss(parallel, batch)
            loss.backward()
            optimizer.step()
            losses.append(world.sum({"loss": loss.item() / world.size})["loss"])
            triplets.append(world.allgather(len(batch["into"])))
            samples.append(world.sum({"n": float(len(batch["energy"]))})["n"])
    return {
        "losses": losses, "triplets": triplets, "samples": samples,
        "imbalance": workload.window_stats(world).get("imbalance"),
    }

result = [{str(balanced): train(alone, balanced) for balanced in (False, True)}]
world.init_torch(torch.device("cpu"))
result.append({str(balanced): train(world, balanced) for balanced in (False, True)})
if world.is_first:
    Path(sys.argv[2]).write_text(json.dumps(result))
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside python: pip install mpich")
def test_two_ranks_train_as_one_balanced_or_not(tiny_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = [MPIEXEC, "-n", "2", *warm_python(), "-c", TWO_RANKS, tiny_data, path]
    subprocess.run(words, check=True, timeout=300)
    one, two = json.loads(path.read_text())
    assert one["True"]["losses"] == one["False"]["losses"]
    assert one["True"]["imbalance"] is None
    for balanced in ("False", "True"):
        assert two[balanced]["losses"] == pytest.approx(one["False"]["losses"], rel=1e-4)
        assert [sum(each) for each in two[balanced]["triplets"]] == [sum(each) for each in one["False"]["triplets"]]
        assert set(two[balanced]["samples"]) == {8.0}
        imbalance = np.mean([max(each) / np.mean(each) for each in two[balanced]["triplets"]])
        assert two[balanced]["imbalance"] == pytest.approx(imbalance)
    assert two["True"]["imbalance"] < two["False"]["imbalance"]
