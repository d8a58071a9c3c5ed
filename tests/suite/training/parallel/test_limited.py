"""A model whose states are four times what a rank may allocate trains in pieces, and not whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = 8


def ranks(kind: str, count: int) -> tuple[int, list[dict[str, Any]]]:
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    script = str(Path(__file__).with_name("limited.py"))
    # glibc otherwise raises its threshold for mmap at the first free, and freed tensors stay as holes in the heap
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | allocator
    command = [mpiexec, "-n", str(count), sys.executable, script, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout[-1000:] + done.stderr[-3000:]
    return done.returncode, found


@pytest.mark.long
def test_states_of_four_times_the_limit_train_in_pieces_only() -> None:
    code, (found, *_) = ranks("sharded", RANKS)
    assert code == 0, found
    assert found["states"] == 4 * found["limit"]
    code, (refused, *_) = ranks("whole", 2)
    assert code != 0
    assert "alloc" in refused["refused"].lower() or "memory" in refused["refused"].lower()
    code, (free, *_) = ranks("free", RANKS)  # the same ranks, data parallel, without the limit
    assert code == 0
    assert found["losses"] == pytest.approx(free["losses"], rel=1e-5)
