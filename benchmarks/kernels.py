"""The fused kernels beside what a layer would do without them: times and fractions of the measured roof on a GPU.

    python benchmarks/kernels.py                    a GPU: times; else exactness in the interpreter
    python benchmarks/kernels.py --compile I        run the I-th blocks of every kernel once, to fill Triton's cache
    python benchmarks/kernels.py --peers            with public_expert_layers.py too; without a GPU only their exactness

Contestants get the same tokens, routing (planned beforehand), weights and gradient: the fused kernels; permute, products of one
back end, unpermute; and a dense FFN on as many rows, which has equal FLOPs. Rounds are interleaved, times are medians of events.
With --peers each shape begins with how far output and gradients of tokens and gates are from those of `loop`, by norms.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if (
    importlib.util.find_spec("msgspec") is None
):  # a machine that has only torch and Triton: names that are only annotations

    class Names(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            return object

    sys.modules["mlhpc.workloads.moe.config"] = Names("mlhpc.workloads.moe.config")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.kernel_traffic import Sizes  # noqa: E402
from benchmarks.public_expert_layers import list_peers  # noqa: E402
from mlhpc.workloads.moe.experts import Weights, compute_activation, run_experts  # noqa: E402
from mlhpc.workloads.moe.kernels import fused  # noqa: E402
from mlhpc.workloads.moe.kernels.blocks import list_candidates  # noqa: E402
from mlhpc.workloads.moe.kernels.fused import Source, run_fused  # noqa: E402
from mlhpc.workloads.moe.router import (  # noqa: E402
    Dropless,
    Routing,
)

ROUNDS, WARM_UPS = 7, 2
EXACT_CASES = 24
BF16, F32 = torch.bfloat16, torch.float32
HOT_SHARE = 0.66
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int
    activation: str = "swiglu"
    dtype: torch.dtype = BF16
    load: str = "router"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def forward_flops(self) -> float:
        return 2.0 * (3 if self.activation == "swiglu" else 2) * self.rows * self.width * self.hidden

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        sizes = f"T{self.tokens} d{self.width} h{self.hidden} E{self.experts} k{self.top_k}"
        return f"{sizes} {self.activation} {kind} {self.load}"


SHAPES = (
    Shape(32768, 2048, 1024, 64, 8),
    Shape(32768, 4096, 1024, 128, 8),
    Shape(24576, 1536, 256, 128, 8),
    Shape(16384, 4096, 14336, 8, 2),
    Shape(65536, 4096, 4096, 16, 2, "relu"),
    Shape(32768, 2048, 1024, 64, 8, load="skewed"),
    Shape(8192, 2048, 1024, 32, 4, dtype=F32),
    Shape(16384, 1024, 1024, 16, 2, "relu", F32),
)


def route(shape: Shape, generator: torch.Generator) -> Routing:
    """Random distinct experts; skewed: expert 0 for two thirds of the tokens, the others by Zipf's law."""
    chances_TE = torch.rand(shape.tokens, shape.experts, generator=generator)
    if shape.load == "skewed":
        zipf_E = 1 / torch.arange(1, shape.experts + 1)
        chances_TE = chances_TE.log() / -zipf_E  # exponential races: the least come first
        hot_T = torch.rand(shape.tokens, generator=generator) < HOT_SHARE
        chances_TE[:, 0] = torch.where(hot_T, -1.0, 1e9)
        chances_TE = -chances_TE
    experts_TK = chances_TE.topk(shape.top_k, dim=1).indices
    weights_TK = torch.rand(shape.tokens, shape.top_k, generator=generator)
    weights_TK /= weights_TK.sum(1, keepdim=True)
    return Routing(experts_TK.to(DEVICE), weights_TK.to(DEVICE).requires_grad_(), torch.zeros(()))


def tensors_of(shape: Shape, device: str = DEVICE) -> Weights:
    def normal() -> Tensor:
        weight = torch.randn(shape.experts, shape.hidden, shape.width, device=device, dtype=shape.dtype)
        return weight.mul_(shape.width**-0.5).requires_grad_()

    return Weights(normal(), normal(), normal() if shape.activation == "swiglu" else None)


