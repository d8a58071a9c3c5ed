"""`traffic_worker.py`: counts the bytes of the kernels' arguments in the interpreter; they must be those of the closed form."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch

from benchmarks.kernel_traffic import Sizes
from mlhpc.workloads.moe.kernels import gradients, products
from mlhpc.workloads.moe.kernels.fused import Source, run_fused

COUNTED = ("_TD", "_ND", "_NH", "_EHD")
GATHERED = ("x_TD", "d_out_TD", "wide_TD")
T, K, E, D, H = 12, 2, 3, 16, 32


class Counter:
    """Stands in for a kernel: adds up its arguments and runs it."""

    seen = 0

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            counted = {}
            for name, value in zip(self.kernel.arg_names, arguments, strict=False):
                if name.endswith(COUNTED):  # an argument that is not used is another one once more
                    rows = T * K if name in GATHERED else len(value)
                    counted[value.data_ptr()] = rows * value[0].numel() * value.element_size()
            Counter.seen += sum(counted.values())
            self.kernel[grid](*arguments, **constants)

        return launch


def main() -> None:
    for module, names in (
        (products, ("hidden_rows", "wide_rows", "add_rows")),
        (gradients, ("hidden_gradient", "weight_gradient")),
    ):
        for name in names:
            setattr(module, name, Counter(getattr(module, name)))
    for activation in ("relu", "gelu", "swiglu"):
        torch.manual_seed(0)
        experts_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
        order_R = experts_TK.t().reshape(-1).argsort(stable=True)
        tokens_N = order_R % T
        source = Source(torch.bincount(experts_TK.reshape(-1), minlength=E), tokens_N, tokens_N * K + order_R // T)
        x, weights_TK = torch.randn(T, D, requires_grad=True), torch.rand(T, K, requires_grad=True)
        up, down, gate = (torch.randn(E, H, D, requires_grad=True) for _ in range(3))
        wanted = Sizes(T, T * K, E, D, H, activation, 4)
        Counter.seen = 0
        y = run_fused(
            x, weights_TK, source, activation, (up, down, gate if activation == "swiglu" else None, None, None)
        )
        forward, Counter.seen = Counter.seen, 0
        y.backward(torch.ones_like(y))
        assert (forward, Counter.seen) == (wanted.fused().forward, wanted.fused().backward), (
            activation, forward, Counter.seen, wanted.fused(),
        )  # fmt: skip
        print(f"{activation}: {forward} and {Counter.seen} bytes, as the closed form")


if __name__ == "__main__":
    main()
