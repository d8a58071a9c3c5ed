"""`parallel_worker.py RANKS`: a few steps in the harness's way, experts replicated and spread, against one rank."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from suite.config import load_config
from suite.distributed import Alone, TorchTransport, World
from suite.timing import HostClock, PhaseTimer
from suite.train import wrap
from tests.workloads.moe.exact_worker import fork_ranks
from workloads.swinv2_moe import DESCRIPTOR
from workloads.swinv2_moe.workload import SwinV2MoEWorkload

STEPS, BATCH = 4, 8
EXACT = (
    "balance=none",
    "gate_noise=0",
    "dispatch=dropless",
    "capacity_factor=null",
)  # what no split of a batch changes
FORMS = (  # each is one way to run the same mathematics
    (),
    ("expert_parallel=true",),
    ("expert_parallel=true", "parallel_r=0"),
    ("expert_parallel=true", "overlap_degree=2", "all_to_all=2dh", "ranks_per_node=1"),
    ("expert_parallel=true", "autotune=true"),
)


def train(world: World, overrides: tuple[str, ...]) -> tuple[list[float], dict[str, float], dict]:
    config = load_config(DESCRIPTOR, "smoke", [f"hyperparameters.moe.{item}" for item in (*EXACT, *overrides)])
    workload = SwinV2MoEWorkload(config)
    torch.manual_seed(0)
    model = workload.build_model(world)
    for name, module in model.named_modules():
        if name.endswith("_norm"):
            nn.init.ones_(module.weight)  # not the identity that blocks begin as
    optimizer = workload.build_optimizer(model, STEPS).optimizer
    wrapped = wrap(model, workload.sharded_parameters(model), world, torch.device("cpu"), PhaseTimer(HostClock()))
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (STEPS + 1, BATCH, 32, 32), generator=random).byte()
    labels = torch.randint(0, 10, (STEPS + 1, BATCH), generator=random).byte()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = slice(world.rank, None, world.size)
        loss = workload.loss(wrapped, {"image": images[step, mine], "label": labels[step, mine]})
        loss.backward()
        optimizer.step()
        losses.append(world.sum({"loss": loss.item()})["loss"] / world.size)
    model.eval()
    mine = slice(None) if world.size == 1 else slice(3, None) if world.rank else slice(3)  # unequal evaluation batches
    with torch.no_grad():
        stats = workload.eval_stats(model, {"image": images[STEPS, mine], "label": labels[STEPS, mine]})
    model.train()
    totals = world.sum({name: float(value) for name, value in stats.items()})
    return losses, workload.metrics(totals), workload.window_stats(world)


def run_rank(rank: int, ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    alone = World("none", 0, 1, 0, 1, 0, 1, ("here",), Alone(), Alone())
    losses, metrics, _ = train(alone, ())
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    world = World("test", rank, ranks, 0, 1, rank, ranks, ("here",), TorchTransport(), Alone())
    for form in FORMS:
        found, found_metrics, stats = train(world, form)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=1e-4)
        assert abs(found_metrics["cross_entropy"] - metrics["cross_entropy"]) < 1e-3, form
        (load,) = stats["load"].values()
        assert sum(load["tokens_per_expert"]) == STEPS * BATCH * 16
        assert stats["phases"]["experts"] > 0
        assert ("autotuned" in stats) == ("autotune=true" in form)
        if rank == 0:
            print(f"same losses: {' '.join(form) or 'data parallel'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        return fork_ranks(ranks, lambda rank: run_rank(rank, ranks, Path(folder) / "store"))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
