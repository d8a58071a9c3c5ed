"""Losses, gradients and metrics of training under a plan against the unsplit run, in float64, and what each rank communicated.

    python benchmarks/plans.py WORKLOAD --plan NAME --ranks N --mesh MESH [--mesh MESH ...] [--size smoke] [--set KEY=VALUE]
        [--data ROOT] [--reference one|same] [--eps EPS] [--ulp]

The unsplit run is one rank's, or with --reference same a data-parallel one of as many ranks (batch statistics, random numbers and
experts' capacities are each rank's own). The data are those under --data, or random ones of the shapes that the plan states.

--eps replaces the optimizer's eps in both runs: AdamW divides by roots of second moments, so where a gradient is zero but for
rounding, the order of a sum over ranks decides the step. --ulp begins the run under the plan with every weight one unit in the last
place away, up or down at random: with --ranks 1 --mesh data=1 it says how far rounding alone takes an unsplit run.

For each mesh: the largest relative difference of the loss over the steps, of any gradient of the first step (over the largest
value of that gradient, or 1e-6 of the largest of all), of any weight at the end (over its largest value, or 1e-6), and of the
metric after them. Both runs see the same data. Exit code 1 if loss or metric are above --limit, or if what was communicated is not
what the plan says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn

from mlhpc.plugins.axes.apply import compute_shapes
from mlhpc.plugins.axes.pipeline import Pipeline
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.training.instrument import CollectiveCounter, count_collectives
from mlhpc.suite.training.loop import run_evaluation
from mlhpc.suite.training.parallel.apply import apply
from mlhpc.suite.training.parallel.clipping import Clipping
from mlhpc.suite.training.parallel.ddp import adapt_optimizer, wrap
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.layout import slices, stages_of
from mlhpc.suite.training.parallel.mesh import Mesh
from mlhpc.suite.training.parallel.meta_init import build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel, cut
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.workload import Dataset, ExpertSpread, Workload, load_workload
from mlhpc.suite.world import World

LIMIT = 1e-12
# A weight below it has not moved by a thousandth of a step: its gradient is rounding alone, and so is its difference
LEAST_WEIGHT = 1e-6
# Part of the largest gradient: a smaller one counts over it, since it may be rounding alone. DeepCAM's global branch adds a number
# per channel and sample, which the next batch norm takes off again if a rank has one sample: gradients of 4e-19 beside 2e-2
LEAST_GRADIENT = 1e-6
EXCHANGES = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter", "send")


class RandomData:
    """Samples of the shapes that a plan states: the same on every rank."""

    def __init__(self, parallel: Parallel, samples: int) -> None:
        self.batch: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(5)
        for name, (shape, dtype) in compute_shapes(parallel, samples, split=False).items():
            if dtype == "float32":
                self.batch[name] = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3
            else:
                self.batch[name] = torch.randint(0, 3 if dtype == "uint8" else 9, shape, generator=generator).to(
                    getattr(torch, dtype)
                )

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def load(self, indices: Any, *, seed: int, epoch: int) -> Any:
        """Samples as they are."""
        return {name: values[torch.as_tensor(indices)] for name, values in self.batch.items()}


class WideData:
    """Samples of a data set with floating-point values in float64."""

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def load(self, indices: Any, *, seed: int, epoch: int) -> Any:
        """Samples in float64."""
        batch = self._data.load(indices, seed=seed, epoch=epoch)
        return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


@torch.no_grad()
def whole(model: nn.Module, tensors: Sequence[Tensor], workload: Workload, world: World) -> dict[str, Tensor]:
    """Tensors of parameters as a whole, by the parameters' names. Every rank calls."""
    places, names = workload.share_places(model), {id(each): name for name, each in model.named_parameters()}
    split = {id(part): slice_ for _, part, slice_ in slices(model)}
    found: dict[str, Tensor] = {}
    for parameter, tensor in zip(model.parameters(), tensors, strict=True):
        if id(parameter) in split:
            tensor = split[id(parameter)].whole(local(tensor))
        if names[id(parameter)] in places:
            tensor = of_shares(tensor, places[names[id(parameter)]][0], world)
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[names[id(parameter)]] = tensor.detach().clone()
    if stages_of(model) is None:
        return found
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, found)
    return {name: tensor for each in every for name, tensor in each.items()}


def of_shares(mine: Tensor, first: Sequence[int], world: World) -> Tensor:
    """A tensor of which ranks hold shares, as a vector; copies of a share are equal."""
    every: list[Any] = [(first, mine.reshape(-1))] * world.size
    if world.size > 1:
        dist.all_gather_object(every, every[0])
    found: dict[Sequence[int], Tensor] = {}
    for begin, share in every:
        assert torch.equal(found.setdefault(begin, share), share)
    return torch.cat([found[begin] for begin in sorted(found)])


