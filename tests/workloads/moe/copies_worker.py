"""`copies_worker.py`: four ranks train with experts over two, in two copies, against experts on every rank and over all ranks."""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # the first optimizer imports it: here once, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.parallel.clipping import Clipping
from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.training.trial import count_parameters
from mlhpc.suite.transport import SingleProcessTransport, TorchTransport
from mlhpc.suite.workload import ExpertSpread, load_workload
from mlhpc.suite.world import World
from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.workload import MoEWorkload
from tests.workloads.moe.exact_worker import fork_ranks
from tests.workloads.moe.parallel_worker import CASES, part

RANKS, STEPS, BATCH = 4, 3, 8
SAME = 1e-12
FORMS: tuple[tuple[str, ...], ...] = (  # settings of the MoE layer with which experts on every rank are compared
    (),
    ("bias=true", "activation=swiglu", "balance=bias"),
    ("experts=1", "top_k=1"),  # two ranks share the expert
    ("parallel_r=0",),
    ("autotune=true",),
    ("dispatch=capacity", "capacity_factor=-1.0"),
)


@dataclass
class Trained:
    """What a rank has after the steps."""

    losses: list[float]
    weights: dict[str, Tensor]  # experts put together
    biases: list[Tensor]
    parameters: int
    stats: dict[str, Any]


def train(name: str, world: World, form: tuple[str, ...], ranks: int, *, all_ranks: bool = False) -> Trained:
    """Some steps with experts over ``ranks`` ranks by a plan, or as the setting ``expert_parallel`` spreads them."""
    settings = (*form, "expert_parallel=true") if all_ranks else form
    config = load_config(load_descriptor(name), "smoke", [f"hyperparameters.moe.{item}" for item in settings])
    workload = cast(MoEWorkload, load_workload(load_descriptor(name))(config))
    torch.manual_seed(0)
    if not all_ranks:
        workload.spread = ExpertSpread(ranks, world.size)
    model = workload.build_model(world)
    CASES[name].prepare(model)
    optimization = workload.build_optimizer(model, STEPS)
    for group in optimization.optimizer.param_groups:
        group["eps"] = 1e-3
    shares, (_, copies) = workload.sharded_parameters(model), workload.share_copy(model)
    wrapped = wrap(model, shares, world, torch.device("cpu"))
    random, losses = torch.Generator().manual_seed(1), []
    torch.manual_seed(world.rank)  # of the noise
    for _ in range(STEPS):
        batch = CASES[name].samples(random, BATCH)
        optimization.optimizer.zero_grad()
        loss = workload.loss(wrapped, part(batch, slice(world.rank, None, world.size)))
        loss.backward()
        Clipping(model, shares, 0.5, copies=copies)()
        optimization.optimizer.step()
        losses.append(world.sum({"loss": loss.item()})["loss"] / world.size)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    biases = [layer.router.bias_E for layer in layers]
    counted, stats = count_parameters(model, workload, world), workload.window_stats(world)
    return Trained(losses, whole(model, workload.share_places(model), world), biases, counted, stats)


@torch.no_grad()
def whole(model: nn.Module, places: Any, world: World) -> dict[str, Tensor]:
    """The parameters, experts put together; copies must be equal to the last bit."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone().reshape(-1)
        if name in places:
            shares: dict[tuple[int, ...], Tensor] = {}
            for place, values in world.allgather((places[name][0], found[name].tolist())):
                first, mine = tuple(place), torch.tensor(values, dtype=parameter.dtype)
                assert torch.equal(shares.setdefault(first, mine), mine), name
            found[name] = torch.cat([shares[first] for first in sorted(shares)])
    return found


def same(found: Trained, expected: Trained, limit: float) -> None:
    """Losses and weights are equal to ``limit``; nobody's experts count twice."""
    for a, b in zip(found.losses, expected.losses, strict=True):
        assert abs(a - b) <= limit * abs(b), (found.losses, expected.losses)
    for name, values in expected.weights.items():
        assert float((found.weights[name] - values).abs().max()) <= limit * 10, name
    for a, b in zip(found.biases, expected.biases, strict=True):
        assert torch.equal(a, b)
    assert found.parameters == expected.parameters
    loads = [next(iter(each.stats["load"].values()))["tokens_per_expert"] for each in (found, expected)]
    assert sum(loads[0]) == sum(loads[1]) > 0
    assert loads[0] == loads[1]


def run_rank(rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]  # the models' own casts
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    transport = TorchTransport(dist.group.WORLD)
    world = World("test", rank, RANKS, 0, 1, rank, RANKS, ("here",), transport, SingleProcessTransport())
    cases = [("moe_lm", form) for form in FORMS] + [("swinv2_moe", ())]
    for name, form in cases:
        everywhere = train(
            name, world, tuple(item for item in form if item not in ("autotune=true", "parallel_r=0")), 1
        )
        found = train(name, world, form, 2)
        same(found, everywhere, SAME)
        if "autotune=true" in form:
            chosen = [{key: each[key] for key in ("r", "degree", "algorithm")} for each in found.stats["autotuned"]]
            tuned = world.allgather(chosen)
            assert all(each == tuned[0] for each in tuned), "copies of the mesh decided differently"
        elif "experts=1" not in form:
            same(train(name, world, form, RANKS), train(name, world, form, 0, all_ranks=True), 0.0)
        if rank == 0:
            print(f"{name} is the same with experts over two of four ranks: {' '.join(form)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(fork_ranks(RANKS, lambda rank: run_rank(rank, Path(folder) / "store")))
