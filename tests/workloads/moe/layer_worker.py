"""`layer_worker.py RANKS`: what of a layer over ranks is not a number to compare: switching, phases, autotuner, evaluation."""

import os
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mlhpc.suite.documents import convert
from mlhpc.suite.errors import InputError

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mlhpc.suite.performance.cost_model import Network
from mlhpc.suite.training.step_timing import HostClock
from mlhpc.workloads.moe import phases
from mlhpc.workloads.moe.autotune import Autotuner, make_trial_timer, measure_flops, measure_network
from mlhpc.workloads.moe.config import MoEConfig, count_ranks_per_expert, list_valid_r
from mlhpc.workloads.moe.layer import Execution, MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh
from mlhpc.workloads.moe.phases import LayerTimer
from mlhpc.workloads.moe.routes import compute_known_traffic, gather_counts, gather_slices, split_buffer
from tests.fixtures.device_steps import counted_reads

EXPERTS, WIDTH = 2, 8


def make(mesh: ExpertMesh | None, **settings: object) -> MoELayer:
    torch.manual_seed(0)
    config = convert({"experts": EXPERTS, "hidden": 16, "expert_parallel": True} | settings, MoEConfig)
    return MoELayer(WIDTH, config, mesh)


def switching_moves_nothing(mesh: ExpertMesh) -> None:
    """Optimizer steps under changing r, degree and algorithm are those of one execution; storage never changes."""
    trained = []
    for switches in (False, True):
        layer = make(mesh)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        storage = [parameter.data_ptr() for parameter in layer.parameters()]
        executions = [
            Execution(r, d, a) for r in list_valid_r(EXPERTS, mesh.size) for d in (1, 2) for a in ("linear", "2dh")
        ]
        for step, execution in enumerate(executions):
            layer.use(execution if switches else Execution())
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + mesh.rank))
            optimizer.zero_grad()
            out = layer(x)
            (out.y_TD.square().sum() + out.auxiliary_loss).backward()
            dist.all_reduce(layer.router.gate.weight.grad)
            optimizer.step()
        assert storage == [parameter.data_ptr() for parameter in layer.parameters()]
        trained.append([parameter.detach().clone() for parameter in layer.parameters()])
    for fixed, switched in zip(*trained, strict=True):
        torch.testing.assert_close(fixed, switched, rtol=1e-4, atol=1e-5)


def phases_cover_the_layer(mesh: ExpertMesh) -> None:
    for algorithm in ("linear", "2dh"):
        layer = make(mesh, all_to_all=algorithm, overlap_degree=2)
        layer.marker = timer = LayerTimer(HostClock())
        x = torch.randn(32, WIDTH, requires_grad=True)
        layer(x).y_TD.sum().backward()
        seconds = timer.flush()
        assert set(seconds) == set(phases.PHASES)
        for name in (*phases.FORWARD, *phases.BACKWARD):
            assert seconds[name] > 0, name
        assert sum(timer.flush().values()) == 0.0


def load_is_counted(mesh: ExpertMesh) -> None:
    layer = make(mesh, dispatch="capacity", capacity_factor=1.0)
    layer(torch.randn(32, WIDTH))
    report = layer.load.read().report()
    assert sum(report["tokens_per_expert"]) == 64
    assert report["needed_capacity"] == report["imbalance"] >= 1.0
    assert 0.0 <= report["drop_rate"] < 1.0
    assert report["padding_waste"] == 1 - 64 * (1 - report["drop_rate"]) / (EXPERTS * 32)


def evaluation_needs_no_other_rank(mesh: ExpertMesh) -> None:
    """Ranks evaluate different numbers of batches; the result is that of one rank with all experts."""
    layer, alone = make(mesh), make(None)
    layer.eval()
    alone.eval()
    for batch in range(mesh.rank):  # rank 0 has none
        x = torch.randn(5 + batch, WIDTH)
        torch.testing.assert_close(layer(x).y_TD, alone(x).y_TD)
    layer.train()
    assert layer._all_weights is None
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(4, WIDTH))
    layer.eval()
    assert layer.weights().up_EHD.dtype == torch.bfloat16  # half the memory, and not cast for every batch


def the_autotuner_agrees_and_remembers(mesh: ExpertMesh) -> None:
    layer = make(mesh, hidden=64)
    x = torch.randn(64, WIDTH)
    network = measure_network(mesh, torch.device("cpu"))
    assert isinstance(network, Network)
    tuner = Autotuner(network, measure_flops(layer, 64), shortlist=2)
    before = layer.execution
    measure = make_trial_timer(layer, x, repeats=1)
    decision = tuner.decide(layer, 64, 64, measure)
    assert layer.execution == before
    assert layer.load.read().rows == 0.0
    assert {trial.execution.r for trial in decision.trials} == set(list_valid_r(EXPERTS, mesh.size))
    everywhere = [None] * mesh.size
    dist.all_gather_object(everywhere, decision.event())
    assert all(event == everywhere[0] for event in everywhere)

    def never(execution: Execution) -> float:
        raise AssertionError("a bucket is measured once")

    assert tuner.decide(layer, 100, 64, never) is decision
    layer.use(decision.chosen)
    priced = []
    with patch(
        "mlhpc.workloads.moe.autotune.list_executions", lambda shape, *_: priced.append(shape.element_bytes) or []
    ):
        tuner.candidates(layer, 64, 64)
        with torch.autocast("cpu", torch.bfloat16):  # then rows and weights are sent in bfloat16
            tuner.candidates(layer, 64, 64)
            assert measure_flops(layer, 8) > 0
    assert priced == [4, 2]


