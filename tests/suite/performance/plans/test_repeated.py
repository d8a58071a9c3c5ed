"""A step in which few of many equal blocks run holds, computes and sends what one holds in which all of them run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from suite.config import load_config
from suite.descriptor import descriptor
from suite.performance.plans import repeated
from suite.performance.plans.predict import Common, Cost, predict
from suite.performance.plans.repeated import Notes, NotSeenError, Repeated, stacks
from suite.training.counts.flops import formulas
from suite.training.counts.memory import LiveBytes
from suite.training.parallel.recompute import recompute_blocks
from suite.training.parallel.sharing import Parallel

BLOCKS, ROWS, WIDTH = 7, 64, 32
Facts = tuple[int, int, int, int, dict[Any, int], list[int]]


class Block(nn.Module):
    """A gated layer with a second input, dropout, an exchange and, if it is odd, other work. Returns a tuple."""

    def __init__(self, notes: Notes, odd: int) -> None:
        super().__init__()
        self.odd, self.rate = odd, 0.1 + odd / 10
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self._notes = notes

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.up(x)) * (torch.sigmoid(self.up(x)) if self.odd else 1)
        self._notes("tensor", "all_reduce", x.nbytes, 2)
        return x + nn.functional.dropout(self.down(h), self.rate) * scale, h.mean()


class Stack(nn.Module):
    """Blocks of two kinds between two layers; the first block's input is not theirs."""

    def __init__(self, notes: Notes, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(notes, i % 2) for i in range(2 * BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.first(x), x.new_zeros(())
        scale = x.new_ones(WIDTH, requires_grad=True)
        with torch.no_grad():
            for block in self.blocks:
                y = block(y, scale)[0]
        for block in self.blocks:
            y, own = checkpoint(block, y, scale, use_reentrant=False) if self.way == "own" else block(y, scale)
            more = more + own
        return self.last(y).sum() + more  # type: ignore[no-any-return]


def step(way: str, *, repeat: bool) -> Facts:
    """Bytes after the forward pass, in all, at the end, FLOPs, collectives, bytes of gradients."""
    notes = Notes()
    with FakeTensorMode():
        model = Stack(notes, way)
        if way in ("full", "selective"):
            recompute_blocks(model, {f"blocks.{i}": way for i in range(2 * BLOCKS)})
        x = torch.empty(ROWS, WIDTH)
        live = LiveBytes((*model.parameters(), x), formulas)
        with live, Repeated(model, live, notes).active() if repeat else torch.enable_grad():
            loss = model(x)
            kept = live.now
            loss.backward()
            del loss
    gradients = [0 if each.grad is None else each.grad.nbytes for each in model.parameters()]
    return kept, live.peak, live.now, int(live.flops), dict(notes.found), gradients


@pytest.mark.parametrize("way", ["plain", "own", "full", "selective"])
def test_a_stack_of_two_kinds_of_blocks_is_that_of_all_of_them(way: str) -> None:
    few, every = step(way, repeat=True), step(way, repeat=False)
    assert few == every
    assert few[3] > 0
    assert sum(few[4].values()) == 2 * BLOCKS * (2 if way == "plain" else 3)


def test_few_blocks_run() -> None:
    ran = []
    notes = Notes()
    with FakeTensorMode():
        model = Stack(notes, "plain")
        for block in model.blocks:
            block.up.register_forward_hook(lambda *_: ran.append(1))
        live = LiveBytes()
        with live, Repeated(model, live, notes).active():
            model(torch.empty(ROWS, WIDTH)).backward()
    assert len(ran) == 2 * (
        3 + 2 * 3
    )  # without and with gradients; three blocks of each kind, of which one computes `up` twice


def _another(change: Callable[[nn.Module], None]) -> None:
    """A stack of equal blocks, the third of which was changed."""
    model = Stack(Notes(), "plain")
    groups = [len(each) for each in stacks(model)]
    change(model.blocks[4])
    assert groups == [BLOCKS, BLOCKS]
    assert sorted(len(each) for each in stacks(model)) == [BLOCKS - 1, BLOCKS]


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "rate", 0.0),
        lambda block: setattr(block, "odd", 5),
        lambda block: setattr(block, "up", nn.Linear(WIDTH, 2 * WIDTH)),
        lambda block: setattr(block, "up", nn.Linear(WIDTH, 4 * WIDTH, bias=False)),
        lambda block: setattr(block, "down", nn.Linear(4 * WIDTH, WIDTH).double()),
        lambda block: block.up.weight.requires_grad_(requires_grad=False),
        lambda block: block.register_buffer("more", torch.zeros(3)),
        lambda block: block.eval(),
        lambda block: block.add_module("norm", nn.LayerNorm(WIDTH)),
        lambda block: setattr(block, "up", nn.Identity()),
    ],
)
def test_a_block_that_differs_is_no_other_one(change: Callable[[nn.Module], None]) -> None:
    _another(change)


