"""A tiny data set of SwinV2-MoE, and the words of a search on it."""

from __future__ import annotations

import pytest

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.world import World
from tests.fixtures.once import made_once
from tests.workloads.tiny import TINY, make


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run of seconds, as ``--set`` takes them."""
    alone = World("none", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    data = made_once(tmp_path_factory, "tune_data", lambda folder: make("swinv2_moe", folder / "data", alone)) / "data"
    found = [*TINY["swinv2_moe"].overrides(read_manifest(data).attributes), f"data={data}", "global_batch_size=20"]
    return [*found, "submission.division=open", "device=cpu"]
