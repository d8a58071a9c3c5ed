"""Reads and writes files. A write is atomic; an unreadable file is an InputError of one line."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

from mlhpc.suite.errors import InputError

PART_SUFFIX = ".part"  # of a file that is being written, in the folder of the whole one
VERBOSE = "MLHPC_VERBOSE"  # environment variable: print each event of a log too (--verbose)
QUIET = "MLHPC_QUIET"  # environment variable: print results and errors, no progress (--quiet)


ownership: list[Callable[[], None]] = []  # checks that this process still holds its locks (mlhpc.suite.data.lock)


def check_ownership() -> None:
    """End this process if another one took over what it is about to write. Called before each write of a run."""
    for check in ownership:
        check()


@contextmanager
def write_atomically(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to. When the body ends, force that file to the disk and rename it to ``path``.

    Readers see the old file or the new one, never a part. The temporary path is in the same folder. It contains node
    and process id, so two writers never share one. If the body raises, the temporary file is removed and ``path`` is
    not touched. Missing folders are made. With ``overwrite`` false, FileExistsError if ``path`` exists at the end.

    A symbolic link stays, and the file it names is written. ``path`` may be a pipe, a device or an open file, such as
    /dev/stdout. Then the content is written into it when the body ends. An OSError names ``path``, never the temporary
    file.
    """
    check_ownership()
    with add_path_to_errors(path):
        if (number := _find_descriptor(path)) is not None or _is_special(path):
            with _write_into(path, number) as part:
                yield part
            return
        # A rename onto the link would replace the link.
        final = Path(os.path.realpath(path)) if path.is_symlink() else path
        make_folder(final.parent)
    part = final.with_name(f".{final.name}.{os.uname().nodename}.{os.getpid()}{PART_SUFFIX}")
    try:
        with add_path_to_errors(path, part):
            yield part
            # Without it a crash after the rename can leave an empty file under the final name.
            fsync_path(part)
            check_ownership()  # the body may have taken long
            if overwrite:
                part.replace(final)
            else:
                _rename_to_new(part, final)
    finally:
        part.unlink(missing_ok=True)


def write_file_atomically(path: Path, content: str | bytes, *, overwrite: bool = True) -> None:
    """Write a file with `write_atomically`, as UTF-8.

    A surrogate, which UTF-8 cannot encode, becomes a question mark.
    """
    with write_atomically(path, overwrite=overwrite) as part:
        part.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def write_file_of_folder(path: Path, content: str | bytes, *, overwrite: bool = True) -> None:
    """Write a file whose name no person typed into an output folder. A link there is not followed: InputError."""
    refuse_link(path)
    write_file_atomically(path, content, overwrite=overwrite)


def refuse_link(path: Path) -> None:
    """Raise InputError if a link lies where a command writes by itself: it may lead to any file of the user."""
    if path.is_symlink():
        raise InputError(f"{path}: is a link, which is not followed; remove it, or choose another folder with -o")


def _find_descriptor(path: Path) -> int | None:
    """Return the number of this process's open file that a path means: 1 for /dev/stdout. None for other paths."""
    own = os.path.realpath("/proc/self/fd")
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return None
        folder = os.path.realpath(path.parent)
        if folder == own and path.name.isdecimal():
            return int(path.name)
        path = Path(folder, path.readlink())
    return None


_MOST_LINKS = 40  # that Linux follows


def _is_special(path: Path) -> bool:
    """Return True for a pipe, a device or a socket. OSError for a link that leads to itself."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextmanager
def _write_into(path: Path, number: int | None) -> Iterator[Path]:
    """Yield a temporary path. At the end, write its content into an open file, or into a pipe or device."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-") as folder:
        part = Path(folder, path.name)
        with add_path_to_errors(path, part):
            yield part
            # A descriptor of its own would begin at the start of a file that standard output goes to.
            target = os.open(path, os.O_WRONLY | os.O_NOCTTY) if number is None else os.dup(number)
            with os.fdopen(target, "wb") as file, part.open("rb") as content:
                shutil.copyfileobj(content, file)


def _rename_to_new(part: Path, path: Path) -> None:
    """Rename ``part``. FileExistsError if ``path`` exists."""
    try:
        create_hard_link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        part.rename(path)


