"""States that ranks hold in pieces: training equals that with whole states, nothing whole stays, and checkpoints fit any plan."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.instrument import CollectiveCounter, count_collectives
from mlhpc.suite.training.parallel.ddp import adapt_optimizer, eval_turns
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.fsdp import evaluating, local, part_of_rows, shard_states, states_of
from mlhpc.suite.training.parallel.mesh import Mesh, parse_mesh
from mlhpc.suite.training.parallel.meta_init import ALONE, build_deferred
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import ParallelPlan, read_plan
from mlhpc.suite.training.state import Position, TrainingState, _like, _make_moving_average
from mlhpc.suite.workload import Optimization, Workload, load_workload
from mlhpc.workloads.deepcam.optimizer import Lamb
from tests.fixtures.thread_ranks import Holding, finish_step, on_holders, whole_norms, write_checkpoint
from tests.fixtures.wings import needs_axes

SAMPLES, WIDTH = 24, 7
MESHES = [(1, 1), (1, 2), (2, 2), (1, 3), (1, 4), (2, 1)]  # data, shard


class Net(nn.Module):
    """Odd sizes, a parameter of a module's own, one that is read from outside its module, and one that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 11), nn.Linear(11, 3)
        self.norm = nn.LayerNorm(11)
        self.scale = nn.Parameter(torch.rand(3))
        self.alone = nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.first(x)))
        return self.alone(self.second(y) * self.scale) + F.linear(y, self.second.weight).sum(dim=1, keepdim=True)


