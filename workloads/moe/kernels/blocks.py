"""Lists block sizes for each kernel; a GPU measures which are fastest. No Triton.

A list begins with what is taken without measuring (in the interpreter, and for compiling ahead of time).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

WARM_UPS, REPEATS = 2, 5


@dataclass(frozen=True)
class Blocks:
    """``m`` rows (of H in `weight_gradient`) by ``n`` columns; ``k``: step of the sum; ``group``: tiles run together.

    ``described``: what lies in whole blocks is loaded by the GPU's copy engine, from descriptors.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    described: bool = False

    def arguments(self) -> dict[str, int]:
        """Name them as the kernels do."""
        sizes = {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "GROUP": self.group}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


HALF_BLOCKS = {  # bfloat16 and float16: tensor cores
    "hidden_rows": (
        Blocks(128, 128, 64, 8, 3), Blocks(128, 256, 64, 8, 3), Blocks(128, 256, 64, 8, 4), Blocks(64, 128, 64, 4, 3),
        Blocks(128, 256, 64, 8, 4, described=True), Blocks(128, 128, 64, 4, 3, described=True),
    ),
    "hidden_rows_two": (
        Blocks(128, 128, 64, 8, 3), Blocks(128, 128, 64, 8, 4), Blocks(64, 128, 32, 4, 3),
        Blocks(128, 128, 64, 8, 4, described=True), Blocks(128, 64, 64, 4, 3, described=True),
    ),
    "wide_rows": (
        Blocks(128, 128, 64, 8, 3), Blocks(128, 256, 64, 8, 3), Blocks(128, 256, 64, 8, 4), Blocks(64, 128, 64, 4, 3),
        Blocks(128, 256, 64, 8, 4, described=True), Blocks(128, 128, 64, 4, 3, described=True),
    ),
    "hidden_gradient": (
        Blocks(128, 128, 64, 8, 4), Blocks(128, 128, 64, 8, 3), Blocks(64, 128, 64, 4, 3),
        Blocks(128, 128, 64, 8, 3, described=True), Blocks(128, 256, 64, 8, 3, described=True),
    ),
    "weight_gradient": (
        Blocks(128, 128, 64, 8, 4), Blocks(128, 128, 64, 4, 4), Blocks(128, 256, 64, 8, 5), Blocks(64, 128, 64, 4, 3),
        Blocks(128, 128, 64, 8, 5, described=True), Blocks(128, 256, 64, 8, 5, described=True),
    ),
    "weight_gradient_two": (
        Blocks(128, 128, 64, 8, 4), Blocks(128, 64, 64, 4, 4), Blocks(64, 128, 32, 4, 3),
        Blocks(128, 128, 64, 8, 4, described=True), Blocks(128, 128, 64, 8, 5, described=True),
        Blocks(64, 128, 64, 4, 3, described=True),
    ),
}  # fmt: skip
FLOAT_BLOCKS = {  # float32 without tf32: no tensor cores, sums in registers of all threads
    "hidden_rows": (Blocks(64, 128, 16, 8, 3), Blocks(64, 64, 32, 4, 3), Blocks(128, 128, 16, 8, 2)),
    "hidden_rows_two": (Blocks(64, 64, 16, 8, 3), Blocks(64, 64, 32, 8, 2), Blocks(64, 32, 32, 4, 3)),
    "wide_rows": (Blocks(64, 128, 16, 8, 3), Blocks(64, 64, 32, 8, 2), Blocks(128, 128, 16, 8, 2)),
    "hidden_gradient": (Blocks(64, 64, 32, 4, 3), Blocks(64, 128, 16, 8, 3), Blocks(64, 64, 32, 8, 2)),
    "weight_gradient": (Blocks(64, 128, 16, 8, 3), Blocks(64, 64, 32, 4, 3), Blocks(128, 128, 16, 8, 2)),
    "weight_gradient_two": (Blocks(64, 64, 16, 8, 3), Blocks(64, 32, 32, 4, 3)),
}


def list_candidates(kernel: str, dtype: torch.dtype) -> tuple[Blocks, ...]:
    """List the blocks of a kernel; ``_two`` names the forms that keep two sums. Empty: the kernel has no blocks."""
    return (FLOAT_BLOCKS if dtype == torch.float32 else HALF_BLOCKS).get(kernel, ())


class BlockTimings:
    """Seconds that were measured in this process, by kernel and class of shapes, and of each the fastest blocks."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Any, ...], dict[Blocks, float]] = {}

    def run(
        self, kernel: str, case: tuple[Any, ...], x: torch.Tensor, call: Callable[[Blocks], None], *, describable: bool
    ) -> None:
        """Run ``call`` with the blocks of this case. The first time on a GPU, with all of them, to take the fastest.

        ``call`` must give the same however often it runs. ``describable``: there can be descriptors of its arguments.
        """
        listed = [blocks for blocks in list_candidates(kernel, x.dtype) if describable or not blocks.described]
        if not x.is_cuda:
            call(listed[0])
            return
        key = (kernel, x.dtype, torch.cuda.get_device_name(x.device), describable, *case)
        if key not in self.seconds:
            self.seconds[key] = {blocks: measure(call, blocks) for blocks in listed}
        seconds = self.seconds[key]
        call(min(listed, key=lambda blocks: seconds[blocks]))


def measure(call: Callable[[Blocks], None], blocks: Blocks) -> float:
    """Measure the median seconds of a call on the current GPU. Infinite if these blocks do not fit on it."""
    from triton.runtime.errors import OutOfResources

    try:
        # the first call compiles, and raises if the blocks do not fit
        for _ in range(WARM_UPS):
            call(blocks)
    except OutOfResources:
        return float("inf")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call(blocks)
        event.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(milliseconds) / 1e3
