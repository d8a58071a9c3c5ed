"""A checkpoint is whole or not there: crashes between its files, files of other runs, damaged files. One process stands for all."""

from __future__ import annotations

import os
import pickle
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import msgspec
import pytest
import torch
from msgspec import structs
from torch import nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.log import checkpoint_index
from mlhpc.suite.log.checkpoint_index import find_damage
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training import checkpoint, dcp
from mlhpc.suite.training.checkpoint import Checkpoint, CheckpointSaver, find_refusal
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.workload import Optimization
from mlhpc.suite.world import World

IDENTITY = {"data_manifest": "abc"}


def world(size: int) -> World:
    """Rank 0 of a world in which the other ranks say what rank 0 says."""
    return World("test", 0, size, 0, 1, 0, size, ("here",), SingleProcessTransport(), SingleProcessTransport())


def training(value: float, *, sharded: bool = True) -> TrainingState:
    """A model with a share, a buffer and optimizer state."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    for tensor in (*model.parameters(), *model.buffers(), *optimizer.state[model[0].bias].values()):
        tensor.data.fill_(value)
    return TrainingState(
        model, Optimization(optimizer, lambda step, epoch: 0.1), [model[0].weight] if sharded else [], None, int(value)
    )


def content(state: TrainingState) -> list[float]:
    optimizer = state.optimization.optimizer.state[list(state.model.parameters())[1]]
    return [t.flatten()[0].item() for t in (*state.model.parameters(), *state.model.buffers(), *optimizer.values())]


def save(path: Path, size: int, state: TrainingState, position: Position) -> list[str]:
    """Save at once and return the warnings."""
    warnings: list[str] = []
    CheckpointSaver(Checkpoint(path, IDENTITY), world(size), EventLog(None), None, warnings.append).save(
        state, position, 1
    )
    return warnings


def load(path: Path, size: int, state: TrainingState) -> Position:
    return Checkpoint(path, IDENTITY).load(world(size), state).position


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path, saved, other = tmp_path / "c" / "trial_0.pt", training(2.0), training(5.0)
    assert save(path, 1, saved, Position(3, 4)) == []
    assert len(list(path.parent.iterdir())) == 2
    assert load(path, 1, other) == Position(3, 4)
    assert other.seed == saved.seed == 2
    assert content(other) == content(saved)
    Checkpoint(path, IDENTITY).remove()
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("at", ["own", "metadata", "commit"])
def test_a_crash_at_any_moment_leaves_the_former_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    path = tmp_path / "trial_0.pt"
    save(path, 1, training(2.0), Position(1, 0))
    snapshot = Checkpoint(path, IDENTITY).snapshot(world(1), training(3.0), Position(2, 0))
    if at == "own":
        monkeypatch.setattr(torch, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            snapshot.write()
    else:
        written = snapshot.write()
        monkeypatch.setattr(Path, "rename" if at == "metadata" else "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            snapshot.commit([written])
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) > 2
    state = training(5.0)
    assert load(path, 1, state) == Position(1, 0)
    assert content(state) == content(training(2.0))
    save(path, 1, training(4.0), Position(3, 0))
    assert len(list(tmp_path.iterdir())) == 2  # what the crash left is gone
    assert load(path, 1, state) == Position(3, 0)


def crash(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("number", "text"), [(28, "disk full"), (122, "quota exceeded"), (13, "Permission denied"), (5, "")]
)
@pytest.mark.parametrize("at", ["save", "metadata", "commit"])
def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_the_former_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str, at: str
) -> None:
    path = tmp_path / "trial_0.pt"
    save(path, 1, training(2.0), Position(1, 0))
    before = sorted(tmp_path.iterdir())

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    target = {"save": (dcp._Summed, "write"), "metadata": (Path, "rename"), "commit": (Path, "replace")}[at]
    monkeypatch.setattr(*target, fail)
    (warning,) = save(path, 1, training(3.0), Position(2, 0))
    monkeypatch.undo()
    assert warning.startswith(f"checkpoint not written: {tmp_path}/trial_0.")
    assert text in warning
    assert "\n" not in warning
    assert sorted(tmp_path.iterdir()) == before
    assert load(path, 1, training(5.0)) == Position(1, 0)
    assert save(path, 1, training(3.0), Position(2, 0)) == []
    assert load(path, 1, training(5.0)) == Position(2, 0)


def test_slow_cleaning_after_a_checkpoint_does_not_remove_the_next_ones_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, remove_others = tmp_path / "trial_0.pt", Checkpoint.remove_others

    def slow(self: Checkpoint, token: str | None) -> None:
        """Remove once a later checkpoint has written its files, which must not come while this goes on."""
        end = time.monotonic() + 0.5
        while time.monotonic() < end and len(list(tmp_path.glob("*/*.distcp"))) < 2:
            time.sleep(0.001)
        remove_others(self, token)

    monkeypatch.setattr(Checkpoint, "remove_others", slow)
    saver = CheckpointSaver(Checkpoint(path, IDENTITY), world(1), EventLog(None), 0.001)
    saver.begin(training(2.0), Position(1, 0), 1)
    assert saver.save(training(3.0), Position(2, 0), 1)  # a stop signal right after the timed one
    assert load(path, 1, training(5.0)) == Position(2, 0)


def test_training_that_changes_while_it_is_written_does_not_change_what_was_saved(tmp_path: Path) -> None:
    path, state = tmp_path / "trial_0.pt", training(2.0)
    snapshot = Checkpoint(path, IDENTITY).snapshot(world(1), state, Position(1, 0))
    for tensor in (*state.model.parameters(), *state.model.buffers()):
        tensor.data.fill_(9.0)
    state.optimization.optimizer.state[state.model[1].bias]["exp_avg"].fill_(9.0)  # type: ignore[index]
    snapshot.commit([snapshot.write()])
    other = training(5.0)
    load(path, 1, other)
    assert content(other) == content(training(2.0))


def test_a_checkpoint_that_is_not_of_this_run_is_refused_and_nothing_is_restored(tmp_path: Path) -> None:
    path, state = tmp_path / "trial_0.pt", training(5.0)
    with pytest.raises(InputError, match="there is no checkpoint"):
        load(path, 1, state)
    save(path, 1, training(2.0), Position(1, 0))
    with pytest.raises(InputError, match="not of this run: data_manifest: checkpoint 'abc', data set 'other'"):
        Checkpoint(path, {"data_manifest": "other"}).load(world(1), state)
    with pytest.raises(InputError, match="of 1 ranks, each with its share of the parameters; this run has 3"):
        load(path, 3, state)
    (own,) = tmp_path.glob("*/*.distcp")
    whole = own.read_bytes()
    for damaged in (whole[:50], whole[:-1], b"", bytes([whole[0] ^ 1]) + whole[1:], whole[:-9] + b"x" + whole[-8:]):
        own.write_bytes(damaged)
        with pytest.raises(InputError, match="__0_0.distcp: damaged: it has another checksum"):
            load(path, 1, state)
    own.unlink()
    with pytest.raises(InputError, match="__0_0.distcp: cannot be read: No such file"):
        load(path, 1, state)
    path.write_bytes(path.read_bytes()[:90])
    with pytest.raises(InputError, match="trial_0.pt: damaged: its checksum"):
        load(path, 1, state)
    for found in (b'{"version": 9}', b"{}", b"[1]", b'{"version": 10}'):
        path.write_bytes(checkpoint_index._render_checksum(found) + found)
        with pytest.raises(InputError, match="trial_0.pt: (checkpoint version (9|None); this suite|not the index)"):
            load(path, 1, state)
    assert content(state) == content(training(5.0))


@pytest.mark.parametrize(
    ("saved", "wanted", "said"),
    [
        ({"a": {"b": 0.006, "c": 1}}, {"a": {"b": 0.007, "c": 1}}, "a.b: checkpoint 0.006, config 0.007"),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, "a.b: checkpoint 1, config none; a.c: checkpoint none, config 2"),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a: checkpoint [1, 2], config [2, 1]"),
        ({"a": {"b": 1}}, {"a": None}, "a: checkpoint {'b': 1}, config None"),
    ],
)
def test_a_refusal_names_the_keys_that_differ_and_a_way_on(
    tmp_path: Path, saved: dict[str, Any], wanted: dict[str, Any], said: str
) -> None:
    path, state = tmp_path / "trial_0.pt", training(5.0)
    kept = Checkpoint(path, {"config": saved, "data_manifest": "x"})
    CheckpointSaver(kept, world(1), EventLog(None), None).save(training(2.0), Position(1, 0), 1)
    other = Checkpoint(path, {"config": wanted, "data_manifest": "x"})
    with pytest.raises(InputError) as refused:
        other.load(world(1), state)
    assert str(refused.value) == (
        f"{path}: is not of this run: {said}; restore that, or begin anew: --resume --replace-failed"
    )
    assert find_refusal(other, 1) == f"{path}: is not of this run: {said}"
    assert find_refusal(kept, 1) is None


def test_a_disk_that_fills_while_a_rank_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.save answers it with an error about positions, which hides it."""
    real = dcp._Summed

    class Full:
        def __init__(self, file: Any, room: int) -> None:
            self.file, self.room = file, room
            self.flush, self.close, self.fileno = file.flush, file.close, file.fileno

        def write(self, data: Any) -> int:
            self.room -= len(memoryview(data).cast("B"))
            if self.room < 0:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data))

    for room in (0, 100, 1000, 2500):
        monkeypatch.setattr(dcp, "_Summed", lambda raw, kept, room=room: real(Full(raw, room), kept))
        (text,) = save(tmp_path / "trial_0.pt", 1, training(2.0), Position(1, 0))
        assert re.fullmatch(rf"checkpoint not written: {tmp_path}/trial_0\.\w+/?\S*: disk full", text)


