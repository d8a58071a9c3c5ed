"""`divided_worker.py quick|long`: experts over two groups, products divided in each, against one rank; checkpoints."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer imports it: here once, not in every forked rank
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.apply import build
from mlhpc.suite.training.parallel.clipping import Clipping
from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.layout import slices
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import find_plan
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.training.trial import count_parameters
from mlhpc.suite.transport import SingleProcessTransport, TorchTransport
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World
from mlhpc.workloads.moe.layer import MoELayer
from tests.workloads.moe.exact_worker import fork_ranks
from tests.workloads.moe.parallel_worker import CASES, part

RANKS, STEPS, MORE, BATCH = 4, 2, 1, 8
SAME = 1e-12
MESH = "data=1,expert=2,tensor=2"
OTHERS = ("data=2,expert=1,tensor=2", "data=1,expert=4", "data=1,shard=2,expert=2")
Form = tuple[str, tuple[str, ...]]  # workload, settings of its MoE layers
QUICK: tuple[Form, ...] = (("moe_lm", ()), ("swinv2_moe", ()))
LONG: tuple[Form, ...] = (
    *QUICK,
    ("moe_lm", ("experts=1", "top_k=1", "activation=swiglu")),  # two ranks share it, and two divide each of its parts
    ("moe_lm", ("parallel_r=0",)),
    ("moe_lm", ("autotune=true",)),
)


class Run:
    """Training of a workload on a mesh, or alone."""

    def __init__(
        self,
        name: str,
        world: World,
        form: tuple[str, ...],
        mesh: str,
        plan: str = "tensor",
        more: tuple[str, ...] = (),
    ) -> None:
        self.case, self.world, chosen = CASES[name], world, load_descriptor(name)
        settings = [f"hyperparameters.moe.{item}" for item in (*self.case.exact, "backend=loop", *form)]
        words = [f"plan={plan}", f"mesh={mesh}"] if mesh else []
        config: RunConfig = load_config(chosen, "smoke", [*settings, *words, *more])
        self.parallel = Parallel.of(config, chosen, world.rank, world.size)
        self.workload: Workload = load_workload(chosen)(config)
        self.counted = 0

        def look(model: torch.nn.Module) -> None:
            self.case.prepare(model)
            self.counted = count_parameters(model, self.workload, world, alike=self.parallel.mesh.tensor)

        model = build(self.parallel, self.workload, chosen, world, torch.device("cpu"), 0, look)
        self.state = TrainingState.create(self.workload, model, STEPS, 0)
        for group in self.state.optimization.optimizer.param_groups:
            group["eps"] = 1e-3
        self.wrapped = wrap(model, self.state.sharded, world, torch.device("cpu"))

    def train(self, steps: range) -> list[float]:
        """The losses of some steps, means over ranks."""
        return [self.step(number) for number in steps]

    def step(self, number: int) -> float:
        """One step, as the trainer makes it."""
        mesh, state = self.parallel.mesh, self.state
        batch = self.case.samples(torch.Generator().manual_seed(number), BATCH)
        state.optimization.optimizer.zero_grad()
        loss = self.workload.loss(self.wrapped, part(batch, slice(mesh.data_rank, None, mesh.data_size)))
        loss.backward()  # type: ignore[no-untyped-call]
        Clipping(state.model, state.sharded, 0.5, copies=state.copy[1])()
        state.optimization.optimizer.step()
        return self.world.sum({"loss": loss.item()})["loss"] / self.world.size

    def metric(self) -> float:
        """The metric of a batch that all groups evaluate."""
        self.state.model.eval()
        with torch.no_grad():
            stats = self.workload.eval_stats(
                self.state.model, self.case.samples(torch.Generator().manual_seed(99), BATCH)
            )
        self.state.model.train()
        return self.workload.metrics({key: float(value) for key, value in stats.items()})[self.case.metric]

    def values(self) -> int:
        """Values of experts that this rank has."""
        layers = [module for module in self.state.model.modules() if isinstance(module, MoELayer)]
        return sum(local(each).numel() for layer in layers for each in layer.experts.parameters())


def equal(found: list[float], expected: list[float]) -> None:
    """The same numbers, but for rounding."""
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= SAME * abs(b), (found, expected)


def compare(name: str, form: tuple[str, ...], world: World, folder: Path, *, thorough: bool) -> None:
    """Losses, metric, numbers of values; then from a checkpoint on every other mesh."""
    nobody = World("none", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    free = tuple(item for item in form if item not in ("autotune=true", "parallel_r=0"))
    alone = Run(name, nobody, free, "")
    losses = alone.train(range(STEPS))
    metric, rest = alone.metric(), alone.train(range(STEPS, STEPS + MORE))
    mine = Run(name, world, form, MESH)
    equal(mine.train(range(STEPS)), losses)
    equal([mine.metric()], [metric])
    assert mine.counted == alone.counted
    assert mine.values() * RANKS == alone.values(), "every value of an expert lies on one rank of the mesh"
    assert any(".experts." in key for key, _, _ in slices(mine.state.model))
    path = folder / f"trial_{name}_{len(form)}.pt"
    snapshot = Checkpoint(path, {}, mine.parallel.mesh).snapshot(world, mine.state, Position(1, STEPS))
    every = world.gather(snapshot.write(), bytes)
    if every is not None:
        snapshot.commit(every)
    world.barrier()
    for mesh in OTHERS if not form and (thorough or name == "moe_lm") else (MESH,):
        other = Run(name, world, form, mesh)
        Checkpoint(path, {}, other.parallel.mesh).load(world, other.state)
        equal(other.train(range(STEPS, STEPS + MORE)), rest)
    single = Run(name, nobody, free, "")
    Checkpoint(path, {}, single.parallel.mesh).load(nobody, single.state)
    equal(single.train(range(STEPS, STEPS + MORE)), rest)


def compute_again(world: World, folder: Path) -> None:
    """Blocks that are computed again have the same noise and dropped branches, gradients to the last bit, loads counted once."""
    shipped = find_plan(load_descriptor("swinv2_moe"), "tensor").read_text()
    form, more = ("gate_noise=1.0",), ("hyperparameters.drop_path=0.5",)
    found: list[tuple[float, list[Tensor], int]] = []
    for policy in ("", "full", "selective"):
        path = folder / f"{policy}_{world.rank}.yaml"
        path.write_text(f"{shipped}recompute: {{stages.?.?: {policy}}}\n" if policy else shipped)
        mine = Run("swinv2_moe", world, form, MESH, str(path), more)
        torch.manual_seed(3 + mine.parallel.mesh.data_rank)
        loss = mine.step(0)
        layers = [module for module in mine.state.model.modules() if isinstance(module, MoELayer)]
        gradients = [local(each.grad) for each in mine.state.model.parameters() if each.grad is not None]
        found.append((loss, gradients, int(sum(sum(layer.load.read().assigned_E) for layer in layers))))
    for loss, gradients, load in found[1:]:
        assert (loss, load) == (found[0][0], found[0][2])
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][1], strict=True))


def run_rank(rank: int, folder: Path, *, thorough: bool) -> None:
    """The forms on one of four ranks."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]  # the models' own casts
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    world = World(
        "test", rank, RANKS, 0, 1, rank, RANKS, ("here",), TorchTransport(dist.group.WORLD), SingleProcessTransport()
    )
    for name, form in LONG if thorough else QUICK:
        compare(name, form, world, folder, thorough=thorough)
        if rank == 0:
            print(f"{name} is the same with experts over two groups of two ranks: {' '.join(form)}", flush=True)
    compute_again(world, folder)
    if rank == 0:
        print("blocks that are computed again give the same bits", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        long = sys.argv[1] == "long"
        sys.exit(fork_ranks(RANKS, lambda rank: run_rank(rank, Path(folder), thorough=long)))
