"""One rank that trains a model whose states are four times what it may allocate. Run by test_limited.py, not by hand.

    mpiexec -n RANKS python limited.py whole|sharded

Prints the limit, the states and the losses as JSON. The limit is RLIMIT_DATA (private writable memory). It is set after torch, gloo
and their threads have what they need, to that and the bytes of one copy of the parameters: a quarter of parameters, gradients and
Adam's moments together.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.fsdp import shard_states
from mlhpc.suite.training.parallel.meta_init import build_deferred
from mlhpc.suite.world import World

WIDTH, LAYERS, STEPS = 1024, 24, 3


class Net(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + torch.tanh(layer(x))
        return x


def data_bytes() -> int:
    """Private writable memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def train(world: World, width: int, *, sharded: bool) -> list[float]:
    import torch.distributed as dist

    def build() -> nn.Module:
        torch.manual_seed(1)
        return Net(width)

    model, recipe = build_deferred(build) if sharded else (build(), None)
    if sharded:
        assert recipe is not None
        axis = Axis("shard", world.rank, world.size, dist.group.WORLD)
        device_mesh = DeviceMesh("cpu", list(range(world.size)))
        shard_states(model, list(dict(model.named_parameters())), ["*"], (axis, None), device_mesh=device_mesh)
        torch.manual_seed(1)
        recipe.fill(model, torch.device("cpu"))
    wrapped = wrap(model, (), world, torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    losses = []
    for step in range(STEPS):
        x = torch.sin(torch.arange(4 * width, dtype=torch.float32).view(4, width) * (step + 1) + world.rank)
        loss = (wrapped(x) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(world.sum({"loss": float(loss.detach())})["loss"] / world.size)
    return losses


def main(kind: str) -> None:
    torch.set_num_threads(1)
    world = World.create()
    world.init_torch(torch.device("cpu"))
    train(world, 32, sharded=kind == "sharded")  # torch and gloo begin their threads and take their buffers
    parameters = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    allowed = data_bytes() + (parameters if kind != "free" else 16 * parameters)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    try:
        losses = train(world, WIDTH, sharded=kind == "sharded")
    except (MemoryError, RuntimeError) as error:
        print(json.dumps({"refused": str(error).splitlines()[0]}), flush=True)
        os._exit(3)
    if world.is_first:
        print(json.dumps({"limit": parameters, "states": 4 * parameters, "losses": losses}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
