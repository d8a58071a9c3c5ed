"""Freezes runs, lets another process take their trial over, wakes them, and checks that nothing of the new owner was touched.

    python -m tests.faults.freeze --times 20 -o DATE-freeze.txt

After its first checkpoint all processes of a CosmoFlow smoke run get SIGSTOP. Its lock is set back ten minutes. `mlhpc run
--resume` takes the trial over in another process namespace, which stands for another node. Two seconds after it has trained, the
first gets SIGCONT. It must end with one line and touch nothing; the other must reach its end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import read_events
from tests.faults.campaign import SETTINGS, commands, make_data

LIMIT_S = 300.0


def start(root: Path, words: list[str], *, elsewhere: bool = False) -> subprocess.Popen[str]:
    """Start `mlhpc run` on a folder, as on another host if asked for."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if elsewhere else []
    command += [sys.executable, "-P", "-m", "mlhpc", "run", "cosmoflow", "-o", str(root), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


def wait_for(path: Path, text: bytes, while_lives: subprocess.Popen[str]) -> None:
    """Wait until a file has a text."""
    end = time.monotonic() + LIMIT_S
    while not path.exists() or text not in path.read_bytes():
        assert while_lives.poll() is None, f"it ended: {while_lives.communicate()[1]}"
        assert time.monotonic() < end, f"{path}: no {text!r} within {LIMIT_S:g} s"
        time.sleep(0.02)


def freeze(root: Path, data: Path, ranks: int) -> list[str]:
    """Freeze a run, take it over, wake it. Returns what is wrong."""
    settings = [word for each in (f"data={data}", "max_epochs=2", *SETTINGS) for word in ("--set", each)]
    first = start(root, ["--size", "smoke", "--ranks", str(ranks), "--runs", "1", "--seed", "1", *settings])
    wait_for(root / "result_0.txt", b'"checkpoint_saved"', while_lives=first)
    frozen = [pid for pid, words in commands() if any(str(root) in word for word in words)]
    for pid in frozen:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    before = (root / "result_0.txt").read_bytes()
    for path in (root / "trial_0.lock", root / "exit" / "trial_0.running"):
        os.utime(path, (time.time() - 600,) * 2)
    second = start(root, ["--resume"], elsewhere=True)
    resumed = root / "resumed_0_1.txt"
    wait_for(resumed, b'"step_phases"', while_lives=second)
    time.sleep(2.0)
    for pid in frozen:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    _, said = first.communicate(timeout=LIMIT_S)
    after = (root / "result_0.txt").read_bytes()
    _, others = second.communicate(timeout=LIMIT_S)
    problems = []
    if said.count("this lock was taken over by another process") != 1:
        problems.append(f"it said {said!r}")
    if first.returncode == 0:
        problems.append("the first ended with 0")
    if after != before:
        problems.append("the first went on writing its log")
    if b'"run_stop"' in after:
        problems.append("the first wrote run_stop")
    if read_events(resumed).first(mllog.RUN_STOP) is None:
        problems.append(f"the second did not end its run: {others!r}")
    if "not written" in others:
        problems.append(f"a checkpoint of the second was touched: {others!r}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--data", type=Path, help="a data set of CosmoFlow smoke; default: a new one")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    bad, lines = 0, ["| ranks | frozen, taken over, woken | with a problem |", "| --- | --- | --- |"]
    done: dict[int, list[list[str]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(prefix="mlhpc-freeze-") as scratch:
        data = options.data or make_data(Path(scratch))
        for number in range(options.times):
            ranks = 1 + number % 2
            problems = freeze(Path(scratch) / f"run{number}", data, ranks)
            done[ranks].append(problems)
            bad += bool(problems)
            print(f"{number + 1}: {ranks} ranks: {'; '.join(problems) or 'fine'}", flush=True)
            rows = [f"| {count} | {len(each)} | {sum(map(bool, each))} |" for count, each in done.items()]
            if options.output is not None:
                options.output.write_text("\n".join([*lines, *rows]) + "\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
