"""Data sets for the tests of workloads: made once, lent as copies."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from tests.fixtures.thread_ranks import on_holders
from tests.workloads.tiny import TINY, generator, make


@pytest.fixture(scope="session")
def world() -> World:
    return World.create(None)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, world: World) -> Callable[[str], Path]:
    """The tiny data set of a workload by its name; read only."""
    made: dict[str, Path] = {}

    def lend(workload: str) -> Path:
        if workload not in made:
            made[workload] = make(workload, tmp_path_factory.mktemp(workload) / "data", world)
        return made[workload]

    return lend


@pytest.fixture
def tiny(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The size ``smoke`` of the folder's workload means its tiny data set, whose settings these are."""
    name = request.path.parent.name
    monkeypatch.setitem(generator(name).SIZES, "smoke", TINY[name].settings)
    return TINY[name].settings


@pytest.fixture
def tiny_data(request: pytest.FixtureRequest, made_once: Callable[[str], Path], tmp_path: Path) -> Path:
    """The tiny data set of the folder's workload; a copy, so a test may damage it."""
    root = tmp_path / "tiny"
    shutil.copytree(made_once(request.path.parent.name), root)
    return root


@pytest.fixture
def assert_one_rank_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: World) -> Callable[..., None]:
    """Two ranks convert a source: one of them lists its files, the shards are those of one rank. Both refuse an absent source."""

    def check(convert: Callable[..., None], source: Path, refusal: str, module: ModuleType, *listings: str) -> None:
        calls = []

        def note(name: str, listing: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*arguments: Any) -> Any:
                calls.append(name)
                return listing(*arguments)

            return noted

        for name in listings:
            monkeypatch.setattr(module, name, note(name, getattr(module, name)))
        on_holders(2, 1, lambda rank: convert(source, tmp_path / "two", world=rank.world))
        assert sorted(calls) == sorted(listings)
        convert(source, tmp_path / "one", world=world)
        assert read_manifest(tmp_path / "two").shards == read_manifest(tmp_path / "one").shards
        with pytest.raises(InputError, match=refusal):
            on_holders(2, 1, lambda rank: convert(source / "none", tmp_path / "no", world=rank.world))

    return check
