"""Reading of files that a person, or a stranger, wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.errors import InputError
from suite.files import LARGEST_YAML, YamlSource


@pytest.mark.parametrize("text", ["[" * 2**13, "- " * 2**12, "a: " + "[" * 2**13], ids=["lists", "dashes", "longer"])
def test_a_yaml_text_of_brackets_is_an_error_and_ends_no_process(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(InputError, match="not valid YAML|expected a mapping"):
        YamlSource.read(path)


def test_a_large_yaml_file_is_not_parsed(tmp_path: Path) -> None:
    (path := tmp_path / "large.yaml").write_text("a: 1\n" + "#" * LARGEST_YAML)
    with pytest.raises(InputError, match=r"large.yaml: has more than 4 MiB$"):
        YamlSource.read(path)
