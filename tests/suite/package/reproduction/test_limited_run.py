"""A command within limits of time and memory: what ends it is said, what ends by itself is not blamed on a limit."""

import sys
from pathlib import Path

import pytest

from mlhpc.suite.launch import local
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.package.reproduction import rerun
from mlhpc.suite.package.reproduction.rerun import RunLimits, find_run_limits, run_limited

GIB = 2**30
ROOMY = RunLimits(60.0, "stated", 8 * GIB)
TIGHT = RunLimits(60.0, "stated", 256 * 2**20)
SHORT = RunLimits(0.5, "stated", None)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, bounds: RunLimits | None) -> rerun.CommandResult:
    monkeypatch.setattr(rerun, "make_suite_command", lambda *words: [sys.executable, "-S", "-c", code])
    return run_limited(("run", "x"), folder / "run.log", bounds)


NEEDS_MEMORY = {
    "one large block": "x = bytearray(2**30)",
    "many small blocks": "x = [bytearray(2**20) for _ in range(1024)]",
    "a process of its own": (
        "import subprocess, sys\ncode = 'x = bytearray(2**30)'\n"
        "raise SystemExit(subprocess.run([sys.executable, '-S', '-c', code]).returncode)"
    ),
    "a limit that it tries to raise": (
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_DATA, (2**40, 2**40))\n"
        "except (ValueError, OSError): pass\nx = bytearray(2**30)"
    ),
}


@pytest.mark.parametrize("name", NEEDS_MEMORY)
def test_what_needs_more_memory_than_there_is_ends_with_that_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = run(monkeypatch, tmp_path, NEEDS_MEMORY[name], TIGHT)
    assert done.code != 0
    assert done.over == "it needed more memory than the 256 MiB that each rank may use here"


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 EiB for an array",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        f"mlhpc: {local.explain_end(9, 9, memory_kills=(6, 7))[1]}: see trial_0.log",
    ],
)
def test_words_of_libraries_that_lack_memory_are_known(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = run(monkeypatch, tmp_path, f"print({text!r}); raise SystemExit(1)", ROOMY)
    assert done.over is not None


ENDS_BY_ITSELF = {
    **{
        f"by signal 9, and the kernel counted {kills} for memory": (f"print({said!r}); raise SystemExit(1)", 1, said)
        for kills in ((None, None), (6, 6))
        for said in [local.explain_end(9, 9, memory_kills=kills)[1]]
    },
    "well": ("print('fine')", 0, "fine"),
    "well, and speaks of memory": ("print('MemoryError: can\\'t allocate memory')", 0, "MemoryError: can't allocate memory"),
    "with an error": ("raise SystemExit('mlhpc: no such size')", 1, "no such size"),
    "with a refusal": ("print('unknown key'); raise SystemExit(2)", 2, "unknown key"),
    "without a word": ("raise SystemExit(3)", 3, "no output"),
    "by another signal": ("import os; os.kill(os.getpid(), 11)", -11, "no output"),
    "within its memory": ("x = bytearray(2**26); print('fine')", 0, "fine"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS_BY_ITSELF)
def test_what_ends_by_itself_is_not_blamed_on_a_limit(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, returned, last = ENDS_BY_ITSELF[name]
    done = run(monkeypatch, tmp_path, code, TIGHT)
    assert (done.code, done.last, done.over) == (returned, last, None)


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(3600)",
        "while True: pass",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)",
    ],
)
def test_what_takes_too_long_is_ended_also_if_it_will_not(
    code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rerun, "GRACE_S", 0.5)
    done = run(monkeypatch, tmp_path, code, SHORT)
    assert (done.over, done.code < 0) == ("it was ended after 0.5 s (stated)", True)


def test_without_limits_a_command_is_only_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, "print('made')", None) == rerun.CommandResult(0, "made")


def test_of_much_output_only_the_end_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = run(monkeypatch, tmp_path, "print('y' * 10**6); print('the end'); raise SystemExit(1)", ROOMY)
    assert (done.last, done.over) == ("the end", None)


def record(init_s: float | None, run_s: float | None) -> RunRecord:
    return RunRecord(init_s=init_s, run_start_s=1e9, run_stop_s=None if run_s is None else 1e9 + run_s)


@pytest.mark.parametrize(
    ("records", "seconds"),
    [
        ([record(1.0, 9.0)], 600.0),
        ([record(20.0, 100.0)], 1200.0),
        ([record(1.0, 9.0), record(20.0, 100.0)], 1200.0),  # the longest counts
        ([record(5.0, 1e12)], 7200.0),  # a log may state any time
        ([record(5.0, -1e12)], 600.0),
        ([record(None, None)], 600.0),
        ([], 600.0),
    ],
)
def test_the_time_follows_from_the_packages_runs_within_stated_ends(records: list[RunRecord], seconds: float) -> None:
    assert find_run_limits(records, 1, None).seconds == pytest.approx(seconds)


def test_a_stated_time_counts_and_ranks_share_the_memory() -> None:
    bounds = find_run_limits([record(1.0, 9.0)], 4, 10 * GIB, 30.0)
    assert bounds == RunLimits(30.0, "--limit-minutes", 2 * GIB)
    assert find_run_limits([], 10**6, 8).memory == 1  # nothing runs with that, and it says so