def test_no_flipped_bit_of_any_file_is_loaded(tmp_path: Path) -> None:
    """One of 200 random single bits, over all files by their size, and each end of each file."""
    path, state, chance = tmp_path / "trial_0.pt", training(5.0), random.Random(44)
    save(path, 1, training(2.0), Position(1, 0))
    assert find_damage(path) is None
    files = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()}
    places = [(file, bit) for file, data in files.items() for bit in (0, 7, 8 * len(data) - 1)]
    weights = [len(data) for data in files.values()]
    for file in chance.choices(list(files), weights, k=100) + chance.choices(list(files), k=100):
        places.append((file, chance.randrange(8 * len(files[file]))))
    for file, bit in places:
        data = bytearray(files[file])
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        if file.name == ".metadata":  # for other programs: not read here
            assert load(path, 1, training(5.0)) == Position(1, 0)
        else:
            with pytest.raises(InputError, match=f"^{re.escape(str(file))}: ") as caught:
                load(path, 1, state)
            assert "\n" not in str(caught.value)
        assert str(find_damage(path)).startswith(f"{file}: damaged: ")
        file.write_bytes(files[file])
    assert content(state) == content(training(5.0))
    assert load(path, 1, state) == Position(1, 0)


def test_readers_share_the_files_and_a_large_checkpoint_is_compared_by_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "trial_0.pt"
    save(path, 1, training(2.0), Position(1, 0))
    (file,) = tmp_path.glob("*/*.distcp")
    whole, size = file.read_bytes(), checkpoint_index.read_index(path).size
    assert size == len(whole) + sum((file.parent / name).stat().st_size for name in (".metadata", "layout.msgpack"))
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found = [find_damage(path, reader=reader, readers=2) is None for reader in range(2)]
    assert sorted(found) == [False, True]
    assert find_damage(path, largest=size - 1) is None
    assert find_damage(path, largest=size) is not None
    file.write_bytes(whole[:-1])
    assert find_damage(path, largest=1) == f"{file}: damaged: has {len(whole) - 1} bytes of {len(whole)}"
    file.unlink()
    assert find_damage(path, largest=1) == f"{file}: cannot be read: No such file or directory"


