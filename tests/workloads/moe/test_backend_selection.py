"""Choosing the back end of experts: what is measured, what follows from seconds, and that no load makes padding costly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from suite.machine.choice.chooser import Chooser
from suite.machine.choice.store import ChoiceCache
from suite.world import World
from workloads.moe import experts
from workloads.moe.backend_selection import (
    ExpertShape,
    _inputs,
    choose_backend,
    make_even_rows,
    make_uneven_rows,
    select_backend,
)
from workloads.moe.config import MoEConfig
from workloads.moe.experts import BACKENDS, ExpertBackend, SelectedBackend, register, run_experts

CPU = torch.device("cpu")
SHAPE = ExpertShape(96, 4, 16, 32, "gelu", bias=True, even=False, dtype=torch.float32)


def chooser(folder: Path | None = None, **changes: Any) -> Chooser:
    return Chooser(World.create(None), CPU, **{"measure": True, "store": ChoiceCache(folder)} | changes)


def test_every_back_end_that_can_is_measured_and_random_states_stay() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    asked = chooser()
    chosen = choose_backend(asked, SHAPE)
    assert torch.equal(torch.get_rng_state(), before)
    choice = asked.choices[SHAPE.name()]
    wanted = {name for name, backend in BACKENDS.items() if backend.problem(*_inputs(SHAPE, CPU)) is None}
    assert choice.seconds.keys() == wanted | {"bmm, even"}
    assert chosen.name in wanted
    assert SelectedBackend.parse(str(chosen)) == chosen
    assert "bfloat16_product_speedup" in choice.beside


def test_a_back_end_that_is_registered_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "BACKENDS", dict(BACKENDS))
    for room in ("workloads.moe.backend_selection",):
        monkeypatch.setattr(f"{room}.BACKENDS", experts.BACKENDS)
    register("fused", ExpertBackend(BACKENDS["loop"].run, lambda rows, weights: None))
    register("elsewhere", ExpertBackend(BACKENDS["loop"].run, lambda rows, weights: "it is for a GPU"))
    asked = chooser()
    choose_backend(asked, SHAPE)
    seconds = asked.choices[SHAPE.name()].seconds
    assert "fused" in seconds
    assert "elsewhere" not in seconds


def test_float64_is_measured_with_what_can() -> None:
    asked = chooser()
    choose_backend(asked, replace(SHAPE, dtype=torch.float64))
    assert asked.choices[SHAPE.name()].seconds.keys() == {"loop", "bmm", "bmm, even"}


@pytest.mark.parametrize(
    ("seconds", "even", "wanted"),
    [
        ({"onednn": 2.0, "loop": 1.03, "bmm": 0.75, "bmm, even": 0.5}, False, "loop, bmm to 2"),
        ({"onednn": 2.0, "loop": 1.03, "bmm": 0.8, "bmm, even": 0.5}, False, "loop, bmm to 1.87"),
        ({"onednn": 2.0, "loop": 1.03, "bmm": 0.01, "bmm, even": 0.01}, False, "loop, bmm to 2"),
        ({"onednn": 2.0, "loop": 1.03, "bmm": 1.01, "bmm, even": 0.5}, False, "loop, bmm to 1"),
        ({"onednn": 2.0, "loop": 1.03, "bmm": 1.01, "bmm, even": 1.01}, False, "loop"),
        ({"onednn": 2.0, "loop": 1.0}, False, "loop"),
        ({"onednn": 2.0, "loop": 1.0, "bmm": 0.5}, True, "bmm"),
        ({"onednn": 1.0, "loop": 1.5, "bmm": 3.0}, True, "onednn"),
        ({"bmm": 3.0, "bmm, even": 2.0}, False, "bmm"),
    ],
)
def test_the_choice_follows_from_the_seconds(seconds: dict[str, float], even: bool, wanted: str) -> None:
    assert select_backend(seconds, even=even, padding=1.5) == wanted


def test_a_load_is_not_read_from_a_device_for_even_ones_alone() -> None:
    seconds = {"loop": 1.03, "bmm": 1.01, "bmm, even": 0.5}
    assert select_backend(seconds, even=False, padding=1.5, reads=False) == "loop"
    assert select_backend(seconds | {"bmm": 0.5}, even=False, padding=1.5, reads=False) == "loop, bmm to 2"


def test_a_back_end_that_pads_is_taken_only_for_loads_where_it_wins() -> None:
    chosen = SelectedBackend("loop", "bmm", 1.5)
    assert chosen.for_load(torch.tensor([8, 8, 8, 8]), 32) == "bmm"
    assert chosen.for_load(torch.tensor([12, 4, 8, 8]), 32) == "bmm"
    assert chosen.for_load(torch.tensor([13, 3, 8, 8]), 32) == "loop"
    assert chosen.for_load(torch.tensor([32, 0, 0, 0]), 32) == "loop"


@pytest.mark.parametrize(
    "text", ["", "gone", "loop, bmm", "loop, gone to 2", "loop, bmm to x", "loop; bmm", "loop, bmm to -1", "../loop"]
)
def test_no_other_text_is_a_choice(text: str) -> None:
    assert SelectedBackend.parse(text) is None


@pytest.mark.parametrize("text", ["loop", "onednn", "grouped_mm, bmm to 1.25"])
def test_a_choice_computes_what_the_loop_does(text: str) -> None:
    rows, weights = _inputs(SHAPE, CPU)
    for rows_E in (make_even_rows(96, 4), make_uneven_rows(96, 4), torch.tensor([96, 0, 0, 0])):
        chosen = SelectedBackend.parse(text)
        assert chosen is not None
        found, wanted = (run_experts(rows, rows_E, weights, "gelu", each) for each in (chosen, "loop"))
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_a_choice_that_cannot_multiply_the_rows_gives_way_to_the_rule() -> None:
    rows, weights = _inputs(replace(SHAPE, dtype=torch.float64), CPU)
    rows_E = make_even_rows(96, 4)
    found = run_experts(rows, rows_E, weights, "gelu", SelectedBackend("grouped_mm"))
    assert torch.equal(found, run_experts(rows, rows_E, weights, "gelu", "loop"))


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (3, 7), (100, 8), (8192, 64), (5, 64)])
def test_loads_sum_to_their_rows(rows: int, experts: int) -> None:
    for load in (make_even_rows(rows, experts), make_uneven_rows(rows, experts)):
        assert int(load.sum()) == rows
        assert int(load.min()) >= 0
    if rows >= 8 * experts > 8:
        assert 1.2 < float(make_uneven_rows(rows, experts).max()) * experts / rows < 1.6


@pytest.mark.parametrize(
    ("changes", "ranks", "wanted"),
    [
        ({}, 1, (64, 4, 32)),
        ({}, 2, (64, 2, 32)),
        ({"overlap_degree": 2}, 2, (32, 2, 32)),
        ({"parallel_r": 0}, 2, (64, 4, 32)),
        ({"experts": 2, "parallel_r": 1}, 4, (64, 1, 32)),
        ({"experts": 2, "parallel_r": 2}, 4, (128, 1, 16)),
    ],
)
def test_the_shape_is_what_a_rank_computes(changes: dict[str, Any], ranks: int, wanted: tuple[int, int, int]) -> None:
    config = MoEConfig(**{"experts": 4, "hidden": 32} | changes)
    found = ExpertShape.of(config, 16, 64, torch.float32, ranks)
    assert (found.rows, found.experts, found.hidden) == wanted


def test_a_large_problem_is_measured_on_fewer_rows_of_the_same_kind() -> None:
    large = ExpertShape(8192, 64, 256, 1024, "relu", bias=False, even=False, dtype=torch.float32)
    small = large.measured(CPU)
    assert (small.experts, small.rows // small.experts) == (16, 128)
    assert large.measured(torch.device("cuda")) == large
    wide = ExpertShape(8192, 8, 256, 1024, "relu", bias=False, even=False, dtype=torch.float32).measured(CPU)
    assert (wide.experts, wide.rows // wide.experts) == (8, 256)
