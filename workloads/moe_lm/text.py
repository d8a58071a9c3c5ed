"""Sources of text: a generated language of known entropy, or files of an archive or a folder."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from suite.errors import InputError

DJANGO_VERSION = "5.2"
DJANGO_NAME = f"Django-{DJANGO_VERSION}.tar.gz"
DJANGO_SHA256 = "1a47f7a7a3d43ce64570d350e008d2949abe8c7e21737b351b6a1611277c6d89"
SEPARATOR = b"\x00"  # between files; it never occurs in text
VALIDATION_OF_256 = 13  # a file goes to validation if the first byte of its path's hash is below this: 5 %

WORDS, SUCCESSORS, LETTERS = 128, 8, "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Split:
    """The training and the validation text."""

    train: bytes
    validation: bytes


class Language:
    """A Markov chain of random words; each is followed by one of eight others with odds 1 : 1/2 : … : 1/8."""

    def __init__(self, seed: int) -> None:
        draw = np.random.Generator(np.random.Philox(key=[seed, 0]))
        words: dict[str, None] = {}
        while len(words) < WORDS:
            words["".join(draw.choice(list(LETTERS), draw.integers(2, 9)))] = None
        self.words = [word.encode() + b" " for word in words]
        self.successors = np.stack([draw.permutation(WORDS)[:SUCCESSORS] for _ in range(WORDS)])
        weights = 1 / np.arange(1, SUCCESSORS + 1)
        self.chances = weights / weights.sum()
        self._seed = seed

    def text(self, length: int, stream: int) -> bytes:
        """Generate ``length`` bytes. Another ``stream`` gives another text of the same language."""
        draw = np.random.Generator(np.random.Philox(key=[self._seed, 1 + stream]))
        parts, total, word = [], 0, int(draw.integers(WORDS))
        while total < length:
            for rank in draw.choice(SUCCESSORS, 4096, p=self.chances):
                word = int(self.successors[word, rank])
                parts.append(self.words[word])
                total += len(self.words[word])
        return b"".join(parts)[:length]

    def entropy_rate(self) -> float:
        """Compute the bits per byte of the chain, the lower bound for any model. 9 digits: others depend on the processor."""
        transition = np.zeros((WORDS, WORDS))
        np.put_along_axis(transition, self.successors, self.chances[None], axis=1)
        stationary = np.full(WORDS, 1 / WORDS)
        for _ in range(200):
            stationary = stationary @ transition
        lengths = np.array([len(word) for word in self.words])
        bits = -(self.chances * np.log2(self.chances)).sum()
        return float(f"{bits / (stationary @ lengths):.9g}")


def read_text(source: Path) -> Split:
    """Read the ``.txt`` files of a folder, or of the documentation in Django's archive, split by the hash of their paths.

    InputError if there are none, or if the archive is not the pinned one.
    """
    if source.is_dir() and (source / DJANGO_NAME).exists():
        source = source / DJANGO_NAME
    files = dict(sorted(_folder(source) if source.is_dir() else _archive(source)))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, content in files.items():
        parts[in_validation(name)].append(content.replace(SEPARATOR, b"") + SEPARATOR)
    if not parts[True] or not parts[False]:
        raise InputError(f"{source}: {len(files)} .txt files are too few for two splits")
    return Split(b"".join(parts[False]), b"".join(parts[True]))


def in_validation(name: str) -> bool:
    """True if a file belongs to validation. Decided by its path alone, so the same in every version and on every machine."""
    return hashlib.sha256(name.encode()).digest()[0] < VALIDATION_OF_256


def check_archive(path: Path) -> None:
    """Check the sha256 of an archive. InputError if it is not the pinned source package."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != DJANGO_SHA256:
        raise InputError(f"{path}: sha256 is {digest}; {DJANGO_NAME} from PyPI has {DJANGO_SHA256}")


def _folder(source: Path) -> Iterator[tuple[str, bytes]]:
    for path in source.rglob("*.txt"):
        yield path.relative_to(source).as_posix(), path.read_bytes()


def _archive(source: Path) -> Iterator[tuple[str, bytes]]:
    check_archive(source)
    with tarfile.open(source) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith("docs/") and name.endswith(".txt"):
                file = archive.extractfile(member)
                assert file is not None
                yield name, file.read()
