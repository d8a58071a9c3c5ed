"""DimeNet++: its parameters, its symmetries, its forces, and the closed forms of its work."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import special_ortho_group

from mlhpc.suite.config import load_config
from mlhpc.suite.documents import convert
from mlhpc.workloads.open_catalyst import DESCRIPTOR
from mlhpc.workloads.open_catalyst.config import OpenCatalystConfig
from mlhpc.workloads.open_catalyst.data import build_batch
from mlhpc.workloads.open_catalyst.model import (
    DimeNetPlusPlus,
    glorot_orthogonal,
    silu,
)
from mlhpc.workloads.open_catalyst.structures import Neighbourhood, Structure
from tests.workloads.open_catalyst.conftest import random_structure

MEANS = {"mean_atoms": 66, "mean_edges": 3242, "mean_triplets": 157_000}
NEIGHBOURHOOD = Neighbourhood(4.5, 12)


def small(**changes: object) -> OpenCatalystConfig:
    values = {"hidden_channels": 24, "output_channels": 16, "blocks": 2, "triplet_channels": 12, "num_spherical": 4}
    values |= {"num_radial": 5, "cutoff_angstrom": 4.5, "learning_rate": 1e-3} | MEANS | changes
    return convert(values, OpenCatalystConfig)


def a_model(**changes: object) -> DimeNetPlusPlus:
    """In float64, with output weights that are not zero."""
    torch.manual_seed(0)
    model = DimeNetPlusPlus(small(**changes)).double()
    for output in model.outputs:
        torch.nn.init.normal_(output.lin.weight)
    return model.eval()


def batch(*structures: Structure, neighbourhood: Neighbourhood = NEIGHBOURHOOD) -> dict[str, torch.Tensor]:
    """In float64, so that symmetries hold to rounding."""
    found = build_batch(
        position=np.concatenate([each.position for each in structures]),
        force=np.concatenate([each.force for each in structures]),
        number=np.concatenate([each.number for each in structures]),
        fixed=np.concatenate([each.fixed for each in structures]),
        energy=np.array([each.energy for each in structures]),
        lengths=np.array([len(each.number) for each in structures]),
        edges=[neighbourhood.edges(each.position, each.cell) for each in structures],
    )
    return {name: value.double() if value.is_floating_point() else value for name, value in found.items()}


def test_parameters_of_the_full_size_part_by_part() -> None:
    with torch.device("meta"):
        model = DimeNetPlusPlus(OpenCatalystConfig(learning_rate=1e-3, **MEANS))

    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(model) == 1_810_182
    assert count(model.embedding) == 130_368
    assert [count(each) for each in model.outputs] == [149_568] * 4
    assert [count(each) for each in model.interactions] == [360_512] * 3
    assert count(model.radial) == 6


def test_an_untrained_model_predicts_no_force() -> None:
    torch.manual_seed(0)
    energy, force = DimeNetPlusPlus(small())(
        {k: v.float() if v.is_floating_point() else v for k, v in batch(random_structure(0)).items()}
    )
    assert energy.abs().max() == 0
    assert force.abs().max() == 0


def test_weights_are_orthogonal_with_the_variance_of_glorot() -> None:
    torch.manual_seed(0)
    weight = torch.empty(192, 64)
    glorot_orthogonal(weight)
    gram = weight.t() @ weight
    torch.testing.assert_close(gram, gram[0, 0] * torch.eye(64), atol=1e-4, rtol=1e-4)
    assert weight.var().item() == pytest.approx(2 / (192 + 64), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_exact_forces_are_the_negative_gradient_of_the_energy(seed: int) -> None:
    model, structure = a_model(exact_angles=True), random_structure(seed, atoms=5)
    graph = batch(structure)
    _, force = model(graph)
    step = 1e-5
    for atom in range(5):
        for axis in range(3):
            energies = []
            for sign in (1, -1):
                moved = graph["position"].clone()
                moved[atom, axis] += sign * step
                energies.append(model.energy(graph, moved).item())
            numeric = -(energies[0] - energies[1]) / (2 * step)
            assert force[atom, axis].item() == pytest.approx(numeric, abs=1e-4 * force.abs().max().item())


def test_exact_forces_stay_finite_with_atoms_on_a_line() -> None:
    line = random_structure(0, atoms=3)
    position = np.array([[0.0, 0, 0], [1.5, 0, 0], [3.0, 0, 0]])
    graph = batch(Structure(**(vars(line) | {"position": position, "cell": 12 * np.eye(3)})))
    model = a_model(exact_angles=True).train()
    energy, force = model(graph)
    (force.square().sum() + energy.sum()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert torch.isfinite(force).all()
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)


def test_both_ways_to_sum_over_triplets_give_one_energy_and_detached_angles_change_forces_only() -> None:
    graph = batch(random_structure(0), random_structure(1))
    (energy, force), (energy_exact, force_exact) = (a_model(exact_angles=exact)(graph) for exact in (False, True))
    torch.testing.assert_close(energy, energy_exact)
    assert (force - force_exact).abs().max() > 1e-3 * force.abs().max()


def test_the_sparse_sum_has_the_derivatives_of_gather_and_scatter() -> None:
    """With angles made constants by hand, the slow formulation gives the same weights' gradients of a force loss."""
    graph = batch(random_structure(0), random_structure(1))
    gradients = []
    for exact in (False, True):
        model = a_model(exact_angles=exact).train()
        if exact:
            inner = model._angles
            model._angles = lambda unit, graph, inner=inner: inner(unit.detach(), graph)
        energy, force = model(graph)
        ((force - graph["force"]).abs().sum() + energy.square().sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("exact", [False, True])
def test_energy_is_invariant_and_forces_turn_with_the_structure(exact: bool) -> None:
    model, structure = a_model(exact_angles=exact), random_structure(3)
    energy, force = model(batch(structure))
    turn = special_ortho_group.rvs(3, random_state=1)
    moved = Structure(
        **(
            vars(structure)
            | {"position": structure.position @ turn.T + [1.0, -2.0, 30.0], "cell": structure.cell @ turn.T}
        )
    )
    energy_moved, force_moved = model(batch(moved))
    torch.testing.assert_close(energy_moved, energy)
    torch.testing.assert_close(force_moved, force @ torch.from_numpy(turn.T))
    assert force.abs().max() > 1e-3


def test_atoms_have_no_order_and_images_no_preference() -> None:
    model, structure = a_model(), random_structure(4)
    energy, force = model(batch(structure))
    order = np.random.default_rng(0).permutation(len(structure.number))
    shuffled = {name: getattr(structure, name)[order] for name in ("position", "number", "tag", "fixed", "force")}
    shuffled["position"] = (
        shuffled["position"] + np.random.default_rng(1).integers(-2, 3, (len(order), 3)) @ structure.cell
    )
    energy_shuffled, force_shuffled = model(batch(Structure(**(vars(structure) | shuffled))))
    torch.testing.assert_close(energy_shuffled, energy)
    torch.testing.assert_close(force_shuffled, force[order])


def test_a_structure_does_not_feel_the_others_of_its_batch() -> None:
    model = a_model()
    structures = [random_structure(seed, atoms=4 + seed) for seed in range(3)]
    energy, force = model(batch(*structures))
    alone = [model(batch(each)) for each in structures]
    torch.testing.assert_close(energy, torch.cat([each for each, _ in alone]))
    torch.testing.assert_close(force, torch.cat([each for _, each in alone]))


def test_energy_of_two_cells_is_twice_that_of_one() -> None:
    model, one = a_model(), random_structure(5, atoms=4)
    pair = {name: np.concatenate([getattr(one, name)] * 2) for name in ("number", "tag", "fixed", "force")}
    pair["position"] = np.concatenate([one.position, one.position + one.cell[0]])
    pair["cell"] = one.cell * [[2.0], [1.0], [1.0]]
    energy, _ = model(batch(one))
    twice, _ = model(batch(Structure(**(vars(one) | pair))))
    torch.testing.assert_close(twice, 2 * energy)


def test_eval_mode_leaves_no_graph_behind_and_works_without_gradients() -> None:
    model = a_model()
    with torch.no_grad():
        energy, force = model(batch(random_structure(0)))
    assert not energy.requires_grad
    assert not force.requires_grad
    assert force.abs().max() > 0


@pytest.mark.long
def test_training_on_a_few_structures_drives_their_forces_to_the_truth(tiny_data: Path) -> None:
    from mlhpc.workloads.open_catalyst.workload import OpenCatalyst

    workload = OpenCatalyst(load_config(DESCRIPTOR, "smoke", ["hyperparameters.warmup_steps=0"]))
    data = workload.dataset("train", tiny_data).load(np.arange(6), seed=0, epoch=1)
    torch.manual_seed(0)
    model = workload.build_model(None).train()  # type: ignore[arg-type]
    optimization = workload.build_optimizer(model, 1)
    losses = []
    for _ in range(40):
        optimization.optimizer.zero_grad()
        loss = workload.loss(model, data)
        loss.backward()
        optimization.optimizer.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < 0.35 * losses[0]


def test_silu_has_torchs_first_and_second_derivatives() -> None:
    x, g, h = (torch.randn(50, dtype=torch.float64) * 3 for _ in range(3))
    found = []
    for function in (silu, torch.nn.functional.silu):
        at = x.clone().requires_grad_()
        by = g.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(at), at, by, create_graph=True)
        found.append((first, *torch.autograd.grad(first, (at, by), h)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("exact", [False, True])
def test_a_graph_without_triplets_still_has_forces_that_are_opposite(exact: bool) -> None:
    pair = random_structure(0, atoms=2)
    apart = Structure(**(vars(pair) | {"position": np.array([[0.0, 0, 0], [1.4, 0.3, 0]]), "cell": 15 * np.eye(3)}))
    graph = batch(apart)
    assert len(graph["into"]) == 0
    model = a_model(exact_angles=exact).train()
    energy, force = model(graph)
    (energy.sum() + force.square().sum()).backward()
    torch.testing.assert_close(force[0], -force[1])
    assert force.abs().max() > 0
