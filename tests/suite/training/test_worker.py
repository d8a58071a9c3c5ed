"""What a worker does before its trial."""

from __future__ import annotations

import resource

import pytest

from suite.training.worker import raise_open_files


@pytest.mark.parametrize("soft", [256, 1024])
def test_a_worker_may_open_as_many_files_as_the_hard_limit_allows(soft: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
