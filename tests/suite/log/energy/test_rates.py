"""The interval of a run's energy on unfriendly loads: the fast form of benchmarks/energy_rates.py."""

import numpy as np
import pytest

from benchmarks.energy_rates import TRUTHS, covered, short

RUNS = 15


@pytest.mark.parametrize("meter", ["moments, random intervals", "means, random intervals"])
@pytest.mark.parametrize(
    "truth", ["period 1 s, in step", "period 3 s", "training and evaluations", "clock off by up to 1 s, drifts"]
)
def test_the_interval_holds_the_energy_and_stays_narrow(truth: str, meter: str) -> None:
    chance = np.random.default_rng(7)
    found = [covered(chance, short(TRUTHS[truth]), meter) for _ in range(RUNS)]
    assert sum(held for held, _ in found) >= RUNS - 2
    assert np.median([half for _, half in found]) < (0.25 if meter.startswith("moments") else 0.03)


@pytest.mark.parametrize("truth", ["period 1 s, in step", "period 1.003 s", "period 2 s"])
def test_moments_in_step_with_a_load_say_nothing_and_the_interval_says_so(truth: str) -> None:
    chance = np.random.default_rng(8)
    found = [covered(chance, short(TRUTHS[truth]), "moments every 1 s") for _ in range(RUNS)]
    assert all(held for held, _ in found)
    assert min(half for _, half in found) >= 0.5
    assert covered(chance, short(TRUTHS[truth]), "moments every 1 s, no rating") == (True, np.inf)
