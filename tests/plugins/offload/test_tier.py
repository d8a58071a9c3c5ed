"""Files of experts: damage is found before use, a run that ends leaves nothing, two runs never share a folder."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mlhpc.plugins.offload import tier
from mlhpc.plugins.offload.tier import FileTier, Key
from mlhpc.suite.data.lock import LockedError
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.checkpoint import Checkpoint
from tests.plugins.offload.conftest import Run, in_files

ROOT = Path(__file__).resolve().parents[3]
KEY = Key(0, 1, "weights")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << (place % 8)
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda path: path.write_bytes(path.read_bytes()[:-3]), r"has \d+ bytes, \d+ were written"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has \d+ bytes, \d+ were written"),
    "gone": (Path.unlink, "is gone"),
    **{f"bit {place}": (lambda path, place=place: flip(path, place), "its checksum") for place in (0, 9, 70, 200, -1)},
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line_before_any_value_is_used(tmp_path: Path, kind: str) -> None:
    files = FileTier(tmp_path / "rank0-0", tmp_path / "rank0.lock")
    files.write(KEY, {"up": torch.rand(4, 4), "down": torch.rand(4, 2)})
    damage, text = DAMAGE[kind]
    damage(next(files.folder.iterdir()))
    with pytest.raises(InputError, match=rf"layer0-expert1-weights\S*: {text}.*--resume$"):
        files.read(KEY)
    files.close()


def test_damage_ends_a_training(start: Any, tmp_path: Path) -> None:
    run = start("moe_lm", *in_files(tmp_path, cache=50_000)).train(0, 1)
    run.keeper.cache.settle()
    for path in run.keeper.tier.folder.glob("layer1-*weights*"):
        flip(path, 300)
    with pytest.raises(InputError, match="its checksum is not that of what was written"):
        run.train(1, 3)


def test_a_full_disk_is_one_line(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("moe_lm", *in_files(tmp_path)).train(0, 1)

    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=r"disk full: '.*layer\d-expert\d-"):
        run.train(1, 3)


def test_the_index_names_whole_files_at_any_moment(tmp_path: Path) -> None:
    files = FileTier(tmp_path / "rank0-0", tmp_path / "rank0.lock")
    for value in range(3):
        for expert in range(2):
            files.write(Key(0, expert, "weights"), {"up": torch.full((4,), float(value + expert))})
        if value:
            index = json.loads((files.folder / tier.INDEX).read_text())
            named = [load_file(files.folder / name)["up"][0].item() for name in index]
            assert named == [value - 1, value]  # what was committed last
        files.commit()
        assert len(list(files.folder.glob("*.safetensors"))) == 2
    files.close()


def test_another_process_is_refused_and_a_killed_one_is_cleaned_up(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from mlhpc.suite.data.lock import create_lock\n"
        "root = Path(sys.argv[1]); (root / 'rank0-9').mkdir(); (root / 'rank0-9' / 'x').write_text('x')\n"
        "with create_lock(root / 'rank0.lock', 'it'): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(LockedError, match=rf"the folder of offloaded experts is in use by process {other.pid}"):
        FileTier(tmp_path / "rank0-0", tmp_path / "rank0.lock")
    other.kill()
    other.communicate()
    files = FileTier(tmp_path / "rank0-0", tmp_path / "rank0.lock")
    assert {path.name for path in tmp_path.iterdir()} == {"rank0-0", "rank0.lock"}
    files.close()
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from mlhpc.plugins.offload import tier
from mlhpc.suite.world import World
from tests.plugins.offload.conftest import Run, configure, in_files
root = Path(sys.argv[1])
run = Run(configure("moe_lm", *in_files(root / "tier", 60_000)), World.create(None), []).train(0, 2)
run.save(root / "c" / "trial_0.pt")
run.train(2, 3)
tier.FileTier.commit = lambda self: os.kill(os.getpid(), signal.SIGKILL)
run.train(3, 5)
"""