WHOLE = ("alone.weight",)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "lamb":
        return Lamb(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Training:
    """One rank's training of `Net`, as the trainer does it."""

    def __init__(self, rank: Holding, model: nn.Module, kind: str = "adamw", blocks: Sequence[str] = ()) -> None:
        self.rank, self.model = rank, copy.deepcopy(model)
        if rank.device_mesh is not None:
            rank.shard(self.model, [name for name, _ in model.named_parameters() if name not in WHOLE], blocks)
            for name, parameter in self.model.named_parameters():
                if name in WHOLE:  # as DDP does
                    parameter.register_hook(lambda gradient: rank.everyone.sum(gradient) / rank.mesh.size)
        optimization = Optimization(optimizer_of(kind, self.model), lambda step, epoch: 0.01, ema_decay=0.9)
        adapt_optimizer(optimization.optimizer, self.model)
        self.state = TrainingState(self.model, optimization, (), _make_moving_average(self.model, optimization), 1)

    def step(self, number: int) -> float:
        mesh = self.rank.mesh
        x = torch.sin(torch.arange(SAMPLES * WIDTH, dtype=torch.float64).view(SAMPLES, WIDTH) * (number + 1))
        mine = x[mesh.data_rank :: mesh.data_size]
        self.state.optimization.optimizer.zero_grad()
        loss = (self.model(mine).squeeze(1) - mine[:, 0]).square().mean()
        return finish_step(self.rank, self.state, loss, alone=self.rank.device_mesh is None and mesh.size > 1)

    def weights(self) -> list[Tensor]:
        return [whole(each.detach()) for each in self.model.parameters()]


def averages(training: Training) -> list[Tensor]:
    assert training.state.averaged is not None
    weights = training.state.averaged.weights
    named = training.model.named_parameters()
    return [whole(_like(each, weights[name]) if isinstance(each, DTensor) else weights[name]) for name, each in named]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net().double()


def far(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_the_rows_of_all_ranks_are_those_of_the_tensor() -> None:
    for n, count in product(range(1, 20), range(1, 12)):
        ranges = [part_of_rows(n, count, index) for index in range(count)]
        assert [each for low, high in ranges for each in range(low, high)] == list(range(n))
        assert [high - low for low, high in ranges if high > low] == [
            len(each) for each in torch.arange(n).chunk(count)
        ]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("blocks", [(), ("first", "norm")])
def test_training_with_rows_is_training_with_whole_states(blocks: tuple[str, ...], kind: str) -> None:
    model = net()

    def run(rank: Holding) -> tuple[list[float], list[Tensor]]:
        training = Training(rank, model, kind, blocks)
        return [training.step(number) for number in range(5)], training.weights()

    ((losses, weights),) = on_holders(1, 1, run)
    for data, shard in MESHES[1:5]:
        for found, whole in on_holders(data, shard, run):
            assert found == pytest.approx(losses, rel=1e-12)
            assert far(whole, weights) < 1e-12


def test_the_average_is_evaluated_and_training_goes_on_as_without_evaluations() -> None:
    model = net()

    def run(rank: Holding) -> list[list[float]]:
        found = []
        for evaluations in (False, True):
            training = Training(rank, model, blocks=("first",))
            losses = []
            for number in range(4):
                losses.append(training.step(number))
                if evaluations:
                    with training.state.evaluated() as averaged, torch.no_grad():
                        with evaluating(averaged, gathered=True):
                            first = float(averaged(torch.ones(2, WIDTH, dtype=torch.float64)).sum())
                        with evaluating(averaged, gathered=False):
                            assert float(averaged(torch.ones(2, WIDTH, dtype=torch.float64)).sum()) == first
                    with torch.no_grad(), evaluating(training.model, gathered=True):
                        assert (
                            float(training.model(torch.ones(2, WIDTH, dtype=torch.float64)).sum()) != first
                            or not number
                        )
            found.append(losses)
        return found

    for plain, evaluated in on_holders(1, 2, run):
        assert plain == evaluated


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"*": shard', '"*": replicate'), "fully_shard needs a parameter placed shard"),
        (("fully_shard: [a]", "reshard_after_forward: 3"), "reshard_after_forward"),
        (("fully_shard: [a]", "gather: step"), "gather"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    plan = 'version: 1\ndescription: x\nparameters:\n  "*": shard\nfully_shard: [a]\n'
    (tmp_path / "plan.yaml").write_text(plan)
    read_plan(tmp_path / "plan.yaml")
    assert change[0] in plan
    (tmp_path / "plan.yaml").write_text(plan.replace(*change))
    with pytest.raises(InputError, match=f"plan.yaml.*{said}"):
        read_plan(tmp_path / "plan.yaml")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.number = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("names", "blocks", "said"),
    [
        (["first.weight"], [], "'second.weight' is also 'first.weight'"),
        (["number"], [], "'number' is a single number: expected 'replicate'"),
        (["first.bias"], ["layer.*"], "'layer.*' of fully_shard matches no module"),
        (["first.bias"], ["layers"], "'layers' is a list of modules: expected 'layers.*'"),
    ],
)
def test_what_fsdp_cannot_split_is_one_line(names: list[str], blocks: list[str], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        shard_states(Tied(), names, blocks, (Axis("shard", 0, 2), None))


def test_norms_of_rows_are_those_of_whole_tensors() -> None:
    model = net()
    expected = [float(parameter.detach().norm()) for parameter in model.parameters()]

    for found in on_holders(1, 3, lambda rank: whole_norms(Training(rank, model).model)):
        assert found == pytest.approx(expected, rel=1e-14)


def test_a_rank_keeps_its_rows_and_no_whole_parameter_of_a_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).double()
    each = 64 * 64 * 8

    def run(rank: Holding) -> tuple[int, int]:
        found = []
        for blocks in (("*",), ()):
            mine = copy.deepcopy(model)
            rank.shard(mine, list(dict(mine.named_parameters())), blocks)
            assert sum(local(parameter).nbytes for parameter in mine.parameters()) == 2 * each
            loss = mine(torch.ones(1, 64, dtype=torch.float64)).sum()
            gathered = [parameter for parameter in mine.parameters() if not isinstance(parameter, DTensor)]
            found.append(sum(parameter.untyped_storage().nbytes() for parameter in gathered))
            loss.backward()
            assert all(isinstance(parameter, DTensor) for parameter in mine.parameters())
            assert all(parameter.grad is not None for parameter in mine.parameters())
        return found[0], found[1]

    for by_block, at_once in on_holders(1, 4, run):
        assert by_block == 0
        assert at_once == 8 * each


@needs_axes
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("blocks", [(), ("first", "norm")])
def test_what_is_sent_is_the_closed_form(blocks: tuple[str, ...], reshard: bool | None) -> None:
    from mlhpc.plugins.axes.dry_run import note_sharded_exchanges

    model = net()
    for data, shard in ((1, 2), (2, 2), (1, 4)):
        noted: Counter[str] = Counter()

        def note(axis: str, kind: str, given: int, ranks: int, noted: Counter[str] = noted) -> None:
            noted[f"{kind}_calls"] += 1
            noted[f"{kind}_bytes"] += given

        axes = Axis("shard", 0, shard, None, note), Axis("replicas", 0, data, None, note) if data > 1 else None
        planned = copy.deepcopy(model)
        names = [name for name, _ in model.named_parameters() if name not in WHOLE]
        shard_states(planned, names, blocks, axes, reshard=reshard)
        found = states_of(planned)
        assert found is not None
        note_sharded_exchanges(found, {})
        ledger = CollectiveCounter()

        def run(rank: Holding, names: Sequence[str] = names) -> None:
            mine = copy.deepcopy(model)
            rank.shard(mine, names, blocks, reshard=reshard)
            mine(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()

        with count_collectives(ledger):
            on_holders(data, shard, run)
        sent = {name: n for name, n in ledger.take().items() if not name.startswith("broadcast")}
        assert sent == {name: n * data * shard for name, n in noted.items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("before", "after"), [((1, 4), (1, 1)), ((1, 1), (1, 3)), ((2, 2), (1, 3)), ((2, 1), (1, 2)), ((1, 2), (2, 1))]
)
def test_a_checkpoint_of_one_plan_goes_on_under_another_with_the_same_losses(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    model = net()

    def plain(rank: Holding) -> list[float]:
        training = Training(rank, model)
        return [training.step(number) for number in range(6)]

    def save(rank: Holding) -> None:
        training = Training(rank, model)
        for number in range(3):
            training.step(number)
        write_checkpoint(tmp_path / "c.pt", rank, training.state, Position(1, 3))

    def go_on(rank: Holding) -> list[float]:
        torch.manual_seed(9)
        training = Training(rank, Net().double())
        restored = Checkpoint(tmp_path / "c.pt", {}, rank.mesh).load(rank.world, training.state)
        assert restored.position == Position(1, 3)
        losses = [training.step(number) for number in range(3, 6)]
        assert training.state.averaged is not None
        return [*losses, *(float(each.sum()) for each in averages(training))]

    (expected,) = on_holders(1, 1, plain)
    on_holders(*before, save)
    found = on_holders(*after, go_on)
    assert all(each == found[0] for each in found)
    assert found[0][:3] == pytest.approx(expected[3:], rel=1e-12)


def test_all_ranks_take_as_many_turns_where_layers_gather() -> None:
    plan = ParallelPlan(version=1, description="toy", parameters={"*": "shard"}, fully_shard=("x",))
    for samples, ranks, batch in product((1, 5, 8, 9), (2, 3, 4), (1, 2, 3)):
        for plain in (False, True):
            shared = [Parallel(Mesh(r, ranks, (), 1 if plain else ranks), plan) for r in range(ranks)]
            turns = [list(eval_turns(samples, batch, each)) for each in shared]
            counted = sorted(i for each in turns for turn in each if turn.counts for i in turn.indices.tolist())
            assert counted == list(range(samples))
            if not plain:
                assert len({len(each) for each in turns}) == 1


def test_a_mesh_of_holders_is_read_and_its_groups_cover_the_ranks() -> None:
    for text, ranks in (("shard=2", 8), ("data=2,shard=2,spatial=2x1x1", 8), ("data=1,shard=4,spatial=1x1x2", 8)):
        meshes = [parse_mesh(text, ("d", "h", "w"), rank=rank, ranks=ranks) for rank in range(ranks)]
        for mesh in meshes:
            assert parse_mesh(mesh.text(), ("d", "h", "w"), rank=mesh.rank, ranks=ranks) == mesh
            assert mesh.holders[mesh.piece] == mesh.rank
            assert {meshes[rank].piece for rank in mesh.holders} == set(range(mesh.shard))
            assert {meshes[rank].data_rank for rank in mesh.holders} == {
                mesh.data_rank - mesh.piece + index for index in range(mesh.shard)
            }
            assert mesh.rank in mesh.replicas
            assert len(mesh.replicas) * mesh.shard == ranks


def test_a_model_whose_initialisation_is_repeated_has_the_same_values() -> None:
    def build() -> nn.Module:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5), nn.Embedding(4, 3))
        nn.init.xavier_uniform_(model[0].weight)  # type: ignore[arg-type]
        return model

    expected, after = build(), torch.rand(1)
    model, recipe = build_deferred(build)
    assert recipe is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(4)
    recipe.fill(model, torch.device("cpu"))
    assert torch.equal(torch.rand(1), after)
    for (name, found), (_, whole) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(found, whole), name


def test_an_initialisation_that_looks_at_values_builds_the_whole_model() -> None:
    def build() -> nn.Module:
        torch.manual_seed(4)
        layer = nn.Linear(3, 3)
        nn.init.trunc_normal_(layer.weight)
        with torch.no_grad():
            layer.weight.div_(float(layer.weight.std()))
        return layer

    expected = build()
    model, recipe = build_deferred(build)
    assert recipe is None
    assert torch.equal(model.weight, expected.weight)  # type: ignore[arg-type]


def test_the_language_model_is_the_same_when_its_initialisation_is_repeated() -> None:
    chosen = load_descriptor("moe_lm")
    workload: Workload = load_workload(chosen)(load_config(chosen, "smoke"))
    assert workload.initialises_by_operators
    torch.manual_seed(1)
    expected, after = workload.build_model(ALONE).state_dict(), torch.rand(1)
    model, recipe = build_deferred(lambda: workload.build_model(ALONE))
    assert recipe is not None
    torch.manual_seed(1)
    recipe.fill(model, torch.device("cpu"))
    assert torch.equal(torch.rand(1), after)
    assert all(torch.equal(found, expected[name]) for name, found in model.state_dict().items())


@pytest.mark.parametrize("shard", [1, 2])
def test_a_rank_that_fails_ends_its_own_test_only(shard: int) -> None:
    """Else a test that expects an error ends the next test of its process in a collective."""

    def fail(rank: Holding) -> None:
        raise ValueError(f"rank {rank.mesh.rank}")

    def total(rank: Holding) -> float:
        assert rank.device_mesh is not None
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones, group=rank.device_mesh.get_group("shard"))
        return float(ones)

    with pytest.raises(ValueError, match="rank [01]"):
        on_holders(1, shard, fail)
    assert on_holders(1, 2, total) == [2.0, 2.0]
