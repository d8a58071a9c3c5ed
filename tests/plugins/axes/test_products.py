"""Products that ranks divide: training equals that on one rank, what is sent is the closed form, checkpoints fit any mesh."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

from mlhpc.plugins.axes.tensor_parallel import _slice, note_exchanges
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training import dcp
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.layout import Layout
from mlhpc.suite.training.parallel.mesh import Mesh
from mlhpc.suite.training.parallel.plan import Cut, ParallelPlan, find_plan, read_plan
from mlhpc.suite.training.state import Position
from mlhpc.workloads.moe_lm.config import MoELMConfig
from mlhpc.workloads.moe_lm.model import MoELanguageModel
from tests.fixtures.cli import mlhpc
from tests.fixtures.thread_ranks import Holding, on_tensor, whole_norms, write_checkpoint
from tests.plugins.axes.divided import Divided, Mistake, refused, split_alone, trains_as_one

SHIPPED = find_plan(load_descriptor("moe_lm"), "tensor")
PLAN, _ = read_plan(SHIPPED)
CONTEXT, SAMPLES = 8, 4


def config(balance: str = "gshard") -> MoELMConfig:
    smoke = load_config(load_descriptor("moe_lm"), "smoke").hyperparameters
    moe = structs.replace(smoke.moe, hidden=8, balance=balance, dispatch="dropless")  # type: ignore[attr-defined]
    return structs.replace(smoke, width=16, context=CONTEXT, row_bytes=CONTEXT + 1, moe=moe)  # type: ignore[return-value]


EXTENTS = {"position": CONTEXT, "width": 16, "heads": 4, "vocabulary": 256}


def built(balance: str) -> nn.Module:
    torch.manual_seed(4)
    model = MoELanguageModel(config(balance)).double()
    for layer in model.moe_layers().values():
        layer.backend = "loop"
    return model


class Training(Divided):
    """One rank's training of a language model, as the trainer does it."""

    def __init__(self, rank: Holding, model: nn.Module, plan: ParallelPlan = PLAN) -> None:
        super().__init__(rank, model, plan, EXTENTS, eps=1e-8)

    def loss(self, number: int) -> Tensor:
        mesh = self.rank.mesh
        text = torch.randint(0, 256, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(number))
        mine = text[mesh.data_rank :: mesh.data_size]
        logits, auxiliary = self.wrapped(mine[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()) + auxiliary  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("mesh", "balance"), [((1, 2), "gshard"), pytest.param((1, 4), "gshard", marks=pytest.mark.long), ((2, 2), "none")]
)
def test_ranks_that_divide_products_train_as_one(mesh: tuple[int, int], balance: str) -> None:
    """The loss that balances experts is of a rank's own samples, so it is left out where there are several groups."""
    model = built(balance)
    trains_as_one(lambda rank: Training(rank, model), mesh, 2 + 2 + 2 * 2)  # a dense and an expert FFN, two attentions


def test_rows_of_a_fused_weight_that_are_not_those_of_every_group_give_another_loss() -> None:
    """Of q, k and v each rank must have rows: torch refuses nothing if a rank has the first half of all rows instead."""
    model = built("gshard")
    fused = PLAN.parameters["blocks.*.attention.qkv.weight"]
    assert fused == Cut(split=0, groups=3, units="heads")
    wrong = structs.replace(PLAN, parameters={**PLAN.parameters, "blocks.*.attention.qkv.weight": Cut(split=0)})
    (expected,) = on_tensor(1, 1, lambda rank: Training(rank, model).step(0))

    for plan, low, high in ((PLAN, 0.0, 1e-14), (wrong, 1e-7, 1.0)):
        for found in on_tensor(1, 2, lambda rank, plan=plan: Training(rank, model, plan).step(0)):
            assert low <= abs(found - expected) / expected <= high


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_is_the_closed_form(ranks: int) -> None:
    model = built("gshard")

    def run(rank: Holding) -> list[tuple[str, str, int]]:
        Training(rank, model).step(0)
        return [entry for entry in rank.log if entry[0] == "tensor"]

    noted: list[tuple[str, str, int]] = []
    assert PLAN.tensor is not None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        note_exchanges(
            model, PLAN.tensor, EXTENTS, SAMPLES, ranks, lambda axis, kind, given, _: noted.append((axis, kind, given))
        )
    finally:
        torch.set_default_dtype(before)
    for log in on_tensor(1, ranks, run):
        assert sorted(entry for entry in log if entry[1] != "all_reduce") == sorted(noted)
        assert [kind for _, kind, _ in log].count("all_reduce") == 1  # of norms, for clipping


