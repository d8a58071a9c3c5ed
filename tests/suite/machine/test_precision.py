"""Choosing the precision: only where the configuration leaves it open, by passes of the network, and the log says which it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.machine.choice import precision
from mlhpc.suite.machine.choice.chooser import ChoiceCache, Chooser
from mlhpc.suite.machine.choice.precision import choose_precision
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World
from tests.fixtures.cli import mlhpc
from tests.fixtures.once import made_once
from tests.fixtures.wings import needs_axes

pytestmark = pytest.mark.usefixtures("process_as_before")
CPU = torch.device("cpu")
SMALL = {
    "cosmoflow": "hyperparameters.input_size=16",
    "deepcam": "hyperparameters.height=32",
    "moe_lm": "hyperparameters.context=32",
    "swinv2_moe": "hyperparameters.embed=16",
    "open_catalyst": "precision=auto",
    "openfold": "precision=auto",
}
WITHOUT_EXAMPLE = {"open_catalyst", "openfold"}


def asked(name: str, *sets: str, **changes: Any) -> tuple[RunConfig, Chooser]:
    chosen, world = load_descriptor(name), World.create(None)
    config = load_config(chosen, "smoke", ["precision=auto", "global_batch_size=2", SMALL[name], *sets])
    chooser = Chooser(world, CPU, **{"measure": True, "store": ChoiceCache(None)} | changes)
    return choose_precision(chooser, config, load_workload(chosen)), chooser


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", SMALL)
def test_a_precision_left_open_is_measured_by_passes_of_the_network_and_nothing_else_changes(name: str) -> None:
    torch.set_num_threads(1)
    state, onednn = torch.get_rng_state(), torch._C._get_mkldnn_enabled()
    config, chooser = asked(name)
    choice = chooser.choices["precision"]
    assert config.precision == choice.value
    assert list(chooser.choices) == ["precision"]  # a run makes its others itself
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._C._get_mkldnn_enabled() == onednn
    if name in WITHOUT_EXAMPLE:
        assert (choice.value, choice.source, choice.note) == (
            "float32",
            "rule",
            "not measured: no batch is made up for it",
        )
    else:
        assert (choice.source, choice.problems) == ("measured", {})
        seconds = choice.seconds
        assert (choice.value == "bfloat16") == (seconds["bfloat16"] <= 0.9 * seconds["float32"])


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({"float32": 1.0, "bfloat16": 0.9}, "bfloat16"),
        ({"float32": 1.0, "bfloat16": 0.91}, "float32"),
        ({"float32": 1.0, "bfloat16": 2.0}, "float32"),
        ({"float32": 1.0}, "float32"),
        ({"bfloat16": 1.0}, "bfloat16"),
    ],
)
def test_bfloat16_has_to_be_worth_it(seconds: dict[str, float], wanted: str) -> None:
    assert precision._decide(seconds) == wanted


@pytest.mark.parametrize("stated", ["float32", "bfloat16", "tf32"])
def test_a_precision_that_is_stated_stays(stated: str) -> None:
    config, chooser = asked("cosmoflow", f"precision={stated}")
    assert (config.precision, chooser.choices) == (stated, {})


def test_pins_rules_and_earlier_parts_are_followed_without_measuring() -> None:
    for changes, wanted in (
        ({"pinned": {"precision": "bfloat16"}}, ("bfloat16", "pinned")),
        ({"measure": False}, ("float32", "rule")),
        ({"earlier": {"precision": "bfloat16"}, "pinned": {"precision": "float32"}}, ("bfloat16", "kept")),
    ):
        config, chooser = asked("cosmoflow", **changes)
        choice = chooser.choices["precision"]
        assert (config.precision, choice.source) == wanted
        assert not choice.seconds


def test_a_pin_that_is_no_precision_is_told_and_measured_instead() -> None:
    config, chooser = asked("cosmoflow", pinned={"precision": "float64"})
    assert config.precision in ("float32", "bfloat16")
    assert chooser.choices["precision"].note == "pinned float64 is not possible here"


def test_a_plan_is_not_measured_whatever_the_cache_has_from_runs_without_one(tmp_path: Path) -> None:
    store = ChoiceCache(tmp_path / "cache")
    torch.set_num_threads(1)
    _, chooser = asked("cosmoflow", store=store)
    assert chooser.choices["precision"].source == "measured"
    _, chooser = asked("cosmoflow", store=store)
    assert chooser.choices["precision"].source == "cache"
    config, chooser = asked("cosmoflow", "plan=spatial", store=store)
    choice = chooser.choices["precision"]
    assert (config.precision, choice.source, choice.note) == ("float32", "rule", "not measured: a plan")
    _, chooser = asked("cosmoflow", "channels_last=true", store=store)
    assert chooser.choices["precision"].source == "measured"


@pytest.mark.parametrize(("failing", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_precision_whose_pass_fails_is_out(failing: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlhpc.workloads.cosmoflow.workload import CosmoFlow

    pass_of = CosmoFlow.loss

    def loss(self: CosmoFlow, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if self.config.precision == failing:
            raise RuntimeError("no kernel for this")
        return pass_of(self, model, batch)

    monkeypatch.setattr(CosmoFlow, "loss", loss)
    config, chooser = asked("cosmoflow")
    assert config.precision == wanted
    assert chooser.choices["precision"].problems == {failing: "RuntimeError: no kernel for this"}


@pytest.mark.parametrize(
    ("name", "setting"),
    [("moe_lm", "hyperparameters.moe.expert_parallel=true"), ("deepcam", "hyperparameters.batchnorm_group_size=2")],
)
def test_a_pass_that_needs_other_ranks_is_not_measured(name: str, setting: str) -> None:
    config, chooser = asked(name, setting)
    assert (config.precision, chooser.choices["precision"].source) == ("float32", "rule")


def test_what_chooses_none_says_so() -> None:
    config = load_config(load_descriptor("cosmoflow"), "smoke", ["precision=auto"])
    wanted = "precision is auto, but mlhpc plan does not measure which is fastest: give --set precision=float32"
    with pytest.raises(InputError, match=wanted):
        config.with_stated_precision("mlhpc plan")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a workload that is made and trained fast: CPUs without instructions for bfloat16 are slow with convolutions."""

    def make(folder: Path) -> None:
        done = mlhpc("data", "generate", "moe_lm", "--size", "smoke", "-o", folder / "data")
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "precision_data", make) / "data"


