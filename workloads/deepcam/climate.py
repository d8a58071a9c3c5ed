"""Synthetic weather: 16 channels of a CAM5 snapshot with tropical cyclones and atmospheric rivers, and their labels.

Events are added to a zonal climate, Gaussian random fields and balanced winds. Labels come from the generating event,
not from a detector. Decoys share one property with events, so that no threshold on one channel separates them. They are
cold-core cyclones, weak tropical lows, moist air without wind and dry jets.

Arrays are (H, W) float32 from south to north. Distances are in degrees of latitude, pressures in Pa, winds in m/s, TMQ
in kg/m^2.

Reads and checks the public file format: one HDF5 file per snapshot and one ``stats.h5`` per data set.

    climate/data      (H, W, 16) float32, channels last
    climate/labels_0  (H, W) integers: 0 background, 1 tropical cyclone, 2 atmospheric river
    stats.h5          climate/count, the number of snapshots; climate/{mean, sqmean, minval, maxval}, per channel

In the data set of 2019 the labels are ``climate/labels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import expit

from mlhpc.suite.data.shards import open_hdf5
from mlhpc.suite.errors import InputError
from mlhpc.workloads.deepcam.config import CHANNELS, CLASSES

Field = NDArray[np.float32]

GALE = np.float32(17.0)  # m/s: pixels where the cyclone's own wind is stronger are labelled ...
CYCLONE_RADIUS = np.float32(4.5)  # ... within this distance
RIVER_MOISTURE = np.float32(9.0)  # kg/m^2: pixels where a river adds more than this to TMQ are labelled
AIR_DENSITY = 1.15  # kg/m^3
METRES_PER_DEGREE = 111.2e3
CORIOLIS = 1.454e-4  # 2 * rotation rate of the Earth, 1/s
LONGEST_WAVE = 35.0  # degrees: the power spectrum of random fields is flat for longer waves
NOISE = {  # standard deviation of the pixel noise per channel
    **{"TMQ": 0.5, "U850": 0.6, "V850": 0.6, "UBOT": 0.6, "VBOT": 0.6, "QREFHT": 3e-4, "PS": 25.0, "PSL": 25.0},
    **{"T200": 0.3, "T500": 0.3, "PRECT": 1e-8, "TS": 0.4, "TREFHT": 0.4, "Z1000": 4.0, "Z200": 8.0, "ZBOT": 0.3},
}


@dataclass(frozen=True)
class Domain:
    """A window of the globe and the mean number of events and decoys in it. A window of 360 degrees is periodic.

    ``cyclones`` to ``dry_jets`` are means of Poisson distributions.
    """

    height: int
    width: int
    south: float
    north: float
    degrees_east: float
    cyclones: float
    rivers: float
    cold_cyclones: float
    weak_lows: float
    moist_blobs: float
    dry_jets: float


def make_snapshot(domain: Domain, seed: int, index: int) -> tuple[Field, NDArray[np.uint8]]:
    """Generate fields (H, W, 16) and labels (H, W) of one sample, a function of (domain, seed, index)."""
    # counter-based: the numbers depend on seed and index alone, not on what was drawn before
    random = np.random.Generator(np.random.Philox(key=[seed, index]))
    grid = _grid(domain)
    weather = _background(domain, grid, random)
    labels = np.zeros((domain.height, domain.width), dtype=np.uint8)
    for _ in range(random.poisson(domain.cold_cyclones)):
        _add_cold_cyclone(weather, grid, random)
    for _ in range(random.poisson(domain.weak_lows)):
        _add_tropical_low(weather, grid, random, weak=True)
    for _ in range(random.poisson(domain.moist_blobs)):
        _add_moist_blob(weather, grid, random)
    for _ in range(random.poisson(domain.dry_jets)):
        _add_filament(weather, grid, random, dry=True)
    for _ in range(random.poisson(domain.rivers)):
        labels[_add_filament(weather, grid, random, dry=False) > RIVER_MOISTURE] = 2
    # last, so that a cyclone's label replaces that of a river under it
    for _ in range(random.poisson(domain.cyclones)):
        labels[_add_tropical_low(weather, grid, random, weak=False) > GALE] = 1
    return _channels(weather, grid, random), labels


@dataclass(frozen=True)
class _Grid:
    """Coordinates of pixels in degrees: ``latitude`` (H, 1), ``longitude`` (1, W); ``period`` is 0 for a window."""

    latitude: Field
    longitude: Field
    degrees_north: float
    degrees_east: float
    period: float
    coriolis: Field

    def place(self, random: np.random.Generator, low: float, high: float) -> tuple[float, float]:
        """Draw a latitude, |latitude| in [low, high) on a hemisphere that the window covers, and a longitude."""
        latitude = random.uniform(low, high)
        # neither hemisphere of a window may have this latitude: then the point is outside, in the north
        sides = [side for side in (1, -1) if self.latitude[0, 0] <= side * latitude <= self.latitude[-1, 0]] or [1]
        return latitude * sides[random.integers(len(sides))], random.uniform(0, self.degrees_east)

    def offsets(self, latitude: float, longitude: float) -> tuple[Field, Field]:
        """Compute distances east and north of a point, in degrees of latitude."""
        east = self.longitude - np.float32(longitude)
        if self.period:
            # the shorter way around the globe
            east = (east + np.float32(self.period / 2)) % np.float32(self.period) - np.float32(self.period / 2)
        return east * np.float32(np.cos(np.radians(latitude))), self.latitude - np.float32(latitude)


@dataclass
class _Weather:
    """The state that events change; the 16 channels are derived from it."""

    pressure: Field
    u: Field
    v: Field
    moisture: Field
    rain: Field
    surface: Field
    upper_500: Field
    upper_200: Field


@lru_cache(maxsize=4)
def _grid(domain: Domain) -> _Grid:
    step_north, step_east = (domain.north - domain.south) / domain.height, domain.degrees_east / domain.width
    latitude = (domain.south + step_north * (np.arange(domain.height) + 0.5)).astype(np.float32)[:, None]
    longitude = (step_east * (np.arange(domain.width) + 0.5)).astype(np.float32)[None, :]
    sine = np.sin(np.radians(latitude))
    return _Grid(
        latitude,
        longitude,
        domain.north - domain.south,
        domain.degrees_east,
        360.0 if domain.degrees_east >= 360 else 0.0,
        (np.float32(CORIOLIS) * np.copysign(np.maximum(np.abs(sine), 0.1), sine)).astype(np.float32),
    )


def _background(domain: Domain, grid: _Grid, random: np.random.Generator) -> _Weather:
    """Generate zonal climate, jet, trades and six random fields; pressure balances the winds of the streamfunction."""
    flow, warmth, humidity, cloud, deep, meander = (
        _random_field(grid, domain.height, domain.width, slope, random) for slope in (5.0, 3.5, 3.8, 2.5, 3.5, 4.0)
    )
    latitude, away = grid.latitude, np.abs(grid.latitude)
    warm = np.cos(np.radians(latitude)) ** 2
    surface = 259 + 42 * warm + 2.5 * warmth
    step_north = grid.degrees_north / domain.height * METRES_PER_DEGREE
    step_east = grid.degrees_east / domain.width * METRES_PER_DEGREE
    dy, dx = np.gradient(flow)
    u, v = -dy / np.float32(step_north), dx / np.float32(step_east)
    to_wind = np.float32(6) / u.std()  # m/s
    # westerlies near 41 degrees, trade winds near 13
    jet = 13 * np.exp(-(((away - 41 - 4 * meander) / 8) ** 2)) - 7 * np.exp(-(((away - 13) / 9) ** 2))
    # the subtropical high near 31 degrees, the subpolar low near 62
    zonal_pressure = 700 * np.exp(-(((away - 31) / 12) ** 2)) - 900 * np.exp(-(((away - 62) / 12) ** 2))
    balanced = AIR_DENSITY * grid.coriolis * flow * to_wind
    # kg/m^2: saturated air holds 6 % more per kelvin
    saturation = 58 * np.exp(0.062 * (surface - 301))
    return _Weather(
        pressure=(101_150 + zonal_pressure + balanced).astype(np.float32),
        u=(u * to_wind + jet).astype(np.float32),
        v=(v * to_wind).astype(np.float32),
        moisture=(saturation * (0.2 + 0.75 * expit(1.2 * humidity))).astype(np.float32),
        rain=(4e-8 * np.exp(1.2 * cloud - 0.5 + 0.5 * humidity)).astype(np.float32),
        surface=surface.astype(np.float32),
        upper_500=(238 + 29 * warm + 2.6 * (0.6 * warmth + 0.8 * deep)).astype(np.float32),
        upper_200=(222 - 4 * warm + 1.9 * deep).astype(np.float32),
    )


def _random_field(grid: _Grid, height: int, width: int, slope: float, random: np.random.Generator) -> Field:
    """Draw a periodic Gaussian random field of unit variance, power ~ k^-slope for waves below `LONGEST_WAVE`."""
    modes = fft.rfft2(random.standard_normal((height, width), dtype=np.float32))
    modes *= _amplitude(height, width, grid.degrees_north, grid.degrees_east, slope)
    field: Field = fft.irfft2(modes, s=(height, width))
    normal: Field = (field - field.mean()) / field.std()
    return normal


@lru_cache(maxsize=16)
def _amplitude(height: int, width: int, degrees_north: float, degrees_east: float, slope: float) -> Field:
    north = np.fft.fftfreq(height) * height / degrees_north
    east = np.fft.rfftfreq(width) * width / degrees_east
    k = np.hypot(north[:, None], east[None, :])
    # power of modes on a plane: k^-(slope + 1) / k per ring
    amplitude = (k**2 + LONGEST_WAVE**-2) ** (-(slope + 1) / 4)
    amplitude[0, 0] = 0
    result: Field = amplitude.astype(np.float32)
    return result


def compute_holland_vortex(
    distance: Field, drop: float, radius: float, shape: float, coriolis: float
) -> tuple[Field, Field]:
    """Compute pressure deficit and gradient wind, both positive, of a Holland (1980) vortex by distance.

    ``drop`` in Pa, ``distance`` and ``radius`` of strongest wind in degrees.
    doi:10.1175/1520-0493(1980)108<1212:AAMOTW>2.0.CO;2
    """
    # the ratio is infinite at the centre
    distance = np.maximum(distance, np.float32(0.05))
    ratio = np.power(np.float32(radius) / distance, np.float32(shape))
    decay = np.exp(-ratio)
    turning = distance * np.float32(METRES_PER_DEGREE * abs(coriolis) / 2)
    wind = np.sqrt(np.float32(shape * drop / AIR_DENSITY) * ratio * decay + turning**2) - turning
    return np.float32(drop) * (1 - decay), wind


def _add_tropical_low(weather: _Weather, grid: _Grid, random: np.random.Generator, *, weak: bool) -> Field:
    """Add a tropical cyclone, or a weak low: as warm and wet, without gale. Return its wind in `CYCLONE_RADIUS`."""
    latitude, longitude = grid.place(random, 8, 30)
    drop = random.uniform(200, 430) if weak else random.uniform(1_500, 6_500)
    radius = random.uniform(1.0, 1.8) if weak else random.uniform(0.8, 1.3)
    shape, warm_core = random.uniform(1.1, 1.6), random.uniform(0.4, 1.2)
    east, north = grid.offsets(latitude, longitude)
    rows, columns = _near(east, north, 12.0)
    east, north = east[:, columns], north[rows]
    squared = east**2 + north**2
    distance = np.sqrt(squared)
    coriolis = CORIOLIS * np.sin(np.radians(latitude))
    deficit, wind = compute_holland_vortex(distance, drop, radius, shape, coriolis)
    # 0.6 % at 12 degrees, where the window of `_near` ends: no visible edge
    fade = np.exp(-((distance / 8) ** 4))
    here = np.ix_(rows, columns)
    strength = random.uniform(0.1, 1) if weak else drop / 6_500
    weather.pressure[here] -= deficit * fade
    _add_circulation(weather, here, east, north, distance, wind * fade, np.sign(coriolis))
    weather.moisture[here] += (8 + 14 * strength) * np.exp(-squared / 10)
    weather.rain[here] += (1 + 4 * strength) * 1e-7 * np.exp(-squared / 4)
    weather.upper_500[here] += np.float32(warm_core * (2 + 5 * strength)) * np.exp(-squared / 5)
    weather.upper_200[here] += np.float32(warm_core * (1.5 + 3 * strength)) * np.exp(-squared / 9)
    if weak:
        return np.zeros(0, np.float32)
    gale_wind = np.zeros_like(weather.u)
    gale_wind[here] = np.where(distance < CYCLONE_RADIUS, wind, 0)
    return gale_wind


def _add_cold_cyclone(weather: _Weather, grid: _Grid, random: np.random.Generator) -> None:
    """Add a mid-latitude cyclone: as windy as a tropical one, larger, with a cold core."""
    latitude, longitude = grid.place(random, 28, 55)
    drop, radius = random.uniform(1_200, 3_500), random.uniform(3.0, 5.5)
    east, north = grid.offsets(latitude, longitude)
    squared = east**2 + north**2
    distance = np.sqrt(squared)
    bowl = np.exp(-squared / np.float32(2 * radius**2))
    coriolis = CORIOLIS * np.sin(np.radians(latitude))
    turning = distance * np.float32(METRES_PER_DEGREE * abs(coriolis) / 2)
    # gradient wind of a low with a Gaussian profile
    wind = np.sqrt(drop * squared / np.float32(radius**2) * bowl / AIR_DENSITY + turning**2) - turning
    weather.pressure -= np.float32(drop) * bowl
    _add_circulation(weather, ..., east, north, np.maximum(distance, np.float32(0.05)), wind, np.sign(coriolis))
    weather.upper_500 -= np.float32(random.uniform(2, 6)) * bowl
    weather.upper_200 += np.float32(random.uniform(0, 3)) * bowl
    weather.moisture += np.float32(random.uniform(0, 6)) * bowl
    weather.rain += np.float32(random.uniform(0.5, 2.5) * 1e-7) * bowl**2


def _add_moist_blob(weather: _Weather, grid: _Grid, random: np.random.Generator) -> None:
    """Add moist air without wind."""
    latitude, longitude = grid.place(random, 8, 50)
    angle, length, width = random.uniform(0, np.pi), random.uniform(2, 9), random.uniform(1.0, 2.5)
    along, across = _rotate(*grid.offsets(latitude, longitude), angle)
    blob = np.exp(-((along / np.float32(length)) ** 2) - (across / np.float32(width)) ** 2)
    weather.moisture += np.float32(random.uniform(12, 26)) * blob
    weather.rain += np.float32(random.uniform(0, 2) * 1e-7) * blob


def _add_filament(weather: _Weather, grid: _Grid, random: np.random.Generator, *, dry: bool) -> Field:
    """Add a curved band of wind: an atmospheric river, or if ``dry`` a jet. Returns what the river adds to TMQ."""
    latitude, longitude = grid.place(random, 26, 46)
    poleward = np.sign(latitude)
    angle, length = random.uniform(0.25, 1.1) * poleward, random.uniform(18, 32)
    width, bend = random.uniform(0.95, 1.6), random.uniform(-0.015, 0.015)
    amount, speed = random.uniform(18, 29), random.uniform(11, 21)
    along, across = _rotate(*grid.offsets(latitude, longitude), angle)
    slope = np.float32(2 * bend) * along
    # the distance from a parabola, to first order
    distance = (across - np.float32(bend) * along**2) / np.sqrt(1 + slope**2)
    end = expit((np.float32(length / 2) - np.abs(along)) / np.float32(1.2))
    band = end * np.exp(-(distance**2) / np.float32(2 * width**2))
    wide = end * np.exp(-(distance**2) / np.float32(2 * (1.5 * width) ** 2))
    heading = np.float32(angle) + np.arctan(slope)
    weather.u += np.float32(speed) * wide * np.cos(heading)
    weather.v += np.float32(speed) * wide * np.sin(heading)
    if dry:
        return np.zeros(0, np.float32)
    added: Field = np.float32(amount) * band
    weather.moisture += added
    weather.rain += np.float32(random.uniform(0.5, 2.0) * 1e-7) * band
    return added


def _near(east: Field, north: Field, reach: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Find the rows and columns within ``reach`` degrees, so that a small event does not touch the whole globe."""
    return np.flatnonzero(np.abs(north[:, 0]) < reach), np.flatnonzero(np.abs(east[0]) < reach)