def test_another_number_of_ranks_gets_the_mean_of_buffers(tmp_path: Path) -> None:
    path, saved = tmp_path / "trial_0.pt", training(2.0, sharded=False)
    save(path, 1, saved, Position(1, 0))
    other = training(5.0, sharded=False)
    restored = Checkpoint(path, IDENTITY).load(world(3), other)
    assert (restored.ranks, restored.rederived) == (1, ("random state", "buffers: mean over ranks"))
    assert content(other) == content(saved)
    assert checkpoint._mean([torch.tensor(1.0), torch.tensor(4.0)]) == torch.tensor(2.5)
    assert checkpoint._mean([torch.tensor(1), torch.tensor(4)]) == torch.tensor(1)


ABSENT = object()


class Opens:
    """What a hostile pickle may do: call any function."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)

    def __init__(self, path: Path) -> None:
        self.path = str(path)


def forge(path: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint with a right checksum, as a stranger can."""
    (folder,) = (each for each in path.parent.iterdir() if each.is_dir())
    (folder / name).write_bytes(content)
    index = checkpoint_index.read_index(path)
    sums = checkpoint_index.FileSum(bytes=len(content), crc32c=google_crc32c.value(content))
    path.write_bytes(structs.replace(index, files=index.files | {name: sums}).text())