def create_hard_link(part: Path, path: Path) -> None:
    """Give a file a second name. FileExistsError if that is taken; this holds on all hosts at once."""
    try:
        os.link(part, path)
    except FileExistsError:
        # NFS may answer so when it repeats a request whose answer was lost: then the link is ours.
        if not path.exists() or not path.samefile(part):
            raise


@contextmanager
def add_path_to_errors(path: Path, hidden: Path | None = None) -> Iterator[None]:
    """Name ``path`` in an OSError of the body that names no file, or names ``hidden``.

    Below ``hidden``, a folder that a person never sees, the same place below ``path`` is named.
    """
    try:
        yield
    except OSError as error:
        named = _find_failed_file(error)
        if named is None:
            error.filename = str(path)
        elif hidden is not None and Path(named).is_relative_to(hidden):
            error.filename = str(path / Path(named).relative_to(hidden))
        else:
            error.filename = named
        # Python would show both names, as a -> b.
        del error.filename2
        error.strerror = render_reason(error, path)  # now: a part that is removed may free what was missing
        raise


def _find_failed_file(error: OSError) -> str | None:
    """Return the file that an error is about. shutil names a copy's source first, but the target is full."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    named = error.filename2 if full and error.filename2 else error.filename
    return os.fsdecode(named) if isinstance(named, str | bytes | os.PathLike) else None


def make_folder(path: Path) -> None:
    """Make a folder and its parents unless they exist. Follows a link to a place that does not exist yet.

    OSError if it cannot be opened at the end. The answers of mkdir and stat do not count. On a shared file system mkdir
    may find another node's folder before stat does.
    """
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    try:
        _make_single_folder(place)
    except FileNotFoundError:
        if place.parent == place:
            raise
        make_folder(place.parent)
        _make_single_folder(place)


class TrackedFolder:
    """A folder that is kept open, so that the kernel knows where it is after a rename."""

    def __init__(self, path: Path) -> None:
        self._number: int | None = None
        with suppress(OSError):
            self._number = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def find(self) -> Path | None:
        """Return where the folder is now. None if it was removed, or if this cannot be known."""
        with suppress(OSError):
            place = Path(f"/proc/self/fd/{self._number}").readlink()
            return place if place.is_dir() else None
        return None

    def describe_loss(self) -> str:
        """Return what happened to a folder that is no longer at its path."""
        now = self.find()
        return f"was moved to {show_path(now)} while it was used" if now else "was removed while it was used"

    def close(self) -> None:
        """Give the descriptor back."""
        if self._number is not None:
            os.close(self._number)
            self._number = None


@contextmanager
def make_scratch_folder(beside: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in ``beside`` for its owner alone, and remove it at the end.

    Python's tempfile relies on mkdir. Where mkdir always reports an existing folder, it tries 10,000 names.
    """
    folder = beside / f"{prefix}{os.urandom(8).hex()}"
    make_folder(folder)
    try:
        # The folder was made with the permissions of the umask.
        folder.chmod(0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_single_folder(place: Path) -> None:
    try:
        place.mkdir()
    except FileNotFoundError:
        raise
    except OSError as error:
        verify_folder(place, error)


def find_cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's folder: $XDG_CACHE_HOME/mlhpc, ~/.cache/mlhpc, or if unwritable one in the temporary folder.

    None if another user owns that: its content would not be this user's.
    """
    given = environ.get("XDG_CACHE_HOME", "")
    home = environ.get("HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    wanted = [Path(given)] if given.startswith("/") else [Path(home) / ".cache"] if home.startswith("/") else []
    for folder in (base / "mlhpc" for base in wanted):
        with suppress(OSError):
            make_folder(folder)
            if os.access(folder, os.W_OK):
                return folder
    folder = Path(tempfile.gettempdir()) / f"mlhpc-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
        # In a folder that others may write to, its files could be theirs.
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022:
            return folder
    return None


def set_missing_home() -> None:
    """Set HOME to the user's cache folder if the account has no home. Libraries ask for HOME at their import."""
    try:
        Path.home()
    except RuntimeError:  # a container's user that no file of accounts names
        os.environ["HOME"] = str(find_cache_folder() or "/nonexistent")


def verify_folder(place: Path, error: OSError) -> None:
    """Open a folder that could not be made because of ``error``. Raise that error if it does not exist."""
    exists = isinstance(error, FileExistsError)
    # Waiting helps only if another node has just made the folder.
    for pause_s in _PAUSES_S if exists else _PAUSES_S[:1]:
        time.sleep(pause_s)
        try:
            os.close(os.open(place, os.O_RDONLY | os.O_DIRECTORY))
        except NotADirectoryError:
            if exists:
                raise
        except PermissionError:
            if exists:
                return  # who may not list it may perhaps write into it
        except OSError:  # another node's folder is not known here yet
            continue
        else:
            return
    raise error


_PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)