def _add_circulation(
    weather: _Weather, here: Any, east: Field, north: Field, distance: Field, wind: Field, sense: float
) -> None:
    """Add a circulation: counter-clockwise for ``sense`` 1, as on the northern hemisphere."""
    turn = np.float32(sense) * wind / np.maximum(distance, np.float32(0.05))
    weather.u[here] -= turn * north
    weather.v[here] += turn * east


def _rotate(east: Field, north: Field, angle: float) -> tuple[Field, Field]:
    """Rotate offsets to coordinates along and across a direction."""
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return east * cosine + north * sine, north * cosine - east * sine


def _channels(weather: _Weather, grid: _Grid, random: np.random.Generator) -> Field:
    """Compute the 16 channels with their noise, channels last."""
    anomaly = weather.pressure - np.float32(101_300)
    reference = weather.surface - 1
    terrain = _terrain(grid)
    values = {
        "TMQ": np.maximum(weather.moisture, 0.5),
        "U850": weather.u,
        "V850": weather.v,
        # near the ground the wind is slower and turned by 12 degrees
        "UBOT": 0.72 * weather.u - 0.15 * weather.v,
        "VBOT": 0.72 * weather.v + 0.15 * weather.u,
        "QREFHT": 2.6e-4 * weather.moisture + 4e-3 * np.exp(0.06 * (reference - 290)),
        # 8,400 m: scale height of the atmosphere
        "PS": weather.pressure * (1 - terrain / 8_400),
        "PSL": weather.pressure,
        "T200": weather.upper_200,
        "T500": weather.upper_500,
        "PRECT": weather.rain,
        "TS": weather.surface,
        "TREFHT": reference,
        "Z1000": 110 + 0.083 * anomaly,
        "Z200": 12_100 + 0.05 * anomaly + 22 * (weather.upper_500 - 260),
        "ZBOT": 60 + 0.22 * (reference - 288),
    }
    x = np.empty((*weather.u.shape, len(CHANNELS)), dtype=np.float32)
    for position, name in enumerate(CHANNELS):
        noise = random.standard_normal(weather.u.shape, dtype=np.float32)
        x[..., position] = values[name] + np.float32(NOISE[name]) * noise
    # noise must not make rain negative
    x[..., CHANNELS.index("PRECT")].clip(0, None, out=x[..., CHANNELS.index("PRECT")])
    return x


