"""Checks that a node computes right: a product, a convolution, an all-reduce, a file. Wrong is not slow.

A check returns its error over the bound of rounding: above 1 the result is wrong. Products have checksums of rows and
columns (Huang and Abraham 1984). Small integers are exact in float32 in every order of a sum, so there any flipped bit
shows. Normal data have other bit patterns; there a change below the bound is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mlhpc.suite.performance.ceilings import storage

Multiply = Callable[[Tensor, Tensor], Tensor]

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
    columns = c.sum(0) - wide_a.sum(0) @ wide_b
    rows = c.sum(1) - wide_a @ wide_b.sum(1)
    return compare(torch.cat((columns, rows)), bound)


def compare(residual: Tensor, bound: float) -> float:
    """Return the largest residual over the bound. What is not finite is wrong."""
    worst = float(residual.abs().max())
    if worst != worst or worst == float("inf"):
        return WRONG
    return min(worst / bound, WRONG) if bound else (WRONG if worst else 0.0)


def draw_integers(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Tensor:
    """Draw small integers as float32."""
    most = LARGEST_INTEGER
    return torch.randint(-most, most + 1, shape, generator=generator).to(device, torch.float32)


class ProductCheck:
    """Multiplies normal data and small integers in turn, other ones each time."""

    def __init__(self, order: int, device: torch.device, seed: int, multiply: Multiply = torch.mm) -> None:
        self._order, self._device, self._multiply = order, device, multiply
        self._generator, self._exact = torch.Generator().manual_seed(seed), False

    def __call__(self) -> float:
        """Return the error over the bound."""
        shape, self._exact = (self._order, self._order), not self._exact
        if self._exact:
            a, b = (draw_integers(shape, self._device, self._generator) for _ in range(2))
            return check_product(self._multiply, a, b, 0.0)
        a, b = (torch.randn(shape, generator=self._generator).to(self._device) for _ in range(2))
        return check_product(self._multiply, a, b, compute_product_bound(a, b))


class ConvolutionCheck:
    """Convolves small integers. The sum over outputs is the convolution with the sum of the kernels.

    A library may transform the data first, which is not exact: the result may be wrong by less than a quarter.
    """

    def __init__(self, device: torch.device, seed: int, convolve: Callable[..., Tensor] = F.conv2d) -> None:
        self._device, self._convolve = device, convolve
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self) -> float:
        """Return the error over the bound."""
        x = draw_integers((BATCH, CHANNELS, SIDE, SIDE), self._device, self._generator)
        kernels = draw_integers((2 * CHANNELS, CHANNELS, 3, 3), self._device, self._generator)
        outputs = self._convolve(x, kernels, padding=1).double()
        total = F.conv2d(x.double(), kernels.double().sum(0, keepdim=True), padding=1)
        return compare(outputs.sum(1, keepdim=True) - total, 0.25)


class RepeatCheck:
    """Computes the same product twice. The bits must be equal; another order of the sums may be honest."""

    def __init__(self, order: int, device: torch.device, seed: int, multiply: Multiply = torch.mm) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._a, self._b = (torch.randn(order, order, generator=generator).to(device) for _ in range(2))
        self._multiply = multiply

    def __call__(self) -> float:
        """Return 0, or more than 1 if bits differ."""
        first, again = (self._multiply(self._a, self._b).view(torch.int32) for _ in range(2))
        return 1.0 + float((first != again).sum()) if not torch.equal(first, again) else 0.0


class AllReduceCheck:
    """Adds integers of all ranks, whose sum is known. Float32 holds it exactly in any order."""

    def __init__(self, rank: int, ranks: int, device: torch.device, reduce: Callable[[Tensor], object]) -> None:
        self._reduce, self._device, self._turn = reduce, device, 0
        self._rank, self._ranks = rank, ranks

    def __call__(self) -> float:
        """Return 0, or `WRONG`."""
        self._turn += 1
        # Below 2**23 / ranks, so that the sum is below 2**23: each bit of the mantissa has its turn
        most = (1 << 23) // self._ranks
        index = torch.arange(SHARES, dtype=torch.int64)

        def share(rank: int) -> Tensor:
            return (index * (2 * rank + 1) * 40_503 + self._turn * 9_973 + rank) % most

        values = share(self._rank).to(self._device, torch.float32)
        self._reduce(values)
        right = torch.stack([share(rank) for rank in range(self._ranks)]).sum(0).to(torch.float32)
        return compare((values.cpu() - right).double(), 0.0)


def all_reduce(values: Tensor) -> None:
    """Add tensors of all ranks."""
    dist.all_reduce(values)


class StorageCheck:
    """Writes random bytes, drops them from the page cache, reads them, and compares crc32c."""

    def __init__(self, path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> None:
        self._path, self._read = path, read

    def __call__(self) -> float:
        """Return 0, or `WRONG`."""
        content = os.urandom(FILE_BYTES)
        try:
            with self._path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            storage.drop_from_page_cache(self._path)
            again = self._read(self._path)
        finally:
            self._path.unlink(missing_ok=True)
        return 0.0 if google_crc32c.value(again) == google_crc32c.value(content) else WRONG
