"""In what the size of a machine is counted where results of several sizes are compared: the first count that varies."""

from __future__ import annotations

import pandas as pd

COUNTS = (("units", "compute units"), ("nodes", "nodes"), ("cores", "cores"), ("ranks", "ranks"))


def extent(rows: pd.DataFrame) -> tuple[pd.Series, str]:
    """The size of each result's machine, and what it counts: compute units, nodes, cores or ranks.

    On one processor, where units and nodes are 1, it counts cores (ranks x threads). Ranks only where cores are not known: more
    ranks on the same cores are no larger machine. Nothing varies: compute units.
    """
    for column, name in COUNTS:
        values = pd.to_numeric(rows[column])
        if values.notna().all() and values.nunique() > 1:
            return values, name
        if column == "cores" and values.notna().all():
            break
    return pd.to_numeric(rows["units"]), "compute units"
