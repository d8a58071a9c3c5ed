"""Which broken trainings the course of a run shows, and how many healthy runs it accuses: logs of runs, and their table.

    python -m benchmarks.courses train cosmoflow -o LOGS --healthy 25 --sets 5     25 healthy runs
    mlhpc workload rcp record LOGS/cosmoflow-smoke/none -o FOLDER                  FOLDER/rcp/smoke_course.json goes beside the card
    python -m benchmarks.courses train cosmoflow -o LOGS --first 90000 --faults 3  broken runs
    python -m benchmarks.courses train cosmoflow -o LOGS --first 95000 --healthy 6 healthy runs that the course does not know
    python -m benchmarks.courses table LOGS                                        all but the 25, judged by the course

Runs train all epochs, so later epochs are not those of slow runs alone. Run i has the run seed --first + i, and the data of the
seed --first + i % --sets. A finished log is not made again. The faults are those of benchmarks/planted_faults.py and NEW here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.block import open_workload, train_epochs, trainer
from benchmarks.planted_faults import ANATOMIES, FAULTS, Batch, Broken, Fault, Shown, generate
from mlhpc.suite.card import Target, read_reference_courses
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import find_first_on_target, summarise_log
from mlhpc.suite.log.reference_course import judge_run_course
from mlhpc.suite.training import loop as loop_module
from mlhpc.suite.world import World


class CoarseWeights(Fault):
    """All weights are rounded to bfloat16 after each step."""

    name = "weights kept in bfloat16"

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        @torch.no_grad()
        def round_all(*_: Any) -> None:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.copy_(weight.bfloat16())

        optimizer.register_step_post_hook(round_all)


class NeverShuffled(Fault):
    """Each epoch takes the samples in their own order."""

    name = "order never shuffled"


class LostSteps(Fault):
    """Every second step of the optimizer does nothing."""

    name = "every second step lost"

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        step, calls = optimizer.step, iter(range(10**9))
        optimizer.step = lambda *a, **k: None if next(calls) % 2 else step(*a, **k)  # type: ignore[method-assign, assignment]


class HighDecay(Fault):
    """The decay of the weights is a hundred times too high."""

    name = "weight decay x 100"

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 100 * group.get("weight_decay", 0.0)


class Leak(Fault):
    """The validation samples are trained on."""

    name = "trained on the validation samples"


class Leaked:
    """The validation samples as ``length`` training samples."""

    def __init__(self, data: Any, length: int) -> None:
        self._data, self._length = data, length

    def __len__(self) -> int:
        return self._length

    def load(self, indices: Any, *, seed: int, epoch: int) -> Batch:
        """As the data set's, in the place of training samples."""
        batch: Batch = self._data.load(indices % len(self._data), seed=seed, epoch=epoch)
        return batch


