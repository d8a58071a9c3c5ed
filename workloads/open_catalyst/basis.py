"""Radial and angular basis functions of DimeNet, twice differentiable with few operations.

Gasteiger, Groß & Günnemann, "Directional message passing for molecular graphs", arXiv:2003.03123, equations 6 to 8.
Shapes: E edges, T triplets, L angular and K radial functions. x is a distance in units of the cutoff.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import spherical_jn
from torch import Tensor, nn

PERIOD = 2.0  # half period of the cosines that represent a function on [0, 1]; on the second interval the fit is free
SPARE_TERMS = 7  # more than the band limit of the fastest function needs; then the error is 1e-11


class Envelope(nn.Module):
    """1/x plus three powers of x, from ``exponent`` on. At x = 1 the value and the first two derivatives are 0."""

    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.p = p = exponent + 1
        self.a, self.b, self.c = -(p + 1) * (p + 2) / 2, p * (p + 2.0), -p * (p + 1) / 2

    def forward(self, x_E: Tensor) -> Tensor:
        """Evaluate the envelope, one value per edge."""
        power_E = x_E ** (self.p - 1)
        value_E: Tensor = 1 / x_E + power_E * (self.a + x_E * (self.b + self.c * x_E))
        return value_E


class RadialBasis(nn.Module):
    """sin(frequency_k x) times the envelope. The frequencies are learned, starting from k pi."""

    def __init__(self, count: int, envelope: Envelope) -> None:
        super().__init__()
        self.envelope = envelope
        self.frequency_K = nn.Parameter(math.pi * torch.arange(1, count + 1, dtype=torch.float32))

    def forward(self, x_E: Tensor) -> Tensor:
        """Return (E, K) of scaled lengths x (E)."""
        envelope_E: Tensor = self.envelope(x_E)
        return envelope_E[:, None] * torch.sin(self.frequency_K * x_E[:, None])


class SphericalRadialBasis(nn.Module):
    """Normalised spherical Bessel functions j_l(z_lk x) times the envelope; z_lk is the k-th zero of j_l.

    j_l has the parity of l. So it is a sum of a few cosines (l even) or sines (l odd) of a longer period. They are
    fitted once, in float64. The error is 1e-11; the closed forms suffer from cancellation at small x in float32.
    """

    def __init__(self, angular: int, radial: int, envelope: Envelope) -> None:
        super().__init__()
        self.envelope = envelope
        self.angular = angular
        zeros_LK, terms = compute_bessel_zeros(angular, radial), count_waves(angular, radial)
        wave_Q = np.arange(terms) * math.pi / PERIOD
        cosines, sines = np.zeros((2, terms, angular * radial))
        grid = np.linspace(0, 1, 40 * terms)
        for order in range(angular):
            wave, target = (np.sin, sines) if order % 2 else (np.cos, cosines)
            values = np.stack([compute_normalised_bessel(order, z, grid) for z in zeros_LK[order]], axis=1)
            fitted = np.linalg.lstsq(wave(np.outer(grid, wave_Q)), values, rcond=1e-13)[0]
            target[:, order * radial : (order + 1) * radial] = fitted
        self.wave_Q: Tensor
        self.coefficients: Tensor
        self.register_buffer("wave_Q", torch.tensor(wave_Q, dtype=torch.float32), persistent=False)
        both = torch.tensor(np.concatenate([cosines, sines]), dtype=torch.float32)
        self.register_buffer("coefficients", both, persistent=False)

    def forward(self, x_E: Tensor) -> Tensor:
        """Return (E, L, K) of scaled lengths x (E)."""
        phase_EQ = x_E[:, None] * self.wave_Q
        values = torch.cat([torch.cos(phase_EQ), torch.sin(phase_EQ)], dim=1) @ self.coefficients
        values_ELK: Tensor = (values * self.envelope(x_E)[:, None]).view(len(x_E), self.angular, -1)
        return values_ELK


def count_waves(angular: int, radial: int) -> int:
    """Compute the number of cosines (and of sines) that represent the spherical Bessel functions."""
    return math.ceil(float(compute_bessel_zeros(angular, radial).max()) * PERIOD / math.pi) + SPARE_TERMS


def compute_angular_basis(cosine_T: Tensor, count: int) -> Tensor:
    """Compute the real spherical harmonics Y_l0 (T, L) from the cosine of the angle, by Legendre's recurrence.

    The angle itself is never computed: its derivative is singular where three atoms lie on a line.
    """
    legendre = [torch.ones_like(cosine_T), cosine_T]
    for order in range(1, count - 1):
        following = ((2 * order + 1) * cosine_T * legendre[order] - order * legendre[order - 1]) / (order + 1)
        legendre.append(following)
    norms = [math.sqrt((2 * order + 1) / (4 * math.pi)) for order in range(count)]
    return torch.stack([norm * value for norm, value in zip(norms, legendre, strict=False)], dim=-1)


def compute_bessel_zeros(angular: int, radial: int) -> NDArray[np.float64]:
    """Find the first positive zeros of j_0 .. j_(L-1), shape (L, K). Those of j_l lie between those of j_(l-1)."""
    # zeros of j_0. Each next order has one zero between two of these, so it begins with one less
    between = np.arange(1, radial + angular, dtype=np.float64) * math.pi
    zeros = [between[:radial]]
    for order in range(1, angular):
        between = np.array([brentq(partial(spherical_jn, order), a, b) for a, b in pairwise(between)])
        zeros.append(between[:radial])
    return np.array(zeros)


def compute_normalised_bessel(order: int, zero: float, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute j_l(z x), scaled so that the integral of its square times x^2 over 0..1 is 1."""
    norm = math.sqrt(2) / abs(spherical_jn(order + 1, zero))
    return np.asarray(norm * spherical_jn(order, zero * x))