SWIGLU, DENSE = "hyperparameters.moe.activation=swiglu", "hyperparameters.dense=true"


@pytest.mark.parametrize(
    ("name", "settings"),
    [("tensor", ()), ("tensor", (SWIGLU,)), ("tensor_dense", (DENSE,)), ("tensor_dense", (DENSE, SWIGLU))],
)
def test_the_rehearsed_step_sends_the_closed_form(name: str, settings: tuple[str, ...]) -> None:
    resolved = load_config(load_descriptor("moe_lm"), "smoke", settings)
    shape: MoELMConfig = resolved.hyperparameters  # type: ignore[assignment]
    words = [word for each in settings for word in ("--set", each)]
    done = mlhpc("plan", "moe_lm", "--size", "smoke", "--plan", name, "--mesh", "tensor=4", "--format", "json", *words)
    (cost,) = json.loads(done.stdout)["plans"]
    noted: dict[str, list[int]] = {}
    extents = {"position": shape.context, "width": shape.width, "heads": shape.heads, "vocabulary": 256}
    tensor = read_plan(find_plan(load_descriptor("moe_lm"), name))[0].tensor
    assert tensor is not None
    note_exchanges(
        MoELanguageModel(shape),
        tensor,
        extents,
        16,
        4,
        lambda _, kind, given, __: noted.setdefault(kind, []).append(given),
    )
    found = {each["kind"]: (each["calls"], each["bytes"]) for each in cost["exchanges"] if each["axis"] == "tensor"}
    assert found == {kind: (len(given), sum(given)) for kind, given in noted.items()}


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_block_that_is_computed_again_gathers_twice_more_and_sums_once_more(policy: str, tmp_path: Path) -> None:
    """Its last sum is not needed again. A region that is computed again alone repeats what is inside: nothing is sent."""
    for pattern, gathers, sums in (("blocks.?", 4, 2), ("blocks.*.attention", 0, 0)):
        mine = tmp_path / "mine.yaml"
        mine.write_text(f"{SHIPPED.read_text()}recompute: {{{pattern}: {policy}}}\n")
        done = mlhpc("plan", "moe_lm", "--size", "smoke", "--plan", mine, "--mesh", "tensor=2", "--format", "json")
        (cost,) = json.loads(done.stdout)["plans"]
        found = {each["kind"]: each for each in cost["exchanges"] if each["axis"] == "tensor"}
        stream = 16 * 64 * 64 * 4  # samples, positions, width
        assert found["all_gather"]["calls"] == 9 + gathers
        assert found["all_gather"]["bytes"] == (8 + gathers) * stream // 2 + 16 * 32 * 256 * 4
        assert found["reduce_scatter"]["calls"] == 8 + sums
        assert found["reduce_scatter"]["bytes"] == (8 + sums) * stream


def test_in_bfloat16_products_send_half_and_the_router_does_not() -> None:
    """Of nine gathers eight are of regions; the logits of the last one are in bfloat16 too, the stream is in float32."""
    done = mlhpc(
        "plan", "moe_lm", "--size", "smoke", "--plan", "tensor", "--format", "json", "--set", "precision=bfloat16"
    )
    (cost,) = json.loads(done.stdout)["plans"]
    found = {each["kind"]: each["bytes"] for each in cost["exchanges"] if each["axis"] == "tensor"}
    assert found == {"all_gather": 1_114_112, "reduce_scatter": 1_703_936}  # what a run of two ranks counts per step


