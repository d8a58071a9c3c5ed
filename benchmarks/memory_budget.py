"""What blocks keep, hold at most and compute when they are recomputed: without, selective, full, and within memory budgets.

Four blocks of attention and MLP with dropout, on one CPU. Bytes of tensors are counted at the dispatcher, and predicted by the same
pass on fake tensors, as `mlhpc plan` does. CPU times are ratios to the plain blocks, passes by turns.

    python benchmarks/memory_budget.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.performance.plans.remembered import CachingFakeTensorMode
from mlhpc.suite.training.counts.flops import list_flop_formulas
from mlhpc.suite.training.counts.memory import LiveBytes
from mlhpc.suite.training.parallel.plan import Budget, Recompute
from mlhpc.suite.training.parallel.recompute import recompute_blocks, recomputed_of

BATCH, LENGTH, WIDTH, HEADS, BLOCKS = 2, 128, 256, 4, 4
FORWARD = BLOCKS * BATCH * (24 * LENGTH * WIDTH**2 + 4 * LENGTH**2 * WIDTH)
POLICIES: dict[str, Recompute | None] = {
    "none": None,
    "selective": "selective",
    "full": "full",
    **{f"budget {part:g}": Budget(budget=part) for part in (1, 0.75, 0.5, 0.25, 0.1, 0)},
}


class Block(nn.Module):
    """Attention and MLP with norms and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """x with what both layers add."""
        b, s, h = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        weights = self.dropout((q @ k.transpose(-1, -2) / (h // HEADS) ** 0.5).softmax(-1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, s, h)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))  # type: ignore[no-any-return]


def build(policy: Recompute | None) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    recompute_blocks(model, {} if policy is None else {"?": policy})
    return model


def counted(model: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """Bytes that are kept for the backward pass, the most beside states, FLOPs."""
    model.zero_grad()
    live = LiveBytes((*model.parameters(), x), list_flop_formulas)
    with live:
        loss = model(x).square().mean()
        kept = live.now
        loss.backward()
    return kept, live.peak, live.flops


def seconds(model: nn.Module, x: Tensor) -> float:
    begin = time.process_time()
    model.zero_grad()
    model(x).square().mean().backward()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    models = {name: build(policy) for name, policy in POLICIES.items()}
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    gradients, bytes_of, again, rows = {}, {}, {}, []
    for name, model in models.items():
        for _ in range(2):  # the first pass traces
            torch.manual_seed(3)
            bytes_of[name] = counted(model, x)
            counter = recomputed_of(model)
            again.setdefault(name, 0 if counter is None else counter.take() or 0)
        gradients[name] = [*(each.grad.clone() for each in model.parameters() if each.grad is not None), torch.rand(1)]
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.repetitions):
        for name, model in models.items():
            times[name].append(seconds(model, x))
    with CachingFakeTensorMode():
        predicted = {
            name: counted(build(policy), torch.empty(BATCH, LENGTH, WIDTH)) for name, policy in POLICIES.items()
        }
    shape = f"batch {BATCH}, length {LENGTH}, width {WIDTH}, {HEADS} heads, dropout 0.1, float32"
    print(
        f"{BLOCKS} blocks, {shape}, torch {torch.__version__}, one thread, load {load:.0f} to {os.getloadavg()[0]:.0f}"
    )
    print(f"CPU time: {args.repetitions} passes of each by turns over those of none, median and quartiles")
    heads = ("kept MiB", "most MiB", "predicted", "over it", "FLOPs/fwd", "logged", "gradients")
    print(f"{'':<12} " + " ".join(f"{head:>9}" for head in heads) + "  CPU time")
    for name, (kept, most, flops) in bytes_of.items():
        same = all(torch.equal(a, b) for a, b in zip(gradients[name], gradients["none"], strict=True))
        ratios = [a / b for a, b in zip(times[name], times["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sizes = " ".join(f"{size / 2**20:>9.2f}" for size in (kept, most, predicted[name][1]))
        rows.append(
            f"{name:<12} {sizes} {most / predicted[name][1]:>9.3f} {flops / FORWARD:>9.3f} {again[name] / FORWARD:>9.3f} "
            f"{'same bits' if same else 'DIFFER':>9}  {middle:.2f} [{low:.2f}, {high:.2f}]"
        )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
