"""Recomputed blocks: the same gradients, bit for bit, with dropout on; FLOPs by the closed form; less is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.counts.flops import count
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.suite.training.parallel.recompute import recompute_blocks, recomputed_of

BATCH, LENGTH, WIDTH, HEADS = 2, 128, 256, 4


class Block(nn.Module):
    """Attention and MLP: 24 b s h^2 + 4 b s^2 h FLOPs; the last product is the MLP's second."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        weights = self.dropout((q @ k.transpose(-1, -2) / (h // HEADS) ** 0.5).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, h))
        return x + self.down(self.dropout(torch.relu(self.up(x))))  # type: ignore[no-any-return]


def passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    mine = x.clone().requires_grad_()
    model(mine).square().sum().backward()
    assert mine.grad is not None
    return [mine.grad, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def test_gradients_are_the_same_bits_and_flops_those_of_the_closed_form() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(*(Block() for _ in range(4)))
    again = copy.deepcopy(plain)
    selective = copy.deepcopy(plain)
    recompute_blocks(again, {"[0-3]": "full"})
    recompute_blocks(selective, {"[0-3]": "selective"})
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in plain.named_parameters()]
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for mine, theirs in zip(passes(again, x), passes(plain, x), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(passes(selective, x), passes(plain, x), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        forward = count(lambda: plain(x)).flops
    assert forward == 4 * BATCH * (24 * LENGTH * WIDTH**2 + 4 * LENGTH**2 * WIDTH)
    assert count(lambda: passes(plain, x)).flops == 3 * forward
    ratio = 4 - 8 / (24 + 4 * LENGTH / WIDTH)  # the last product of a block is not needed again
    assert count(lambda: passes(again, x)).flops / forward == pytest.approx(ratio, rel=1e-3)
    assert ratio == pytest.approx(3.692, abs=1e-3)
    ratio = 3 + (4 * LENGTH / WIDTH) / (24 + 4 * LENGTH / WIDTH)  # attention's own products are computed again
    assert count(lambda: passes(selective, x)).flops / forward == pytest.approx(ratio, rel=1e-3)
    assert ratio == pytest.approx(3.077, abs=1e-3)


@pytest.mark.parametrize(("policy", "share"), [("full", 4 - 8 / 26), ("selective", 3 + 2 / 26)])
def test_flops_of_blocks_that_are_computed_again_are_counted_until_they_are_taken(policy: str, share: float) -> None:
    plain, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(BATCH, LENGTH, WIDTH)
    assert recomputed_of(plain) is None
    with torch.no_grad():
        forward = count(lambda: plain(x)).flops
    recompute_blocks(plain, {"[0-3]": policy})
    counter = recomputed_of(plain)
    assert counter is not None
    assert recomputed_of(copy.deepcopy(plain)) is counter
    passes(plain, x)
    passes(plain, x)
    assert counter.take() == pytest.approx(2 * (share - 3) * forward, rel=1e-6)
    passes(plain, x)
    assert counter.take() is None


def test_blocks_that_would_count_twice_are_refused() -> None:
    with pytest.raises(InputError, match="block '0.up' lies in block '0'"):
        recompute_blocks(nn.Sequential(Block()), {"0": "full", "0.up": "full"})
    with pytest.raises(InputError, match="block '0' has batch normalisation"):
        recompute_blocks(nn.Sequential(nn.Sequential(GroupBatchNorm2d(2))), {"0": "full"})
