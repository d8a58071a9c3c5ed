"""Products of SwinV2-MoE that ranks divide with nothing in parts between: biases after sums, heads per stage, what is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.plan import Cut, extents_of, find_plan, read_plan
from mlhpc.suite.training.state import Position
from mlhpc.workloads.swinv2_moe.config import SwinV2MoEConfig
from mlhpc.workloads.swinv2_moe.model import SwinV2MoE
from tests.fixtures.cli import mlhpc
from tests.fixtures.thread_ranks import Holding, on_tensor, whole_norms, write_checkpoint
from tests.plugins.axes.divided import Divided, refused, split_alone, trains_as_one

SHIPPED = find_plan(load_descriptor("swinv2_moe"), "tensor")
PLAN, _ = read_plan(SHIPPED)
SAMPLES = 4


def config(balance: str) -> SwinV2MoEConfig:
    """Two stages of one and two blocks; windows that shift in the first; heads that two and four ranks divide."""
    smoke = load_config(load_descriptor("swinv2_moe"), "smoke").hyperparameters
    moe = structs.replace(
        smoke.moe, hidden=8, balance=balance, dispatch="dropless", capacity_factor=None, gate_noise=0.0
    )
    return structs.replace(smoke, embed=8, window=2, pixels=16, heads=(4, 4), moe=moe)  # type: ignore[return-value]


def built(balance: str) -> nn.Module:
    torch.manual_seed(4)
    model = SwinV2MoE(config(balance)).double()
    for layer in model.moe_layers().values():
        layer.backend = "loop"
    for name, parameter in model.named_parameters():  # blocks that begin as the identity would hide their gradients
        if "norm.weight" in name or "bias" in name:
            nn.init.uniform_(parameter, 0.5, 1.0)
    return model


class Training(Divided):
    """One rank's training of images, as the trainer does it."""

    def __init__(self, rank: Holding, model: nn.Module) -> None:
        super().__init__(rank, model, PLAN, {"heads": 4}, eps=1e-3)

    def loss(self, number: int) -> Tensor:
        mesh = self.rank.mesh
        draw = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (SAMPLES, 16, 16), generator=draw, dtype=torch.uint8)[
            mesh.data_rank :: mesh.data_size
        ]
        label = torch.randint(0, 2, (SAMPLES,), generator=draw)[mesh.data_rank :: mesh.data_size]
        logits, auxiliary = self.wrapped(images)
        return F.cross_entropy(logits, label) + auxiliary  # type: ignore[no-any-return]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("mesh", "balance"), [((1, 2), "gshard"), pytest.param((1, 4), "gshard", marks=pytest.mark.long), ((2, 2), "none")]
)
def test_ranks_that_divide_heads_and_experts_train_as_one(mesh: tuple[int, int], balance: str) -> None:
    model = built(balance)
    trains_as_one(
        lambda rank: Training(rank, model), mesh, 4 * 7 + 3 * 4 + 4
    )  # attentions, dense FFNs, experts; of each the bias after the sum too


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_region_sends_two_sums_of_its_output(ranks: int) -> None:
    model = built("gshard")

    def run(rank: Holding) -> list[tuple[str, str, int]]:
        Training(rank, model).step(0)
        return [entry for entry in rank.log if entry[0] == "tensor"]

    stream = [SAMPLES * 16 * 8 * 8] * 8 + [SAMPLES * 4 * 16 * 8] * 8  # two blocks of two regions, forward and backward
    for log in on_tensor(1, ranks, run):
        assert {kind for _, kind, _ in log} == {"all_reduce"}
        assert sorted(given for *_, given in log)[1:] == sorted(stream)  # the first is of norms, for clipping
        assert len(log) == len(stream) + 1


def test_norms_are_those_of_whole_tensors() -> None:
    model = built("gshard")
    expected = [float(parameter.detach().norm()) for parameter in model.parameters()]

    for found in on_tensor(1, 4, lambda rank: whole_norms(Training(rank, model).model)):
        assert found == pytest.approx(expected, rel=1e-14)