def shards_join_to_the_whole(mesh: ExpertMesh) -> None:
    layer, alone = make(mesh), make(None)
    own, whole = layer.experts.weights(), alone.experts.weights()
    for name in ("up_EHD", "down_EHD", "gate_EHD"):
        joined = gather_slices(getattr(own, name), mesh.world, mesh.size // layer.sharers, layer.sharers)
        assert torch.equal(joined, getattr(whole, name))


def impossible_r_is_refused(mesh: ExpertMesh) -> None:
    layer = make(mesh)
    with pytest.raises(InputError, match=r"allow 0, 1, 2"):
        layer.use(Execution(r=3))


def the_host_reads_at_most_once(mesh: ExpertMesh) -> None:
    """Once where it must know how many rows come; never where a capacity says it, in the backward pass neither."""
    even = replace(mesh, even=True)
    forms = (
        ("dropless", "loop"),
        ("dropless", "grouped_mm"),
        ("capacity", "loop"),
        ("capacity", "bmm"),
        ("einsum", "loop"),
    )
    for mode, backend in forms:
        for r, degree, algorithm in ((0, 1, "linear"), (1, 1, "linear"), (1, 2, "2dh"), (2, 2, "2dh")):
            layer = make(even, dispatch=mode, backend=backend, bias=True)
            layer.use(Execution(r, degree, algorithm))
            x = torch.randn(12, WIDTH, requires_grad=True)
            counts = []
            for _ in range(2):
                with counted_reads(x, *layer.parameters()) as reads:
                    out = layer(x)
                    (out.y_TD.square().sum() + out.auxiliary_loss).backward()
                counts.append(reads.count)
            reads_rows = r > 0 or backend != "grouped_mm"  # with r = 0 nothing is sent; only a loop over experts asks
            wanted = int(mode == "dropless" and reads_rows)
            assert counts == [wanted] * 2, (mode, backend, r, degree, algorithm, counts)


def ranks_launch_transfers_in_one_order(mesh: ExpertMesh) -> None:
    """Of all communicators together, forward and backward: else two GPUs could wait for each other."""
    real, launched = dist.all_to_all_single, []

    def told(out: torch.Tensor, given: torch.Tensor, *rest: object, **more: object) -> object:
        group = more["group"]
        launched.append("world" if group is mesh.world else "node" if group is mesh.within_node else "across")
        return real(out, given, *rest, **more)

    for algorithm in ("linear", "2dh"):
        layer = make(mesh, all_to_all=algorithm, overlap_degree=4)
        with patch.object(dist, "all_to_all_single", told):
            layer(torch.randn(8 + mesh.rank, WIDTH, requires_grad=True)).y_TD.sum().backward()
    everywhere = [None] * mesh.size
    dist.all_gather_object(everywhere, launched)
    assert len(launched) == (1 + 4 * 4) + (2 + 4 * 8)  # the counts; each chunk there and back, forward and backward
    assert all(each == launched for each in everywhere), everywhere


def a_known_traffic_is_the_exchanged_one(mesh: ExpertMesh) -> None:
    """What follows from the capacities equals what ranks would tell each other."""
    for experts, capacity in product((1, 2, 8), (0, 13)):
        sharers = count_ranks_per_expert(experts, mesh.size)
        capacity_W = torch.tensor([capacity + 3 * rank for rank in range(mesh.size)])
        for r, degree, algorithm in product(list_valid_r(experts, mesh.size)[1:], (1, 3), ("linear", "2dh")):
            mine_E = torch.full((experts,), int(capacity_W[mesh.rank]))
            _, counts_JWL = split_buffer(mine_E, mesh.size, sharers, r, degree)
            told = gather_counts(mesh, counts_JWL, algorithm)
            form = (experts, sharers, r, degree, algorithm, torch.device("cpu"))
            known = compute_known_traffic(mesh, capacity_W, *form)
            for one, other in ((told.sent, known.sent), (told.received, known.received), (told.passed, known.passed)):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one.host, other.host)


def the_communicator_is_the_experts_own(mesh: ExpertMesh) -> None:
    assert mesh.world is not dist.group.WORLD
    assert dist.get_process_group_ranks(mesh.world) == list(range(mesh.size))


def a_shorter_type_is_gathered_and_its_gradient_summed_in_the_longer(mesh: ExpertMesh) -> None:
    local = torch.randn(1, 4, WIDTH, requires_grad=True)
    whole = gather_slices(local, mesh.world, mesh.size, 1, torch.bfloat16)
    assert (whole.dtype, whole.shape) == (torch.bfloat16, (mesh.size, 4, WIDTH))
    (whole.float() * (1 + 2**-9 * mesh.rank)).sum().backward()
    assert local.grad.dtype == torch.float32


CHECKS = (
    switching_moves_nothing, phases_cover_the_layer, load_is_counted, evaluation_needs_no_other_rank,
    the_autotuner_agrees_and_remembers, shards_join_to_the_whole, impossible_r_is_refused, the_host_reads_at_most_once,
    ranks_launch_transfers_in_one_order, a_known_traffic_is_the_exchanged_one, the_communicator_is_the_experts_own,
    a_shorter_type_is_gathered_and_its_gradient_summed_in_the_longer,
)  # fmt: skip


def run_rank(rank: int, ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    mesh = ExpertMesh.create("cpu", ranks_per_node=ranks // 2, block_sizes=(2, 4))
    for check in CHECKS:
        check(mesh)
        if rank == 0:
            print("ok", check.__name__, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    from tests.workloads.moe.exact_worker import fork_ranks

    with tempfile.TemporaryDirectory() as folder:
        ranks = int(sys.argv[1])
        return fork_ranks(ranks, lambda rank: run_rank(rank, ranks, Path(folder) / "store"))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
