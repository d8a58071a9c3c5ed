"""Work in several processes: results in order, and what goes wrong in a process is an error here."""

import os

import pytest

from mlhpc.analysis.tables import ingest


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.mark.parametrize("alone", [True, False])
def test_results_keep_the_order_of_items(alone: bool) -> None:
    told: list[tuple[int, int]] = []
    found = ingest.run_in_processes(
        lambda number: (number**2, os.getpid()), range(7), 2, tell=lambda *done: told.append(done), alone=alone
    )
    assert [square for square, _ in found] == [number**2 for number in range(7)]
    assert told == [(done, 7) for done in range(1, 8)]
    assert all((process == os.getpid()) is alone for _, process in found)


def test_an_exception_of_the_work_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        ingest.run_in_processes(lambda number: 1 / number, [1, 0, 1])


def test_a_process_that_ends_before_its_work_is_an_error() -> None:
    with pytest.raises(OSError, match="is there enough memory"):
        ingest.run_in_processes(lambda number: os._exit(9), [1, 2, 3])
