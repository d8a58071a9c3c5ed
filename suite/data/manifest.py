r"""Reads, writes and verifies the manifest of a data set: the list of its shards with sizes and checksums.

<root>/manifest.json              version 1, written last: a data set with a manifest is complete
<root>/<split>/shard_00000.h5     the shards (`mlhpc.suite.data.shards`)

Compares the shards of a data set with the checksums that were recorded when they were written. Ranks share the work.

A run does it once before it trains, because a flipped bit would otherwise train to a result.

Computes the identity of data that are not in the suite's shards: one sha256 over the files of a folder.

It is the sha256 of the text that sha256sum prints for the files in the order of their names:

    cd FOLDER && find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import FolderName, convert_to_plain_data, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import fsync_path, render_reason, render_repr, write_file_atomically
from mlhpc.suite.transport import convert
from mlhpc.suite.world import World

MANIFEST_VERSION: Final = 1
MANIFEST_NAME = "manifest.json"
UNFINISHED_NAME = "generation.json"  # the recipe of a data set without a manifest yet, which removes it
BLOCK_BYTES = 8 << 20


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class ShardEntry(_Part, frozen=True, kw_only=True):
    """One shard. ``file`` is relative to the root of the data set. Checksums are of the whole file, in hex."""

    file: str
    samples: Annotated[int, Meta(ge=1)]
    bytes: Annotated[int, Meta(ge=1)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    crc32c: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]

    def __post_init__(self) -> None:
        path = PurePosixPath(self.file)
        # A manifest may come from elsewhere: its paths must not lead out of the data set.
        if path.is_absolute() or ".." in path.parts or not path.parts or str(path) != self.file:
            raise InputError(f"field file is {render_repr(self.file)}; expected a relative path inside the data set")
        if self.samples > self.bytes:
            raise InputError(
                f"{self.samples:,} samples in {self.bytes:,} bytes; expected a byte or more of each sample"
            )


class Manifest(_Part, frozen=True, kw_only=True, dict=True):
    """The content of a data set. ``generator`` is the recipe of the data, ``attributes`` are for the workload.

    What is computed of all shards is computed once: loops over them ask for it (``dict=True`` keeps it).
    """

    version: Literal[1] = MANIFEST_VERSION
    workload: FolderName
    size: FolderName
    seed: int
    generator: dict[str, Any]
    splits: dict[str, tuple[ShardEntry, ...]]
    attributes: dict[str, Any] = {}

    def text(self) -> str:
        """Render the manifest as `write_manifest` writes it."""
        return json.dumps(convert_to_plain_data(self), indent=1) + "\n"

    @cached_property
    def sha256(self) -> str:
        """Checksum of the manifest file, in hex.

        It identifies the data set, because the manifest has all checksums.
        """
        # Of the rendered text, so that an edit of white space in the file changes nothing.
        return hashlib.sha256(self.text().encode()).hexdigest()

    @cached_property
    def shards(self) -> tuple[ShardEntry, ...]:
        """The shards of all splits, in order."""
        return tuple(entry for entries in self.splits.values() for entry in entries)

    @cached_property
    def bytes(self) -> int:
        """Size of all shards together."""
        return sum(entry.bytes for entry in self.shards)

    def samples(self, split: str) -> int:
        """Return the number of samples of one split."""
        return sum(entry.samples for entry in self.splits[split])


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` atomically. Write it last: from then on the data set counts as complete."""
    write_file_atomically(root / MANIFEST_NAME, manifest.text())
    # The name itself, too: after a crash a data set must not be complete without its manifest.
    fsync_path(root)


def read_manifest(root: Path) -> Manifest:
    """Read ``manifest.json``. InputError names the file, what was expected and what is there instead."""
    path = root / MANIFEST_NAME
    if not path.exists():
        reason = "the folder does not exist" if not root.exists() else "an incomplete data set or none"
        if (root / UNFINISHED_NAME).exists():
            reason = "an unfinished data set; the command that began it (mlhpc data generate) goes on with it"
        raise InputError(f"{path}: the manifest of the data set cannot be read: {reason}")
    return read_manifest_file(path)


