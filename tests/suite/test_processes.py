"""Linux keeps the signal that a process asks for, until it asks for none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from suite import processes

ASKED = """
import ctypes
from suite.processes import load_parent_signal
ask, kept = load_parent_signal(), ctypes.c_int()
for number in (15, 0):
    ask(number)
    ctypes.CDLL(None).prctl(2, ctypes.byref(kept))  # PR_GET_PDEATHSIG
    print(kept.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_signal_is_kept_until_none_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["15", "0"]


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes.load_parent_signal() is None
