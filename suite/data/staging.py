"""Copies a sharded data set to node-local storage. Each byte leaves the shared file system once per job.

One node reads a shard. It broadcasts it to the ranks with the same local rank on the other nodes. The schedule follows
from the manifest and the missing shards. So all ranks make the same collective calls. An error waits for the check at
the end of the round, which raises it on every rank. A shard gets its name only after its checksum is verified and its
bytes are on the disk. The manifest is written last. So a file under its final name is complete.

Makes the folder of a staged copy on a node. Only its owner can write into it; part files of killed jobs go.

Its name is predictable, and in many node-local storages everybody may write. Another user could have put a folder or a
link there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    check_crc32c,
    check_shard,
    read_manifest,
    write_manifest,
)
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import check_ownership, fsync_path, render_reason, verify_folder
from mlhpc.suite.transport import decode, encode
from mlhpc.suite.world import World

SPARE_BYTES = 64 << 20  # must remain free on the node
PRIVATE = 0o700
# A writer writes every few milliseconds: a file that was not written for so long has none.
SILENT_S = 180.0
_WRITER = re.compile(r"\.(\d+)\.part$")  # the process id in the name of a part file


def make_folders(target: Path, splits: Iterable[str]) -> None:
    """Make the folder of a copy and those of its splits, and remove part files of killed jobs.

    A new folder in a place where everybody may write is for its owner only. InputError if another user could have made,
    or could replace, a folder on the way. That is so if it belongs to neither this user nor root, or everybody may
    rename it.
    """
    _make_trusted(target)
    for split in splits:
        _make_trusted(target / split)
    remove_abandoned(target)


def remove_abandoned(target: Path) -> None:
    """Remove part files whose writer was killed. A living writer holds a lock, or is the process in the file's name.

    Where files cannot be locked, a file that was written a moment ago stays too.
    """
    check_ownership()
    for part in target.rglob("*.part"):
        with suppress(FileNotFoundError, BlockingIOError):
            file = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                locked = _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                written = os.fstat(file).st_mtime
                if not _is_being_written(part, written) and (locked or time.time() - written > SILENT_S):
                    part.unlink()
            finally:
                os.close(file)


def _lock(file: int, how: int) -> bool:
    """Lock a file. False if the file system has no locks. BlockingIOError if another process holds the lock."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def check_space(target: Path, needed: int, node: str) -> None:
    """Raise InputError unless the disk of the folder has the needed bytes free, and some to spare."""
    disk = os.statvfs(target)
    free = disk.f_bavail * disk.f_frsize
    if free < needed + SPARE_BYTES:
        raise InputError(
            f"{target} on node {node}: no space to stage: needs {needed / 2**30:.2f} GiB "
            f"and {SPARE_BYTES >> 20} MiB to spare, {free / 2**30:.2f} GiB free"
        )


def create_part(path: Path, size: int) -> int:
    """Create a file of this size that did not exist, through no link, and lock it. Returns its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        file = os.open(path, flags, 0o644)
    except FileExistsError:  # from a killed process with the same process id
        path.unlink()
        file = os.open(path, flags, 0o644)
    with suppress(BlockingIOError):  # of a new file: a file server without locks
        _lock(file, fcntl.LOCK_EX)
    os.posix_fallocate(file, 0, size)  # a full disk is an error here, not in the middle of the copy
    return file


def _make_trusted(folder: Path) -> None:
    """Make a folder and those above it, each checked before the next is made in it."""
    path = folder.absolute()
    for place in [*reversed(path.parents), path][1:]:
        above = place.parent.stat()
        public = bool(above.st_mode & stat.S_IWOTH)
        try:
            place.mkdir(PRIVATE if public else 0o777)
        except FileExistsError as error:
            if not os.path.lexists(place):  # made by another node a moment ago
                verify_folder(place, error)
        found = place.lstat()  # not stat: a link of another user must not pass for his folder
        if public:
            _check_owner(place, found, above)
        if not stat.S_ISDIR(place.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise InputError(
            f"{folder}: everybody may write into this folder; "
            "make it yours with chmod 700, or choose another staging.directory"
        )


def _check_owner(place: Path, found: os.stat_result, above: os.stat_result) -> None:
    if found.st_uid not in {0, os.geteuid()}:
        kind = "link" if stat.S_ISLNK(found.st_mode) else "folder"
        raise InputError(
            f"{place}: this {kind} belongs to user {found.st_uid} and lies where everybody may write; "
            "choose another staging.directory"
        )
    if not above.st_mode & stat.S_ISVTX:
        raise InputError(
            f"{place.parent}: everybody may write here and rename what others made (no sticky bit); "
            "choose another staging.directory"
        )


def _is_being_written(part: Path, written: float) -> bool:
    """Return True if the process in the file's name lives and is not younger than the file."""
    match = _WRITER.search(part.name)
    if match is None:
        return False
    try:
        return Path("/proc", match[1]).stat().st_mtime <= written
    except OSError:
        return False


