"""Judges the levels 2 to 4 from losses, epochs and times: pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlhpc.suite.package.reproduction.document import Difference, LevelOutcome, LevelVerdict, make_level_verdict
from mlhpc.suite.statistics import Outcome, student_t
from mlhpc.suite.statistics.comparison import ALPHA, compute_equivalence

NUMERICS, CONVERGENCE, TIME = 2, 3, 4
CONFIDENCE = 0.99  # of the interval of epochs: one in a hundred good reproductions with other seeds lies outside


@dataclass(frozen=True)
class RoundingGrowth:
    """The largest relative difference that rounding makes: at step 0, its factor per step, and its maximum."""

    first: float
    factor: float
    most: float

    def bound(self, step: int) -> float:
        """Return the largest relative difference of the losses of a step, counted from 0."""
        return min(self.most, self.first * self.factor**step)


# Each lies three times or more above every difference that was measured under other roundings
# (benchmarks/first_losses.py). TF32 was not measured, it needs a GPU: three bits more than bfloat16, and the same
# growth.
LOSS_GROWTH = {
    "float32": RoundingGrowth(4e-6, 2.1, 0.1),
    "tf32": RoundingGrowth(6e-5, 5.0, 0.5),
    "bfloat16": RoundingGrowth(5e-4, 5.0, 0.5),
}

# Of the metric, per evaluation. The losses show how far rounding took a run by its 20th step: that times
# `LATER_FACTOR`, or this if it is more, is what rounding may do to the first evaluation.
METRIC_GROWTH = {
    "float32": RoundingGrowth(1e-5, 10.0, 0.5),
    "tf32": RoundingGrowth(2e-4, 10.0, 0.5),
    "bfloat16": RoundingGrowth(1e-2, 10.0, 0.5),
}
LATER_FACTOR = 30.0


def judge_losses(was: Sequence[float], now: Sequence[float], precision: str, cause: Difference | None) -> LevelVerdict:
    """Judge level 2: compare the first steps' losses, bit for bit and within the bound of rounding.

    The reason names the step whose difference is largest relative to its bound.
    """
    if not was:
        why = "the package's log has no first_losses; its suite did not log the losses of single steps"
        return make_level_verdict(NUMERICS, LevelOutcome.CANNOT, why)
    if not now:
        return make_level_verdict(NUMERICS, LevelOutcome.INCONCLUSIVE, "the log of the new run has no first_losses")
    if len(was) != len(now):
        why = f"{len(was)} first losses are logged in the package, {len(now)} in the new run"
        return make_level_verdict(NUMERICS, LevelOutcome.NOT_REPRODUCED, why, cause, {"steps": min(len(was), len(now))})
    compared: dict[str, object]
    equal = sum(a == b for a, b in zip(was, now, strict=True))
    apart = compute_relative_differences(was, now)
    growth = LOSS_GROWTH.get(precision, LOSS_GROWTH["float32"])  # an unknown precision gets the strictest bound
    step = max(range(len(apart)), key=lambda step: apart[step] / growth.bound(step))
    worst, bound = max(apart), growth.bound(step)
    compared = {"steps": len(was), "equal_bits": equal, "largest_relative_difference": worst}
    compared |= {"step": step, "relative_difference": apart[step], "bound": bound}
    first = next((step for step, gap in enumerate(apart) if gap), None)
    if first is None:
        return make_level_verdict(
            NUMERICS, LevelOutcome.REPRODUCED, f"the first {len(was)} losses are equal bit for bit", compared=compared
        )
    where = f"from step {first} on, by at most {worst:.2g} of the loss"
    text = f"the first {len(was)} losses differ {where}; at step {step} by {apart[step]:.2g}"
    return _judge_difference(text, apart[step], bound, precision, cause, compared)


def judge_evaluations(
    losses: LevelVerdict,
    was: Sequence[float],
    now: Sequence[float],
    precision: str,
    cause: Difference | None,
) -> LevelVerdict:
    """Judge level 2 further, after the losses agreed: compare the evaluations that both runs made.

    The bound of an evaluation grows with its number and with the differences of the first losses.
    """
    count = min(len(was), len(now))
    if losses.verdict != LevelOutcome.REPRODUCED or not count:
        return losses
    apart = compute_relative_differences(was[:count], now[:count])
    growth = METRIC_GROWTH.get(precision, METRIC_GROWTH["float32"])
    first = max(growth.first, LATER_FACTOR * float(losses.compared["largest_relative_difference"]))
    grown = RoundingGrowth(first, growth.factor, growth.most)
    place = max(range(count), key=lambda number: apart[number] / grown.bound(number))
    bound = grown.bound(place)
    compared = losses.compared | {
        "evaluations": count,
        "evaluation": place + 1,
        "evaluation_difference": apart[place],
        "evaluation_bound": bound,
    }
    if not any(apart):
        why = f"{losses.reason}; {count} evaluations are equal"
        return make_level_verdict(NUMERICS, LevelOutcome.REPRODUCED, why, losses.cause, compared)
    text = f"{losses.reason}; evaluation {place + 1} of {count} differs by {apart[place]:.2g}"
    return _judge_difference(text, apart[place], bound, precision, cause, compared)


def _judge_difference(
    text: str, apart: float, bound: float, precision: str, cause: Difference | None, compared: Mapping[str, object]
) -> LevelVerdict:
    """Judge level 2 by one difference, which ``text`` says, and what rounding may do."""
    outcome, side = LevelOutcome.NOT_REPRODUCED, "more than"
    if apart <= bound:  # never of NaN
        outcome, side = LevelOutcome.REPRODUCED, "within"
    why = f"{text}: {side} {bound:.2g}, what rounding in {precision} may do by then"
    return make_level_verdict(NUMERICS, outcome, why, cause, compared)


def compute_relative_differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Compute the difference of each pair of losses, relative to the larger one."""
    # Two zeros or two equal infinities would give NaN.
    return [abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0 for x, y in zip(a, b, strict=True)]


