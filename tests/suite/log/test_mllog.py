"""The event log: what is written can be read, and nothing that can be written or read breaks either side."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlhpc.suite.log.mllog import EventLog, convert_to_json
from mlhpc.suite.log.reader import read_events
from tests.fixtures.disk import fill


def line(record: object) -> bytes:
    return f":::MLLOG {json.dumps(record)}\n".encode()


def event(**changes: object) -> dict[str, object]:
    base = {"namespace": "", "time_ms": 5, "event_type": "POINT_IN_TIME", "key": "k", "value": 1, "metadata": {}}
    return base | changes


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.txt", wall_ms=lambda: 1234)
    log.start("epoch", metadata={"epoch_num": 1})
    log.event("eval_error", np.float32(0.5), metadata={"path": tmp_path})
    log.stop("epoch")
    log.close()
    read = read_events(tmp_path / "log.txt")
    assert read.problems == ()
    assert [(e.key, e.value, e.time_ms, e.line) for e in read.events] == [
        ("epoch_start", None, 1234, 1),
        ("eval_error", 0.5, 1234, 2),
        ("epoch_stop", None, 1234, 3),
    ]
    assert [e.event_type for e in read.events] == ["INTERVAL_START", "POINT_IN_TIME", "INTERVAL_END"]
    assert read.events[1].metadata["path"] == str(tmp_path)
    assert read.events[0].metadata["file"].endswith("test_mllog.py")


def test_only_the_rank_with_a_path_writes_and_an_existing_log_is_not_touched(tmp_path: Path) -> None:
    EventLog(None).event("seed", 1)
    (tmp_path / "log.txt").write_text("earlier")
    with pytest.raises(FileExistsError):
        EventLog(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == "earlier"


def test_every_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.txt")
    log.event("seed", 1)
    assert len(read_events(tmp_path / "log.txt").events) == 1
    log.close()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.frozensets(st.integers()),
    max_leaves=10,
)


@settings(max_examples=100)
@given(VALUES, st.text())
def test_any_value_gives_one_valid_line(value: object, key: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"
        log = EventLog(path)
        log.event(key, value, metadata={"value": value})
        log.close()
        read = read_events(path)
        assert len(read.events) + len(read.problems) == 1
        assert not read.problems or key == ""
        json.loads(path.read_text(encoding="utf-8").partition(" ")[2], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1.5, 2.0]), [1.5, 2.0]),
        (float("nan"), "nan"),
        (np.float64("inf"), "inf"),
        (Path("a/b"), "a/b"),
        ({"a": (1, np.float32(2))}, {"a": [1, 2.0]}),
    ],
)
def test_scalars_arrays_and_paths_become_plain_json(value: object, plain: object) -> None:
    assert convert_to_json(value) == plain


def test_a_rank_prefix_and_two_records_on_one_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"shell trace\n  4: " + line(event(key="a"))[:-1] + line(event(key="b")) + b"tail without newline")
    read = read_events(path)
    assert [(e.key, e.line) for e in read.events] == [("a", 2), ("b", 2)]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b":::MLLOG {broken\n", "not JSON"),
        (line([1]), "expected a JSON object after :::MLLOG, found list"),
        (line({"key": "a"}), "event without value, time_ms, metadata"),
        (line(event(key=3)), "key must be a non-empty string, found 3"),
        (line(event(time_ms="abc")), "time_ms of 'k' must be a finite number, found 'abc'"),
        (line(event(time_ms=True)), "time_ms of 'k' must be a finite number, found True"),
        (line(event(time_ms=10**400)), "time_ms of 'k' must be a finite number"),
        (line(event(metadata=[1])), "metadata of 'k' must be an object, found [1]"),
        (b":::MLLOG " + b"[" * 100_000 + b"\n", "not JSON"),
        (b':::MLLOG {"time_ms": ' + b"9" * 5000 + b"}\n", "not JSON"),
    ],
)
def test_a_bad_record_is_a_problem_with_its_line(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(line(event()) + raw + line(event()))
    read = read_events(path)
    assert len(read.events) == 2
    (problem,) = read.problems
    assert problem.line == 2
    assert message in problem.message


def test_lines_that_are_events_only_together_are_problems(tmp_path: Path) -> None:
    """Neighbouring lines are decoded together; a record that goes on in the next line must not pass for one."""
    path = tmp_path / "log.txt"
    whole = json.dumps(event())
    halves = whole[:-1] + ', "more": [{"a": 1}', '{"b": 2}], "x": 0}, ' + whole
    path.write_bytes("".join(f":::MLLOG {text}\n" for text in (whole, *halves, whole)).encode())
    read = read_events(path)
    assert [item.line for item in read.events] == [1, 4]
    assert [item.line for item in read.problems] == [2, 3]


@settings(max_examples=300)
@given(
    st.lists(
        st.binary(max_size=60) | st.just(b":::MLLOG ") | st.just(b'{"key": "a", "value": 1, "time_ms": 1}'), max_size=8
    )
)
def test_any_bytes_can_be_read(parts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"
        path.write_bytes(b"".join(parts))
        read_events(path)


def test_events_wait_for_space_on_a_full_disk_and_none_is_lost(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk / "log.txt"
    log = EventLog(path)
    for number in range(20):
        log.event("before", number)
    filler = fill(small_disk)
    for number in range(100):  # more than what is left of the last page
        log.event("meanwhile", number)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not [problem for problem in read_events(path).problems if problem.line < 20]
    filler.unlink()
    log.event("after", 0)
    log.close()
    events = read_events(path)
    assert events.problems == ()
    assert [event.value for event in events.events] == [*range(20), *range(100), 0]


def test_a_log_that_cannot_be_finished_says_so_with_its_name(small_disk: Path) -> None:
    path = small_disk / "log.txt"
    log = EventLog(path)
    fill(small_disk)
    log.event("key", "x" * 5000)
    with pytest.raises(OSError, match="disk full; the end of the log is missing") as caught:
        log.close()
    assert caught.value.filename == str(path)


def _wrap(line: str) -> str:
    return "\n".join(line[at : at + 80] for at in range(0, len(line), 80))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda line: json.dumps({"log": line + "\n", "stream": "stdout"}), "its quotes are escaped"),
        (lambda line: '1796055146,"' + line.replace('"', '""') + '"', "its quotes are doubled"),
        (lambda line: line.replace('"', "&quot;"), "those of HTML"),
        (lambda line: line.replace('"', "'"), "single quotes"),
        (lambda line: line.replace('{"', "{\u201c").replace('"', "\u201d"), "typographic"),
        (_wrap, "wrapped it"),
    ],
)
def test_a_log_that_another_program_changed_is_one_problem_with_its_cause(
    change: Callable[[str], str], why: str, tmp_path: Path
) -> None:
    record = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": "seed", "value": 7, "metadata": {}}
    path = tmp_path / "result_0.txt"
    path.write_text((change(":::MLLOG " + json.dumps(record)) + "\n") * 300, encoding="utf-8")
    log = read_events(path)
    (problem,) = log.problems
    assert (log.damaged, problem.line) == (300, 1)
    assert why in problem.message
