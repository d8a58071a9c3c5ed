"""Phase times: every moment belongs to one phase, overlapped communication is counted once and only inside compute."""

from __future__ import annotations

import pytest

from mlhpc.suite.training.step_timing import PHASES, PhaseTimer


class Script:
    """A clock that reads a list."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def stamp(self) -> float:
        return next(self._times)

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_phases_sum_to_the_step_and_the_next_window_starts_where_this_one_ended() -> None:
    timer = PhaseTimer(Script(0, 1, 4, 6, 7, 10))
    for phase in ("data_wait", "forward_backward", "exposed_communication", "optimizer"):
        timer.mark(phase)
    first = timer.flush()
    timer.mark("other")
    second = timer.flush()
    expected = {"data_wait": 1, "forward_backward": 3, "exposed_communication": 2, "optimizer": 1, "other": 0}
    assert first == expected | {"step": 7, "overlapped_communication": 0}
    assert second["step"] == second["other"] == 3
    assert first["step"] == sum(first[name] for name in PHASES)


def test_overlapping_transfers_count_once_and_only_within_compute() -> None:
    timer = PhaseTimer(Script(0, 1, 5, 8))
    timer.mark("data_wait")  # 0..1
    timer.mark("forward_backward")  # 1..5
    timer.mark("exposed_communication")  # 5..8
    for begin, end in ((2, 3), (2.5, 4), (4.5, 7.5)):  # union within 1..5: 2..4 and 4.5..5
        timer.transfer(begin, end)
    assert timer.flush()["overlapped_communication"] == pytest.approx(2.5)
