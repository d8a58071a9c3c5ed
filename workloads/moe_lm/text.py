"""Real text: the packages of corpus.yaml or a folder, split by project, or SymPy as installed, split by file.

Near copies are left out.

Near copies among documents: the share of a document's shingles, runs of words, that earlier documents have too.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.documents import parse_yaml
from mlhpc.suite.errors import InputError

SHINGLE_WORDS = 8
SAMPLE_EVERY = 4  # one shingle in so many is looked at, chosen by its hash: the same ones in every document
LEAST_SHINGLES = 4  # looked at, for a document to be judged by them
NEAR_COPY_SHARE = 0.5  # share of the shingles from which on a document is a near copy
WORD_MULTIPLIER, SHINGLE_MULTIPLIER = np.uint64(0x100000001B3), np.uint64(0x9E3779B97F4A7C15)  # odd

Shingles = NDArray[np.uint64]

_CLASS = np.zeros(256, dtype=np.uint64)  # 0: no part of a word; letters of both cases are equal
for _byte in range(256):
    if chr(_byte).isalnum() or _byte == ord("_") or _byte >= 128:
        _CLASS[_byte] = ord(chr(_byte).lower()) + 1 if _byte < 128 else _byte + 1


def compute_shingles(content: bytes) -> Shingles:
    """Hash the runs of `SHINGLE_WORDS` words of a text, and return the distinct hashes that are looked at, sorted.

    Words are letters, digits and underscores; case, spaces, line ends and signs do not matter.
    """
    classes = _CLASS[np.frombuffer(content, dtype=np.uint8)]
    inside = np.concatenate(([False], classes > 0, [False]))
    begins, ends = np.flatnonzero(inside[1:] & ~inside[:-1]), np.flatnonzero(inside[:-1] & ~inside[1:])
    if len(begins) < SHINGLE_WORDS:
        return np.empty(0, dtype=np.uint64)
    words = _words(classes, begins, ends)
    runs = np.zeros(len(words) - SHINGLE_WORDS + 1, dtype=np.uint64)
    for place in range(SHINGLE_WORDS):
        runs = (runs + words[place : place + len(runs)]) * SHINGLE_MULTIPLIER
        # a product carries bits only upwards; the sample below is chosen by the lowest bits
        runs ^= runs >> np.uint64(29)
    return np.unique(runs[runs % np.uint64(SAMPLE_EVERY) == 0])


def _words(classes: Shingles, begins: NDArray[np.intp], ends: NDArray[np.intp]) -> Shingles:
    """Hash each word: a polynomial of its bytes, modulo 2^64."""
    powers = np.cumprod(np.full(int((ends - begins).max()), WORD_MULTIPLIER, dtype=np.uint64))
    lengths = ends - begins
    last = np.repeat(ends - 1, lengths)
    inside = np.flatnonzero(classes)
    terms = classes[inside] * powers[last - inside]
    result: Shingles = np.add.reduceat(terms, np.concatenate(([0], np.cumsum(lengths)[:-1])))
    return result


def find_near_copies(documents: Iterable[Shingles]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Judge documents in their order.

    Returns which are near copies, and what share of each one's shingles an earlier one has.

    A document with fewer than `LEAST_SHINGLES` has share 0.
    """
    lists = list(documents)
    lengths = np.array([len(each) for each in lists], dtype=np.int64)
    owner = np.repeat(np.arange(len(lists), dtype=np.int64), lengths)
    joined = np.concatenate([*lists, np.empty(0, dtype=np.uint64)])
    order = np.argsort(joined, kind="stable")  # equal hashes stay in the order of their documents
    ranked = joined[order]
    earlier = np.zeros(len(joined), dtype=bool)
    # the hashes of a document are distinct, so an equal one before is of an earlier document
    earlier[order[1:]] = ranked[1:] == ranked[:-1]
    seen = np.bincount(owner[earlier], minlength=len(lists))
    shares = np.where(lengths >= LEAST_SHINGLES, seen / np.maximum(lengths, 1), 0.0)
    return shares >= NEAR_COPY_SHARE, shares


CORPUS_PATH = Path(__file__).with_name("corpus.yaml")
SUFFIXES = frozenset((".py", ".pyi", ".rst", ".md", ".txt"))
LARGEST_FILE = 2**19  # bytes: larger ones are tables and generated code
SEPARATOR = b"\x00"  # between files; it never occurs in text
SYMPY = "1.14.0"  # torch requires SymPy, so it is installed; its licence is BSD-3-Clause
SYMPY_FACTS = ("files", "near_copies", "near_copies_byte_share", "shared_shingles_of_validation")
SYMPY_SHA256 = "1be0a59f5e2ed938a6ec30bb438c76f2d7bc771e140feaa4ac45a1d41f4cda6f"  # of its training and validation text
VALIDATION_OF_256 = 23  # a project goes to validation if the first byte of its name's hash is below this: 9 %


@dataclass(frozen=True)
class Package:
    """A wheel of the corpus: the project's name on the package index, its version, file, licence and checksum."""

    project: str
    version: str
    file: str
    licence: str
    sha256: str


@dataclass(frozen=True)
class Document:
    """One file of a project."""

    project: str
    name: str
    content: bytes


