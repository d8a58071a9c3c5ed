"""Training steps of a workload under a plan on random samples that stay in memory, timed on all ranks. No main."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs
from torch import Tensor, nn

from mlhpc.plugins.axes.apply import compute_shapes
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.parallel.apply import apply
from mlhpc.suite.training.parallel.ddp import adapt_optimizer, wrap
from mlhpc.suite.training.parallel.meta_init import build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.workload import Optimization, Workload, load_workload
from mlhpc.suite.world import World


@dataclass(frozen=True)
class Took:
    """Seconds per step by the wall clock on the slowest rank, CPU seconds per step of the busiest rank and of all, mean loss."""

    wall_s: float
    cpu_s: float
    all_cpu_s: float
    loss: float


class Training:
    """A model under a plan; ``overrides`` name the plan and the mesh, ``beside`` what its exchanges do not wait for."""

    def __init__(
        self, workload: str, size: str, overrides: Sequence[str], world: World, beside: tuple[str, ...] = ()
    ) -> None:
        chosen = load_descriptor(workload)
        config = load_config(chosen, size, overrides)
        shared = Parallel.of(config, chosen, world.rank, world.size)
        assert shared.plan is not None
        self.shared = replace(shared, plan=structs.replace(shared.plan, beside=beside))
        self.workload: Workload = load_workload(chosen)(config)
        torch.manual_seed(1)
        model = self.workload.build_model(world)
        apply(self.shared, model, self.workload, lambda: build_on_meta(chosen, config)[1])
        self.optimization: Optimization = self.workload.build_optimizer(model, 100)
        adapt_optimizer(self.optimization.optimizer, model)
        self.model: nn.Module = wrap(model, (), world, torch.device("cpu"))
        self.batch = self._batch(config.global_batch_size)
        self.world = world

    def _batch(self, batch_size: int) -> dict[str, Tensor]:
        """Random samples of this rank; those of all ranks do not depend on the plan."""
        mesh, generator = self.shared.mesh, torch.Generator().manual_seed(5)
        batch: dict[str, Tensor] = {}
        slabs = self.shared.slabs(evaluation=False)
        for name, (shape, dtype) in compute_shapes(self.shared, batch_size, split=False).items():
            if dtype == "float32":
                whole = torch.rand(shape, generator=generator)
            else:
                whole = torch.randint(0, 3 if dtype == "uint8" else 9, shape, generator=generator)
            mine = whole[mesh.data_rank :: mesh.data_size]
            mine = mine[(slice(None), *(slice(*each) for each in slabs.get(name, ())))]
            batch[name] = mine.to(getattr(torch, dtype)).contiguous()
        return batch

    def steps(self, count: int) -> Took:
        """Train. All ranks call it."""
        self.world.barrier()
        began, cpu, loss = time.perf_counter(), time.process_time(), torch.zeros(())
        for _ in range(count):
            self.optimization.optimizer.zero_grad()
            loss = self.workload.loss(self.model, self.batch) * self.shared.loss_factor
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimization.optimizer.step()
        took = (time.perf_counter() - began) / count, (time.process_time() - cpu) / count, float(loss.detach())
        walls, cpus, losses = zip(*self.world.allgather(took), strict=True)
        return Took(max(walls), max(cpus), sum(cpus), sum(losses) / len(losses))
