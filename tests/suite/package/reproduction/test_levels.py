"""The arithmetic of verdicts: losses, epochs, paired times, with their error rates."""

import math
import random
import re
from pathlib import Path

import pytest

from mlhpc.suite.package.reproduction.judge import (
    LOSS_GROWTH,
    Difference,
    LevelOutcome,
    compute_equivalence,
    compute_expected_mean,
    judge_epochs,
    judge_evaluations,
    judge_losses,
    judge_times,
)
from mlhpc.suite.statistics import Outcome

CAUSE = Difference(kind="torch", what="torch", was="2.13.0", now="2.13.1")
TABLE = Path(__file__).resolve().parents[4] / "benchmarks" / "results" / "2026-11-23-first_losses.txt"
ROWS = [line for line in TABLE.read_text().splitlines() if re.match(r"\w+ +(float32|bfloat16) +(min|max) ", line)]
LOSSES = [2.0 / (step + 1) for step in range(20)]


def test_equal_losses_are_equal_bit_for_bit() -> None:
    found = judge_losses(LOSSES, LOSSES, "float32", CAUSE)
    assert (found.verdict, found.cause) == (LevelOutcome.REPRODUCED, None)
    assert "bit for bit" in found.reason
    assert found.compared["equal_bits"] == 20


@pytest.mark.parametrize(
    ("factor", "precision", "verdict"),
    [
        (1 + 1e-6, "float32", LevelOutcome.REPRODUCED),
        (1 + 1e-4, "float32", LevelOutcome.REPRODUCED),
        (1 + 1e-3, "float32", LevelOutcome.NOT_REPRODUCED),
        (1 + 1e-1, "bfloat16", LevelOutcome.REPRODUCED),
        (2.5, "bfloat16", LevelOutcome.NOT_REPRODUCED),
        (1 + 1e-1, "tf32", LevelOutcome.REPRODUCED),
        (-1.0, "float32", LevelOutcome.NOT_REPRODUCED),
        (1 + 2e-3, "None", LevelOutcome.NOT_REPRODUCED),
    ],
)
def test_losses_that_differ_are_held_against_the_bound_of_the_precision(
    factor: float, precision: str, verdict: LevelOutcome
) -> None:
    now = [*LOSSES[:7], *(loss * factor for loss in LOSSES[7:])]
    found = judge_losses(LOSSES, now, precision, CAUSE)
    assert found.verdict == verdict
    assert "from step 7 on" in found.reason
    assert found.compared["equal_bits"] == 7
    assert found.cause == CAUSE


# The steps that benchmarks/first_losses.py shows, of those up to each the largest difference
SHOWN = (0, 1, 2, 4, 9, 19)


@pytest.mark.parametrize("line", ROWS, ids=lambda line: " ".join(line.split()[:7]))
def test_the_bounds_admit_every_measured_rounding_and_refuse_changes(line: str) -> None:
    """Each row of the dated table: three times what rounding did is within the bounds, a change is beyond one of them."""
    words = line.split()
    _, precision, pick, *name = words[: -len(SHOWN)]
    gaps = [float(word) for word in words[-len(SHOWN) :]]
    bounds = [LOSS_GROWTH[precision].bound(step) for step in SHOWN]
    if pick == "max":
        assert all(3 * gap <= bound for gap, bound in zip(gaps, bounds, strict=True)), bounds
    elif " ".join(name) == "another seed" or precision == "float32":
        assert any(gap > bound for gap, bound in zip(gaps, bounds, strict=True)), bounds


@pytest.mark.parametrize(
    ("losses_apart", "evaluations_apart", "precision", "verdict"),
    [
        (0.0, 0.0, "float32", LevelOutcome.REPRODUCED),
        (0.0, 7e-10, "float32", LevelOutcome.REPRODUCED),  # two threads
        (1e-6, 7e-10, "float32", LevelOutcome.REPRODUCED),
        (0.0, 2e-3, "float32", LevelOutcome.NOT_REPRODUCED),  # other settings
        (1e-6, 2e-3, "float32", LevelOutcome.NOT_REPRODUCED),
        (1e-3, 2e-3, "float32", LevelOutcome.REPRODUCED),  # the losses show that rounding took the run as far
        (0.0, 2e-3, "bfloat16", LevelOutcome.REPRODUCED),
        (0.0, 2e-2, "bfloat16", LevelOutcome.NOT_REPRODUCED),
        (0.0, 2e-3, "None", LevelOutcome.NOT_REPRODUCED),
    ],
)
def test_evaluations_are_held_against_a_bound_that_grows_with_the_losses(
    losses_apart: float, evaluations_apart: float, precision: str, verdict: LevelOutcome
) -> None:
    now = [*LOSSES[:-1], LOSSES[-1] * (1 + losses_apart)]
    losses = judge_losses(LOSSES, now, precision, CAUSE)
    found = judge_evaluations(losses, [0.5, 0.4], [0.5 * (1 + evaluations_apart), 0.4], precision, CAUSE)
    assert found.verdict == verdict, found.reason
    assert found.compared["evaluations"] == 2
    assert (found.cause is None) == (losses_apart == evaluations_apart == 0.0)


