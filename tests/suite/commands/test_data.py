"""mlhpc data: what is made is verified, what is there is kept, and mistakes are one line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mlhpc.suite.cli.progress import make_plain_progress
from mlhpc.suite.commands import data as module
from mlhpc.suite.commands.data import data
from mlhpc.suite.data.manifest import Manifest, read_manifest, write_manifest
from mlhpc.suite.data.shards import build_shard_path, write_shard
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from tests.fixtures.warm import warm_python

DATA_BYTES = {"full": 2**50}


def toy_generate(
    root: Path, size: str, *, seed: int, world: World, progress: Callable[[int, int], None] | None = None
) -> None:
    """One shard per rank."""
    rng = np.random.default_rng([seed, world.rank])
    entry = write_shard(build_shard_path(root, "train", world.rank), {"x": rng.random((3, 4))})
    if progress is not None:
        progress(1, 1)
    entries = tuple(world.allgather(entry))
    if world.is_first:
        manifest = Manifest(workload="toy", size=size, seed=seed, generator={}, splits={"train": entries})
        write_manifest(root, manifest)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A workload `toy` whose generator has what a test gives it."""
    functions = SimpleNamespace(generate=toy_generate)
    card = SimpleNamespace(size=lambda name: SimpleNamespace(data_bytes=DATA_BYTES.get(name, 0)))
    chosen = SimpleNamespace(
        name="toy",
        card=lambda: card,
        load_generator=lambda: functions,
        implementation="mlhpc.workloads.cosmoflow.workload:CosmoFlow",
        code=lambda: "mlhpc.workloads.cosmoflow.workload:CosmoFlow",
    )
    monkeypatch.setattr(module, "load_descriptor", lambda name: chosen)
    return functions


def invoke(*words: object) -> Result:
    return CliRunner().invoke(data, [str(word) for word in words])


def test_importing_the_command_loads_nothing_heavy() -> None:
    heavy = "torch mpi4py h5py numpy pandas"
    code = f"import sys, mlhpc.suite.commands.data; print([m for m in {heavy.split()!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_data_set_is_generated_where_it_belongs_and_is_fine(
    generator: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLHPC_DATA", str(tmp_path / "all"))
    made = invoke("generate", "toy", "--size", "smoke", "--seed", 5)
    root = tmp_path / "all/toy-smoke"
    assert made.exit_code == 0
    assert made.output == f"{root}: toy smoke, 3 train samples, 0.00 GB in 1 shards: complete\n"
    assert read_manifest(root).seed == 5
    verified = invoke("verify", root, "--deep")
    assert verified.exit_code == 0
    assert "fine: checksums of every byte" in verified.output


def test_a_complete_data_set_is_kept_and_another_is_refused(generator: SimpleNamespace, tmp_path: Path) -> None:
    invoke("generate", "toy", "--size", "smoke", "-o", tmp_path)
    shard = build_shard_path(tmp_path, "train", 0)
    before = shard.stat().st_mtime_ns
    again = invoke("generate", "toy", "--size", "smoke", "-o", tmp_path)
    assert (again.exit_code, shard.stat().st_mtime_ns) == (0, before)
    assert "complete already" in again.output
    other = invoke("generate", "toy", "--size", "smoke", "--seed", 9, "-o", tmp_path)
    assert isinstance(other.exception, ValueError)
    assert str(other.exception).startswith(f"{tmp_path}: holds toy smoke of seed 0, not toy smoke of seed 9")
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged = invoke("generate", "toy", "--size", "smoke", "-o", tmp_path)
    assert str(damaged.exception).startswith(f"{shard}: truncated")


def test_a_data_set_that_does_not_fit_is_refused_before_it_begins(
    generator: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda place: SimpleNamespace(free=2**30))
    refused = invoke("generate", "toy", "--size", "full", "-o", tmp_path / "far" / "d")
    assert isinstance(refused.exception, InputError)
    assert "d: toy full takes 1 PiB, 1 GiB are free here; choose another folder with -o" in str(refused.exception)
    assert not (tmp_path / "far").exists()
    monkeypatch.setitem(DATA_BYTES, "half", 2**30 + 10)
    (tmp_path / "begun").write_bytes(b"0" * 10)
    assert invoke("generate", "toy", "--size", "half", "-o", tmp_path).exit_code == 0, "what is there needs no room"


