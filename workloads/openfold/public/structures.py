"""Reads structures of the Protein Data Bank: mmCIF files, or the dictionaries that the benchmark makes of them.

A pickle can name any function and so run a program. The unpickler here rejects every name: the dictionaries need none.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.mmcif import Chain, Entry, read_entry

MOST_CACHED_ENTRIES = 64  # templates recur
MOST_CACHED_GROUPS = 4  # a file of dictionaries has some 200 entries

# the 37 names that a heavy atom of a chain can have, in AlphaFold's order
ATOMS_37 = (
    *("N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1", "ND2", "OD1", "OD2"),
    *("SD", "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2", "NH1", "NH2", "OH", "CZ", "CZ2"),
    *("CZ3", "NZ", "OXT"),
)


class Structures(Protocol):
    """Entries by identifier."""

    def entry(self, name: str) -> Entry:
        """Read an entry. InputError if it is absent or damaged."""
        ...


def list_mmcif_files(folder: Path) -> list[Path]:
    """List the ``<id>.cif.gz`` in a folder and in its folders. InputError if there is none.

    The order is that of the benchmark's table: by the two middle letters, then by name.
    """
    files = [*folder.glob("*.cif.gz"), *folder.glob("*/*.cif.gz")]
    if not files:
        raise InputError(f"{folder}: no *.cif.gz file in it or in a folder of it")
    return sorted(files, key=lambda path: (_group(path.name), path.name))


class MmcifFiles:
    """The files of `list_mmcif_files`."""

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        self._folder = folder
        self._by_name = {path.name.partition(".")[0]: path for path in paths}
        self._read = lru_cache(MOST_CACHED_ENTRIES)(read_entry)

    def entry(self, name: str) -> Entry:
        """Read an entry. InputError if it is absent or damaged."""
        if name not in self._by_name:
            raise InputError(f"{self._folder}: no {name}.cif.gz")
        return self._read(self._by_name[name])


class PickleFiles:
    """The benchmark's ``dicts`` folder: a pickle for each pair of middle letters of an identifier."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups = lru_cache(MOST_CACHED_GROUPS)(self._read_group)
        self._read = lru_cache(MOST_CACHED_ENTRIES)(self._read_entry)

    def entry(self, name: str) -> Entry:
        """Read an entry. InputError if it is absent or damaged."""
        return self._read(name)

    def _read_group(self, group: str) -> Mapping[str, Any]:
        path = self._folder / group
        try:
            content = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # a damaged pickle can raise any exception
            raise InputError(f"{path}: not a pickle of plain data: {error}") from None
        if not isinstance(content, dict):
            raise InputError(f"{path}: holds a {type(content).__name__}, expected a dictionary of entries")
        return content

    def _read_entry(self, name: str) -> Entry:
        group = self._groups(_group(name))
        if name not in group:
            raise InputError(f"{self._folder / _group(name)}: no entry {name}")
        try:
            return _entry(group[name])
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
            raise InputError(f"{self._folder / _group(name)}: entry {name} is damaged: {error!r}") from None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")


def _group(name: str) -> str:
    return name[1:3]


def _entry(content: Mapping[str, Any]) -> Entry:
    labels: dict[str, list[str]] = defaultdict(list)
    for label, author in content["mmcif_chain_id_to_author_chain_id"].items():
        labels[author].append(label)
    chains = []
    for name, sequence in content["sequences"].items():
        aatype = residues.encode(sequence)
        stored = content["atoms"][name]
        wide = _array(stored["all_atom_positions"], np.float32).reshape(len(aatype), len(ATOMS_37), 3)
        known = _array(stored["all_atom_mask"], np.bool_).reshape(len(aatype), len(ATOMS_37))
        mask = _HAS_SLOT[aatype] & np.take_along_axis(known, SLOTS_37[aatype], 1)
        atoms = np.take_along_axis(wide, SLOTS_37[aatype][..., None], 1) * mask[..., None]
        place = np.arange(len(aatype), dtype=np.int32)
        chains.append(Chain(name, "", tuple(labels[name]), "", aatype, place, atoms, mask.astype(np.int8)))
    return Entry(content["pdb_id"], content["release_date"], float(content["resolution"]), tuple(chains))


def _array(stored: tuple[bytes, tuple[int, ...]], kind: type[np.generic]) -> NDArray[Any]:
    content, shape = stored
    return np.frombuffer(zlib.decompress(content), kind).reshape(shape)


# (21, 14): positions among the 37; 0 where there is no atom, which _HAS_SLOT masks
SLOTS_37 = np.array([[ATOMS_37.index(name) if name else 0 for name in names] for names in residues.ATOM_NAMES])
_HAS_SLOT = residues.ATOM_MASK > 0
