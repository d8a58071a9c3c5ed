"""Experts that were spread over some ranks are loaded by any other number of ranks: weights, their average, optimizer state."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.state import Position, TrainingState, _make_moving_average
from mlhpc.suite.workload import Optimization, load_workload
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh
from mlhpc.workloads.moe.parallel import find_expert_copy, list_expert_parameters, locate_expert_shares
from tests.fixtures.thread_ranks import Holding, on_holders

EXPERTS, WIDTH, HIDDEN = 4, 8, 16
CONFIG = MoEConfig(experts=EXPERTS, top_k=2, hidden=HIDDEN, activation="swiglu", bias=True)


class Layers(nn.Module):
    """Two MoE layers, the experts over the ranks of a mesh that never communicates; of several with ``each`` ranks."""

    def __init__(self, rank: Holding, each: int = 0) -> None:
        super().__init__()
        size = each or rank.mesh.size
        copy, place = divmod(rank.mesh.rank, size)
        copies = rank.mesh.size // size
        mesh = ExpertMesh(place, 1, size, *cast(Any, (None, None, None, {})), copy=copy, copies=copies)
        self.blocks = nn.ModuleList(MoELayer(WIDTH, CONFIG, mesh) for _ in range(2))


def value(name: str, whole: torch.Size, salt: float) -> Tensor:
    """What a whole tensor holds: other numbers for each name."""
    return torch.sin(torch.arange(whole.numel()) * 0.37 + len(name) + salt).view(whole)


def share(model: nn.Module, rank: Holding, name: str, parameter: Tensor, salt: float) -> Tensor:
    mesh = cast(MoELayer, model.get_submodule("blocks.0")).mesh
    return share_of(mesh.rank if mesh else 0, mesh.size if mesh else 1, name, parameter, salt)


def share_of(rank: int, size: int, name: str, parameter: Tensor, salt: float) -> Tensor:
    """This rank's part of a tensor of all experts; written apart from the code: experts in order, then slices of dimension 1."""
    if ".experts." not in name:
        return value(name, parameter.shape, salt)
    sharers = max(1, size // EXPERTS)
    each = max(1, EXPERTS // size)
    shape = torch.Size([EXPERTS, parameter.shape[1] * sharers, *parameter.shape[2:]])
    first, part = rank // sharers * each, rank % sharers
    step = parameter.shape[1]
    return value(name, shape, salt)[first : first + each, part * step : (part + 1) * step]


def state_of(rank: Holding, each: int = 0, *, places: bool = True) -> TrainingState:
    model = Layers(rank, each)
    optimization = Optimization(torch.optim.AdamW(model.parameters(), lr=0.1), lambda step, epoch: 0.1, ema_decay=0.9)
    found = locate_expert_shares(model) if places else {}
    averaged, copy = _make_moving_average(model, optimization), find_expert_copy(model)
    return TrainingState(model, optimization, list_expert_parameters(model), averaged, 1, found, copy)


def train(rank: Holding, state: TrainingState) -> TrainingState:
    """A step from known weights with known gradients."""
    for name, parameter in state.model.named_parameters():
        parameter.data = share(state.model, rank, name, parameter, 0.0).clone()
        parameter.grad = share(state.model, rank, name, parameter, 1.0).clone()
    state.optimization.optimizer.step()
    state.averaged.update()
    return state


def contents(state: TrainingState) -> list[Tensor]:
    moments = [each[key] for each in state.optimization.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [*state.model.parameters(), *state.averaged.weights.values(), *moments]


def save(rank: Holding, path: Path, each: int = 0, *, places: bool = True) -> None:
    state = train(rank, state_of(rank, each, places=places))
    snapshot = Checkpoint(path, {}, rank.mesh).snapshot(rank.world, state, Position(1, 1))
    every = rank.world.gather(snapshot.write(), bytes)
    if every is not None:
        snapshot.commit(every)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (2, 4), (8, 2), (4, 8), (8, 1), (2, 2), (1, 8)])
def test_experts_are_found_by_their_place_among_all(tmp_path: Path, before: int, after: int) -> None:
    path = tmp_path / "trial_0.pt"
    on_holders(before, 1, lambda rank: save(rank, path))

    def load(rank: Holding) -> bool:
        state = state_of(rank)
        Checkpoint(path, {}, rank.mesh).load(rank.world, state)
        expected = contents(train(rank, state_of(rank)))
        found = contents(state)
        assert len(found) == len(expected) > 8
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    assert all(on_holders(after, 1, load))


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 2), (4, 4)), ((4, 4), (4, 2)), ((4, 2), (1, 1)), ((1, 1), (8, 4)), ((8, 8), (4, 2)), ((8, 2), (2, 2))],
)
def test_experts_of_copies_load_on_other_meshes(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Ranks, and ranks that share the experts. Only the first copy is written."""
    path = tmp_path / "trial_0.pt"

    def written(rank: Holding) -> int:
        state = train(rank, state_of(rank, before[1]))
        held = state.hold(rank.mesh.rank, state.moments())
        return sum(each.written for name, each in held.items() if ".experts." in name and "step" not in name)

    assert [count > 0 for count in on_holders(before[0], 1, written)] == [rank < before[1] for rank in range(before[0])]
    on_holders(before[0], 1, lambda rank: save(rank, path, before[1]))

    def load(rank: Holding) -> bool:
        state = state_of(rank, after[1])
        Checkpoint(path, {}, rank.mesh).load(rank.world, state)
        pairs = zip(contents(state), contents(train(rank, state_of(rank, after[1]))), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    assert all(on_holders(after[0], 1, load))


def test_shares_of_unknown_place_need_as_many_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trial_0.pt"
    on_holders(4, 1, lambda rank: save(rank, path, places=False))

    def load(rank: Holding) -> str:
        with pytest.raises(InputError) as caught:
            Checkpoint(path, {}, rank.mesh).load(rank.world, state_of(rank, places=False))
        return str(caught.value)

    for text in on_holders(2, 1, load):
        assert "checkpoint of 4 ranks, each with its share of the parameters; this run has 2" in text


def test_the_workloads_say_where_their_experts_lie() -> None:
    for name in ("moe_lm", "swinv2_moe"):
        chosen = load_descriptor(name)
        workload = load_workload(chosen)(load_config(chosen, "smoke"))
        assert workload.share_places(Layers(cast(Any, on_holders(2, 1, lambda rank: rank)[1])))
