"""`scattermoe_worker.py CLONE CASES`: our kernels beside ScatterMoE's, both in Triton's interpreter; prints the largest difference.

Its experts are called as its own MLPs do (gathered rows in, gates out), on our weights.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import types
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it compiles the sorting of choices, which needs no compiler here
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, sys.argv[1])
CASES = int(sys.argv[2])

import torch  # noqa: E402

torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc]
package = types.ModuleType("scattermoe")  # without its own __init__, which imports more
package.__path__ = [str(Path(sys.argv[1], "scattermoe"))]
sys.modules["scattermoe"] = package

from scattermoe.parallel_experts import flatten_sort_count, parallel_linear  # noqa: E402

from mlhpc.workloads.moe.kernels.fused import Source, run_fused  # noqa: E402


def compare(seed: int) -> float:
    rng = random.Random(seed)
    T, D, H = rng.choice((3, 17, 40)), rng.choice((16, 24, 33)), rng.choice((16, 20, 32))
    E = rng.choice((1, 3, 6))
    K = min(E, rng.choice((1, 2)))
    torch.manual_seed(seed)
    experts_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    shapes = ((T, D), (T, K), (E, H, D), (E, H, D), (E, H, D))
    d_out, found = torch.randn(T, D), []
    for ours in (False, True):
        torch.manual_seed(seed)
        x, weights_TK, up, down, gate = leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
        if ours:
            flat_R = experts_TK.t().reshape(-1)
            order_R = flat_R.argsort(stable=True)
            tokens_N = order_R % T
            source = Source(torch.bincount(flat_R, minlength=E), tokens_N, tokens_N * K + order_R // T)
            y = run_fused(x, weights_TK, source, "swiglu", (up, down, gate, None, None))
        else:
            order = flatten_sort_count(experts_TK, E)
            rows = [parallel_linear(x, w.transpose(1, 2), K, *order, grouped_out=True) for w in (up, gate)]
            hidden = torch.nn.functional.silu(rows[1]) * rows[0]
            y = parallel_linear(hidden, down, 1, *order, grouped_in=True, gates=weights_TK)
        y.backward(d_out)
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(*found, strict=True))


print(f"largest difference {max(compare(seed) for seed in range(CASES)):.2e}")
