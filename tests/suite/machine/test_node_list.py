"""Slurm's node lists."""

from __future__ import annotations

import pytest

from suite.errors import InputError
from suite.machine.node_list import expand_nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ("node1",)),
        ("node[1-3,7]", ("node1", "node2", "node3", "node7")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("a1,b[2-3],c", ("a1", "b2", "b3", "c")),
        ("r[1-2]-gpu", ("r1-gpu", "r2-gpu")),
        ("x[7]", ("x7",)),
    ],
)
def test_a_list_is_expanded(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "n[1-", "n[a-b]", "n[]", "n[1-3", "a,a", "n[3-1]", "n[1-9999999]", "]", "n[1]]", "n[1-2][3-4]"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        expand_nodes(text)
