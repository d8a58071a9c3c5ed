"""Finds results that were published again: the same runs under a later round.

They are one measurement and are shown once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

CLASS_COLUMNS = ["benchmark", "size", "mode", "division"]


def find_copies(results: pd.DataFrame, runs: pd.DataFrame) -> pd.Series:
    """Find for each result the group of the earlier result that it repeats, with all runs and the score.

    None: the result is no copy. Runs are the same if they started at the same time and took as long. Hashes are not
    compared, because they differ where names were edited. Two results of one round are never copies: each was submitted
    as a result.
    """
    signatures = {str(name): _signature(group) for name, group in runs[~runs["pruned"]].groupby("group", sort=True)}
    earlier: dict[tuple[object, ...], list[Mapping[str, object]]] = {}
    found: dict[object, str] = {}
    # In the order of rounds, so that the first of equal results is the original
    for index, row in results.sort_values(["round", "group"]).iterrows():
        signature = signatures.get(row["group"])
        if signature is None:
            continue
        key = (*(row[name] for name in CLASS_COLUMNS), signature, _round_score(row["score_s"]))
        originals = [known for known in earlier.setdefault(key, []) if known["round"] != row["round"]]
        if originals:  # where several results of a round have the same runs, that of the same system
            found[index] = str(max(originals, key=lambda known: known["system"] == row["system"])["group"])
        else:
            earlier[key].append(row.to_dict())
    return pd.Series(found, index=results.index, dtype=object)


def list_rounds(results: pd.DataFrame) -> pd.Series:
    """Join the rounds of each result and of its copies, as "v1.0 = v2.0 = v3.0"."""
    copies = results.groupby("same_as")["round"].apply(list).to_dict() if results["same_as"].notna().any() else {}
    rounds = [dict.fromkeys([row["round"], *copies.get(row["group"], [])]) for row in results.to_dict("records")]
    return pd.Series([" = ".join(map(str, each)) for each in rounds], index=results.index, dtype=object)


def _signature(runs: pd.DataFrame) -> tuple[tuple[float, float], ...] | None:
    """Return start (ms) and length (s) of every run. None: a run has no start, by which it could be recognised."""
    starts = pd.to_numeric(runs["run_start_ms"])
    if starts.isna().any():
        return None
    # A run without run_stop has no length. NaN differs from itself, so with NaN no copy would be found
    lengths = pd.to_numeric(runs["run_s"]).fillna(-1.0)
    return tuple(sorted(zip(starts.astype(float), lengths.astype(float), strict=True)))


def _round_score(score_s: object) -> float | None:
    value = pd.to_numeric(score_s) if score_s is not None else math.nan
    # The mean of the same times may differ in the last digits, by the order in which they are added
    return None if value != value else float(f"{value:.9g}")
