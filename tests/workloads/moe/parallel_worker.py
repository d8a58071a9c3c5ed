"""`parallel_worker.py WORKLOAD,... RANKS`: a few steps in the harness's way, experts replicated and spread, against one rank."""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: here once, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.loop import wrap
from mlhpc.suite.transport import SingleProcessTransport, TorchTransport
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World
from tests.workloads.moe.exact_worker import fork_ranks

STEPS, BATCH = 4, 8
FORMS = (  # each is one way to run the same mathematics
    (),
    ("expert_parallel=true",),
    ("expert_parallel=true", "parallel_r=0"),
    ("expert_parallel=true", "overlap_degree=2", "all_to_all=2dh", "ranks_per_node=1"),
    ("expert_parallel=true", "autotune=true"),
)


@dataclass(frozen=True)
class Case:
    """A workload at size smoke: the settings of its MoE layer that no split of a batch changes, samples, what to compare."""

    exact: tuple[str, ...]
    samples: Callable[[torch.Generator, int], dict[str, Tensor]]
    metric: str
    assignments: int  # of a sample
    prepare: Callable[[nn.Module], None] = lambda model: None


def no_identities(model: nn.Module) -> None:
    """Norms after a branch begin as zero: blocks would hide what the experts do."""
    for name, module in model.named_modules():
        if name.endswith("_norm"):
            nn.init.ones_(module.weight)


CASES = {
    "moe_lm": Case(
        ("balance=none", "z_coefficient=0"),
        lambda random, n: {"bytes": torch.randint(0, 256, (n, 65), generator=random).byte()},
        "eval_error",
        64 * 2,
    ),
    "swinv2_moe": Case(
        ("balance=none", "gate_noise=0", "dispatch=dropless", "capacity_factor=null"),
        lambda random, n: {
            "image": torch.randint(0, 256, (n, 32, 32), generator=random).byte(),
            "label": torch.randint(0, 2, (n,), generator=random).byte(),
        },
        "cross_entropy",
        16,
        no_identities,
    ),
}


def train(name: str, world: World, overrides: tuple[str, ...]) -> tuple[list[float], float, dict[str, Any]]:
    """Losses of all ranks, the metric of a batch that the ranks share unequally, window statistics."""
    case = CASES[name]
    config = load_config(
        load_descriptor(name), "smoke", [f"hyperparameters.moe.{x}" for x in (*case.exact, *overrides)]
    )
    workload = load_workload(load_descriptor(name))(config)
    torch.manual_seed(0)
    model = workload.build_model(world)
    case.prepare(model)
    optimizer = workload.build_optimizer(model, STEPS).optimizer
    wrapped = wrap(model, workload.sharded_parameters(model), world, torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    batches = [case.samples(random, BATCH) for _ in range(STEPS + 1)]
    losses = []
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        loss = workload.loss(wrapped, part(batch, slice(world.rank, None, world.size)))
        loss.backward()
        optimizer.step()
        losses.append(world.sum({"loss": loss.item()})["loss"] / world.size)
    model.eval()
    mine = slice(None) if world.size == 1 else slice(3, None) if world.rank else slice(3)
    with torch.no_grad():
        stats = workload.eval_stats(model, part(batches[STEPS], mine))
    model.train()
    totals = world.sum({key: float(value) for key, value in stats.items()})
    return losses, workload.metrics(totals)[case.metric], workload.window_stats(world)


def part(batch: dict[str, Tensor], which: slice) -> dict[str, Tensor]:
    return {key: values[which] for key, values in batch.items()}


def run_rank(name: str, rank: int, ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    losses, metric, _ = train(
        name, World("none", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport()), ()
    )
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    world = World(
        "test", rank, ranks, 0, 1, rank, ranks, ("here",), TorchTransport(dist.group.WORLD), SingleProcessTransport()
    )
    for form in FORMS:
        found, found_metric, stats = train(name, world, form)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=1e-4)
        assert abs(found_metric - metric) < 1e-3, (form, found_metric, metric)
        (load,) = stats["load"].values()
        assert sum(load["tokens_per_expert"]) == STEPS * BATCH * CASES[name].assignments
        seconds = stats["phases"]
        assert seconds["experts"] > 0
        assert 0 < stats["efficiency"]["useful_tflops"] == stats["efficiency"]["executed_tflops"]
        tuned = "autotune=true" in form
        if not tuned:  # which may choose r = 0, where no token moves
            moves_tokens = bool(form) and "parallel_r=0" not in form
            assert not form or seconds["weight_gather_backward"] > 0
            assert (seconds["a2a_dispatch"] > 0) == (seconds["a2a_combine_backward"] > 0) == moves_tokens
        assert ("autotuned" in stats) == tuned
        if rank == 0:
            print(f"{name} has the same losses: {' '.join(form) or 'data parallel'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    names, ranks = sys.argv[1].split(","), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        return fork_ranks(ranks, lambda rank: [run_rank(name, rank, ranks, Path(folder) / name) for name in names])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
