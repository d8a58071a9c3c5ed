"""Locks a trial or a data set for one owner. Works on any file system that hosts share, also Lustre and NFS.

The lock is a small file that names its owner. link(2) makes it: that fails if the name is taken, and needs no lock
daemon. The living owner refreshes its time stamp. Another process may take over the lock once its owner is
gone.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from msgspec import DecodeError, Struct, json

from mlhpc.suite.documents import render_json
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import (
    PART_SUFFIX,
    TrackedFolder,
    add_path_to_errors,
    create_hard_link,
    make_folder,
    ownership,
    print_line,
    read_bytes,
    render_duration,
    render_error,
    render_reason,
)
from mlhpc.suite.launcher import RESTART_VARIABLES, find_batch_job
from mlhpc.suite.processes import read_start_time
from mlhpc.suite.world import World, find_node_name

REFRESH_S = 20.0
TICK_S = 1.0  # between two looks at the clock
# A look that comes so much later says that the process was suspended: its clock jumped
JUMP_S = 10.0
# An owner on another host is gone if its lock is older: nine refreshes are missing.
SILENT_S = 180.0
# Taking over a lock takes milliseconds: a process that needs longer was killed.
BREAKING_S = 60.0
TRIES, PAUSE_S = 100, 0.05
LARGEST_LOCK = 2**16  # bytes: names of a host and a job, and a path


suspensions: list[float] = []  # seconds, of this process while it held a lock


class LockedError(InputError):
    """Another living process has a lock, or the lock cannot be made. Nothing that it protects may be written."""


class Owner(Struct, frozen=True, kw_only=True):
    """The process that holds a lock. ``started`` (clock ticks after boot), ``boot`` and ``namespace`` identify it.

    ``place`` is the path of the lock: a copy of its file lies elsewhere.
    """

    token: str
    host: str
    pid: int
    started: int | None
    boot: str
    namespace: str
    job: str | None
    restart: int
    since: str
    place: str = ""

    @staticmethod
    def this_process(environ: Mapping[str, str] = os.environ, place: str = "") -> Owner:
        """Return this process as the owner of a new lock. ``place``: the path of the lock."""
        restart = next((environ[name] for name in RESTART_VARIABLES if name in environ), "0")
        return Owner(
            token=secrets.token_hex(8),
            host=find_node_name(environ),
            pid=os.getpid(),
            started=read_start_time(os.getpid()),
            boot=_read_boot_id(),
            namespace=_read_namespace(),
            job=find_batch_job(environ),
            restart=int(restart) if restart.isdigit() else 0,
            since=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            place=place,
        )

    def is_gone(self, seeker: Owner, silent_s: float) -> bool:
        """Return True if this owner's process has ended, as far as ``seeker`` can know. ``silent_s``: the age of the
        lock.

        On the same kernel, in the same process namespace, the process is looked up. Elsewhere it counts as gone after
        `SILENT_S`, or if the seeker is the same job after a restart.
        """
        if (self.boot, self.namespace) == (seeker.boot, seeker.namespace):
            # Not only the id: the kernel gives the id of an ended process to a new one.
            return read_start_time(self.pid) != self.started
        # A scheduler restarts a job only after it has ended all its processes.
        if self.job is not None and self.job == seeker.job and self.restart < seeker.restart:
            return True
        return silent_s > SILENT_S

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.pid}{job} on {self.host} since {self.since}"


class Lease:
    """A lock that this process holds, until another one takes it over: this host may be frozen for minutes.

    With ``ends`` that ends the process before its next write, so that nothing of the new owner is touched. Without
    ``holds`` another process holds it for this one: a lock that is gone was given back, and the other one speaks.
    """

    def __init__(self, path: Path, owner: Owner, *, ends: bool, holds: bool = True) -> None:
        self._path, self.owner, self._ends, self._holds = path, owner, ends, holds
        self._looked_s, self._due_s, self.lost = _read_clock_s(), REFRESH_S, False
        self._folder = TrackedFolder(path.parent)
        self._seen: os.stat_result | None = path.stat() if holds else None

    def check(self) -> None:
        """Find out whether the lock is still this process's. As long as its file does not change one stat says so."""
        with suppress(OSError):  # a file server that does not answer
            try:
                found = self._path.stat()
            except FileNotFoundError:
                if not self._path.parent.exists():
                    return self._end_without_folder()
                return self._end("was removed, or another process took it over and ended") if self._holds else None
            seen = self._seen
            if self.lost or (seen and (found.st_ino, found.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns)):
                return None
            owner = _read_lock(self._path)[0]
            if owner != self.owner and (self._holds or owner is not None):
                return self._end("was taken over by another process")
            self._seen = found
        return None

    def look(self) -> None:
        """Find out whether this process was suspended, and tell others from time to time that it lives."""
        now_s = _read_clock_s()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if passed_s - TICK_S > JUMP_S:
            suspensions.append(passed_s - TICK_S)
            text = f"this process was suspended for {render_duration(suspensions[-1])}"
            print_line(f"mlhpc: warning: {self._path}: {text}", error=True)
        self._due_s -= passed_s
        if self._due_s > 0.0:
            return
        self._due_s = REFRESH_S
        try:
            self.check()
            if not self.lost:
                os.utime(self._path)
                self._seen = self._path.stat()
        finally:
            self._looked_s = _read_clock_s()  # a file server that hangs suspends nobody

    def _end_without_folder(self) -> None:
        """Say that the folder of the lock has gone, and where it is now, as far as the kernel knows."""
        self._end("", f"{self._path.parent}: {self._folder.describe_loss()}")

    def close(self) -> None:
        """Give back what was kept open of the lock's folder."""
        self._folder.close()

    def _end(self, fate: str, text: str = "") -> None:
        if self.lost:
            return
        self.lost = True
        text = text or f"{self._path}: this lock {fate}"
        if not self._ends:
            print_line(f"mlhpc: warning: {text}", error=True)
            return
        if self._holds:
            print_line(f"mlhpc: {text}; ended here, so that its files are not touched", error=True)
        os._exit(ExitCode.TAKEN_OVER)  # whatever waits to be written must not be; the launcher ends the other ranks


