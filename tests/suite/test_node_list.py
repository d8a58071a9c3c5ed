"""Slurm's node lists, compared with python-hostlist, another implementation."""

from __future__ import annotations

import hostlist
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.suite.errors import InputError
from mlhpc.suite.node_list import parse_first_node, parse_node_list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ("node1",)),
        ("node[1-3,7]", ("node1", "node2", "node3", "node7")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("a1,b[2-3],c", ("a1", "b2", "b3", "c")),
        ("r[1-2]-gpu", ("r1-gpu", "r2-gpu")),
        ("x[7]", ("x7",)),
        ("n[1-2][3-4]", ("n13", "n14", "n23", "n24")),
        ("rack[1-2]n[08-09].site,login", ("rack1n08.site", "rack1n09.site", "rack2n08.site", "rack2n09.site", "login")),
        ("[1-2]", ("1", "2")),
        (" a , b\n", ("a", "b")),
        ("nid[000012,000020-000021]", ("nid000012", "nid000020", "nid000021")),
        ("gpu-b-[03]", ("gpu-b-03",)),
        # public issues and scripts: skypilot #8891, palace #228, scoop #44, psij-python #200, a TACC page, an NLDAS script
        (
            "ml-16-node-[001-002,004],ml-17-node-[001-002]",
            ("ml-16-node-001", "ml-16-node-002", "ml-16-node-004", "ml-17-node-001", "ml-17-node-002"),
        ),
        ("d05-[41-42]", ("d05-41", "d05-42")),
        ("PC[4455,2343,2342]", ("PC4455", "PC2343", "PC2342")),
        ("lassen[23,26]", ("lassen23", "lassen26")),
        ("c521-041,c562-008", ("c521-041", "c562-008")),
        ("cn[265,297-299]", ("cn265", "cn297", "cn298", "cn299")),
    ],
)
def test_a_list_is_expanded(text: str, names: tuple[str, ...]) -> None:
    assert parse_node_list(text) == names
    assert parse_first_node(text) == names[0]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,,b", "a b", "a,", "]", "n[1-", "n[1-3", "n[1]]", "n[[1]]", "n[]", "n[1,,2]", "n[a-b]", "n[3-1]"),
        *("n[١]", "n[1 - 2]", "n[-1]", f"n[{'9' * 5000}]"),
    ],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    for parse in (parse_node_list, parse_first_node):
        with pytest.raises(InputError):
            parse(text)


@pytest.mark.parametrize("text", ["a,a", "n[1-2,2]", "n[1-9999999]", "n[1-1000][1-1001]", "n[1-999999999999999999]"])
def test_a_list_has_different_names_and_not_too_many(text: str) -> None:
    with pytest.raises(InputError):
        parse_node_list(text)
    assert parse_first_node(text) in ("a", "n1", "n11")


LETTERS = st.text("abcxyz0159-._", min_size=1, max_size=5)
NUMBER = st.integers(0, 120).map(str) | st.integers(0, 12).map(lambda number: f"{number:03d}")


@st.composite
def ranges(draw: st.DrawFn) -> str:
    first = draw(NUMBER)
    return draw(st.just(first) | st.integers(0, 12).map(lambda more: f"{first}-{int(first) + more}"))


BRACKET = st.lists(ranges(), min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
NAME = st.lists(LETTERS | BRACKET, min_size=1, max_size=4).map("".join)


@given(st.lists(NAME, min_size=1, max_size=4).map(",".join))
def test_python_hostlist_expands_a_list_to_the_same_names(text: str) -> None:
    expected = hostlist.expand_hostlist(text, allow_duplicates=True)
    assert parse_first_node(text) == expected[0]
    if len(set(expected)) == len(expected):
        assert parse_node_list(text) == tuple(expected)
    else:
        with pytest.raises(InputError, match="different nodes"):
            parse_node_list(text)


@pytest.mark.parametrize(
    "text", ["@file", "n{1..3}", "/hosts", "hosts/all", "$NODES", "ada@n1", "n1;n2", "n*", "<list>"]
)
def test_what_no_node_is_called_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"expected a Slurm node list such as node\[1-3,7\]"):
        parse_node_list(text)
