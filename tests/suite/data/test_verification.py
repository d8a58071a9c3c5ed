"""Verification: every shard is compared with its checksum once, and what is wrong is one line that names the shard."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import structs

import mlhpc
from mlhpc.suite.commands.data import data
from mlhpc.suite.data.manifest import (
    READ_BYTES,
    Manifest,
    ShardEntry,
    check_crc32c,
    read_manifest,
    verify_shards,
    write_manifest,
)
from mlhpc.suite.data.shards import build_shard_path, write_shard
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World


@pytest.fixture
def shards(tmp_path: Path) -> list[ShardEntry]:
    rng = np.random.default_rng(1)
    return [
        write_shard(
            build_shard_path(tmp_path, "train", i), {"x": rng.integers(0, 255, (3 + i, 100_000)).astype(np.uint8)}
        )
        for i in range(3)
    ]


def test_intact_shards_are_all_read(tmp_path: Path, shards: list[ShardEntry]) -> None:
    blocks = []
    found = verify_shards(tmp_path, shards, World.create(), lambda: blocks.append(1))
    assert (found.files, found.bytes) == (3, sum(entry.bytes for entry in shards))
    assert len(blocks) == sum(-(-entry.bytes // READ_BYTES) for entry in shards)
    assert found.value()["gb_per_s"] == pytest.approx(found.bytes / found.seconds / 1e9)


@pytest.mark.parametrize("variable", ["HDF5_VOL_CONNECTOR=async under_vol=0;under_info={}", "HDF5_DRIVER=mpio"])
def test_plug_ins_that_other_programs_want_of_hdf5_do_not_end_python(tmp_path: Path, variable: str) -> None:
    (tmp_path / "root" / "train").mkdir(parents=True)
    name = "root/train/shard_00000.h5"
    code = (
        f"from mlhpc.suite.data.shards import Path, np, write_shard; write_shard(Path({name!r}), {{'x': np.ones(2)}})"
    )
    command = ["env", variable, sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-500:]


def flip(where: float) -> Callable[[Path], object]:
    def harm(path: Path) -> object:
        content = bytearray(path.read_bytes())
        content[int(where * (len(content) - 1))] ^= 0x10
        return path.write_bytes(content)

    return harm


@pytest.mark.parametrize(
    ("harm", "message"),
    [(flip(where), "damaged: crc32c ") for where in (0, 0.1, 0.5, 0.999, 1)]
    + [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "too long"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "damaged: crc32c "),
        (lambda path: path.unlink(), "missing"),
        (lambda path: (path.unlink(), path.mkdir()), ""),
    ],
)
def test_a_shard_that_is_not_what_was_written_is_named(
    tmp_path: Path, shards: list[ShardEntry], harm: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / shards[1].file
    harm(path)
    with pytest.raises(InputError, match=f"^{path}: .*{message}"):
        verify_shards(tmp_path, shards, World.create())
    assert check_crc32c(tmp_path, shards[0]) is None


# Root may read every file: another user looks
LOOK = """if True:
    import os
    from mlhpc.suite.cli.main import main
    import google_crc32c, h5py, numpy, mlhpc.suite.data.shards, mlhpc.suite.commands.data
    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    os.environ["HOME"] = "/nonexistent"
    main()"""


def look(*words: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", LOOK, *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, timeout=300)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter: pytest's own are for one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(
    any(not folder.stat().st_mode & 0o001 for folder in Path(mlhpc.__file__).resolve().parents),
    reason="other users may not enter this checkout",
)
@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize(("hidden", "cut"), [((1,), ()), ((0, 2), ()), ((1,), (0,)), ((1,), (1,)), ((), (2,))])
def test_what_this_user_may_not_read_is_not_called_damaged(
    open_folder: Path, deep: bool, hidden: tuple[int, ...], cut: tuple[int, ...]
) -> None:
    entries = tuple(
        write_shard(build_shard_path(open_folder, "train", i), {"x": np.full((2, 9), i, np.uint8)}) for i in range(3)
    )
    write_manifest(open_folder, Manifest(workload="w", size="s", seed=1, generator={}, splits={"train": entries}))
    for path in open_folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    paths = [open_folder / entry.file for entry in entries]
    for i in cut:
        paths[i].write_bytes(paths[i].read_bytes()[:-1])
    for i in hidden:
        paths[i].chmod(0)
    done = look("data", "verify", open_folder, *["--deep"] * deep)
    assert done.returncode == 1, done.stderr
    told = {i: f"{path}: cannot be judged: Permission denied; ask for read permission" for i, path in enumerate(paths)}
    assert {i for i, text in told.items() if text in done.stderr} == {*hidden} - {*cut}
    assert {i for i, path in enumerate(paths) if f"{path}: truncated" in done.stderr} == {*cut}
    assert ("remove the folder" in done.stderr) == bool(cut)
    assert "Traceback" not in done.stderr


def test_the_work_for_missing_shards_grows_as_their_number(tmp_path: Path) -> None:
    """Counted in calls, of which the time is made."""

    def count_calls(number: int) -> int:
        entries = [
            ShardEntry(file=f"train/shard_{i:05}.h5", samples=1, bytes=9, sha256="0" * 64, crc32c="0" * 8)
            for i in range(number)
        ]
        manifest = Manifest(workload="toy", size="smoke", seed=0, generator={}, splits={"train": tuple(entries)})
        write_manifest(tmp_path, manifest)
        count = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        try:
            done = CliRunner().invoke(data, ["verify", str(tmp_path)])
        finally:
            sys.setprofile(None)
        assert done.output.count(": missing\n") == number
        return count

    count_calls(1)  # imports
    few, many = count_calls(200), count_calls(800)
    assert many < 5 * few


@pytest.mark.parametrize(("samples", "bytes_"), [(10**15, 9), (10, 9), (2, 1)])
def test_more_samples_than_bytes_are_no_manifest(tmp_path: Path, samples: int, bytes_: int) -> None:
    entry = {"file": "a.h5", "samples": samples, "bytes": bytes_, "sha256": "0" * 64, "crc32c": "0" * 8}
    (tmp_path / "manifest.json").write_text(
        json.dumps(
            {"version": 1, "workload": "toy", "size": "smoke", "seed": 0, "generator": {}, "splits": {"train": [entry]}}
        )
    )
    with pytest.raises(InputError, match=f"{samples:,} samples in {bytes_} bytes; expected a byte or more of each"):
        read_manifest(tmp_path)


def test_a_number_of_samples_that_is_not_that_of_the_shard_is_found_without_deep(
    tmp_path: Path, shards: list[ShardEntry]
) -> None:
    wrong = [structs.replace(entry, samples=entry.samples + 1) for entry in shards]
    manifest = Manifest(workload="toy", size="smoke", seed=0, generator={}, splits={"train": tuple(wrong)})
    write_manifest(tmp_path, manifest)
    done = CliRunner().invoke(data, ["verify", str(tmp_path)])
    assert done.exit_code == 1
    assert re.findall(r"has (\d+) samples, the manifest says (\d+)", done.output) == [
        ("3", "4"),
        ("4", "5"),
        ("5", "6"),
    ]
