"""How long this process has existed: the cost of starting Python and importing, which no log reports otherwise."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age_s() -> float:
    """Seconds since the kernel started this process (Linux; resolution one clock tick, usually 10 ms)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): start time after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
