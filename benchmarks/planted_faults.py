"""Which planted faults keep a workload from its target, and how many healthy runs reach it: a table of fault x size.

    python -m benchmarks.planted_faults cosmoflow --size smoke --healthy 25 --seeds 5 -o faults.jsonl    trains and tables
    python -m benchmarks.planted_faults cosmoflow --table faults.jsonl                                   the table alone
    python -m benchmarks.planted_faults cosmoflow --table faults.jsonl --target 0.3                      of another target
    python -m benchmarks.planted_faults --join benchmarks/results/*-planted_faults_*.txt                 one of all sizes

A target's job is that a broken training misses it. Each row is one fault of FAULTS, planted into the harness's own trainer: its
data, model, loss or optimizer. Run i has the run seed --first + i. Its data have that seed too, or, with --sets N, the seed
--first + i % N. They are generated under --data where they are missing. A run ends in the epoch that meets the target, or after
the size's max_epochs; --whole trains all epochs, to choose a target from the curves. A finished run is a line of the -o file and
is not repeated, so an interrupted call goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import structs
from torch import Tensor, nn

from benchmarks.block import open_workload, train_epochs, trainer
from mlhpc.suite.card import Target
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.workload import Workload
from mlhpc.suite.world import World
from mlhpc.workloads.moe.router import Router

HEALTHY = "none"
RATE = 10  # by which the learning rate is too high or too low

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Anatomy:
    """What the faults have to know of a workload: names in its batches, and the prefixes of two layers of its model.

    ``head`` is the last layer, ``layer`` the one that is not updated. ``classes`` are two classes that a fault swaps;
    None if labels are measured numbers. ``known`` says which labels are known. ``lost`` is an input, or one channel of
    it, that a fault replaces by zeros. ``width`` is the dimension in which inputs and labels can be mirrored, ``chain``
    the one along which labels follow each other. ``columns`` is the wrong order of a sample's labels. A text has
    no ``inputs`` and no ``labels``: its labels are its next bytes.
    """

    inputs: Sequence[str]
    labels: Sequence[str]
    head: str
    layer: str
    classes: tuple[int, int] | None = None
    known: Sequence[str] = ()
    lost: tuple[str, int | None] | None = None
    width: int | None = None
    chain: int | None = None
    columns: Sequence[int] | None = None


ANATOMIES = {
    "cosmoflow": Anatomy(
        inputs=["x"], labels=["y"], head="output", layer="hidden.0", lost=("x", 3), columns=(1, 0, 2, 3)
    ),
    "deepcam": Anatomy(
        inputs=["x"],
        labels=["y"],
        head="decoder.to_full.1",
        layer="encoder.middle.0",
        classes=(1, 2),
        lost=("x", 0),
        width=2,
    ),
    "moe_lm": Anatomy(inputs=[], labels=[], head="head", layer="blocks.0.attention"),
    "open_catalyst": Anatomy(
        inputs=["position", "shift"],
        labels=["force"],
        head="outputs.1.lin",
        layer="interactions.0.lin_kj",
        lost=("number", None),
    ),
    "openfold": Anatomy(
        inputs=["residue_index", "cluster_profile", "cluster_deletions"],
        labels=["atoms"],
        known=["atom_mask"],
        head="structure_module.bb_update",
        layer="evoformer.blocks.0.outer_product_mean",
        lost=("extra_msa", None),
        chain=1,
    ),
    "swinv2_moe": Anatomy(inputs=["image"], labels=["label"], head="head", layer="stages.0.0", classes=(0, 1)),
}


class Shown:
    """A split as a fault shows it: ``change(batch, indices, load)`` gets a batch, its samples and the loader of others."""

    def __init__(self, data: Any, change: Callable[[Batch, Any, Callable[[Any], Batch]], Batch]) -> None:
        self._data, self._change = data, change

    def __len__(self) -> int:
        return len(self._data)

    def load(self, indices: Any, *, seed: int, epoch: int) -> Batch:
        """As the data set's, then changed."""

        def load(others: Any) -> Batch:
            return self._data.load(others, seed=seed, epoch=epoch)

        return self._change(load(indices), np.asarray(indices), load)


