"""`race_worker.py`: the race of back ends with the kernels in Triton's interpreter. Prints what each shape's kernels gathered."""

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch

from mlhpc.workloads.moe import backend_selection, experts
from mlhpc.workloads.moe.backend_selection import ExpertShape

TOKENS = ExpertShape(32, 4, 16, 24, "swiglu", bias=True, even=False, dtype=torch.float32, top_k=2)
SHAPES = {"tokens": TOKENS, "other ranks": replace(TOKENS, top_k=None), "capacity": replace(TOKENS, even=True)}


def main() -> None:
    gathered: list[bool] = []
    run_fused = experts.run_fused

    def note(x, weights_TK, source, *rest):  # type: ignore[no-untyped-def]
        gathered.append(source.tokens_N is not None)
        return run_fused(x, weights_TK, source, *rest)

    experts.run_fused = note  # type: ignore[attr-defined]
    for name, shape in SHAPES.items():
        ways = backend_selection._build_candidates(shape, torch.device("cpu"), ["loop", "triton"])
        loop, fused = (ways[each]() for each in ("loop", "triton"))
        torch.testing.assert_close(fused, loop, rtol=1e-5, atol=1e-5)
        print(f"{name}: gathered {gathered.pop()}")
        assert not gathered


if __name__ == "__main__":
    main()
