"""File systems that nodes share, as NFS, Lustre and BeeGFS answer: late, without locks, twice. And files written whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlhpc.suite.files import make_folder, write_atomically, write_file_atomically
from tests.fixtures.runs import run_folder
from tests.fixtures.shared_disk import shared_disk

MLHPC = str(Path(sys.executable).with_name("mlhpc"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library") / "shared_disk.so"


def python(program: str, environment: object, *arguments: Path) -> str:
    """What a program prints on such a disk."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


HEAD = "import sys; from pathlib import Path; from mlhpc.suite.files import *; disk = Path(sys.argv[1])\n"


def test_a_folder_that_stat_does_not_know_yet_is_made(library: Path, tmp_path: Path) -> None:
    """mkdir says that it exists, stat that it does not: another node made it a moment ago."""
    environment = shared_disk(library, tmp_path, stale=1)
    plain = "(disk / 'a').mkdir(exist_ok=True)"
    with pytest.raises(AssertionError, match="FileExistsError"):
        python(HEAD + plain, environment, tmp_path)
    python(HEAD + "make_folder(disk / 'b' / 'c'); write_file_atomically(disk / 'd/e/f', 'x')", environment, tmp_path)
    assert (tmp_path / "b" / "c").is_dir()
    assert (tmp_path / "d" / "e" / "f").read_text() == "x"


@pytest.mark.parametrize(
    "program",
    [
        "from mlhpc.suite.machine.power.sampler import main; from unittest import mock\n"
        "with mock.patch('mlhpc.suite.machine.power.sampler.list_scopes', return_value=[]): main([str(disk / 'p'), '0'])",
        "from mlhpc.suite.data.staging import make_folders; make_folders(disk / 'copy', ['train'])",
        "from mlhpc.suite.log.run_folder import create_run_folder; create_run_folder(disk / 'runs' / 'R')",
        "from mlhpc.suite.data.lock import create_lock_for_all_ranks; from mlhpc.suite.world import World\n"
        "with create_lock_for_all_ranks(disk / 'data' / 'lock', 'it', World.create()): pass",
        "from mlhpc.suite.package.build import make_folder; make_folder(disk / 'power' / 'result_0')",
        "from mlhpc.suite.launch.local import keep_heartbeat\n"
        "with keep_heartbeat(disk / 'exit' / 'trial_0.running', 'it'): assert (disk / 'exit' / 'trial_0.running').exists()",
        "from mlhpc.suite.log.run_folder import RunFolder; RunFolder(disk).move_checkpoint_aside(0)",
        "with make_scratch_folder(disk, '.ACME-') as folder: (folder / 'x').write_text('x')\nassert not list(disk.glob('.ACME*'))",
    ],
    ids=["power", "staging", "run", "lock", "package", "heartbeat", "checkpoint", "scratch"],
)
def test_parts_of_a_run_start_where_stat_is_late(library: Path, tmp_path: Path, program: str) -> None:
    python(HEAD + program, shared_disk(library, tmp_path, stale=1), tmp_path)


def test_every_folder_is_made_by_the_maker_of_folders() -> None:
    """Others take the word of mkdir: the owner's folder in /tmp, and the one whose rights are checked on the way."""
    root = Path(__file__).resolve().parents[2]
    paths = [path for name in ("suite", "analysis", "workloads", "plugins") for path in (root / name).rglob("*.py")]
    found = {str(path.relative_to(root)) for path in paths if re.search(r"\.mkdir\(|makedirs\(", path.read_text())}
    assert found == {"suite/files.py", "suite/data/staging.py"}


@pytest.mark.parametrize("what", ["file", "link to nothing", "below a file", "without right"])
def test_a_folder_that_cannot_be_is_an_error_that_names_it(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "new")
    if what == "file":
        with pytest.raises(NotADirectoryError, match="file"):
            make_folder(tmp_path / "file")
    elif what == "below a file":
        with pytest.raises(NotADirectoryError):
            make_folder(tmp_path / "file" / "a" / "b")
    elif what == "without right":
        with pytest.raises(OSError, match="proc"):
            make_folder(Path("/proc/mlhpc/new"))
    else:
        make_folder(tmp_path / "link")
        assert (tmp_path / "elsewhere" / "new").is_dir()
        make_folder(tmp_path / "link")