def _read_clock_s() -> float:
    """Return a time that goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@contextmanager
def create_lock(path: Path, what: str, *, ends: bool = False) -> Iterator[Lease]:
    """Hold a lock while the body runs. LockedError names the owner if another living process has it.

    With ``ends`` this process ends before it writes what another one has taken over.
    """
    owner = Owner.this_process(place=str(path.absolute()))
    _acquire(path, owner, what)
    lease = Lease(path, owner, ends=ends)
    # The thread refreshes the lock also while the body computes or waits for other ranks.
    done = threading.Event()
    thread = threading.Thread(target=_refresh, args=(path, lease, done), name="lock", daemon=True)
    thread.start()
    ownership.append(lease.check)
    try:
        yield lease
    finally:
        ownership.remove(lease.check)
        done.set()
        thread.join()
        lease.close()
        if _is_held_by(path, owner):
            path.unlink(missing_ok=True)


@contextmanager
def create_lock_for_all_ranks(path: Path, what: str, world: World) -> Iterator[None]:
    """Hold a lock on rank 0 for all ranks; all call it. LockedError on every rank if another process has it.

    Each rank ends before it writes what another process has taken over.
    """
    error = lease = None
    with ExitStack() as stack:
        if world.is_first:
            try:
                make_folder(path.parent)
                lease = stack.enter_context(create_lock(path, what, ends=True))
            except OSError as caught:
                error = InputError(f"{path}: the lock file cannot be created: {render_reason(caught)}")
            except InputError as caught:
                error = caught
        try:
            world.check_together(error)
        except InputError as caught:
            raise LockedError(str(caught)) from None
        owner = world.broadcast(lease.owner if lease is not None else None, Owner)
        if lease is None:
            watch = Lease(path, owner, ends=True, holds=False)
            ownership.append(watch.check)
            stack.callback(watch.close)
            stack.callback(ownership.remove, watch.check)
        yield


def refuse_held(path: Path, what: str) -> None:
    """Raise LockedError, which names the owner, if another living process has a lock. Writes nothing.

    Another process may take the lock a moment later; to be sure, hold it.
    """
    found, written = _read_lock(path)
    if written is not None:
        _refuse_living(path, what, Owner.this_process(), found, time.time() - written)


def find_living_owner(path: Path) -> Owner | None:
    """Return the process that has a lock. None without a lock, or if its owner is gone. Writes nothing."""
    try:
        found, written = _read_lock(path)
    except OSError:
        return None
    if found is None or written is None or found.is_gone(Owner.this_process(), time.time() - written):
        return None
    return found


def _refuse_living(path: Path, what: str, seeker: Owner, found: Owner | None, silent_s: float) -> None:
    """Raise LockedError if the owner of a lock may live, as far as ``seeker`` can know."""
    if found is not None and not found.is_gone(seeker, silent_s):
        here = str(path.absolute())
        if found.place not in ("", here):
            raise LockedError(
                f"{path}: {found} made this lock as {found.place}; if {path.parent} is a copy, remove this file, else "
                "wait until that process ends"
            )
        # A living owner's refresh would have set it back
        ahead = f" (its time lies {render_duration(-silent_s)} ahead; if that process has ended, remove this file)"
        ahead = ahead if silent_s < -SILENT_S else ""
        raise LockedError(f"{path}: {what} is in use by {found}; wait until it ends, or end it{ahead}")
    if found is None and silent_s <= SILENT_S:
        raise LockedError(
            f"{path}: {what} is in use: its lock is new and names no owner; if no process uses it, remove this file"
        )


def _acquire(path: Path, owner: Owner, what: str) -> None:
    for _ in range(TRIES):
        # The age of a lock is measured by the file server's clock; the host's may differ by minutes.
        now = _create_file(path, owner)
        if now is None:
            return
        found, written = _read_lock(path)
        if written is None:
            continue  # released meanwhile
        _refuse_living(path, what, owner, found, now - written)
        _remove_lock(path, owner, found)
    raise LockedError(
        f"{path}: {what} is in use: other processes took this lock {TRIES} times in a row; try again later"
    )


def _create_file(path: Path, owner: Owner) -> float | None:
    """Make the lock. None if that succeeded; if the lock exists, the time by the file system's clock."""
    own = path.with_name(f".{path.name}.{owner.token}{PART_SUFFIX}")
    try:
        with add_path_to_errors(path, own), own.open("x", encoding="utf-8") as file:
            file.write(render_json(owner) + "\n")
            file.flush()
            os.fsync(file.fileno())
        now = own.stat().st_mtime  # the file server's clock, by which the age of the lock is measured
        try:
            create_hard_link(own, path)
        except FileExistsError:
            return now
        except FileNotFoundError:  # the owner of the lock removed our file together with other part files
            return now
        except OSError:  # a file system without hard links
            with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(render_json(owner) + "\n")
                return None
            return now
        return None
    finally:
        own.unlink(missing_ok=True)


