"""The rows of identities.yaml: each can be kept and can be broken, and no value of a package breaks the function that asks them."""

import copy
import random
import re
from typing import Any

import pytest

from mlhpc.suite.compliance import identities
from mlhpc.suite.compliance.identities import find_broken

ROWS = [(group, text) for group, texts in identities._GROUPS.items() if isinstance(texts, list) for text in texts]
WORDS = ("weak", "own", "cpu", "cuda", "auto")
VALUES: list[Any] = [None, True, False, 0, 1, 4, -3, 0.5, float("nan"), float("inf"), "", "7", "%1000000s", *WORDS]
VALUES += [[], [1], [1, 2, 3, 4], {}, {"value": 1}, 10**400, -(10**400), 1e308]


def draw_roots(text: str, draw: random.Random) -> dict[str, Any]:
    """Objects that have all names of a row, with any values; a name may be missing."""
    roots: dict[str, Any] = {}
    for path in dict.fromkeys(re.findall(r"[a-z_]\w*(?:\.\w+)*", re.sub("'[^']*'", "", text))):
        *above, last = path.split(".")
        place = roots
        for name in above:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                break
        else:
            if not isinstance(place.get(last), dict) and draw.random() < 0.9:
                place[last] = copy.deepcopy(draw.choice(VALUES))
    return roots


@pytest.mark.parametrize(("group", "text"), ROWS)
def test_each_row_is_kept_by_some_numbers_and_broken_by_others(
    group: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "_GROUPS", {group: [text]})
    draw, seen = random.Random(text), set[bool]()
    for _ in range(800):
        found = list(find_broken(group, draw_roots(text, draw)))
        seen.add(bool(found))
        assert all(": expected " in message and len(message) < 4000 for _, message in found)
    assert seen == {True, False}


def test_a_broken_row_says_what_was_found_and_what_was_expected() -> None:
    roots = {"cpu": {"sockets": 4, "cores": 2, "threads": 8}, "limits": {}, "first_caches": 2}
    said = "cpu.cores = 2, cpu.sockets = 4: expected cpu.cores >= cpu.sockets"
    assert list(find_broken("facts-agree", roots)) == [("cpu", said)]
