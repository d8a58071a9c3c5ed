"""Alignments and template hits of chains: OpenProteinSet's folders, or the benchmark's concatenation of them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold.alignment_files import read_text

DATABASES = ("uniref90_hits.a3m", "bfd_uniclust_hits.a3m", "mgnify_hits.a3m")  # merged in this order
TEMPLATE_HITS = "pdb70_hits.hhr"


class Alignments(Protocol):
    """Texts by chain, ``<id>_<author's name>``."""

    @property
    def chains(self) -> Collection[str]:
        """Return the chains that have alignments."""
        ...

    def read(self, chain: str) -> dict[str, str]:
        """Read the files of a chain, by name. InputError if one is damaged."""
        ...


def list_alignment_folders(folder: Path, duplicates: Path | None) -> dict[str, str]:
    """Map each chain to the name of its folder. Chains of one sequence share one (``duplicate_pdb_chains.txt``)."""
    # The listing itself says which entries are folders. Path.is_dir would ask about each of some 130,000.
    with os.scandir(folder) as entries:
        own = {entry.name for entry in entries if entry.is_dir()}
    folders = {name: name for name in own}
    for line in read_text(duplicates).splitlines() if duplicates else ():
        names = line.split()
        holder = next((name for name in names if name in own), None)
        if holder is not None:
            folders |= {name: name if name in own else holder for name in names}
    return folders


class AlignmentFolders:
    """``pdb/<id>_<chain>/a3m/*.a3m`` and ``hhr/*.hhr``, with the folders of `list_alignment_folders`."""

    def __init__(self, folder: Path, folders: Mapping[str, str]) -> None:
        self._folder, self._folders = folder, folders

    @property
    def chains(self) -> Collection[str]:
        """Return the chains that have alignments."""
        return self._folders.keys()

    def read(self, chain: str) -> dict[str, str]:
        """Read the files of a chain, by name. InputError if one cannot be read."""
        return {path.name: read_text(path) for path in sorted((self._folder / self._folders[chain]).glob("*/*"))}


class AlignmentDatabase:
    """``super.index`` (JSON: chain to ``{db, files: [[name, start, size], ...]}``) and the ``*.db`` files in the same
    folder.
    """

    def __init__(self, index: Path) -> None:
        self._folder = index.parent
        self._path = index
        try:
            self._index: Mapping[str, Any] = json.loads(read_text(index))
        except json.JSONDecodeError as error:
            raise InputError(f"{index}: not JSON: {error}") from None
        if not isinstance(self._index, dict):
            raise InputError(f"{index}: expected a JSON object of chains")

    @property
    def chains(self) -> Collection[str]:
        """Return the chains that have alignments."""
        return self._index.keys()

    def read(self, chain: str) -> dict[str, str]:
        """Read the files of a chain, by name. InputError if the index and its file do not fit."""
        try:
            # the file lies in the index's folder, whatever folder the index states
            path = self._folder / Path(self._index[chain]["db"]).name
            pieces = [(str(name), int(start), int(size)) for name, start, size in self._index[chain]["files"]]
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{self._path}: chain {chain}: expected db and files: [[name, start, size], ...]"
            ) from None
        texts = {}
        try:
            with path.open("rb") as file:
                for name, start, size in pieces:
                    file.seek(start)
                    content = file.read(size)
                    if len(content) != size:
                        raise InputError(f"{path}: {name} of {chain} ends beyond the file: cut off")
                    texts[name] = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        return texts