def read_manifest_file(path: Path) -> Manifest:
    """Read a manifest, or the copy of one in a run folder. InputError names what was expected and what is there."""
    manifest = read_json_document(path, Manifest, "a manifest", MANIFEST_VERSION)
    files = Counter(entry.file for entry in manifest.shards)
    if twice := [file for file, count in files.items() if count > 1]:
        raise InputError(f"{path}: names {twice[0]} {files[twice[0]]} times; expected each shard once")
    return manifest


def compare_files(
    root: Path,
    *,
    deep: bool,
    read: Callable[[Path, int], object] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Compare the files of a data set with its manifest. Returns one line per file that differs or cannot be judged.

    Presence, sizes and the right to read are looked at; with ``deep`` checksums are compared too. Whole shards are
    given to ``read`` with their number of samples; it raises ValueError. ``progress`` gets the size of each shard.
    """
    try:
        manifest = read_manifest(root)
    except ValueError as error:
        return [str(error)]
    problems = []
    for entry in manifest.shards:
        problem = check_shard(root, entry, deep=deep)
        if problem is None and read is not None:
            try:
                read(root / entry.file, entry.samples)
            except ValueError as error:  # with right checksums: whoever made the manifest wrote it so
                problem = str(error)
        if problem is not None:
            problems.append(problem)
        if progress is not None:
            progress(entry.bytes)
    known = {entry.file for entry in manifest.shards}
    found = sorted(path.relative_to(root).as_posix() for path in root.glob("*/*.h5"))
    return problems + [f"{root / name}: a shard that the manifest does not name" for name in found if name not in known]


def check_shard(root: Path, entry: ShardEntry, *, deep: bool) -> str | None:
    """Return in one line how a shard differs from its entry: missing, truncated, with ``deep`` damaged. None if not."""
    path = root / entry.file
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            return f"{path}: {_KINDS.get(stat.S_IFMT(state.st_mode), 'a device')} lies there; expected a file"
        size = state.st_size
        if size != entry.bytes:
            difference = "truncated" if size < entry.bytes else "too long"
            return f"{path}: {difference}: {size} bytes, manifest says {entry.bytes}"
        if not os.access(path, os.R_OK):  # the size alone would call it fine
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if not deep:
            return None
        sha256, crc32c = compute_checksums(path)
    except FileNotFoundError:
        return f"{path}: a link to nothing" if path.is_symlink() else f"{path}: missing"
    except OSError as error:
        return f"{path}: {_explain_unread(error)}"
    for name, actual, expected in (("crc32c", crc32c, entry.crc32c), ("sha256", sha256, entry.sha256)):
        if actual != expected:
            return f"{path}: damaged: {name} {actual[:16]}, manifest says {expected[:16]}"
    return None


def _explain_unread(error: OSError) -> str:
    """Explain that a file cannot be read. Without the right to read it nothing is known of its content."""
    if isinstance(error, PermissionError):
        return f"{NOT_JUDGED}: {render_reason(error)}; ask for read permission"
    return f"cannot be read: {error.strerror}"


NOT_JUDGED = "cannot be judged"  # for want of the right to read
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def compute_checksums(path: Path) -> tuple[str, str]:
    """Compute sha256 and crc32c of a file, in hex."""
    import google_crc32c  # of the extra `run`: a manifest can be read without it

    # Staging checks the crc32c, which is fast; the sha256 is safe against forgery.
    sha256, crc = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            sha256.update(block)
            crc = google_crc32c.extend(crc, block)
    return sha256.hexdigest(), f"{crc:08x}"


READ_BYTES = 256 << 10  # stays in the second-level cache between the read and the checksum


@dataclass(frozen=True)
class Verification:
    """The bytes and files that all ranks compared, and the seconds of the slowest rank."""

    bytes: int
    files: int
    seconds: float

    def value(self) -> dict[str, Any]:
        """Return the value of the ``data_verified`` event."""
        return asdict(self) | {"gb_per_s": self.bytes / self.seconds / 1e9}


def verify_shards(
    root: Path, shards: Sequence[ShardEntry], world: World, tick: Callable[[], None] = lambda: None
) -> Verification:
    """Compare the crc32c of every shard with its entry. All ranks call it, each reads its share.

    InputError, the same on every rank, names a shard that is missing, damaged or of another size. ``tick`` is called
    after every block read.
    """
    begin = time.monotonic()
    problem = None
    for entry in shards[world.rank :: world.size]:
        problem = check_crc32c(root, entry, tick)
        if problem is not None:
            break
    # The first damaged shard ends a rank's work: the data set cannot be used in any case.
    world.check_together(None if problem is None else InputError(problem))
    seconds = max(world.allgather(time.monotonic() - begin))
    return Verification(sum(entry.bytes for entry in shards), len(shards), seconds)


def check_crc32c(root: Path, entry: ShardEntry, tick: Callable[[], None] = lambda: None) -> str | None:
    """Return in one line how a shard differs from its entry: missing, of another size, damaged. None if not."""
    problem = check_shard(root, entry, deep=False)
    if problem is not None:
        return problem
    import google_crc32c  # of the extra `run`, as numpy
    import numpy as np

    path = root / entry.file
    block, crc = np.empty(READ_BYTES, np.uint8), 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block.data):
                crc = google_crc32c.extend(crc, block[:count])
                tick()
    except OSError as error:
        return f"{path}: {_explain_unread(error)}"
    if f"{crc:08x}" != entry.crc32c:
        return f"{path}: damaged: crc32c {crc:08x}, manifest says {entry.crc32c}"
    return None


def compute_fingerprint(root: Path, world: World, tick: Callable[[], None] = lambda: None) -> tuple[str, Verification]:
    """Read all files of a data set. Return its sha256 in hex, and the bytes and files read.

    All ranks call it, each reads its share. Sharded data are compared with their manifest, whose sha256 is returned.
    InputError, the same on every rank, if there is no file, or one cannot be read or is damaged.
    """
    found, error = None, None
    if world.is_first:
        try:
            found = read_manifest(root) if (root / MANIFEST_NAME).is_file() else list_files(root)
        except (OSError, ValueError) as caught:
            error = InputError(str(caught))
    world.check_together(error)
    found = world.broadcast(found)
    if isinstance(found, list):
        return _digest_files(root if root.is_dir() else root.parent, found, world, tick)
    manifest: Manifest = convert(found, Manifest)
    return manifest.sha256, verify_shards(root, manifest.shards, world, tick)


def list_files(root: Path) -> list[str]:
    """List the files below a folder, or the one file, relative, in byte order. InputError if there is none."""
    if root.is_file():
        return [root.name]
    below = [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
    # By bytes, as `LC_ALL=C sort` does: the order of a locale differs between machines.
    files = sorted((path.relative_to(root).as_posix() for path in below if path.is_file()), key=os.fsencode)
    if not files:
        raise InputError(f"{root}: no data found; expected a file, or a folder with at least one file")
    return files


def _digest_files(root: Path, files: list[str], world: World, tick: Callable[[], None]) -> tuple[str, Verification]:
    begin, lines, error, size = time.monotonic(), {}, None, 0
    try:
        for name in files[world.rank :: world.size]:
            lines[name] = compute_checksums(root / name)[0]
            size += (root / name).stat().st_size
            tick()
    except OSError as caught:
        error = InputError(f"{caught.filename}: cannot be read: {caught.strerror}")
    world.check_together(error)
    # The digests of all files on every rank, so that all ranks return the same sha256 without another message.
    parts = world.allgather((lines, size, time.monotonic() - begin))
    known = {name: digest for part, _, _ in parts for name, digest in part.items()}
    text = "".join(f"{known[name]}  {name}\n" for name in files)
    read = Verification(sum(part[1] for part in parts), len(files), max(part[2] for part in parts))
    return hashlib.sha256(os.fsencode(text)).hexdigest(), read
