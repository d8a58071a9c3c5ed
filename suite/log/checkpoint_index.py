"""Reads the index of a trial's checkpoint, ``trial_<i>.pt``: its parts, where they lie, their checksums. Without torch.

The index is a line with its own checksum, then JSON. Everything else is in ``trial_<i>.<token>.node<n>``, one file per
node: the part of each rank, and in rank 0's file the part of all ranks. Nothing of a checkpoint is used before its
checksum has been compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

import google_crc32c
import msgspec
from msgspec import Meta, Struct

from suite.errors import InputError
from suite.files import read_bytes

CHECKPOINT_VERSION = 8
READ_BYTES = 2**22
QUICK_CHECK_BYTES = 2**28  # of a larger checkpoint `find_damage_quickly` compares sizes only
LARGEST_INDEX = 2**26  # bytes: a hundred for each rank
Number = Annotated[int, Meta(ge=0)]


class DamagedCheckpointError(InputError):
    """A file of a checkpoint is missing, unreadable or differs from its checksum."""


class Part(Struct, frozen=True, kw_only=True):
    """A range of a node's file."""

    node: Number
    offset: Number
    bytes: Number
    crc32c: Number


class CheckpointIndex(Struct, frozen=True, kw_only=True):
    """The parts of a checkpoint: ``shared`` by all ranks, and each rank's ``own``. ``token`` names its files."""

    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
    shared: Part
    own: tuple[Part, ...]
    version: int = CHECKPOINT_VERSION

    @property
    def size(self) -> int:
        """The bytes of all parts."""
        return sum(part.bytes for _, part in self.parts())

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yield each part with its owner in words."""
        for rank, part in enumerate(self.own):
            yield f"rank {rank}", part
        yield "all ranks", self.shared

    def text(self) -> bytes:
        """Return the content of ``trial_<i>.pt``."""
        content = msgspec.json.encode(self) + b"\n"
        return _render_checksum(content) + content


def _render_checksum(content: bytes) -> bytes:
    return b"%08x\n" % google_crc32c.value(content)


def build_node_path(path: Path, token: str, node: int) -> Path:
    """Return the file of a node, next to the index at ``path``."""
    return path.with_name(f"{path.stem}.{token}.node{node}")


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


def check_part(path: Path, whose: str, part: Part, tick: Callable[[], None] = lambda: None) -> None:
    """Compare a part of the node's file at ``path`` with its checksum. DamagedCheckpointError names the file."""
    crc, left = 0, part.bytes
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(part.offset)
            while block := file.read(min(READ_BYTES, left)):
                crc = google_crc32c.extend(crc, block)
                left -= len(block)
                tick()
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: the part of {whose} cannot be read: {error.strerror}") from None
    if left or crc != part.crc32c:
        raise DamagedCheckpointError(
            f"{path}: damaged: the part of {whose} has another checksum than it was written with"
        )


def _check_sizes(path: Path, index: CheckpointIndex) -> None:
    """Compare the sizes of the nodes' files with their parts."""
    for node in {part.node for _, part in index.parts()}:
        file = build_node_path(path, index.token, node)
        least = max(part.offset + part.bytes for _, part in index.parts() if part.node == node)
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DamagedCheckpointError(f"{file}: cannot be read: {error.strerror}") from None
        if size < least:
            raise DamagedCheckpointError(f"{file}: damaged: has {size} bytes of {least}")


def find_damage(
    path: Path,
    *,
    reader: int = 0,
    readers: int = 1,
    largest: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> str | None:
    """Return one line on why a checkpoint cannot be used: the file and its fault. None if it is whole.

    Each of several ``readers`` compares its share of the parts. If the checkpoint has more than ``largest`` bytes, only
    the index and the sizes of the files are checked.
    """
    try:
        index = read_index(path)
        if largest is not None and index.size > largest:
            _check_sizes(path, index)
            return None
        for whose, part in list(index.parts())[reader::readers]:
            check_part(build_node_path(path, index.token, part.node), whose, part, tick)
    except DamagedCheckpointError as error:
        return str(error)
    return None


def find_damage_quickly(path: Path) -> str | None:
    """Find damage for a command that only shows it, as `find_damage`. None also if there is no checkpoint.

    An unchanged checkpoint is read once; of a large one only the sizes are compared.
    """
    try:
        files = [(file.name, file.stat()) for file in sorted(path.parent.glob(f"{path.stem}.*"))]
    except OSError:
        files = []  # one is being written or removed
    if not path.exists():
        return None
    return _find_damage_cached(path, tuple((name, state.st_mtime_ns, state.st_size) for name, state in files))


@cache
def _find_damage_cached(path: Path, files: tuple[tuple[str, int, int], ...]) -> str | None:
    """Cache the result by ``files``: names, times and sizes, which show a change."""
    return find_damage(path, largest=QUICK_CHECK_BYTES)
