"""A generated data set depends on its recipe alone: not on ranks, order or interruptions. The same for every workload."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlhpc.suite.data.manifest import compare_files, read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from tests.fixtures.warm import warm_python
from tests.workloads.tiny import TINY, generator, make

MPIEXEC = Path(sys.executable).parent / "mpiexec"

ON_RANKS = """
import sys
from pathlib import Path
from mlhpc.suite.world import World
from tests.workloads.tiny import make
world = World.create()
for workload in sys.argv[2:]:
    make(workload, Path(sys.argv[1]) / workload, world)
"""


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny data set of every workload whose packages are here, made in one start of two ranks."""
    root = tmp_path_factory.mktemp("two")
    here = [name for name, tiny in TINY.items() if tiny.needs is None or importlib.util.find_spec(tiny.needs)]
    subprocess.run([MPIEXEC, "-n", "2", *warm_python(), "-c", ON_RANKS, root, *here], check=True, timeout=300)
    return root


@pytest.fixture(params=list(TINY))
def workload(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def data(workload: str, made_once: Callable[[str], Path]) -> Path:
    return made_once(workload)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.drawn(2)
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside python: pip install mpich")
def test_two_ranks_write_the_bytes_of_one(workload: str, data: Path, by_two_ranks: Path) -> None:
    assert contents(by_two_ranks / workload) == contents(data)


def test_the_result_is_complete_and_another_seed_is_other_data(
    workload: str, data: Path, tmp_path: Path, world: World
) -> None:
    tiny = TINY[workload]
    manifest = read_manifest(data)
    assert compare_files(data, deep=True) == []
    samples = {split: count * tiny.samples_each for split, count in tiny.items.items()}
    assert {split: manifest.samples(split) for split in manifest.splits} == samples
    other = read_manifest(make(workload, tmp_path / "other", world, seed=4))
    assert not {entry.sha256 for entry in manifest.shards} & {entry.sha256 for entry in other.shards}


def test_no_sample_is_in_both_splits(workload: str, data: Path) -> None:
    """Float arrays of all samples: synthetic fields, positions and structures are never equal by chance."""
    tiny = TINY[workload]
    seen = {}
    for split, items in tiny.items.items():
        reader = ShardReader(data, split)
        arrays = [reader.read([index]) for index in range(items * tiny.samples_each)]
        name = max(arrays[0], key=lambda key: arrays[0][key].nbytes)
        seen[split] = {each[name].tobytes() for each in arrays}
        assert len(seen[split]) == len(arrays)
    assert not seen["train"] & seen["validation"]


def test_a_killed_generation_is_continued_to_the_same_bytes(
    workload: str, data: Path, tmp_path: Path, world: World
) -> None:
    root, tiny = tmp_path / "killed", TINY[workload]

    def until_the_second_shard(done: int, total: int) -> None:
        assert total == sum(tiny.items.values())
        if done > tiny.per_shard:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(workload, root, world, progress=until_the_second_shard)
    assert not (root / "manifest.json").exists()
    finished = root / "train" / "shard_00000.h5"
    before = finished.stat().st_ino
    made: list[int] = []
    make(workload, root, world, progress=lambda done, total: made.append(done))
    assert made[-1] == sum(tiny.items.values()) - tiny.per_shard  # the finished shard is kept
    assert finished.stat().st_ino == before
    assert contents(root) == contents(data)


def test_a_complete_data_set_is_left_alone(workload: str, data: Path, world: World) -> None:
    before = contents(data)
    make(workload, data, world, progress=lambda done, total: pytest.fail("made again"))
    assert contents(data) == before


def test_a_folder_with_other_content_is_refused(workload: str, data: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(InputError, match="holds a data set with seed = 3, not 4"):
        make(workload, data, world, seed=4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(InputError, match="has files but no data set"):
        make(workload, tmp_path / "mine", world)
    generate = generator(workload).generate
    with pytest.raises(InputError, match=f"{workload}: unknown size 'huge'; sizes: smoke, mini"):
        generate(tmp_path / "new", "huge", seed=3, world=world)
    with pytest.raises(InputError, match="seed -1: expected an integer from 0"):
        generate(tmp_path / "new", "smoke", seed=-1, world=world)
    assert not (tmp_path / "new").exists()
