"""The table says what was compared and what lies above its bound; what is not there is a skip of one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reference.conftest import PYTHONS, REFERENCES, ROWS, USED, Row, render


def test_the_table_marks_what_lies_above_its_bound() -> None:
    rows = [Row("openfold", "triangle attention", 3e-7, 1e-6), Row("deepcam", "logits", 0.5, 1e-5)]
    first, second, third, *rest = render(rows, {"a/b": "0123456789ab"}).splitlines()
    assert first.split() == ["workload", "what", "difference", "allowed"]
    assert second.split() == ["deepcam", "logits", "0.5", "1e-05", "NOT", "within"]
    assert third.split() == ["openfold", "triangle", "attention", "3e-07", "1e-06"]
    assert "a/b 0123456789ab" in rest


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_a_value_above_its_bound_fails_the_test_and_stays_in_the_table(
    request: pytest.FixtureRequest, record: Callable[..., None], value: float
) -> None:
    before = list(request.config.stash[ROWS])
    with pytest.raises(AssertionError, match="deepcam: logits"):
        record("deepcam", "logits", value, 1.0)
    assert len(request.config.stash[ROWS]) == len(before) + 1
    request.config.stash[ROWS][:] = before


@pytest.fixture(autouse=True)
def nothing_added(request: pytest.FixtureRequest) -> Iterator[None]:
    """What these tests find is not in the table that is kept."""
    used = request.config.stash[USED]
    before = dict(used)
    yield
    used.clear()
    used.update(before)


def test_a_clone_is_found_by_either_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reference: Callable[[str], Path]
) -> None:
    monkeypatch.setenv(REFERENCES, str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"^no clone of github\.com/owner/code in MLHPC_REFERENCES$"):
        reference("owner/code")
    for name in ("code", "owner+code"):
        (tmp_path / name).mkdir()
        assert reference("owner/code") == tmp_path / name
    monkeypatch.delenv(REFERENCES)
    with pytest.raises(pytest.skip.Exception, match=r"^MLHPC_REFERENCES is not set"):
        reference("owner/code")


def test_a_python_that_has_all_packages_is_found(
    monkeypatch: pytest.MonkeyPatch, python_with: Callable[..., str]
) -> None:
    monkeypatch.setenv(PYTHONS, "")
    assert Path(python_with("pytest")).exists()
    assert Path(python_with("pytest", "numpy")).exists()
    with pytest.raises(
        pytest.skip.Exception, match=r"^no Python in MLHPC_REFERENCE_PYTHONS has pytest, no_such_package$"
    ):
        python_with("pytest", "no_such_package")
