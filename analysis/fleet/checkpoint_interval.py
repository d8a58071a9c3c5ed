"""How often a run should save a checkpoint: intervals of Young (1974) and Daly (2006), and what then is expected to count.

The expected ratio is that of Kokolis et al. (HPCA 2025, arXiv 2410.21680).
"""

from __future__ import annotations

import math

from scipy import stats


def young_s(save_s: float, mtbf_s: float) -> float:
    """Interval between checkpoints after Young: sqrt(2 w M). ``save_s`` is what one costs the training."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """After Daly, first order: sqrt(2 w M) - w; M if a checkpoint costs 2 M or more."""
    return young_s(save_s, mtbf_s) - save_s if save_s < 2.0 * mtbf_s else mtbf_s


def expected_ratio(save_s: float, restart_s: float, interval_s: float, mtbf_s: float) -> float:
    """Expected ETTR of a long job: (1 - (R + interval / 2) / M) / (1 + w / interval), at least 0."""
    return max(0.0, (1.0 - (restart_s + interval_s / 2) / mtbf_s) / (1.0 + save_s / interval_s))


def job_mtbf_h(nodes: int, failures_per_1000_node_days: float) -> float:
    """Hours between failures of a job, if nodes fail independently at that rate.

    An extrapolation: of jobs of 1,024 GPUs (128 nodes) on RSC-1 it says 28.8 h, and 7.9 h were measured.
    """
    return 24.0 / (nodes * failures_per_1000_node_days / 1000.0)


def learned_mtbf_s(wall_s: float, interruptions: int, confidence: float = 0.9) -> tuple[float, float, float]:
    """Mean time between interruptions and its interval, for independent ones at one rate; the mean is infinite without any."""
    tail = (1.0 - confidence) / 2
    low = 2.0 * wall_s / stats.chi2.ppf(1.0 - tail, 2 * interruptions + 2)
    high = 2.0 * wall_s / stats.chi2.ppf(tail, 2 * interruptions) if interruptions else math.inf
    return (wall_s / interruptions if interruptions else math.inf), float(low), float(high)
