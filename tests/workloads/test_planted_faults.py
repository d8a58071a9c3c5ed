"""Planted faults: each one breaks what its name says and nothing else."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import planted_faults
from benchmarks.planted_faults import ANATOMIES, FAULTS, Anatomy, Broken, Fault, join_tables, render_table
from mlhpc.suite.card import Target
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.workload import Optimization
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.router import Router

ANATOMY = Anatomy(inputs=["x"], labels=["y"], head="2", layer="0")


class Numbers:
    """Eight samples: x is the number of the sample, y ten times that."""

    def __len__(self) -> int:
        return 8

    def load(self, indices: Any, *, seed: int, epoch: int) -> dict[str, torch.Tensor]:
        x = torch.as_tensor(np.asarray(indices), dtype=torch.float32)[:, None]
        return {"x": x, "y": 10 * x}


class Line:
    """A workload: a network of three layers, a mean squared error, SGD."""

    def build_model(self, world: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        return Optimization(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lambda step, epoch: 0.1 * epoch)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()


def broken(fault: type[Fault]) -> tuple[Broken, nn.Module]:
    workload = Broken(Line(), fault(ANATOMY))  # type: ignore[arg-type]
    return workload, workload.build_model(None)  # type: ignore[arg-type]


def load(data: Any, *indices: int) -> dict[str, list[float]]:
    return {name: values[:, 0].tolist() for name, values in data.load(list(indices), seed=0, epoch=1).items()}


def test_faults_of_the_data_change_what_they_name_and_no_more() -> None:
    healthy = load(Numbers(), *range(8))
    shuffled = load(planted_faults.Shuffled(ANATOMY).train(Numbers()), *range(8))
    assert shuffled["x"] == healthy["x"]
    assert shuffled["y"] != healthy["y"]
    assert sorted(shuffled["y"]) == healthy["y"]
    assert load(planted_faults.HalfTheData(ANATOMY).train(Numbers()), 1, 5, 7) == {"x": [1, 1, 3], "y": [10, 10, 30]}
    assert load(planted_faults.WrongUnits(ANATOMY).train(Numbers()), 1, 3) == {"x": [1, 3], "y": [20, 60]}
    assert load(planted_faults.WrongNormalisation(ANATOMY).validation(Numbers()), 1, 3) == {"x": [2, 6], "y": [10, 30]}
    for fault in (planted_faults.Shuffled, planted_faults.HalfTheData, planted_faults.WrongUnits):
        assert load(fault(ANATOMY).validation(Numbers()), *range(8)) == healthy


def test_classes_are_swapped_where_labels_are_classes() -> None:
    class Classes(Numbers):
        def load(self, indices: Any, *, seed: int, epoch: int) -> dict[str, torch.Tensor]:
            return {"y": torch.as_tensor(np.asarray(indices) % 3, dtype=torch.uint8)[:, None]}

    anatomy = Anatomy(inputs=[], labels=["y"], head="2", layer="0", classes=(1, 2))
    swapped = planted_faults.WrongClasses(anatomy).train(Classes()).load(range(6), seed=0, epoch=1)["y"]
    assert swapped.dtype == torch.uint8
    assert swapped[:, 0].tolist() == [0, 2, 1, 0, 2, 1]
    model = nn.Linear(1, 1)
    for fault, of_numbers in ((planted_faults.WrongUnits, True), (planted_faults.WrongClasses, False)):
        assert fault(ANATOMY).applies(model) == of_numbers
        assert fault(anatomy).applies(model) != of_numbers


def test_a_text_without_labels_gets_those_of_another_sample_or_of_a_later_byte() -> None:
    text = Anatomy(inputs=[], labels=[], head="2", layer="0")
    seen = []

    class Reader(Line):
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return model(batch["bytes"][:, :-1]).sum()  # type: ignore[no-any-return]

    def model(given: torch.Tensor) -> torch.Tensor:
        seen.append(given.tolist())
        return given.float()

    batch = {"bytes": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])}
    network = nn.Module()
    network.forward = model  # type: ignore[method-assign]
    for fault in (planted_faults.Shuffled, planted_faults.OffByOne):
        Broken(Reader(), fault(text)).loss(network, batch)  # type: ignore[arg-type]
    assert seen == [[[5, 6, 7], [1, 2, 3]], [[3, 1, 2], [7, 5, 6]]]
    assert planted_faults.Shuffled(text).train(batch) is batch
    for fault in (planted_faults.WrongUnits, planted_faults.WrongClasses, planted_faults.WrongNormalisation):
        assert not fault(text).applies(network)
    assert not planted_faults.OffByOne(ANATOMY).applies(network)


def test_pixels_of_a_byte_are_doubled_without_a_wrap() -> None:
    class Pixels(Numbers):
        def load(self, indices: Any, *, seed: int, epoch: int) -> dict[str, torch.Tensor]:
            return {"x": torch.tensor([100, 200], dtype=torch.uint8)}

    doubled = planted_faults.WrongNormalisation(ANATOMY).validation(Pixels()).load([0, 1], seed=0, epoch=1)["x"]
    assert doubled.tolist() == [200, 255]
    assert planted_faults.fit(torch.arange(3), 5).tolist() == [0, 1, 2, 0, 1]
    assert planted_faults.fit(torch.arange(5), 3).tolist() == [0, 1, 2]


def test_a_lost_input_is_zero_in_training_and_evaluation() -> None:
    whole = planted_faults.LostInput(replace(ANATOMY, lost=("x", None)))
    assert load(whole.train(Numbers()), 1, 2) == {"x": [0, 0], "y": [10, 20]}
    assert load(whole.validation(Numbers()), 1, 2) == {"x": [0, 0], "y": [10, 20]}

    class Channels(Numbers):
        def load(self, indices: Any, *, seed: int, epoch: int) -> dict[str, torch.Tensor]:
            return {"x": torch.ones(2, 3)}

    channel = planted_faults.LostInput(replace(ANATOMY, lost=("x", 1)))
    assert channel.train(Channels()).load([0, 1], seed=0, epoch=1)["x"].tolist() == [[1, 0, 1]] * 2
    assert not planted_faults.LostInput(ANATOMY).applies(nn.Linear(1, 1))


def test_inputs_are_mirrored_and_labels_are_not() -> None:
    class Images(Numbers):
        def load(self, indices: Any, *, seed: int, epoch: int) -> dict[str, torch.Tensor]:
            return {"x": torch.tensor([[[1, 2, 3]]]), "y": torch.tensor([[[1, 2, 3]]])}

    mirrored = planted_faults.Mirrored(replace(ANATOMY, width=2)).train(Images()).load([0], seed=0, epoch=1)
    assert {name: values.tolist() for name, values in mirrored.items()} == {"x": [[[3, 2, 1]]], "y": [[[1, 2, 3]]]}
    assert not planted_faults.Mirrored(ANATOMY).applies(nn.Linear(1, 1))


def test_labels_move_along_a_chain_or_swap_their_columns() -> None:
    class Chains(Numbers):
        def load(self, indices: Any, *, seed: int, epoch: int) -> dict[str, torch.Tensor]:
            return {"x": torch.tensor([[1, 2, 3]]), "y": torch.tensor([[1, 2, 3]]), "known": torch.tensor([[1, 1, 0]])}

    chain = replace(ANATOMY, known=["known"], chain=1)
    late = planted_faults.OffByOne(chain).train(Chains()).load([0], seed=0, epoch=1)
    assert {name: values[0].tolist() for name, values in late.items()} == {
        "x": [1, 2, 3],
        "y": [3, 1, 2],
        "known": [0, 1, 1],
    }
    swapped = planted_faults.WrongColumns(replace(ANATOMY, columns=(2, 1, 0))).train(Chains())
    assert swapped.load([0], seed=0, epoch=1)["y"].tolist() == [[3, 2, 1]]
    assert not planted_faults.WrongColumns(ANATOMY).applies(nn.Linear(1, 1))


def test_all_tokens_go_to_the_same_experts() -> None:
    router = Router(4, MoEConfig(experts=4, top_k=2, hidden=8))
    model = nn.Sequential(router)
    assert planted_faults.SameExperts(ANATOMY).applies(model)
    assert not planted_faults.SameExperts(ANATOMY).applies(nn.Linear(1, 1))
    planted_faults.SameExperts(ANATOMY).model(model)
    assert router(torch.randn(3, 4)).experts_TK.tolist() == [[0, 1]] * 3


def test_frozen_layers_have_no_gradient() -> None:
    for fault, learning in ((planted_faults.LinearHead, {"2"}), (planted_faults.FrozenLayer, {"1", "2"})):
        _, model = broken(fault)
        assert {name.split(".")[0] for name, value in model.named_parameters() if value.requires_grad} == learning


def gradients(fault: type[Fault], batch: dict[str, torch.Tensor], steps: int = 1) -> list[torch.Tensor]:
    workload, model = broken(fault)
    optimizer = workload.build_optimizer(model, 1).optimizer
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return [value.grad.clone() for value in model.parameters() if value.grad is not None]


def test_faults_of_the_gradients_do_what_they_name() -> None:
    batch = Numbers().load(range(8), seed=0, epoch=1)
    half = planted_faults.OneRank(ANATOMY).train(Numbers()).load(range(8), seed=0, epoch=1)
    assert half["x"][:, 0].tolist() == [0, 1, 2, 3]
    for missing, of_half in zip(gradients(planted_faults.OneRank, half), gradients(Fault, half), strict=True):
        torch.testing.assert_close(missing, of_half / 2)
    for added, single in zip(gradients(planted_faults.NeverCleared, batch, 3), gradients(Fault, batch), strict=True):
        torch.testing.assert_close(added, 3 * single)


def test_faults_of_the_optimizer_do_what_they_name() -> None:
    for fault, rate in ((Fault, 0.2), (planted_faults.HighRate, 2.0), (planted_faults.LowRate, 0.02)):
        workload, model = broken(fault)
        assert workload.build_optimizer(model, 1).learning_rate(0, 2) == pytest.approx(rate)
    workload, model = broken(planted_faults.NoState)
    optimizer = workload.build_optimizer(model, 1).optimizer
    workload.loss(model, Numbers().load(range(8), seed=0, epoch=1)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert not optimizer.state


def test_dropout_stays_on_and_statistics_stay_stale_in_evaluation() -> None:
    batch = Numbers().load(range(8), seed=0, epoch=1)
    _, model = broken(planted_faults.DropoutKept)
    model.eval()
    assert not torch.equal(model(batch["x"]), model(batch["x"]))
    _, model = broken(planted_faults.StaleStatistics)
    model(batch["x"])
    assert torch.equal(model[1].running_mean, torch.zeros(3))  # type: ignore[index]
    assert not planted_faults.StaleStatistics(ANATOMY).applies(nn.Linear(1, 1))


def test_the_table_counts_the_runs_that_reach_the_target_in_time() -> None:
    target = Target("eval_error", 0.3, "min", 5, "val MAE", "test")
    runs = [("none", [0.4, 0.3]), ("none", [0.29]), ("rate", [0.5, 0.4]), ("wild", [float("nan")])]
    text = render_table([{"fault": fault, "values": values} for fault, values in runs], target)
    assert "| none | 2 | 2 | 1 to 2 | 0.290 to 0.300 |" in text
    assert "| rate | 1 | 0 | - | 0.400 to 0.400 |" in text
    assert "| wild | 1 | 0 | - | not finite |" in text


def test_result_files_join_to_a_column_each() -> None:
    head = "| fault | n | reach the target | in epochs | best values |\n| --- | --- | --- | --- | --- |\n"
    one = f"Planted faults in A smoke: text\n\n{head}| none | 3 | 3 | 1 to 2 | 0 |\n| learning rate x 10 | 3 | 1 | 2 | 0 |\n"
    two = f"Planted faults in B mini: text\n\n{head}| none | 2 | 1 | 1 | 0 |\n| one input lost | 2 | 0 | - | 0 |\n"
    lines = join_tables([one, two]).splitlines()
    assert lines[0] == "| runs that reach the target, of n | A smoke | B mini |"
    assert "| none | 3 of 3 | 1 of 2 |" in lines
    assert "| learning rate x 10 | 1 of 3 | - |" in lines
    assert lines[-2:] == [
        "| faults that miss it in most runs | 1 of 1 | 1 of 1 |",
        "| faults that miss it in every run | 0 of 1 | 1 of 1 |",
    ]


def test_the_joined_table_in_the_results_is_that_of_its_tables() -> None:
    results = Path(planted_faults.__file__).parent / "results"
    joined = max(results.glob("*-planted_faults.txt"))
    tables = sorted(results.glob(f"{joined.stem}_*.txt"))
    assert join_tables(path.read_text() for path in tables) in joined.read_text()


@pytest.mark.parametrize("workload", sorted(ANATOMIES))
def test_the_anatomy_names_parts_that_exist(workload: str, world: Any) -> None:
    from mlhpc.suite.config import load_config
    from mlhpc.suite.workload import load_workload

    chosen = load_descriptor(workload)
    for size in ("smoke", "mini"):
        model = load_workload(chosen)(load_config(chosen, size, ["choices.measure=false"])).build_model(world)
        for fault in FAULTS:
            planted = fault(ANATOMIES[workload])
            if planted.applies(model):
                planted.model(model)


@pytest.mark.long
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize(
    ("workload", "size"),
    [
        *product(("cosmoflow", "deepcam", "moe_lm", "open_catalyst", "openfold"), ("smoke", "mini")),
        ("swinv2_moe", "smoke"),
    ],
)
def test_healthy_runs_reach_the_target_and_broken_ones_miss_it(tmp_path: Path, workload: str, size: str) -> None:
    """25 healthy runs on five data sets, and three of each fault: at least nine faults miss in most of their runs.

    At cosmoflow smoke five: its target is that of earlier data, which showed less (docs/cosmoflow.md).
    """
    kept, target = tmp_path / "faults.jsonl", load_descriptor(workload).card().target(size)
    options = ["--healthy", "25", "--seeds", "3", "--sets", "5", "--first", "70000"]
    planted_faults.main([workload, "--size", size, *options, "--data", str(tmp_path), "-o", str(kept)])
    runs = planted_faults.group_by_fault(json.loads(line) for line in kept.read_text().splitlines())
    assert len(planted_faults.find_epochs(runs.pop(Fault.name), target)) == 25
    missed = sum(2 * len(planted_faults.find_epochs(each, target)) < len(each) for each in runs.values())
    assert missed >= (5 if (workload, size) == ("cosmoflow", "smoke") else 9)
