"""Checks that a node computes right: a product, a convolution, an all-reduce, a file. Wrong is not slow.

A check returns its error over the bound of rounding: above 1 the result is wrong. Products have checksums of rows and
columns (Huang and Abraham 1984). Small integers are exact in float32 in every order of a sum, so there any flipped bit
shows. Normal data have other bit patterns; there a change below the bound is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path

import google_crc32c
import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.suite.performance.ceilings import storage

Multiply = Callable[[Tensor, Tensor], Tensor]
Check = Callable[[], float]

UNIT = 2.0**-24  # of float32: the largest relative error of one rounding
SAFETY = 3.0
WRONG = 1e9  # error over bound where the bound is 0
LARGEST_INTEGER = 8  # in products: their sums stay below 2**24
SHARES = 1 << 16  # elements of the all-reduce
FILE_BYTES = 1 << 20
BATCH, CHANNELS, SIDE = 4, 16, 24  # of the convolution


def compute_product_bound(a: Tensor, b: Tensor) -> float:
    """Compute the largest error of a column's or row's sum of A B that rounding explains.

    One after the other, k products make partial sums that grow as a random walk: an error of about 0.4 k units of an
    element, and the m elements of a column are independent. Libraries add in blocks, with less. `SAFETY` is 7
    deviations of it.
    """
    longest = max(len(a), b.shape[1])
    return float(SAFETY * UNIT * a.shape[1] * longest**0.5 * a.square().mean().sqrt() * b.square().mean().sqrt())


def check_product(multiply: Multiply, a: Tensor, b: Tensor, bound: float) -> float:
    """Compute the product and its checksums. ``bound`` 0: the values are integers, and the sums exact."""
    c, wide_a, wide_b = multiply(a, b).double(), a.double(), b.double()
    residuals = [c.sum(0) - wide_a.sum(0) @ wide_b, c.sum(1) - wide_a @ wide_b.sum(1)]
    if not bound:  # a low bit of a zero is lost in a sum
        residuals.append((c - c.round()).flatten())
    return compare(torch.cat(residuals), bound)


def compare(residual: Tensor, bound: float) -> float:
    """Return the largest residual over the bound. What is not finite is wrong."""
    worst = float(residual.abs().max().nan_to_num(WRONG, WRONG))
    return min(worst / bound, WRONG) if bound else WRONG * (worst > 0.0)


def draw_integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw small integers as float32."""
    return torch.randint(-LARGEST_INTEGER, LARGEST_INTEGER + 1, shape, generator=generator).float()


def make_product_check(order: int, device: torch.device, seed: int, multiply: Multiply = torch.mm) -> Check:
    """Make a check of products of small integers and of normal data in turn, other ones each time."""
    generator, exact = torch.Generator().manual_seed(seed), cycle((True, False))

    def check() -> float:
        integers, shape = next(exact), (order, order)
        draw = draw_integers if integers else torch.randn
        a, b = (draw(shape, generator=generator).to(device) for _ in range(2))
        return check_product(multiply, a, b, 0.0 if integers else compute_product_bound(a, b))

    return check


def make_convolution_check(device: torch.device, seed: int, convolve: Callable[..., Tensor] = F.conv2d) -> Check:
    """Make a check of a convolution of small integers: the sum over outputs is that with the sum of the kernels.

    A library may transform the data first, which is not exact: the result may be wrong by less than a quarter.
    """
    generator = torch.Generator().manual_seed(seed)

    def check() -> float:
        x = draw_integers((BATCH, CHANNELS, SIDE, SIDE), generator).to(device)
        kernels = draw_integers((2 * CHANNELS, CHANNELS, 3, 3), generator).to(device)
        outputs = convolve(x, kernels, padding=1).double()
        total = F.conv2d(x.double(), kernels.double().sum(0, keepdim=True), padding=1)
        return compare(outputs.sum(1, keepdim=True) - total, 0.25)

    return check


def make_repeat_check(order: int, device: torch.device, seed: int, multiply: Multiply = torch.mm) -> Check:
    """Make a check that a product has the same bits twice. Another order of the sums may be honest."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(order, order, generator=generator).to(device) for _ in range(2))

    def check() -> float:
        first, again = (multiply(a, b).view(torch.int32) for _ in range(2))
        return WRONG * (not torch.equal(first, again))

    return check


def make_sum_check(rank: int, ranks: int, device: torch.device, reduce: Callable[[Tensor], object]) -> Check:
    """Make a check of a sum of integers over ranks that is known. Float32 holds it exactly in any order."""
    index, turns = torch.arange(SHARES), count()

    def check() -> float:
        turn = next(turns)

        def share(rank: int) -> Tensor:  # so that the sum is below 2**23: each bit of the mantissa has its turn
            return (index * (2 * rank + 1) * 40_503 + turn * 9_973 + rank) % ((1 << 23) // ranks)

        values = share(rank).float().to(device)
        reduce(values)
        return compare(values.cpu().double() - sum(map(share, range(ranks))), 0.0)

    return check


def make_storage_check(path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> Check:
    """Make a check of crc32c of random bytes that are written, dropped from the page cache, and read."""

    def check() -> float:
        content = os.urandom(FILE_BYTES)
        try:
            storage.measure_write(path, content, FILE_BYTES)
            storage.drop_from_page_cache(path)
            return WRONG * bool(google_crc32c.value(read(path)) != google_crc32c.value(content))
        finally:
            path.unlink(missing_ok=True)

    return check