@pytest.mark.long
def test_the_log_of_a_run_has_the_precision_that_was_chosen_and_the_checker_accepts_it(
    data: Path, tmp_path: Path
) -> None:
    sets = [f"data={data}", "precision=auto", "max_epochs=1", "choices.pinned={precision: bfloat16}", "device=cpu"]
    words = ["run", "moe_lm", "--size", "smoke", "--ranks", 2, "--runs", 1, "-o", tmp_path / "run"]
    mlhpc(*words, *(word for each in sets for word in ("--set", each)))
    log = read_events(tmp_path / "run" / "result_0.txt")
    (config,) = log.every("run_config")
    assert config.value["precision"] == "bfloat16"
    (choice,) = [each for each in log.every("measured_choice") if each.value["name"] == "precision"]
    assert (choice.value["chosen"], choice.metadata["source"]) == ("bfloat16", "pinned")
    done = mlhpc("check", tmp_path / "run", "--format", "json")
    found = json.loads(done.stdout)
    assert "precision" not in json.dumps(found).lower(), done.stdout


@pytest.mark.parametrize("words", [("profile", "cosmoflow"), pytest.param(("plan", "cosmoflow"), marks=needs_axes)])
def test_commands_that_choose_none_want_it_stated(words: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    own = () if words[0] == "plan" else ("-o", tmp_path / "out")
    done = mlhpc(*words, "--size", "smoke", "--set", f"data={data}", "--set", "precision=auto", *own)
    assert done.returncode == 2
    assert (
        f"precision is auto, but mlhpc {words[0]} does not measure which is fastest: give --set precision=float32"
        in done.stderr
    )
