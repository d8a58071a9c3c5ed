"""Rows and columns that ranks share: loss, gradients and predictions are those of one rank, what is sent is what is planned."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from mlhpc.plugins.axes.axial import run_to_ends, split_axes
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.plan import AxialPlan, find_plan, read_plan
from mlhpc.suite.training.state import Position, TrainingState, _make_moving_average
from mlhpc.suite.workload import Optimization
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.data import OpenFoldData
from mlhpc.workloads.openfold.evoformer import SharedDropout
from mlhpc.workloads.openfold.losses import compute_losses
from mlhpc.workloads.openfold.model import OpenFoldNet
from tests.fixtures.thread_ranks import Holding, finish_step, on_axial
from tests.workloads.openfold.conftest import SMALL_NET
from tests.workloads.openfold.test_model import scrambled

PLAN = read_plan(find_plan(load_descriptor("openfold"), "axial"))[0].axial
assert PLAN is not None
ROWS = {
    "max_extra_msa": 5,
    "num_recycling_iters": 1,
    "evoformer_blocks": 1,
}  # 3 + 2 rows, 10 residues: no number divides
DROPOUT = {"msa_dropout": 0.25, "pair_dropout": 0.25}


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the model's own casts
    yield
    torch.set_default_dtype(before)


class Drawn(nn.Module):
    """Dropout whose mask is a function of its shape: threads share torch's generator, ranks do not."""

    p = 0.25

    def forward(self, ones: Tensor) -> Tensor:
        return (torch.arange(ones.numel()).view(ones.shape) * 7919 % 11 > 2) / 0.75


def network(config: OpenFoldConfig) -> OpenFoldNet:
    model = OpenFoldNet(config)
    scrambled(model)
    for module in model.modules():
        if isinstance(module, SharedDropout) and module.mask.p:
            module.mask = Drawn()
    return model