def test_a_flipped_bit_makes_verify_exit_1_and_name_the_file(generator: SimpleNamespace, tmp_path: Path) -> None:
    invoke("generate", "toy", "--size", "smoke", "-o", tmp_path)
    shard = build_shard_path(tmp_path, "train", 0)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 16
    shard.write_bytes(content)
    assert invoke("verify", tmp_path).exit_code == 0
    found = invoke("verify", tmp_path, "--deep")
    assert found.exit_code == 1
    assert found.output.startswith(f"{shard}: damaged: crc32c")


def test_what_a_workload_cannot_do_is_said(generator: SimpleNamespace, tmp_path: Path) -> None:
    for words, message in (
        (
            ("convert", "toy", tmp_path, "-o", tmp_path / "new"),
            "toy: `mlhpc data convert` does not support this workload",
        ),
        (("fetch", "toy"), "toy: `mlhpc data fetch` does not support this workload"),
        (("convert", "toy", tmp_path / "absent", "-o", tmp_path / "new"), f"{tmp_path}/absent: does not exist"),
    ):
        assert str(invoke(*words).exception).startswith(message)


def test_fetch_says_what_to_do_next_and_shows_progress_where_there_is_some(
    generator: SimpleNamespace, tmp_path: Path
) -> None:
    told: list[bool] = []
    for fetch in (
        lambda folder, *, source: told.append(False),
        lambda folder, *, source, progress: told.append(callable(progress)),
    ):
        generator.fetch = fetch
        done = invoke("fetch", "toy", "-o", tmp_path / "new")
        assert (
            done.output
            == f"{tmp_path}/new: checked and complete; mlhpc data convert toy {tmp_path}/new makes a data set of it\n"
        )
    assert told == [False, True]


def test_trust_in_pickles_reaches_the_workload_and_only_one_that_has_them(
    generator: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "_print_data_set", lambda root, world: None)
    generator.convert = lambda source, root, *, world, size, progress, trust_pickles=False: calls.append(
        {"trust": trust_pickles}
    )
    for words in ((), ("--trust-pickles",)):
        assert invoke("convert", "toy", tmp_path, "-o", tmp_path / "new", *words).exit_code == 0
    assert calls == [{"trust": False}, {"trust": True}]
    generator.convert = lambda source, root, *, world, size, progress: None
    refused = invoke("convert", "toy", tmp_path, "-o", tmp_path / "new", "--trust-pickles")
    assert str(refused.exception) == "--trust-pickles: the files of toy are no pickles; leave the option out"


def test_several_ranks_become_mpiexec_with_the_same_command(
    generator: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def run_attached(command: list[str], *, ranks: int, environ: dict[str, str]) -> int:
        started.append([str(ranks), *command])
        return 0

    monkeypatch.setattr("mlhpc.suite.commands.data.run_attached", run_attached)
    invoke("generate", "toy", "--size", "smoke", "--ranks", 3, "-o", tmp_path / "d")
    words = ["generate", "toy", "--size", "smoke", "--seed", "0", "-o", str(tmp_path / "d")]
    assert started == [["3", sys.executable, "-P", "-m", "mlhpc", "data", *words]]


def test_plain_progress_speaks_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 1.0, 6.0, 11.0, 12.0])
    tell = make_plain_progress("toy", lambda: next(now))
    for done in (1, 2, 3, 8):
        tell(done, 8)
    assert capsys.readouterr().err == "toy: 25 %\ntoy: 37 %, about 18 s left\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("data", "generate", "cosmoflow", "--size", "tiny"),
            2,
            "mlhpc: cosmoflow: unknown size 'tiny'; did you mean 'smoke'? sizes: ",
        ),
        (("data", "generate", "nosuch", "--size", "tiny"), 2, "mlhpc: unknown workload 'nosuch'; workloads: cosmoflow"),
        (("data", "generate", "cosmoflow", "--size", "smoke", "--ranks", "2", "-o", "/proc/no"), 2, "mlhpc: "),
        (("data", "verify", "/nowhere"), 2, "mlhpc: /nowhere: does not exist; expected the folder of a data set"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(words: tuple[str, ...], code: int, message: str) -> None:
    command = [*warm_python(), "-m", "mlhpc", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
