"""A rank of a real run that is held up by something else on its node is named by the log and by the report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mlhpc.suite.log.reader import read_events

ROOT = Path(__file__).resolve().parents[1]
SLOW = 1
HELD_S, FREE_S = 0.06, 0.015
STEADY = ["--set", "max_epochs=7", "--set", "hyperparameters.base_learning_rate=1e-6"]  # never reaches the target


@pytest.mark.long  # other work on the machine holds up ranks too
def test_a_rank_that_is_stopped_most_of_the_time_is_named_by_the_smallest_wait(
    smoke_data: Path, tmp_path: Path
) -> None:
    run, report = tmp_path / "run", tmp_path / "report"
    environment = os.environ | {"MLHPC_DATA": str(smoke_data), "OMP_NUM_THREADS": "1"}
    words = ["run", "cosmoflow", "--size", "smoke", "--ranks", "2", "--runs", "1", "-o", str(run), *STEADY]
    with (tmp_path / "output").open("w") as output:
        training = subprocess.Popen(
            [sys.executable, "-m", "mlhpc", *words], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
        try:
            _hold_up(training, run / "result_0.txt")
        finally:
            training.kill()
    assert training.returncode == 1, (tmp_path / "output").read_text()  # it ended by itself, target not reached
    stats = [event.value for event in read_events(run / "result_0.txt").events if event.key == "rank_stats"]
    assert len(stats) == 7
    waits = np.array([epoch["exposed_communication_s"]["values"] for epoch in stats])
    assert waits.mean(axis=0).argmin() == SLOW, waits
    done = subprocess.run(
        [sys.executable, "-m", "mlhpc", "report", str(run), "-o", str(report)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = pd.read_csv(report / "tables" / "figure_stragglers.csv")
    assert table.loc[table["named"] == "yes", "rank"].tolist() == [SLOW]
    assert 0.01 < table["excess / step"].iloc[0] < 0.6
    assert f"rank {SLOW} was slow" in (report / "report.html").read_text()


def _hold_up(training: subprocess.Popen[bytes], log: Path) -> None:
    """Stop and continue the slow rank's process in turn, from the first epoch until the run ends."""
    deadline = time.monotonic() + 200
    while training.poll() is None and time.monotonic() < deadline:
        time.sleep(FREE_S)
        if not (log.exists() and "epoch_start" in log.read_text()):
            continue
        with suppress(OSError):  # a process that has ended
            rank = _process_of(training.pid, SLOW)
            while rank is not None:
                os.kill(rank, signal.SIGSTOP)
                time.sleep(HELD_S)
                os.kill(rank, signal.SIGCONT)
                time.sleep(FREE_S)
    training.wait(timeout=300)


def _process_of(ancestor: int, rank: int) -> int | None:
    """The training process of this rank among the descendants of a process."""
    tasks = Path(f"/proc/{ancestor}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    own = Path(f"/proc/{ancestor}/environ").read_bytes().split(b"\0")
    if not children and f"PMI_RANK={rank}".encode() in own:
        return ancestor
    return next((found for child in children if (found := _process_of(child, rank)) is not None), None)
