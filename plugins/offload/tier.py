"""The two tiers: the host's memory, and files. An entry is some tensors of one expert.

A file is never overwritten. A new version gets a new name, and the old file goes when `commit` has written the index.
So the index names whole files at any moment. The checkpoint, not the tier, is what a run resumes from.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import google_crc32c
import numpy as np
import torch
from msgspec import Struct, json
from torch import Tensor

from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.documents import render_json
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import add_path_to_errors, make_folder

Entry = Mapping[str, Tensor]
ALIGNMENT = 64  # of the values in a file
INDEX = "index.json"
BYTES = 4  # of a value: parameters and states are float32 in any precision


class Key(NamedTuple):
    """Names an entry: ``kind`` is weights, states or gradients."""

    layer: int
    expert: int
    kind: str

    def __str__(self) -> str:
        return f"layer{self.layer}-expert{self.expert}-{self.kind}"


Read = Callable[[Key], Entry]


def map_memory(size: int) -> mmap.mmap:
    """Map zeros, which take memory once they are written.

    They go back to the system with the last tensor in them. The heap would keep them, in pieces between what lives
    longer.
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def make_tensors(memory: mmap.mmap, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Make float32 tensors of these shapes, one behind the other in mapped memory."""
    found, begin = dict[str, Tensor](), 0
    for name, shape in shapes.items():
        values = math.prod(shape)
        found[name] = torch.frombuffer(memory, dtype=torch.float32, count=values, offset=begin).view(*shape)
        begin += BYTES * values
    return found


class Copied(dict[str, Tensor]):
    """An entry whose tensors lie in ``file``, the bytes of a safetensors file."""

    def __init__(self, file: mmap.mmap) -> None:
        super().__init__(_parse(file))
        self.file = file


def copy(entry: Entry) -> Copied:
    """Copy tensors to mapped memory, as a file has them: a write then copies nothing more."""
    header, end = dict[str, _Header](), 0
    for name, tensor in entry.items():
        header[name] = _Header("F32", list(tensor.shape), (end, end := end + tensor.nbytes))
    text = json.encode(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    memory = map_memory(8 + len(text) + end)
    memory[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
    found = Copied(memory)
    for name, tensor in entry.items():
        found[name].copy_(tensor)
    return found


class _Heap(ctypes.Structure):
    """The struct mallinfo2 of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ord", "smblks", "hblks", "hblkhd", "usm", "fsm", "uord", "free", "keep")
    )


def return_freed_memory(kept: int = 0) -> None:
    """Give what the heap has free back to the system if that is more than ``kept`` bytes, with glibc.

    The next step would ask for most of it again: to trim after each layer takes a third of a step.
    """
    with suppress(AttributeError, OSError):
        glibc = ctypes.CDLL(None)
        glibc.mallinfo2.restype = _Heap
        if glibc.mallinfo2().free > kept:
            glibc.malloc_trim(0)


class Tier(Protocol):
    """Holds entries. Tensors of an entry are never changed in place."""

    def read(self, key: Key) -> Entry:
        """Return an entry. InputError if it is damaged."""
        ...

    def write(self, key: Key, entry: Entry) -> None:
        """Add or replace an entry. OSError if there is no room."""
        ...

    def remove(self, key: Key) -> None:
        """Remove an entry, if there is one."""
        ...

    def has(self, key: Key) -> bool:
        """Return True if there is such an entry."""
        ...

    def commit(self) -> None:
        """Make all that was written the present state."""
        ...

    def pin(self, keys: Iterable[Key]) -> tuple[Read, Callable[[], None]]:
        """Return a function that reads entries as they are now, whatever is written later, and one that ends that."""
        ...

    def close(self) -> None:
        """Remove everything."""
        ...


