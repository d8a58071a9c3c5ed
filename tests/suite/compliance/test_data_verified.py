"""A run that did not compare its data with their checksums is accepted with a warning that quotes its reason."""

from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.compliance.check import check
from tests.fixtures.logs import Line, insert, our_run, results

REASON = {"reason": "verify_data is false"}


@pytest.mark.parametrize(
    ("value", "metadata", "found"),
    [
        (None, REASON, True),
        (None, {}, True),
        ({"bytes": 9, "files": 1, "seconds": 0.1, "gb_per_s": 1e-7}, {"place": "data root"}, False),
        ({}, {}, False),
    ],
)
def test_only_a_run_that_says_so_gets_the_warning(
    tmp_path: Path, value: Any, metadata: dict[str, Any], found: bool
) -> None:
    lines = insert(Line("data_verified", value, metadata=metadata), "init_stop")
    folder = results(tmp_path / "r", 5, lambda n: lines(our_run(seed=n)))
    findings = [each for each in check([folder]).findings if each.rule == "data-verified"]
    assert len(findings) == (5 if found else 0)
    assert all(each.severity == "warning" for each in findings)
    assert all("verify_data is false" in each.message for each in findings if metadata == REASON)
