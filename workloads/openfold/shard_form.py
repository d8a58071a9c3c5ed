"""Converts proteins to the ragged arrays of a shard and back: rows are residues, alignment cells, template residues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.features import SYNTHETIC_RESOLUTION, Protein

Arrays = dict[str, NDArray[Any]]

ARRAYS = {
    "residue.aatype": ((), np.int8),
    "residue.index": ((), np.int32),
    "residue.atoms": ((residues.ATOMS, 3), np.float32),
    "residue.atom_mask": ((residues.ATOMS,), np.int8),
    "alignment.residue": ((), np.int8),
    "alignment.deletions": ((), np.uint8),
}
TEMPLATE_ARRAYS = {
    "template.aatype": ((), np.int8),
    "template.atoms": ((residues.ATOMS, 3), np.float32),
    "template.mask": ((residues.ATOMS,), np.int8),
}
MEASURED_ARRAYS = {"resolution": ((), np.float32)}
NO_TEMPLATES = (
    np.empty((0, 0), np.int8),
    np.empty((0, 0, residues.ATOMS, 3), np.float32),
    np.empty((0, 0, residues.ATOMS), np.int8),
)


def build_shard_arrays(proteins: Sequence[Protein], numbers: Sequence[int], *, measured: bool = False) -> Arrays:
    """Build the arrays for `mlhpc.suite.data.shards.write_shard`; ``numbers`` are family numbers.

    ``measured`` structures have resolutions and may have templates. Templates of others are written if there are any.
    """

    def joined(field: str, row: tuple[int, ...] = ()) -> NDArray[Any]:
        """Concatenate a field of all proteins as rows of shape ``row``."""
        return np.concatenate([getattr(each, field).reshape(-1, *row) for each in proteins])

    arrays: Arrays = {
        "family": np.array(numbers, dtype=np.int64),
        "residue.offsets": _offsets([len(each) for each in proteins]),
        "residue.aatype": joined("aatype"),
        "residue.index": joined("residue_index"),
        "residue.atoms": joined("atoms", (residues.ATOMS, 3)),
        "residue.atom_mask": joined("atom_mask", (residues.ATOMS,)),
        "alignment.offsets": _offsets([each.msa.size for each in proteins]),
        "alignment.residue": joined("msa"),
        "alignment.deletions": joined("deletions"),
    }
    if measured:
        arrays["resolution"] = np.array([each.resolution for each in proteins], np.float32)
    if measured or any(len(each.template_aatype) for each in proteins):
        arrays |= {
            "template.offsets": _offsets([each.template_aatype.size for each in proteins]),
            "template.aatype": joined("template_aatype"),
            "template.atoms": joined("template_atoms", (residues.ATOMS, 3)),
            "template.mask": joined("template_mask", (residues.ATOMS,)),
        }
    return arrays


def convert_to_proteins(arrays: Mapping[str, NDArray[Any]]) -> Iterator[Protein]:
    """Yield the proteins of a shard's arrays or a ShardReader's result. InputError if rows and lengths do not fit."""
    residue, cell = arrays["residue.offsets"], arrays["alignment.offsets"]
    template, resolution = arrays.get("template.offsets"), arrays.get("resolution")
    for number in range(len(residue) - 1):
        chain = slice(residue[number], residue[number + 1])
        length = chain.stop - chain.start
        # rows of an alignment are as long as the chain, so the number of cells tells how many there are
        cells = slice(cell[number], cell[number + 1])
        if length == 0 or (cells.stop - cells.start) % length or cells.start == cells.stop:
            raise InputError(f"{cells.stop - cells.start} alignment cells are not rows of {length} residues")
        templates = NO_TEMPLATES
        if template is not None:
            rows = slice(template[number], template[number + 1])
            templates = (
                arrays["template.aatype"][rows].reshape(-1, length),
                arrays["template.atoms"][rows].reshape(-1, length, residues.ATOMS, 3),
                arrays["template.mask"][rows].reshape(-1, length, residues.ATOMS),
            )
        yield Protein(
            aatype=arrays["residue.aatype"][chain],
            residue_index=arrays["residue.index"][chain],
            atoms=arrays["residue.atoms"][chain],
            atom_mask=arrays["residue.atom_mask"][chain],
            msa=arrays["alignment.residue"][cells].reshape(-1, length),
            deletions=arrays["alignment.deletions"][cells].reshape(-1, length),
            template_aatype=templates[0],
            template_atoms=templates[1],
            template_mask=templates[2],
            # only measured structures are stored with a resolution
            resolution=SYNTHETIC_RESOLUTION if resolution is None else float(resolution[number]),
        )


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
