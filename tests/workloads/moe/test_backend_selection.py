"""Choosing the back end of experts: what is measured, what follows from seconds, and that no load makes padding costly."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.machine.choice.chooser import ChoiceCache, Chooser, Timing
from mlhpc.suite.world import World
from mlhpc.workloads.moe import experts, router
from mlhpc.workloads.moe.backend_selection import (
    ExpertShape,
    _inputs,
    choose_backend,
    make_choices,
    make_even_rows,
    make_uneven_rows,
    select_backend,
)
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.experts import (
    BACKENDS,
    ExpertBackend,
    SelectedBackend,
    choose_unmeasured_backend,
    register,
    run_experts,
)
from mlhpc.workloads.moe.layer import MoELayer

CPU = torch.device("cpu")
SHAPE = ExpertShape(96, 4, 16, 32, "gelu", bias=True, even=False, dtype=torch.float32, top_k=2)
FUSED_S, PRODUCTS_S, COPY_S = 1.2, 1.0, 0.2  # seconds of a pass by the fake clock, and of copying tokens one way


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


@pytest.fixture
def fused_kernels(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Two back ends by a fake clock: products of sorted rows, and kernels that gather. Returns the clock."""
    clock = [0.0]

    def costs(seconds: float, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            clock[0] += seconds
            return function(*arguments)

        return call

    def fuse(x: Any, weights_TK: Any, source: Any, weights: Any, activation: Any) -> Any:
        clock[0] += FUSED_S
        if source.tokens_N is None:
            return BACKENDS["loop"].run(x, source.rows_E, weights, activation)
        # each token's rows, without the copies that are counted
        rows = BACKENDS["loop"].run(x[source.tokens_N], source.rows_E, weights, activation)
        scaled = rows * weights_TK.reshape(-1)[source.choices_N, None]
        return torch.zeros_like(x).index_add(0, source.tokens_N, scaled)

    loop = BACKENDS["loop"].run
    able = {
        "products": ExpertBackend(costs(PRODUCTS_S, loop), lambda rows, weights: None),
        "triton": ExpertBackend(experts._triton, lambda rows, weights: None),
        "loop": BACKENDS["loop"],
        "onednn": ExpertBackend(loop, lambda rows, weights: "not in this race"),
    }
    for room in ("experts", "backend_selection"):
        monkeypatch.setattr(f"mlhpc.workloads.moe.{room}.BACKENDS", able)
    monkeypatch.setattr(experts, "run_fused_experts", fuse)
    for name in ("_gather_tokens", "add_choices"):
        monkeypatch.setattr(router, name, costs(COPY_S, getattr(router, name)))

    def measured(candidates: Any, device: Any, **_: Any) -> dict[str, Timing]:
        found = {}
        for name, candidate in candidates.items():
            clock[0] = 0.0
            candidate()
            found[name] = Timing(clock[0] if name != "loop" else 9.0)
        return found

    monkeypatch.setattr("mlhpc.suite.machine.choice.chooser.measure_candidates", measured)
    monkeypatch.setattr("mlhpc.workloads.moe.backend_selection._measure_bfloat16_gain", lambda shape, device: {})
    return clock


def test_a_back_end_that_is_faster_on_sorted_rows_loses_to_one_that_needs_no_copies(fused_kernels: list[float]) -> None:
    """Forward and backward each copy tokens to rows and rows to tokens: 4 * 0.2 s, which the fused kernels save."""
    asked = chooser()
    assert str(choose_backend(asked, SHAPE)) == "triton"
    seconds = asked.choices[SHAPE.name()].seconds
    assert (seconds["triton"], seconds["products"]) == (pytest.approx(1.2), pytest.approx(1.8))


@pytest.mark.parametrize("changes", [{"top_k": None}, {"even": True}], ids=["from other ranks", "capacity"])
def test_the_fused_kernels_save_no_copies_where_a_layer_does_not_let_them(
    fused_kernels: list[float], changes: dict[str, Any]
) -> None:
    asked = chooser()
    assert str(choose_backend(asked, replace(SHAPE, **changes))) == "products"
    seconds = asked.choices[SHAPE.name()].seconds
    assert seconds["triton"] - seconds["products"] == pytest.approx(FUSED_S - PRODUCTS_S)


def test_the_race_counts_what_a_layer_does(fused_kernels: list[float]) -> None:
    """A pass of the layer costs by the clock what the race measured, for each back end."""
    asked = chooser()
    choose_backend(asked, SHAPE)
    for name, seconds in asked.choices[SHAPE.name()].seconds.items():
        layer = MoELayer(16, MoEConfig(experts=4, hidden=32, activation="gelu", bias=True, balance="none"))
        layer.backend = SelectedBackend(name)
        x = torch.randn(48, 16, requires_grad=True)
        fused_kernels[0] = 0.0
        layer(x).y_TD.sum().backward()
        assert name == "loop" or fused_kernels[0] == pytest.approx(seconds)


def test_equal_times_give_the_equal_choice_and_log(fused_kernels: list[float], tmp_path: Path) -> None:
    def log(number: int) -> list[str]:
        asked, path = chooser(), tmp_path / str(number)
        choose_backend(asked, SHAPE)
        with closing(EventLog(path)) as written:
            asked.choices[SHAPE.name()].log(written)
        return [re.sub(r'"time_ms": \d+', "", line) for line in path.read_text().splitlines()]

    first, second = log(1), log(2)
    assert first == second
    assert '"chosen": "triton"' in first[0]


@pytest.mark.parametrize("broken", ["_gather_tokens", "add_choices"])
def test_a_back_end_whose_copies_do_not_fit_is_named_and_another_chosen(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(router, broken, full)
    asked = chooser()
    chosen = choose_backend(asked, SHAPE)
    choice = asked.choices[SHAPE.name()]
    assert choice.source == "rule"
    assert choice.note == "nothing could be measured"
    assert str(chosen) == choice.value
    assert set(choice.problems.values()) == {"RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"}


def test_a_padded_choice_beside_the_fused_kernels_is_used(fused_kernels: list[float]) -> None:
    """A layer once ran the fused kernels whatever the load was."""
    layer = MoELayer(16, MoEConfig(experts=4, hidden=32, top_k=1, balance="none"))
    for up_to, copies in ((4.0, 2), (0.5, 0)):
        layer.backend = SelectedBackend("triton", "products", up_to)
        fused_kernels[0] = 0.0
        layer(torch.randn(48, 16))
        wanted = PRODUCTS_S + copies * COPY_S if copies else FUSED_S
        assert fused_kernels[0] == pytest.approx(wanted)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(2, 1, 2), (8, 4, 4), (96, 4, 2), (4096, 64, 8), (3, 64, 1)])