@pytest.mark.parametrize("error", [37, 11, 95, 38])
def test_data_are_written_and_staged_where_files_cannot_be_locked(library: Path, tmp_path: Path, error: int) -> None:
    """ENOLCK, EAGAIN, EOPNOTSUPP and ENOSYS of flock: a part file has one writer, and needs no lock."""
    program = """
import numpy as np
from mlhpc.suite.data.shards import write_shard, count_stored_bytes
from mlhpc.suite.data.staging import create_part, remove_abandoned
path = disk / "train" / "shard_00000.h5"
write_shard(path, {"x": np.ones((2, 3), np.float32)})
print(count_stored_bytes(path))
import os
import re
os.close(create_part(disk / "train" / "a.1.part", 4096))
remove_abandoned(disk)
"""
    assert python(HEAD + program, shared_disk(library, tmp_path, locks=error), tmp_path) == "24\n"


def test_an_abandoned_part_goes_also_where_files_cannot_be_locked(library: Path, tmp_path: Path) -> None:
    """A silent one whose process has ended; one that was written a moment ago stays: its writer may be in a container."""
    old, new = tmp_path / "a.4000000.part", tmp_path / "b.4000000.part"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (0, 0))
    program = "from mlhpc.suite.data.staging import remove_abandoned; remove_abandoned(disk)"
    python(HEAD + program, shared_disk(library, tmp_path, locks=37), tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("links", [-1, 95, 1])
def test_a_new_file_is_written_once_whatever_link_answers(library: Path, tmp_path: Path, links: int) -> None:
    """-1: the link is made, and a repeated request says that it exists."""
    program = "write_file_atomically(disk / 'new', 'x', overwrite=False)"
    environment = shared_disk(library, tmp_path, links=links)
    python(HEAD + program, environment, tmp_path)
    with pytest.raises(AssertionError, match=r"FileExistsError: .*new'\n"):
        python(HEAD + program, environment, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    lock = "from mlhpc.suite.data.lock import create_lock\nwith create_lock(disk / 'lock', 'it'): print((disk / 'lock').exists())"
    assert python(HEAD + lock, environment, tmp_path) == "True\n"


@pytest.mark.parametrize("error", [28, 5, 122])
def test_an_error_of_the_disk_names_the_file_that_was_asked_for(library: Path, tmp_path: Path, error: int) -> None:
    (source := tmp_path / "source").write_text("x" * 2**20)
    (disk := tmp_path / "disk").mkdir()
    program = """
import shutil
import numpy as np
from mlhpc.suite.data.shards import write_shard
def copy():
    with write_atomically(disk / "copy") as part: shutil.copyfile(sys.argv[2], part)
def shard(): write_shard(disk / "train" / "s.h5", {"x": np.ones((64, 4096), np.float32)})
def packed(): write_shard(disk / "train" / "s.h5", {"x": np.ones((64, 4096), np.float32)}, compression="gzip")
for act in (lambda: write_file_atomically(disk / "text", "x"), copy, shard, packed):
    try: act()
    except OSError as failure: print(render_error(failure))
"""
    told = python(HEAD + program, shared_disk(library, disk, writes=error), disk, source).splitlines()
    reason = {28: "disk full", 122: "quota exceeded"}.get(error, os.strerror(error))
    assert told[0] == f"{disk / 'text'}: {reason}"
    assert told[1] in (f"{disk / 'copy'}: {reason}", f"{source}: {reason}")[: 2 if error == 5 else 1]
    assert told[2] == told[3] == f"{disk / 'train' / 's.h5'}: {reason}"
    assert not [path for path in disk.rglob("*") if path.is_file()]


@pytest.mark.long
def test_eight_that_add_one_result_to_a_history_all_succeed(tmp_path: Path) -> None:
    run_folder(tmp_path / "R")
    words = [MLHPC, *["history", "add", "R", "--any", "-o", "H"]]
    begun = [
        subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(8)
    ]
    told = [each.communicate(timeout=300)[0] for each in begun]
    assert [each.returncode for each in begun] == [0] * 8, told
    assert sorted(text.rsplit(": ", 1)[1] for text in told) == ["added\n"] + ["there already\n"] * 7
    (path,) = (tmp_path / "H").iterdir()
    assert json.loads(path.read_text())["version"] == 1


def test_a_file_is_written_through_links_and_never_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to(tmp_path / "real" / "file")
    for text in ("first", "second"):
        write_file_atomically(tmp_path / "one", text)
        assert (tmp_path / "real" / "file").read_text() == text
    with pytest.raises(FileExistsError):
        write_file_atomically(tmp_path / "one", "third", overwrite=False)
    assert (tmp_path / "one").is_symlink()
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["file"]
    with pytest.raises(IsADirectoryError, match="real'$"):
        write_file_atomically(tmp_path / "real", "x")
    with pytest.raises(FileNotFoundError, match="one'$"), write_atomically(tmp_path / "one"):
        pass  # nothing was written
    assert (tmp_path / "one").read_text() == "second"
