"""Operands that lie in parts of rows or columns: exchanges are exact transposes, wrong plans are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlhpc.plugins.axes.axial import split_axes
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import convert
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.mesh import Mesh, parse_mesh
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import AxialPlan, Operand, find_plan
from tests.fixtures.thread_ranks import Holding, on_axial
from tests.plugins.axes.divided import Mistake, refused

SHIPPED = find_plan(load_descriptor("openfold"), "axial")
DIMS = ("sample", "i", "j")


class Maps(nn.Module):
    """A layer along columns and one that needs all rows, between a map that ranks have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.columns, self.result, self.first = nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity()
        self.scale = nn.Parameter(torch.arange(1.0, 4.0))
        self.other, self.dropout = nn.Identity(), nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.begin(batch["x"]) * self.scale[:, None, None]
        x = x + self.columns(x)
        x = x * self.other(x).sin().sum(1, keepdim=True)
        return self.result(x), self.first(x[:, 0])


def plan_of(**more: Any) -> AxialPlan:
    modules = {
        "begin": {"inputs": {0: {"cut": "i", "dims": DIMS}}},
        "columns": {
            "inputs": {0: {"turn": ("i", "j"), "dims": DIMS}},
        },
        "other": {"outputs": {0: {"gather": "i", "dims": DIMS}}},
        "result": {"outputs": {0: {"end": "i", "dims": DIMS}}},
        "first": {"inputs": {0: {"first": "i", "dims": ("sample", "j")}}},
    }
    return convert({"modules": {**modules, **more}}, AxialPlan)


