"""The test of courses: how often healthy runs are accused, and what it sees, on runs that are drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from mlhpc.suite.statistics.courses import FEWEST_RUNS, RATE, Band, Deviation, build_band, judge_course

Course = dict[str, float]
NUMBERS = 24


def draw(chance: random.Random, of_set: float, share: float, tails: bool = False) -> Course:
    """A healthy run: neighbours of its course are alike, and a share of each variance is that of its data set."""
    found: Course = {}
    state = chance.gauss(0, 1)
    for number in range(NUMBERS):
        state = 0.8 * state + 0.6 * chance.gauss(0, 1)
        noise = chance.choice((0.5, 1.5)) * state if tails else state
        total = math.sqrt(share) * of_set + math.sqrt(1 - share) * noise
        found[f"loss {number}"] = math.exp(-0.1 * number + 0.05 * total)
    found["share"] = 0.0
    return found


def draw_band(chance: random.Random, sets: int, runs: int, share: float, tails: bool = False) -> Band:
    middle = [chance.gauss(0, 1) for _ in range(sets)]
    healthy = [draw(chance, middle[at % sets], share, tails) for at in range(runs)]
    band = build_band(healthy, [str(at % sets) for at in range(runs)])
    assert band is not None
    return band


def judge(band: Band, run: Course) -> Sequence[Deviation]:
    return judge_course(band, run)


@pytest.mark.parametrize(
    ("sets", "share", "tails"), [(25, 0.0, False), (5, 0.0, False), (5, 0.4, True), (5, 0.8, False)]
)
def test_healthy_runs_on_unseen_data_are_rarely_accused(sets: int, share: float, tails: bool) -> None:
    chance = random.Random(f"{sets} {share}")
    accused = 0
    for _ in range(20):
        band = draw_band(chance, sets, 25, share, tails)
        accused += sum(bool(judge(band, draw(chance, chance.gauss(0, 1), share, tails))) for _ in range(10))
    assert accused <= 200 * RATE + 4  # of 200 at the stated rate more than 6 in one of 200 tests


@pytest.mark.parametrize("seed", range(5))
def test_a_number_out_of_range_is_named_first(seed: int) -> None:
    chance = random.Random(seed)
    band = draw_band(chance, 5, 25, 0.3)
    run, place = draw(chance, 0.0, 0.3), f"loss {chance.randrange(NUMBERS)}"
    run[place] *= math.exp(0.05 * chance.choice((-12, 12)))
    found = judge(band, run)
    assert found[0].p < RATE
    named = {each.name: each for each in found if not each.before}
    assert set(named) == {place}
    assert f"{place}: " in named[place].render()
    assert "25 healthy runs" in named[place].render()


@pytest.mark.parametrize("seed", range(5))
def test_a_number_in_range_is_unlike_those_before_it(seed: int) -> None:
    """Each number alone is usual, but the last one does not follow from its neighbour."""
    chance = random.Random(seed)
    runs = []
    for _ in range(40):
        level = chance.gauss(0, 1)
        runs.append({"a": math.exp(level), "b": math.exp(level + 0.02 * chance.gauss(0, 1))})
    band = build_band(runs[:-1], [str(at) for at in range(39)])
    assert band is not None
    found = judge(band, {"a": math.exp(1.1), "b": math.exp(-1.1)})
    assert [each.before for each in found] == [True]
    assert "not after such numbers before it" in found[0].render()


def test_a_share_that_was_zero_may_be_small_and_not_one() -> None:
    chance = random.Random(1)
    band = draw_band(chance, 5, 25, 0.2)
    run = draw(chance, 0.0, 0.2)
    assert not judge(band, run | {"share": 0.003})
    assert {each.name for each in judge(band, run | {"share": 1.0})} == {"share"}


@pytest.mark.parametrize("seed", range(5))
def test_a_share_of_few_weights_may_be_none(seed: int) -> None:
    """Of 277,433 weights a few are held by bfloat16 in each healthy run by chance, so in some run none is."""
    chance = random.Random(seed)
    runs = [draw(chance, 0.0, 0.0) | {"share": chance.randint(1, 9) / 277_433} for _ in range(25)]
    band = build_band(runs, [str(at % 5) for at in range(25)], {"share"})
    assert band is not None
    assert not judge(band, runs[0] | {"share": 0.0})
    assert {each.name for each in judge(band, runs[0] | {"share": 1.0})} == {"share"}
    above = build_band([run | {"share": 0.02} for run in runs], [str(at % 5) for at in range(25)], {"share"})
    assert above is not None
    assert {each.name for each in judge(above, runs[0] | {"share": 0.04})} == {"share"}


def test_a_run_may_lack_numbers_and_have_others() -> None:
    chance = random.Random(2)
    band = draw_band(chance, 5, 25, 0.2)
    run = draw(chance, 0.0, 0.2)
    part = {name: value for name, value in run.items() if name != "loss 3" and not name.endswith(("8", "9"))}
    assert not judge(band, part | {"another": 5.0})
    assert {each.name for each in judge(band, part | {"loss 0": 9.0})} >= {"loss 0"}
    assert not judge(band, {})
    assert {each.name for each in judge(band, run | {"loss 5": -1.0, "loss 6": 0.0})} >= {"loss 5", "loss 6"}


def test_too_few_runs_or_data_sets_make_no_band() -> None:
    chance = random.Random(3)
    runs = [draw(chance, 0.0, 0.0) for _ in range(FEWEST_RUNS)]
    assert build_band(runs[:-1], [str(at) for at in range(FEWEST_RUNS - 1)]) is None
    assert build_band(runs, ["a", "b"] * (FEWEST_RUNS // 2)) is None
    assert build_band(runs, [str(at) for at in range(FEWEST_RUNS)]) is not None
    same = build_band([runs[0]] * FEWEST_RUNS, [str(at) for at in range(FEWEST_RUNS)])
    assert same is not None
    assert not judge(same, runs[0])
