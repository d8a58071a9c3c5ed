"""Says which results may be ranked against each other: same division, same data, and times that include the same.

Rounds of MLPerf HPC differ in both data and times (hpc_training_rules.adoc of each round).
"""

from __future__ import annotations

from collections.abc import Mapping

OLD, MIDDLE, NEW = "v0.7", "v1.0 and v2.0", "v3.0"
ROUND_GROUPS: Mapping[str, str] = {  # round or ruleset: the rounds whose times mean the same
    **{"v0.7": OLD, "v1.0": MIDDLE, "v2.0": MIDDLE, "v3.0": NEW},
    **{"0.7.0": OLD, "1.0.0": MIDDLE, "2.0.0": MIDDLE, "3.0.0": NEW, "mlhpc-1.0": NEW},
}
GROUP_MEANINGS: Mapping[str, str] = {
    OLD: "the first data sets; staging counts",
    MIDDLE: "staging counts",
    NEW: "staging before run_start does not count",
}


def find_round_group(round_: str | None) -> str:
    """Return the rounds whose times mean the same as this round's or ruleset's. An unknown one is returned as it is."""
    return ROUND_GROUPS.get(round_ or "", round_ or "no round")


def list_differences(
    round_a: str | None, round_b: str | None, division_a: str | None, division_b: str | None
) -> list[str]:
    """List the reasons, a clause each, why two results are not ranked against each other. Empty if they may be."""
    reasons = []
    first, second = find_round_group(round_a), find_round_group(round_b)
    if first != second:
        meanings = [f"{name} ({GROUP_MEANINGS[name]})" if name in GROUP_MEANINGS else name for name in (first, second)]
        reasons.append(f"unlike rules: {meanings[0]} and {meanings[1]}")
    if division_a != division_b:
        reasons.append(f"unlike divisions: {division_a or 'none'} and {division_b or 'none'}")
    return reasons
