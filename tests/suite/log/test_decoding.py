"""Plain lines of a log are read in a quick way, which finds what the careful way finds. The whole: -m long."""

import os
import random
from pathlib import Path

import pytest

from mlhpc.suite.log.reader import read_events
from tests.suite.compliance.test_check_fuzz import BASES, damage

HEAD = b':::MLLOG {"namespace": "", "time_ms": 1700000000000, "event_type": "POINT_IN_TIME", "key": "'
PLAIN = HEAD + b'a", "value": 1, "metadata": {"file": "t.py", "lineno": 1}}'


def event(value: bytes = b"1", metadata: bytes = b"{}", key: bytes = b"a") -> bytes:
    return HEAD + key + b'", "value": ' + value + b', "metadata": ' + metadata + b"}"


STANDARD = (
    *(PLAIN, PLAIN + b"\n", PLAIN + b"\n" + PLAIN, event(b"null", b'{"a": [1, {"b": 2}], "c": {"d": null}}')),
    *(
        event(b"-0"), event(b"-0.0"), event(b"1e-400"), event(b"9" * 30), event(b"-9223372036854775809"),
        event(b'"a:b"'),
    ),
    *(event(b'"\\ud83d\\ude00"'), event(b'"\\u0000"'), event(b'"\xc3\xa9"'), event(b"[[[[]]]]"), event(b'{":": ":"}')),
    *(event(b"1") + b"\r\n" + event(b"2") + b"\r", event(b'":::MLLOG "'), event(b'"\\n:::MLLOG {"')),
    *(PLAIN.replace(b"1700000000000", b"1.5"), PLAIN.replace(b"1700000000000", b"-1"), event(key=b"\\u0061")),
    *(b"noise\n" + PLAIN + b"\nnoise\n" + PLAIN, PLAIN + b"\n\n" + PLAIN + b"\n", b"rank 0: " + PLAIN + b"\n" + PLAIN),
)  # fmt: skip
OTHER = (
    *(event(b"NaN"), event(b"-Infinity"), event(b"1e400"), event(b'"\\ud800"'), event(b'"\t"'), event(b"01"),
      event(b"9" * 5000)),
    *(event(metadata=b'{"a": 1, "a": 2}'), event(b'{"a": {"b": 1, "b": 1}}'), event(b'[{"a": 1, "a": 1}]')),
    *(event(metadata=b'{"a" : 1, "a": 2}'), event(metadata=b'{"a"\t: 1, "a": 2}'),
      event(metadata=b'{"a": ":", "a": 2}')),
    *(PLAIN.replace(b'"namespace": ""', b'"namespace": "", "namespace": ""'), PLAIN.replace(b'"namespace": "", ', b"")),
    *(PLAIN.replace(b'"key": "a"', b'"key": "a", "key": "b"'), PLAIN.replace(b'"key": "a"', b'"key": ""'), PLAIN[:-1]),
    *(PLAIN.replace(b'"POINT_IN_TIME"', b"null"), PLAIN.replace(b'"event_type": "POINT_IN_TIME", ', b""),
      PLAIN + PLAIN),
    *(PLAIN.replace(b"1700000000000", b"true"), PLAIN.replace(b"1700000000000", b'"1"'), event(metadata=b"null")),
    *(event(metadata=b"[]"), event(b'"\xff"'), event(b'"\xed\xa0\x80"'), event(b"[" * 5000),
      event(b"[" * 700 + b"]" * 700)),
    *(PLAIN + b" " + PLAIN[9:], PLAIN + b"x", b":::MLLOG 5", b":::MLLOG {}", b':::MLLOG "x"', b":::MLLOG [1]",
      b":::MLLOG "),
    *(PLAIN[:-20] + b"\n" + PLAIN, b':::MLLOG {"a":\n' + PLAIN, b"\xef\xbb\xbf" + PLAIN, PLAIN + b"\x00",
      PLAIN + b"\x0c"),
    *(  # as many values as lines, but not one on each
        PLAIN.replace(b', "metadata"', b',\n:::MLLOG "metadata"') + PLAIN[9:],
        PLAIN.replace(b"1,", b"{}\n:::MLLOG ,") + PLAIN[9:],
        PLAIN + PLAIN[9:] + b"\n:::MLLOG ",
        PLAIN + b" " + PLAIN[9:] + b"\n:::MLLOG \n",
        PLAIN + PLAIN[9:] + b"\n" + PLAIN[:-1] + b"\n:::MLLOG }",
        event(b'"}\n:::MLLOG {""') + PLAIN[9:],
        PLAIN + PLAIN[9:] + b"\n" + PLAIN + b"\n" + PLAIN[:-1],
    ),
)  # fmt: skip


@pytest.mark.parametrize("data", [*STANDARD, *OTHER])
def test_a_rank_before_a_line_changes_nothing(data: bytes, tmp_path: Path) -> None:
    """The quick way takes only lines that begin with the token, so that a rank before each of them makes all go the careful way."""
    both_ways(data, tmp_path)
    both_ways(PLAIN + b"\n" + data + b"\n" + PLAIN + b"\n", tmp_path)


@pytest.mark.parametrize("data", STANDARD)
def test_lines_in_the_standard_form_are_events(data: bytes, tmp_path: Path) -> None:
    events, problems = both_ways(data, tmp_path)
    assert events > 0
    assert problems == 0


@pytest.mark.parametrize(("levels", "events"), [(90, 1), (110, 0), (700, 0), (5000, 0)])
def test_what_is_nested_too_deeply_is_no_event(levels: int, events: int, tmp_path: Path) -> None:
    """A limit of its own: later code would otherwise fail at a depth that depends on its caller."""
    assert both_ways(event(b"[" * levels + b"]" * levels), tmp_path) == (events, 1 - events)


@pytest.mark.parametrize(
    "inputs", [200, pytest.param(int(os.environ.get("MLHPC_FUZZ_INPUTS", "500000")), marks=pytest.mark.long)]
)
@pytest.mark.timeout(7200)
def test_a_rank_before_the_lines_of_damaged_logs_changes_nothing(inputs: int, tmp_path: Path) -> None:
    chance = random.Random(inputs)
    taken = sum(both_ways(damage(chance.choice(BASES), chance), tmp_path)[0] for _ in range(inputs))
    assert taken > 10 * inputs


def both_ways(data: bytes, folder: Path) -> tuple[int, int]:
    """Read lines as they are and with a rank before each. Returns the numbers of events and of problems."""
    path = folder / "log.txt"
    path.write_bytes(data)
    log = read_events(path)
    path.write_bytes(b"\n".join(b"0: " + line for line in data.split(b"\n")))
    careful = read_events(path)
    assert repr(log.events) == repr(careful.events)  # as text: NaN differs from itself, 1 equals 1.0
    assert (log.problems, log.damaged) == (careful.problems, careful.damaged)
    return len(log.events), log.damaged