class Fault:
    """A training without a fault. Each fault overrides what it breaks; ``applies`` is False for a model without that part."""

    name = HEALTHY

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy

    def applies(self, model: nn.Module) -> bool:
        """Whether the model has what the fault breaks."""
        return True

    def train(self, data: Any) -> Any:
        """The training split."""
        return data

    def validation(self, data: Any) -> Any:
        """The validation split."""
        return data

    def model(self, model: nn.Module) -> None:
        """Break the model before the optimizer is built."""

    def rate(self) -> float:
        """The factor of the learning rate."""
        return 1.0

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Break the optimizer."""

    def loss(self, workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch."""
        return workload.loss(model, batch)


class Shuffled(Fault):
    """Each training sample has the labels of another one, the same one in every epoch. A text has those of its batch."""

    name = "labels of other samples"

    def train(self, data: Any) -> Any:
        other = np.random.default_rng(0).permutation(len(data))

        def change(batch: Batch, indices: Any, load: Callable[[Any], Batch]) -> Batch:
            wrong = load(other[indices])
            names = [*self.anatomy.labels, *self.anatomy.known]
            return batch | {name: fit(wrong[name], len(batch[name])) for name in names}

        return Shown(data, change) if self.anatomy.labels else data

    def loss(self, workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
        return workload.loss(model if self.anatomy.labels else Moved(model, 0), batch)


class OffByOne(Fault):
    """The model learns to predict the byte after the next one, or the residue before its own."""

    name = "labels one place late"

    def applies(self, model: nn.Module) -> bool:
        return not self.anatomy.labels or self.anatomy.chain is not None

    def train(self, data: Any) -> Any:
        def change(batch: Batch, *_: Any) -> Batch:
            assert self.anatomy.chain is not None
            names = [*self.anatomy.labels, *self.anatomy.known]
            return batch | {name: batch[name].roll(1, dims=self.anatomy.chain) for name in names}

        return Shown(data, change) if self.anatomy.labels else data

    def loss(self, workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
        return workload.loss(model if self.anatomy.labels else Moved(model, 1), batch)


class LinearHead(Fault):
    """Only the last layer learns."""

    name = "features frozen under a linear head"

    def model(self, model: nn.Module) -> None:
        freeze(model, lambda name: not name.startswith(self.anatomy.head + "."))


class FrozenLayer(Fault):
    """One layer keeps its first values."""

    name = "one layer without update"

    def model(self, model: nn.Module) -> None:
        freeze(model, lambda name: name.startswith(self.anatomy.layer + "."))


class OneRank(Fault):
    """The gradients of the second half of each batch are missing in the sum, which is divided by two all the same."""

    name = "gradients of one of two ranks missing"

    def train(self, data: Any) -> Any:
        return Shown(data, lambda batch, indices, load: load(indices[: len(indices) // 2]))

    def loss(self, workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
        return workload.loss(model, batch) / 2


class NeverCleared(Fault):
    """Each step adds its gradients to those of all earlier steps."""

    name = "gradients never cleared"

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


class NoState(Fault):
    """The optimizer forgets its momentum after each step."""

    name = "momentum lost after each step"

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: optimizer.state.clear())


class HighRate(Fault):
    """The learning rate is ten times too high."""

    name = "learning rate x 10"

    def rate(self) -> float:
        return RATE


class LowRate(Fault):
    """The learning rate is ten times too low."""

    name = "learning rate / 10"

    def rate(self) -> float:
        return 1 / RATE


class HalfTheData(Fault):
    """The loader reads the first half of the samples twice."""

    name = "half of the data, read twice"

    def train(self, data: Any) -> Any:
        return Shown(data, lambda batch, indices, load: load(indices % (len(data) // 2)))


class WrongUnits(Fault):
    """The training labels are in a unit half as large as those of the evaluation."""

    name = "training labels x 2"

    def applies(self, model: nn.Module) -> bool:
        return bool(self.anatomy.labels) and self.anatomy.classes is None

    def train(self, data: Any) -> Any:
        return Shown(data, lambda batch, *_: batch | {name: batch[name] * 2 for name in self.anatomy.labels})


class WrongClasses(Fault):
    """Two classes have each other's training labels."""

    name = "two classes swapped in training"

    def applies(self, model: nn.Module) -> bool:
        return self.anatomy.classes is not None

    def train(self, data: Any) -> Any:
        assert self.anatomy.classes is not None
        first, second = self.anatomy.classes
        order = torch.arange(256, dtype=torch.uint8)
        order[first], order[second] = second, first
        return Shown(data, lambda batch, *_: batch | {name: order[batch[name].long()] for name in self.anatomy.labels})


class WrongColumns(Fault):
    """Two labels of each training sample have each other's place."""

    name = "two labels of a sample swapped in training"

    def applies(self, model: nn.Module) -> bool:
        return self.anatomy.columns is not None

    def train(self, data: Any) -> Any:
        assert self.anatomy.columns is not None
        order = list(self.anatomy.columns)
        return Shown(data, lambda batch, *_: batch | {name: batch[name][:, order] for name in self.anatomy.labels})


class Mirrored(Fault):
    """The training's augmentation mirrors the inputs and forgets the labels."""

    name = "inputs mirrored, labels not"

    def applies(self, model: nn.Module) -> bool:
        return self.anatomy.width is not None

    def train(self, data: Any) -> Any:
        def change(batch: Batch, *_: Any) -> Batch:
            assert self.anatomy.width is not None
            return batch | {name: batch[name].flip(self.anatomy.width) for name in self.anatomy.inputs}

        return Shown(data, change)


class WrongNormalisation(Fault):
    """The inputs of the evaluation are in another unit than those of the training. Pixels of a byte end at 255."""

    name = "evaluation's inputs x 2"

    def applies(self, model: nn.Module) -> bool:
        return bool(self.anatomy.inputs)

    def validation(self, data: Any) -> Any:
        def double(values: Tensor) -> Tensor:
            return (values.int() * 2).clamp(max=255).byte() if values.dtype == torch.uint8 else values * 2

        return Shown(data, lambda batch, *_: batch | {name: double(batch[name]) for name in self.anatomy.inputs})


class LostInput(Fault):
    """One input, or one channel of it, is zero in training and evaluation."""

    name = "one input lost"

    def applies(self, model: nn.Module) -> bool:
        return self.anatomy.lost is not None

    def train(self, data: Any) -> Any:
        assert self.anatomy.lost is not None
        name, channel = self.anatomy.lost

        def change(batch: Batch, *_: Any) -> Batch:
            values = batch[name].clone()
            values[..., slice(None) if channel is None else channel] = 0
            return batch | {name: values}

        return Shown(data, change)

    def validation(self, data: Any) -> Any:
        return self.train(data)


class DropoutKept(Fault):
    """Dropout of a half before the last layer, also while the model is evaluated."""

    name = "dropout 0.5 also in evaluation"

    def model(self, model: nn.Module) -> None:
        head = model.get_submodule(self.anatomy.head)
        head.register_forward_pre_hook(lambda module, given: (F.dropout(given[0], 0.5, training=True), *given[1:]))


class StaleStatistics(Fault):
    """Batch normalisation never updates its running statistics, which the evaluation uses."""

    name = "stale batch statistics"

    def applies(self, model: nn.Module) -> bool:
        return bool(normalisations(model))

    def model(self, model: nn.Module) -> None:
        for module in normalisations(model):
            module.momentum = 0.0


class SameExperts(Fault):
    """Each router sends all tokens to the first experts."""

    name = "all tokens to the same experts"

    def applies(self, model: nn.Module) -> bool:
        return any(isinstance(module, Router) for module in model.modules())

    def model(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Router):
                first = torch.arange(module.config.top_k)
                module._select = lambda scores, first=first: first.expand(len(scores), -1)  # type: ignore[method-assign, misc]


FAULTS = (
    *(Shuffled, OffByOne, LinearHead, FrozenLayer, OneRank, NeverCleared, NoState, HighRate, LowRate, HalfTheData),
    *(WrongUnits, WrongClasses, WrongColumns, Mirrored, WrongNormalisation, LostInput, DropoutKept, StaleStatistics),
    SameExperts,
)


class Moved(nn.Module):
    """A model whose input (samples, positions) is moved by one along a dimension, so that its labels are wrong."""

    def __init__(self, model: nn.Module, dimension: int) -> None:
        super().__init__()
        self.model, self.dimension = model, dimension

    def forward(self, given: Tensor) -> Any:
        """The model's outputs for another sample (dimension 0) or for the byte before (1)."""
        return self.model(given.roll(1, dims=self.dimension))


def fit(values: Tensor, length: int) -> Tensor:
    """Cut the values, or repeat them, to a length. Samples differ in atoms."""
    return values[torch.arange(length) % len(values)]


def normalisations(model: nn.Module) -> list[Any]:
    """The modules that keep running statistics of batches."""
    return [module for module in model.modules() if getattr(module, "running_mean", None) is not None]


def freeze(model: nn.Module, chosen: Callable[[str], bool]) -> None:
    """Keep the parameters with a chosen name as they are."""
    frozen = [parameter for name, parameter in model.named_parameters() if chosen(name)]
    assert frozen, "the anatomy names no parameter of the model"
    for parameter in frozen:
        parameter.requires_grad_(False)


class Broken:
    """A workload with a fault in it; all else is the workload's."""

    def __init__(self, workload: Workload, fault: Fault) -> None:
        self._workload, self._fault = workload, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def build_model(self, world: World) -> nn.Module:
        """The workload's model, broken."""
        model = self._workload.build_model(world)
        self._fault.model(model)
        return model

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Any:
        """The workload's optimizer, broken, with its rate."""
        made = self._workload.build_optimizer(model, steps_per_epoch)
        self._fault.optimizer(made.optimizer)
        rate, factor = made.learning_rate, self._fault.rate()
        return replace(made, learning_rate=lambda step, epoch: rate(step, epoch) * factor)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The workload's loss, broken."""
        return self._fault.loss(self._workload, model, batch)


def train(
    arguments: argparse.Namespace, fault: type[Fault], data: Path, seed: int, stop: Target | None
) -> list[float] | None:
    """The metric after each epoch; it ends with the epoch that meets ``stop``. None: the model lacks what the fault breaks."""
    world, name = World.create(None), arguments.workload
    workload, config = open_workload(name, arguments.size, ["choices.measure=false", *arguments.overrides], world)
    planted = fault(ANATOMIES[name])
    if not planted.applies(workload.build_model(world)):
        return None
    splits = [workload.dataset(split, data) for split in ("train", "validation")]
    shown = planted.train(splits[0]), planted.validation(splits[1])
    loop = trainer(Broken(workload, planted), config, world, EventLog(None), *shown, seed=seed)  # type: ignore[arg-type]
    values: list[float] = []
    for value in train_epochs(loop, config.max_epochs):
        values.append(value)
        if not np.isfinite(value) or (stop is not None and stop.reached(value)):
            break
    return values


def generate(name: str, size: str, seed: int, folder: Path) -> Path:
    """The data of a seed, made where they are missing."""
    root = folder / f"{name}-{size}-seed{seed}"
    load_descriptor(name).load_generator().generate(root, size, seed=seed, world=World.create(None))
    return root


def group_by_fault(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """The metric after each epoch of each run, by fault."""
    rows: dict[str, list[list[float]]] = {}
    for line in lines:
        rows.setdefault(line["fault"], []).append(line["values"])
    return rows


def find_epochs(runs: Iterable[Sequence[float]], target: Target) -> list[int]:
    """The epochs in which the runs that reach the target reach it."""
    met = [next((i for i, value in enumerate(run, 1) if target.reached(value)), None) for run in runs]
    return [epoch for epoch in met if epoch is not None]


def render_table(lines: Iterable[Mapping[str, Any]], target: Target) -> str:
    """A row per fault: its runs, those that reach the target and in which epochs, the range of each run's best value."""
    text = ["| fault | n | reach the target | in epochs | best values |", "| --- | --- | --- | --- | --- |"]
    best = min if target.direction == "min" else max
    for fault, runs in group_by_fault(lines).items():
        epochs = find_epochs(runs, target)
        when = f"{min(epochs)} to {max(epochs)}" if epochs else "-"
        values = [best(value for value in run if np.isfinite(value)) for run in runs if np.isfinite(run[0])]
        reach = f"{min(values):.3f} to {max(values):.3f}" if values else "not finite"
        text.append(f"| {fault} | {len(runs)} | {len(epochs)} | {when} | {reach} |")
    return "\n".join(text)


def join_tables(texts: Iterable[str]) -> str:
    """A row per fault, a column per result file: how many of n runs reach the target. A file's first line names its size.

    The counts are those of each file's table, because its curves are rounded. A dash: the size has no row of that fault.
    """
    counts: dict[str, dict[str, tuple[int, int]]] = {}  # by size and fault: runs that reach the target, runs
    for text in texts:
        title = re.match(r"Planted faults in (.+?):", text)
        assert title, f"expected 'Planted faults in WORKLOAD SIZE:', not {text[:60]!r}"
        rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
        counts[title[1]] = {fault: (int(reached), int(runs)) for fault, runs, reached in rows}

    def row(name: str, cells: Iterable[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    def count(missed: Callable[[int, int], bool]) -> list[str]:
        faults = [[of[name] for name in of if name != HEALTHY] for of in counts.values()]
        return [f"{sum(missed(*each) for each in of)} of {len(of)}" for of in faults]

    table = [row("runs that reach the target, of n", counts), row("---", ["---"] * len(counts))]
    for name in [HEALTHY, *(fault.name for fault in FAULTS)]:
        cells = [of.get(name) for of in counts.values()]
        table.append(row(name, ["-" if cell is None else f"{cell[0]} of {cell[1]}" for cell in cells]))
    table.append(row("faults that miss it in most runs", count(lambda reached, runs: 2 * reached < runs)))
    table.append(row("faults that miss it in every run", count(lambda reached, runs: reached == 0)))
    return "\n".join(table)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", choices=sorted(ANATOMIES))
    parser.add_argument("--size", default="smoke")
    parser.add_argument("--healthy", type=int, default=25, help="healthy runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each fault")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sets", type=int, help="data sets; default: one for each run")
    parser.add_argument("--fault", action="append", help="words of a fault's name; default: all")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--whole", action="store_true", help="train all epochs")
    parser.add_argument("--target", type=float, help="another target than the card's")
    parser.add_argument("--table", type=Path, help="train nothing: the table of this file")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="train nothing: one table of result files")
    parser.add_argument("-o", "--output", type=Path, default=Path("planted_faults.jsonl"))
    arguments = parser.parse_args(words)
    if arguments.join:
        print(join_tables(path.read_text() for path in arguments.join))
        return 0
    if arguments.workload is None:
        parser.error("expected a workload, or --join")
    path = arguments.table or arguments.output
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if arguments.table is None:
        done += list(train_all(arguments, {(line["size"], line["fault"], line["seed"]) for line in done}))
    target = read_target(arguments)
    chosen = [line for line in done if line["size"] == arguments.size]
    print(
        f"{arguments.workload} {arguments.size}, {target.metric_name} {target.threshold:g}, {datetime.now(UTC):%Y-%m-%d}\n"
    )
    print(render_table(chosen, target))
    return 0


def read_target(arguments: argparse.Namespace) -> Target:
    """The card's target, or one with the threshold that is asked for."""
    target = load_descriptor(arguments.workload).card().target(arguments.size)
    return target if arguments.target is None else structs.replace(target, threshold=arguments.target)


def train_all(arguments: argparse.Namespace, known: set[tuple[str, str, int]]) -> Iterable[dict[str, Any]]:
    """Train what is not known, write each run as a line, and yield it. The healthy runs come first."""
    words = arguments.fault or [""]
    faults = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    plan = [(Fault, i) for i in range(arguments.healthy)]
    plan += [(fault, i) for i in range(arguments.seeds) for fault in faults]
    stop = None if arguments.whole else read_target(arguments)
    for fault, number in plan:
        seed = arguments.first + number
        if (arguments.size, fault.name, seed) in known:
            continue
        of_data = seed if arguments.sets is None else arguments.first + number % arguments.sets
        root = generate(arguments.workload, arguments.size, of_data, arguments.data)
        values = train(arguments, fault, root, seed, stop)
        if values is None:
            continue
        line = {"size": arguments.size, "fault": fault.name, "data_seed": of_data, "seed": seed, "values": values}
        with arguments.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{fault.name}, seed {seed}: {', '.join(f'{value:.3f}' for value in values)}", file=sys.stderr, flush=True
        )
        yield line


if __name__ == "__main__":
    sys.exit(main())
