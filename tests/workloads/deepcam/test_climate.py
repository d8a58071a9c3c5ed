"""The synthetic weather obeys the physics it is made of, and its labels are its events."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mlhpc.workloads.deepcam.climate import (
    AIR_DENSITY,
    CORIOLIS,
    METRES_PER_DEGREE,
    Domain,
    compute_holland_vortex,
    make_snapshot,
)
from mlhpc.workloads.deepcam.config import CHANNELS
from mlhpc.workloads.deepcam.generate import SIZES

QUIET = Domain(64, 96, 4, 52, 72, 0, 0, 0, 0, 0, 0)
GLOBE = Domain(64, 128, -90, 90, 360, 0, 0, 0, 0, 0, 0)
DECOYS = replace(QUIET, cold_cyclones=4, weak_lows=4, moist_blobs=4, dry_jets=4)


def channel(x: np.ndarray, name: str) -> np.ndarray:
    return x[..., CHANNELS.index(name)]


def test_a_snapshot_depends_on_its_seed_and_number_alone() -> None:
    domain = SIZES["smoke"].domain
    x, y = make_snapshot(domain, 1, 7)
    make_snapshot(domain, 2, 9)
    again, labels = make_snapshot(domain, 1, 7)
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(y, labels)
    assert not np.array_equal(x, make_snapshot(domain, 1, 8)[0])
    assert not np.array_equal(x, make_snapshot(domain, 2, 7)[0])
    assert x.dtype == np.float32
    assert y.dtype == np.uint8


def test_without_rotation_holland_winds_peak_at_their_radius_with_the_known_strength() -> None:
    """v_max = sqrt(B dp / (rho e)) at the radius of strongest wind: Holland (1980), equation 5."""
    distance = np.linspace(0.05, 6, 20_000, dtype=np.float32)
    deficit, wind = compute_holland_vortex(distance, 5_000, 0.8, 1.4, 0.0)
    assert wind.max() == pytest.approx(math.sqrt(1.4 * 5_000 / (AIR_DENSITY * math.e)), rel=1e-4)
    assert distance[wind.argmax()] == pytest.approx(0.8, abs=2e-3)
    assert deficit[0] == pytest.approx(5_000, rel=1e-3)
    assert (np.diff(deficit) <= 0).all()


def test_holland_winds_balance_pressure_gradient_coriolis_and_centrifugal_force() -> None:
    coriolis = CORIOLIS * math.sin(math.radians(20))
    distance = np.linspace(0.3, 6, 4_000)
    deficit, wind = compute_holland_vortex(distance.astype(np.float32), 5_000, 0.8, 1.4, coriolis)
    r = distance * METRES_PER_DEGREE
    gradient = np.gradient(-deficit.astype(float), r) / AIR_DENSITY
    balance = wind**2 / r + coriolis * wind
    np.testing.assert_allclose(balance[1:-1], gradient[1:-1], rtol=0.02)


def test_calm_weather_and_decoys_have_no_labels() -> None:
    for index in range(5):
        assert not make_snapshot(QUIET, 0, index)[1].any()
        assert not make_snapshot(DECOYS, 0, index)[1].any()


def test_cyclones_are_low_warm_wet_and_turn_the_right_way() -> None:
    """Against the same weather without them: the random numbers of events come after those of the background."""
    stormy = replace(GLOBE, cyclones=3.0)
    seen = set()
    for index in range(12):
        calm, _ = make_snapshot(GLOBE, 0, index)
        x, y = make_snapshot(stormy, 0, index)
        gale = y == 1
        if not gale.any():
            continue
        change = x - calm
        assert channel(change, "PSL")[gale].mean() < -400
        assert channel(change, "T500")[gale].mean() > 0.5
        assert channel(change, "TMQ")[gale].mean() > 3
        wind = np.hypot(channel(change, "U850"), channel(change, "V850"))
        assert wind[gale].mean() > 17
        # vorticity dv/dx - du/dy has the sign of the latitude; rows run from south to north
        curl = np.gradient(channel(change, "V850"), axis=1) - np.gradient(channel(change, "U850"), axis=0)
        for rows, sign in ((slice(0, 32), -1), (slice(32, 64), 1)):
            if gale[rows].any():
                assert sign * curl[rows][gale[rows]].mean() > 0
                seen.add(sign)
    assert seen == {1, -1}


def test_weak_lows_are_warm_and_wet_and_never_blow_a_gale() -> None:
    seen = []
    for index in range(8):
        change = make_snapshot(replace(QUIET, weak_lows=1.0), 0, index)[0] - make_snapshot(QUIET, 0, index)[0]
        lows = channel(change, "PSL") < -270
        if lows.any():
            seen.append(channel(change, "T500")[lows].mean())
            assert channel(change, "TMQ")[lows].mean() > 2
            assert np.hypot(channel(change, "U850"), channel(change, "V850")).max() < 17
    assert np.mean(seen) > 1


def test_rivers_are_wet_and_flow() -> None:
    wet, dry = replace(QUIET, rivers=2.0), replace(QUIET, dry_jets=2.0)
    found = 0
    for index in range(6):
        calm, _ = make_snapshot(QUIET, 0, index)
        x, y = make_snapshot(wet, 0, index)
        if (y == 2).any():
            found += 1
            change = (x - calm)[y == 2]
            assert channel(change, "TMQ").mean() > 9
            assert np.hypot(channel(change, "U850"), channel(change, "V850")).mean() > 8
        jets, labels = make_snapshot(dry, 0, index)
        assert not labels.any()
        assert channel(jets - calm, "TMQ").max() < 7  # noise only
    assert found >= 3


def test_mid_latitude_winds_are_balanced_by_pressure() -> None:
    """f v = (1 / rho) dp/dx: the meridional wind has no zonal mean in it."""
    fits = []
    for index in range(4):
        x, _ = make_snapshot(replace(QUIET, height=96, width=144), 0, index)
        rows = slice(60, 90)  # 34 to 49 degrees north
        latitude = np.radians(4 + 48 * (np.arange(96) + 0.5) / 96)[:, None]
        step = 72 / 144 * METRES_PER_DEGREE
        slope = np.gradient(channel(x, "PSL").astype(float), axis=1) / step
        geostrophic = slope / (AIR_DENSITY * CORIOLIS * np.sin(latitude))
        smooth = [
            np.apply_along_axis(np.convolve, 1, f[rows], np.ones(9) / 9, "valid") for f in (geostrophic, x[..., 2])
        ]
        fits.append(np.corrcoef(smooth[0].ravel(), smooth[1].ravel())[0, 1])
    assert np.mean(fits) > 0.9


def test_random_fields_join_at_the_date_line() -> None:
    x, _ = make_snapshot(GLOBE, 0, 0)
    psl = channel(x, "PSL")
    inside = np.abs(np.diff(psl, axis=1)).mean()
    assert np.abs(psl[:, 0] - psl[:, -1]).mean() < 1.5 * inside


@pytest.mark.parametrize("size", ["smoke", "mini"])
def test_classes_are_as_rare_as_documented(size: str) -> None:
    counts = sum(np.bincount(make_snapshot(SIZES[size].domain, 0, i)[1].ravel(), minlength=3) for i in range(40))
    shares = counts / counts.sum()
    assert 0.94 < shares[0] < 0.97
    assert 0.006 < shares[1] < 0.02
    assert 0.02 < shares[2] < 0.05


def test_values_are_those_of_an_atmosphere() -> None:
    x = np.concatenate([make_snapshot(SIZES["smoke"].domain, 0, i)[0].reshape(-1, 16) for i in range(20)])
    limits = {
        **{"TMQ": (-3, 100), "U850": (-100, 100), "PSL": (88_000, 106_000), "T500": (225, 295), "T200": (200, 240)},
        **{"TS": (240, 325), "PRECT": (0, 2e-5), "Z1000": (-1_000, 600), "Z200": (10_500, 13_500), "QREFHT": (0, 0.05)},
    }
    for name, (low, high) in limits.items():
        values = channel(x, name)
        assert low <= values.min(), name
        assert values.max() <= high, name
    assert np.isfinite(x).all()
