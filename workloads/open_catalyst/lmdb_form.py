"""Reads the reference's LMDB files of pickled torch_geometric ``Data``, without torch_geometric.

Keys are b"0", b"1", ... and b"length"; values are pickles. A pickle can call any function by name, so loading one runs
a program. Reading one here runs none. The unpickler builds tensors, arrays and containers. For any class of
torch_geometric it builds a record without behaviour. It rejects every other name.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.workloads.open_catalyst.structures import Structure

FIELDS = ("pos", "cell", "atomic_numbers", "force", "fixed", "tags", "y")


class LmdbFile:
    """One LMDB file. ``trust_pickles`` uses Python's own unpickler, which runs any code in the file."""

    def __init__(self, path: Path, *, trust_pickles: bool = False) -> None:
        self.path = path
        self._load = pickle.loads if trust_pickles else load_restricted
        with _environment(path) as environment, environment.begin() as transaction:
            length = transaction.get(b"length")
            # a file without a count holds nothing but structures
            entries = int(environment.stat()["entries"])
            self._entries = entries if length is None else self._unpickle(length, "length")
        if not isinstance(self._entries, int) or self._entries < 1:
            raise InputError(f"{path}: holds {self._entries!r} structures, expected one or more")

    def __len__(self) -> int:
        """Return the number of structures."""
        return int(self._entries)

    def structures(self, begin: int, end: int) -> Iterator[Structure]:
        """Read structures ``begin`` to ``end``. InputError names file and index."""
        with _environment(self.path) as environment, environment.begin() as transaction:
            for index in range(begin, end):
                value = transaction.get(str(index).encode())
                if value is None:
                    raise InputError(f"{self.path}: structure {index}: missing")
                yield self._structure(self._unpickle(value, f"structure {index}"), index)

    def _structure(self, data: Any, index: int) -> Structure:
        fields = read_record_fields(data)
        missing = [name for name in FIELDS if fields.get(name) is None]
        if missing:
            listed = ", ".join(sorted(fields)) or "none"
            raise InputError(f"{self.path}: structure {index}: no field {missing[0]!r}; fields: {listed}")
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
            raise InputError(f"{self.path}: structure {index}: {error}") from None

    def _unpickle(self, value: bytes, what: str) -> Any:
        try:
            return self._load(value)
        except Exception as error:  # a damaged pickle can raise any exception
            raise InputError(f"{self.path}: {what}: {type(error).__name__}: {str(error).splitlines()[0]}") from None


@contextmanager
def _environment(path: Path) -> Iterator[Any]:
    """Open an LMDB file for reading, without its lock: data may be on a read-only file system."""
    try:
        import lmdb
    except ImportError:
        raise InputError(f"open_catalyst: LMDB files cannot be read: {explain_not_installed('lmdb')}") from None
    try:
        environment = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise InputError(f"{path}: not a readable LMDB file: {error}") from None
    with environment:
        yield environment


class Record:
    """Stands for an object of any class. It has the pickled attributes and no behaviour; no class is imported."""

    def __init__(self, *arguments: object) -> None:
        """Take what the class would be called with, such as the value of an enumeration, and forget it."""

    def __setitem__(self, name: str, value: object) -> None:
        """Set a field, as ``Data`` does."""
        self.__dict__[name] = value


def read_record_fields(data: Any) -> dict[str, Any]:
    """Read the fields of a ``Data`` of torch_geometric: attributes before version 2.0, a mapping in its store since."""
    attributes = vars(data) if hasattr(data, "__dict__") else {}
    store = attributes.get("_store")
    mapping = vars(store).get("_mapping") if store is not None and hasattr(store, "__dict__") else None
    fields = mapping if isinstance(mapping, dict) else attributes
    return {str(name): _convert_to_plain(value) for name, value in fields.items() if not str(name).startswith("_")}


def load_restricted(value: bytes) -> Any:
    """Unpickle tensors, arrays, containers and inert records. pickle.UnpicklingError for any other name."""
    return _RestrictedUnpickler(io.BytesIO(value)).load()


def _storage_from_bytes(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)


def _bytes_of_protocol_2(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}: refused")
    return text.encode("latin1")


# numpy's own function for rebuilding an array, wherever this version keeps it
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]

# Names in pickles of the public data. None of them opens a file, imports or executes by a name from the pickle.
ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    ("_codecs", "encode"): _bytes_of_protocol_2,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage_from_bytes,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _SCALAR for core in ("core", "_core")},
}
RECORDS = "torch_geometric"  # a package: none of its classes is imported, so new ones of later versions do no harm


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == RECORDS:
            return Record
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which data do not need: refused")


def _system(value: Any, index: int) -> int:
    """Read the number of a system, in some files ``random123``; the structure's index if there is none."""
    return index if value is None else int(str(np.asarray(value).item()).removeprefix("random"))


def _convert_to_plain(value: Any) -> Any:
    """Convert to an array, number or text.

    None for all else: numpy would follow a pointer in ``__array_interface__``.
    """
    if isinstance(value, torch.Tensor):
        array: NDArray[Any] = value.detach().numpy()
        return array
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return None
    return value if isinstance(value, np.ndarray | np.generic | int | float | str) else None
