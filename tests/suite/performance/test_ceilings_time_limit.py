"""The time and memory of `mlhpc ceilings --quick`: slow machines are measured as far as it goes, and the rest is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mlhpc.suite.performance.ceilings import collectives, compute, measure, storage
from mlhpc.suite.performance.ceilings.samples import MIN_REPETITIONS, QUICK, TimeLimit, measure_on_all_ranks
from mlhpc.suite.performance.ceilings_file import Findings
from mlhpc.suite.world import World

ALONE = World.create()
CPU = torch.device("cpu")
MUCH = 1 << 40


class Clock:
    """A clock that stands still until work moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> float:
        self.now += seconds
        return seconds

    def budget(self, seconds: float | None, say: Callable[[str], None] = lambda line: None) -> TimeLimit:
        return TimeLimit(ALONE, seconds, say, self)


def reasons(findings: Findings) -> str:
    return "; ".join(gap.reason for gap in findings.not_measured)


def test_a_budget_counts_down_and_its_parts_never_outlast_it() -> None:
    clock = Clock()
    whole = clock.budget(10.0)
    assert whole.allows(9.9)
    assert not whole.allows(10.0)
    clock.work(4.0)
    early, late, past = whole.until(6.0), whole.until(60.0), whole.until(3.0)
    assert (early.left(), late.left(), past.left()) == (2.0, 6.0, 0.0)
    clock.work(7.0)
    assert (whole.left(), early.left()) == (0.0, 0.0)
    endless = clock.budget(None)
    assert endless.until(0.1 * endless.length).left() == math.inf
    assert not endless.ends


def test_progress_is_told_now_and_then() -> None:
    clock, said = Clock(), list[str]()
    budget = clock.budget(60.0, said.append)
    for number in range(20):
        clock.work(1.0)
        budget.tell(f"{number}")
    assert said == ["  4", "  9", "  14", "  19"]


@pytest.mark.parametrize(("seconds", "n"), [(None, 11), (100.0, 11), (5.5, 6), (0.0, MIN_REPETITIONS)])
def test_repetitions_end_with_the_time_but_three_are_made(seconds: float | None, n: int) -> None:
    clock = Clock()
    samples = measure_on_all_ranks(ALONE, lambda: clock.work(1.0), 11, budget=clock.budget(seconds))
    assert samples.n == n


