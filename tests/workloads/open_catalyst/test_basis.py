"""The bases against scipy's special functions, their own definitions and numerical derivatives."""

import math

import numpy as np
import pytest
import torch
from scipy.special import eval_legendre, spherical_jn

from mlhpc.workloads.open_catalyst.basis import (
    Envelope,
    RadialBasis,
    SphericalRadialBasis,
    compute_angular_basis,
    compute_bessel_zeros,
    compute_normalised_bessel,
)

X = torch.linspace(0.1, 0.999, 200)


def test_zeros_are_those_of_the_spherical_bessel_functions_and_none_is_left_out() -> None:
    zeros = compute_bessel_zeros(7, 6)
    assert zeros.shape == (7, 6)
    for order in range(7):
        np.testing.assert_allclose(spherical_jn(order, zeros[order]), 0, atol=1e-12)
        grid = np.linspace(0.5, zeros[order, -1] + 0.1, 20_000)
        assert (np.diff(np.sign(spherical_jn(order, grid))) != 0).sum() == 6
    np.testing.assert_allclose(zeros[1, 0], 4.493409457909064)  # tan x = x


def test_the_functions_of_one_order_are_orthonormal_in_the_sphere() -> None:
    x = np.linspace(0, 1, 4001)
    for order, zeros in enumerate(compute_bessel_zeros(7, 6)):
        values = np.stack([compute_normalised_bessel(order, zero, x) for zero in zeros])
        overlap = np.trapezoid(values[:, None] * values[None] * x**2, x, axis=2)
        np.testing.assert_allclose(overlap, np.eye(6), atol=2e-5)


@pytest.mark.parametrize(("angular", "radial"), [(7, 6), (3, 6), (1, 1), (4, 8)])
def test_the_fitted_basis_is_scipys_spherical_bessel_functions(angular: int, radial: int) -> None:
    basis = SphericalRadialBasis(angular, radial, Envelope(5))
    found = (basis(X) / basis.envelope(X)[:, None, None]).numpy()
    assert found.shape == (200, angular, radial)
    for order, zeros in enumerate(compute_bessel_zeros(angular, radial)):
        for place, zero in enumerate(zeros):
            expected = compute_normalised_bessel(order, zero, X.double().numpy())
            np.testing.assert_allclose(found[:, order, place], expected, atol=3e-5)


def test_derivatives_of_the_fitted_basis_are_scipys() -> None:
    basis = SphericalRadialBasis(7, 6, Envelope(5)).double()
    basis.envelope = torch.nn.Identity()
    basis.forward = lambda x: (  # the Bessel part alone
        torch.cat([torch.cos(x[:, None] * basis.wave_Q), torch.sin(x[:, None] * basis.wave_Q)], 1) @ basis.coefficients
    ).view(-1, 7, 6)
    x = X.double().requires_grad_()
    values = basis(x)
    for order, zeros in enumerate(compute_bessel_zeros(7, 6)):
        for place, zero in enumerate(zeros):
            (slope,) = torch.autograd.grad(values[:, order, place].sum(), x, retain_graph=True)
            norm = math.sqrt(2) / abs(spherical_jn(order + 1, zero))
            expected = norm * zero * spherical_jn(order, zero * X.double().numpy(), derivative=True)
            np.testing.assert_allclose(slope.numpy(), expected, atol=2e-4)


def test_bases_are_twice_differentiable() -> None:
    torch.manual_seed(0)
    envelope = Envelope(5)
    x = torch.rand(5, dtype=torch.float64) * 0.8 + 0.15
    x.requires_grad_()
    for basis in (envelope, RadialBasis(6, envelope).double(), SphericalRadialBasis(4, 3, envelope).double()):
        assert torch.autograd.gradcheck(basis, (x,))
        assert torch.autograd.gradgradcheck(basis, (x,))


def test_the_envelope_and_its_first_two_derivatives_vanish_at_the_cutoff() -> None:
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    value = Envelope(5)(x)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert max(abs(value.item()), abs(first.item()), abs(second.item())) < 1e-12
    near = torch.tensor([0.01], dtype=torch.float64)
    assert Envelope(5)(near).item() == pytest.approx(100, rel=1e-6)  # 1/x where the powers are small


def test_radial_functions_start_as_the_zeroth_spherical_bessel_functions() -> None:
    radial = RadialBasis(6, Envelope(5))
    assert torch.allclose(radial.frequency_K, math.pi * torch.arange(1.0, 7.0))
    assert radial.frequency_K.requires_grad
    expected = radial.envelope(X)[:, None] * torch.sin(torch.arange(1.0, 7.0) * math.pi * X[:, None])
    torch.testing.assert_close(radial(X), expected)


def test_the_angular_basis_is_legendres_polynomials_as_spherical_harmonics() -> None:
    cosine = torch.linspace(-1, 1, 101)
    found = compute_angular_basis(cosine, 7).numpy()
    for order in range(7):
        expected = math.sqrt((2 * order + 1) / (4 * math.pi)) * eval_legendre(order, cosine.double().numpy())
        np.testing.assert_allclose(found[:, order], expected, atol=2e-6)


def test_the_angular_basis_has_finite_derivatives_on_a_line() -> None:
    cosine = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda c: compute_angular_basis(c, 5), (cosine,))
