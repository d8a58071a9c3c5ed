"""Reading a stranger's log: bounded memory, sizes with a limit, nothing but regular files."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from mlhpc.suite.errors import InputError
from mlhpc.suite.log.reader import LISTED_PROBLEMS, Log, read_events, read_limits

MIB = 2**20
EVENT = b':::MLLOG {"key": "k", "value": 1, "time_ms": 1600000000000, "metadata": {}}\n'


def steps(count: int) -> bytes:
    """Lines of single steps as the DeepCAM reference logs them."""
    meta = {"file": "trainer.py", "lineno": 9, "epoch_num": 1, "step_num": 7}
    record = {"namespace": "", "time_ms": 1600000000000, "event_type": "POINT_IN_TIME", "key": "train_loss"}
    return (f":::MLLOG {json.dumps(record | {'value': 0.5, 'metadata': meta})}\n".encode()) * count


def peak_bytes(path: Path) -> tuple[int, Log]:
    tracemalloc.start()
    log = read_events(path, steps=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, log


@pytest.mark.long
def test_memory_does_not_grow_with_the_length_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    block = steps(5000)
    path.write_bytes(EVENT + block * 16 + EVENT)  # 17 MB
    assert path.stat().st_size > 15 * MIB
    peak, log = peak_bytes(path)
    assert peak < 10 * MIB
    assert log.skipped + len(log.events) == 5000 * 16 + 2
    assert [event.line for event in log.every("k")] == [1, 5000 * 16 + 2]


def test_memory_does_not_grow_with_the_number_of_damaged_lines_or_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(EVENT + b":::MLLOG \n" * 30_000)
    peak, log = peak_bytes(path)
    assert peak < 10 * MIB
    assert (log.damaged, len(log.problems)) == (30_000, LISTED_PROBLEMS)
    path.write_bytes(EVENT + b"x" * (40 * MIB) + b"\n" + EVENT)
    peak, log = peak_bytes(path)
    assert peak < 16 * MIB
    assert [event.line for event in log.events] == [1, 3]
    assert log.damaged == 0


@pytest.mark.timeout(300)
def test_time_does_not_grow_with_the_square_of_the_damage_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b":::MLLOG {]" * 100_000 + b"\n" + EVENT)  # 1 MB
    log = read_events(path)
    assert (log.damaged, len(log.problems), len(log.events)) == (100_000, LISTED_PROBLEMS, 1)


def test_the_beginning_of_a_log_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(EVENT * 100)
    log = read_events(path, first_bytes=10 * len(EVENT) - 5)
    assert (len(log.events), log.damaged) == (10, 0)


def test_steps_between_two_steps_are_left_out_while_their_times_rise(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    one = b':::MLLOG {"key": "train_loss", "value": 1, "time_ms": %d, "metadata": {"step_num": 1}}\n'
    path.write_bytes(EVENT + b"".join(one % time_ms for time_ms in (1, 2, 3, 4, 2, 3, 3)) + EVENT)
    log = read_events(path, steps=False)
    assert [event.time_ms for event in log.every("train_loss")] == [1.0, 4.0, 2.0, 3.0]
    assert (log.skipped, len(log.events)) == (3, 6)
    assert len(read_events(path).events) == 9


@pytest.mark.parametrize(
    ("content", "problems", "lines"),
    [
        (EVENT + b":::MLLOG " + b"x" * 3000 + b"\n" + EVENT, [2], [1, 3]),
        (b"x" * 3000 + EVENT + EVENT, [1], [2]),
        (b"x" * 3000 + b"\n" + EVENT, [], [2]),
        (b"x" * 3000, [], []),
        (b"x" * 3000 + b":::MLLOG", [1], []),
        (b"x" * 1023 + b":::MLLOG " + b"y" * 3000, [1], []),
        (EVENT + b"x" * 900 + b"\n" + EVENT, [], [1, 3]),
    ],
)
def test_a_line_above_the_limit_is_a_problem_if_it_has_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, problems: list[int], lines: list[int]
) -> None:
    monkeypatch.setenv("MLHPC_LIMITS", "line=1KiB")
    path = tmp_path / "log.txt"
    path.write_bytes(content)
    log = read_events(path)
    assert [problem.line for problem in log.problems] == problems
    assert [event.line for event in log.events] == lines


def test_sizes_have_limits_that_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(EVENT * 100)
    monkeypatch.setenv("MLHPC_LIMITS", "file=1KiB, line=5MiB")
    with pytest.raises(
        OSError, match=r"has 7\.422 KiB; at most 1 KiB are read \(MLHPC_LIMITS raises the limit\)"
    ) as caught:
        read_events(path)
    assert caught.value.filename == str(path)
    monkeypatch.setenv("MLHPC_LIMITS", "events=1KiB")
    with pytest.raises(OSError, match="has more than 1 KiB of events"):
        read_events(path)
    monkeypatch.setenv("MLHPC_LIMITS", "events=8KiB,file=8000")
    assert len(read_events(path).events) == 100
    assert read_limits().json == 4 * MIB


@pytest.mark.parametrize("setting", ["log=1", "file", "file=-1", "file=1GB", "file=1e9", "file=9GiB;json=1"])
def test_a_wrong_limit_is_named(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("MLHPC_LIMITS", setting)
    with pytest.raises(InputError, match="MLHPC_LIMITS: .* SIZE one of file, line, events, json, manifest"):
        read_limits()


def test_sparse_files_fifos_and_devices_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    for size, reason in ((40 * 2**30, "has 40 GiB; at most 4 GiB are read"), (2**30, "is a sparse file of 1 GiB")):
        with path.open("wb") as file:
            file.truncate(size)
        with pytest.raises(OSError, match=reason) as caught:
            read_events(path)
        assert caught.value.filename == str(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="neither a file nor a folder"):
        read_events(path)
    with pytest.raises(OSError, match="neither a file nor a folder"):
        read_events(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read_events(tmp_path)