def test_a_block_with_another_rate_of_dropout_is_an_equal_one() -> None:
    model = Stack(Notes(), "plain")
    model.blocks[4].rate = 0.7
    assert [len(each) for each in stacks(model)] == [BLOCKS, BLOCKS]


class Twice(nn.Module):
    """A model whose loss needs a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(self.blocks(x).tanh().sum(), x, create_graph=True)[0].square().sum()


def test_a_derivative_of_a_derivative_is_not_repeated() -> None:
    with FakeTensorMode():
        model = Twice()
        live = LiveBytes()
        with pytest.raises(NotSeenError), live, Repeated(model, live, Notes()).active():
            model(torch.empty(ROWS, WIDTH)).backward()
        assert all("forward" not in vars(block) for block in model.blocks)


class Views(nn.Module):
    """Blocks that give a view of what they get; they run themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Flatten(0) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_gives_a_part_of_its_input_runs() -> None:
    with FakeTensorMode():
        x = torch.empty(ROWS, WIDTH, requires_grad=True)
        live = LiveBytes((x,))
        model = Views()
        with live, Repeated(model, live, Notes()).active():
            y = model(x)
            assert y.untyped_storage() is x.untyped_storage()
    assert live.peak == 0


SHARDED = ("plan=sharded", "mesh=shard=2")
CASES: dict[str, tuple[str, ...]] = {
    "moe_lm": (*SHARDED, "hyperparameters.layers=8"),
    "deepcam": ("plan=spatial", "mesh=data=1,spatial=2x1", "hyperparameters.middle_blocks=5"),
    "swinv2_moe": (*SHARDED, "hyperparameters.depths=[2, 8]"),
}
FOLDING = (
    *SHARDED,
    *("hyperparameters.evoformer_blocks=5", "hyperparameters.extra_msa_blocks=4", "hyperparameters.checkpointing=true"),
)


def _cost(name: str, given: tuple[str, ...]) -> Cost:
    config = load_config(descriptor(name), "smoke", given)
    return predict(descriptor(name), config, Parallel.of(config, descriptor(name), 0, 2))


LONG = ("deepcam", "swinv2_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CASES]
)
def test_a_workload_costs_what_it_costs_when_all_blocks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "swinv2_moe":
        _cost(name, SHARDED)  # makes tables of constants, which are kept
    few = _cost(name, CASES[name])
    assert few.peak
    monkeypatch.setattr(repeated, "LEAST", 1000)
    assert few == _cost(name, CASES[name])


@pytest.mark.long
def test_blocks_that_a_model_computes_again_itself_cost_what_all_of_them_do(monkeypatch: pytest.MonkeyPatch) -> None:
    _cost("openfold", FOLDING)  # makes tables of constants, which are kept
    few = _cost("openfold", FOLDING)
    monkeypatch.setattr(repeated, "LEAST", 1000)
    assert few == _cost("openfold", FOLDING)


class Trunk(nn.Module):
    """Blocks that are a part of a model."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(notes, 1) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.new_ones(WIDTH)
        for block in self.blocks:
            x = block(x, scale)[0]
        return x


class Again(nn.Module):
    """Called several times without gradients, then with them: a model's own blocks, blocks in a part of it, and a part without."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.trunk, self.blocks = Trunk(notes), nn.ModuleList(Block(notes, 1) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int) -> Tensor:
        scale, held = x.new_ones(WIDTH), []
        for _ in range(times):
            with torch.no_grad():
                for block in self.blocks:
                    x = block(x, scale)[0]
                x = self.last(self.trunk(x))
                held.append(x.clone())  # more lives in each time
        for block in self.blocks:
            x = block(x, scale)[0]
        return self.last(self.trunk(x)).sum() + torch.stack(held).sum()


@pytest.mark.parametrize("rows", [1, 16 * ROWS])
def test_passes_without_gradients_cost_what_all_of_them_do(rows: int) -> None:
    found, times = [], 3
    for repeat in (True, False):
        notes = Notes()
        with FakeTensorMode():
            model = Again(notes)
            x = torch.empty(rows, WIDTH)
            live = LiveBytes((*model.parameters(), x), formulas)
            with live, Repeated(model, live, notes).active() if repeat else torch.enable_grad():
                loss = model(x, times)
                kept = live.now
                loss.backward()
        found.append((kept, live.peak, int(live.flops), dict(notes.found)))
    assert found[0] == found[1]
    assert sum(found[0][3].values()) == (times + 1) * 2 * BLOCKS


def test_meshes_of_a_sweep_cost_what_each_costs_alone() -> None:
    """They share fake tensors, extents of layers and steps of the optimizer."""
    config = load_config(descriptor("moe_lm"), "smoke", ("plan=sharded",))
    common = Common()
    for mesh in ("data=4", "data=1,shard=4", "data=2,shard=2", "data=4"):
        given = config.model_copy(update={"mesh": mesh})
        parallel = Parallel.of(given, descriptor("moe_lm"), 0, 4)
        shared, alone = (predict(descriptor("moe_lm"), given, parallel, each) for each in (common, None))
        assert shared == alone
