"""The load of a window is the sum of its steps, however many these are. Fused kernels count as the experts' time."""

from typing import Any

import pytest
import torch

from mlhpc.workloads.moe import experts, phases
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.phases import LayerTimer
from mlhpc.workloads.moe.router import KEPT_STEPS, ExpertLoad


def test_the_load_sums_its_steps_before_and_after_it_adds_them_up() -> None:
    generator = torch.Generator().manual_seed(0)
    load, counts = ExpertLoad(3), torch.randint(0, 50, (2 * KEPT_STEPS + 7, 3), generator=generator)
    for number, step_E in enumerate(counts, start=1):
        load.add(step_E, step_E.sum() - 1, 60)
        if number in (1, 5, KEPT_STEPS, KEPT_STEPS + 1, len(counts)):
            taken, found = counts[:number], load.read()
            assert found.assigned_E == taken.sum(0).tolist()
            assert found.kept == taken.sum() - number
            assert found.rows == 60 * number
            wanted = (taken.amax(1).double() * 3 / taken.sum(1).clamp(min=1)).max()
            assert found.needed_factor == wanted


def test_a_load_without_steps_is_balanced_and_drops_nothing() -> None:
    assert ExpertLoad(2).read().report() == {
        "tokens_per_expert": [0, 0],
        "imbalance": 1.0,
        "drop_rate": 0.0,
        "needed_capacity": 0.0,
        "padding_waste": 0.0,
    }


def test_a_step_without_tokens_needs_no_capacity() -> None:
    load = ExpertLoad(2)
    load.add(torch.zeros(2, dtype=torch.int64), torch.tensor(0), 0)
    assert load.read().report()["needed_capacity"] == 0.0


class Counted:
    """A clock that goes on when a fake kernel runs."""

    now = 0.0

    def stamp(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_both_passes_of_the_fused_kernels_are_the_experts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass once counted as that of permute: the hook of its end ran before that of the experts."""
    clock = Counted()

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            clock.now += 1.0
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            clock.now += 10.0
            return gradient

    monkeypatch.setattr(experts, "run_fused_experts", lambda x, *_: Fused.apply(x))
    layer = MoELayer(8, MoEConfig(experts=4, hidden=8, backend="triton"))
    layer.marker = timer = LayerTimer(clock)
    layer(torch.randn(5, 8, requires_grad=True)).y_TD.sum().backward()
    seconds = {name: spent for name, spent in timer.flush().items() if spent}
    assert seconds == {phases.EXPERTS: 1.0, f"{phases.EXPERTS}_backward": 10.0}
