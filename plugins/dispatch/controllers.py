"""Controllers of other projects, on ranks of their own: Ray and Monarch. Their ranks all-reduce by torch's gloo.

Each is an entry point of the group `mlhpc.dispatch`: a function of the number of ranks, of programs, and of a folder
for the ranks to meet in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from mlhpc.plugins.dispatch.loops import Mode, TorchLink, compute


class Rank:
    """One rank, as an actor."""

    def __init__(self, folder: str, rank: int, size: int, programs: int) -> None:
        import torch
        import torch.distributed as dist

        from mlhpc.suite.world import use_interface_towards

        torch.set_num_threads(1)
        use_interface_towards("127.0.0.1")
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size)
        self._link = TorchLink(rank, size, programs)

    def run(self, program: int, count: int, length_s: float) -> float:
        """Run a command; return its seconds."""
        return compute(self._link, program, count, length_s)


class Remote:
    """A controller of another project. ``call`` commands all ranks, ``fetch`` waits for their seconds."""

    def __init__(
        self, version: str, call: Callable[..., Any], fetch: Callable[[Any], list[float]], end: Callable[[], object]
    ) -> None:
        self.version, self._call, self._fetch, self._end = version, call, fetch, end

    def submit(self, mode: Mode, number: int, count: int, length_s: float) -> Any:
        """Command all ranks; each runs its commands in this order."""
        return self._call(mode.choose_program(number, 0), count, length_s)

    def wait(self, command: Any) -> float:
        """Wait until all ranks have run a command."""
        return max(self._fetch(command))

    def stop(self) -> None:
        """End the ranks."""
        self._end()


def start_ray(ranks: int, programs: int, folder: str) -> Remote:
    """Start Ray on this machine: one actor for each rank; this process is the controller."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would send them
    import ray

    # The actors find the package where this process has it
    ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    actors: list[Any] = [ray.remote(Rank).remote(folder, rank, ranks, programs) for rank in range(ranks)]

    def call(*command: float) -> list[Any]:
        return [actor.run.remote(*command) for actor in actors]

    return Remote(f"ray {ray.__version__}", call, ray.get, ray.shutdown)


def start_monarch(ranks: int, programs: int, folder: str) -> Remote:
    """Start Monarch on this machine: a mesh of one actor for each rank; this process is the controller."""
    from importlib.metadata import version

    from monarch.actor import Actor, current_rank, endpoint, this_host

    class MonarchRank(Actor):  # type: ignore[misc]  # its package is an extra
        def __init__(self) -> None:
            self.rank = Rank(folder, current_rank().rank, ranks, programs)

        @endpoint  # type: ignore[untyped-decorator]
        def run(self, program: int, count: int, length_s: float) -> float:
            return self.rank.run(program, count, length_s)

    processes = this_host().spawn_procs(per_host={"ranks": ranks})
    mesh = processes.spawn("ranks", MonarchRank)
    return Remote(
        f"torchmonarch {version('torchmonarch')}",
        mesh.run.call,
        lambda future: list(future.get().values()),
        lambda: processes.stop().get(),
    )
