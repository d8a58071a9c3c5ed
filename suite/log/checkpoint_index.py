"""Reads the index of a trial's checkpoint, ``trial_<i>.pt``: its files and their checksums. Without torch.

The index is a line with its own checksum, then JSON. Everything else is in the folder ``trial_<i>.<token>``, which
torch.distributed.checkpoint writes: a file per rank, ``.metadata`` for other programs, and ``layout.msgpack``, which
says what the ranks' files hold. No file of a checkpoint is used before its checksum has been compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes

CHECKPOINT_VERSION = 10
READ_BYTES = 2**22
QUICK_CHECK_BYTES = 2**28  # of a larger checkpoint `find_damage_quickly` compares sizes only
LARGEST_INDEX = 2**26  # bytes: a hundred for each rank
Number = Annotated[int, Meta(ge=0)]


class DamagedCheckpointError(InputError):
    """A file of a checkpoint is missing, unreadable or differs from its checksum."""


class FileSum(Struct, frozen=True, kw_only=True):
    """The size of a file and its checksum."""

    bytes: Number
    crc32c: Number


class CheckpointIndex(Struct, frozen=True, kw_only=True):
    """The files of a checkpoint by name. ``token`` names their folder."""

    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
    files: dict[Annotated[str, Meta(pattern=r"^[0-9a-z_.]+\Z")], FileSum]
    version: int = CHECKPOINT_VERSION

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def text(self) -> bytes:
        """Return the content of ``trial_<i>.pt``."""
        content = msgspec.json.encode(self) + b"\n"
        return _render_checksum(content) + content


def _render_checksum(content: bytes) -> bytes:
    import google_crc32c  # of the extra `run`: run folders are read without it

    return b"%08x\n" % google_crc32c.value(content)


def build_folder_path(path: Path, token: str) -> Path:
    """Return the folder of a checkpoint's files, next to the index at ``path``."""
    return path.with_name(f"{path.stem}.{token}")


def read_index(path: Path) -> CheckpointIndex:
    """Read the index of a checkpoint. DamagedCheckpointError names the file."""
    try:
        line, _, content = read_bytes(path, LARGEST_INDEX).partition(b"\n")
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if line + b"\n" != _render_checksum(content):
        raise DamagedCheckpointError(f"{path}: damaged: its checksum is not that of its content")
    try:
        version = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("version")
        if version is None or bytes(version) != b"%d" % CHECKPOINT_VERSION:
            found = None if version is None else bytes(version).decode()
            raise DamagedCheckpointError(
                f"{path}: checkpoint version {found}; this suite reads version {CHECKPOINT_VERSION}"
            )
        return msgspec.json.decode(content, type=CheckpointIndex)
    except msgspec.MsgspecError as error:
        raise DamagedCheckpointError(f"{path}: not the index of a checkpoint: {error}") from None


def check_file(path: Path, expected: FileSum, tick: Callable[[], None] = lambda: None) -> None:
    """Compare a file of a checkpoint with its checksum. DamagedCheckpointError names it."""
    import google_crc32c

    crc, size = 0, 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                crc = google_crc32c.extend(crc, block)
                size += len(block)
                tick()
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if (size, crc) != (expected.bytes, expected.crc32c):
        raise DamagedCheckpointError(f"{path}: damaged: it has another checksum than it was written with")


def _check_sizes(path: Path, index: CheckpointIndex) -> None:
    """Compare the sizes of the files with the index."""
    for name, expected in index.files.items():
        file = build_folder_path(path, index.token) / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DamagedCheckpointError(f"{file}: cannot be read: {error.strerror}") from None
        if size != expected.bytes:
            raise DamagedCheckpointError(f"{file}: damaged: has {size} bytes of {expected.bytes}")


def find_damage(
    path: Path,
    *,
    reader: int = 0,
    readers: int = 1,
    largest: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> str | None:
    """Return one line on why a checkpoint cannot be used: the file and its fault. None if it is whole.

    Each of several ``readers`` compares its share of the files. If the checkpoint has more than ``largest`` bytes, only
    the index and the sizes of the files are checked.
    """
    try:
        index = read_index(path)
        if largest is not None and index.size > largest:
            _check_sizes(path, index)
            return None
        for name, expected in list(index.files.items())[reader::readers]:
            check_file(build_folder_path(path, index.token) / name, expected, tick)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def find_damage_quickly(path: Path) -> str | None:
    """Find damage for a command that only shows it, as `find_damage`. None also if there is no checkpoint.

    An unchanged checkpoint is read once; of a large one only the sizes are compared.
    """
    try:
        files = [(file.name, file.stat()) for file in _list_files(path)]
    except OSError:
        files = []  # one is being written or removed
    if not path.exists():
        return None
    return _find_damage_cached(path, tuple((name, state.st_mtime_ns, state.st_size) for name, state in files))


def _list_files(path: Path) -> list[Path]:
    return sorted([*path.parent.glob(f"{path.stem}.*"), *path.parent.glob(f"{path.stem}.*/*")])


@cache
def _find_damage_cached(path: Path, files: tuple[tuple[str, int, int], ...]) -> str | None:
    """Cache the result by ``files``: names, times and sizes, which show a change."""
    return find_damage(path, largest=QUICK_CHECK_BYTES)