def _terrain(grid: _Grid) -> Field:
    """Make smooth mountains in metres, the same in every sample."""
    east, north = np.radians(grid.longitude * 5), np.radians(grid.latitude * 4)
    height: Field = 1_200 * np.maximum(np.sin(east) * np.cos(north + 0.7), 0) ** 2
    return height.astype(np.float32)


DATA, LABELS = "climate/data", ("climate/labels_0", "climate/labels")
STATISTICS_NAME = "stats.h5"

Fields = NDArray[np.float32]
Labels = NDArray[np.uint8]

PER_CHANNEL = ("mean", "sqmean", "minval", "maxval")


@dataclass(frozen=True)
class Statistics:
    """Statistics of the training split: number of snapshots; per channel extremes, mean and mean of squares."""

    count: int
    mean: tuple[float, ...]
    sqmean: tuple[float, ...]
    minval: tuple[float, ...]
    maxval: tuple[float, ...]


def read_shape(path: Path) -> tuple[int, int]:
    """Read the height and width of a snapshot. InputError as in `read_snapshot`."""
    with open_hdf5(path) as file:
        height, width, _ = _dataset(path, file, (DATA,), 3).shape
    return height, width


def read_snapshot(path: Path) -> tuple[Fields, Labels]:
    """Read fields and labels of one file and check every value. InputError names file, dataset and index."""
    with open_hdf5(path) as file:
        data, labels = _dataset(path, file, (DATA,), 3), _dataset(path, file, LABELS, 2)
        if data.shape[2] != len(CHANNELS) or data.dtype.kind != "f":
            raise InputError(f"{path}: {DATA} is {data.shape} {data.dtype}, expected (H, W, {len(CHANNELS)}) floats")
        if labels.shape != data.shape[:2]:
            raise InputError(f"{path}: {labels.name[1:]} is {labels.shape}, expected {data.shape[:2]} as {DATA}")
        x, y, name = data[...].astype(np.float32, copy=False), labels[...], labels.name[1:]
    return check_fields(x, path), check_labels(y, path, name)


