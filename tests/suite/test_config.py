"""Configs: YAML below --set, unknown keys refused with the valid ones and the line they stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.config import load_config
from suite.descriptor import descriptor, descriptors
from suite.errors import InputError
from suite.files import YamlSource

COSMOFLOW = descriptor("cosmoflow")


def test_every_shipped_config_is_valid_and_of_a_size_of_its_card() -> None:
    for workload in descriptors().values():
        for path in (workload.folder / "config").glob("*.yaml"):
            config = load_config(workload, path.stem)
            assert config.size in workload.card().sizes
            assert path.stem == config.size


def test_overrides_win_over_the_file_and_are_typed() -> None:
    config = load_config(
        COSMOFLOW, "smoke", ["global_batch_size=32", "hyperparameters.dropout=0.25", "staging.overlap=true"]
    )
    assert (config.global_batch_size, config.hyperparameters.dropout, config.staging.overlap) == (32, 0.25, True)  # type: ignore[attr-defined]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def valid(extra: str = "") -> str:
    return (COSMOFLOW.folder / "config" / "smoke.yaml").read_text() + extra


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (valid("nodez: 3\n"), ": unknown key 'nodez'; valid keys: cache_drop_command, channels_last,"),
        (valid("staging:\n  dir: /x\n"), ": unknown key 'dir'; valid keys: directory, overlap"),
        (valid("size: mini\n"), "key 'size' is given twice"),
        (
            valid().replace("global_batch_size: 16", "global_batch_size: many"),
            ":3: global_batch_size = 'many': Input should be",
        ),
        (valid().replace("size: smoke", "size: huge"), "cosmoflow: unknown size 'huge'; sizes: smoke, mini,"),
        ("workload: deepcam\n" + valid(), "workload is 'deepcam', not 'cosmoflow'"),
        ("- a\n", "expected a mapping, found list"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_one_line_with_the_place(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path / "demo.yaml", text)
    with pytest.raises(InputError, match=".+") as caught:
        load_config(COSMOFLOW, path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("dropout", "--set 'dropout': expected key=value"),
        (
            "hyperparameters.dropuot=1",
            "--set hyperparameters.dropuot: unknown key 'dropuot'; did you mean 'dropout'? valid keys:",
        ),
        (
            "global_batch_size=0",
            "--set global_batch_size: global_batch_size = 0: Input should be greater than or equal to 1",
        ),
        ("size.x=1", "--set 'size.x=1': 'size' is not a section"),
        ("data=[", "the value is not valid YAML"),
    ],
)
def test_a_bad_override_is_one_line_that_says_set(override: str, expected: str) -> None:
    with pytest.raises(InputError, match=".+") as caught:
        load_config(COSMOFLOW, "smoke", [override])
    assert expected in str(caught.value)


def test_unknown_names_are_answered_with_the_valid_ones() -> None:
    with pytest.raises(InputError, match="unknown size 'nope'; sizes: .*smoke"):
        load_config(COSMOFLOW, "nope")
    with pytest.raises(InputError, match="unknown workload 'cosmo'; did you mean 'cosmoflow'. workloads: cosmoflow"):
        descriptor("cosmo")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        YamlSource.read(tmp_path / "none.yaml")
