"""`parallel_worker.py RANKS`: a few steps in the harness's way, experts replicated and spread, against one rank."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from suite.config import load_config
from suite.distributed import Alone, TorchTransport, World
from suite.timing import HostClock, PhaseTimer
from suite.train import wrap
from tests.workloads.moe.exact_worker import fork_ranks
from workloads.moe_lm import DESCRIPTOR
from workloads.moe_lm.workload import MoELM

STEPS, BATCH = 4, 8
FORMS = (  # each is one way to run the same mathematics
    (),
    ("expert_parallel=true",),
    ("expert_parallel=true", "parallel_r=0"),
    ("expert_parallel=true", "overlap_degree=2", "all_to_all=2dh", "ranks_per_node=1"),
    ("expert_parallel=true", "autotune=true"),
)


def train(world: World, overrides: tuple[str, ...]) -> tuple[list[float], float, dict]:
    settings = ["balance=none", "z_coefficient=0", *overrides]
    config = load_config(DESCRIPTOR, "smoke", [f"hyperparameters.moe.{item}" for item in settings])
    workload = MoELM(config)
    torch.manual_seed(0)
    model = workload.build_model(world)
    optimization = workload.build_optimizer(model, STEPS)
    device = torch.device("cpu")
    wrapped = wrap(model, workload.sharded_parameters(model), world, device, PhaseTimer(HostClock()))
    text = torch.randint(0, 256, (STEPS + 1, BATCH, 65), generator=torch.Generator().manual_seed(1)).byte()
    losses = []
    for step in range(STEPS):
        optimization.optimizer.zero_grad()
        loss = workload.loss(wrapped, {"bytes": text[step, world.rank :: world.size]})
        loss.backward()
        optimization.optimizer.step()
        losses.append(world.sum({"loss": loss.item()})["loss"] / world.size)
    model.eval()
    totals = {"nats": 0.0, "bytes": 0.0}
    mine = text[STEPS, 3:] if world.rank else text[STEPS, :3]  # unequal evaluation batches
    if world.size == 1:
        mine = text[STEPS]
    with torch.no_grad():
        for name, value in workload.eval_stats(model, {"bytes": mine}).items():
            totals[name] += float(value)
    model.train()
    return losses, workload.metrics(world.sum(totals))["eval_error"], workload.window_stats(world)


def run_rank(rank: int, ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    alone = World("none", 0, 1, 0, 1, 0, 1, ("here",), Alone(), Alone())
    expected = train(alone, ())
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    world = World("test", rank, ranks, 0, 1, rank, ranks, ("here",), TorchTransport(), Alone())
    for form in FORMS:
        losses, metric, stats = train(world, form)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-4, atol=1e-4)
        assert abs(metric - expected[1]) < 1e-3, (form, metric, expected[1])
        (load,) = stats["load"].values()
        assert sum(load["tokens_per_expert"]) == STEPS * BATCH * 64 * 2
        assert stats["phases"]["experts"] > 0
        assert 0 < stats["efficiency"]["useful_tflops"] == stats["efficiency"]["executed_tflops"]
        moves_tokens = bool(form) and "parallel_r=0" not in form
        if "autotune=true" not in form:  # which may choose r = 0, where no token moves
            assert (
                (stats["phases"]["a2a_dispatch"] > 0) == (stats["phases"]["a2a_combine_backward"] > 0) == moves_tokens
            )
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
