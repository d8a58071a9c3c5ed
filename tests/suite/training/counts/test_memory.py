"""Bytes that live and FLOPs, counted in one pass: what a storage's life is, and that checkpointed blocks are let go."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from mlhpc.suite.training.counts.flops import count, list_flop_formulas
from mlhpc.suite.training.counts.memory import LiveBytes
from mlhpc.suite.training.parallel.mesh import Mesh
from tests.fixtures.wings import needs_axes

ROWS, WIDTH, LAYERS, BLOCKS = 64, 32, 8, 6
ONE = 4 * ROWS * WIDTH  # bytes of one activation


class Block(nn.Module):
    """Layers whose results the backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = torch.tanh(self.layer(x))
        return x


def test_a_storage_counts_from_its_first_tensor_to_the_last_view_of_it() -> None:
    with LiveBytes() as live:
        x = torch.empty(10)
        view = x[2:]
        x.add_(1)
        del x
        assert live.now == 40
        del view
        live.label = "other"
        y = torch.empty(5)
        assert (live.now, live.peak, live.labelled["other"]) == (20, 40, 20)
        del y
    assert (live.now, live.labelled["other"]) == (0, 0)


def test_what_was_there_before_does_not_count() -> None:
    x = torch.ones(10)
    with LiveBytes([x]) as live:
        x.mul_(2)
        assert x.view(5, 2).shape == (5, 2)
    assert live.peak == 0


def test_checkpointed_blocks_are_let_go_one_by_one_and_their_flops_are_those_of_torch() -> None:
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def step(*, again: bool) -> None:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False) if again else block(y)
        y.sum().backward()  # type: ignore[no-untyped-call]

    peaks = {}
    for again in (False, True):
        with LiveBytes((x, *blocks.parameters()), list_flop_formulas) as live:
            step(again=again)
        assert live.flops == count(lambda again=again: step(again=again)).flops
        peaks[again] = live.peak
    assert peaks[False] > BLOCKS * LAYERS * ONE
    assert peaks[True] < (BLOCKS + 2 * LAYERS) * ONE  # the blocks' inputs, and what one block keeps while it goes back


@needs_axes
def test_what_a_dtensor_runs_to_learn_the_shape_of_a_result_does_not_count() -> None:
    """The product of this rank's 4 of 8 columns counts, not that of all of them on fake tensors."""
    from mlhpc.plugins.axes.dry_run import pretended_ranks

    with pretended_ranks(Mesh(0, 2, tensor=2)):
        layer = nn.Linear(3, 8, bias=False)
        parallelize_module(layer, DeviceMesh("cpu", [0, 1]), ColwiseParallel())
        with LiveBytes(formulas=list_flop_formulas) as live:
            found = layer(torch.ones(5, 3))
        assert found.shape == (5, 4)
    assert live.flops == 2 * 5 * 3 * 4