def train(
    chosen: Descriptor, config: RunConfig, parallel: Parallel, world: World, args: argparse.Namespace
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, float], dict[str, float]]:
    """Losses of the steps, gradients of the first, weights and metrics at the end, and a step's collectives."""
    steps, root = args.steps, args.data
    config = parallel.with_microbatches(config)
    parts, pipelined = config.gradient_accumulation_steps, parallel.mesh.pipeline > 1
    workload: Workload = load_workload(chosen)(config)
    torch.manual_seed(1)
    workload.spread = ExpertSpread(parallel.mesh.expert, world.size, parallel.mesh.tensor)
    if world.size == 1 and dist.is_initialized():  # beside other ranks: an expert's load is summed with no other
        workload.spread = ExpertSpread(size=1, replicas=dist.group.WORLD)
    model = workload.build_model(world).to(torch.float64)
    torch.manual_seed(7 + parallel.mesh.data_rank)
    if args.ulp and parallel.name:
        shift(model)
    apply(parallel, model, workload, lambda: build_on_meta(chosen, config)[1])
    optimization = workload.build_optimizer(model, steps)
    adapt_optimizer(optimization.optimizer, model)
    if args.eps is not None:
        for group in optimization.optimizer.param_groups:
            group["eps"] = args.eps
    experts = workload.sharded_parameters(model)
    ledger = CollectiveCounter()
    pipeline = Pipeline(workload, model, parts, torch.device("cpu"), add=ledger.add) if pipelined else None
    wrapped = model if pipelined else wrap(model, experts, world, torch.device("cpu"))
    batch_size = config.global_batch_size
    samples = {name: _samples(workload, parallel, name, root, batch_size) for name in ("train", "validation")}
    data = cut(samples["train"], parallel.slabs(evaluation=False))
    mesh, losses = parallel.mesh, []
    first: dict[str, Tensor] = {}
    for step in range(steps):
        mine = list(range(step % 2 * batch_size, (step % 2 + 1) * batch_size))[mesh.data_rank :: mesh.data_size]
        wrapped.train()
        optimization.optimizer.zero_grad()
        ledger.take()
        with count_collectives(ledger):
            pieces, loss = [mine[part::parts] for part in range(parts)], 0.0
            if pipeline is not None:
                loss = float(pipeline.step(data.load([each for piece in pieces for each in piece], seed=0, epoch=1))[0])
            for piece in () if pipelined else pieces:  # several pieces are of one rank alone, which sends nothing
                part_loss = workload.loss(wrapped, data.load(piece, seed=0, epoch=1)) * parallel.loss_factor / parts
                part_loss.backward()  # type: ignore[no-untyped-call]
                loss += float(part_loss.detach())
        losses.append(world.sum({"loss": loss})["loss"] / world.size)
        if step == 0:
            first = whole(
                model, [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()], workload, world
            )
        for group in optimization.optimizer.param_groups:
            group["lr"] = optimization.learning_rate(step, 1)
        with count_collectives(ledger):
            if optimization.clip_norm is not None:
                copies = workload.share_copy(model)[1]
                Clipping(model, experts, optimization.clip_norm, copies=copies)()
            optimization.optimizer.step()
        counted = ledger.take()
    workload.before_evaluation(model, world.split(mesh.part) if pipelined else world)
    held_out = cut(samples["validation"], parallel.slabs(evaluation=True))
    metrics = run_evaluation(
        workload,
        model,
        held_out,
        config,
        world,
        torch.device("cpu"),
        shared=parallel,
        evaluate=None if pipeline is None else pipeline.evaluate,
    )
    return losses, first, whole(model, list(model.parameters()), workload, world), metrics, counted


def in_parts(config: RunConfig, parallel: Parallel) -> RunConfig:
    """The configuration of one rank that computes the microbatches of a pipeline, of all its groups, one after another."""
    if parallel.mesh.pipeline == 1:
        return config
    parts = parallel.with_microbatches(config).gradient_accumulation_steps * parallel.mesh.data_size
    return structs.replace(config, gradient_accumulation_steps=parts)


@torch.no_grad()
def shift(model: nn.Module) -> None:
    """Move every weight to a neighbouring number, up or down at random; every rank the same way."""
    draw = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=draw) < 0.5
        ends = torch.where(up, torch.full_like(parameter, torch.inf), torch.full_like(parameter, -torch.inf))
        parameter.copy_(torch.where(parameter == 0, parameter, torch.nextafter(parameter, ends)))


