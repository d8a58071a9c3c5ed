"""Every collective of `MpiGroup` beside gloo's, on the same tensors; started by `test_mpi_group` under mpiexec."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collective
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.machine.choice.mpi_group import MpiGroup, find_mpi_communicator, register_backend
from mlhpc.suite.world import World

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def main() -> None:
    torch.set_num_threads(1)
    world = World.create()
    assert find_mpi_communicator(world) is not None
    world.init_torch(torch.device("cpu"), register_backend())
    assert dist.get_backend() == "mpi4py"
    assert dist.group.WORLD is not None
    groups = {"all": range(world.size), "first two": range(2), "last": [world.size - 1], "backwards": [1, 0]}
    checked = 0
    for name, ranks in groups.items():
        ours, theirs = dist.new_group(list(ranks)), dist.new_group(list(ranks), backend="gloo")
        if world.rank not in ranks:
            continue
        assert isinstance(ours, MpiGroup)
        assert ours.rank() == theirs.rank()
        for dtype in TYPES:
            for operation in collectives(len(ranks), theirs.rank(), dtype, world.rank):
                a, b = operation(ours), operation(theirs)
                assert torch.equal(a, b), (name, dtype, a, b)
                checked += 1
    exchange(world.rank, world.size)
    refuse()
    train(world)
    world.barrier()
    Path(sys.argv[1], f"rank{world.rank}").write_text(str(checked))


def collectives(size: int, place: int, dtype: torch.dtype, seed: int) -> list[Callable[[Any], Tensor]]:
    """Calls of the group that is given, each with tensors of its own. Their numbers are whole, so sums are exact."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(0, 5, shape, generator=draw).to(dtype)

    mine, rows, last = numbers(3, 4), numbers(2 * size, 3), size - 1
    uneven = numbers(place * size, 3)

    def reduced(op: Any) -> Callable[[Any], Tensor]:
        def call(group: Any) -> Tensor:
            tensor = mine.clone()
            dist.all_reduce(tensor, op, group)
            return tensor

        return call

    def to_root(group: Any) -> Tensor:
        tensor = mine.clone()
        dist.reduce(tensor, group=group, group_dst=last)
        return tensor if place == last else mine

    def scattered_sum(group: Any) -> Tensor:
        out = rows.new_empty(2, 3)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(out, rows, group=group)
        return out

    def told(group: Any) -> Tensor:
        tensor = mine.clone()
        work = dist.broadcast(tensor, group=group, group_src=last, async_op=True)
        assert work.wait()
        return tensor

    def every(group: Any) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group)
        return torch.stack(parts)

    def every_single(group: Any) -> Tensor:
        out = mine.new_empty(size * 3, 4)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(out, mine, group=group)
        return out

    def every_in_place(group: Any) -> Tensor:
        """As FSDP2 does: what this rank gives lies in the output already."""
        out = mine.new_zeros(size * 3, 4)
        part = out.narrow(0, 3 * place, 3)
        part.copy_(mine)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(out, part, group=group)
        return out

    def at_root(group: Any) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(size)] if place == last else None
        dist.gather(mine, parts, group=group, group_dst=last)
        return torch.stack(parts or [mine])

    def scattered(group: Any) -> Tensor:
        out = mine.new_empty(2, 3)
        dist.scatter(out, list(rows.split(2)) if place == last else None, group=group, group_src=last)
        return out

    def exchanged(group: Any) -> Tensor:
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows, group=group)
        return out

    def exchanged_unevenly(group: Any) -> Tensor:
        """Rank r gives each rank r rows, so some give nothing."""
        out = uneven.new_empty(sum(range(size)), 3)
        work = dist.all_to_all_single(out, uneven, list(range(size)), [place] * size, group=group, async_op=True)
        work.wait()
        return out

    def functional(group: Any) -> Tensor:
        """As DTensors do."""
        gather = getattr(collective, "all_gather_single", None) or collective.all_gather_tensor
        scatter = getattr(collective, "reduce_scatter_single", None) or collective.reduce_scatter_tensor
        parts = (gather(mine, 0, group), collective.all_reduce(mine, "sum", group), scatter(rows, "sum", 0, group))
        return torch.cat([part.reshape(-1) for part in parts])

    def exchanged_list(group: Any) -> Tensor:
        out = [torch.empty_like(part) for part in rows.split(2)]
        if isinstance(group, MpiGroup):  # gloo has no list of tensors
            dist.all_to_all(out, list(rows.split(2)), group)
        else:
            dist.all_to_all_single(whole := torch.empty_like(rows), rows, group=group)
            out = list(whole.split(2))
        return torch.cat(out)

    kinds = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    moved = [told, every, every_single, every_in_place, at_root, scattered, exchanged, exchanged_unevenly]
    moved += [functional, exchanged_list]
    return [*map(reduced, kinds), to_root, scattered_sum, *moved]


def exchange(rank: int, size: int) -> None:
    """All send before they receive."""
    sent, got = torch.full((100_000,), float(rank)), torch.empty(100_000)
    works = [dist.isend(sent, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
    for work in works:
        work.wait()
    assert works[1].is_completed()
    assert torch.equal(got, torch.full((100_000,), float((rank - 1) % size)))
    dist.barrier()


def refuse() -> None:
    """What cannot be sent is said before anyone waits."""
    with pytest.raises(ValueError, match="expected SUM, MAX, MIN or PRODUCT"):
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.zeros(3, 2).T)


def train(world: World) -> None:
    """DDP's own exchange of gradients is that of gloo, bit for bit on two ranks."""
    found = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3)).double()
        wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(100 * step + world.rank)
            wrapped(torch.randn(8, 40, generator=draw, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    exact = world.size == 2
    torch.testing.assert_close(found[0], found[1], rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)


main()
