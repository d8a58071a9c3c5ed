"""Real text: the packages of corpus.yaml or a folder, split by project, or SymPy as installed, split by file.

Near copies are left out.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from mlhpc.suite.documents import parse_yaml
from mlhpc.suite.errors import InputError
from mlhpc.workloads.moe_lm.duplicates import Shingles, compute_shingles, find_near_copies

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
