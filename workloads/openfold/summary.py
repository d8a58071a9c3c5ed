"""Computes a data set's manifest attributes (lengths, alignment rows, templates) from a summary of each shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlhpc.suite.data.build import SPLITS, Arrays, check_disjoint


@dataclass(frozen=True)
class Summary:
    """One shard: chain lengths, cells of all alignments (rows x columns), template residues, family numbers."""

    lengths: tuple[int, ...]
    cells: int
    template_residues: int
    families: frozenset[int]


def summarise(arrays: Arrays) -> Summary:
    """Summarise the arrays of `shard_form.build_shard_arrays`."""
    return Summary(
        tuple(np.diff(arrays["residue.offsets"]).tolist()),
        len(arrays["alignment.residue"]),
        len(arrays.get("template.aatype", ())),
        frozenset(arrays["family"].tolist()),
    )


def compute_attributes(splits: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Return the `compute_measures` of splits that have no family in common. InputError if a family is in both."""
    families = {split: frozenset().union(*(each.families for each in splits[split])) for split in SPLITS}
    check_disjoint(families, "family", "its fold")
    return compute_measures(splits)


def compute_measures(splits: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Return for each split longest and mean length, mean alignment rows, whether there are templates."""
    result: dict[str, Any] = {}
    for split in SPLITS:
        lengths = [length for each in splits[split] for length in each.lengths]
        result |= {
            f"{split}_longest": max(lengths),
            f"{split}_mean_length": sum(lengths) / len(lengths),
            f"{split}_mean_rows": sum(each.cells for each in splits[split]) / sum(lengths),
            f"{split}_templates": any(each.template_residues for each in splits[split]),
        }
    return result
