"""What pairs of blocks say: equal is equal to the last bit, a difference needs an interval without zero, noise is inconclusive."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from mlhpc.plugins.tune.race import make_balanced_order
from mlhpc.plugins.tune.sides import LESS, LOSS, MORE, QUANTITIES, Row, find_visible_step_time, judge, render_rows
from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics import Outcome

SAME = dict.fromkeys(QUANTITIES, (3.0, 3.1, 2.9, 3.05))


def row(quantity: str, a: tuple[float, ...], b: tuple[float, ...]) -> Row:
    found = {
        each.quantity: each
        for each in judge(dict.fromkeys(QUANTITIES, a), {**dict.fromkeys(QUANTITIES, a), quantity: b})
    }
    assert all(
        each.verdict == Outcome.EQUIVALENT
        for name, each in found.items()
        if name != quantity and math.isfinite(each.a_mean)
    )
    return found[quantity]


TOLD = {
    "the same bits": ("step time", (1.0, 2.0, 3.0), (1.0, 2.0, 3.0), Outcome.EQUIVALENT),
    "the last bit of one pair": (LOSS, (1.0, 2.0, 3.0), (1.0, 2.0, math.nextafter(3.0, 4)), Outcome.INCONCLUSIVE),
    "exactly twice in every pair": ("executed FLOPs", (1.0, 2.0, 3.0), (2.0, 4.0, 6.0), MORE),
    "exactly half in every pair": ("bytes sent", (2.0, 4.0, 6.0), (1.0, 2.0, 3.0), LESS),
    "clearly slower": ("step time", (1.0, 1.01, 0.99, 1.0, 1.01), (1.5, 1.52, 1.49, 1.5, 1.51), Outcome.SLOWER),
    "a drift that both sides have": (
        "step time",
        (1.0, 2.0, 4.0, 8.0, 16.0),
        (1.11, 2.2, 4.4, 8.85, 17.6),
        Outcome.SLOWER,
    ),
    "slower in some pairs": ("step time", (1.0, 1.0, 1.0, 1.0), (1.5, 0.7, 1.4, 0.8), Outcome.INCONCLUSIVE),
    "slower, but two pairs with spread": ("step time", (1.0, 1.0), (1.2, 1.5), Outcome.INCONCLUSIVE),
    "nothing sent against something": ("bytes sent", (0.0, 0.0), (8.0, 8.0), MORE),
    "something sent against nothing": ("bytes sent", (8.0, 8.0), (0.0, 0.0), LESS),
    "nothing sent by either": ("bytes sent", (0.0, 0.0), (0.0, 0.0), Outcome.EQUIVALENT),
    "sent in one pair only": ("bytes sent", (0.0, 0.0), (8.0, 0.0), Outcome.INCONCLUSIVE),
    "a loss that is no number": (LOSS, (1.0, 2.0, 3.0), (1.0, math.nan, 3.0), Outcome.INCONCLUSIVE),
    "a loss that is infinite": (LOSS, (1.0, 2.0, 3.0), (1.0, math.inf, 3.0), Outcome.INCONCLUSIVE),
    "a negative loss, greater": (LOSS, (-2.0, -2.0, -2.0), (-1.0, -1.0, -1.0), MORE),
    "losses of both signs": (LOSS, (-1.0, 1.0, -1.0, 1.0), (1.0, -1.0, 1.0, -1.0), Outcome.INCONCLUSIVE),
    "rounding": (LOSS, (2.0, 2.1, 2.2, 2.3), (2.0 + 1e-9, 2.1 - 2e-9, 2.2 + 1e-9, 2.3 - 1e-9), Outcome.INCONCLUSIVE),
    "a loss of zero": (LOSS, (0.0, 0.0), (0.1, 0.1), MORE),
}


@pytest.mark.parametrize("case", TOLD)
def test_the_verdict_is_what_the_pairs_say(case: str) -> None:
    quantity, a, b, verdict = TOLD[case]
    found = row(quantity, a, b)
    assert found.verdict == verdict
    assert (found.low is None) == (found.difference is None)
    if found.low is not None and found.difference is not None and found.high is not None:
        assert found.low <= found.difference <= found.high
    assert len(render_rows([found])) == 2


def test_the_ratio_is_the_geometric_mean_of_the_pairs() -> None:
    found = row("step time", (1.0, 4.0), (2.0, 2.0))
    assert found.difference == pytest.approx(0.0)
    assert found.largest == 1.0
    assert row("executed FLOPs", (1.0, 2.0), (2.0, 4.0)).high == pytest.approx(1.0)


@pytest.mark.parametrize(("a", "b"), [((), ()), ((1.0,), (1.0,)), ((1.0, 2.0), (1.0, 2.0, 3.0))])
def test_too_few_or_uneven_blocks_are_refused(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="expected the same number of both, at least 2"):
        judge({**SAME, "step time": a}, {**SAME, "step time": b})


def test_twins_with_noise_are_called_different_in_one_comparison_of_twenty_at_most() -> None:
    """All quantities are noise here; an interval of any of them that excludes zero counts."""
    noise, wrong, trials = random.Random(1), 0, 300
    for _ in range(trials):
        sides = [{name: [noise.lognormvariate(0, 0.2) for _ in range(8)] for name in QUANTITIES} for _ in range(2)]
        wrong += any(each.verdict in (MORE, LESS, Outcome.SLOWER, Outcome.FASTER) for each in judge(*sides))
    assert wrong <= 0.05 * trials + 3 * math.sqrt(0.05 * 0.95 * trials)
    assert wrong > 0  # else the intervals are too wide to mean 95 %


def test_a_difference_of_one_spread_is_found_in_twenty_pairs_most_times() -> None:
    noise, found = random.Random(2), 0
    for _ in range(100):
        a = tuple(noise.lognormvariate(0, 0.1) for _ in range(20))
        b = tuple(noise.lognormvariate(0.15, 0.1) for _ in range(20))
        found += row("step time", a, b).verdict == Outcome.SLOWER
    assert found >= 80


@pytest.mark.parametrize("period", [2, 4, 8])
def test_a_disturbance_in_step_with_the_blocks_is_no_fault_of_a_side(period: int) -> None:
    noise, wrong = random.Random(3), 0
    for seed in range(100):
        times: dict[str, list[float]] = {"a": [], "b": []}
        place = noise.randrange(period)
        for block in range(1, 21):
            for side in make_balanced_order(block, ("a", "b"), seed):
                times[side].append(noise.lognormvariate(0.1 * (place % period == 0), 0.01))
                place += 1
        wrong += row("step time", tuple(times["a"]), tuple(times["b"])).verdict != Outcome.INCONCLUSIVE
    assert wrong <= 5


def test_what_pairs_could_show_they_show_in_eight_of_ten() -> None:
    noise = random.Random(4)
    pairs = [1.0] * 10, [noise.lognormvariate(0.0, 0.04) for _ in range(10)]
    visible = find_visible_step_time(*pairs)
    assert visible == pytest.approx(0.055, abs=0.015)
    spread = statistics.stdev(map(math.log, pairs[1]))
    shown = 0
    for _ in range(100):
        fresh = tuple(noise.lognormvariate(math.log1p(visible), spread) for _ in range(10))
        shown += row("step time", (1.0,) * 10, fresh).verdict == Outcome.SLOWER
    assert shown >= 70
