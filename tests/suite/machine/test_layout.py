"""Choosing the memory format: the model stays as it was, numbers agree, and what is pinned or fixed is followed."""

from typing import Any

import pytest
import torch

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.machine.choice import layout
from mlhpc.suite.machine.choice.chooser import ChoiceCache, Chooser
from mlhpc.suite.machine.choice.layout import LAYOUTS
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World

pytestmark = pytest.mark.usefixtures("process_as_before")
CPU = torch.device("cpu")


def built(name: str, *sets: str) -> tuple[Workload, torch.nn.Module, RunConfig]:
    small = {"cosmoflow": "hyperparameters.input_size=16", "deepcam": "hyperparameters.height=32"}[name]
    chosen = load_descriptor(name)
    config = load_config(chosen, "smoke", ["global_batch_size=2", small, *sets])
    workload = load_workload(chosen)(config)
    torch.manual_seed(0)
    return workload, workload.build_model(World.create(None)), config


def chooser(**changes: Any) -> Chooser:
    return Chooser(World.create(None), CPU, **{"measure": True, "store": ChoiceCache(None)} | changes)


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam"])
def test_measuring_leaves_the_model_and_random_states_as_they_were(name: str) -> None:
    torch.set_num_threads(1)
    workload, model, _ = built(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    asked = chooser()
    workload.choose(model, asked)
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    choice = asked.choices["layout"]
    assert choice.seconds.keys() == LAYOUTS.keys()
    chosen = LAYOUTS[choice.value]
    assert (model.channels_last, torch._C._get_mkldnn_enabled()) == chosen


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam"])
def test_native_convolutions_are_not_tried_in_bfloat16(name: str) -> None:
    torch.set_num_threads(1)
    workload, model, _ = built(name, "precision=bfloat16")
    asked = chooser()
    workload.choose(model, asked)
    assert asked.choices["layout"].seconds.keys() == {"channels_last", "contiguous"}


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_computes_the_same_loss_and_gradients(name: str, text: str) -> None:
    found = []
    for pinned in ("channels_last", text):
        workload, model, config = built(name, *(["hyperparameters.dropout=0"] if name == "cosmoflow" else []))
        workload.choose(model, chooser(measure=False, pinned={"layout": pinned}))
        model.train()
        generator = torch.Generator().manual_seed(1)
        settings: Any = config.hyperparameters
        if name == "cosmoflow":
            side = settings.input_size
            x = torch.randint(0, 9, (2, side, side, side, 4), generator=generator).to(torch.int16)
            batch = {"x": x, "y": torch.zeros(2, 4)}
        else:
            size = (2, settings.height, settings.width)
            batch = {"x": torch.rand(*size, 16, generator=generator), "y": torch.zeros(size, dtype=torch.uint8)}
        loss = workload.loss(model, batch)
        loss.backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((float(loss.detach()), torch.cat(gradients)))
    (wanted_loss, wanted), (other, gradient) = found
    assert other == pytest.approx(wanted_loss, rel=1e-4)
    assert float((gradient - wanted).norm() / wanted.norm()) < 1e-2  # normalisation of two samples amplifies rounding


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_format_that_the_configuration_names_is_not_measured(value: str) -> None:
    workload, model, _ = built("cosmoflow", f"channels_last={value}")
    asked = chooser()
    workload.choose(model, asked)
    assert asked.choices == {}
    assert model.channels_last is (value == "true")


def test_fewer_threads_are_chosen_only_if_they_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    question = layout._make_thread_question(4, lambda: None, {})
    assert list(question.ways()) == ["4", "2", "1"]
    assert question.decide({"4": 1.0, "2": 0.97, "1": 2.0}) == "4"
    assert question.decide({"4": 1.0, "2": 0.9, "1": 2.0}) == "2"
    assert [question.possible(text) for text in ("4", "1", "5", "0", "-1", "x", "9" * 99)] == [True, True, *[False] * 5]


def test_threads_that_are_pinned_are_set() -> None:
    torch.set_num_threads(2)
    workload, model, _ = built("cosmoflow")
    asked = chooser(measure=False, pinned={"layout": "contiguous", "threads": "1"})
    workload.choose(model, asked)
    assert torch.get_num_threads() == 1
    assert model.channels_last is False
    assert {name: choice.source for name, choice in asked.choices.items()} == {"layout": "pinned", "threads": "pinned"}