def batch_of(made_once: Callable[[str], Path], config: OpenFoldConfig, split: str = "train") -> dict[str, Tensor]:
    data = OpenFoldData(made_once("openfold"), split, config, 4)
    batch = data.load([0, 1], seed=0, epoch=1 if split == "train" else 0)
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def step(model: nn.Module, config: OpenFoldConfig, batch: dict[str, Tensor]) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of all parameters."""
    loss = compute_losses(config, model.train()(batch), batch)["total"].mean()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return float(loss.detach()), gradients


def mean_of(rank: Holding, tensors: list[Tensor]) -> list[Tensor]:
    """The mean of each tensor over all ranks, in one exchange."""
    total = rank.everyone.sum(torch.cat([each.reshape(-1) for each in tensors])) / rank.mesh.size
    parts = total.split([each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(2, {}), (2, {"checkpointing": True} | DROPOUT), (3, DROPOUT), (5, {"max_templates": 0, "max_msa_clusters": 7})],
)
def test_ranks_that_share_rows_compute_as_one(
    made_once: Callable[[str], Path], ranks: int, changes: dict[str, Any]
) -> None:
    """Uneven parts, templates, recycling, recomputed blocks and shared dropout included."""
    config = structs.replace(SMALL_NET, **(ROWS | changes))
    model, batch = network(config), batch_of(made_once, config)
    held_out = batch_of(made_once, config, "validation")  # of another length
    loss, gradients = step(copy.deepcopy(model), config, batch)
    with torch.no_grad():
        expected = model.eval()(held_out)

    def run(rank: Holding) -> tuple[float, list[Tensor], Any, list[tuple[str, str, int]]]:
        mine = copy.deepcopy(model)
        assert PLAN is not None
        assert rank.tensor is not None
        split_axes(mine, PLAN, {"template": config.max_templates}, rank.tensor)
        averaged = copy.deepcopy(mine)  # as the moving average is; its hooks are the same
        found, gradients = step(mine, config, batch)
        sent = list(rank.log)
        mean = mean_of(rank, gradients)
        with torch.no_grad():
            return found, mean, averaged.eval()(held_out), sent

    for found, mean, prediction, sent in on_axial(ranks, run):
        assert found == pytest.approx(loss, rel=1e-13)
        for mine, whole, (name, _) in zip(mean, gradients, model.named_parameters(), strict=True):
            assert float((mine - whole).abs().max()) <= 1e-8 * float(whole.abs().max()) + 1e-15, name
        torch.testing.assert_close(prediction.structure.atoms, expected.structure.atoms, rtol=1e-11, atol=1e-10)
        torch.testing.assert_close(prediction.masked_msa, expected.masked_msa, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(prediction.distogram, expected.distogram, rtol=1e-11, atol=1e-11)
        assert {kind for _, kind, _ in sent} == {"all_gather", "all_to_all", "all_reduce", "reduce_scatter"}


def test_a_chain_with_fewer_residues_than_ranks_can_be_evaluated(made_once: Callable[[str], Path]) -> None:
    """Ranks without a residue; rows are as many as in training."""
    config = structs.replace(SMALL_NET, **{**ROWS, "crop_size": 4, "num_recycling_iters": 0})
    model, batch = network(config).eval(), batch_of(made_once, config)
    with torch.no_grad():
        expected = model(batch)

    def run(rank: Holding) -> Any:
        mine = copy.deepcopy(model)
        assert PLAN is not None
        assert rank.tensor is not None
        split_axes(mine, PLAN, {}, rank.tensor)
        with torch.no_grad():
            return mine(batch)

    for found in on_axial(5, run):
        torch.testing.assert_close(found.structure.atoms, expected.structure.atoms, rtol=1e-11, atol=1e-10)
        torch.testing.assert_close(found.distogram, expected.distogram, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_sent_in_a_step_is_what_is_noted_without_ranks(
    made_once: Callable[[str], Path], checkpointing: bool
) -> None:
    config = structs.replace(SMALL_NET, **{**ROWS, "checkpointing": checkpointing})
    model, batch = network(config), batch_of(made_once, config)

    def run(rank: Holding) -> list[tuple[str, str, int]]:
        mine = copy.deepcopy(model)
        assert PLAN is not None
        assert rank.tensor is not None
        split_axes(mine, PLAN, {}, rank.tensor)
        step(mine, config, batch)
        return rank.log

    for rank, log in enumerate(on_axial(2, run)):
        noted: list[tuple[str, str, int]] = []
        assert PLAN is not None
        alone = copy.deepcopy(model)
        axis = Axis("axial", rank, 2, None, lambda axis, kind, given, _, to=noted: to.append((axis, kind, given)))
        split_axes(alone, PLAN, {}, axis)
        step(alone, config, batch)
        assert log == noted


def _without(number: int, path: str, kind: str = "inputs") -> AxialPlan:
    """The shipped plan with one operand left as it is."""
    ways = PLAN.modules[path]
    left = {key: way for key, way in getattr(ways, kind).items() if key != number}
    return structs.replace(PLAN, modules={**PLAN.modules, path: structs.replace(ways, **{kind: left})})


FORGOTTEN = {
    "a mask of rows": (2, "evoformer.blocks.*.msa_att_row", "inputs"),
    "a mask of columns": (1, "evoformer.blocks.*.msa_att_col", "inputs"),
    "columns of the alignment": (0, "extra_msa_stack.blocks.*.msa_att_col", "inputs"),
    "rows afterwards": (0, "evoformer.blocks.*.msa_att_col", "outputs"),
    "a bias": (0, "*.msa_att_row.linear_z", "outputs"),
    "the other operand": (1, "*.tri_mul_out.product", "inputs"),
    "the turned operand": (0, "*.tri_mul_in.product", "inputs"),
    "the pair map": (1, "input_embedder", "outputs"),
    "the recycled pair map": (1, "recycling_embedder", "inputs"),
    "the templates": (0, "template_stack", "inputs"),
    "the alignment": (0, "evoformer", "inputs"),
    "the other residue": (1, "evoformer.blocks.*.outer_product_mean.outer", "inputs"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_plan_that_forgets_an_operand_fails_before_anything_is_sent(
    made_once: Callable[[str], Path], what: str
) -> None:
    config = structs.replace(SMALL_NET, **ROWS)
    batch = {name: x.to("meta") for name, x in batch_of(made_once, config).items()}
    number, path, kind = FORGOTTEN[what]
    with torch.device("meta"):
        model = OpenFoldNet(config)
    plan = _without(number, path, kind)
    split_axes(model, plan, {}, Axis("axial", 0, 2))
    with pytest.raises((InputError, RuntimeError)):
        run_to_ends(model, plan, batch)


def test_more_ranks_than_rows_are_refused(made_once: Callable[[str], Path]) -> None:
    config = structs.replace(SMALL_NET, **ROWS)
    batch = {name: x.to("meta") for name, x in batch_of(made_once, config).items()}
    assert PLAN is not None
    with torch.device("meta"):
        model = OpenFoldNet(config)
    split_axes(model, PLAN, {}, Axis("axial", 0, 6))
    with pytest.raises(
        InputError, match="input 0 of 'extra_msa_embedder' has 5 positions of 'extra': expected axial=5 or less"
    ):
        run_to_ends(model.train(), PLAN, batch)


def test_the_unsplit_model_reaches_its_ends(made_once: Callable[[str], Path]) -> None:
    """So that the failures above are of what was left out."""
    config = structs.replace(SMALL_NET, **ROWS)
    batch = {name: x.to("meta") for name, x in batch_of(made_once, config).items()}
    assert PLAN is not None
    with torch.device("meta"):
        model = OpenFoldNet(config)
    split_axes(model, PLAN, {}, Axis("axial", 0, 2))
    run_to_ends(model.train(), PLAN, batch)


@pytest.mark.long
def test_a_checkpoint_of_shared_rows_goes_on_on_one_rank_and_back(
    made_once: Callable[[str], Path], tmp_path: Path
) -> None:
    config = structs.replace(
        SMALL_NET, **{**ROWS, "num_recycling_iters": 0, "max_templates": 0, "structure_iterations": 1}
    )
    model, batch = network(config), batch_of(made_once, config)

    class Training:
        """One rank's training, as the trainer does it."""

        def __init__(self, rank: Holding) -> None:
            self.rank, self.model = rank, copy.deepcopy(model)
            assert PLAN is not None
            assert rank.tensor is not None
            if rank.mesh.axial > 1:
                split_axes(self.model, PLAN, {"template": 0}, rank.tensor)
            optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, eps=1e-3)
            optimization = Optimization(optimizer, lambda step, epoch: 1e-3, ema_decay=0.9)
            self.state = TrainingState(self.model, optimization, (), _make_moving_average(self.model, optimization), 1)
            self.checkpoint = Checkpoint(tmp_path / "trial_0.pt", {}, rank.mesh)

        def step(self) -> float:
            self.state.optimization.optimizer.zero_grad()
            loss, gradients = step(self.model, config, batch)
            for parameter, mean in zip(self.model.parameters(), mean_of(self.rank, gradients), strict=True):
                parameter.grad = mean
            return finish_step(self.rank, self.state, torch.tensor(loss, requires_grad=True), alone=False)

        def save(self, step: int) -> None:
            snapshot = self.checkpoint.snapshot(self.rank.world, self.state, Position(1, step))
            every = self.rank.world.gather(snapshot.write(), bytes)
            if every is not None:
                snapshot.commit(every)

    def plain(rank: Holding) -> list[float]:
        training = Training(rank)
        return [training.step() for _ in range(4)]

    def begin(rank: Holding) -> None:
        training = Training(rank)
        training.step()
        training.save(1)

    def go_on(rank: Holding) -> list[float]:
        training = Training(rank)
        restored = training.checkpoint.load(rank.world, training.state)
        found = [training.step()]
        training.save(restored.position.step + 1)
        return found

    (expected,) = on_axial(1, plain)
    on_axial(2, begin)
    for ranks, loss in zip((1, 3, 2), expected[1:], strict=True):
        for found in on_axial(ranks, go_on):
            assert found == pytest.approx([loss], rel=1e-12)
