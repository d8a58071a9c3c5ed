"""The smoke config for the tiny data set."""

from collections.abc import Callable

import pytest

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.workloads.deepcam import DESCRIPTOR


def make_tiny_config(*overrides: str) -> RunConfig:
    """The smoke config for 32 x 48 pixels."""
    own = ("hyperparameters.height=32", "hyperparameters.width=48")
    return load_config(DESCRIPTOR, "smoke", (*own, *overrides))


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., RunConfig]:
    """`make_tiny_config`, for tests of this folder."""
    return make_tiny_config