def fsync_path(path: Path) -> None:
    """Force a file to the disk, or for a folder its names. Some file systems cannot do it for a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def open_regular_file(path: Path, largest: int, *, given: bool = False) -> Iterator[BufferedReader]:
    """Open a regular file of at most ``largest`` bytes to read. OSError that names the file for anything else.

    A stranger's package may hold a FIFO, on which reading waits for ever, a device, or a sparse file of terabytes.
    With ``given``, ``path`` may also be a pipe that the shell opened: ``<(zcat FILE)``, /dev/stdin.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if stat.S_ISDIR(state.st_mode):  # os.fdopen refuses it too, with the number of the descriptor as its name
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with os.fdopen(descriptor, "rb") as file:
        if given and stat.S_ISFIFO(state.st_mode) and _find_descriptor(path) is not None:
            os.set_blocking(descriptor, True)
        elif not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))
        if state.st_size > largest:
            size = f"{render_bytes(state.st_size)}; at most {render_bytes(largest)} are read"
            raise OSError(errno.EFBIG, f"has {size} ({LIMITS} raises the limit)", str(path))
        if state.st_size > _SPARSE_FROM and state.st_blocks * _BLOCK < state.st_size // _SPARSE_PART:
            size = f"{render_bytes(state.st_size)}, of which {render_bytes(state.st_blocks * _BLOCK)} are on the disk"
            raise OSError(errno.EFBIG, f"is a sparse file of {size}", str(path))
        yield file


def read_bytes(path: Path, largest: int, *, given: bool = False) -> bytes:
    """Read a regular file of at most ``largest`` bytes, and one more. Raises OSError as `open_regular_file` does."""
    with open_regular_file(path, largest, given=given) as file:
        # A file that is still growing may be larger now than when it was opened.
        return file.read(largest + 1)


def decode_table(path: Path, content: bytes, *, errors: str = "strict") -> str:
    """Decode a CSV file: UTF-8, or the UTF-16 that PowerShell writes. InputError says what another file is.

    UnicodeDecodeError as ``errors`` of bytes.decode has it.
    """
    for mark, tool in COMPRESSED.items():
        if content.startswith(mark):
            target = path.name.partition(".")[0] + "_text.csv"  # not the file itself, whatever its name ends with
            raise InputError(
                f"{path}: is a packed file ({tool}); expected a CSV file:"
                f" {tool} -dc < {shlex.quote(str(path))} > {shlex.quote(target)}"
            )
    if content.startswith(ARCHIVE):
        raise InputError(f"{path}: is a packed file or a workbook; expected a CSV file: save its table as CSV")
    if told := next((what for mark, what in _LEFT_BY_GIT.items() if content.startswith(mark.encode())), ""):
        raise InputError(f"{path}: {told}")
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not wide and b"\0" in content:
        raise InputError(f"{path}: is no text; expected a CSV file")
    text = content.decode("utf-16" if wide else "utf-8-sig", errors)
    if text.lstrip()[:1] in ("{", "<") or text.lstrip()[:2] in ("[{", "[["):
        raise InputError(f"{path}: is JSON or XML; expected a CSV file: a head with names, and a row for each reading")
    return text


ARCHIVE = b"PK\3\4"  # of zip, so of workbooks too
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}


class DuplicateKeyError(ValueError):
    """A JSON object has one name twice. Some readers take the first value, others the last."""


def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object made of the pairs, for json.loads. DuplicateKeyError, with the name, if one occurs twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise DuplicateKeyError(next(name for name, count in counts.items() if count > 1))
    return record


