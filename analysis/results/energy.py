"""The energy of results as columns of their table. A table in which no result has any keeps its columns as they were."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.results.selection import Selection

COLUMNS = (
    "energy_j",
    "energy_low_j",
    "energy_high_j",
    "energy_kind",
    "energy_valid",
    "energy_note",
    "watts_per_node",
    "energy_delay_js",
    "idle_share",
    "interconnect_estimated",
)


def with_energy(rows: pd.DataFrame, selections: Mapping[str, Selection]) -> pd.DataFrame:
    """The results with the columns `COLUMNS`, if any has energy. ``energy_kind``: what was measured, which may not be mixed."""
    found = {group: chosen.energy for group, chosen in selections.items() if chosen.energy is not None}
    known = [found.get(str(group)) for group in rows["group"]]
    if not any(each is not None and each.mean_j is not None for each in known):
        return rows
    cells: list[tuple[object, ...]] = []
    for each in known:
        if each is None:
            cells.append((None,) * len(COLUMNS))
            continue
        low, high = each.interval_j or (None, None)
        kind = f"{each.scope}, {each.current or 'AC or DC not stated'}" if each.scope else None
        numbers = (each.watts_per_node, each.delay_product_js, each.idle_share, each.estimated)
        cells.append((each.mean_j, low, high, kind, each.valid, each.reason, *numbers))
    return rows.assign(**{name: [row[place] for row in cells] for place, name in enumerate(COLUMNS)})
