"""Passes as graphs: what replays change, which batches have one, and when a run has none. Without a GPU, on a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.choice.chooser import ChoiceCache, Chooser
from mlhpc.suite.training.cuda_graphs import (
    EAGER,
    GRAPH,
    MOST_GRAPHS,
    WARM_UPS,
    StepGraphs,
    after_pass,
    choose_graphs,
    find_graph_problem,
    is_captured,
)
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World
from tests.fixtures.recorded_graph import record

CPU = torch.device("cpu")


def test_the_stand_in_captures_without_computing_and_replays_into_the_same_place() -> None:
    x, seen, norm = torch.arange(6.0).view(2, 3), torch.zeros(()), nn.BatchNorm1d(3)
    mean, state = norm.running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr]

    def work() -> Tensor:
        seen.add_(1)
        return norm(x).detach().sum() + torch.rand(()) + x.t()[0, 1]

    result, replay = record(work)
    assert (float(seen), bool(result.isnan())) == (0.0, True)
    assert torch.equal(cast(Tensor, norm.running_mean), mean)
    assert torch.equal(torch.get_rng_state(), state)
    kept = []
    for number in range(3):
        x.fill_(number)
        replay()
        kept.append((result, result.clone()))
    assert float(seen) == 3.0
    assert len({float(place) for place, _ in kept}) == 1  # what was not copied is the last one
    torch.set_rng_state(state)
    again = nn.BatchNorm1d(3)
    for number, (_, value) in enumerate(kept):
        x.fill_(number)
        assert torch.equal(value, again(x).sum() + torch.rand(()) + x.t()[0, 1])


READS: dict[str, Callable[[Tensor], Any]] = {
    "a value": lambda x: x.sum().item(),
    "a branch": lambda x: 1 if x.sum() > 0 else 0,
    "a list": lambda x: x.tolist(),
    "a mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("read", READS)
def test_the_stand_in_refuses_what_a_capture_refuses(read: str) -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="reads a value"):
        record(lambda: x * READS[read](x))


class Line:
    """y = w x with one weight; counts what its passes leave on the host."""

    def __init__(self, **options: Any) -> None:
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.sums: list[Tensor] = []
        self.captured: list[bool] = []
        self.graphs = StepGraphs(self.compute, [self.weight], **{"capture": record} | options)

    def compute(self, batch: Any) -> Tensor:
        self.captured.append(is_captured())
        loss = (self.weight * batch["x"]).sum()
        after_pass(self.sums.append, batch["x"].sum())
        loss.backward()
        return loss.detach()


def test_each_replay_has_its_own_loss_gradient_and_effects() -> None:
    line, x = Line(), torch.zeros(3)
    losses, gradients = [], []
    for number in range(8):
        x.fill_(number)
        losses.append(line.graphs.run({"x": x}))
        assert line.weight.grad is not None
        gradients.append(float(line.weight.grad))
    assert line.captured == [False] * WARM_UPS + [True]
    assert [float(each) for each in losses] == [6.0 * number for number in range(8)]
    assert gradients == [3.0 * number for number in range(8)]
    assert [float(each) for each in line.sums] == gradients
    assert not is_captured()


def test_shapes_have_graphs_of_their_own_up_to_a_limit() -> None:
    line = Line()
    batches = [{"x": torch.ones(length)} for length in range(1, MOST_GRAPHS + 2)]
    for _ in range(WARM_UPS + 2):
        for length, batch in enumerate(batches, 1):
            assert float(line.graphs.run(batch)) == 2.0 * length
            assert float(cast(Tensor, line.weight.grad)) == length
    assert len(line.graphs.recorded) == MOST_GRAPHS


def test_a_batch_at_another_place_is_not_taken_for_the_captured_one() -> None:
    line = Line()
    for number in range(WARM_UPS + 3):
        assert float(line.graphs.run({"x": torch.full((2,), float(number))})) == 4.0 * number


def test_a_pass_that_cannot_be_captured_is_one_line() -> None:
    line, batch = Line(), {"x": torch.ones(2)}
    line.graphs = StepGraphs(lambda batch: batch["x"] * batch["x"].sum().item(), [line.weight], record)
    for _ in range(WARM_UPS):
        line.graphs.run(batch)
    with pytest.raises(InputError, match=r"^graphs: this step cannot be captured: .*; give --set graphs=false$"):
        line.graphs.run(batch)
    assert not is_captured()


class Simple:
    """As much of a workload as is asked for a problem."""

    def __init__(self, problem: str | None = None) -> None:
        self._problem = problem

    def find_graph_problem(self, model: nn.Module) -> str | None:
        return self._problem


def configured(*sets: str) -> RunConfig:
    return load_config(load_descriptor("moe_lm"), "smoke", ["global_batch_size=2", "hyperparameters.context=32", *sets])


@pytest.mark.parametrize(
    ("sets", "changes", "wanted"),
    [
        ((), {}, None),
        ((), {"ranks": 2}, "2 ranks exchange gradients"),
        ((), {"planned": True}, "a parallel plan"),
        (("gradient_accumulation_steps=2",), {}, "gradient_accumulation_steps is above 1"),
        (("compile=true",), {}, "compile is true"),
        ((), {"workload": Simple("it reads")}, "it reads"),
    ],
)
def test_a_run_that_cannot_have_graphs_says_why(
    sets: tuple[str, ...], changes: dict[str, Any], wanted: str | None
) -> None:
    given = {"ranks": 1, "workload": Simple(), "model": nn.Identity(), "planned": False} | changes
    found = find_graph_problem(configured(*sets), **given)
    assert found is None if wanted is None else found is not None and found.startswith(wanted)


def asked(*sets: str, problem: str | None = None, **changes: Any) -> tuple[RunConfig, Chooser]:
    config = configured("graphs=auto", "precision=bfloat16", "hyperparameters.moe.backend=grouped_mm", *sets)
    chooser = Chooser(World.create(None), CPU, **{"measure": True, "store": ChoiceCache(None)} | changes)
    make = load_workload(load_descriptor("moe_lm"))
    return choose_graphs(chooser, config, make, problem, capture=lambda: record), chooser


def test_graphs_left_open_are_measured_and_nothing_else_changes() -> None:
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    config, chooser = asked()
    choice = chooser.choices["graphs"]
    assert (choice.source, choice.problems) == ("measured", {})
    assert config.graphs is (choice.seconds[GRAPH] <= 0.9 * choice.seconds[EAGER])
    assert list(chooser.choices) == ["graphs"]
    assert torch.equal(torch.get_rng_state(), state)


def test_where_they_cannot_be_the_choice_is_a_rule_also_if_they_were_pinned() -> None:
    config, chooser = asked(problem="2 ranks exchange")
    assert (config.graphs, chooser.choices["graphs"].note) == (False, "not measured: 2 ranks exchange")
    config, chooser = asked(problem="2 ranks exchange", pinned={"graphs": GRAPH})
    assert (config.graphs, chooser.choices["graphs"].note) == (False, "pinned graph is not possible here")


def test_an_earlier_choice_is_kept_and_a_pinned_one_followed() -> None:
    for source in ("earlier", "pinned"):
        config, chooser = asked(**{source: {"graphs": GRAPH}})
        assert config.graphs is True
        assert not chooser.choices["graphs"].seconds


def test_a_pass_that_fails_in_the_measurement_loses() -> None:
    config, chooser = asked("hyperparameters.moe.backend=loop")
    choice = chooser.choices["graphs"]
    assert (config.graphs, choice.value) == (False, EAGER)
    assert "cannot be captured" in choice.problems[GRAPH]


def test_on_a_processor_nothing_is_asked() -> None:
    chooser = Chooser(World.create(None), CPU, measure=True, store=ChoiceCache(None))
    for graphs, wanted in (("auto", False), ("false", False)):
        config = configured(f"graphs={graphs}")
        assert choose_graphs(chooser, config, cast("Callable[[RunConfig], Workload]", None), None).graphs is wanted
    assert chooser.choices == {}