def read_json(path: Path, largest: int) -> Any:
    """Read a JSON file. Raises OSError as `open_regular_file` does.

    ValueError if it is not JSON, is nested too deeply, or has a number that is too long. DuplicateKeyError, with the
    name, if an object has a name twice.
    """
    content = read_bytes(path, largest)
    try:
        data = json.loads(content, object_pairs_hook=refuse_duplicate_keys)
        if b"\\ud" in content.lower():  # only half of a pair is no character: no file or terminal can take it
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{half} is half of a character; write the text again") from None
    except (DuplicateKeyError, UnicodeDecodeError):
        raise
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].rstrip()
        # What is cut off is the last string, number or word
        if (
            rest
            and not error.msg.startswith("Unterminated")
            and not re.fullmatch(r"t(r|ru)?|f(a|al|als)?|n(u|ul)?|[-+.eE]{1,2}", rest)
        ):
            begin = error.doc.lstrip()[:20]
            told = next((f"; {what}" for mark, what in _LEFT_BY_GIT.items() if mark in error.doc), "")
            known = told or ("" if begin[:1] in "{[" else f"; it begins with {begin!r}")
            raise ValueError(f"{error}{known}") from None
        raise ValueError(f"{error}; the file ends too early: copy it again, or make it again") from None
    except ValueError as error:
        raise ValueError(explain_long_number(error)) from None
    return data


_LEFT_BY_GIT = {
    "<<<<<<< ": "git left the two sides of a conflict in it: take one, then git add",
    "version https://git-lfs": "this is the place holder of git LFS: git lfs pull brings the file",
}


def explain_long_number(error: Exception) -> str:
    """Return the text of an error, without Python's advice to programmers if a number has too many digits."""
    return "a number has more than 4,300 digits" if "integer string conversion" in str(error) else str(error)


LIMITS = "MLHPC_LIMITS"  # environment variable: the sizes that mlhpc.suite.log.reader reads
_SPARSE_FROM = 64 * 2**20  # bytes; smaller ones cost nothing to read
_SPARSE_PART = 100  # a file system that compresses stores no text in a hundredth of its size
_BLOCK = 512  # bytes: the unit of st_blocks


def render_bytes(count: int) -> str:
    """Render a number of bytes: ``4 MiB``, ``1.5 GiB``."""
    unit = max((unit for unit in _UNITS if count >= _UNITS[unit]), key=_UNITS.__getitem__, default="bytes")
    return f"{count / _UNITS.get(unit, 1):.4g} {unit}"


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def render_duration(seconds: float) -> str:
    """Render seconds for people, with three significant digits: ``45 s``, ``12 min``, ``3.4 h``, ``1,234 h``.

    Uses seconds below two minutes and minutes below two hours.
    """
    if math.isnan(seconds):
        return "not known"
    scale, unit = choose_duration_unit(seconds)
    return f"{render_three_digits(seconds / scale)} {unit}"


def render_duration_range(low_s: float, high_s: float, to: str = "to", *, like_s: float | None = None) -> str:
    """Render two times in the unit of the upper one, or of ``like_s``, which is written once: ``47 to 52.7 s``."""
    scale, unit = choose_duration_unit(high_s if like_s is None else like_s)
    return f"{render_three_digits(low_s / scale)} {to} {render_three_digits(high_s / scale)} {unit}"


def choose_duration_unit(seconds: float) -> tuple[float, str]:
    """Choose the unit of a duration for people. Return its length in seconds, and its name."""
    size = abs(seconds)
    return (1.0, "s") if size < 120 else (60.0, "min") if size < 7200 else (3600.0, "h")


def render_three_digits(value: float) -> str:
    """Render a number with three significant digits, and from a thousand on as a whole number: ``1,234``."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def render_error(error: BaseException) -> str:
    """Render an error as one line. An OSError is file and reason, without Python's error number."""
    if isinstance(error, OSError) and error.strerror:
        named = _find_failed_file(error)
        return f"{named}: {render_reason(error)}" if named else render_reason(error)
    return " ".join(str(error).split()) or type(error).__name__


