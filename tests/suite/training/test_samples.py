"""Samples of a run are counted: what ranks leave out, repeat or take from each other ends the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.sampling import list_eval_batches, list_train_batches
from mlhpc.suite.errors import InputError
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
    whole = {name: read_manifest(data).samples(name) for name in ("train", "validation")}
    config = SimpleNamespace(staging=SimpleNamespace(directory=None), verify_data=False)
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(config=config), world=World.create(None), log=None, log_data=lambda *_: None
    )

    def open_with(taken: int) -> None:
        workload: Any = SimpleNamespace(dataset=lambda name, root: range({**whole, split: taken}[name]))
        RunData(session, workload, data, Parallel(Mesh(0, 1))).open_or_stage(None)

    open_with(whole[split])
    for taken in (0, 1, whole[split] // 10, whole[split] // 2, whole[split] - 1, whole[split] + 1, 2 * whole[split]):
        with pytest.raises(InputError, match=f"{split}: the workload's dataset.. has {taken} samples, the manifest"):
            open_with(taken)