def contestants(shape: Shape, peers: bool = False) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Forward passes and what gradients are wanted of, tokens and gates first."""
    generator = torch.Generator().manual_seed(0)
    routing, weights = route(shape, generator), tensors_of(shape)
    x = torch.randn(shape.tokens, shape.width, device=DEVICE, dtype=shape.dtype, requires_grad=True)
    permute = Dropless()
    plan = permute.plan(routing, shape.experts)
    leaves = [x, routing.weights_TK, *(weight for weight in vars(weights).values() if weight is not None)]

    def fuse() -> Tensor:
        source = Source(plan.rows_E, plan.tokens_N, plan.choices_N)
        return run_fused(x, routing.weights_TK, source, shape.activation, tuple(vars(weights).values()))

    def by(backend: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            rows_ND = run_experts(permute.encode(x, plan), plan.rows_E, weights, shape.activation, backend)
            return permute.decode(rows_ND, plan, routing.weights_TK)

        return call

    dense_x = torch.randn(shape.rows, shape.width, device=DEVICE, dtype=shape.dtype, requires_grad=True)
    one = tensors_of(Shape(1, shape.width, shape.hidden, 1, 1, shape.activation, shape.dtype)).map(
        lambda weight: weight.detach()[0].clone().requires_grad_()
    )

    def dense() -> Tensor:
        gate = None if one.gate_EHD is None else F.linear(dense_x, one.gate_EHD)
        return compute_activation(F.linear(dense_x, one.up_EHD), gate, shape.activation) @ one.down_EHD

    dense_leaves = [dense_x, *(weight for weight in vars(one).values() if weight is not None)]
    calls = {"triton": (fuse, leaves), "grouped_mm": (by("grouped_mm"), leaves), "loop": (by("loop"), leaves)}
    if shape.load != "skewed":
        calls["bmm"] = (by("bmm"), leaves)
    for name, peer in (list_peers(x, routing, plan, weights, shape.activation) if peers else {}).items():
        if isinstance(peer, str):
            print(f"{shape}: {name} takes no part: {peer}", flush=True)
        elif name != "tutel" or shape.load != "skewed":  # it pads as bmm does
            calls[name] = peer
    return calls | {"dense": (dense, dense_leaves)}


def print_differences(shape: Shape, calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]]) -> None:
    """How far each contestant's output, and gradients of tokens and gates, are from the loop's."""

    def found(name: str) -> list[Tensor]:
        y = calls[name][0]()
        gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        return [y.detach().double(), *(each.double() for each in torch.autograd.grad(y, calls[name][1][:2], gradient))]

    wanted = found("loop")
    for name in calls:
        if name not in ("loop", "dense"):
            parts = [float((a - b).norm() / b.norm()) for a, b in zip(found(name), wanted, strict=True)]
            print(f"{shape}: {name} differs from loop by {', '.join(f'{part:.1e}' for part in parts)}", flush=True)


def check_peers() -> None:
    """Compare all contestants on few tokens, without a GPU."""
    # Triton and torch's compiler read these when they are imported
    os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    for shape in (Shape(24, 32, 64, 4, 2, activation, F32) for activation in ("swiglu", "relu")):
        print_differences(shape, contestants(shape, peers=True))


def passes(call: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float, float]:
    """Milliseconds of forward and of backward, and MiB that both needed at most."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    y = call()
    events[1].record()
    torch.autograd.grad(y, leaves, torch.ones_like(y))
    events[2].record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2]), peak


def time_shape(shape: Shape, roof: float, peers: bool) -> None:
    """Print one line per contestant."""
    able = {}
    for name, (call, leaves) in contestants(shape, peers).items():
        try:
            for _ in range(WARM_UPS):
                passes(call, leaves)
            able[name] = call, leaves
        except Exception:
            print(f"{shape}: {name} FAILED\n{traceback.format_exc(limit=-6)[-2500:]}", flush=True)
    if peers:
        print_differences(shape, able)
    seen = {name: [] for name in able}
    for _ in range(ROUNDS):
        for name, (call, leaves) in able.items():
            seen[name].append(passes(call, leaves))
    print(shape, flush=True)
    middle = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in seen.items()}
    for name, (forward, backward, peak) in middle.items():
        whole = forward + backward
        totals = [a + b for a, b, _ in seen[name]]
        ratio = sum(middle["dense"][:2]) / whole if "dense" in middle else float("nan")
        print(
            f"  {name:10} forward {forward:8.3f} ms ({shape.forward_flops / forward / 1e9 / roof:5.3f} of roof)  "
            f"backward {backward:8.3f} ms ({2 * shape.forward_flops / backward / 1e9 / roof:5.3f})  both {whole:8.3f} "
            f"({min(totals):.3f} to {max(totals):.3f}; {3 * shape.forward_flops / whole / 1e9 / roof:5.3f})  "
            f"dense/this {ratio:5.2f}  {peak:7.0f} MiB",
            flush=True,
        )