def judge_epochs(
    was: Mapping[int, float | None],
    now: Mapping[int, float | None],
    reference: Sequence[float],
    between_evals: float,
    unit: str,
    cause: Difference | None,
) -> LevelVerdict:
    """Judge level 3: compare epochs to the target by seed. None: the run missed the target.

    Equal epochs with equal seeds are reproduced. Otherwise the mean must lie in the prediction interval for the mean of
    the new runs. The interval comes from the reference points (``reference``), else from the package's own runs.
    """
    # A seed that missed the target in the package too is no failure here.
    failed = sorted(seed for seed, epochs in now.items() if epochs is None and was.get(seed, 0.0) is not None)
    reached = [epochs for epochs in now.values() if epochs is not None]
    compared: dict[str, object] = {"seeds": sorted(now), "epochs": [now[seed] for seed in sorted(now)], "unit": unit}
    if failed:
        why = f"the run with seed {failed[0]} did not reach the target; that of the package did"
        return make_level_verdict(CONVERGENCE, LevelOutcome.NOT_REPRODUCED, why, cause, compared)
    if all(seed in was and was[seed] == now[seed] for seed in now):
        same = f"{_render_amounts(reached, unit)} to the target, as in the package with the same seed{'s' * (len(now) > 1)}"
        why = same if reached else "the target is not reached, as in the package with the same seeds"
        return make_level_verdict(CONVERGENCE, LevelOutcome.REPRODUCED, why, compared=compared)
    return _judge_mean(reached, was, reference, between_evals, unit, cause, compared)


