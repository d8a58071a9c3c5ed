"""Imports the benchmark's OpenFold code from a clone, as this Python would not: it needs packages of its time.

Its dataclasses have instances of others as defaults, which Python refuses from 3.11 on; it indexes tensors with lists, and reads a
table that Biopython has moved.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

MODERNISED = (
    (b"@dataclass\n", b"@dataclass(unsafe_hash=True)\n"),
    (b"data[ranges]", b"data[tuple(ranges)]"),
    (b"newshape=", b"shape="),
    (b"tensor[slices]", b"tensor[tuple(slices)]"),
)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "openfold":
            return None
        place = self._folder.joinpath(*name.split("."))
        is_package = place.is_dir()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        return importlib.util.spec_from_file_location(
            name, file, loader=_Loader(name, str(file)), submodule_search_locations=[str(place)] if is_package else None
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        text = super().get_data(path)
        for old, new in MODERNISED:
            text = text.replace(old, new)
        return text

    def get_code(self, fullname: str):  # the base class would take code that Python has cached
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


@contextmanager
def openfold_code(clone: Path) -> Iterator[None]:
    """Make ``import openfold...`` mean the clone's code while the block runs."""
    data = pytest.importorskip("Bio.Data.PDBData", reason="Biopython is not installed", exc_type=ImportError)
    stand_ins = {"dacite": ModuleType("dacite"), "Bio.Data.SCOPData": ModuleType("Bio.Data.SCOPData")}
    stand_ins["Bio.Data.SCOPData"].protein_letters_3to1 = {  # type: ignore[attr-defined]
        name.strip(): letter for name, letter in data.protein_letters_3to1_extended.items()
    }
    package = importlib.import_module("Bio.Data")
    package.SCOPData = stand_ins["Bio.Data.SCOPData"]  # type: ignore[attr-defined]
    finder = _Finder(clone / "openfold")
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in {"openfold", "dacite"} or name == "Bio.Data.SCOPData":
                del sys.modules[name]
        del package.SCOPData  # type: ignore[attr-defined]
