"""Computes how often a run should save a checkpoint: the intervals of Young (1974) and Daly (2006).

The expected share of time that counts is that of Kokolis et al. (HPCA 2025, arXiv 2410.21680).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.suite.files import render_duration, render_duration_range
from mlhpc.suite.log.goodput import Goodput


def compute_young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Compute Young's interval: sqrt(2 w M). ``save_s`` is how long one checkpoint stalls the training."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def compute_daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Compute Daly's interval, first order: sqrt(2 w M) - w; M if a checkpoint costs 2 M or more."""
    return compute_young_interval_s(save_s, mtbf_s) - save_s if save_s < 2.0 * mtbf_s else mtbf_s


def compute_expected_ettr(save_s: float, restart_s: float, interval_s: float, mtbf_s: float) -> float:
    """Compute the expected ETTR of a long job: (1 - (R + interval / 2) / M) / (1 + w / interval), at least 0."""
    return max(0.0, (1.0 - (restart_s + interval_s / 2) / mtbf_s) / (1.0 + save_s / interval_s))


def estimate_mtbf_s(up_s: float, interruptions: int, confidence: float = 0.9) -> tuple[float, float, float]:
    """Estimate the mean time between interruptions, with its interval. Without interruptions the mean is infinite.

    The interval holds for independent interruptions at a constant rate.
    """
    try:
        from scipy import stats
    except ImportError:
        raise InputError(
            f"the time between failures cannot be estimated: {explain_not_installed('scipy')}; or state it with --mtbf-h"
        ) from None
    tail = (1.0 - confidence) / 2
    low = 2.0 * up_s / stats.chi2.ppf(1.0 - tail, 2 * interruptions + 2)
    high = 2.0 * up_s / stats.chi2.ppf(tail, 2 * interruptions) if interruptions else math.inf
    return (up_s / interruptions if interruptions else math.inf), float(low), float(high)


def compute_advice(trials: Sequence[Goodput], mtbf_s: float | None) -> dict[str, Any]:
    """Compute the checkpoint interval from measured costs and the failure rate, and state its basis.

    ``mtbf_s``: mean time between failures; None: estimate it from the interruptions of the trials.
    """
    interruptions = sum(trial.interruptions for trial in trials)
    up_s = math.fsum(trial.up_s for trial in trials)  # nothing fails while no attempt runs
    advice: dict[str, Any] = {"interruptions": interruptions, "mtbf_s": mtbf_s, "mtbf_interval_s": None}
    if mtbf_s is None and interruptions and up_s > 0.0:
        learned = estimate_mtbf_s(up_s, interruptions)
        advice |= {"mtbf_s": learned[0], "mtbf_interval_s": learned[1:]}
    costs = [(trial.stall_s, trial.write_s or 0.0, trial.saves) for trial in trials if trial.stall_s is not None]
    saves = sum(count for _, _, count in costs)
    save_s = math.fsum(stall * count for stall, _, count in costs) / max(1, saves)
    write_s = math.fsum(write * count for _, write, count in costs) / max(1, saves)
    advice["saves"] = saves
    if advice["mtbf_s"] is None or save_s == write_s == 0.0:
        return advice
    restarts = [trial.restarting_s / len(trial.each) for trial in trials if trial.each]
    starts = restarts or [trial.starting_s for trial in trials]
    restart_s = math.fsum(starts) / len(starts)
    # No checkpoint can begin while the one before is being written.
    interval_s = max(compute_daly_interval_s(save_s, advice["mtbf_s"]), save_s, write_s)
    return advice | {
        "save_s": save_s,
        "restart_s": restart_s,
        "young_s": compute_young_interval_s(save_s, advice["mtbf_s"]),
        "daly_s": compute_daly_interval_s(save_s, advice["mtbf_s"]),
        "interval_s": interval_s,
        "expected_ratio": compute_expected_ettr(save_s, restart_s, interval_s, advice["mtbf_s"]),
    }


def render_advice(advice: dict[str, Any]) -> str:
    """Write the advice as a sentence, or what is missing for one."""
    if advice["mtbf_s"] is None:
        return "no interruptions seen; for a checkpoint interval give --mtbf-h"
    if "interval_s" not in advice:
        why = "those saved cost no time" if advice["saves"] else "none was saved, so its cost is not known"
        return f"no advice on checkpoints: {why}"
    basis = "as stated"
    if advice["mtbf_interval_s"] is not None:
        low, high = advice["mtbf_interval_s"]
        basis = f"from {advice['interruptions']} seen, 90 % {render_duration_range(low, high)}"
    return (
        f"checkpoint.interval_s={advice['interval_s']:.3g} (Daly; Young {advice['young_s']:.3g}) for a failure every "
        f"{render_duration(advice['mtbf_s'])} ({basis}), a checkpoint that stalls {render_duration(advice['save_s'])} and a "
        "restart of "
        f"{render_duration(advice['restart_s'])}; then {advice['expected_ratio']:.1%} would count (modelled)"
    )
