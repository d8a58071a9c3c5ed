"""Samples of a run are counted: what ranks leave out, repeat or take from each other ends the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.sampling import list_eval_batches, list_train_batches
from mlhpc.suite.errors import InputError
from mlhpc.suite.training import course
from mlhpc.suite.training.course import MarkedData
from mlhpc.suite.training.loop import require_samples
from mlhpc.suite.training.parallel.mesh import Mesh
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.trial import RunData
from mlhpc.suite.world import World
from tests.fixtures.thread_ranks import Holding, on_holders

Parts = list[NDArray[np.int64]]
Fault = Callable[[list[Parts], random.Random], None]


def repeat_neighbour(ranks: list[Parts], chance: random.Random) -> None:
    place = chance.randrange(len(ranks))
    ranks[place] = ranks[place - 1]


def leave_a_batch_out(ranks: list[Parts], chance: random.Random) -> None:
    del (mine := chance.choice(ranks))[chance.randrange(len(mine))]


def take_one_twice(ranks: list[Parts], chance: random.Random) -> None:
    mine = chance.choice(chance.choice(ranks))
    place = chance.randrange(len(mine))
    mine[place] = mine[place] - 1 if mine[place] else 1


def take_a_tenth(ranks: list[Parts], chance: random.Random) -> None:
    for mine in ranks:
        mine[:] = [part[part < 10] for part in mine]


FAULTS: list[Fault] = [repeat_neighbour, leave_a_batch_out, take_one_twice, take_a_tenth]


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda each: each and each.__name__)
def test_every_sample_is_taken_as_often_as_it_should(kind: str, fault: Fault | None) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        size = chance.choice([2, 3, 4])

        def take(rank: int, size: int, seed: int = seed) -> Parts:
            if kind == "evaluation":
                return list(list_eval_batches(101, 7, rank=rank, size=size))
            return [each.copy() for each in list_train_batches(101, 12, seed=seed, epoch=1, rank=rank, size=size)]

        ranks = [take(rank, size) for rank in range(size)]
        if fault is not None:
            fault(ranks, chance)

        def judge(holding: Holding, ranks: list[Parts] = ranks, whole: Parts = take(0, 1)) -> str:  # noqa: B008
            try:
                require_samples(holding.world, ranks[holding.mesh.rank], whole, "epoch 1")
            except InputError as error:
                return str(error)
            return ""

        said = on_holders(size, 1, judge)
        assert all(text.startswith("epoch 1: ") == (fault is not None) for text in said), said


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_data_set_of_a_part_of_its_split_is_refused(data: Path, split: str) -> None:
    manifest = read_manifest(data)
    whole = {name: manifest.samples(name) for name in ("train", "validation")}
    config = SimpleNamespace(staging=SimpleNamespace(directory=None), verify_data=False)
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(config=config), world=World.create(None), log=None, log_data=lambda *_: None
    )

    def open_with(taken: int) -> None:
        workload: Any = SimpleNamespace(dataset=lambda name, root: range({**whole, split: taken}[name]))
        RunData(session, workload, data, manifest, Parallel(Mesh(0, 1))).open_or_stage(None)

    open_with(whole[split])
    for taken in (0, 1, whole[split] // 10, whole[split] // 2, whole[split] - 1, whole[split] + 1, 2 * whole[split]):
        with pytest.raises(InputError, match=f"{split}: the workload's dataset.. has {taken} samples, the manifest"):
            open_with(taken)


class Repeating:
    """100 samples, of which some are given the content of others."""

    def __init__(self, change: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._change, self._values = change, torch.randn(100, 3, 700, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._values)

    def load(self, indices: Any, *, seed: int, epoch: int) -> dict[str, Tensor]:
        chosen = self._change(np.asarray(indices))
        return {"x": self._values[chosen].bfloat16(), "y": torch.from_numpy(chosen % 3), "batch": torch.zeros(99, 9)}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("change", "own"),
    [
        (lambda at: at, None),
        (lambda at: np.where(at < 5, 9, at), None),
        (lambda at: at % 50, 50),
        (lambda at: at % 10, 10),
        (lambda at: np.where(at < 40, 9, at), 61),
        (lambda at: 0 * at, 1),
    ],
)
def test_samples_with_the_content_of_others_are_told(size: int, change: Any, own: int | None) -> None:
    def find(holding: Holding) -> str | None:
        data = MarkedData(Repeating(change))
        for part in list_eval_batches(len(data), 7, rank=holding.mesh.rank, size=size):
            data.load(part, seed=1, epoch=0)
        return data.find_copies(holding.world)

    said = on_holders(size, 1, find)
    assert [text and text.split(":")[0] for text in said] == [own and f"of 100 samples only {own} differ"] * size


def test_of_many_samples_some_are_marked_and_without_a_tensor_per_sample_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "MOST_MARKS", 50)
    found = []
    for change in (lambda at: at % 10, lambda at: at):
        data = MarkedData(Repeating(change))
        data.load(np.arange(100), seed=1, epoch=0)
        found.append(data.find_copies(World.create(None)))
    assert str(found[0]).endswith("differ: the data repeat, or load() gives other samples' content")
    assert found[1] is None
    bare = MarkedData(Repeating(lambda at: at))
    monkeypatch.setattr(Repeating, "load", lambda *_, **__: {"x": torch.zeros(3, 4)})
    bare.load(np.arange(100), seed=1, epoch=0)
    assert bare.find_copies(World.create(None)) is None
