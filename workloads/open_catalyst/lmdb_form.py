"""The reference's data: LMDB files of pickled torch_geometric ``Data``. Reads them without torch_geometric, and runs no code.

Keys are b"0", b"1", ... and b"length"; values are pickles. A pickle may name any function to be called, so loading one is
running a program. The unpickler here builds tensors, arrays and inert records, and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workloads.open_catalyst.structures import Structure

FIELDS = ("pos", "cell", "atomic_numbers", "force", "fixed", "tags", "y")


class LmdbFile:
    """One LMDB file. ``trust_pickles`` unpickles with Python's own unpickler, which runs what the file says."""

    def __init__(self, path: Path, *, trust_pickles: bool = False) -> None:
        self.path = path
        self._load = pickle.loads if trust_pickles else load_restricted
        with _environment(path) as environment, environment.begin() as transaction:
            length = transaction.get(b"length")
            entries = int(environment.stat()["entries"])
            self._entries = entries if length is None else self._unpickle(length, "length")
        if not isinstance(self._entries, int) or self._entries < 1:
            raise ValueError(f"{path}: holds {self._entries!r} structures")

    def __len__(self) -> int:
        """Number of structures."""
        return int(self._entries)

    def structures(self, begin: int, end: int) -> Iterator[Structure]:
        """Structures ``begin`` to ``end``. ValueError says file and index."""
        with _environment(self.path) as environment, environment.begin() as transaction:
            for index in range(begin, end):
                value = transaction.get(str(index).encode())
                if value is None:
                    raise ValueError(f"{self.path}: structure {index}: missing")
                yield self._structure(self._unpickle(value, f"structure {index}"), index)

    def _structure(self, data: Any, index: int) -> Structure:
        fields = record_fields(data)
        missing = [name for name in FIELDS if fields.get(name) is None]
        if missing:
            raise ValueError(
                f"{self.path}: structure {index}: no field {missing[0]!r}; fields: {', '.join(sorted(fields)) or 'none'}"
            )
        try:
            values = {name: np.asarray(fields[name]) for name in FIELDS}
            return Structure(
                position=values["pos"].astype(np.float64),
                cell=values["cell"].astype(np.float64).reshape(3, 3),
                number=values["atomic_numbers"].astype(np.int64),  # floats in the public files
                tag=values["tags"].astype(np.int64),
                fixed=values["fixed"] != 0,
                force=values["force"].astype(np.float64),
                energy=float(values["y"]),
                trajectory=_system(fields.get("sid"), index),
                frame=int(fields.get("fid", 0)),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: structure {index}: {error}") from None

    def _unpickle(self, value: bytes, what: str) -> Any:
        try:
            return self._load(value)
        except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
            raise ValueError(f"{self.path}: {what}: {type(error).__name__}: {str(error).splitlines()[0]}") from None


@contextmanager
def _environment(path: Path) -> Iterator[Any]:
    try:
        import lmdb
    except ImportError:
        raise ValueError("open_catalyst: reading LMDB needs lmdb: pip install 'mlhpc[open-catalyst]'") from None
    try:
        environment = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise ValueError(f"{path}: not a readable LMDB file: {error}") from None
    with environment:
        yield environment


class Record:
    """An object whose class is not looked up: it has the attributes the pickle gives it and no behaviour."""


def record_fields(data: Any) -> dict[str, Any]:
    """The fields of a ``Data`` of torch_geometric before 2.0 (its attributes) or since (a mapping in its store)."""
    attributes = vars(data) if hasattr(data, "__dict__") else {}
    store = attributes.get("_store")
    mapping = vars(store).get("_mapping") if store is not None and hasattr(store, "__dict__") else None
    fields = mapping if isinstance(mapping, dict) else attributes
    return {str(name): _plain(value) for name, value in fields.items() if not str(name).startswith("_")}


def load_restricted(value: bytes) -> Any:
    """Unpickle tensors, arrays, containers and inert records. pickle.UnpicklingError for any other name."""
    return _RestrictedUnpickler(io.BytesIO(value)).load()


def _storage_from_bytes(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)


_RECONSTRUCT = np.empty(0).__reduce__()[
    0
]  # numpy's own function for rebuilding an array, wherever this version keeps it
_SCALAR = np.float64(0).__reduce__()[0]

# What a public data pickle consists of. Nothing here opens, imports, executes or imports anything by a name of the file.
ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage_from_bytes,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _SCALAR for core in ("core", "_core")},
}
RECORDS = {
    ("torch_geometric.data.data", "Data"),
    ("torch_geometric.data", "Data"),
    ("torch_geometric.data.storage", "GlobalStorage"),
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RECORDS:
            return Record
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which data do not need: refused")


def _system(value: Any, index: int) -> int:
    """Number of a system, which some files write as ``random123``; the structure's own index if there is none."""
    return index if value is None else int(str(np.asarray(value).item()).removeprefix("random"))


def _plain(value: Any) -> Any:
    """An array, a number or text. None for all else: numpy would follow ``__array_interface__``, a pointer, on a record."""
    if isinstance(value, torch.Tensor):
        array: NDArray[Any] = value.detach().numpy()
        return array
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return None
    return value if isinstance(value, np.ndarray | np.generic | int | float | str) else None
