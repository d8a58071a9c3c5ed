"""GEMM ceilings per element type: burst at several orders, then sustained at the best one, with every library there is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from suite.performance.ceilings.document import Curve, Findings, NotMeasured, Point
from suite.performance.ceilings.samples import Effort, Samples, agree, calls_for, repeat
from suite.world import World

LAUNCH_ORDER = 16  # far from any roof: what it takes is what issuing an operator costs
CPU_ORDERS = (LAUNCH_ORDER, 256, 384, 512, 768, 1024, 2048)
GPU_ORDERS = (LAUNCH_ORDER, 1024, 2048, 4096, 8192, 16384)
CPU_TYPES = ("float32", "float64", "bfloat16")
GPU_TYPES = ("float32", "tf32", "float64", "bfloat16", "float16")
SLOWEST_S = 0.5  # an order whose one product takes longer is not tried
ORDER_S = 0.5  # repetitions of one order take about this long, and are at least three


@dataclass(frozen=True)
class Product:
    """C = A B of one order: ``multiply`` runs it once, ``library`` does it."""

    library: str
    multiply: Callable[[], object]


def measure(world: World, effort: Effort, device: torch.device) -> Findings:
    """Square products on all ranks at once. The roof is the best library's, burst and sustained."""
    found = Findings()
    for dtype in GPU_TYPES if device.type == "cuda" else CPU_TYPES:
        reason = _missing(device, dtype)
        if reason:
            found.not_measured.append(NotMeasured("compute", reason, dtype))
            continue
        with _tf32(dtype == "tf32"):
            found.add(_of_type(world, effort, device, dtype))
    return found


def flops(order: int) -> float:
    """Operations of a product of two square matrices; a multiply-add is two."""
    return 2.0 * order**3


def products(device: torch.device, dtype: str, order: int) -> list[Product]:
    """The same product by every library that can do it."""
    element = getattr(torch, "float32" if dtype == "tf32" else dtype)
    left, right = (torch.full((order, order), 0.5, dtype=element, device=device) for _ in range(2))
    out = torch.empty_like(left)
    choices = [Product(_torch_library(device, dtype), lambda: torch.mm(left, right, out=out))]
    if device.type == "cpu" and dtype in {"float32", "float64"}:
        a, b, c = left.numpy(), right.numpy(), out.numpy()
        choices.append(Product(_numpy_library(), lambda: np.matmul(a, b, out=c)))
    return choices


def seconds(multiply: Callable[[], object], calls: int, device: torch.device) -> float:
    """Wall seconds of so many products, the device idle before and after."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        multiply()
    _wait(device)
    return time.perf_counter() - begin


def _of_type(world: World, effort: Effort, device: torch.device, dtype: str) -> Findings:
    sampled: dict[str, dict[int, Samples]] = {}
    for order in GPU_ORDERS if device.type == "cuda" else CPU_ORDERS:
        for product in products(device, dtype, order):
            once = agree(world, [_warm(product, device)])[0]
            if once > SLOWEST_S:
                continue
            calls = calls_for(effort.sample_s, once)

            def rate(product: Product = product, calls: int = calls, order: int = order) -> float:
                return flops(order) * calls / seconds(product.multiply, calls, device)

            repetitions = min(effort.repetitions, max(3, calls_for(ORDER_S, once * calls)))
            sampled.setdefault(product.library, {})[order] = repeat(world, rate, repetitions)
    value, library, order = max((s.value, lib, o) for lib, by_order in sampled.items() for o, s in by_order.items())
    best = sampled[library][order]
    found = Findings(curves=[_curve(world, dtype, lib, by_order) for lib, by_order in sampled.items()])
    product = next(p for p in products(device, dtype, order) if p.library == library)
    for mode, samples in (("burst", best), ("sustained", _sustained(world, effort, device, product, order, value))):
        found.roofs.append(
            samples.roof(
                "compute",
                "gemm",
                mode,
                "FLOP/s",
                ranks=world.size,
                nodes=world.nodes,
                library=library,
                dtype=dtype,
                shape=(order, order, order),
            )
        )
    return found


def _sustained(
    world: World, effort: Effort, device: torch.device, product: Product, order: int, burst: float
) -> Samples:
    """Rates of consecutive tenths of one run without pause: all ranks at once, clocks and power limits as they settle."""
    few = calls_for(effort.sustained_s / 40, flops(order) / burst)
    once = agree(world, [seconds(product.multiply, few, device) / few])[0]
    calls = calls_for(effort.sustained_s / 10, once)  # by what it takes now, not in a burst
    return repeat(world, lambda: flops(order) * calls / seconds(product.multiply, calls, device), 10)


def _warm(product: Product, device: torch.device) -> float:
    """Seconds of one product after its first call, which sets libraries up."""
    seconds(product.multiply, 1, device)
    return seconds(product.multiply, 1, device)


def _curve(world: World, dtype: str, library: str, by_order: dict[int, Samples]) -> Curve:
    points = tuple(
        Point(order, s.value, s.n, s.spread, seconds=flops(order) / s.value) for order, s in sorted(by_order.items())
    )
    return Curve("compute", library, "burst", "order", "FLOP/s", world.size, world.nodes, points, dtype=dtype)


def _missing(device: torch.device, dtype: str) -> str:
    """Why a type cannot be measured here, or nothing."""
    if dtype == "tf32" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "this GPU has no TF32"
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "this GPU has no bfloat16"
    return ""


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """TensorFloat-32 in float32 products, on or off, whatever it was before."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _torch_library(device: torch.device, dtype: str) -> str:
    if device.type == "cuda":
        return "hipblaslt" if torch.version.hip else "cublas"
    if dtype == "bfloat16" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch onednn"
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return f"torch {found.group(1) if found else 'blas'}"


def _numpy_library() -> str:
    config = np.show_config(mode="dicts")
    name = (config or {}).get("Build Dependencies", {}).get("blas", {}).get("name", "blas")
    return f"numpy {name}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
