"""A process that trains on the CPU keeps the memory it has freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

RESIDENT = """
import sys
from mlhpc.suite.training.devices import keep_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident_mib()
block = b"x" * (64 << 20)
del block
print(resident_mib() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt as glibc numbers it")
def test_freed_memory_stays() -> None:
    def left_mib(way: str) -> float:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        command = [sys.executable, "-c", RESIDENT, way]
        return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)

    assert left_mib("default") < 5
    assert left_mib("keep") > 60
