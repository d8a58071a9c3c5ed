"""Reading of files that a person, or a stranger, wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from suite.documents import convert
from suite.errors import InputError
from suite.files import LARGEST_YAML, YamlSource, first_error
from suite.training.parallel.plan import ParallelPlan


@pytest.mark.parametrize("text", ["[" * 2**13, "- " * 2**12, "a: " + "[" * 2**13], ids=["lists", "dashes", "longer"])
def test_a_yaml_text_of_brackets_is_an_error_and_ends_no_process(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(InputError, match="not valid YAML|expected a mapping"):
        YamlSource.read(path)


def test_a_large_yaml_file_is_not_parsed(tmp_path: Path) -> None:
    (path := tmp_path / "large.yaml").write_text("a: 1\n" + "#" * LARGEST_YAML)
    with pytest.raises(InputError, match=r"large.yaml: has more than 4 MiB$"):
        YamlSource.read(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("recompute: {blocks.*: {budget: 2}}", "4: recompute.blocks.*.budget = 2: "),
        ("recompute: {blocks.*: {much: 2}}", "4: missing key 'recompute.blocks.*.budget'"),
        ("recompute: {blocks.*: often}", "4: recompute.blocks.* = 'often': "),
        ("recompute: {blocks.*: [full]}", "4: recompute.blocks.* = ['full']: "),
        ("recompute: [full]", "4: recompute = ['full']: "),
        ("split: [d, 3]", "4: split.1 = 3: "),
        ("meshes: 2", "4: unknown key 'meshes'"),
    ],
)
def test_a_key_is_named_as_the_file_states_it(tmp_path: Path, line: str, says: str) -> None:
    """Not by the kind of value that was tried."""
    (path := tmp_path / "plan.yaml").write_text(f"version: 1\ndescription: d\nparameters: {{a: replicate}}\n{line}\n")
    source = YamlSource.read(path)
    with pytest.raises(ValidationError) as caught:
        convert(source.data, ParallelPlan)
    assert first_error(caught.value, source).startswith(f"{path}:{says}")