def render_reason(error: OSError, path: Path | None = None) -> str:
    """Render why a file could not be read or written, without its name: what is used up, and what shows it.

    ``path`` is the file if the error names none.
    """
    said = error.strerror or str(error) or type(error).__name__
    if error.errno is None or said != os.strerror(error.errno):
        return said  # words of ours, which say more than the number
    place = _find_failed_file(error) or path
    if error.errno in _LINK_ERRNOS and place is not None and (link := explain_link(Path(place))):
        return link
    if error.errno == errno.ENOSPC:
        return "no free inodes (df -i)" if _lacks_inodes(_find_failed_file(error) or path) else "disk full"
    if error.errno == errno.EDQUOT:
        return "quota exceeded"
    if error.errno == errno.EFBIG and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return "larger than this shell's file size limit (ulimit -f)"
    return said


_LINK_ERRNOS = frozenset({errno.ENOENT, errno.EEXIST, errno.ELOOP, errno.ENOTDIR})


def explain_link(path: Path) -> str:
    """Return which link on the way to a path leads nowhere, and where it should lead. "" if none does."""
    for place in (*reversed(path.parents), path):
        if not place.is_symlink():
            continue
        try:
            place.stat()
        except OSError as error:
            leads = {errno.ENOENT: "which does not exist", errno.ELOOP: "which leads back to it"}
            why = leads.get(error.errno or 0) or f"where this is found: {error.strerror}"
            return f"{'it' if place == path else show_path(place)} is a link to {show_path(place.readlink())}, {why}"
    return ""


def show_path(path: Path | str) -> str:
    """Render a path for a message: with its odd characters, if it has some that a reader would not see."""
    text = str(path)
    return text if text.isprintable() and text == text.strip() else repr(text)


def _lacks_inodes(name: str | Path | None) -> bool:
    """Return whether the file system of a file has fewer inodes left than room. Some have no fixed number: 0."""
    path = Path(name).absolute() if name is not None else None
    for place in (path, *path.parents) if path is not None else ():
        with suppress(OSError):
            state = os.statvfs(place)
            # A file that failed and was removed gave its own back
            few = state.f_files > 0 and state.f_favail < _FEW_INODES
            return few and state.f_favail * state.f_blocks < state.f_bavail * state.f_files
    return False


_FEW_INODES = 16


