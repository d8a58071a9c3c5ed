"""Configs: YAML below --set, unknown keys refused with the valid ones and the line they stand on."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Literal

import pytest
from msgspec import Struct, structs

from mlhpc.suite.config import explain_missing_submitter, load_config, resolve_config
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.documents import YamlSource, convert_to_plain_data, parse_yaml, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.system import read_description

COSMOFLOW = load_descriptor("cosmoflow")
CONFIG = COSMOFLOW.folder / "config" / "smoke.yaml"


def test_every_shipped_config_is_valid_and_of_a_size_of_its_card() -> None:
    for workload in load_descriptors().values():
        for path in (workload.folder / "config").glob("*.yaml"):
            config = load_config(workload, path.stem)
            assert config.size in workload.card().sizes
            assert path.stem == config.size


def test_a_mapping_in_an_override_changes_its_keys_alone() -> None:
    descriptor = load_descriptor("cosmoflow")
    whole = load_config(descriptor, "smoke", ["hyperparameters={dropout: 0.25}", "checkpoint={interval_s: 5}"])
    single = load_config(descriptor, "smoke", ["hyperparameters.dropout=0.25", "checkpoint.interval_s=5"])
    assert whole == single
    with pytest.raises(InputError, match="did you mean 'dropout'"):
        load_config(descriptor, "smoke", ["hyperparameters={dropuot: 0.25}"])


def test_a_missing_key_is_named_with_the_words_that_it_may_be(tmp_path: Path) -> None:
    class Meter(Struct):
        """A document with required keys."""

        scope: Literal["node", "rack"]
        count: int

    (tmp_path / "a.yaml").write_text("{}\n")
    with pytest.raises(InputError, match=r"missing keys 'scope' \(node, rack\), 'count'$"):
        YamlSource.read(tmp_path / "a.yaml").convert(Meter)
    (tmp_path / "a.yaml").write_text("scope: node\ncount: 10min\n")
    with pytest.raises(InputError, match="expected int, got str; write a number without unit"):
        YamlSource.read(tmp_path / "a.yaml").convert(Meter)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("\tb: 1", "indent with spaces"),
        ("b: @c", "quotes around a text that begins with @"),
        ("b: c: d", "needs quotes"),
        ("b: {c: 1", "a bracket"),
        ('b: "c', "is open at the end"),
        ("b", "KEY: VALUE"),
        ("- b", "begin in one column"),
        ("b: *c d", "begins with \\*"),
    ],
)
def test_a_mistake_of_grammar_says_what_to_write(line: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: 1\n{line}\n")
    with pytest.raises(InputError, match=f"not valid YAML: .*; .*{remedy}"):
        YamlSource.read(tmp_path / "a.yaml")


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
            ":3: global_batch_size = 'many': expected int, got str",
        ),
        (valid().replace("size: smoke", "size: huge"), "cosmoflow: unknown size 'huge'; sizes: smoke, mini,"),
        ("workload: deepcam\n" + valid(), "workload is 'deepcam'; expected 'cosmoflow'"),
        ("- a\n", "expected a mapping, found list"),
        ("a: [\n", "not valid YAML"),
        (valid("data: 2026-13-45\n"), "not valid YAML: month must be in 1..12"),
        (valid("staging: &s\n  directory: *s\n"), ":20: a value contains itself by an alias"),
        (valid("choices:\n  pinned: &s {a: *s}\n"), "a value contains itself by an alias"),
        (
            "a: &a0 [1, 2, 3]\n" + "".join(f"b{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 9)) + valid(),
            "a value has more than 1000000 values with its aliases expanded",
        ),
        (valid("3: 4\n"), ":20: 3: expected str as the key"),
        (valid("staging:\n"), ":20: staging = None: expected a mapping, got null"),
        (valid("__init__: 1\n"), ":20: unknown key '__init__'; valid keys: cache_drop_command,"),
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
            "--set global_batch_size: global_batch_size = 0: expected int >= 1",
        ),
        ("size.x=1", "--set 'size.x=1': 'size' is a single value"),
        ("data=[", "the value is not valid YAML"),
        (f"max_epochs={'9' * 5000}", "--set 'max_epochs=9999"),
        ("data=!!timestamp x", "the value is not valid YAML"),
        ("data=!!bool x", "the value is not valid YAML"),
        ("global_batch_size=1e3", "global_batch_size = 1000.0: expected int, got float"),
        ("global_batch_size=.nan", "global_batch_size = nan: expected a finite number"),
        ("global_batch_size=null", "global_batch_size = None: expected int"),
        ("hyperparameters.base_learning_rate=.nan", "base_learning_rate = nan: expected a finite number"),
        ("device=0", "device = 0: expected one of auto, cpu, cuda"),
        ("max_epochs=true", "max_epochs = True: expected int, got bool"),
        ("hyperparameters.momentum=true", "momentum = True: expected float, got bool"),
        ("hyperparameters.dropout=1", "dropout = 1: expected float < 1.0"),
        ("hyperparameters.momentum=0.8", "momentum = 0.8: expected float >= 0.9"),
        ("hyperparameters.conv_channels=[]", "conv_channels = []: expected a list of length >= 1"),
        ("hyperparameters.input_std=[1, 2, 3]", "input_std = [1, 2, 3]: expected a list of length 4, got 3"),
        ("hyperparameters.input_std=[1, 2, 3, 4, 5]", "expected a list of length 4, got 5"),
        ("hyperparameters.decay_factors=[1.5]", "hyperparameters.decay_factors.0 = 1.5: expected float < 1.0"),
        (
            "hyperparameters.input_size=7",
            ": input_size is 7, expected a multiple of 8: each of the 3 conv_channels halves it",
        ),
        ("hyperparameters.__class__=1", "unknown key '__class__'; valid keys: augmentation,"),
        ("hyperparameters=3", "--set hyperparameters: hyperparameters = 3: expected a mapping, got int"),
        ("channels_last=AUTO", "channels_last = 'AUTO': expected one of 'auto'"),
        ("hyperparameters.base_learning_rate=.inf", "base_learning_rate = inf: expected a finite number"),
        (
            "hyperparameters.input_mean=[0, 0, 0, -.inf]",
            "hyperparameters.input_mean.3 = -inf: expected a finite number",
        ),
        ("watchdog.silence_s=.inf", "watchdog.silence_s = inf: expected a finite number"),
        ("watchdog.silence_s=1.0e+300", "watchdog.silence_s = 1e+300: expected a number up to 1e+100"),
        ("watchdog.silence_s=1.0e+99", "watchdog.silence_s = 1e+99: expected float <= 1000000000.0"),
        ("hyperparameters.base_learning_rate=1.0e+300", "base_learning_rate = 1e+300: expected a number up to 1e+100"),
        ("checkpoint.interval_s=.inf", "checkpoint.interval_s = inf: expected a finite number"),
        ("max_epochs=10000000000", "max_epochs = 10000000000: expected int <= 2147483647"),
        (f"global_batch_size=1{'0' * 30}", ": expected at most 64 bits"),
        (f"global_batch_size=1{'0' * 4000}", "expected at most 64 bits"),
        ("submission.org=''", "submission.org = '': expected str of length >= 1"),
    ],
)
def test_a_bad_override_is_one_line_that_says_set(override: str, expected: str) -> None:
    with pytest.raises(InputError, match=".+") as caught:
        load_config(COSMOFLOW, "smoke", [override])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "override",
    ["depths=[1, 4611686018427387904]", "depths=[0, 1]", "adam_betas=[0.9, 1.0]", "adam_betas=[-0.1, 0.9]"],
)
def test_a_setting_that_would_take_for_ever_or_that_torch_refuses_is_refused_at_once(override: str) -> None:
    with pytest.raises(InputError, match="--set hyperparameters"):
        load_config(load_descriptor("swinv2_moe"), "smoke", [f"hyperparameters.{override}"])


@pytest.mark.parametrize("factor", [".nan", ".inf", "-.inf", "1.0e+300", "-4.5", "4.01"])
def test_a_capacity_factor_is_finite_and_at_most_the_number_of_experts(factor: str) -> None:
    with pytest.raises(InputError, match="hyperparameters.moe.*capacity_factor") as caught:
        load_config(load_descriptor("swinv2_moe"), "smoke", [f"hyperparameters.moe.capacity_factor={factor}"])
    assert "'experts'" not in str(caught.value), "a rule across fields shows no mapping"


@pytest.mark.parametrize("factor", ["4", "-4", "0", "0.5", "null"])
def test_capacity_factors_up_to_the_number_of_experts_hold(factor: str) -> None:
    load_config(load_descriptor("swinv2_moe"), "smoke", [f"hyperparameters.moe.capacity_factor={factor}"])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 30])
def test_no_document_holds_a_number_that_is_not_finite_or_too_long(tmp_path: Path, number: str) -> None:
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"version": 1, "git": {"a.b": [0, "@"]}}).replace('"@"', number))
    with pytest.raises(InputError, match=r"run.json: git.a.b.1 = .*: expected (a finite number|at most 64 bits)"):
        read_json_document(run, dict, "a file", 1)
    deep = tmp_path / "deep.yaml"
    deep.write_text("description:\n  processor_frequency_mhz: .inf\n")
    with pytest.raises(InputError, match=r"deep.yaml:2: description.processor_frequency_mhz = inf: expected a finite"):
        read_description(deep)


def test_unknown_names_are_answered_with_the_valid_ones() -> None:
    with pytest.raises(InputError, match="unknown size 'nope'; sizes: .*smoke"):
        load_config(COSMOFLOW, "nope")
    with pytest.raises(InputError, match="unknown workload 'cosmo'; did you mean 'cosmoflow'. workloads: cosmoflow"):
        load_descriptor("cosmo")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        YamlSource.read(tmp_path / "none.yaml")


def test_the_keys_that_were_stated_are_known() -> None:
    config = load_config(COSMOFLOW, "smoke", ["hyperparameters.l2=1e-3", "choices.pinned={a: b}"])
    assert config.hyperparameters.l2 == 0.001
    assert config.choices.pinned == {"a": "b"}
    assert {"global_batch_size", "hyperparameters", "choices"} < config.stated
    assert "compile" not in config.stated


def test_a_configuration_is_what_it_writes_frozen_copied_and_compared() -> None:
    config = load_config(COSMOFLOW, "smoke", ["data=/a/b"])
    dumped = convert_to_plain_data(config, without_none=True)
    assert json.loads(json.dumps(dumped)) == dumped
    assert resolve_config(COSMOFLOW, YamlSource(Path("x"), copy.deepcopy(dumped), {})) == config
    assert (config.logged()["data"], dumped["data"]) == ("b", "/a/b")
    assert "plan" in convert_to_plain_data(config)
    assert "plan" not in dumped
    changed = structs.replace(config, compile=True)
    assert (changed.compile, config.compile) == (True, False)
    assert changed != config
    assert hash(config.staging) == hash(copy.deepcopy(config.staging))
    with pytest.raises(AttributeError):
        config.size = "mini"
    assert pickle.loads(pickle.dumps(config.hyperparameters)) == config.hyperparameters


def test_a_submitter_comes_from_the_setting_the_environment_the_persons_file_and_the_system_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submitter(*overrides: str, system: str | None = None) -> str:
        return load_config(COSMOFLOW, "smoke", overrides, system).submission.org

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert submitter() == "unknown"
    assert submitter(system="SITE") == "SITE"
    (tmp_path / "mlhpc.yaml").write_text("submission: {org: MINE}\n")
    assert submitter(system="SITE") == "MINE"
    monkeypatch.setenv("MLHPC_ORG", "SHELL")
    assert submitter() == "SHELL"
    assert submitter("submission.org=GIVEN") == "GIVEN"
    assert submitter("submission.division=open") == "SHELL"
    assert submitter("submission.org=unknown") == "unknown", "what was stated stays: a run folder's config.yaml has it"
    for name in ("XDG_CONFIG_HOME", "MLHPC_ORG"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert submitter() == "unknown"
    (tmp_path / "home" / ".config").mkdir(parents=True)
    (tmp_path / "home" / ".config" / "mlhpc.yaml").write_text("submission: {org: HOME}\n")
    assert submitter() == "HOME"
    monkeypatch.delenv("HOME")
    assert submitter() == "unknown"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("submission: {orgg: A}\n", "mlhpc.yaml:1: "),
        ("org: A\n", "unknown key 'org'; valid keys: submission"),
        ("submission: {org: 7}\n", "submission.org = 7: expected str, got int"),
        ("- a\n", "mlhpc.yaml: expected a mapping, found list"),
    ],
)
def test_a_mistake_in_the_persons_file_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "mlhpc.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(COSMOFLOW, "smoke")
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["My University", "A/B", ".hidden", "", "-x", "x" * 101])
def test_a_submitter_that_no_package_can_have_is_refused_before_a_run(name: str) -> None:
    source = YamlSource(Path("c.yaml"), {"submission": {"org": name}} | YamlSource.read(CONFIG).data, {})
    with pytest.raises(InputError, match=r"submission.org"):
        resolve_config(COSMOFLOW, source)


def test_a_run_without_a_submitter_is_said_in_one_line_beforehand() -> None:
    note = explain_missing_submitter(load_config(COSMOFLOW, "smoke"))
    assert note is not None
    assert len(note.splitlines()) == 1
    assert all(word in note for word in ("MLHPC_ORG", "~/.config/mlhpc.yaml", "mlhpc package --submitter"))
    assert explain_missing_submitter(load_config(COSMOFLOW, "smoke", ["submission.org=ACME"])) is None


@pytest.mark.parametrize("text", ["0_006", "010", "1_000", "1:30", "-007"])
def test_a_number_of_yaml_1_1_alone_is_not_taken_for_another_one(text: str) -> None:
    """YAML 1.1 takes 0_006 for the octal 6, 010 for 8 and 1:30 for 90."""
    assert parse_yaml(text) == text
    with pytest.raises(InputError, match=rf"learning_rate = '{text}': expected float"):
        load_config(load_descriptor("moe_lm"), "smoke", [f"hyperparameters.learning_rate={text}"])


def test_a_key_of_another_section_is_told_where_it_belongs() -> None:
    with pytest.raises(InputError, match="it is no part of hyperparameters: write max_epochs alone"):
        load_config(load_descriptor("moe_lm"), "smoke", ["hyperparameters.max_epochs=2"])
