"""Compressed gradients: nothing is lost by top-k, hooks average over real ranks, and bytes are counted as predicted."""

from __future__ import annotations

import re
from multiprocessing import Manager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from mlhpc.plugins.axes.compression import TopK, compress_gradients, count_bytes, count_sent
from mlhpc.plugins.axes.predict import predict
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.instrument import CollectiveCounter, count_collectives
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import Compression

RANKS, STEPS = 2, 6
KINDS = [
    Compression(kind="fp16"),
    Compression(kind="bf16"),
    Compression(kind="powersgd", rank=2),
    Compression(kind="top_k", part=0.1),
]


@pytest.mark.parametrize("part", [0.01, 0.3, 1.0])
def test_what_was_sent_and_what_is_left_are_all_gradients_exactly(part: float) -> None:
    """Whole numbers are added without rounding, so that equal means equal."""
    torch.manual_seed(1)
    state, sent, total = TopK(None, part), torch.zeros(101), torch.zeros(101)  # type: ignore[arg-type]
    for _ in range(50):
        gradient = torch.randint(-9, 10, (101,)).float()
        places, values = state.split(0, gradient)
        assert len(places) == count_sent(101, part)
        left = state.residuals[0]
        assert left.abs().max() <= values.abs().min()  # the largest values are sent
        sent[places] += values
        total += gradient
        assert torch.equal(sent + left, total)


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).double()


def gradients_of(rank: int, step: int, net: nn.Module) -> list[Tensor]:
    """Gradients of one rank's loss, without an exchange."""
    net.zero_grad()
    loss_of(rank, step, net).backward()
    return [each.grad.clone() for each in net.parameters() if each.grad is not None]


def loss_of(rank: int, step: int, net: nn.Module) -> Tensor:
    x = torch.sin(torch.arange(10 * 24, dtype=torch.float64).view(10, 24) * (1 + rank + RANKS * step))
    loss: Tensor = net(x).square().mean()
    return loss


def run_rank(rank: int, folder: str, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    for plan in KINDS:
        net, ledger = model(), CollectiveCounter()
        wrapped = DistributedDataParallel(net)
        top, off, sums = compress_gradients(wrapped, plan), 0.0, []
        for step in range(STEPS):
            true = [
                torch.stack(each).mean(0)
                for each in zip(*(gradients_of(r, step, net) for r in range(RANKS)), strict=True)
            ]
            wrapped.zero_grad()
            ledger.take()
            with count_collectives(ledger):
                loss_of(rank, step, wrapped).backward()
            got = [each.grad for each in net.parameters() if each.grad is not None]
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, true, strict=True))
            sums.append((torch.cat([a.reshape(-1) for a in got]).sum(), torch.cat([a.reshape(-1) for a in true]).sum()))
        given, left = ledger.take(), 0.0
        if top is not None:
            kept = torch.cat(list(top.residuals.values())).sum()
            dist.all_reduce(kept)
            left = float(sum(b - a for a, b in sums) - kept / RANKS)
        expected = count_bytes(plan, list(net.parameters()))
        agrees = all(given[f"{kind}_bytes"] == size for kind, size in expected.items())
        found.append((plan.kind, off, agrees, left))
    dist.destroy_process_group()


@pytest.mark.long
def test_hooks_average_over_two_ranks_and_give_the_predicted_bytes(tmp_path: Path) -> None:
    with Manager() as manager:
        found = manager.list()
        spawn(run_rank, (str(tmp_path), found), nprocs=RANKS)  # type: ignore[no-untyped-call]
        rows = list(found)
    assert len(rows) == RANKS * len(KINDS)
    limits = {"fp16": 1e-3, "bf16": 1e-2, "powersgd": 1.0, "top_k": 2.0}
    for kind, off, agrees, left in rows:
        assert 0 < off < limits[kind], (kind, off)
        assert agrees, kind
        assert abs(left) < 1e-12  # what top-k did not send is remembered


def written(folder: Path, text: str) -> str:
    plan = 'version: 1\ndescription: mine\nmesh: data=2\nparameters: {"*": shard}\nextents: {position: context + 1}\n'
    plan += f"inputs: {{bytes: {{dims: [sample, position], dtype: uint8}}}}\ncompress: {text}\n"
    (folder / "mine.yaml").write_text(plan)
    return str(folder / "mine.yaml")


@pytest.mark.parametrize(
    ("compress", "mesh", "expected"),
    [
        ("{kind: zip}", "data=2", "kind"),
        ("{kind: top_k, part: 0}", "data=2", "part"),
        ("{kind: powersgd, rank: 0}", "data=2", "rank"),
        ("{kind: top_k}", "shard=2", "top_k needs whole gradients, and shard scatters them"),
        ("{kind: powersgd}", "shard=2", "give fp16 or bf16"),
    ],
)
def test_what_cannot_be_compressed_is_one_line(compress: str, mesh: str, expected: str, tmp_path: Path) -> None:
    chosen = load_descriptor("moe_lm")
    config = load_config(chosen, "smoke", [f"plan={written(tmp_path, compress)}", f"mesh={mesh}"])
    with pytest.raises(InputError, match=re.escape(expected)):
        Parallel.of(config, chosen, 0, 2)


@pytest.mark.long
def test_a_plan_predicts_the_bytes_of_compressed_gradients(tmp_path: Path) -> None:
    chosen = load_descriptor("moe_lm")

    def sent(compress: str, mesh: str) -> dict[tuple[str, str], int]:
        config = load_config(chosen, "smoke", [f"plan={written(tmp_path, compress)}", f"mesh={mesh}"])
        cost = predict(chosen, config, Parallel.of(config, chosen, 0, 2))
        return {(each.axis, each.kind): each.bytes for each in cost.exchanges}

    whole, half = (sent(f"{{kind: {kind}}}", "data=2") for kind in ("top_k, part: 1", "bf16"))
    values = whole["gradients", "all_gather"] // 8
    assert values == 115264  # of the card
    assert half["gradients", "all_reduce"] == 2 * values
    assert sent("{kind: top_k, part: 0.01}", "data=2")["gradients", "all_gather"] == 8 * 1153
    assert sent("{kind: powersgd}", "data=2")["gradients", "all_reduce"] < values // 2
    scattered = sent("{kind: fp16}", "shard=2")
    assert scattered["shard", "reduce_scatter"] == 2 * values
    assert scattered["shard", "all_gather"] == 4 * values // 2
