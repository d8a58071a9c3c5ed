"""States that ranks hold in pieces: training equals that with whole states, nothing whole stays, and checkpoints fit any plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suite.config import load_config
from suite.descriptor import load_descriptor
from suite.errors import InputError
from suite.performance.plans.predict import predict
from suite.training.checkpoint import Checkpoint
from suite.training.counts.memory import LiveBytes
from suite.training.parallel.data import eval_turns, give_norms
from suite.training.parallel.deferred import build_deferred
from suite.training.parallel.mesh import Mesh, parse_mesh
from suite.training.parallel.plan import ParallelPlan, read_plan
from suite.training.parallel.sharing import Parallel
from suite.training.parallel.skeleton import ALONE
from suite.training.parallel.states import Gather, ShardedStates, opened, piece_of, pieces, shard_states
from suite.training.state import Position, TrainingState, _make_moving_average
from suite.workload import Optimization, Workload, load_workload
from tests.fixtures.thread_ranks import Holding, finish_step, on_holders, whole_norms, write_checkpoint
from workloads.deepcam.optimizer import Lamb

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


def placements(model: nn.Module) -> dict[str, str]:
    return {name: "replicate" if name == "alone.weight" else "shard" for name, _ in model.named_parameters()}


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "lamb":
        return Lamb(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Training:
    """One rank's training of `Net`, as the trainer does it."""

    def __init__(
        self, rank: Holding, model: nn.Module, gather: Gather = "layer", kind: str = "adamw", *, ahead: bool = False
    ) -> None:
        self.rank, self.model = rank, copy.deepcopy(model)
        if rank.holders is not None:
            holders = replace(rank.holders, ahead=ahead)
            shard_states(self.model, placements(model), holders, rank.everyone, gather=gather, but=())
        self.wrapped = ShardedStates(self.model) if rank.holders is not None else self.model
        optimizer = optimizer_of(kind, self.model)
        give_norms(optimizer, self.model)
        optimization = Optimization(optimizer, lambda step, epoch: 0.01, ema_decay=0.9)
        self.state = TrainingState(self.model, optimization, (), _make_moving_average(self.model, optimization), 1)

    def step(self, number: int) -> float:
        mesh = self.rank.mesh
        x = torch.sin(torch.arange(SAMPLES * WIDTH, dtype=torch.float64).view(SAMPLES, WIDTH) * (number + 1))
        mine = x[mesh.data_rank :: mesh.data_size]
        self.state.optimization.optimizer.zero_grad()
        loss = (self.wrapped(mine).squeeze(1) - mine[:, 0]).square().mean()
        return finish_step(self.rank, self.state, loss, alone=self.rank.holders is None and mesh.size > 1)

    def weights(self) -> list[Tensor]:
        with opened(self.model), torch.no_grad():
            return [
                getattr(self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]).detach().clone()
                for name, _ in self.model.named_parameters()
            ]


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net().double()