@pytest.mark.parametrize("name", [".metadata", "layout.msgpack", "__0_0.distcp"])
def test_a_strangers_checkpoint_runs_nothing(tmp_path: Path, name: str) -> None:
    path, made = tmp_path / "trial_0.pt", tmp_path / "made"
    save(path, 1, training(2.0), Position(1, 0))
    forge(path, name, pickle.dumps(Opens(made)))
    if name == ".metadata":
        assert load(path, 1, training(5.0)) == Position(1, 0)
    else:
        with pytest.raises(InputError, match="trial_0") as refused:
            load(path, 1, training(5.0))
        assert "weights_only" not in str(refused.value)  # torch's advice would run it
    assert not made.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -5),
        ("block", 0),
        ("ranks", "2"),
        ("optimizer", {}),
        ("identity", None),
        ("stages", ()),
        ("seed", ABSENT),
    ],
)
def test_a_strangers_trial_is_damaged_in_one_line(tmp_path: Path, key: str, value: object) -> None:
    trial = {
        "identity": {}, "block": 1, "step": 0, "seed": 3, "ranks": 1, "groups": 1, "stages": (1,), "sharded": False,
        "optimizer": {"groups": [], "values": {}},
    }  # fmt: skip
    saved = SimpleNamespace(read=lambda contents: dict.fromkeys(contents, trial))
    assert checkpoint._read_trial(tmp_path, saved).seed == 3  # type: ignore[arg-type]
    trial[key] = value
    if value is ABSENT:
        del trial[key]
    with pytest.raises(InputError, match=rf"damaged, or not written by this suite: .*{key}") as refused:
        checkpoint._read_trial(tmp_path, saved)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


HOSTILE = [
    {"file": "../../other"},
    {"file": "/dev/zero"},
    {"file": "__1_0.distcp"},
    {"begin": -1},
    {"begin": 2**62},
    {"length": -1},
    {"length": 2**62},
    {"offsets": (2**62,)},
    {"offsets": (-1,)},
    {"sizes": (2**40, 2**40)},
    {"sizes": ()},
    {"whole": (2**62, 2**62)},
    {"whole": None},
    {"dtype": "torch.load"},
    {"dtype": ""},
    {"name": "x"},
]


@pytest.mark.drawn(12)
@pytest.mark.parametrize("change", HOSTILE, ids=str)
@pytest.mark.parametrize("every", [False, True])
def test_a_strangers_layout_is_refused_or_changes_nothing(tmp_path: Path, change: dict[str, Any], every: bool) -> None:
    path = tmp_path / "trial_0.pt"
    save(path, 1, training(2.0), Position(1, 0))
    (layout,) = tmp_path.glob("*/layout.msgpack")
    boxes = msgspec.msgpack.decode(layout.read_bytes(), type=list[dcp.Box])
    forged = [structs.replace(box, **change) if every or box is boxes[-1] else box for box in boxes]
    forge(path, layout.name, msgspec.msgpack.encode(forged))
    with suppress(InputError):
        load(path, 1, training(5.0))