# Small enough to stay in the cache between read and write.
BLOCK_BYTES = 1 << 20
# Longer writes made ext4 use larger folios, and cost 3 times the CPU time on a virtual machine.
WRITE_BYTES = 256 << 10
BUFFERS = 4  # blocks in flight between two stages of the pipeline
# Blocks of each reading node between two checks for errors on any rank. A check is a collective, so not every block.
ROUND_BLOCKS = 16


@dataclass(frozen=True)
class StagingReport:
    """The result of staging. ``bytes`` and ``files`` count each copied shard once, for any number of nodes.

    ``damaged`` counts shards of an earlier staging with wrong checksums, on all nodes. They were copied again.
    """

    root: Path
    manifest: Manifest
    bytes: int
    seconds: float
    files: int
    nodes: int
    reused: bool
    read_bytes_per_node: tuple[int, ...]
    damaged: int

    def stats(self, *, overlapped: bool) -> dict[str, Any]:
        """Return the value of the ``staging_stats`` event. ``gb_per_s`` is the rate at which one node received data."""
        return {
            "bytes": self.bytes,
            "seconds": self.seconds,
            "gb_per_s": self.bytes / self.seconds / 1e9,
            "files": self.files,
            "nodes": self.nodes,
            "reused": self.reused,
            "overlapped": overlapped,
            "damaged": self.damaged,
            "read_bytes_per_node": {
                "min": min(self.read_bytes_per_node),
                "median": float(np.median(self.read_bytes_per_node)),
                "max": max(self.read_bytes_per_node),
            },
        }


def create_own_world(world: World) -> World:
    """Copy a world with new communicators, for staging in a thread while training uses the old ones.

    All ranks call it.
    """
    return replace(world, transport=world.transport.split(0), peers=world.transport.split(world.local_rank))


def find_staged_root(directory: Path, manifest: Manifest, node: str) -> Path:
    """Return the folder of a node's staged data set. ``{node}`` in the directory becomes the node's name."""
    return Path(str(directory).replace("{node}", node)) / manifest.sha256[:16]


def stage(
    source: Path, directory: Path, world: World, *, verify: bool = True, block_bytes: int = BLOCK_BYTES
) -> StagingReport:
    """Copy the data set under ``source`` to ``find_staged_root(directory, …)`` on every node. All ranks call it.

    Complete shards of an earlier staging stay; with ``verify`` only if their checksums are right. InputError, the same
    on every rank, if the source is damaged, a node lacks space or a copy fails. A thread must call it with the world of
    `create_own_world`.
    """
    begin = time.monotonic()
    manifest = _read_manifest(source, world)
    target = find_staged_root(directory, manifest, world.node_names[world.node])
    missing, damaged = _prepare(target, manifest, world, verify=verify)
    # A shard that one node lacks is broadcast to all: nodes that have it drop the blocks.
    todo = sorted(set().union(*missing))
    read_bytes = 0
    if todo:
        plan = plan_reads(todo, lanes=min(world.allgather(world.local_size)), nodes=world.nodes)
        read_bytes = _copy_shards(source, target, manifest, plan, frozenset(missing[world.node]), world, block_bytes)
        _run_on_each_node(world, target, lambda: _write_final_manifest(target, manifest))
    per_node = [0] * world.nodes
    for node, amount in world.allgather((world.node, read_bytes)):
        per_node[node] += amount
    return StagingReport(
        root=target,
        manifest=manifest,
        bytes=sum(manifest.shards[number].bytes for number in todo),
        seconds=max(world.allgather(time.monotonic() - begin)),
        files=len(todo),
        nodes=world.nodes,
        reused=not todo,
        read_bytes_per_node=tuple(per_node),
        damaged=damaged,
    )