def far(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_the_pieces_of_a_tensor_are_all_of_it() -> None:
    for n, count in product(range(1, 20), range(1, 12)):
        ranges = [piece_of(n, count, index) for index in range(count)]
        assert [each for low, high in ranges for each in range(low, high)] == list(range(n))
        assert max(high - low for low, high in ranges) == -(-n // count)


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("gather", ["layer", "step"])
def test_training_with_pieces_is_training_with_whole_states(gather: Gather, kind: str) -> None:
    model = net()

    def run(rank: Holding) -> tuple[list[float], list[Tensor]]:
        training = Training(rank, model, gather, kind)
        return [training.step(number) for number in range(5)], training.weights()

    ((losses, weights),) = on_holders(1, 1, run)
    for data, shard in MESHES[1:5]:
        for found, whole in on_holders(data, shard, run):
            assert found == pytest.approx(losses, rel=1e-12)
            assert far(whole, weights) < 1e-12


class Turning(nn.Module):
    """Takes its layers in another order in every second pass, and one of them twice in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.alone = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
            nn.Linear(WIDTH, 1, bias=False),
        )
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        for index in (0, 1, 1, 2) if self.passes % 2 else (1, 2, 0, 1):
            x = torch.tanh(self.layers[index](x))
        return self.alone(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Net, Turning])
def test_training_that_gathers_ahead_is_the_same_and_sends_the_same(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    model = kind().double()

    def run(rank: Holding) -> tuple[list[float], list[Tensor], list[list[tuple[str, str, int]]]]:
        found = []
        for ahead in (False, True):
            training, logs = Training(rank, model, ahead=ahead), []
            losses = []
            for number in range(4):
                del rank.log[:]
                losses.append(training.step(number))
                logs.append(sorted(rank.log))
            found.append((losses, training.weights(), logs))
        (losses, weights, logs), (others, same, sent) = found
        assert losses == others
        assert far(weights, same) == 0
        if kind is Net:
            assert logs == sent
        return losses, weights, logs

    for data, shard in ((1, 2), (2, 2), (1, 3)):
        on_holders(data, shard, run)


def test_the_plan_of_a_run_that_gathers_ahead_says_two_layers(tmp_path: Path) -> None:
    found = load_descriptor("cosmoflow")
    text = (found.folder / "plans" / "sharded.yaml").read_text()
    (tmp_path / "ahead.yaml").write_text(text + "beside: [pieces]\n")
    costs = []
    for plan in ("sharded", str(tmp_path / "ahead.yaml")):
        config = load_config(found, "smoke", [f"plan={plan}", "mesh=shard=2"])
        costs.append(predict(found, config, Parallel.of(config, found, 0, 2)))
    one, two = costs
    assert one.exchanges == two.exchanges
    assert (one.activations, one.flops, one.optimizer) == (two.activations, two.flops, two.optimizer)
    model = load_workload(found)(load_config(found, "smoke", ())).build_model(ALONE)
    layers = [sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules()]
    layers = [size for size in layers if size]
    pairs = [sum(pair) for pair in pairwise(layers)]
    assert max(layers) <= one.gathered < max(layers) + 32  # padding of odd tensors
    assert max(pairs) <= two.gathered < max(pairs) + 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("gather: layer", "gather: step"), "pieces need gather: layer"),
        (('"*": shard', '"*": replicate'), "pieces need gather: layer and a parameter placed shard"),
        (("beside: [pieces]", "beside: [halos]"), "halos need a split dimension"),
        (("beside: [pieces]", "beside: [all]"), "beside"),
    ],
)
def test_exchanges_beside_computing_that_a_plan_cannot_have_are_refused(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    plan = 'version: 1\ndescription: x\nparameters:\n  "*": shard\ngather: layer\nbeside: [pieces]\n'
    (tmp_path / "plan.yaml").write_text(plan)
    read_plan(tmp_path / "plan.yaml")
    assert change[0] in plan
    (tmp_path / "plan.yaml").write_text(plan.replace(*change))
    with pytest.raises(InputError, match=f"plan.yaml.*{said}"):
        read_plan(tmp_path / "plan.yaml")


def test_norms_of_pieces_are_those_of_whole_tensors() -> None:
    model = net()
    expected = [float(parameter.detach().norm()) for parameter in model.parameters()]

    for found in on_holders(1, 3, lambda rank: whole_norms(Training(rank, model).model)):
        assert found == pytest.approx(expected, rel=1e-14)


def test_a_rank_keeps_its_pieces_and_no_whole_parameter_under_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).double()
    whole = 64 * 64 * 8

    def run(rank: Holding) -> dict[str, tuple[int, int]]:
        assert rank.holders is not None
        found = {}
        for gather in ("layer", "step"):
            mine = copy.deepcopy(model)
            every = dict.fromkeys(dict(mine.named_parameters()), "shard")
            shard_states(mine, every, rank.holders, rank.everyone, gather=gather, but=())  # type: ignore[arg-type]
            assert sum(parameter.nbytes for parameter in mine.parameters()) == 2 * whole
            x = torch.ones(1, 64, dtype=torch.float64)
            with LiveBytes((*mine.parameters(), x)) as live:
                loss = ShardedStates(mine)(x).sum()
                after = live.now
                loss.backward()
            assert all(each.grad is not None and each.grad.shape == each.shape for each in mine.parameters())
            found[gather] = after, live.peak
        return found

    for found in on_holders(1, 4, run):
        assert found["layer"][0] < whole / 2  # activations and what was said last
        assert found["layer"][1] < found["step"][1]
        assert found["step"][0] >= 8 * whole  # all of the parameters


def test_a_replicated_parameter_and_one_read_from_outside_are_counted_as_they_are_sent() -> None:
    def run(rank: Holding) -> list[tuple[str, str, int]]:
        training = Training(rank, net())
        training.step(0)
        return rank.log

    for log in on_holders(2, 2, run):
        kinds = {(axis, kind) for axis, kind, _ in log}
        assert {
            ("shard", "all_gather"),
            ("shard", "reduce_scatter"),
            ("replicas", "all_reduce"),
            ("all", "all_reduce"),
        } <= kinds


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
        return [*losses, float(sum(training.rank.everyone.sum(each.sum()) for each in _averaged(training)))]

    (expected,) = on_holders(1, 1, plain)
    on_holders(*before, save)
    found = on_holders(*after, go_on)
    assert all(each == found[0] for each in found)
    assert found[0][:3] == pytest.approx(expected[3:], rel=1e-12)


def _averaged(training: Training) -> list[Tensor]:
    assert training.state.averaged is not None
    return [piece.detach() for _, piece, _, _ in pieces(training.state.averaged.module)] or [torch.zeros(1)]


def test_all_ranks_take_as_many_turns_where_layers_gather() -> None:
    plan = ParallelPlan(version=1, description="toy", parameters={"*": "shard"})
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