def check_fields(x: Fields, path: Path) -> Fields:
    """Return the fields unchanged. InputError names the first value that is not finite."""
    if not np.isfinite(x.sum(dtype=np.float64)):  # finite fields need one pass: a sum shows any NaN or infinity
        bad = np.argwhere(~np.isfinite(x))
        if len(bad):
            row, column, channel = bad[0].tolist()
            raise InputError(
                f"{path}: {DATA}[{row}, {column}, {channel}] is {x[row, column, channel]} ({CHANNELS[channel]}), "
                f"with {len(bad) - 1} more values that are not finite"
            )
    return x


def check_labels(y: NDArray[Any], path: Path, name: str) -> Labels:
    """Return the labels as uint8. InputError names the first pixel whose class does not exist."""
    bad = np.argwhere(~np.isin(y, np.arange(len(CLASSES))))
    if len(bad):
        row, column = bad[0].tolist()
        classes = ", ".join(f"{number} {label}" for number, label in enumerate(CLASSES))
        raise InputError(f"{path}: {name}[{row}, {column}] is {y[row, column]}: unknown class; classes: {classes}")
    return y.astype(np.uint8)


def read_statistics(path: Path) -> Statistics:
    """Read ``stats.h5``. InputError if it is missing, incomplete, or a channel has no range."""
    if not path.exists():
        raise InputError(
            f"{path}: missing: inputs are normalised by its climate/minval and climate/maxval; "
            "it belongs to the data set"
        )
    values: dict[str, Any] = {}
    with open_hdf5(path) as file:
        count = _dataset(path, file, ("climate/count",), 0)[()]
        if not (np.issubdtype(type(count), np.number) and count >= 1):
            raise InputError(f"{path}: climate/count is {count}, expected the number of snapshots")
        values["count"] = int(count)
        for name in PER_CHANNEL:
            value = np.asarray(_dataset(path, file, (f"climate/{name}",), 1)[...], dtype=np.float64)
            if value.shape != (len(CHANNELS),) or not np.isfinite(value).all():
                raise InputError(f"{path}: climate/{name}: expected {len(CHANNELS)} finite numbers, one per channel")
            values[name] = tuple(value.tolist())
    return check_statistics(Statistics(**values), str(path))


def check_statistics(statistics: Statistics, where: str) -> Statistics:
    """Return the statistics unchanged. InputError names a channel that cannot be normalised."""
    for name, low, high in zip(CHANNELS, statistics.minval, statistics.maxval, strict=True):
        if not low < high:
            raise InputError(f"{where}: channel {name} has minval {low:g} and maxval {high:g}: it cannot be normalised")
    return statistics


def _dataset(path: Path, file: h5py.File, names: tuple[str, ...], dimensions: int) -> h5py.Dataset:
    for name in names:
        dataset = file.get(name)
        if isinstance(dataset, h5py.Dataset):
            if len(dataset.shape) != dimensions:
                raise InputError(f"{path}: {name} has shape {dataset.shape}, expected {dimensions} dimensions")
            return dataset
    group = file.get("climate")
    inside = ", ".join(sorted(group)) if isinstance(group, h5py.Group) else "no group 'climate'"
    raise InputError(f"{path}: no dataset {names[0]}; found: {inside or 'nothing'}")
