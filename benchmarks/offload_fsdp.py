"""What FSDP2's CPUOffloadPolicy costs beside `hyperparameters.moe.offload`: steps of both and of a run without, in turn.

    OMP_NUM_THREADS=1 python -m benchmarks.offload_fsdp [--rounds 40] [--batch 64] > benchmarks/results/DATE-offload_fsdp.txt

All train `moe_lm` smoke on one rank with the same samples, on a GPU if there is one. On a processor FSDP2 copies from the
host's memory to itself: what remains is the cost of gathering and of its hooks. Run it alone. Printed: n, seconds of a step, and
its ratio to a step without offload: geometric means with 95 % intervals of the pairs, losses and CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.launcher import Launch
from mlhpc.suite.machine.probes.processor import read_cpu
from mlhpc.suite.statistics.sessions import compute_log_interval
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World

FILE_CACHE = 1_000_000_000
WARM_UP = 3


class Side:
    """A model that is trained, and its optimizer."""

    def __init__(self, name: str, settings: list[str], device: torch.device) -> None:
        config = load_config(load_descriptor("moe_lm"), "smoke", ["precision=float32", "graphs=false", *settings])
        torch.manual_seed(1)
        self.name, self.device = name, device
        self.workload = load_workload(load_descriptor("moe_lm"))(config)
        self.model: nn.Module = self.workload.build_model(World.create(Launch("none", 0, 1))).to(device)
        if name == "FSDP2 CPUOffloadPolicy":
            mesh = init_device_mesh(device.type, (1,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"))
            fully_shard(self.model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"))
        self.state = TrainingState.create(self.workload, self.model, 100, 1)
        self.model.train()

    def step(self, batch: dict[str, Tensor], number: int) -> tuple[float, float, float]:
        """Seconds and CPU seconds of a step, and its loss."""
        begin = time.perf_counter(), time.process_time()
        self.state.optimization.optimizer.zero_grad(set_to_none=True)
        loss = self.workload.loss(self.model, {name: value.to(self.device) for name, value in batch.items()})
        loss.backward()
        self.state.update(number, 1)
        value = float(loss.detach())  # waits for the device
        return time.perf_counter() - begin[0], time.process_time() - begin[1], value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    offload = "hyperparameters.moe.offload"
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{place}/meet", rank=0, world_size=1
        )
        files = [f"{offload}.tier=file", f"{offload}.folder={place}/experts", f"{offload}.cache={FILE_CACHE}"]
        sides = [
            Side("without", [], device),
            Side("host", [f"{offload}.tier=host"], device),
            Side("file", files, device),
            Side("FSDP2 CPUOffloadPolicy", [], device),
        ]
        batch = sides[0].workload.example(given.batch)
        assert batch is not None
        found: dict[str, list[tuple[float, float, float]]] = {side.name: [] for side in sides}
        for number in range(WARM_UP + given.rounds):
            for place_in_turn in range(len(sides)):
                side = sides[(number + place_in_turn) % len(sides)]
                found[side.name].append(side.step(dict(batch), number))
        print(
            f"{read_cpu(Path('/')).model}, {device}, torch {torch.__version__}; moe_lm smoke, one rank, batch {given.batch}"
        )
        base = found["without"][WARM_UP:]
        for name, rows in found.items():
            steps = rows[WARM_UP:]
            ratios = [[row[part] / other[part] for row, other in zip(steps, base, strict=True)] for part in (0, 1)]
            shown = []
            for what, values in zip(("time", "CPU time"), ratios, strict=True):
                low, high = compute_log_interval(values, 0.95) or (0.0, float("inf"))
                shown.append(f"{what} / without {statistics.geometric_mean(values):.3f} [{low:.3f}, {high:.3f}]")
            median = 1e3 * statistics.median(row[0] for row in steps)
            print(f"{name:<24} {median:8.2f} ms; {'; '.join(shown)}; last loss {steps[-1][2]:.9g}, n = {len(steps)}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
