"""Staging: each byte leaves the shared file system once, what has its name is whole, and an error reaches every rank."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mlhpc.suite.data import staging
from mlhpc.suite.data.manifest import Manifest, ShardEntry, compare_files, write_manifest
from mlhpc.suite.data.shards import build_shard_path, write_shard
from mlhpc.suite.data.staging import (
    ROUND_BLOCKS,
    count_rounds,
    create_part,
    find_staged_root,
    list_blocks,
    merge_blocks,
    plan_reads,
    stage,
)
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from tests.fixtures.warm import warm_python

WORKER = Path(__file__).with_name("staging_worker.py")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
needs_mpi = pytest.mark.skipif(not MPIEXEC.exists(), reason="needs mpiexec: pip install mpich mpi4py")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    rng = np.random.default_rng(1)
    splits = {
        split: tuple(
            write_shard(build_shard_path(root, split, i), {"x": rng.integers(0, 255, (9 + i, 5000)).astype(np.uint8)})
            for i in range(count)
        )
        for split, count in (("train", 5), ("validation", 2))
    }
    write_manifest(root, Manifest(workload="toy", size="smoke", seed=1, generator={}, splits=splits))
    return root


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """A source that a test may damage."""
    return Path(shutil.copytree(source, tmp_path / "damaged"))


def run(nodes: str, source: Path, directory: Path, fault: str = "", *, code: int = 0) -> list[dict[str, Any]]:
    """What every rank saw; the ranks of one node are those with one name."""
    return start([MPIEXEC, "-n", str(len(nodes.split(","))), *warm_python()], nodes, source, directory, fault, code)


def start(
    launcher: Sequence[object], nodes: str, source: Path, directory: Path, fault: str = "", code: int = 0
) -> list[dict[str, Any]]:
    command = [*launcher, WORKER, nodes, source, directory, *([fault] if fault else [])]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == (code == 0), done.stderr + done.stdout
    return json.loads(done.stdout) if code == 0 else []


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/*.h5"))


@needs_mpi
@pytest.mark.parametrize("nodes", ["a,b,b,a", "a,a,a,b"])
def test_each_byte_leaves_the_shared_file_system_once_and_every_node_has_all(
    source: Path, tmp_path: Path, nodes: str
) -> None:
    answers = run(nodes, source, tmp_path / "{node}")
    assert sum(answer["read_bytes"] for answer in answers) == size(source)
    names = nodes.split(",")
    for node, reported in zip(dict.fromkeys(names), answers[0]["per_node"], strict=True):
        own = [answer for answer, name in zip(answers, names, strict=True) if name == node]
        assert 0 < sum(answer["read_bytes"] for answer in own) == reported < size(source)
        (root,) = {answer["root"] for answer in own}
        assert Path(root).parent == tmp_path / node
        assert compare_files(Path(root), deep=True) == []
    assert {answer["sum"] for answer in answers} == {4.0}
    stats = answers[0]["stats"]
    assert (stats["bytes"], stats["files"], stats["nodes"], stats["reused"]) == (size(source), 7, 2, False)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.long  # tests/test_run.py stages under torchrun in `make test`
def test_torchrun_is_a_launcher_too(source: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    answers = start(torchrun, "a,b", source, tmp_path / "{node}")
    assert sum(answer["read_bytes"] for answer in answers) == size(source)
    assert [compare_files(Path(answer["root"]), deep=True) for answer in answers] == [[], []]


@needs_mpi
def test_a_node_that_has_the_data_receives_nothing_and_the_other_is_completed(source: Path, tmp_path: Path) -> None:
    (first, second) = run("a,b", source, tmp_path / "{node}")
    root = Path(second["root"])
    lost = root / "train/shard_00002.h5"
    kept = {path: path.stat().st_ino for path in tmp_path.rglob("*.h5") if path != lost}
    lost.write_bytes(b"half")
    again = run("a,b", source, tmp_path / "{node}")
    assert sum(answer["read_bytes"] for answer in again) == lost.stat().st_size
    assert compare_files(root, deep=True) == []
    assert {path: path.stat().st_ino for path in kept} == kept
    assert first["stats"]["reused"] is False


@needs_mpi
def test_killed_in_the_middle_leaves_no_manifest_and_the_next_attempt_completes(source: Path, tmp_path: Path) -> None:
    run("a,b", source, tmp_path / "{node}", "kill", code=1)
    assert list(tmp_path.rglob("*.part"))
    assert not list(tmp_path.rglob("manifest.json"))
    entries = {entry.file: entry for entry in _manifest(source).shards}
    for path in tmp_path.rglob("*.h5"):
        assert path.stat().st_size == entries[f"{path.parent.name}/{path.name}"].bytes
    answers = run("a,b", source, tmp_path / "{node}")
    assert not list(tmp_path.rglob("*.part"))
    assert [compare_files(Path(answer["root"]), deep=True) for answer in answers] == [[], []]


@needs_mpi
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("disk", "disk full"),
        ("full", "on node b: no space to stage: needs 0.00 GiB and 64 MiB to spare, 0.00 GiB free"),
    ],
)
def test_a_full_disk_on_one_node_is_one_error_on_every_rank(
    source: Path, tmp_path: Path, fault: str, message: str
) -> None:
    answers = run("a,b,a,b", source, tmp_path / "{node}", fault)
    (error,) = {answer["error"] for answer in answers}
    assert message in error
    assert str(tmp_path / "b") in error
    assert not list(tmp_path.rglob("manifest.json"))
    assert not list(tmp_path.rglob("*.part"))


@needs_mpi
@pytest.mark.parametrize(
    ("harm", "message"),
    [("flip", "damaged on the way to node "), ("cut", "bytes; expected"), ("missing", "No such file or directory")],
)  # fmt: skip
def test_a_damaged_source_is_one_error_on_every_rank_and_nothing_hangs(
    copy: Path, tmp_path: Path, harm: str, message: str
) -> None:
    path = copy / "train/shard_00003.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    {"flip": lambda: path.write_bytes(content), "cut": lambda: path.write_bytes(content[:-1]), "missing": path.unlink}[
        harm
    ]()
    answers = run("a,a,b,b", copy, tmp_path / "{node}")
    (error,) = {answer["error"] for answer in answers}
    assert error.startswith(f"{path}: ")
    assert message in error
    assert not list(tmp_path.glob("[ab]/*/manifest.json"))
    assert not list(tmp_path.rglob("*.part"))


def test_a_valid_stage_is_reused_without_reading(source: Path, tmp_path: Path) -> None:
    world = World.create()
    first = stage(source, tmp_path, world)
    assert (first.reused, first.bytes, first.read_bytes_per_node) == (False, size(source), (size(source),))
    again = stage(source, tmp_path, world)
    assert (again.reused, again.bytes, again.read_bytes_per_node, again.root) == (True, 0, (0,), first.root)


def test_other_data_gets_another_folder(source: Path, copy: Path, tmp_path: Path) -> None:
    manifest = _manifest(copy)
    write_manifest(copy, structs.replace(manifest, seed=2))
    roots = {stage(root, tmp_path / "node", World.create()).root for root in (source, copy)}
    assert len(roots) == 2


def test_without_a_manifest_at_the_source_nothing_is_staged(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest\.json: the manifest of the data set cannot be read"):
        stage(tmp_path / "absent", tmp_path / "node", World.create())
    assert not (tmp_path / "node").exists()


def test_a_staging_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"^{tmp_path}/file: Not a directory$"):
        stage(source, tmp_path / "file", World.create())


def test_the_part_of_a_living_writer_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    file = staging.create_part(tmp_path / "train/alive.part", 10)
    (tmp_path / "train/dead.part").touch()
    (tmp_path / ".manifest.json.n.4194305.part").touch()  # no process has that number
    (tmp_path / f".manifest.json.n.{os.getpid()}.part").touch()  # a job that is finishing: as written_whole names it
    os.utime(tmp_path / f".manifest.json.n.{os.getpid()}.part")
    (tmp_path / f"old.{os.getpid()}.part").touch()
    os.utime(tmp_path / f"old.{os.getpid()}.part", (0, 0))  # of an earlier process with this one's number
    staging.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.part")) == [
        f".manifest.json.n.{os.getpid()}.part",
        "alive.part",
    ]
    os.close(file)


def test_a_flipped_bit_in_an_earlier_copy_is_found_and_copied_again(source: Path, tmp_path: Path) -> None:
    root = stage(source, tmp_path, World.create()).root
    path = root / "train/shard_00002.h5"
    flip(path)
    again = stage(source, tmp_path, World.create())
    assert (again.files, again.damaged, again.bytes) == (1, 1, path.stat().st_size)
    assert compare_files(root, deep=True) == []
    flip(path)
    unverified = stage(source, tmp_path, World.create(), verify=False)
    assert (unverified.reused, unverified.damaged) == (True, 0)


@needs_mpi
def test_each_rank_of_a_node_compares_its_share_of_an_earlier_copy(source: Path, tmp_path: Path) -> None:
    root = Path(run("a,b,a,b", source, tmp_path / "{node}")[1]["root"])
    for name in ("train/shard_00001.h5", "train/shard_00004.h5", "validation/shard_00001.h5"):
        flip(root / name)
    stats = run("a,b,a,b", source, tmp_path / "{node}")[0]["stats"]
    assert (stats["files"], stats["damaged"]) == (3, 3)
    assert compare_files(root, deep=True) == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


OTHER = 65534  # another user


@pytest.mark.skipif(os.geteuid() != 0, reason="to make a file another user's needs root")
@pytest.mark.parametrize("planted", ["folder", "link", "link to nothing", "folder on the way", "link on the way"])
def test_what_another_user_put_where_everybody_may_write_is_refused(source: Path, tmp_path: Path, planted: str) -> None:
    public, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    public.mkdir()
    public.chmod(0o1777)
    elsewhere.mkdir()
    way = planted.endswith("on the way")
    target = find_staged_root(public / "stage" if way else public, _manifest(source), "n")
    place = target.parent if way else target
    if planted.startswith("link"):
        place.symlink_to(tmp_path / "nowhere" if planted == "link to nothing" else elsewhere)
    else:
        place.mkdir()
    os.lchown(place, OTHER, OTHER)
    with pytest.raises(InputError, match=rf"^{place}: this \w+ belongs to user {OTHER} and lies where everybody"):
        stage(source, target.parent, World.create())
    assert not list(elsewhere.iterdir())
    assert not (tmp_path / "nowhere").exists()


def test_folders_made_where_everybody_may_write_are_private_and_may_be_reached_by_the_users_own_link(
    source: Path, tmp_path: Path
) -> None:
    public = tmp_path / "tmp"
    public.mkdir()
    public.chmod(0o1777)
    (tmp_path / "real").mkdir()
    (public / "link").symlink_to(tmp_path / "real")
    root = stage(source, public / "new" / "n", World.create()).root
    assert (public / "new").stat().st_mode & 0o777 == 0o700
    assert compare_files(root, deep=True) == []
    assert stage(source, public / "new" / "n", World.create()).reused
    assert compare_files(stage(source, public / "link", World.create()).root, deep=True) == []


def test_a_place_where_everybody_may_rename_is_refused(source: Path, tmp_path: Path) -> None:
    public = tmp_path / "tmp"
    public.mkdir()
    public.chmod(0o777)
    with pytest.raises(InputError, match=f"^{public}: everybody may write here and rename"):
        stage(source, public, World.create())
    own = find_staged_root(tmp_path, _manifest(source), "n")
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(InputError, match=f"^{own}: everybody may write into this folder"):
        stage(source, tmp_path, World.create())


def test_a_part_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a.part").symlink_to(tmp_path / "precious")
    os.close(staging.create_part(tmp_path / "a.part", 3))
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "a.part").is_symlink()


def test_a_real_small_disk_that_is_full_is_refused_before_anything_is_copied(source: Path, small_disk: Path) -> None:
    with pytest.raises(InputError, match="no space to stage"):
        stage(source, small_disk, World.create())
    assert not list(small_disk.rglob("*.h5"))


@given(
    sizes=st.lists(st.integers(1, 99), min_size=1, max_size=12),
    lanes=st.integers(1, 3),
    nodes=st.integers(1, 4),
    block=st.integers(1, 20),
)
def test_the_schedule_covers_every_byte_of_every_shard_once_in_order(
    sizes: Sequence[int], lanes: int, nodes: int, block: int
) -> None:
    shards = [ShardEntry(file=f"{i}", samples=1, bytes=n, sha256="0" * 64, crc32c="0" * 8) for i, n in enumerate(sizes)]
    plan = plan_reads(range(len(shards)), lanes=lanes, nodes=nodes)
    rounds = count_rounds(shards, plan, block)
    covered: dict[int, int] = {}
    for lane in plan:
        streams = [list_blocks(shards, numbers, block) for numbers in lane]
        for _ in range(rounds):
            sent = list(merge_blocks(streams))
            assert len(sent) <= ROUND_BLOCKS * nodes
            for node, piece in sent:
                assert piece.shard in lane[node]
                assert piece.offset == covered.get(piece.shard, 0)
                covered[piece.shard] = piece.offset + piece.size
                assert piece.last == (covered[piece.shard] == sizes[piece.shard])
        assert not list(merge_blocks(streams))
    assert covered == dict(enumerate(sizes))


def _manifest(root: Path) -> Manifest:
    return msgspec.json.decode((root / "manifest.json").read_text(), type=Manifest)


def test_a_part_file_that_another_job_removed_is_named(tmp_path: Path) -> None:
    """The writer was suspended for minutes, on a disk without locks of files."""
    part = tmp_path / "train_0.h5.node.1.part"
    file = create_part(part, 4096)
    part.unlink()
    with pytest.raises(InputError, match=r"train_0\.h5: another job removed its part file .* begin again"):
        staging._Writer._finish(None, staging._OpenShard(part, file), tmp_path / "train_0.h5")  # type: ignore[arg-type]