def align_columns(rows: Iterable[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Align the cells of a table as lines of text. Columns in ``right`` end alike, others begin alike."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def render_printable(text: str, *, keep: str = "") -> str:
    """Replace by a question mark each character that a terminal acts on or cannot show, except ``keep``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def encode_csv_cell(value: object) -> object:
    """Return a cell of a CSV table: without characters that a terminal acts on.

    A text that a spreadsheet would run as a formula gets an apostrophe.
    """
    if not isinstance(value, str):
        return value
    shown = render_printable(value, keep="\n\t")
    if not value.startswith(_FORMULA):
        return shown
    try:
        float(value)
    except ValueError:
        return f"'{shown}"
    return shown if value.isprintable() else f"'{shown}"


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four: full width


def render_repr(value: object, *, longest: int = 60) -> str:
    """Render a wrong value for a message: its repr, cut to ``longest`` characters. If repr fails, its type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return type(value).__name__
    return text if len(text) <= longest else text[: longest - 3] + "..."


def quote_path(path: Path | str) -> str:
    """Render a path as a word of a command that can be pasted: quoted, and never taken for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def convert_to_path(given: object) -> Path:
    """Convert a path that a person gave in Python, with ~ replaced.

    InputError for anything else, such as a list of paths.
    """
    if not isinstance(given, str | os.PathLike):
        several = "; pass the paths of a list one by one, as (*paths)" if isinstance(given, Iterable) else ""
        raise InputError(f"{render_repr(given, longest=80)}: expected one path, as a str or a Path{several}")
    return Path(expand_home(str(Path(given))))


def expand_home(text: str) -> str:
    """Replace a leading ~ or ~user of a path by the home folder, as a shell does that sees it at the start of a word.

    InputError if that folder is not known: a path that keeps its ~ would be a folder of that name.
    """
    found = os.path.expanduser(text)  # noqa: PTH111  Path raises where a shell leaves the name
    user, below, _ = text.partition("/")
    # A shell too takes ~name for a name if nobody is called so
    if not text.startswith("~") or found.startswith("/") or (user != "~" and not below):
        return found
    whose = f"user {user[1:]} and so no home folder" if user != "~" else "home folder (HOME)"
    raise InputError(f"{text}: there is no {whose}; write the whole path, or ./{text} for a folder of that name")


def expand_home_in_words(words: Iterable[str]) -> list[str]:
    """Replace the ~ of a path in words of a command line. A shell leaves that of ``--output=~/x`` and of quoted words.

    Words after ``--`` are another program's.
    """
    left = list(words)
    own = left.index("--") if "--" in left else len(left)
    return [f"{part[1]}{expand_home(part[2])}" for part in map(_WORD.fullmatch, left[:own]) if part] + left[own:]


_WORD = re.compile(r"(?s)((?:-[A-Za-z]|--[\w-]+=)(?=~)|)(.*)")


def expand_home_in_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Replace the ~ of paths in variables that name places. InputError names the variable."""
    for name, value in list(environ.items()):
        if "~" in value and (name in _PLACES or name.startswith("MLHPC_")):
            try:
                environ[name] = os.pathsep.join(map(expand_home, value.split(os.pathsep)))
            except InputError as error:
                raise InputError(f"{name}={error}") from None


_PLACES = ("TMPDIR", "TEMP", "TMP", "SCRATCH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")


class _StandardOutput:
    """The state of standard output."""

    broken: OSError | None = None  # why it was given up
    lost: OSError | None = None  # the same, if a result should have gone there since


def print_line(text: str = "", *, error: bool = False, end: str = "\n", result: bool = True) -> None:
    """Print text to standard output, or to standard error. Once that fails, later output goes nowhere.

    Every command prints this way. Names of files and strings of logs may be a stranger's. So characters that a terminal
    would act on are replaced (`render_printable`). Lines and tabs stay.

    A reader that has gone, or a full disk, costs the line and never the work. If a ``result`` is lost, the command
    fails at its end (`find_output_error`). Without the redirection Python would fail again with the same bytes when it
    exits.
    """
    stream = sys.stderr if error else sys.stdout
    # Escape sequences in a name could rewrite what the terminal shows.
    text = render_printable(text, keep="\n\t")
    # In another encoding than UTF-8 a character that it lacks would end the command.
    if (encoding := getattr(stream, "encoding", None)) and encoding.lower() != "utf-8":
        text = text.encode(encoding, "replace").decode(encoding)
    try:
        if stream is None:  # it was closed before this process began
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        print(text, file=stream, flush=True, end=end)
    except OSError as failure:
        if error:
            _discard_stream(stream)
        else:
            give_up_output(failure, result=result)
    if result and not error and _StandardOutput.broken is not None:
        _StandardOutput.lost = _StandardOutput.broken


LEAST_SHARE, LEAST_S = 0.05, 10.0  # of the work, and of time, before the time left is told: the first says little


def print_progress(text: str = "", *, error: bool = False) -> None:
    """Print, with `print_line`, how far a command is. Prints nothing under --quiet."""
    if not os.environ.get(QUIET):
        print_line(text, error=error, result=False)


def give_up_output(failure: OSError, *, result: bool = True) -> None:
    """Let later output go nowhere: standard output failed. What a buffer still holds must not fail again.

    With ``result`` the output that failed is one that `find_output_error` reports.
    """
    _discard_stream(sys.stdout)
    _StandardOutput.broken = failure
    if result:
        _StandardOutput.lost = failure


def open_closed_streams() -> None:
    """Open standard streams that were closed before this process began, by cron or a daemon. Writing to them fails.

    Else the first file that is opened would get the number of one.
    """
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def find_output_error() -> OSError | None:
    """Return why a result did not reach standard output. None if all did, or if a pipe's reader had enough.

    Call it at the end of a command. A network file system may refuse only when a file is closed.
    """
    try:
        sys.stdout.flush()
        os.close(os.dup(sys.stdout.fileno()))
    except OSError as failure:
        if failure.errno is not None:  # else a stream without a descriptor
            give_up_output(failure)
    except (AttributeError, ValueError):  # no stream, or a closed one
        pass
    lost, _StandardOutput.broken, _StandardOutput.lost = _StandardOutput.lost, None, None
    return None if isinstance(lost, ConnectionError) else lost


def _discard_stream(stream: TextIO | None) -> None:
    """Redirect a stream that cannot be written to /dev/null."""
    with suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor, or none
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)