def _remove_lock(path: Path, owner: Owner, gone: Owner | None) -> None:
    """Remove the lock of an owner that is gone."""
    # One process at a time does so, under a lock of its own: a second one could remove the lock of the next owner.
    breaker = path.with_name(f".{path.name}.break{PART_SUFFIX}")
    now = _create_file(breaker, owner)
    if now is None:
        try:
            found, written = _read_lock(path)
            if written is not None and found == gone:
                path.unlink(missing_ok=True)
        finally:
            breaker.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        if now - breaker.stat().st_mtime > BREAKING_S:
            breaker.unlink()
    time.sleep(PAUSE_S)


def _read_lock(path: Path) -> tuple[Owner | None, float | None]:
    """Return the owner that a lock names, and the time of its last refresh. None for what does not exist.

    OSError if no file lies there: a stranger's pipe would be waited for, and a link leads elsewhere.
    """
    try:
        state = path.lstat()
        written = state.st_mtime
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "a lock is a file, and something else lies in its place: remove it", str(path))
        return json.decode(read_bytes(path, LARGEST_LOCK), type=Owner), written
    except FileNotFoundError:
        return None, None
    except (DecodeError, UnicodeDecodeError):
        return None, written


def _is_held_by(path: Path, owner: Owner) -> bool:
    try:
        return _read_lock(path)[0] == owner
    except OSError:
        return False


def _refresh(path: Path, lease: Lease, done: threading.Event) -> None:
    while not (done.wait(TICK_S) or lease.lost):
        try:
            lease.look()
        except OSError as error:
            print_line(f"mlhpc: warning: {render_error(error)}: the lock is not refreshed", error=True)


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return find_node_name()


def _read_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