def _judge_mean(
    reached: Sequence[float],
    was: Mapping[int, float | None],
    reference: Sequence[float],
    between_evals: float,
    unit: str,
    cause: Difference | None,
    compared: dict[str, object],
) -> LevelVerdict:
    """Judge the mean of new runs by its prediction interval."""
    own = [epochs for epochs in was.values() if epochs is not None]
    basis, source = (reference, "reference points") if len(reference) > 1 else (own, "runs of the package")
    if len(basis) < 2 or not reached:
        why = f"{_render_amounts(reached, unit)} to the target; there are no reference points and too few runs to compare with"
        return make_level_verdict(CONVERGENCE, LevelOutcome.INCONCLUSIVE, why, cause, compared)
    low, high = compute_expected_mean(basis, len(reached), between_evals)
    mean = statistics.fmean(reached)
    compared |= {"mean": mean, "interval": [low, high], "confidence": CONFIDENCE, "basis": source, "n": len(basis)}
    outcome, place = LevelOutcome.NOT_REPRODUCED, "outside"
    if low <= mean <= high:
        outcome, place = LevelOutcome.REPRODUCED, "inside"
    interval = f"the {CONFIDENCE:.0%} interval {low:.4g} to {high:.4g} of {len(basis)} {source}"
    why = f"{mean:.4g} {unit} to the target (n={len(reached)}), {place} {interval}"
    return make_level_verdict(CONVERGENCE, outcome, why, cause, compared)


def compute_expected_mean(basis: Sequence[float], new: int, between_evals: float) -> tuple[float, float]:
    """Compute the prediction interval of the mean of ``new`` runs from two or more known ones.

    A run notices the target only at an evaluation: the deviation is at least that of this rounding.
    """
    spread = max(statistics.stdev(basis), between_evals / math.sqrt(12.0))
    half = (
        student_t.compute_quantile(0.5 + CONFIDENCE / 2, len(basis) - 1)
        * spread
        * math.sqrt(1.0 / len(basis) + 1.0 / new)
    )
    # A run notices its target only at an evaluation: one evaluation earlier or later is no difference.
    half = max(half, between_evals)
    middle = statistics.fmean(basis)
    return middle - half, middle + half


def judge_times(a_s: Sequence[float], b_s: Sequence[float], margin: float, cause: Difference | None) -> LevelVerdict:
    """Judge level 4: paired times of the original (A) and the changed configuration (B) on one machine."""
    if len(a_s) < 2:
        why = f"{len(a_s)} pair of runs reached the target; at least two are needed"
        return make_level_verdict(
            TIME, LevelOutcome.INCONCLUSIVE, why, cause, {"original_s": list(a_s), "changed_s": list(b_s)}
        )
    # Two one-sided tests (TOST) at ALPHA: the 90 % interval must lie within the margin.
    found = compute_equivalence(a_s, b_s, margin)
    compared = {
        **{"pairs": found.pairs, "ratio": found.ratio, "interval": [found.low, found.high], "margin": margin},
        **{"alpha": ALPHA, "original_s": list(a_s), "changed_s": list(b_s)},
    }
    text = (
        f"changed over original {found.ratio:.3f}, 90 % interval {found.low:.3f} to {found.high:.3f} "
        f"(n={found.pairs} pairs on this machine)"
    )
    if found.outcome == Outcome.EQUIVALENT:
        return make_level_verdict(
            TIME, LevelOutcome.REPRODUCED, f"{text}: equivalent within {margin:.0%}", compared=compared
        )
    if found.outcome in (Outcome.SLOWER, Outcome.FASTER):
        return make_level_verdict(
            TIME, LevelOutcome.NOT_REPRODUCED, f"{text}: {found.outcome} by more than {margin:.0%}", cause, compared
        )
    return make_level_verdict(
        TIME,
        LevelOutcome.INCONCLUSIVE,
        f"{text}: neither equivalent within {margin:.0%} nor different; more --pairs decide",
        cause,
        compared,
    )


def _render_amounts(values: Sequence[float], unit: str) -> str:
    return f"{', '.join(f'{value:,.6g}' for value in values)} {unit}"
