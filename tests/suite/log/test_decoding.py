"""Lines are the same events and problems however they are decoded: by msgspec, typed, or by json. The whole: -m long."""

from __future__ import annotations

import os
import random

import pytest

from suite.log import decoding, typed
from suite.log.decoding import Found, decode
from tests.suite.compliance.test_check_fuzz import BASES, damage

HEAD = b':::MLLOG {"namespace": "", "time_ms": 1700000000000, "event_type": "POINT_IN_TIME", "key": "'
PLAIN = HEAD + b'a", "value": 1, "metadata": {"file": "t.py", "lineno": 1}}'


def event(value: bytes = b"1", metadata: bytes = b"{}", key: bytes = b"a") -> bytes:
    return HEAD + key + b'", "value": ' + value + b', "metadata": ' + metadata + b"}"


STANDARD = (
    *(PLAIN, PLAIN + b"\n", PLAIN + b"\n" + PLAIN, event(b"null", b'{"a": [1, {"b": 2}], "c": {"d": null}}')),
    *(
        event(b"-0"),
        event(b"-0.0"),
        event(b"1e-400"),
        event(b"9" * 30),
        event(b"-9223372036854775809"),
        event(b'"a:b"'),
    ),
    *(event(b'"\\ud83d\\ude00"'), event(b'"\\u0000"'), event(b'"\xc3\xa9"'), event(b"[[[[]]]]"), event(b'{":": ":"}')),
    *(event(b"1") + b"\r\n" + event(b"2") + b"\r", event(b'":::MLLOG "'), event(b'"\\n:::MLLOG {"')),
    *(PLAIN.replace(b"1700000000000", b"1.5"), PLAIN.replace(b"1700000000000", b"-1"), event(key=b"\\u0061")),
    *(b"noise\n" + PLAIN + b"\nnoise\n" + PLAIN, PLAIN + b"\n\n" + PLAIN + b"\n", b"rank 0: " + PLAIN + b"\n" + PLAIN),
)
OTHER = (
    *(
        event(b"NaN"),
        event(b"-Infinity"),
        event(b"1e400"),
        event(b'"\\ud800"'),
        event(b'"\t"'),
        event(b"01"),
        event(b"9" * 5000),
    ),
    *(event(metadata=b'{"a": 1, "a": 2}'), event(b'{"a": {"b": 1, "b": 1}}'), event(b'[{"a": 1, "a": 1}]')),
    *(
        event(metadata=b'{"a" : 1, "a": 2}'),
        event(metadata=b'{"a"\t: 1, "a": 2}'),
        event(metadata=b'{"a": ":", "a": 2}'),
    ),
    *(PLAIN.replace(b'"namespace": ""', b'"namespace": "", "namespace": ""'), PLAIN.replace(b'"namespace": "", ', b"")),
    *(PLAIN.replace(b'"key": "a"', b'"key": "a", "key": "b"'), PLAIN.replace(b'"key": "a"', b'"key": ""'), PLAIN[:-1]),
    *(
        PLAIN.replace(b'"POINT_IN_TIME"', b"null"),
        PLAIN.replace(b'"event_type": "POINT_IN_TIME", ', b""),
        PLAIN + PLAIN,
    ),
    *(PLAIN.replace(b"1700000000000", b"true"), PLAIN.replace(b"1700000000000", b'"1"'), event(metadata=b"null")),
    *(
        event(metadata=b"[]"),
        event(b'"\xff"'),
        event(b'"\xed\xa0\x80"'),
        event(b"[" * 5000),
        event(b"[" * 700 + b"]" * 700),
    ),
    *(
        PLAIN + b" " + PLAIN[9:],
        PLAIN + b"x",
        b":::MLLOG 5",
        b":::MLLOG {}",
        b':::MLLOG "x"',
        b":::MLLOG [1]",
        b":::MLLOG ",
    ),
    *(
        PLAIN[:-20] + b"\n" + PLAIN,
        b':::MLLOG {"a":\n' + PLAIN,
        b"\xef\xbb\xbf" + PLAIN,
        PLAIN + b"\x00",
        PLAIN + b"\x0c",
    ),
    *(  # as many values as lines, but not one on each
        PLAIN.replace(b', "metadata"', b',\n:::MLLOG "metadata"') + PLAIN[9:],
        PLAIN.replace(b"1,", b"{}\n:::MLLOG ,") + PLAIN[9:],
        PLAIN + PLAIN[9:] + b"\n:::MLLOG ",
        PLAIN + b" " + PLAIN[9:] + b"\n:::MLLOG \n",
        PLAIN + PLAIN[9:] + b"\n" + PLAIN[:-1] + b"\n:::MLLOG }",
        event(b'"}\n:::MLLOG {""') + PLAIN[9:],
        PLAIN + PLAIN[9:] + b"\n" + PLAIN + b"\n" + PLAIN[:-1],
    ),
)


@pytest.mark.parametrize("data", STANDARD)
def test_lines_in_the_standard_form_are_decoded_by_msgspec_as_by_json(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert both_ways(data, monkeypatch) > 0


@pytest.mark.parametrize("data", OTHER)
def test_what_only_one_decoder_takes_is_left_to_json(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(data, monkeypatch)
    both_ways(PLAIN + b"\n" + data + b"\n" + PLAIN + b"\n", monkeypatch)


def test_few_bytes_are_decoded_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_decoded", 0)
    monkeypatch.setattr(typed, "decode", None)  # whoever called it would fail
    decode(PLAIN, 1, found := Found())
    assert len(found.events) == 1


@pytest.mark.parametrize(
    "inputs", [200, pytest.param(int(os.environ.get("MLHPC_FUZZ_INPUTS", "500000")), marks=pytest.mark.long)]
)
@pytest.mark.timeout(7200)
def test_damaged_logs_are_decoded_by_msgspec_as_by_json(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each log whole, and one of its lines alone: a broken line leaves its whole log to json."""
    chance = random.Random(inputs)
    taken = 0
    for _ in range(inputs):
        data = damage(chance.choice(BASES), chance)
        taken += both_ways(data, monkeypatch) + both_ways(chance.choice(data.split(b"\n")), monkeypatch)
    assert taken > 10 * inputs


def both_ways(data: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """Decode by json alone, and by msgspec where it is used. Returns how many events msgspec decoded."""
    monkeypatch.setattr(decoding, "_WORTH", 2**62)
    after = decode(data, 7, by_json := Found())
    monkeypatch.setattr(decoding, "_WORTH", 0)
    count = 0

    def counted(text: bytes, lines: int, *, whole: bool = False, decode: object = typed.decode) -> object:
        nonlocal count
        records = decode(text, lines, whole=whole)
        count += len(records or ())
        return records

    with monkeypatch.context() as patch:
        patch.setattr(typed, "decode", counted)
        assert decode(data, 7, found := Found()) == after
    assert repr(found.events) == repr(by_json.events)  # as text: NaN differs from itself, 1 equals 1.0
    assert (found.problems, found.damaged, found.event_bytes) == (
        by_json.problems,
        by_json.damaged,
        by_json.event_bytes,
    )
    return count
