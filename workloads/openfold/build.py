"""What an OpenFold data set's manifest must say: lengths, rows, templates, and that no split shares a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from suite.data.build import SPLITS, Arrays, DataSetPlan, Piece, build
from suite.world import World


def build_proteins(
    root: Path, recipe: dict[str, Any], pieces: Sequence[Piece], *, size: str, seed: int, world: World
) -> None:
    """Write a data set whose pieces give the arrays of `shard_form.shard_arrays`.

    ValueError on every rank if the folder holds other data, a shard cannot be made, or a family is in both splits.
    """
    build(root, DataSetPlan("openfold", size, seed, recipe, pieces, _summarise, _attributes), world)


@dataclass(frozen=True)
class _Summary:
    lengths: tuple[int, ...]
    cells: int
    template_residues: int
    families: frozenset[int]


def _summarise(arrays: Arrays) -> _Summary:
    return _Summary(
        tuple(np.diff(arrays["residue.offsets"]).tolist()),
        len(arrays["alignment.residue"]),
        len(arrays.get("template.aatype", ())),
        frozenset(arrays["family"].tolist()),
    )


def _attributes(splits: Mapping[str, Sequence[_Summary]]) -> dict[str, Any]:
    families = {split: frozenset().union(*(each.families for each in splits[split])) for split in SPLITS}
    shared = families["train"] & families["validation"]
    if shared:
        raise ValueError(f"family {min(shared)} is in both splits, with {len(shared) - 1} more: its fold would leak")
    attributes: dict[str, Any] = {}
    for split in SPLITS:
        lengths = [length for each in splits[split] for length in each.lengths]
        attributes |= {
            f"{split}_longest": max(lengths),
            f"{split}_mean_length": sum(lengths) / len(lengths),
            f"{split}_mean_rows": sum(each.cells for each in splits[split]) / sum(lengths),
            f"{split}_templates": any(each.template_residues for each in splits[split]),
        }
    return attributes
