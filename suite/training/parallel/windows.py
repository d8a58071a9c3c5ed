"""Which input positions an operator needs for a range of its output, per dimension: numbers only, no torch.

A window of k values with dilation d and stride s, padded by p on the left, computes output o from inputs o s - p + i d
for i = 0..k-1. A transposed one adds input i into outputs i s - p + j d for j = 0..k-1.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from mlhpc.suite.training.parallel.mesh import Interval


@dataclass(frozen=True)
class Window:
    """Convolution or pooling along one dimension."""

    kernel: int
    stride: int
    dilation: int
    left: int

    def needs(self, out: Interval) -> Interval:
        """The inputs of a range of outputs; positions outside of the input are padding."""
        first = out[0] * self.stride - self.left
        return first, (out[1] - 1) * self.stride - self.left + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Transposed:
    """Transposed convolution along one dimension."""

    kernel: int
    stride: int
    dilation: int
    left: int

    def needs(self, out: Interval) -> Interval:
        """The inputs of a range of outputs; positions outside of the input are zeros.

        What comes of them covers the range.
        """
        reach = self.dilation * (self.kernel - 1)
        first = -((reach - out[0] - self.left) // self.stride)  # least i with i s - p + reach >= the first output
        last = (out[1] - 1 + self.left) // self.stride
        first = min(first, (out[0] + self.left) // self.stride)  # a kernel shorter than the stride leaves gaps
        if last * self.stride - self.left + reach < out[1] - 1:
            last += 1
        return first, last + 1

    def begins(self, first: int) -> int:
        """The output position of the first value that comes of inputs from ``first`` on, without cropping."""
        return first * self.stride - self.left


NEAREST, NEAREST_EXACT = "nearest", "nearest-exact"
LINEAR = ("linear", "bilinear", "trilinear")


@dataclass(frozen=True)
class Upsampled:
    """Upsampling along one dimension: each output lies between inputs ``first`` and ``second``, by ``weight`` towards
    that.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    weight: tuple[float, ...]

    @staticmethod
    def of(mode: str, n: int, out: int, *, factor: float | None, align_corners: bool) -> Upsampled:
        """As torch.nn.functional.interpolate takes ``out`` outputs from ``n`` inputs, by their ratio or by the
        ``factor``.
        """
        scale = n / out if factor is None else 1 / factor
        if mode in LINEAR:
            if align_corners:
                scale = (n - 1) / (out - 1) if out > 1 else 0.0
            places = [max(0.0, o * scale if align_corners else (o + 0.5) * scale - 0.5) for o in range(out)]
            first = tuple(min(math.floor(place), n - 1) for place in places)
            second = tuple(min(low + 1, n - 1) for low in first)
            weight = tuple(min(place - low, high - low) for place, low, high in zip(places, first, second, strict=True))
            return Upsampled(first, second, weight)
        shift, narrow = 0.5 if mode == NEAREST_EXACT else 0.0, _single(scale)  # torch counts in single precision here
        nearest = tuple(min(math.floor(_single((o + shift) * narrow)), n - 1) for o in range(out))
        return Upsampled(nearest, nearest, (0.0,) * out)

    def needs(self, out: Interval) -> Interval:
        """The inputs of a range of outputs."""
        return min(self.first[slice(*out)]), max(self.second[slice(*out)]) + 1


def _single(value: float) -> float:
    """The nearest number of single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