def test_each_rank_holds_its_part_of_a_bias_after_the_sum_and_adds_that() -> None:
    model = built("none")

    def run(rank: Holding) -> tuple[Tensor, Tensor]:
        attention = Training(rank, model).model.get_submodule("stages.0.0.attention")
        return attention.out.bias, local(attention.out._parameters["bias"])  # type: ignore[return-value, union-attr, index]

    whole = model.get_parameter("stages.0.0.attention.out.bias")
    found = on_tensor(1, 2, run)
    for number, (read, held) in enumerate(found):
        assert torch.equal(held, whole.chunk(2)[number])
        assert torch.equal(read.chunk(2)[number], held)
    assert torch.equal(found[0][0] + found[1][0], whole)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 4), (1, 1)),
        pytest.param((1, 1), (1, 2), marks=pytest.mark.long),
        pytest.param((2, 2), (1, 4), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_under_another_mesh(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    model = built("none")

    def plain(rank: Holding) -> list[float]:
        training = Training(rank, model)
        return [training.step(number) for number in range(4)]

    def save(rank: Holding) -> None:
        training = Training(rank, model)
        for number in range(2):
            training.step(number)
        write_checkpoint(tmp_path / "trial_0.pt", rank, training.state, Position(1, 2))

    def go_on(rank: Holding) -> list[float]:
        training = Training(rank, model)
        Checkpoint(tmp_path / "trial_0.pt", {}, rank.mesh).load(rank.world, training.state)
        return [training.step(number) for number in (2, 3)]

    (losses,) = on_tensor(1, 1, plain)
    on_tensor(*before, save)
    for found in on_tensor(*after, go_on):
        assert found == pytest.approx(losses[2:], rel=1e-12)


WRONG = {
    "a bias that each rank would add": (
        "ffn.down.bias: {after: sum}",
        "ffn.down.bias: shard",
        r"'stages.0.0.ffn.down.bias' is whole but its weight is split: each of 2 ranks",
    ),
    "experts' bias that each rank would add": (
        "down_bias_ED: {after: sum, expert: true}",
        "down_bias_ED: replicate",
        r"experts.down_bias_ED' is whole",
    ),
    "a bias of columns": (
        "ffn.up.*: {split: 0}",
        "ffn.up.weight: {split: 0}\n  stages.*.ffn.up.bias: {after: sum}",
        r"up.bias' has after: sum, but no weight",
    ),
    "a weight outside of regions": (
        "head.*: shard",
        "head.bias: shard\n  head.weight: {after: sum}",
        r"'head.weight' is added after a sum",
    ),
    "a bias of a whole product": (
        "position_bias.hidden.*: shard",
        "position_bias.hidden.*: {after: sum}",
        r"hidden.bias' has after: sum, but no weight|hidden.weight' has after: sum, but no weight",
    ),
    "another word": ("ffn.down.bias: {after: sum}", "ffn.down.bias: {after: mean}", r"parameters"),
    "heads of the first stage": ("tensor:", "mesh: tensor=4\ntensor:", r"mesh|twice"),
    "parts that nothing makes": ("tensor:\n", "tensor:\n  along: h\n", r"along: h needs begins and ends: add them"),
    "dims of what does not lie in parts": (
        "attention: {}",
        "attention: {dims: [sample, h]}",
        r"begins, ends and dims need along: add it, or remove them",
    ),
    "no inputs": (
        "inputs:\n  image: {dims: [sample, h, w], dtype: uint8}\n  label: {dims: [sample], dtype: uint8}\n",
        "",
        r"needs inputs",
    ),
    "a field that is not there": ("{field: y_TD}", "{field: y}", r"expected field"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    before, after, reason = WRONG[mistake]
    refused("swinv2_moe", SHIPPED, (before, after, (), reason), tmp_path)


def test_heads_of_all_stages_are_divided() -> None:
    """Smoke has 2 and 4 heads: what divides both counts."""
    smoke = load_config(load_descriptor("swinv2_moe"), "smoke")
    assert extents_of(PLAN, smoke)["heads"] == 2
    done = mlhpc("plan", "swinv2_moe", "--size", "smoke", "--plan", "tensor", "--mesh", "tensor=4")
    assert done.returncode == 2
    assert "q_bias': 2 heads on tensor=4: expected one of [1, 2]" in done.stderr


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Module()
        self.ffn.down = nn.Linear(4, 4)


def test_a_late_bias_needs_products_of_the_region() -> None:
    assert PLAN.tensor is not None
    tensor = structs.replace(PLAN.tensor, regions={"ffn": next(iter(PLAN.tensor.regions.values()))})
    late = {"ffn.down.bias": Cut(after="sum")}
    split_alone(Nested(), tensor, {"ffn.down.weight": Cut(split=1), **late}, {})
    for weights in ({}, {"ffn.down.weight": Cut(split=0)}):
        with pytest.raises(InputError, match="'ffn.down.bias' has after: sum, but no weight"):
            split_alone(Nested(), tensor, {**weights, **late}, {})


def test_gradients_of_a_bias_after_the_sum_are_parts_of_the_whole() -> None:
    model = built("none")

    def run(rank: Holding) -> Tensor:
        training = Training(rank, model)
        training.step(0)  # clipping makes all gradients smaller alike
        grad = dict(training.model.named_parameters())["stages.1.1.ffn.experts.down_bias_ED"].grad
        assert grad is not None
        return local(grad)

    (expected,) = on_tensor(1, 1, run)
    assert float(expected.abs().max()) > 0
    for rank, found in enumerate(on_tensor(2, 2, run)):
        mine = expected.chunk(2, dim=1)[rank % 2]
        assert float((found - mine).abs().max()) < 1e-12 * float(expected.abs().max())
