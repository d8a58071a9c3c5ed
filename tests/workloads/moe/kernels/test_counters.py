"""Counted FLOPs and bytes of the fused kernels beside the closed forms; the share of a step in which a GPU computes nothing."""

from pathlib import Path

import pytest

from benchmarks.kernel_counters import compute_expected
from benchmarks.kernel_traffic import Sizes
from benchmarks.kernels import SHAPES, Shape

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_make_up_a_training_pass(shape: Shape) -> None:
    element_bytes = 4 if "32" in str(shape.dtype) else 2
    sizes = Sizes(shape.tokens, shape.rows, shape.experts, shape.width, shape.hidden, shape.activation, element_bytes)  # type: ignore[arg-type]
    expected = compute_expected(shape).values()
    assert sum(flops for flops, _ in expected) == 3 * shape.forward_flops
    assert sum(moved for _, moved in expected) == sizes.fused().both


def test_overlapping_work_of_a_device_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from graph_steps import sum_of_intervals

    assert [sum_of_intervals(each) for each in ([], [(0, 2), (1, 3)], [(5, 6), (0, 4), (1, 2)])] == [0, 3, 5]