class Columns(nn.Module):
    """What `Maps.columns` stands for: a sum along columns, of which its output lies in rows again."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) ** 2


@pytest.mark.parametrize(("ranks", "shape"), [(2, (3, 4, 4)), (3, (3, 7, 5)), (4, (3, 9, 4))])
def test_exchanges_and_their_transposes_are_those_of_one_rank(ranks: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    plan = plan_of(
        columns={
            "inputs": {0: {"turn": ("i", "j"), "dims": DIMS}},
            "outputs": {0: {"turn": ("j", "i"), "dims": DIMS}},
        }
    )

    def model() -> Maps:
        made = Maps().double()
        made.columns = Columns()  # type: ignore[assignment]
        return made

    def step(made: Maps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mine = x.clone().requires_grad_()
        whole, first = made({"x": mine})
        loss = (whole * weight).sum() + (first * weight[:, 1]).sum().sin()
        loss.backward()  # type: ignore[no-untyped-call]
        assert made.scale.grad is not None
        assert mine.grad is not None
        return loss.detach(), whole.detach(), made.scale.grad, mine.grad

    def on_part(rank: Holding) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert rank.tensor is not None
        made = model()
        split_axes(made, plan, {}, rank.tensor)
        loss, whole, scale, mine = step(made)
        return loss, whole, rank.everyone.sum(scale) / ranks, rank.everyone.sum(mine) / ranks

    expected = step(model())
    for found in on_axial(ranks, on_part):
        for each, one in zip(found, expected, strict=True):
            torch.testing.assert_close(each, one, rtol=1e-12, atol=1e-12)


def test_what_stays_on_a_rank_is_not_sent() -> None:
    noted: list[tuple[str, int]] = []
    axis = Axis("axial", 1, 4, None, lambda _, kind, given, ranks: noted.append((kind, given)))
    made = Maps()
    split_axes(made, plan_of(), {}, axis)
    with pytest.raises(RuntimeError):  # columns stay in parts, so rows and columns do not fit
        made({"x": torch.randn(3, 8, 12)})
    assert noted == [("all_to_all", 3 * 2 * 9 * 4)]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"nothing": {"inputs": {0: {"cut": "i", "dims": DIMS}}}}, "'nothing' of axial matches no module"),
        ({"begi*": {"inputs": {0: {"cut": "i", "dims": DIMS}}}}, "'begin' is matched by 'begin' and 'begi.'"),
        ({"begin": {"inputs": {1: {"cut": "i", "dims": DIMS}}}}, "input 1 of 'begin' is no tensor"),
        ({"begin": {"inputs": {0: {"cut": "i", "dims": DIMS[:2]}}}}, "'begin' has 3 dimensions: its dims are sample, i"),
        (
            {"begin": {"inputs": {0: {"gather": "i", "dims": DIMS}}}},
            "'begin' needs an input that is split along 'i'; no earlier operand is",
        ),
        (
            {"begin": {"inputs": {0: {"first": "i", "dims": DIMS}}}},
            "'begin' needs an input that is split along 'i'; no earlier operand is",
        ),
        (
            {"other": {"outputs": {0: {"cut": "i", "dims": DIMS}}}},
            "has 2 positions of 'i', other inputs have 4: the plan may split it twice",
        ),
        ({"other": {"outputs": {0: {"turn": ("j", "i"), "dims": DIMS}}}}, "has 4 positions of 'j': this rank's part has 2"),
    ],
)  # fmt: skip
def test_operands_that_do_not_lie_as_the_plan_says_are_refused(more: dict[str, Any], reason: str) -> None:
    made = Maps()
    made.columns = Columns()  # type: ignore[assignment]
    turned = {
        "inputs": {0: {"turn": ("i", "j"), "dims": DIMS}},
        "outputs": {0: {"turn": ("j", "i"), "dims": DIMS}},
    }

    def run() -> None:
        split_axes(made, plan_of(**{"columns": turned, **more}), {}, Axis("axial", 1, 2))
        made({"x": torch.randn(3, 4, 4)})

    with pytest.raises(InputError, match=reason):
        run()


def test_a_dimension_without_positions_needs_no_module() -> None:
    gone = {"inputs": {0: {"cut": "i", "dims": ("sample", "template", "i")}}}
    split_axes(Maps(), plan_of(template_stack=gone), {"template": 0}, Axis("axial", 0, 2))
    with pytest.raises(InputError, match="'template_stack' of axial matches no module"):
        split_axes(Maps(), plan_of(template_stack=gone), {"template": 1}, Axis("axial", 0, 2))


def test_a_mask_is_drawn_whole_and_each_rank_keeps_its_part() -> None:
    whole = torch.randn(3, 7, 1)
    found = []
    for rank in range(3):
        made = Maps()
        plan = convert(
            {
                "modules": {"begin": {"inputs": {0: {"cut": "i", "dims": DIMS}}}},
                "draws": {"dropout": {"dims": ("sample", "i", "one"), "along": "i"}},
            },
            AxialPlan,
        )
        split_axes(made, plan, {}, Axis("axial", rank, 3))
        torch.manual_seed(1)
        part = made.begin(whole)
        found.append(made.dropout(torch.ones_like(part)))
        assert found[-1].shape == part.shape
    torch.manual_seed(1)
    assert torch.equal(torch.cat(found, 1), nn.functional.dropout(torch.ones(3, 7, 1), 0.5))


def test_ranks_of_a_sample_are_consecutive() -> None:
    assert [Mesh(rank, 8, axial=4).part for rank in range(8)] == [0, 1, 2, 3] * 2
    assert list(Mesh(5, 8, axial=4).group) == [4, 5, 6, 7]
    mesh = parse_mesh("data=2,shard=2,axial=4", (), rank=9, ranks=16)
    assert (mesh.data_rank, mesh.piece, mesh.part, mesh.text()) == (2, 0, 1, "data=2,shard=2,axial=4")
    assert parse_mesh(mesh.text(), (), rank=9, ranks=16) == mesh
    assert Operand(dims=DIMS, turn=("i", "j")).along == "i"


def test_the_log_names_the_axis_and_former_plans_are_as_they_were() -> None:
    chosen = load_descriptor("openfold")
    given = load_config(chosen, "smoke", ["plan=axial", "mesh=axial=2"])
    assert Parallel.of(given, chosen, 3, 4).logged()["mesh"] == {
        "data": 2, "shard": 1, "tensor": 1, "spatial": [], "axial": 2,
    }  # fmt: skip
    given = load_config(chosen, "smoke", ["plan=sharded", "mesh=shard=2"])
    assert "axial" not in Parallel.of(given, chosen, 0, 2).logged()["mesh"]


CUT = "{cut: i, dims: [sample, i, j, bin]}"
WRONG: dict[str, Mistake] = {
    "a plan without rows": ("plan", "sharded", ["--mesh", "axial=2"], "plan 'sharded' splits no rows: leave axial out"),
    "two ways to share samples": ("", "", ["--mesh", "axial=2,spatial=2"], "splits no dimension|cannot be combined: give one"),
    "rows and products": ("", "", ["--mesh", "axial=2,tensor=2"], "tensor and axial cannot be combined: give one of them"),
    "two numbers": ("", "", ["--mesh", "axial=2x2"], "axial is one number"),
    "balanced batches": (
        "",
        "",
        ["--set", "hyperparameters.balanced_batches=true"],
        "give --set hyperparameters.balanced_batches=false",
    ),
    "compiled": ("", "", ["--set", "compile=true"], "torch.compile does not support split samples"),
    "ranks that do not fit": ("", "", ["--mesh", "axial=3", "--nodes", "4"], "expected a multiple of 3 ranks"),
    "a dimension that is not there": (CUT, "{cut: k, dims: [sample, i, j, bin]}", [], "yaml:\\d+: 'k' is not one of"),
    "two ways at once": (CUT, "{cut: i, end: i, dims: [sample, i, j, bin]}", [], "cut, end given: expected one of cut"),
    "no way": (CUT, "{dims: [sample, i, j, bin]}", [], "nothing given: expected one of"),
    "a turn on the spot": (CUT, "{turn: [i, i], dims: [sample, i, j, bin]}", [], "turn is i, i: expected two"),
    "a turn to one": (CUT, "{turn: [i], dims: [sample, i, j, bin]}", [], "turn is i: expected two"),
    "a dimension twice": (CUT, "{cut: i, dims: [sample, i, i, bin]}", [], "dims name a dimension twice"),
    "nothing to do": ("{inputs: {0: " + CUT + "}}", "{}", [], "expected inputs or outputs"),
    "an unknown key": (CUT, "{cutt: i, dims: [sample, i, j, bin]}", [], "cutt"),
    "a draw of another": ("channel], along: i}", "channel], along: k}", [], "'k' is not one of its dims"),
    "a pattern of nothing": ("recycling_embedder.linear:", "recycling_embedder.lin:", [], "of axial matches no module"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(mistake: str, tmp_path: Path) -> None:
    refused("openfold", SHIPPED, WRONG[mistake], tmp_path)
