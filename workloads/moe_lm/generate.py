"""Makes the data sets of the language model: ``generate`` (smoke), ``fetch`` and ``convert`` (real text).

The items are rows cut from one text, not numbered ones, so `generate` does not use suite/data/generate.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.data.build import SPLITS, Arrays, DataSetPlan, Piece, Progress, build, size_settings
from suite.errors import InputError
from suite.world import World
from workloads.moe_lm.text import DJANGO_NAME, DJANGO_SHA256, DJANGO_VERSION, Language, Split, check_archive, read_text

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1


@dataclass(frozen=True)
class DataSize:
    """Training rows of ``row_bytes``, evaluation rows of ``context`` + 1 bytes (the first byte is not predicted).

    ``train_rows`` None means all rows of the text. ``validation_rows`` are spread evenly over the validation text.
    """

    context: int
    row_bytes: int
    train_rows: int | None
    validation_rows: int
    generated: bool = False


SIZES: dict[str, DataSize] = {
    "smoke": DataSize(64, 256, 800, 128, generated=True),
    "mini": DataSize(128, 1792, None, 1024),
    "mini_dense": DataSize(128, 1792, None, 1024),
    "middle": DataSize(1024, 8192, None, 256),
    "full": DataSize(4096, 8192, None, 64),
}


def generate(root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
    """Generate the text of ``smoke``. InputError for sizes with real text, which says how to get it."""
    settings = size_settings("moe_lm", SIZES, size, seed)
    if not settings.generated:
        raise InputError(
            f"moe_lm {size} is real text: mlhpc data fetch moe_lm -o text, "
            f"then mlhpc data convert moe_lm text --size {size} -o {root}"
        )
    language = Language(seed)
    assert settings.train_rows is not None
    lengths = settings.train_rows * settings.row_bytes, settings.validation_rows * settings.context + 1
    origin, known = {"name": "markov", "seed": seed}, {"entropy_rate": language.entropy_rate()}
    texts = [partial(language.text, length, part) for part, length in enumerate(lengths)]
    _build(root, size, texts, origin, known, seed, world, progress)


def convert(
    source: Path, root: Path, *, world: World, size: str | None = None, progress: Progress | None = None
) -> None:
    """Convert the pinned Django archive (or the folder it was fetched to) or a folder of ``.txt`` files to shards."""
    size = size or "mini"
    settings = size_settings("moe_lm", SIZES, size, 0)
    if settings.generated:
        raise InputError(f"moe_lm {size} is generated text: mlhpc data generate moe_lm --size {size}")
    text, problem = Split(b"", b""), None
    try:
        text = read_text(source)
    except (OSError, ValueError) as error:
        problem = error
    world.check_together(problem)
    django = source.name == DJANGO_NAME or (source / DJANGO_NAME).exists()
    origin = {"name": DJANGO_NAME if django else "folder", "sha256": DJANGO_SHA256 if django else None}
    _build(root, size, [lambda: text.train, lambda: text.validation], origin, {}, 0, world, progress)


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Get the Django source package, with pip or from ``source`` on this machine. Its sha256 is pinned."""
    destination.mkdir(parents=True, exist_ok=True)
    if source is not None:
        path = Path(source)
        path = path / DJANGO_NAME if path.is_dir() else path
        if not path.exists():
            raise InputError(f"{path}: does not exist; expected {DJANGO_NAME} from PyPI")
        check_archive(path)
        shutil.copyfile(path, destination / DJANGO_NAME)
        return
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"Django=={DJANGO_VERSION} --hash=sha256:{DJANGO_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "Django"]
        command += ["--require-hashes", "--no-build-isolation", "-r", str(requirements), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (Path(folder) / DJANGO_NAME).exists():
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise InputError(f"pip cannot download {DJANGO_NAME}: {reason}; bring it from PyPI and give --from FILE")
        check_archive(Path(folder) / DJANGO_NAME)
        shutil.copyfile(Path(folder) / DJANGO_NAME, destination / DJANGO_NAME)


def training_rows(text: bytes, settings: DataSize) -> NDArray[np.uint8]:
    """Cut the text into consecutive rows; the remainder is dropped."""
    rows = len(text) // settings.row_bytes
    rows = rows if settings.train_rows is None else min(rows, settings.train_rows)
    return _array(text, rows * settings.row_bytes).reshape(rows, settings.row_bytes)


def validation_rows(text: bytes, settings: DataSize) -> NDArray[np.uint8]:
    """Cut rows that predict disjoint pieces of ``context`` bytes, evenly spread over the text."""
    pieces = (len(text) - 1) // settings.context
    if pieces < settings.validation_rows:
        raise InputError(
            f"the validation text gives {pieces} rows of {settings.context} bytes, not {settings.validation_rows}"
        )
    chosen = np.arange(settings.validation_rows) * pieces // settings.validation_rows
    columns = chosen[:, None] * settings.context + np.arange(settings.context + 1)
    result: NDArray[np.uint8] = _array(text, len(text))[columns]
    return result


def _build(
    root: Path,
    size: str,
    texts: Sequence[Callable[[], bytes]],
    origin: dict[str, Any],
    known: dict[str, Any],
    seed: int,
    world: World,
    progress: Progress | None = None,
) -> None:
    """Build a data set of one shard per split. ``known`` are facts about the text for the manifest."""
    settings = SIZES[size]
    recipe = {"version": GENERATOR_VERSION, **origin, **asdict(settings)}
    pieces = [
        Piece(split, 0, partial(_shard, rows, text, settings))
        for split, rows, text in zip(SPLITS, (training_rows, validation_rows), texts, strict=True)
    ]
    build(
        root,
        DataSetPlan("moe_lm", size, seed, recipe, pieces, lambda arrays: None, lambda summaries: known),
        world,
        progress,
    )


def _shard(
    rows: Callable[[bytes, DataSize], NDArray[np.uint8]], text: Callable[[], bytes], settings: DataSize
) -> Arrays:
    return {"text": rows(text(), settings)}


def _array(text: bytes, length: int) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8, count=length)