def test_norms_of_split_parameters_are_those_of_whole_ones() -> None:
    model = built("gshard")
    expected = [float(parameter.detach().norm()) for parameter in model.parameters()]

    for found in on_tensor(1, 4, lambda rank: whole_norms(Training(rank, model).model)):
        assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 4), (1, 1)),
        pytest.param((1, 1), (1, 2), marks=pytest.mark.long),
        pytest.param((1, 2), (1, 4), marks=pytest.mark.long),
        ((2, 2), (1, 2)),
        pytest.param((2, 1), (2, 2), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_of_one_mesh_goes_on_under_another_with_the_same_losses(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    model = built("none")

    def plain(rank: Holding) -> list[float]:
        training = Training(rank, model)
        return [training.step(number) for number in range(5)]

    def save(rank: Holding) -> None:
        training = Training(rank, model)
        for number in range(3):
            training.step(number)
        write_checkpoint(tmp_path / "trial_0.pt", rank, training.state, Position(1, 3))

    def go_on(rank: Holding) -> tuple[list[float], list[Tensor], list[Tensor]]:
        training = Training(rank, model)
        Checkpoint(tmp_path / "trial_0.pt", {}, rank.mesh).load(rank.world, training.state)
        assert training.state.averaged is not None
        averaged = [each.detach().clone() for each in training.state.averaged.weights.values()]
        return [training.step(number) for number in (3, 4)], averaged, list(map(local, training.model.parameters()))

    (losses,) = on_tensor(1, 1, plain)
    on_tensor(*before, save)
    for found, averaged, weights in on_tensor(*after, go_on):
        assert found == pytest.approx(losses[3:], rel=1e-12)
        assert [each.shape for each in averaged] == [each.shape for each in weights]


def _split(draw: random.Random, whole: Tensor) -> list[tuple[Layout, Tensor]]:
    """Every rank's values of a tensor and where they lie: rows, or a cut in a dimension, perhaps in groups."""
    count = draw.choice([1, 2, 4])
    if draw.choice([True, False]):
        ends = sorted(draw.randint(0, len(whole)) for _ in range(count - 1))
        rows = list(itertools.pairwise([0, *ends, len(whole)]))
        return [(Layout(whole.shape, (torch.Size([low, 0, 0]),), True), whole[low:high]) for low, high in rows]
    cut = Cut(split=draw.choice([0, 1]), groups=draw.choice([1, 2]) if count < 4 else 1)
    parts = [_slice("x", whole.shape, cut, {}, Axis("t", rank, count), 0) for rank in range(count)]
    return [(part.layout(None, written=True), part.of(whole)) for part in parts]


def test_layouts_of_all_ways_to_split_put_a_tensor_together_again(tmp_path: Path) -> None:
    draw = random.Random(3)
    for case in range(40):
        shape = torch.Size([draw.choice([4, 8, 12]), draw.choice([4, 8]), draw.choice([1, 3])])
        whole = torch.arange(shape.numel(), dtype=torch.float64).view(shape)
        saved, wanted, folder = _split(draw, whole), _split(draw, whole), tmp_path / f"{case}"
        every = [dcp.write(folder, rank, {"x": at.hold(mine)}) for rank, (at, mine) in enumerate(saved)]
        checked: list[str] = []
        assert len(dcp.finish(folder, every)) == len(saved) + 2
        for at, mine in wanted:
            found = torch.full(mine.shape, -1.0, dtype=torch.float64)
            dcp.Saved(folder, checked.append).read({"x": at.hold(found)})
            assert torch.equal(found, mine)
            assert checked[-1] != dcp.LAYOUT or not mine.numel()


def test_parts_that_are_not_the_whole_are_no_checkpoint(tmp_path: Path) -> None:
    layouts = [Layout(torch.Size([4]), (torch.Size([low]),), True) for low in (0, 3)]
    every = [dcp.write(tmp_path, rank, {"x": each.hold(torch.ones(1))}) for rank, each in enumerate(layouts)]
    with pytest.raises(ValueError, match="invalid fill tensor-volume"):
        dcp.finish(tmp_path, every)


WRONG: dict[str, Mistake] = {
    "heads that ranks do not divide": (
        "",
        "",
        ["--mesh", "tensor=3"],
        "4 heads on tensor=3: expected one of .1, 2, 4.",
    ),
    "positions that ranks do not divide": (
        "",
        "",
        ["--mesh", "tensor=4", "--set", "hyperparameters.context=62", "--set", "hyperparameters.row_bytes=63"],
        "62 positions of 'position' on tensor=4: expected one of .1, 2, 31, 62.",
    ),
    "a split parameter outside of regions": (
        "  head.weight: shard",
        "  head.weight: {split: 0}",
        [],
        "'head.weight' is split, so it must be in a module of tensor.regions",
    ),
    "positions in a plan without a tensor part": ("plan", "sharded", ["--mesh", "tensor=2"], "splits no products"),
    "a parameter without pattern": ("  norm.weight: shard\n", "", [], "'norm.weight' is matched by no pattern"),
    "a parameter with two patterns": ("  norm.weight: shard", "  norm*: shard\n  norm.w*: shard", [], "narrow one"),
    "a dimension that is not there": ("{split: 1, units: heads}", "{split: 2}", [], "has 2 dimensions: split 2"),
    "groups that do not fit": ("groups: 3", "groups: 5", [], "is not 5 groups"),
    "units that are unknown": ("groups: 3, units: heads", "groups: 3, units: horns", [], "units 'horns' have no entry"),
    "an extent that is missing": (", vocabulary: 256", "", [], "'vocabulary' has no entry under extents"),
    "dims in another order": (
        "head: [sample, position",
        "head: [position, sample",
        [],
        "expected sample, position first",
    ),
    "a region that is no module": ("    blocks.*.attention:", "    blocks.*.attend:", [], "matches no module"),
    "a region that splits nothing": (
        "  blocks.*.ffn.[ug]*: {split: 0}       # up; with swiglu also gate\n  blocks.*.ffn.down.weight: {split: 1}\n",
        "  blocks.*.ffn.*.weight: shard\n",
        [],
        "'blocks.0.ffn' has no split parameter|is matched by",
    ),
    "two ways to share samples": (
        "",
        "",
        ["--mesh", "tensor=2,spatial=2"],
        "the plan splits no dimension|expected one",
    ),
    "another precision, where no loss can be rehearsed": (
        "inputs:\n  bytes: {dims: [sample, byte], dtype: uint8}\n",
        "",
        ["--set", "precision=bfloat16"],
        "counted for float32 only",
    ),
    "an unknown key": ("units: heads}", "units: heads, unit: 1}", [], "unit"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    refused("moe_lm", SHIPPED, WRONG[mistake], tmp_path)


class Biased(nn.Module):
    """A product with a bias, which would be added by every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4)


def test_a_bias_that_every_rank_would_add_is_refused() -> None:
    assert PLAN.tensor is not None
    with pytest.raises(InputError, match=r"'down.bias' is whole but its weight is split: each of 2 ranks would add it"):
        split_alone(Biased(), PLAN.tensor, {"down.weight": Cut(split=1)}, EXTENTS)


def test_a_rank_holds_its_part_and_the_mesh_says_who_has_the_same() -> None:
    done = mlhpc("plan", "moe_lm", "--size", "smoke", "--plan", "tensor", "--mesh", "data=2,tensor=4")
    assert done.returncode == 0, done.stderr
    assert "mesh data=2,tensor=4: 8 ranks" in done.stdout
    assert [Mesh(rank, 8, tensor=4).part for rank in range(8)] == [0, 1, 2, 3] * 2
    assert list(Mesh(5, 8, tensor=4).group) == [4, 5, 6, 7]
    assert list(Mesh(5, 8, tensor=4).twins) == [1, 5]