@dataclass(frozen=True)
class Block:
    """A part of one shard; ``shard`` is the shard's position in `Manifest.shards`."""

    shard: int
    offset: int
    size: int
    last: bool


def plan_reads(todo: Sequence[int], *, lanes: int, nodes: int) -> list[list[Sequence[int]]]:
    """Return the shards that each rank reads, in order: ``[local rank][node]``."""
    # A lane is one local rank; its nodes send in turn.
    return [[todo[lane::lanes][node::nodes] for node in range(nodes)] for lane in range(lanes)]


def list_blocks(shards: Sequence[ShardEntry], numbers: Sequence[int], block_bytes: int) -> Iterator[Block]:
    """Yield the blocks of the shards ``numbers``, in order."""
    for number in numbers:
        size = shards[number].bytes
        for offset in range(0, size, block_bytes):
            yield Block(number, offset, min(block_bytes, size - offset), offset + block_bytes >= size)


def count_rounds(shards: Sequence[ShardEntry], plan: Sequence[Sequence[Sequence[int]]], block_bytes: int) -> int:
    """Count the rounds of the node with the most blocks in any lane. Every rank makes as many."""
    longest = 0
    for lane in plan:
        for numbers in lane:
            longest = max(longest, sum(-(-shards[number].bytes // block_bytes) for number in numbers))
    return -(-longest // ROUND_BLOCKS)


def merge_blocks(streams: Sequence[Iterator[Block]]) -> Iterator[tuple[int, Block]]:
    """Yield the next round of a lane as (sending node, block).

    It has one block of every node first, then the second of every node, and so on.
    """
    for _ in range(ROUND_BLOCKS):
        for node, stream in enumerate(streams):
            block = next(stream, None)
            if block is not None:
                yield node, block


def _read_manifest(source: Path, world: World) -> Manifest:
    """Read the manifest on rank 0 and send it to every rank."""
    manifest, error = None, None
    if world.is_first:
        try:
            manifest = read_manifest(source)
        except ValueError as problem:
            error = problem
    world.check_together(error)
    return world.broadcast(manifest, Manifest)  # type: ignore[no-any-return]


def _prepare(target: Path, manifest: Manifest, world: World, *, verify: bool) -> tuple[list[list[int]], int]:
    """Prepare the folder on every node; check free space.

    Returns the shards that each node lacks, and how many of them are damaged rather than missing.
    """
    _run_on_each_node(world, target, lambda: make_folders(target, manifest.splits))
    lacks: list[int] = []
    damaged, error = 0, None
    try:
        for number in range(world.local_rank, len(manifest.shards), world.local_size):
            entry = manifest.shards[number]
            complete = check_shard(target, entry, deep=False) is None
            intact = complete and (not verify or check_crc32c(target, entry) is None)
            damaged += complete and not intact
            lacks += [] if intact else [number]
    except OSError as problem:
        error = _add_file_name(problem, target)
    world.check_together(error)
    missing: list[list[int]] = [[] for _ in range(world.nodes)]
    total = 0
    for node, numbers, count in world.allgather((world.node, lacks, damaged)):
        missing[node] = sorted(missing[node] + numbers)
        total += count
    needed = sum(manifest.shards[number].bytes for number in missing[world.node])
    _run_on_each_node(world, target, lambda: _open_copy(target, manifest, needed, world))
    return missing, total


def _run_on_each_node(world: World, target: Path, do: Callable[[], None]) -> None:
    """Do something on one rank of every node; an error is raised on all ranks."""
    error: Exception | None = None
    if world.local_rank == 0:
        try:
            do()
        except (OSError, ValueError) as problem:
            error = _add_file_name(problem, target)
    world.check_together(error)


def _open_copy(target: Path, manifest: Manifest, needed: int, world: World) -> None:
    """Remove the manifest, the sign of completeness, if shards are missing; else write it."""
    check_ownership()
    if needed:
        (target / MANIFEST_NAME).unlink(missing_ok=True)
        check_space(target, needed, world.node_names[world.node])
    elif not (target / MANIFEST_NAME).exists():
        write_manifest(target, manifest)


def _copy_shards(
    source: Path,
    target: Path,
    manifest: Manifest,
    plan: Sequence[Sequence[Sequence[int]]],
    wanted: frozenset[int],
    world: World,
    block_bytes: int,
) -> int:
    """Copy the shards of the plan. Returns the bytes that this rank read. Ranks without a lane only join the checks."""
    # Numbers of shards in the plan are positions in this list.
    shards = manifest.shards
    lane = plan[world.local_rank] if world.local_rank < len(plan) else [()] * world.nodes
    streams = [list_blocks(shards, numbers, block_bytes) for numbers in lane]
    root_of = {decode(node): rank for rank, node in enumerate(world.peers.allgather(encode(world.node)))}
    reader = _Reader(source, manifest, list_blocks(shards, lane[world.node], block_bytes), block_bytes)
    writer = _Writer(source, target, manifest, world.node_names[world.node])
    received = _make_buffers(block_bytes)
    try:
        # Every rank makes the same broadcasts in the same order, also for blocks that its node has already.
        for _ in range(count_rounds(shards, plan, block_bytes)):
            for node, block in merge_blocks(streams):
                here = node == world.node
                buffer = reader.ready.get() if here else received.get()
                world.peers.broadcast_buffer(buffer[: block.size], root_of[node])
                home = reader.pool if here else received
                if block.shard in wanted:
                    writer.put(block, buffer, home)
                else:
                    home.put(buffer)
            world.check_together(reader.error or writer.error)  # once a round: a check is a collective call itself
    finally:
        reader.close()
        writer.close()
    world.check_together(writer.error)  # the last blocks were still in the writer's queue
    return reader.bytes


def _write_final_manifest(target: Path, manifest: Manifest) -> None:
    """Force the names of all shards to the disk and write the manifest."""
    for split in manifest.splits:
        fsync_path(target / split)
    write_manifest(target, manifest)


_Buffer = NDArray[np.uint8]
_BufferQueue = queue.SimpleQueue[_Buffer]


def _make_buffers(block_bytes: int) -> _BufferQueue:
    pool: _BufferQueue = queue.SimpleQueue()
    for _ in range(BUFFERS):
        pool.put(np.empty(block_bytes, np.uint8))
    return pool


class _Reader:
    """Reads this rank's blocks ahead in a thread.

    After an error it still delivers a buffer for every block, with undefined content: other ranks expect the broadcast.
    """

    def __init__(self, source: Path, manifest: Manifest, blocks: Iterator[Block], block_bytes: int) -> None:
        self.error: Exception | None = None
        self.bytes = 0
        self.pool = _make_buffers(block_bytes)
        self.ready: _BufferQueue = queue.SimpleQueue()
        self._source, self._manifest, self._blocks = source, manifest, blocks
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="staging-read", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self.pool.put(np.empty(0, np.uint8))  # wakes the thread
        self._thread.join()

    def _run(self) -> None:
        file = -1
        try:
            for block in self._blocks:
                buffer = self.pool.get()
                if self._closed:
                    return
                if self.error is None:
                    try:
                        if block.offset == 0:
                            file = self._open(block.shard)
                        _fill(file, buffer[: block.size], block.offset)
                        self.bytes += block.size
                        if block.last:
                            os.close(file)
                            file = -1
                    except Exception as problem:  # raised on every rank by the next check
                        self.error = _add_file_name(problem, self._path(block.shard))
                self.ready.put(buffer)
        finally:
            if file >= 0:
                os.close(file)

    def _path(self, shard: int) -> Path:
        return self._source / self._manifest.shards[shard].file

    def _open(self, shard: int) -> int:
        file = os.open(self._path(shard), os.O_RDONLY)
        size, wanted = os.fstat(file).st_size, self._manifest.shards[shard].bytes
        if size != wanted:
            os.close(file)
            raise InputError(f"{self._path(shard)}: has {size} bytes; expected {wanted} by the manifest")
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the kernel's read-ahead
        return file


def _fill(file: int, buffer: _Buffer, offset: int) -> None:
    view = buffer.data
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:  # the end of the file, although its size was right when it was opened
            raise OSError(errno.EIO, "became shorter while it was read")
        view, offset = view[count:], offset + count


@dataclass
class _OpenShard:
    """A shard that is being written under a temporary name. Its file is locked while the writer lives."""

    path: Path
    file: int
    crc: int = 0


class _Writer:
    """Writes blocks and computes checksums in a thread. Another thread forces complete shards to the disk."""

    def __init__(self, source: Path, target: Path, manifest: Manifest, node: str) -> None:
        self.error: Exception | None = None
        self._source, self._target, self._manifest = source, target, manifest
        self._node, self._tag = node, f".{node}.{os.getpid()}.part"
        self._parts: dict[int, _OpenShard] = {}
        self._queue: queue.SimpleQueue[tuple[Block, _Buffer, _BufferQueue] | None] = queue.SimpleQueue()
        self._finisher = ThreadPoolExecutor(1, "staging-sync")
        self._finished: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="staging-write", daemon=True)
        self._thread.start()

    def put(self, block: Block, buffer: _Buffer, pool: _BufferQueue) -> None:
        """Write the block, then return the buffer to its pool. Does not wait."""
        self._queue.put((block, buffer, pool))

    def close(self) -> None:
        """Wait until all blocks are written, then remove unfinished shards."""
        self._queue.put(None)
        self._thread.join()
        self._finisher.shutdown()
        for future in self._finished:
            self.error = self.error or future.exception()  # type: ignore[assignment]
        for part in self._parts.values():
            part.path.unlink(missing_ok=True)
            os.close(part.file)

    def _run(self) -> None:
        for block, buffer, pool in iter(self._queue.get, None):
            if self.error is None:
                try:
                    self._write(block, buffer[: block.size])
                except Exception as problem:  # raised on every rank by the next check
                    self.error = _add_file_name(problem, self._target / self._manifest.shards[block.shard].file)
            pool.put(buffer)

    def _write(self, block: Block, buffer: _Buffer) -> None:
        entry = self._manifest.shards[block.shard]
        if block.offset == 0:
            path = self._target / (entry.file + self._tag)
            self._parts[block.shard] = _OpenShard(path, create_part(path, entry.bytes))
        part = self._parts[block.shard]
        part.crc = google_crc32c.extend(part.crc, buffer)
        view, offset = buffer.data, block.offset
        while view:
            count = os.pwrite(part.file, view[:WRITE_BYTES], offset)
            view, offset = view[count:], offset + count
        if block.last:
            # The checksum covers the read, the broadcast and the buffers.
            if f"{part.crc:08x}" != entry.crc32c:
                raise InputError(
                    f"{self._source / entry.file}: damaged on the way to node {self._node}: crc32c {part.crc:08x}; "
                    f"expected {entry.crc32c} by the manifest"
                )
            del self._parts[block.shard]
            self._finished.append(self._finisher.submit(self._finish, part, self._target / entry.file))

    def _finish(self, part: _OpenShard, path: Path) -> None:
        try:
            os.fsync(part.file)  # before the rename: after a crash the final name must not show an empty file
            check_ownership()
            if not os.fstat(part.file).st_nlink:
                raise InputError(f"{path}: another job removed its part file while this one was suspended; begin again")
            part.path.replace(path)
        except OSError as problem:
            part.path.unlink(missing_ok=True)
            raise _add_file_name(problem, path) from None
        finally:
            os.close(part.file)


def _add_file_name(problem: Exception, path: Path) -> Exception:
    """Turn an OSError into an InputError that names its file; other errors name theirs already."""
    if isinstance(problem, OSError):
        return InputError(f"{problem.filename or path}: {render_reason(problem)}")
    return problem
