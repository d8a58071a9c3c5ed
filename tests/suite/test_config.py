"""Configs: YAML below --set, unknown keys refused with the valid ones and the line they stand on."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

from suite.config import AnyHyperparameters, Hyperparameters, load_config, resolve_config
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
        (valid("data: 2026-13-45\n"), "not valid YAML: month must be in 1..12"),
        (valid("staging: &s\n  directory: *s\n"), ":21: contains itself, by an alias"),
        (valid("choices:\n  pinned: &s {a: *s}\n"), "contains itself, by an alias"),
        (
            "a: &a0 [1, 2, 3]\n" + "".join(f"b{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 9)) + valid(),
            "has more than 1000000 values, by aliases",
        ),
        (valid("3: 4\n"), ":21: 3 = 3: Keys should be strings"),
        (valid("staging:\n"), ":21: staging = None: expected keys with values"),
        (valid("__init__: 1\n"), ":21: unknown key '__init__'; valid keys: cache_drop_command,"),
        ("size: smoke\n", "demo.yaml: missing keys 'global_batch_size', 'max_epochs', 'hyperparameters'"),
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
        (f"max_epochs={'9' * 5000}", "--set 'max_epochs=9999"),
        ("data=!!timestamp x", "the value is not valid YAML"),
        ("data=!!bool x", "the value is not valid YAML"),
        ("global_batch_size=1e3", "global_batch_size = '1e3': Input should be a valid integer"),
        ("global_batch_size=.nan", "global_batch_size = nan: Input should be"),
        ("global_batch_size=null", "global_batch_size = None: Input should be"),
        ("hyperparameters.base_learning_rate=.nan", "base_learning_rate = nan: Input should be greater than 0"),
        ("max_epochs=true", "max_epochs = True: expected a number, not true or false"),
        ("hyperparameters.momentum=true", "momentum = True: expected a number, not true or false"),
        ("hyperparameters.dropout=1", "dropout = 1: Input should be less than 1"),
        ("hyperparameters.momentum=0.8", "momentum = 0.8: Input should be greater than or equal to 0.9"),
        ("hyperparameters.conv_channels=[]", "conv_channels = []: Tuple should have at least 1 item"),
        ("hyperparameters.targets=[a, b, c]", "targets = ['a', 'b', 'c']: expected more values, number 4 is missing"),
        ("hyperparameters.targets=[a, b, c, d, e]", "Tuple should have at most 4 items"),
        ("hyperparameters.decay_factors=[1.5]", "hyperparameters.decay_factors.0 = 1.5: Input should be less than 1"),
        ("hyperparameters.input_size=7", ": input_size 7 cannot be halved by each of 3 conv_channels"),
        ("hyperparameters.__class__=1", "unknown key '__class__'; valid keys: augmentation,"),
        ("hyperparameters=3", "--set hyperparameters: hyperparameters = 3: expected keys with values"),
        ("channels_last=AUTO", "channels_last = 'AUTO': Input should be"),
        ("submission.org=''", "submission.org = '': String should have at least 1 character"),
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


def test_values_that_pydantic_converts_are_still_converted() -> None:
    sets = [
        "global_batch_size='16'",
        "verify_data='yes'",
        "checkpoint.interval_s='5'",
        "hyperparameters.dropout=' 0.5 '",
    ]
    config = load_config(COSMOFLOW, "smoke", [*sets, "hyperparameters.l2=1e-3", "choices.pinned={a: b}"])
    assert (config.global_batch_size, config.verify_data, config.checkpoint.interval_s) == (16, True, 5.0)
    assert (config.hyperparameters.dropout, config.hyperparameters.l2) == (0.5, 0.001)  # type: ignore[attr-defined]
    assert config.choices.pinned == {"a": "b"}
    assert {"global_batch_size", "hyperparameters"} < config.model_fields_set
    assert "compile" not in config.model_fields_set


def test_a_configuration_is_what_it_writes_frozen_copied_and_compared() -> None:
    config = load_config(COSMOFLOW, "smoke", ["data=/a/b"])
    dumped = config.model_dump(mode="json", exclude_none=True)
    assert json.loads(json.dumps(dumped)) == dumped
    assert resolve_config(COSMOFLOW, YamlSource(Path("x"), copy.deepcopy(dumped), {})) == config
    assert config.model_dump()["data"] == Path("/a/b")
    assert (config.logged()["data"], dumped["data"]) == ("b", "/a/b")
    assert "plan" in config.model_dump()
    assert "plan" not in dumped
    assert config.model_dump(include={"size", "compile"}) == {"size": "smoke", "compile": False}
    changed = config.model_copy(update={"compile": True})
    assert (changed.compile, config.compile) == (True, False)
    assert changed != config
    assert hash(config.staging) == hash(copy.deepcopy(config.staging))
    with pytest.raises(FrozenInstanceError):
        config.size = "mini"
    loop = AnyHyperparameters.model_validate({"rate": 1, "more": {"x": (1, None)}})
    assert loop.model_dump(mode="json") == {"rate": 1, "more": {"x": [1, None]}}
    assert loop == AnyHyperparameters(rate=1, more={"x": (1, None)})
    assert loop != AnyHyperparameters(rate=2)
    assert pickle.loads(pickle.dumps(config.hyperparameters)) == config.hyperparameters
    with pytest.raises(ValidationError, match="Keys should be strings"):
        AnyHyperparameters.model_validate({3: 1})


class Strange(Hyperparameters):
    """Hyperparameters of a package that was written with pydantic."""

    width: int = Field(ge=1)
    rates: list[float] = Field([0.1], min_length=1)
    names: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _even(self) -> Strange:
        if self.width % 2:
            raise ValueError("width is odd")
        return self


def test_hyperparameters_may_be_written_with_pydantic() -> None:
    made = Strange(width=2, names={"a": 1})
    assert made.model_dump() == {"width": 2, "rates": [0.1], "names": {"a": 1}}
    assert Strange(width=2).rates is not made.rates
    wrongs: list[dict[str, object]] = [
        {},
        {"width": 0},
        {"width": 3},
        {"width": 2, "rates": []},
        {"width": 2, "more": 1},
    ]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            Strange.model_validate(wrong)
    with pytest.raises(TypeError, match=r"Other\.check: of pydantic only Field and model_validator"):

        class Other(Hyperparameters):
            width: int = 1

            @field_validator("width")
            @classmethod
            def check(cls, value: int) -> int:
                return value
