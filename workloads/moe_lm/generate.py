"""Makes the data sets of the language model: ``generate`` (smoke), ``fetch`` and ``convert`` (real text)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.distributed import World
from suite.shards import MANIFEST_NAME, Manifest, read_manifest, shard_path, write_manifest, write_shard
from workloads.moe_lm.text import DJANGO_NAME, DJANGO_SHA256, DJANGO_VERSION, Language, Split, check_archive, read_text

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1


@dataclass(frozen=True)
class DataSize:
    """Rows of ``row_bytes`` to train on, of ``context`` + 1 to evaluate on (the first byte is only looked at).

    ``train_rows`` None: all that the text gives. ``validation_rows`` are spread evenly over the validation text.
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


def generate(
    root: Path, size: str, *, seed: int, world: World, progress: Callable[[int, int], None] | None = None
) -> None:
    """Generate the text of ``smoke``. ValueError for the sizes of real text, which says how to get it."""
    settings = _settings(size)
    if not settings.generated:
        raise ValueError(
            f"moe_lm {size} is real text: mlhpc data fetch moe_lm -o text, "
            f"then mlhpc data convert moe_lm text --size {size} -o {root}"
        )
    language = Language(seed)
    assert settings.train_rows is not None
    text = Split(
        language.text(settings.train_rows * settings.row_bytes, 0),
        language.text(settings.validation_rows * settings.context + 1, 1),
    )
    origin = {"name": "markov", "seed": seed, "entropy_rate": language.entropy_rate()}
    _build(root, size, text, origin, seed, world)
    if progress is not None:
        progress(1, 1)


def convert(source: Path, root: Path, *, world: World, size: str | None = None) -> None:
    """Make a data set of the pinned Django archive (or the folder it was fetched to), or of a folder of ``.txt`` files."""
    size = size or "mini"
    settings = _settings(size)
    if settings.generated:
        raise ValueError(f"moe_lm {size} is generated text: mlhpc data generate moe_lm --size {size}")
    text, problem = None, None
    if world.is_first:
        try:
            text = read_text(source)
        except (OSError, ValueError) as error:
            problem = error
    world.check_together(problem)
    django = source.name == DJANGO_NAME or (source / DJANGO_NAME).exists()
    origin = {"name": DJANGO_NAME if django else "folder", "sha256": DJANGO_SHA256 if django else None}
    _build(root, size, text, origin, 0, world)


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Bring the Django source package here: through pip, or from a copy that is already here; its sha256 is pinned."""
    destination.mkdir(parents=True, exist_ok=True)
    if source is not None:
        path = Path(source)
        path = path / DJANGO_NAME if path.is_dir() else path
        if not path.exists():
            raise ValueError(f"{path}: does not exist; expected {DJANGO_NAME} from PyPI")
        check_archive(path)
        shutil.copyfile(path, destination / DJANGO_NAME)
        return
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"Django=={DJANGO_VERSION} --hash=sha256:{DJANGO_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "Django"]
        command += ["--require-hashes", "--no-build-isolation", "-r", str(wanted), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (Path(folder) / DJANGO_NAME).exists():
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ValueError(f"pip cannot download {DJANGO_NAME}: {reason}; bring it from PyPI and give --from FILE")
        check_archive(Path(folder) / DJANGO_NAME)
        shutil.copyfile(Path(folder) / DJANGO_NAME, destination / DJANGO_NAME)


def training_rows(text: bytes, settings: DataSize) -> NDArray[np.uint8]:
    """Consecutive rows of the text; what does not fill one is left out."""
    rows = len(text) // settings.row_bytes
    rows = rows if settings.train_rows is None else min(rows, settings.train_rows)
    return _array(text, rows * settings.row_bytes).reshape(rows, settings.row_bytes)


def validation_rows(text: bytes, settings: DataSize) -> NDArray[np.uint8]:
    """Rows that predict disjoint pieces of ``context`` bytes, evenly spread over the text."""
    pieces = (len(text) - 1) // settings.context
    if pieces < settings.validation_rows:
        raise ValueError(
            f"the validation text gives {pieces} rows of {settings.context} bytes, not {settings.validation_rows}"
        )
    chosen = np.arange(settings.validation_rows) * pieces // settings.validation_rows
    columns = chosen[:, None] * settings.context + np.arange(settings.context + 1)
    return _array(text, len(text))[columns]


def _build(root: Path, size: str, text: Split | None, origin: dict[str, Any], seed: int, world: World) -> None:
    """Rank 0 writes the two shards, the manifest last; a complete data set of the same recipe is left as it is."""
    settings = SIZES[size]
    recipe = json.loads(json.dumps({"version": GENERATOR_VERSION, **origin, **asdict(settings)}))
    problem = None
    if world.is_first:
        assert text is not None
        try:
            if not _complete(root, recipe):
                root.mkdir(parents=True, exist_ok=True)
                splits = {
                    "train": training_rows(text.train, settings),
                    "validation": validation_rows(text.validation, settings),
                }
                entries = {
                    split: (write_shard(shard_path(root, split, 0), {"text": rows}),) for split, rows in splits.items()
                }
                write_manifest(
                    root, Manifest(workload="moe_lm", size=size, seed=seed, generator=recipe, splits=entries)
                )
        except (OSError, ValueError) as error:
            problem = error
    world.check_together(problem)


def _complete(root: Path, recipe: dict[str, Any]) -> bool:
    if not (root / MANIFEST_NAME).exists():
        return False
    found = read_manifest(root).generator
    different = sorted(key for key in found.keys() | recipe.keys() if found.get(key) != recipe.get(key))
    if different:
        key = different[0]
        raise ValueError(
            f"{root}: holds other data: {key} is {found.get(key)!r}, not {recipe.get(key)!r}; choose another folder"
        )
    return True


def _settings(size: str) -> DataSize:
    if size not in SIZES:
        raise ValueError(f"moe_lm: unknown size {size!r}; sizes: {', '.join(SIZES)}")
    return SIZES[size]


def _array(text: bytes, length: int) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8, count=length)
