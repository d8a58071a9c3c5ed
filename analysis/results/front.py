"""The front of results: those that no other, of those that may be ranked beside them, beats in time and in one thing more."""

from __future__ import annotations

import pandas as pd

from analysis.results.names import tasks


def mark_front(frame: pd.DataFrame, against: str) -> pd.DataFrame:
    """Add the column ``front``: true if no result alike has both a shorter ``run_s.mean`` and less of the column ``against``."""
    front = pd.Series(False, index=frame.index)
    for *_, alike in tasks(frame):
        front.loc[alike.index] = [_unbeaten(row, alike, against) for _, row in alike.iterrows()]
    return frame.assign(front=front)


def _unbeaten(row: pd.Series, others: pd.DataFrame, against: str) -> bool:
    faster, less = others["run_s.mean"] < row["run_s.mean"], others[against] < row[against]
    return not bool((faster & less).any())
