"""The back ends of experts by CPU time, to choose one where nothing was measured (`choose_unmeasured_backend`).

    python benchmarks/unmeasured_backends.py

Training passes on one thread, back ends by turns, least of three after a first one. Rows of experts grow linearly up to
``load`` times their mean. A number is the time over the best of the row.
"""

from __future__ import annotations

import time

import torch

from mlhpc.workloads.moe.config import Activation
from mlhpc.workloads.moe.experts import Experts, run_experts

SHAPES: tuple[tuple[int, int, int, int, Activation], ...] = (
    (64, 512, 128, 256, "relu"),
    (8, 512, 128, 256, "relu"),
    (64, 4096, 128, 256, "gelu"),
    (8, 4096, 256, 1024, "gelu"),
    (8, 512, 256, 1024, "swiglu"),
    (128, 1024, 128, 64, "swiglu"),
)
LOADS = (1.0, 1.25, 1.5, 2.0)
NAMES = ("loop", "onednn", "bmm", "grouped_mm")


def main() -> None:
    torch.set_num_threads(1)
    print("| experts | tokens (k = 2) | model | hidden | load |", " | ".join(NAMES), "| best [ms] |")
    print("|" + " --- |" * (6 + len(NAMES)))
    for experts, tokens, width, hidden, activation in SHAPES:
        weights = Experts(experts, width, hidden, activation, bias=False).weights()
        rows_ND = torch.randn(2 * tokens, width)
        for load in LOADS:
            share_E = torch.linspace(2.0 - load, load, experts)
            rows_E = (share_E / share_E.sum() * len(rows_ND)).round().long()
            rows_E[-1] += len(rows_ND) - rows_E.sum()
            seconds: dict[str, list[float]] = {name: [] for name in NAMES}
            for _ in range(4):
                for name in NAMES:
                    leaf_ND, begin = rows_ND.clone().requires_grad_(), time.process_time()
                    run_experts(leaf_ND, rows_E, weights, activation, name).sum().backward()  # type: ignore[arg-type, no-untyped-call]
                    seconds[name].append(time.process_time() - begin)
            least = {name: min(each[1:]) for name, each in seconds.items()}
            best = min(least.values())
            cells = " | ".join(f"{least[name] / best:.2f}" for name in NAMES)
            print(f"| {experts} | {tokens} | {width} | {hidden} | {load} | {cells} | {1e3 * best:.1f} |", flush=True)


if __name__ == "__main__":
    main()
