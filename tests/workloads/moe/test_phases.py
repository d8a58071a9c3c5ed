"""The load of a window is the sum of its steps, however many these are and whenever it is read."""

from __future__ import annotations

import torch

from workloads.moe.phases import KEPT_STEPS, ExpertLoad


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
