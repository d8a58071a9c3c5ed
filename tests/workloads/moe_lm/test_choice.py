"""A run that is resumed keeps what its first part chose, though the machine would now choose otherwise."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.log.reader import Log, read_events

ROOT = Path(__file__).resolve().parents[3]


def words(data: Path, folder: Path, *more: str) -> list[str]:
    sets = (f"data={data}", "max_epochs=2", "window_steps=1")
    begin = [sys.executable, "-m", "mlhpc", "run", "moe_lm", "-o", str(folder), "--ranks", "1", *more]
    return [*begin, *(word for text in sets for word in ("--set", text))]


def losses(log: Log) -> dict[Any, float]:
    found = [event.metadata for event in log.events if event.key == "step_phases"]
    return {(item["epoch_num"], item["first_step"]): item["loss"] for item in found}


@pytest.mark.long
def test_a_resumed_run_keeps_its_choices_and_its_losses(tmp_path: Path) -> None:
    data = tmp_path / "data"
    subprocess.run(
        [sys.executable, "-m", "mlhpc", "data", "generate", "moe_lm", "--size", "smoke", "-o", str(data)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    new = ("--size", "smoke", "--runs", "1", "--seed", "3")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(tmp_path / "one"),
    }
    question = "experts-4x64x64-rows-2048"
    pinned = ("--set", f"choices.pinned={{{question}: loop}}")
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = subprocess.Popen(
        words(data, stopped, *new, *pinned), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    assert process.stdout is not None
    next(line for line in process.stdout if "epoch 1:" in line)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 3
    resume = words(data, stopped, "--trial", "0", "--resume")
    subprocess.run(resume, cwd=ROOT, env=environment, capture_output=True, check=False)
    subprocess.run(words(data, whole, *new, *pinned), cwd=ROOT, env=environment, capture_output=True, check=False)
    logs = [
        read_events(path) for path in (stopped / "result_0.txt", stopped / "resumed_0_1.txt", whole / "result_0.txt")
    ]
    events = [each for log in logs for each in log.every("measured_choice") if each.value["name"] == question]
    assert [(each.value["chosen"], each.metadata["source"]) for each in events] == [
        ("loop", "pinned"), ("loop", "kept"), ("loop", "pinned"),
    ]  # fmt: skip
    assert losses(logs[2]) == losses(logs[0]) | losses(logs[1])