@pytest.mark.long
def test_a_kill_between_files_and_index_changes_nothing_after_resume(start: Any, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (
        len(list((tmp_path / "tier").glob("rank0-*/*.safetensors"))) > 3 * 6 * 2
    )  # new ones beside those of the index
    whole: Run = start("moe_lm").train(0, 5)
    run: Run = start("moe_lm", *in_files(tmp_path / "tier", 60_000))
    Checkpoint(tmp_path / "c" / "trial_0.pt", {}).load(run.world, run.state)
    assert run.train(2, 5).losses == whole.losses[2:]
    assert len(list((tmp_path / "tier").iterdir())) == 2


SITE = """
import os, signal
if os.environ.get("KILL_AT"):
    from mlhpc.plugins.offload import tier
    commit, seen = tier.FileTier.commit, []
    def kill(self):
        seen.append(self)
        if len(seen) == int(os.environ["KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self)
    tier.FileTier.commit = kill
"""


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_200_steps_with_a_kill_have_the_losses_of_a_run_without(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "site")}

    def call(*words: object, kill: int = 0) -> str:
        command = [sys.executable, "-m", "mlhpc", *map(str, words)]
        killed = environment | ({"KILL_AT": str(kill)} if kill else {})
        return subprocess.run(
            command, cwd=ROOT, env=killed, capture_output=True, text=True, timeout=500, check=False
        ).stdout  # fmt: skip

    call("data", "generate", "moe_lm", "--size", "smoke", "-o", tmp_path / "data")
    sets = [f"data={tmp_path / 'data'}", "max_epochs=2", "window_steps=1", "checkpoint.interval_s=2"]
    run = ("run", "moe_lm", "--size", "smoke", "--ranks", ranks, "--runs", 1, "--seed", 1)
    plain = [word for each in sets for word in ("--set", each)]
    away = in_files(tmp_path / "tier", 600_000)
    more = [word for each in away for word in ("--set", f"hyperparameters.moe.{each}")]
    call(*run, *plain, "-o", tmp_path / "without")
    call(*run, *plain, *more, "-o", tmp_path / "with", kill=150)
    assert list((tmp_path / "with" / "checkpoint").iterdir())
    call(*run, *plain, *more, "-o", tmp_path / "with", "--resume")
    losses = re.compile(r'"step_phases".*?"loss": ([\d.e-]+)')
    expected = losses.findall((tmp_path / "without" / "result_0.txt").read_text())
    found = losses.findall((tmp_path / "with" / "resumed_0_1.txt").read_text())
    assert len(expected) == 200
    assert 50 <= len(found) < 200
    assert found == expected[-len(found) :]
    assert not list((tmp_path / "tier").iterdir())


@pytest.mark.long
def test_experts_spread_by_a_plan_have_the_losses_of_a_run_without(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def call(*words: object) -> None:
        command = [sys.executable, "-m", "mlhpc", *map(str, words)]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=500, check=False)

    call("data", "generate", "moe_lm", "--size", "smoke", "-o", tmp_path / "data")
    run = ("run", "moe_lm", "--size", "smoke", "--ranks", 2, "--runs", 1, "--seed", 1, "--plan", "experts")
    plain = ("--set", f"data={tmp_path / 'data'}", "--set", "max_epochs=1", "--set", "window_steps=5")
    more = [word for each in in_files(tmp_path / "tier", 600_000) for word in ("--set", f"hyperparameters.moe.{each}")]
    call(*run, *plain, "-o", tmp_path / "without")
    call(*run, *plain, *more, "-o", tmp_path / "with")
    values = re.compile(r'"(?:loss": |eval_error", "value": )([\d.e-]+)')
    expected, found = (values.findall((tmp_path / name / "result_0.txt").read_text()) for name in ("without", "with"))
    assert len(expected) > 20
    assert found == expected