@pytest.mark.parametrize("flops_per_s", [1e7, 1e9, 1e11, 1e15])
def test_products_are_bounded_on_slow_and_fast_machines(flops_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without bfloat16 instructions may take half a minute for a product of order 2048."""
    clock, orders = Clock(), dict[str, int]()

    def products(device: torch.device, dtype: str, order: int) -> list[compute.Product]:
        orders[dtype] = max(order, orders.get(dtype, 0))
        return [compute.Product("slow", lambda: clock.work(compute.count_gemm_flops(order) / flops_per_s + 1e-6))]

    def seconds(multiply: Callable[[], float], calls: int, device: torch.device) -> float:
        once = multiply()
        return once + clock.work(once * (calls - 1))

    monkeypatch.setattr(compute, "list_products", products)
    monkeypatch.setattr(compute, "measure_seconds", seconds)
    monkeypatch.setattr(compute, "compute_product_error", lambda product, order: 0.0 * product.multiply())
    found = compute.measure(ALONE, QUICK, CPU, MUCH, clock.budget(25.0))
    assert clock.now - 100 <= 25 + len(compute.CPU_TYPES) * (compute.LEAST_CALLS * QUICK.slowest_s + QUICK.sustained_s)
    assert {roof.dtype for roof in found.roofs} == set(compute.CPU_TYPES)
    assert ("orders from " in reasons(found)) == (flops_per_s <= 1e11)


def test_products_that_the_memory_cannot_hold_are_left_out() -> None:
    found = compute.measure(ALONE, QUICK, CPU, 12 << 20, Clock().budget(0.0))
    assert not [curve for curve in found.curves if curve.points[-1].x > 512]
    assert not found.roofs, "an ended budget measures nothing"
    found = compute._sample_orders(ALONE, QUICK, CPU, "float64", 12 << 20, Clock().budget(None), (16, 64, 2048))
    assert max(order for by_order in found[0].values() for order in by_order) == 64
    assert found[1] == ["orders from 2048: a quarter of the free memory, 12 MiB, holds no product"]


@pytest.mark.parametrize("bytes_per_s", [1e3, 1e6, 1e8, 1e12])
def test_messages_are_bounded_on_slow_networks(bytes_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    budget = clock.budget(10.0)
    sizes: list[int] = []

    def prepare(message: torch.Tensor, group: object) -> Callable[[], object]:
        sizes.append(message.numel() * 4)
        return lambda: None

    monkeypatch.setattr(
        collectives,
        "_measure_seconds",
        lambda call, calls, device: clock.work(calls * (1e-4 + sizes[-1] / bytes_per_s)),
    )
    monkeypatch.setattr(collectives, "find_collective_library", lambda: "gloo")
    found = collectives._measure_collective(ALONE, QUICK, CPU, "all_reduce", prepare, None, 2, 1, MUCH, budget)
    smallest = 5 * (1e-4 + collectives.SMALLEST_MESSAGE / bytes_per_s)  # the first is measured whatever it takes
    assert clock.now - 100 <= 1.5 * 10 + smallest
    assert (sizes[-1] < QUICK.largest_message_bytes) == ("messages from" in reasons(found)) == (bytes_per_s <= 1e6)


def test_messages_that_the_memory_cannot_hold_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(collectives, "_measure_seconds", lambda call, calls, device: clock.work(calls * 1e-4))
    prepare = collectives.COLLECTIVES[0][1]
    monkeypatch.setattr(collectives, "find_collective_library", lambda: "gloo")
    found = collectives._measure_collective(
        ALONE, QUICK, CPU, "all_reduce", prepare, None, 2, 1, 1 << 20, clock.budget(None)
    )
    assert reasons(found) == "messages from 262144 bytes: they take more than a quarter of the free memory, 1 MiB"
    assert found.curves[0].points[-1].x == 65536


@pytest.mark.parametrize(
    ("bytes_per_s", "mib"), [(1e5, 0), (4e6, 4), (2e7, 24), (1e9, 64)], ids=["broken", "slow", "usual", "fast"]
)
def test_files_are_as_large_as_the_time_allows(
    bytes_per_s: float, mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, written = Clock(), list[int]()
    write = storage.measure_write

    def slow_write(path: Path, block: bytes, size: int) -> float:
        write(path, block, size)
        written.append(size)
        return clock.work(size / bytes_per_s)

    monkeypatch.setattr(storage, "measure_write", slow_write)
    monkeypatch.setattr(storage, "measure_read", lambda path: clock.work(path.stat().st_size / bytes_per_s))
    found = storage.measure_storage(ALONE, QUICK, tmp_path, MUCH, clock.budget(14.0))
    assert clock.now - 100 <= 14 + storage.BLOCK / bytes_per_s
    assert not list(tmp_path.iterdir())
    if mib == 0:
        assert not found.roofs
        assert "too slow for the time" in reasons(found)
        return
    assert max(written) >> 20 == mib
    assert ("files of more than" in reasons(found)) == (mib < 64)
    assert all(roof.size_bytes == mib << 20 for roof in found.roofs)


def test_a_file_never_takes_more_than_an_eighth_of_the_memory(tmp_path: Path) -> None:
    """The directory may lie in memory: /dev/shm, or /tmp of a container with a limit."""
    found = storage.measure_storage(ALONE, QUICK, tmp_path, 64 << 20, Clock().budget(None))
    assert {roof.size_bytes for roof in found.roofs} == {8 << 20}
    found = storage.measure_storage(ALONE, QUICK, tmp_path, 16 << 20, Clock().budget(None))
    assert not found.roofs


def test_the_steps_fill_the_time_in_order() -> None:
    ends = list(measure.TIME_SHARE_ENDS.values())
    assert ends == sorted(ends)
    assert ends[-1] == 1.0
    assert QUICK.seconds is not None
    assert QUICK.seconds <= 50, "Python and torch start within the rest of the minute"
    assert np.diff([0, *ends]).min() * QUICK.seconds >= 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_library_computes_the_product(dtype: str) -> None:
    found = {each.library: each.multiply() for each in compute.list_products(CPU, dtype, 64)}
    assert (compute.ONEDNN in found) == (dtype != "float64" and compute.has_onednn())
    for library, product in found.items():
        assert (torch.as_tensor(product) == 64 * 0.25).all(), library
