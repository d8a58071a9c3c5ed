"""Scaling: factors multiply to the speed-up, and models find the law that made the data."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.statistics.scaling import NotEnoughPointsError, Split, factors, fit


def runs(law: object, scales: tuple[int, ...] = (1, 2, 4, 8, 16, 32), noise: float = 0.0) -> dict[float, list[float]]:
    chance = np.random.default_rng(1)
    return {float(n): [float(law(n) * np.exp(chance.normal(0, noise))) for _ in range(5)] for n in scales}  # type: ignore[operator]


def test_the_factors_multiply_to_the_speed_up() -> None:
    a, b = Split(128, 18.25, 1100.0, 351.0, 96.0), Split(1024, 34.4, 280.0, 92.0, 55.0)
    found = factors(a, b)
    assert found.speed_up == pytest.approx(a.run_s / b.run_s)
    assert found.efficiency == pytest.approx(a.run_s / b.run_s / 8)
    assert found.algorithmic == pytest.approx(18.25 / 34.4)


def test_a_perfect_machine_whose_batch_costs_twice_the_epochs_loses_by_algorithm_alone() -> None:
    found = factors(Split(8, 10, 100.0, 0.0, 0.0), Split(16, 20, 100.0, 0.0, 0.0))
    assert (found.system, found.algorithmic, found.staging, found.other) == (1.0, 0.5, 1.0, 1.0)


def test_amdahl_recovers_the_serial_share() -> None:
    model = fit(runs(lambda n: 100 * (0.05 + 0.95 / n)))[0]
    parallel, serial = model.coefficients
    assert serial / (parallel + serial) == pytest.approx(0.05)
    assert model.loo_error < 1e-9


def test_usl_recovers_contention_and_crosstalk() -> None:
    model = fit(runs(lambda n: 50 * (1 + 0.03 * (n - 1) + 0.001 * n * (n - 1)) / n))[1]
    base, contention, crosstalk = model.coefficients
    assert (contention / base, crosstalk / base) == pytest.approx((0.03, 0.001))


def test_pmnf_finds_the_form_that_made_the_data() -> None:
    model = fit(runs(lambda n: (100 + 0.5 * n * np.log2(n)) / n))[2]
    assert model.form == "(c0 + c1·n·log2(n)) / n"
    assert model.time_s([64])[0] == pytest.approx(100 / 64 + 0.5 * 6, rel=1e-6)


def test_the_band_covers_the_law_within_the_measured_range() -> None:
    def law(n: float) -> float:
        return 100 * (0.05 + 0.95 / n)

    amdahl = fit(runs(law, noise=0.03))[0]
    low, high = amdahl.band([2, 8, 32])
    assert all(a * 0.98 <= law(n) <= b * 1.02 for a, b, n in zip(low, high, [2, 8, 32], strict=True))
    assert (high > low).all()


def test_four_scales_are_not_enough() -> None:
    with pytest.raises(NotEnoughPointsError, match="5 scales; there are 4"):
        fit(runs(lambda n: 1 / n, scales=(1, 2, 4, 8)))
