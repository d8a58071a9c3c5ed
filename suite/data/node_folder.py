"""Makes the folder of a staged copy on a node. Only its owner can write into it; part files of killed jobs go.

Its name is predictable, and in many node-local storages everybody may write. Another user could have put a folder or a
link there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import verify_folder

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
