"""`layer_worker.py RANKS`: what of a layer over ranks is not a number to compare: switching, phases, autotuner, evaluation."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from suite.errors import InputError

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from suite.performance.cost_model import Network
from suite.training.timing import HostClock
from workloads.moe import phases
from workloads.moe.all_to_all import ExpertMesh, gather_slices
from workloads.moe.autotune import Autotuner, measure_flops, measure_network, trial_timer
from workloads.moe.config import MoEConfig, valid_r
from workloads.moe.layer import Execution, MoELayer
from workloads.moe.phases import LayerTimer

EXPERTS, WIDTH = 2, 8


def make(mesh: ExpertMesh | None, **settings: object) -> MoELayer:
    torch.manual_seed(0)
    config = MoEConfig.model_validate({"experts": EXPERTS, "hidden": 16, "expert_parallel": True} | settings)
    return MoELayer(WIDTH, config, mesh)


def switching_moves_nothing(mesh: ExpertMesh) -> None:
    """Optimizer steps under changing r, degree and algorithm are those of one execution; storage never changes."""
    trained = []
    for switches in (False, True):
        layer = make(mesh)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        storage = [parameter.data_ptr() for parameter in layer.parameters()]
        executions = [
            Execution(r, d, a) for r in valid_r(EXPERTS, mesh.size) for d in (1, 2) for a in ("linear", "2dh")
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


def the_autotuner_agrees_and_remembers(mesh: ExpertMesh) -> None:
    layer = make(mesh, hidden=64)
    x = torch.randn(64, WIDTH)
    network = measure_network(mesh, torch.device("cpu"))
    assert isinstance(network, Network)
    tuner = Autotuner(network, measure_flops(layer, 64), shortlist=2)
    before = layer.execution
    measure = trial_timer(layer, x, repeats=1)
    decision = tuner.decide(layer, 64, 64, measure)
    assert layer.execution == before
    assert layer.load.read().rows == 0.0
    assert {trial.execution.r for trial in decision.trials} == set(valid_r(EXPERTS, mesh.size))
    everywhere = [None] * mesh.size
    dist.all_gather_object(everywhere, decision.event())
    assert all(event == everywhere[0] for event in everywhere)

    def never(execution: Execution) -> float:
        raise AssertionError("a bucket is measured once")

    assert tuner.decide(layer, 100, 64, never) is decision
    layer.use(decision.chosen)


def shards_join_to_the_whole(mesh: ExpertMesh) -> None:
    layer, alone = make(mesh), make(None)
    own, whole = layer.experts.weights(), alone.experts.weights()
    for name in ("up_EHD", "down_EHD", "gate_EHD"):
        joined = gather_slices(getattr(own, name), mesh.world, mesh.size // layer.sharers, layer.sharers)
        assert torch.equal(joined, getattr(whole, name))


def impossible_r_is_refused(mesh: ExpertMesh) -> None:
    layer = make(mesh)
    with pytest.raises(InputError, match=r"allow \(0, 1, 2\)"):
        layer.use(Execution(r=3))


CHECKS = (
    switching_moves_nothing,
    phases_cover_the_layer,
    load_is_counted,
    evaluation_needs_no_other_rank,
    the_autotuner_agrees_and_remembers,
    shards_join_to_the_whole,
    impossible_r_is_refused,
)


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