def test_a_later_evaluation_may_differ_more_and_only_those_of_both_runs_are_compared() -> None:
    losses = judge_losses(LOSSES, LOSSES, "float32", CAUSE)
    was = [0.5, 0.4, 0.3]
    assert judge_evaluations(losses, was, [0.5, 0.4, 0.3 * (1 + 5e-4)], "float32", CAUSE).verdict == "reproduced"
    assert judge_evaluations(losses, was, [0.5 * (1 + 5e-4), 0.4, 0.3], "float32", CAUSE).verdict == "not reproduced"
    assert judge_evaluations(losses, was, [0.5], "float32", CAUSE).compared["evaluations"] == 1
    assert judge_evaluations(losses, was, [], "float32", CAUSE) is losses


def test_a_bound_grows_to_its_most() -> None:
    growth = LOSS_GROWTH["float32"]
    bounds = [growth.bound(step) for step in range(20)]
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (4e-6, 0.1)


def test_logs_without_losses_are_not_compared() -> None:
    assert judge_losses([], LOSSES, "float32", None).verdict == LevelOutcome.CANNOT
    assert judge_losses(LOSSES, [], "float32", None).verdict == LevelOutcome.INCONCLUSIVE
    assert judge_losses(LOSSES, LOSSES[:10], "float32", None).verdict == LevelOutcome.NOT_REPRODUCED
    assert judge_losses([0.0], [0.0], "float32", None).verdict == LevelOutcome.REPRODUCED


def test_equal_seeds_with_equal_epochs_are_reproduced_whatever_the_reference() -> None:
    found = judge_epochs({1: 9.0, 2: None}, {1: 9.0}, (4.0, 4.0, 4.0), 1.0, "epochs", CAUSE)
    assert (found.verdict, found.cause) == (LevelOutcome.REPRODUCED, None)
    both = judge_epochs({2: None}, {2: None}, (4.0, 4.0), 1.0, "epochs", CAUSE)
    assert both.verdict == LevelOutcome.REPRODUCED


@pytest.mark.parametrize(
    ("now", "reference", "verdict"),
    [
        ({8: 5.0}, (4.0, 4.0, 4.0, 4.0, 4.0), LevelOutcome.REPRODUCED),  # an evaluation later
        ({8: 9.0}, (4.0, 4.0, 4.0, 4.0, 4.0), LevelOutcome.NOT_REPRODUCED),
        ({8: 1.0}, (4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0), LevelOutcome.NOT_REPRODUCED),
        ({8: 6.0, 9: 7.0}, (4.0, 8.0, 6.0, 7.0, 5.0), LevelOutcome.REPRODUCED),
        ({1: None}, (4.0, 4.0), LevelOutcome.NOT_REPRODUCED),
        ({8: 5.0}, (), LevelOutcome.INCONCLUSIVE),  # one run of the package is no basis
    ],
)
def test_other_epochs_are_held_against_the_reference_points(
    now: dict[int, float | None], reference: tuple[float, ...], verdict: LevelOutcome
) -> None:
    found = judge_epochs({1: 4.0}, now, reference, 1.0, "epochs", CAUSE)
    assert found.verdict == verdict
    assert (found.cause == CAUSE) is True


def test_the_interval_of_epochs_holds_its_error_rate() -> None:
    """One in a hundred sound means may lie outside; of 4,000 drawn 40, and 3 standard deviations more are 59."""
    draw = random.Random(3)
    outside = 0
    for _ in range(4000):
        low, high = compute_expected_mean([draw.gauss(20, 3) for _ in range(8)], 2, 0.0)
        outside += not low <= (draw.gauss(20, 3) + draw.gauss(20, 3)) / 2 <= high
    assert 21 <= outside <= 59


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [
        (1.0, 0.01, LevelOutcome.REPRODUCED),
        (1.3, 0.01, LevelOutcome.NOT_REPRODUCED),
        (0.7, 0.01, LevelOutcome.NOT_REPRODUCED),
        (1.0, 0.3, LevelOutcome.INCONCLUSIVE),
        (1.05, 0.02, LevelOutcome.INCONCLUSIVE),
    ],
)
def test_times_are_equivalent_apart_or_undecided(ratio: float, spread: float, verdict: LevelOutcome) -> None:
    draw = random.Random(1)
    a = [10 * math.exp(draw.gauss(0, 0.5)) for _ in range(6)]
    b = [time * ratio * math.exp(draw.gauss(0, spread)) for time in a]
    found = judge_times(a, b, 0.05, CAUSE)
    assert found.verdict == verdict, found.reason
    assert "n=6 pairs" in found.reason
    assert (found.cause is None) == (verdict == LevelOutcome.REPRODUCED)


def test_times_as_far_apart_as_the_margin_are_called_equivalent_one_time_in_twenty() -> None:
    """At the edge of the margin the test's error is alpha: 100 of 2,000, and 3 standard deviations more are 130."""
    draw = random.Random(5)
    wrong = sum(
        compute_equivalence([1.0] * 5, [1.05 * math.exp(draw.gauss(0, 0.01)) for _ in range(5)], 0.05).outcome
        == Outcome.EQUIVALENT
        for _ in range(2000)
    )
    assert 60 <= wrong <= 130


def test_one_pair_decides_nothing() -> None:
    assert judge_times([1.0], [2.0], 0.05, CAUSE).verdict == LevelOutcome.INCONCLUSIVE
    assert compute_equivalence([1.0, 1.0], [1.0, 1.0], 0.05).outcome == Outcome.EQUIVALENT
