"""Similarity against SciPy's Wasserstein distance; criteria of fleets with slow nodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import wasserstein_distance

from analysis.fleet.criteria import learn
from analysis.fleet.similarity import one_sided, similarity, similarity_matrix
from tests.fixtures.cli import mlhpc


def pairs(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Samples of different sizes, scales and shapes, some with equal values."""
    chance = np.random.default_rng(5)
    found = []
    for _ in range(count):
        sizes, scale = chance.integers(1, 60, 2), 10 ** chance.uniform(-6, 9)
        a, b = (chance.gamma(chance.uniform(0.5, 40), scale, size) for size in sizes)
        found.append((np.round(a / scale) * scale if chance.random() < 0.2 else a, b))
    return found


def test_similarity_is_one_minus_the_wasserstein_distance_over_the_mean() -> None:
    for a, b in pairs(1000):
        wanted = 1 - wasserstein_distance(a, b) / max(a.mean(), b.mean())
        assert similarity(a, b) == pytest.approx(wanted, abs=1e-12)
        assert similarity(b, a) == pytest.approx(wanted, abs=1e-12)
        assert similarity(a, a) == 1.0


def test_the_two_sides_add_up_and_the_good_side_does_not_count() -> None:
    for a, b in pairs(200):
        more, less = (1 - one_sided(a, b, more_is_better=way) for way in (True, False))
        assert more + less == pytest.approx(1 - similarity(a, b), abs=1e-12)
        assert one_sided(a + 1.1 * b.max(), b, more_is_better=True) == 1.0
        assert one_sided(b, a + 1.1 * b.max(), more_is_better=False) == 1.0


def test_a_shift_of_five_percent() -> None:
    a = np.random.default_rng(0).normal(100, 1, 20_000)
    assert similarity(a, a - 5) == pytest.approx(0.94999, abs=2e-4)
    assert one_sided(a - 5, a, more_is_better=True) == pytest.approx(0.94999, abs=2e-4)
    assert one_sided(a + 5, a, more_is_better=True) == 1.0


def test_equal_means_and_another_spread_differ_where_a_test_of_means_sees_nothing() -> None:
    narrow, wide = np.array([99.0, 100.0, 101.0]), np.array([70.0, 100.0, 130.0])
    assert narrow.mean() == wide.mean()
    assert similarity(narrow, wide) == pytest.approx(1 - (29 + 0 + 29) / 3 / 100)


def test_the_matrix_has_the_similarity_of_every_two() -> None:
    chance = np.random.default_rng(1)
    for sizes in ([7] * 5, [7, 8, 3, 7, 1]):
        samples = [chance.uniform(1, 2, size) for size in sizes]
        matrix = similarity_matrix(samples)
        for i in range(5):
            for j in range(5):
                assert matrix[i, j] == pytest.approx(similarity(samples[i], samples[j]), abs=1e-12)


def fleet(slow: int, healthy: int, part: float = 0.8) -> dict[str, list[float]]:
    chance = np.random.default_rng(2)
    return {
        f"n{i:02}": (100 * (part if i < slow else 1.0) * chance.normal(1, 0.01, 20)).tolist()
        for i in range(slow + healthy)
    }


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_slow_nodes_are_left_out_of_the_criterion(slow: int) -> None:
    found = learn(fleet(slow, 8), more_is_better=True)
    assert found.left_out == tuple(f"n{i:02}" for i in range(slow))
    assert found.usable
    assert found.repeatability is not None
    assert 0.98 < found.repeatability < 1.0


def test_faster_nodes_stay() -> None:
    found = learn(fleet(2, 8, part=1.3), more_is_better=True)
    assert found.left_out == ()


def test_a_slow_majority_wins_and_the_sizes_say_so() -> None:
    found = learn(
        fleet(8, 3, part=1.3), more_is_better=True
    )  # the slow ones are the last three, of which eight are a majority
    assert found.left_out == ("n08", "n09", "n10")
    found = learn({**fleet(8, 0, part=0.8), **{f"g{i}": [100.0] * 20 for i in range(3)}}, more_is_better=True)
    assert found.left_out == ()  # the healthy minority is faster: nothing tells, which is what bounds are for


def test_a_benchmark_that_does_not_repeat_cannot_have_that_criterion() -> None:
    chance = np.random.default_rng(3)
    samples = {f"n{i}": chance.uniform(50, 150, 4).tolist() for i in range(9)}
    found = learn(samples, more_is_better=True, alpha=0.97)
    assert not found.usable


def test_the_command_prints_criteria_and_gives_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    lines = [
        {"node": f"n{n}", "metric": "triad", "better": "more", "values": [99 + n / 10, 100, 101] if n < 5 else [50, 51]}
        for n in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    done = mlhpc("preflight", "criteria", path)
    assert done.returncode == 0
    assert done.stdout.startswith("triad: criterion of n")
    assert done.stdout.endswith("; 5 nodes alike; worse and less similar than 0.95: n5\n")
    (found,) = json.loads(mlhpc("preflight", "criteria", path, "--format", "json").stdout)["criteria"]
    assert (found["left_out"], found["usable"]) == (["n5"], True)
    assert 0.99 < found["repeatability"] < 1
    assert "not usable" in mlhpc("preflight", "criteria", path, "--alpha", "0.9999").stdout
