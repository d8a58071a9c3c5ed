"""The predictors of benchmarks/baselines find what is there to be found, and nothing else. Boosting needs LightGBM."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from benchmarks.baselines import compute_mean, cosmoflow, deepcam, moe_lm, open_catalyst, openfold, swinv2_moe
from mlhpc.suite.data.manifest import Manifest, write_manifest
from mlhpc.suite.data.shards import ShardReader, build_shard_path, write_shard
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow.cosmology import Simulation, make_universe
from mlhpc.workloads.open_catalyst import generate as slabs
from mlhpc.workloads.openfold.proteins import Families, make_proteins
from tests.workloads.tiny import TINY


def test_a_mean_and_a_ratio_know_their_standard_errors() -> None:
    errors = np.random.default_rng(0).exponential(size=50)
    found = compute_mean(errors)
    assert (found, found.standard_error) == pytest.approx((errors.mean(), errors.std(ddof=1) / 50**0.5))
    ratio = open_catalyst._mean_error(3 * errors, np.arange(50))  # structures of one atom: a mean
    assert (ratio, ratio.standard_error) == pytest.approx((found, found.standard_error))


def test_the_one_point_regression_sees_no_neighbours() -> None:
    """Voxels in another order keep the moments and lose the spectra."""
    x = make_universe(Simulation(16, 8, 128.0, "2lpt"), 0, 0)[0][None]
    mixed = np.random.default_rng(0).permutation(x.reshape(1, -1, 4), axis=1).reshape(x.shape)
    first, second = cosmoflow.compute_features(x), cosmoflow.compute_features(mixed)
    moments = cosmoflow.count_moments(4)
    np.testing.assert_allclose(first[:, :moments], second[:, :moments], rtol=1e-4)
    assert np.abs(first[:, moments:] - second[:, moments:]).max() > 0.5


@pytest.mark.long
@pytest.mark.parametrize("shown", [True, False])
def test_only_neighbours_tell_a_class_that_noise_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    """One channel is noise plus half a deviation over a river. Labels of another snapshot tell nobody anything."""
    monkeypatch.setattr(deepcam, "FIT_PIXELS", 1 << 13)
    monkeypatch.setattr(deepcam, "_fit_boosting", deepcam._fit_mlp)
    random = np.random.default_rng(0)
    splits = {}
    for split, samples in (("train", 24), ("validation", 6)):
        y = np.zeros((samples, 32, 48), np.uint8)
        for sample, left in enumerate(random.integers(32, size=samples)):
            y[sample, :, left : left + 16] = 2
        x = random.normal(size=(*y.shape, 16)).astype(np.float32)
        x[..., 0] += 0.25 * (y if shown else np.roll(y, 1, axis=0))
        splits[split] = (write_shard(build_shard_path(tmp_path, split, 0), {"x": x, "y": y}),)
    statistics = {"count": 24, "mean": [0.0] * 16, "sqmean": [1.0] * 16, "minval": [-9.0] * 16, "maxval": [9.0] * 16}
    about = {"statistics": statistics}
    manifest = Manifest(workload="deepcam", size="smoke", seed=0, generator={}, splits=splits, attributes=about)
    write_manifest(tmp_path, manifest)
    values = deepcam.measure_baselines(tmp_path)
    found = {name: value - values["all_background"] for name, value in values.items()}
    if shown:
        assert found["box_mlp"] > found["pixel_mlp"] + 0.1
        assert all(found[f"{kind}_smoothed"] > found[kind] for kind in ("pixel_mlp", "box_mlp"))
    else:
        assert max(found.values()) < 0.15


@pytest.mark.parametrize("embedded", [False, True])
def test_fits_find_forces_of_their_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: bool) -> None:
    """A repulsion by pairs, or one that grows with both atoms' densities, is found again where it was fitted.

    The second is none of pairs alone.
    """
    settings = TINY["open_catalyst"].settings
    monkeypatch.setitem(slabs.SIZES, "smoke", settings)
    slabs.generate(tmp_path / "tiny", "smoke", seed=3, world=World.create(None))
    tiny = ShardReader(tmp_path / "tiny", "train")
    splits = {}
    for split in ("train", "validation"):
        arrays = tiny.read(range(16))
        offsets = arrays["atom.offsets"]
        force = np.zeros_like(arrays["atom.force"])
        for place in range(16):
            here = slice(offsets[place], offsets[place + 1])
            position = arrays["atom.position"][here].astype(float)
            edges = settings.neighbourhood.edges(position, arrays["cell"][place].astype(float))
            vector = position[edges.source] + edges.shift - position[edges.target]
            distance = np.linalg.norm(vector, axis=1, keepdims=True)
            size = np.exp(-((distance / 2.0) ** 2))
            if embedded:
                density = np.bincount(edges.target, np.exp(-distance[:, 0] / 0.7), len(position))[:, None]
                size *= density[edges.source] + density[edges.target]
            np.add.at(force[here], edges.target, -vector / distance * size)
        arrays["atom.force"] = force.astype(np.float32)
        splits[split] = (write_shard(build_shard_path(tmp_path, split, 0), arrays),)
    write_manifest(tmp_path, structs.replace(tiny.manifest, splits=splits))
    values = open_catalyst.measure_baselines(tmp_path)
    assert values["embedded_atom"] < 0.1 * values["zero_force"]
    if embedded:
        assert values["embedded_atom"] < 0.5 * values["pair_potential"]
    else:
        assert values["pair_potential"] < 0.1 * values["zero_force"]


@pytest.mark.parametrize("fit", ["_fit_ridge", "_fit_boosting", None])
def test_couplings_tell_the_fold_and_columns_alone_do_not(fit: str | None) -> None:
    """Columns of other families have no couplings. Rows in another order keep what fits in conserved columns, and no more."""
    if fit == "_fit_boosting":
        pytest.importorskip("lightgbm")
    chains = make_proteins(Families(12, 14, 16, hairpins_per_helix=1), 0, range(120))
    train, true = chains[:90], chains[90:]
    random = np.random.default_rng(0)
    columns = np.concatenate([each.msa for each in true], 1)
    mixed = [replace(each, msa=columns[:, random.integers(columns.shape[1], size=len(each))]) for each in true]
    shuffled = [replace(each, msa=random.permuted(each.msa, axis=0)) for each in true]
    couplings = partial(openfold._couplings, potential=openfold.fit_contact_potential(train))
    if fit is None:
        predict = openfold._coupling_neighbours(train)
    else:
        predict = openfold._torsion_regression(train, couplings, getattr(openfold, fit))

    def score(predict: openfold.Predictor, shown: list) -> float:
        return np.mean([openfold._score(predict(each), chain) for each, chain in zip(shown, true, strict=True)])

    typical = score(openfold._typical_chain(train), true)
    assert score(predict, true) > typical + 0.1
    assert score(predict, mixed) < typical + 0.05
    assert score(predict, true) > score(predict, shuffled) + 0.03


@pytest.mark.parametrize("name", ["measure_best_ridge", "measure_boosting"])
def test_the_classifiers_find_what_is_there_and_nothing_else(name: str) -> None:
    if name == "measure_boosting":
        pytest.importorskip("lightgbm")
    measure = getattr(swinv2_moe, name)
    random = np.random.default_rng(0)
    x, y = random.standard_normal((900, 6)), np.repeat([0, 1, 2], 300)
    x[np.arange(900), y] += 4
    assert measure(x[::2], y[::2], x[1::2], y[1::2]) > 0.95
    assert measure(x[::2], random.permutation(y[::2]), x[1::2], y[1::2]) < 0.5


ORDERS = (0, 1, 2, 3)


def test_the_tree_finds_the_byte_that_decides() -> None:
    """Half of the rows repeat the byte five back, the others their first byte."""
    draw = np.random.default_rng(0)
    rows = draw.integers(0, 16, (600, 40), np.uint8)
    rows[:, 5:] = np.where(draw.random((600, 1)) < 0.5, np.tile(rows[:, :5], 7), rows[:, :1])
    tree = moe_lm.compute_tree_bits(rows[:500], rows[500:])
    counts = moe_lm.compute_ppm_bits(lambda: [rows[:500]], rows[500:], ORDERS)["ppm_mixed"]
    assert tree[:, 12:].mean() < 0.1 < counts[:, 12:].mean()


def test_chances_of_the_byte_models_sum_to_one() -> None:
    """Every model gives all 256 possible last bytes of a row chances that sum to one, after any training text."""
    draw = np.random.default_rng(0)
    training, rows = draw.integers(0, 3, (20, 30), np.uint8), draw.integers(0, 3, (4, 12), np.uint8)
    chances: dict[str, float] = {}
    for last in range(256):
        rows[-1, -1] = last
        found = moe_lm.compute_ppm_bits(lambda: [training], rows, ORDERS) | {
            "tree": moe_lm.compute_tree_bits(training, rows)
        }
        for name, bits in found.items():
            chances[name] = chances.get(name, 0.0) + 2 ** -bits[-1, -1]
    assert chances == pytest.approx(dict.fromkeys([*(f"ppm_{order}" for order in ORDERS), "ppm_mixed", "tree"], 1.0))


def test_the_byte_model_counts_training_and_earlier_rows_as_written_out_by_hand() -> None:
    training, rows = np.frombuffer(b"abac", np.uint8)[None], np.frombuffer(b"abadabaz", np.uint8).reshape(2, 4)
    bits = moe_lm.compute_ppm_bits(lambda: [training], rows, (1,))["ppm_1"]

    def chance(hits: int, total: int, distinct: int) -> float:
        return (max(hits - 0.5, 0) + 0.5 * distinct / 256) / total

    expected = [  # hits, total and distinct followers of the byte before, so far: a -> b, b -> a, a -> d
        [chance(1, 2, 2), chance(1, 1, 1), chance(0, 3, 2)],
        [chance(2, 4, 3), chance(2, 2, 1), chance(0, 5, 3)],
    ]
    assert bits == pytest.approx(-np.log2(expected))


def test_text_seen_before_costs_compressors_nothing() -> None:
    draw = np.random.default_rng(0)
    text = draw.integers(0, 256, 20_000, np.uint8).tobytes()
    alone = moe_lm.compute_compressor_bits(b"", text)
    assert all(7.9 < value < 8.3 for value in alone.values())
    seen = moe_lm.compute_compressor_bits(text, text)
    assert all(seen[name] < 0.6 * alone[name] for name in ("gzip", "xz"))