@dataclass(frozen=True)
class Split:
    """The training and the validation text, and what is known of them for the manifest."""

    train: bytes
    validation: bytes
    facts: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Return the checksum of both texts."""
        return hashlib.sha256(self.train + self.validation).hexdigest()


@cache
def read_corpus() -> tuple[Package, ...]:
    """Read the list of packages that the real text is made of."""
    return tuple(Package(**entry) for entry in parse_yaml(CORPUS_PATH.read_text())["packages"])


def is_validation(project: str) -> bool:
    """Check whether a project belongs to validation. Its name alone decides, on every machine alike."""
    return hashlib.sha256(project.lower().encode()).digest()[0] < VALIDATION_OF_256


def is_corpus(source: Path) -> bool:
    """Return True if a folder holds a package of the corpus."""
    return any((source / package.file).exists() for package in read_corpus())


def check_package(folder: Path, package: Package) -> Path:
    """Find a package of the corpus in a folder. InputError if it is absent or has another sha256."""
    path = folder / package.file
    if not path.exists():
        raise InputError(f"{path}: does not exist; expected the file of {package.project} {package.version} from PyPI")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise InputError(f"{path}: sha256 is {digest}; that of {package.project} on PyPI is {package.sha256}")
    return path


def read_text(source: Path) -> Split:
    """Read the packages of the corpus in a folder, or without them its text files.

    Of text files, the top entries of the folder are the projects.

    Near copies of earlier documents are left out. Training comes first, so a document in both stays in training.
    InputError if a package is not the pinned one, or if there are too few projects.
    """
    if not source.is_dir():
        raise InputError(f"{source}: expected a folder of text, or of packages that `mlhpc data fetch moe_lm` brought")
    return _split(source, list(_packages(source) if is_corpus(source) else _folder(source)))


def read_sympy() -> Split:
    """Read the files of the installed SymPy, each as a project of its own. InputError if it is not the pinned one."""
    wanted = f"expected {SYMPY}: pip install --force-reinstall --no-deps sympy=={SYMPY}"
    try:
        installed = metadata.distribution("sympy")
    except metadata.PackageNotFoundError:
        raise InputError(f"SymPy, the text of this size, is not installed; {wanted}") from None
    source = Path(str(installed.locate_file("sympy")))
    if installed.version != SYMPY or not source.is_dir():
        raise InputError(f"{source}: SymPy, the text of this size, is {installed.version}; {wanted}")
    found = _split(source, [replace(each, project=each.name) for each in _folder(source)])
    if found.sha256 != SYMPY_SHA256:
        raise InputError(f"{source}: files were changed or added: sha256 of the text is {found.sha256}; {wanted}")
    return replace(found, facts={name: found.facts[name] for name in SYMPY_FACTS})


def _split(source: Path, documents: list[Document]) -> Split:
    # training first: of two near copies the first in this order stays
    documents.sort(key=lambda each: (is_validation(each.project), each.project, each.name))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    copies, shares = find_near_copies(_shingles(documents))
    for document, copy in zip(documents, copies, strict=True):
        if not copy:
            parts[is_validation(document.project)].append(document.content + SEPARATOR)
    if not all(parts):
        projects = len({each.project for each in documents})
        raise InputError(
            f"{source}: {projects} projects with text are too few: expected one for train and one for validation"
        )
    train, validation = (b"".join(part) for part in parts)
    return Split(train, validation, _facts(documents, copies.tolist(), shares.tolist()))


def _facts(documents: Sequence[Document], copies: Sequence[bool], shares: Sequence[float]) -> dict[str, Any]:
    """Count projects, files, bytes and near copies, and measure what is left of validation in earlier documents.

    Shares have six digits.
    """
    held = [is_validation(each.project) for each in documents]
    sizes = [len(each.content) for each in documents]
    kept = [size for size, copy in zip(sizes, copies, strict=True) if not copy]
    left = [
        (size, share)
        for size, copy, share, validation in zip(sizes, copies, shares, held, strict=True)
        if validation and not copy
    ]
    by_split = {
        split: sorted({each.project for each, validation in zip(documents, held, strict=True) if validation == wanted})
        for split, wanted in (("train", False), ("validation", True))
    }
    return {
        "projects": {split: len(names) for split, names in by_split.items()},
        "validation_projects": by_split["validation"],
        "files": len(documents),
        "near_copies": sum(copies),
        "near_copies_byte_share": round(1 - sum(kept) / sum(sizes), 6),
        "shared_shingles_of_validation": round(
            sum(size * share for size, share in left) / max(1, sum(size for size, _ in left)), 6
        ),
    }


def _shingles(documents: Sequence[Document]) -> Iterator[Shingles]:
    for document in documents:
        yield compute_shingles(document.content)


def _packages(source: Path) -> Iterator[Document]:
    for package in read_corpus():
        with zipfile.ZipFile(check_package(source, package)) as archive:
            for member in archive.infolist():
                if not member.is_dir() and member.file_size <= LARGEST_FILE:
                    yield from _document(package.project, member.filename, partial(archive.read, member))


def _folder(source: Path) -> Iterator[Document]:
    for path in source.rglob("*"):
        if path.is_file() and path.stat().st_size <= LARGEST_FILE:
            name = path.relative_to(source)
            yield from _document(name.parts[0], name.as_posix(), path.read_bytes)


def _document(project: str, name: str, read: Callable[[], bytes]) -> Iterator[Document]:
    """Yield a file if it is text: by its suffix and by being UTF-8. Line ends become one byte."""
    if PurePosixPath(name).suffix not in SUFFIXES:
        return
    content = read()
    try:
        content.decode()
    except UnicodeDecodeError:
        return
    # the separator marks ends of files, so no file may contain it
    yield Document(project, name, content.replace(b"\r\n", b"\n").replace(SEPARATOR, b""))