class PartEvaluated(Fault):
    """The evaluation sees its first tenth, ten times."""

    name = "evaluation on a tenth"

    def validation(self, data: Any) -> Any:
        def change(batch: Batch, indices: Any, load: Callable[[Any], Batch]) -> Batch:
            return load(indices % max(1, len(data) // 10))

        return Shown(data, change)


NEW = (CoarseWeights, NeverShuffled, LostSteps, HighDecay, Leak, PartEvaluated)


def train(name: str, size: str, fault: type[Fault], data: Path, seed: int, path: Path) -> bool:
    """Train all epochs and write the log; False if the model or the data lack what the fault breaks."""
    world = World.create(None)
    workload, config = open_workload(name, size, ["choices.measure=false"], world)
    planted = fault(ANATOMIES[name])
    if not planted.applies(workload.build_model(world)):
        return False
    splits = [workload.dataset(split, data) for split in ("train", "validation")]
    shown = planted.train(splits[0]), planted.validation(splits[1])
    if fault is Leak:
        shown = Leaked(splits[1], len(splits[0])), shown[1]
    card = load_descriptor(name).card()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    log, manifest = EventLog(part), read_manifest(data)
    for key, value in {
        mllog.SUBMISSION_BENCHMARK: card.mlperf_name,
        mllog.BENCHMARK_SIZE: size,
        mllog.SEED: seed,
        mllog.GLOBAL_BATCH_SIZE: config.global_batch_size,
        mllog.DATA_MANIFEST: manifest.sha256,
        mllog.RUN_CONFIG: config.logged(),
        **workload.hyperparameters(),
        **workload.data_hyperparameters(manifest.attributes),
    }.items():
        log.event(key, value)
    log.start(mllog.RUN)
    loop = trainer(Broken(workload, planted), config, world, log, *shown, seed=seed)  # type: ignore[arg-type]
    loop.say = lambda text: print(f"{name} {size} {fault.name} {seed}: {text}") if text.startswith("warning") else None
    target: Target = card.target(size)
    orders = (
        mock.patch.object(loop_module, "list_train_batches", in_own_order) if fault is NeverShuffled else nullcontext()
    )
    values = []
    with orders:
        for epoch, value in enumerate(train_epochs(loop, config.max_epochs), 1):
            values.append(value)
            if target.reached(value) and len([v for v in values if target.reached(v)]) == 1:
                log.event(mllog.TARGET_ACCURACY_REACHED, value, metadata={"epoch_num": epoch})
            if not np.isfinite(value):
                break
    loop.records.log_first_losses(loop._first_losses)
    log.stop(mllog.RUN, metadata={"status": "success" if any(map(target.reached, values)) else "aborted"})
    log.close()
    part.rename(path)
    print(f"{name} {size} {fault.name} {seed}: {', '.join(f'{value:.4g}' for value in values)}", flush=True)
    return True


def in_own_order(samples: int, batch: int, *, rank: int, size: int, first_step: int = 0, **_: Any) -> Any:
    """As `list_train_batches`, without drawing."""
    for step in range(first_step, samples // batch):
        yield np.arange(step * batch, (step + 1) * batch)[rank::size]


def train_all(arguments: argparse.Namespace) -> None:
    """Train what is not there: per workload the healthy runs, then each fault once, twice, ..."""
    plan: list[tuple[type[Fault], int]] = [(Fault, i) for i in range(arguments.healthy)]
    faults = [fault for fault in (*NEW, *FAULTS) if any(word in fault.name for word in arguments.fault or [""])]
    plan += [(fault, i) for i in range(arguments.faults) for fault in faults]
    for fault, number in plan:
        for name in arguments.workloads:
            seed, of_data = arguments.first + number, arguments.first + number % arguments.sets
            folder = arguments.output / f"{name}-{arguments.size}" / fault.name.replace(" ", "_").replace("/", "by")
            path = folder / f"result_{seed}.txt"
            if not path.exists():
                root = generate(name, arguments.size, of_data, arguments.data)
                train(name, arguments.size, fault, root, seed, path)


def render_table(logs: Path) -> str:
    """A row per workload and fault: runs that are called unlike healthy ones, those that reach the target, and what shows it."""
    text = [
        "| workload | fault | n | seen | reach the target | first number named |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for folder in sorted(logs.iterdir()):
        name, _, size = folder.name.rpartition("-")
        descriptor = load_descriptor(name)
        courses, target = read_reference_courses(descriptor.folder, size), descriptor.card().target(size)
        known = {seed for course in courses for seed in course.seeds}
        for of_fault in sorted(folder.iterdir()):
            records = [summarise_log(read_events(path)) for path in sorted(of_fault.glob("result_*.txt"))]
            new = [record for record in records if record.seed not in known]
            judged = [judge_run_course(record, courses) for record in new]
            if None in judged:
                text.append(f"| {name} {size} | {of_fault.name} | {len(new)} | no reference course | | |")
                continue
            seen = [found for found in judged if found]
            reached = sum(find_first_on_target(record, target) is not None for record in new)
            first = seen[0][0].render() if seen else ""
            fault = of_fault.name.replace("_", " ")
            text.append(f"| {name} {size} | {fault} | {len(new)} | {len(seen)} | {reached} | {first} |")
    return "\n".join(text)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trains = commands.add_parser("train")
    trains.add_argument("workloads", nargs="+", choices=sorted(ANATOMIES))
    trains.add_argument("--size", default="smoke")
    trains.add_argument("--healthy", type=int, default=0, help="healthy runs")
    trains.add_argument("--faults", type=int, default=0, help="runs of each fault")
    trains.add_argument("--fault", action="append", help="words of a fault's name; default: all")
    trains.add_argument("--first", type=int, default=80000, help="the first seed")
    trains.add_argument("--sets", type=int, default=5, help="data sets")
    trains.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets")
    trains.add_argument("-o", "--output", type=Path, required=True)
    tables = commands.add_parser("table")
    tables.add_argument("logs", type=Path)
    arguments = parser.parse_args(words)
    if arguments.command == "table":
        print(render_table(arguments.logs))
    else:
        train_all(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