def print_bytes() -> None:
    """GiB that a training pass moves, by the closed forms (a test counts those of the kernels)."""
    print("GiB moved, forward and backward: fused, separate kernels, ratio")
    for shape in SHAPES:
        element_bytes = torch.empty(0, dtype=shape.dtype).element_size()
        sizes = Sizes(
            shape.tokens, shape.rows, shape.experts, shape.width, shape.hidden, shape.activation, element_bytes
        )
        fused_gib, separate_gib = sizes.fused().both / 2**30, sizes.separate().both / 2**30
        print(f"  {fused_gib:6.2f} {separate_gib:6.2f} {separate_gib / fused_gib:5.2f}  {shape}")


def measure_roof(dtype: torch.dtype) -> float:
    """TFLOP/s of a large product by torch, median of ten."""
    size = 8192 if dtype == BF16 else 4096
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    times = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2.0 * size**3 / statistics.median(times[3:]) / 1e9


def print_blocks() -> None:
    """Milliseconds of every block size that was measured."""
    for key, seconds in fused.BLOCK_TIMINGS.seconds.items():
        print(" ", *key)
        for blocks, each in sorted(seconds.items(), key=lambda item: item[1]):
            print(f"      {1e3 * each:8.3f} ms  {blocks}")


def compile_blocks(index: int) -> None:
    """Run all kernels on few tokens with the blocks of this index."""

    def run(kernel: str, case: object, x: Tensor, call: Callable[..., None], *, describable: bool) -> None:
        listed = list_candidates(kernel, x.dtype)
        try:
            call(listed[index % len(listed)])
        except Exception as error:
            print(f"{kernel} {x.dtype} {listed[index % len(listed)]}: {type(error).__name__} {str(error)[:300]}")

    fused.BLOCK_TIMINGS.run = run  # type: ignore[method-assign]
    for dtype, activation in {(shape.dtype, shape.activation) for shape in SHAPES}:
        shape = Shape(64, 256, 256, 8, 2, activation, dtype)
        call, leaves = contestants(shape)["triton"]
        passes(call, leaves)


def time_all(only: list[int], peers: bool) -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, torch.version.cuda)
    roofs = {dtype: measure_roof(dtype) for dtype in (BF16, F32)}
    print(f"roof: bfloat16 {roofs[BF16]:.0f}, float32 {roofs[F32]:.1f} TFLOP/s (torch's product)")
    for shape in (SHAPES[i] for i in only) if only else SHAPES:
        try:
            time_shape(shape, roofs[shape.dtype], peers)
        except Exception:
            print(f"{shape} FAILED\n{traceback.format_exc(limit=-6)[-3000:]}", flush=True)
        torch.cuda.empty_cache()
    print_blocks()


def profile(shape: Shape) -> None:
    """Print the kernels of one pass with their device time."""
    call, leaves = contestants(shape)["triton"]
    for _ in range(WARM_UPS):
        passes(call, leaves)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        passes(call, leaves)
    print(f"{shape}: device milliseconds, calls, kernel")
    for event in sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)[:25]:
        print(f"  {event.self_device_time_total / 1e3:9.3f} {event.count:4}  {event.key[:90]}")


def run_for_counters(shape: Shape) -> None:
    """Run one pass between the marks that ``ncu --profile-from-start off`` waits for: block sizes are timed before."""
    call, leaves = contestants(shape)["triton"]
    for _ in range(WARM_UPS):
        passes(call, leaves)
    torch.cuda.cudart().cudaProfilerStart()
    passes(call, leaves)
    torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int)
    parser.add_argument("--shapes", type=int, nargs="*", default=[], help="which of the shapes; all without")
    parser.add_argument("--profile", type=int, help="print the kernels of one pass of this shape")
    parser.add_argument("--peers", action="store_true", help="with public layers: public_expert_layers.py")
    parser.add_argument("--counters", type=int, help="run one pass of this shape under ncu: kernel_counters.py")
    options = parser.parse_args()
    if options.peers and DEVICE == "cpu":
        check_peers()
    elif not torch.cuda.is_available():
        print_bytes()
        for worker, *arguments in (("traffic_worker.py",), ("exact_worker.py", str(EXACT_CASES))):
            subprocess.run([sys.executable, ROOT / "tests/workloads/moe/kernels" / worker, *arguments], check=True)
    elif options.compile is not None:
        compile_blocks(options.compile)
    elif options.counters is not None:
        run_for_counters(SHAPES[options.counters])
    elif options.profile is not None:
        profile(SHAPES[options.profile])
    else:
        print_bytes()
        time_all(options.shapes, options.peers)


if __name__ == "__main__":
    main()
