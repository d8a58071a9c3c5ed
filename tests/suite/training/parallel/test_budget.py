"""Blocks within a memory budget: the same gradients, bit for bit, with dropout on; less is kept; what has no trace is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.plans.remembered import CachingFakeTensorMode
from mlhpc.suite.training.counts.flops import list_flop_formulas
from mlhpc.suite.training.counts.memory import LiveBytes
from mlhpc.suite.training.parallel.plan import Budget, read_plan
from mlhpc.suite.training.parallel.recompute import recompute_blocks, recomputed_of

WIDTH = 16


class Block(nn.Module):
    """An MLP with dropout whose forward pass a test may change."""

    def __init__(self, change: Callable[[Block, Tensor], Any] = lambda block, x: x) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.3)
        self.change = change
        self.seen: Any = None

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        y = self.down(torch.tanh(self.up(self.dropout(x)) * scale))
        return self.change(self, x + y)


def step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], int, int]:
    """Gradients and the random number that comes next; bytes that are kept; FLOPs."""
    torch.manual_seed(5)
    model.zero_grad()
    live = LiveBytes((*model.parameters(), x), list_flop_formulas)
    with live:
        loss = model(x).square().sum()
        kept = live.now
        loss.backward()
    return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(1)], kept, live.flops


def budgeted(model: nn.Module, budget: float) -> nn.Module:
    model = copy.deepcopy(model)
    recompute_blocks(model, {"?": Budget(budget=budget)})
    return model


def test_gradients_are_the_same_bits_and_less_is_kept() -> None:
    plain, x = nn.Sequential(Block(), Block()), torch.randn(6, WIDTH)
    expected, most, flops = step(plain, x)
    kept_by = []
    for budget in (1.0, 0.0):
        model = budgeted(plain, budget)
        step(model, x)
        counter = recomputed_of(model)
        assert counter is not None
        again = counter.take()
        found, kept, executed = step(model, x)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert executed - flops == again  # what is logged is what the dispatcher sees
        assert counter.take() is None
        kept_by.append(kept)
    assert kept_by == sorted(kept_by, reverse=True)
    assert kept_by[-1] < kept_by[0] < most
    assert again  # products are computed again at 0
    with CachingFakeTensorMode():  # as `mlhpc plan` does
        fake = nn.Sequential(Block(), Block())
        recompute_blocks(fake, {"?": Budget(budget=0.0)})
        _, stated, stated_flops = step(fake, torch.empty(6, WIDTH))
    assert stated_flops == executed
    assert kept <= stated <= kept + x.nbytes


def test_other_shapes_are_traced_again_and_evaluation_is_plain() -> None:
    plain = nn.Sequential(Block())
    model = budgeted(plain, 0.0)
    for rows in (3, 5, 3):
        x = torch.randn(rows, WIDTH)
        for mine, theirs in zip(step(model, x)[0], step(plain, x)[0], strict=True):
            assert torch.equal(mine, theirs)
    x = torch.randn(17, WIDTH)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    block = model.train()[0]
    assert not torch.equal(block(x, scale=0.0), block(x, scale=2.0))
    with torch.no_grad():
        assert not model(x).requires_grad
    block.forward._traced.update(dict.fromkeys(range(20)))  # as if it had been called with many
    with pytest.raises(InputError, match="more than 16 kinds of inputs: expected full or selective"):
        model(x)


def leave(block: Block, x: Tensor) -> Tensor:
    block.seen = x.sum()
    return x


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block, x: x if x.sum() > 0 else -x, "'0' cannot have a budget"),
        (lambda block, x: x[x > 0], "'0' cannot have a budget"),
        (lambda block, x: (x, 3), "it returns more than tensors"),
        (leave, "its forward pass sets attributes"),
    ],
)
def test_what_cannot_be_traced_is_refused(change: Callable[[Block, Tensor], Any], reason: str) -> None:
    model = budgeted(nn.Sequential(Block(change)), 0.5)
    with pytest.raises(InputError, match=f"{reason}.*expected full or selective") as error:
        model(torch.randn(2, WIDTH))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((given, ".*recompute") for given in ("{budget: 1.5}", "{budget: -0.1}", "{budget: .nan}", "{}", "half")),
        ("{budgets: 1}", "unknown key 'budgets'; did you mean 'budget'"),
    ],
)
def test_a_budget_that_is_no_part_is_refused(given: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f'version: 1\ndescription: d\nparameters: {{"*": replicate}}\nrecompute: {{"blocks.*": {given}}}\n')
    with pytest.raises(InputError, match="plan.yaml:4: " + message) as error:
        read_plan(path)
    assert "\n" not in str(error.value)
