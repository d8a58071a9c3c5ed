"""What may be ranked against what."""

import pytest

from mlhpc.suite.log.score import find_round_group, list_differences


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (("v1.0", "closed"), ("v2.0", "closed"), []),
        (("v3.0", "closed"), ("mlhpc-1.0", "closed"), []),
        ((None, "open"), (None, "open"), []),
        (("v0.7", "closed"), ("v1.0", "closed"), ["the first data sets"]),
        (("v2.0", "closed"), ("v3.0", "closed"), ["staging before run_start does not count"]),
        (("v2.0", "closed"), ("v2.0", "open"), ["closed and open"]),
        (("v4.0", "closed"), ("v3.0", "open"), ["v4.0 and v3.0", "closed and open"]),
        ((None, None), ("v3.0", "closed"), ["no round", "none and closed"]),
    ],
)
def test_results_are_ranked_only_beside_their_like(
    a: tuple[str | None, str | None], b: tuple[str | None, str | None], said: list[str]
) -> None:
    for one, other in ((a, b), (b, a)):
        reasons = list_differences(one[0], other[0], one[1], other[1])
        assert len(reasons) == len(said)
    assert all(word in reason for word, reason in zip(said, list_differences(a[0], b[0], a[1], b[1]), strict=True))
    assert (find_round_group(a[0]) == find_round_group(b[0])) == (not any("rules" in reason for reason in reasons))