def _samples(workload: Workload, parallel: Parallel, split: str, root: Path | None, batch_size: int) -> Dataset:
    return RandomData(parallel, batch_size * 2) if root is None else WideData(workload.dataset(split, root))


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], least: float = 1e-30) -> float:
    """The largest difference of two sets of tensors, each over the largest value of the expected one, or ``least``."""
    assert found.keys() == expected.keys()
    return max(
        float((a.view_as(b) - b).abs().max() / b.abs().max().clamp_min(least))
        for a, b in ((found[name], expected[name]) for name in expected)
    )


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of numbers."""
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True))


def predict_exchanges(args: argparse.Namespace, world: World) -> dict[str, dict[str, float]]:
    """What a plan says of each mesh. Before the ranks are connected, since a prediction has ranks of its own."""
    from mlhpc.plugins.axes.predict import predict

    chosen, found = load_descriptor(args.workload), {}
    for mesh in args.mesh:
        given = load_config(chosen, args.size, [*args.overrides, f"plan={args.plan}", f"mesh={mesh}"])
        found[mesh] = predict(chosen, given, Parallel.of(given, chosen, world.rank, world.size)).exchanged()
    return found


def compare(
    args: argparse.Namespace, world: World, predicted: Mapping[str, Mapping[str, float]]
) -> Iterator[Mapping[str, Any]]:
    """One row per mesh, on rank 0; the others help."""
    chosen = load_descriptor(args.workload)
    expected, in_one = None, 0  # of how many parts a step was
    for mesh in args.mesh:
        given = load_config(chosen, args.size, [*args.overrides, f"plan={args.plan}", f"mesh={mesh}"])
        parallel = Parallel.of(given, chosen, world.rank, world.size)
        if args.reference == "same":
            if expected is None:
                unsplit = Parallel(Mesh(world.rank, world.size), parallel.plan, extents=parallel.extents)
                expected = train(chosen, given, unsplit, world, args)
        elif world.is_first and (expected is None or in_one != in_parts(given, parallel).gradient_accumulation_steps):
            in_one = in_parts(given, parallel).gradient_accumulation_steps
            alone = World("none", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
            unsplit = Parallel(Mesh(0, 1), parallel.plan, extents=parallel.extents)
            expected = train(chosen, in_parts(given, parallel), unsplit, alone, args)
        world.barrier()
        losses, gradients, weights, metrics, counted = train(chosen, given, parallel, world, args)
        planned = predicted[mesh]
        known = {name: value for name, value in counted.items() if name.rpartition("_")[0] in EXCHANGES}
        agrees = world.allgather(known == planned)
        # what tokens of the other ranks choose returns to them: what ranks give in all-to-alls is as planned in the mean alone
        sent = "all_to_all_bytes"
        apart_from = [{name: n for name, n in each.items() if name != sent} for each in (known, planned)]
        mean = world.sum({sent: known.get(sent, 0.0)})[sent] == planned.get(sent, 0.0) * world.size
        in_mean = world.allgather(apart_from[0] == apart_from[1] and mean)
        if world.is_first:
            assert expected is not None
            largest = max(float(each.abs().max()) for each in expected[1].values())
            yield {
                "mesh": parallel.mesh.text(),
                "loss": relative(losses, expected[0]),
                "gradient": apart(gradients, expected[1], LEAST_GRADIENT * largest),
                "weight": apart(weights, expected[2], LEAST_WEIGHT),
                "metric": relative(list(metrics.values()), list(expected[3].values())),
                "planned_is_counted": all(agrees) or (parallel.mesh.expert > 1 and all(in_mean)),
                "on_every_rank": all(agrees),
                "counted": known,
                "planned": planned,
            }


def worker(args: argparse.Namespace) -> int:
    """Compare on one rank. Exit code 1 if a difference is too large."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]  # the models' own casts
    world = World.create()
    predicted = predict_exchanges(args, world)
    world.init_torch(torch.device("cpu"))
    good = True
    for row in compare(args, world, predicted):
        good = good and row["planned_is_counted"] and max(row["loss"], row["metric"]) <= args.limit
        print(json.dumps(row), flush=True)
    return 0 if world.broadcast(good) else 1


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--size", default="smoke")
    parser.add_argument("--plan", default="spatial")
    parser.add_argument("--mesh", action="append", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--eps", type=float, help="the optimizer's eps; default: the workload's")
    parser.add_argument(
        "--ulp", action="store_true", help="begin the run under the plan one unit in the last place away"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path, help="a data set; default: random samples")
    parser.add_argument("--reference", choices=("one", "same"), default="one", help="ranks of the unsplit run")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        try:
            return worker(args)
        except Exception:  # the other ranks wait for this one
            traceback.print_exc()
            os._exit(1)
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    command = [mpiexec, "-n", str(args.ranks), sys.executable, __file__, *sys.argv[1:], "--worker"]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