class HostTier:
    """Entries in the host's memory."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self.read, self.write = self._entries.__getitem__, self._entries.__setitem__
        self.has, self.close = self._entries.__contains__, self._entries.clear

    def remove(self, key: Key) -> None:
        """Forget an entry."""
        self._entries.pop(key, None)

    def commit(self) -> None:
        """Do nothing: a write is final."""

    def pin(self, keys: Iterable[Key]) -> tuple[Read, Callable[[], None]]:
        """Keep the tensors of now: a write replaces entries."""
        kept = {key: self._entries[key] for key in keys}
        return kept.__getitem__, kept.clear


class _File(NamedTuple):
    name: str
    bytes: int
    crc32c: int


class FileTier:
    """Entries in safetensors files of a folder that only this object uses."""

    def __init__(self, folder: Path, lock: Path) -> None:
        self.folder = folder
        self._files: dict[Key, _File] = {}
        self._replaced: list[str] = []  # which the index on the disk names still
        self._pins: Counter[str] = Counter()
        self._number = count()
        self.bytes_read = self.bytes_written = 0
        self._counting = threading.Lock()  # two threads write
        self._close = hold_folder(folder, lock)

    def read(self, key: Key) -> Entry:
        """Read a file whole and compare its checksum, before anything uses its values."""
        file = self._files[key]
        return self._read(file)

    def _read(self, file: _File) -> Entry:
        path = self.folder / file.name
        data = map_memory(file.bytes)
        try:
            with path.open("rb", buffering=0) as stream:
                found, view = os.fstat(stream.fileno()).st_size, memoryview(data)
                if found != file.bytes:
                    raise InputError(f"{path}: has {found} bytes, {file.bytes} were written; {_WAY_OUT}")
                while view and (read := stream.readinto(view)):
                    view = view[read:]
        except FileNotFoundError:
            raise InputError(f"{path}: is gone, and experts were in it; {_WAY_OUT}") from None
        if google_crc32c.extend(0, np.frombuffer(data, np.uint8)) != file.crc32c:
            raise InputError(f"{path}: its checksum is not that of what was written; {_WAY_OUT}")
        self.bytes_read += file.bytes
        return Copied(data)

    def write(self, key: Key, entry: Entry) -> None:
        """Write a new file for an entry. The former one stays until `commit`."""
        data = (entry if isinstance(entry, Copied) else copy(entry)).file
        crc = google_crc32c.extend(0, np.frombuffer(data, np.uint8))
        file = _File(f"{key}.{next(self._number)}.safetensors", len(data), crc)
        with add_path_to_errors(self.folder / file.name):
            (self.folder / file.name).write_bytes(data)
        with self._counting:
            self.bytes_written += file.bytes
        former = self._files.get(key)
        self._files[key] = file
        if former is not None:
            self._replaced.append(former.name)

    def remove(self, key: Key) -> None:
        """Forget an entry; its file goes with the next `commit`."""
        former = self._files.pop(key, None)
        if former is not None:
            self._replaced.append(former.name)

    def has(self, key: Key) -> bool:
        """Return True if there is such an entry."""
        return key in self._files

    def commit(self) -> None:
        """Replace the index, then remove files that it no longer names."""
        part = self.folder / f"{INDEX}.part"
        replaced, self._replaced = self._replaced, []  # another thread may replace more
        with add_path_to_errors(part):
            part.write_text(render_json({file.name: [file.bytes, file.crc32c] for file in list(self._files.values())}))
        part.replace(self.folder / INDEX)
        for name in replaced:
            if self._pins[name]:
                self._replaced.append(name)
            else:
                (self.folder / name).unlink(missing_ok=True)

    def pin(self, keys: Iterable[Key]) -> tuple[Read, Callable[[], None]]:
        """Keep files until the second function is called."""
        files = {key: self._files[key] for key in keys}
        names = [file.name for file in files.values()]
        self._pins.update(names)
        return lambda key: self._read(files[key]), lambda: self._pins.subtract(names)

    def close(self) -> None:
        """Remove the files, and give up the lock if nothing else of this process uses it."""
        self._close()


def _parse(data: mmap.mmap) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, in its memory: the library's own function copies them to the heap."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.decode(data[8:begin], type=dict[str, _Header])
    return {
        name: torch.frombuffer(
            data, dtype=torch.float32, count=(each.data_offsets[1] - each.data_offsets[0]) // BYTES,
            offset=begin + each.data_offsets[0],
        ).view(*each.shape)
        for name, each in header.items()
    }  # fmt: skip


class _Header(Struct, frozen=True):
    dtype: Literal["F32"]
    shape: list[int]
    data_offsets: tuple[int, int]


_WAY_OUT = "damaged after it was written: continue from the checkpoint with --resume"
_held: dict[Path, tuple[ExitStack, set[Path]]] = {}  # the locks of this process, and what it has below each


def hold_folder(folder: Path, lock: Path) -> Callable[[], None]:
    """Make a folder for this process alone, and return what removes it. LockedError if another process has the lock.

    What a killed run left there goes first.
    """
    if lock not in _held:
        stack = ExitStack()
        with add_path_to_errors(lock):
            make_folder(lock.parent)
            stack.enter_context(create_lock(lock, "the folder of offloaded experts", ends=True))
            for old in lock.parent.glob(f"{lock.stem}-*"):
                shutil.rmtree(old, ignore_errors=True)
        _held[lock] = stack, set()
    stack, used = _held[lock]
    make_folder(folder)
    used.add(folder)

    def close() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        used.discard(folder)
        if not used and _held.pop(lock, None) is not None:
            stack.close()

    return close
