"""Stop signals: one request is one, however many signals it comes as."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator

import pytest

from mlhpc.suite.config import WatchdogSettings
from mlhpc.suite.training import devices
from mlhpc.suite.training.devices import STOP_SIGNALS, InterruptedTrialError, StopSignals, end_hung_start


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_while_it_trains_one_request_is_remembered_and_its_repetition_is_not_a_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, now = StopSignals(), [100.0]
    monkeypatch.setattr(devices.time, "monotonic", lambda: now[0])
    stop.deferred = True
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert stop.name == "SIGTERM"
    now[0] += devices.SAME_REQUEST_S + 0.1
    with pytest.raises(InterruptedTrialError, match="stopped by SIGINT"):
        signal.raise_signal(signal.SIGINT)


def test_before_training_a_signal_interrupts_at_once() -> None:
    StopSignals()
    with pytest.raises(InterruptedTrialError, match="stopped by SIGUSR1"):
        signal.raise_signal(signal.SIGUSR1)


def test_a_start_is_watched_where_stderr_has_no_file_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is in a notebook."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with end_hung_start(WatchdogSettings(silence_s=60.0)):
        pass