def test_choices_make_the_load_and_name_no_expert_twice(rows: int, experts: int, top_k: int) -> None:
    for load_E in (make_even_rows(rows, experts), make_uneven_rows(rows, experts)):
        chosen_TK = make_choices(load_E, top_k)
        assert chosen_TK.shape == (rows // top_k, top_k)
        assert torch.equal(torch.bincount(chosen_TK.flatten(), minlength=experts), load_E)
        if load_E.max() <= len(chosen_TK):
            assert all(len(set(row)) == top_k for row in chosen_TK.tolist())


def test_a_back_end_that_is_registered_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "BACKENDS", dict(BACKENDS))
    for room in ("mlhpc.workloads.moe.backend_selection",):
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


def test_where_nothing_was_measured_a_cpu_pads_even_loads_alone() -> None:
    rows, weights = _inputs(SHAPE, CPU)
    rule = choose_unmeasured_backend(rows, weights)
    assert rule.for_load(make_even_rows(len(rows), 4), len(rows)) == "bmm"
    assert rule.for_load(make_uneven_rows(len(rows), 4), len(rows)) == "grouped_mm"
    assert SelectedBackend.parse(str(rule)) == rule
    assert str(choose_unmeasured_backend(*_inputs(replace(SHAPE, dtype=torch.float64), CPU))) == "loop"


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
        ({}, 1, (64, 4, 32, 2)),
        ({"dispatch": "capacity"}, 1, (64, 4, 32, 2)),
        ({}, 2, (64, 2, 32, None)),
        ({"overlap_degree": 2}, 2, (32, 2, 32, None)),
        ({"parallel_r": 0}, 2, (64, 4, 32, 2)),
        ({"experts": 2, "parallel_r": 1}, 4, (64, 1, 32, None)),
        ({"experts": 2, "parallel_r": 2}, 4, (128, 1, 16, None)),
    ],
)
def test_the_shape_is_what_a_rank_computes(changes: dict[str, Any], ranks: int, wanted: tuple[Any, ...]) -> None:
    config = MoEConfig(**{"experts": 4, "hidden": 32} | changes)
    found = ExpertShape.of(config, 16, 64, torch.float32, ranks)
    assert (found.rows, found.experts, found.hidden, found.top_k) == wanted


def test_a_large_problem_is_measured_on_fewer_rows_of_the_same_kind() -> None:
    large = ExpertShape(8192, 64, 256, 1024, "relu", bias=False, even=False, dtype=torch.float32)
    small = large.measured(CPU)
    assert (small.experts, small.rows // small.experts) == (16, 128)
    assert large.measured(torch.device("cuda")) == large
    wide = ExpertShape(8192, 8, 256, 1024, "relu", bias=False, even=False, dtype=torch.float32).measured(CPU)
    assert (wide.experts, wide.rows // wide.experts) == (8, 256)
    assert [replace(SHAPE, rows=rows, top_k=3).measured(CPU).rows for rows in (1, 3, 95, 96)] == [3, 3, 93, 96]
