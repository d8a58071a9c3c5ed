"""Queues, capacities and drops are those of Tutel, as a slow oracle in plain Python states them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlhpc.workloads.moe.config import compute_capacity
from mlhpc.workloads.moe.router import Capacity, DispatchPlan, Dropless, Einsum, Routing
from tests.workloads.moe.oracle import kept_choices, queue_lengths, tutel_capacity


def routing(experts_TK: list[list[int]], priority: list[float] | None = None) -> Routing:
    ids = torch.tensor(experts_TK, dtype=torch.int64).reshape(len(experts_TK), -1)
    weights = torch.ones(ids.shape, dtype=torch.float64)
    return Routing(ids, weights, torch.zeros(()), None if priority is None else torch.tensor(priority))


def kept(plan: DispatchPlan, top_k: int) -> set[tuple[int, int]]:
    """Assignments that have a row, each one row; empty rows point behind the last token and the last choice."""
    pairs = [divmod(choice, top_k) for choice in plan.choices_N.tolist() if choice < plan.tokens * top_k]
    assert [token for token, _ in pairs] == [token for token in plan.tokens_N.tolist() if token < plan.tokens]
    assert len(set(pairs)) == len(pairs) == plan.kept
    assert len(plan.tokens_N) == len(plan.choices_N) == plan.rows == plan.rows_E.sum()
    return set(pairs)


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, min(3, experts)))
    rows = st.permutations(range(experts)).map(lambda order: list(order[:top_k]))
    return experts, draw(st.lists(rows, min_size=1, max_size=20))


@settings(max_examples=100)
@given(
    routings(), st.sampled_from([None, 1.0, 0.6, 1.25, 2.0, 0.0, -0.5, -1.0, -2.0]), st.integers(1, 4), st.booleans()
)
def test_the_kept_assignments_are_the_oracles(
    case: tuple[int, list[list[int]]], factor: float | None, alignment: int, prioritised: bool
) -> None:
    experts, rows = case
    top_k = len(rows[0])
    priority = [float((7 * token) % 5) for token in range(len(rows))] if prioritised else None
    longest = max(queue_lengths(rows, experts))
    capacity = tutel_capacity(1.0 if factor is None else factor, len(rows), experts, top_k, longest, alignment)
    plan = Capacity(factor, alignment).plan(routing(rows, priority), experts)
    assert plan.capacity == capacity
    assert kept(plan, top_k) == kept_choices(rows, experts, capacity, priority)
    assert plan.assigned_E.tolist() == queue_lengths(rows, experts)


@settings(max_examples=50)
@given(routings())
def test_dropless_keeps_everything_sorted_by_expert(case: tuple[int, list[list[int]]]) -> None:
    experts, rows = case
    plan = Dropless().plan(routing(rows), experts)
    assert kept(plan, len(rows[0])) == {(t, k) for t in range(len(rows)) for k in range(len(rows[0]))}
    sources = [rows[choice // len(rows[0])][choice % len(rows[0])] for choice in plan.choices_N.tolist()]
    assert sources == sorted(sources)


def test_zero_is_a_capacity_factor_and_none_is_the_default() -> None:
    rows = [[0], [0], [0], [1]]
    assert Capacity(None).plan(routing(rows), 2).capacity == 2
    assert Capacity(0).plan(routing(rows), 2).capacity == 3


def test_capacity_truncates_before_it_multiplies_by_k() -> None:
    assert compute_capacity(1.3, 8, 4, 2) == 2 * int(1.3 * 2) == 4


def test_a_large_alignment_becomes_a_multiple_of_128() -> None:
    assert compute_capacity(1.0, 1000, 4, 1, alignment=300) == 384
    assert compute_capacity(1.0, 1000, 4, 1, alignment=256) == 256


def test_needed_capacity_is_over_all_ranks() -> None:
    plan = Capacity(0, 1, lambda mine: mine.clamp(min=9)).plan(routing([[0], [1]]), 2)
    assert plan.capacity == 9
    assert plan.rows == 18


@pytest.mark.parametrize("permute", [Dropless(), Capacity(1.25), Einsum(0.7)])
def test_the_host_waits_for_no_device(permute: Dropless | Capacity) -> None:
    """On the meta device nothing can be read back: shapes follow from the number of tokens alone."""
    weights_TK = torch.empty(10, 2, device="meta")
    route = Routing(torch.empty(10, 2, dtype=torch.int64, device="meta"), weights_TK, torch.zeros(()), weights_TK[:, 0])
    x_TD = torch.empty(10, 3, device="meta", requires_grad=True)
    plan = permute.plan(route, 4)
    y_TD = permute.decode(permute.encode(x_TD, plan), plan, weights_TK)
    y_TD.sum().backward()
    assert y_TD.shape == x_TD.grad.shape == (10, 3)
    assert plan.kept.device.type == "meta"
    if plan.capacity is not None:
        assert plan.host_E.tolist() == [plan.capacity] * 4  # on the host
        assert plan.rows_E.device.type == "meta"


def test_einsum_has_the_rows_of_the_gather() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    ids_TK = torch.rand(12, 3, generator=generator).argsort(1)[:, :2]
    weights_TK = torch.rand(12, 2, generator=generator, dtype=torch.float64)
    route = Routing(ids_TK, weights_TK, torch.zeros(()))
    gather, masks = Capacity(0.7), Einsum(0.7)
    plan = gather.plan(route, 3)
    rows = gather.encode(x_TD, plan)
    assert torch.equal(rows, masks.encode(x_TD, masks.plan(route, 3)))
    torch.testing.assert_close(gather.decode(rows, plan, weights_TK), masks.decode(rows, plan, weights_TK))


@pytest.mark.parametrize("permute", [Dropless(), Capacity(1.0)])
def test_the_order_of_tokens_does_not_matter_without_drops(permute: Dropless | Capacity) -> None:
    """With k = 1 and equally many tokens per expert nothing drops: permuting tokens permutes the output."""
    x_TD = torch.arange(24, dtype=torch.float64).reshape(8, 3)
    ids_TK = torch.arange(8)[:, None] % 4
    ones = torch.ones(8, 1, dtype=torch.float64)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])

    def through(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        plan = permute.plan(Routing(ids, ones, torch.zeros(())), 4)
        return permute.decode(permute.encode(x, plan), plan, ones)

    assert torch.equal(through(x_TD[order], ids_TK[order]), through(x_TD, ids_TK)[order])
