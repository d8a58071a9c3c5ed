"""Measures GEMM per element type and library: bursts of several orders, then sustained at the best one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlhpc.suite.files import render_duration
from mlhpc.suite.machine.choice.layout import compute_onednn_product, has_onednn
from mlhpc.suite.performance.ceilings.samples import (
    Effort,
    Samples,
    TimeLimit,
    count_calls_for,
    gather_maxima,
    measure_on_all_ranks,
)
from mlhpc.suite.performance.ceilings.sizes import may_allocate
from mlhpc.suite.performance.ceilings_file import Curve, Findings, NotMeasured, Point
from mlhpc.suite.world import World

ONEDNN = "torch onednn"
# So small that its time is the overhead of issuing an operator.
LAUNCH_ORDER = 16
CPU_ORDERS = (LAUNCH_ORDER, 128, 256, 384, 512, 768, 1024, 2048)
GPU_ORDERS = (LAUNCH_ORDER, 1024, 2048, 4096, 8192, 16384)
CPU_TYPES = ("float32", "float64", "bfloat16")
GPU_TYPES = ("float32", "tf32", "float64", "bfloat16", "float16")
# Two calls warm up, three are measured.
LEAST_CALLS = 5
# TF32 numbers are stored as float32.
ELEMENT_BYTES = {"float32": 4, "tf32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Product:
    """A product C = A B of square matrices. ``multiply`` computes it once with ``library`` and returns C."""

    library: str
    multiply: Callable[[], Any]


def measure(world: World, effort: Effort, device: torch.device, free: int, budget: TimeLimit) -> Findings:
    """Measure square products on all ranks at once. The ceilings, burst and sustained, are the best library's.

    ``free``: free memory in bytes, on the node or on the GPU. Each type has an equal part of the time.
    """
    findings = Findings()
    types = GPU_TYPES if device.type == "cuda" else CPU_TYPES
    for number, dtype in enumerate(types):
        reason = _explain_unmeasurable(device, dtype)
        if reason:
            findings.not_measured.append(NotMeasured("compute", reason, dtype))
            continue
        part = budget.until(budget.length * (number + 1) / len(types))
        with _use_tf32(dtype == "tf32"):
            findings.add(_measure_type(world, effort, device, dtype, free, part))
        budget.tell(f"compute: {number + 1} of {len(types)} types")
    return findings


def count_gemm_flops(order: int) -> float:
    """Return the FLOPs of a product of two square matrices; a multiply-add is two."""
    return 2.0 * order**3


def list_products(device: torch.device, dtype: str, order: int) -> list[Product]:
    """List the same product with every library that has it."""
    element = getattr(torch, "float32" if dtype == "tf32" else dtype)
    # Sums of products of 0.5 stay finite in float16, too.
    left, right = (torch.full((order, order), 0.5, dtype=element, device=device) for _ in range(2))
    out = torch.empty_like(left)
    choices = [Product(_find_torch_library(device, dtype), lambda: torch.mm(left, right, out=out))]
    if device.type == "cpu" and dtype in {"float32", "float64"}:
        # The same memory, so both libraries have the same alignment and pages.
        a, b, c = left.numpy(), right.numpy(), out.numpy()
        choices.append(Product(_find_numpy_library(), lambda: np.matmul(a, b, out=c)))
    if device.type == "cpu" and dtype == "float32" and has_onednn():
        choices.append(Product(ONEDNN, lambda: compute_onednn_product(left, right)))
    return choices


def compute_product_error(product: Product, order: int) -> float:
    """Compute the largest relative error. All elements are ``order`` / 4, which every type here holds exactly."""
    found = torch.as_tensor(product.multiply()).double() * (4.0 / order) - 1.0
    return float(found.abs().max().nan_to_num(float("inf")))


def measure_seconds(multiply: Callable[[], object], calls: int, device: torch.device) -> float:
    """Measure the wall-clock seconds of ``calls`` products. The device is idle before and after."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        multiply()
    _wait(device)
    return time.perf_counter() - begin


def _measure_type(
    world: World, effort: Effort, device: torch.device, dtype: str, free: int, budget: TimeLimit
) -> Findings:
    """Measure a curve over orders for each library. The best library at its best order gives two ceilings."""
    orders = GPU_ORDERS if device.type == "cuda" else CPU_ORDERS
    sampled, left_out = _sample_orders(world, effort, device, dtype, free, budget, orders)
    findings = Findings(not_measured=[NotMeasured("compute", reason, dtype) for reason in left_out])
    if not sampled:
        return findings
    # The ceiling is what the best library reaches.
    value, library, order = max((s.value, lib, o) for lib, by_order in sampled.items() for o, s in by_order.items())
    findings.curves += [_build_curve(world, dtype, lib, by_order) for lib, by_order in sampled.items()]
    modes = {"burst": sampled[library][order]}
    if budget.allows(effort.sustained_s):
        product = next(p for p in list_products(device, dtype, order) if p.library == library)
        modes["sustained"] = _measure_sustained(world, effort, device, product, order, value)
    else:
        findings.not_measured.append(NotMeasured("compute", f"sustained {dtype}: the time was over", dtype))
    for mode, samples in modes.items():
        findings.roofs.append(
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
    return findings


def _sample_orders(
    world: World,
    effort: Effort,
    device: torch.device,
    dtype: str,
    free: int,
    budget: TimeLimit,
    orders: Sequence[int],
) -> tuple[dict[str, dict[int, Samples]], list[str]]:
    """Measure rates by library and order. Also returns why orders were left out.

    A product's time is estimated before it is called.
    """
    sampled: dict[str, dict[int, Samples]] = {}
    left_out: dict[str, str] = {}
    for order in orders:
        if not may_allocate(3 * order**2 * ELEMENT_BYTES[dtype], world.local_size, free):
            left_out.setdefault(
                "", f"orders from {order}: a quarter of the free memory, {free >> 20} MiB, holds no product"
            )
            break
        for product in list_products(device, dtype, order):
            done = sampled.get(product.library, {})
            expected = _estimate_seconds(done, order)
            if product.library in left_out:
                continue
            if expected > effort.slowest_s or not budget.allows(LEAST_CALLS * max(expected, effort.sample_s)):
                over = (
                    f"takes {render_duration(expected)}"
                    if expected > effort.slowest_s
                    else "does not fit into the time"
                )
                left_out[product.library] = f"orders from {order} with {product.library}: a product {over}"
                continue
            once, wrong = gather_maxima(world, [_measure_warm(product, device), compute_product_error(product, order)])
            if wrong:
                left_out[product.library] = f"orders from {order} with {product.library}: the product is wrong"
                continue
            calls = count_calls_for(effort.sample_s, once)

            def rate(product: Product = product, calls: int = calls, order: int = order) -> float:
                return count_gemm_flops(order) * calls / measure_seconds(product.multiply, calls, device)

            repetitions = min(effort.repetitions, max(3, count_calls_for(effort.order_s, once * calls)))
            sampled.setdefault(product.library, {})[order] = measure_on_all_ranks(
                world, rate, repetitions, budget=budget
            )
    return sampled, list(left_out.values())


def _estimate_seconds(done: Mapping[int, Samples], order: int) -> float:
    """Estimate the seconds of a product from the slowest rank's rate at the largest earlier order. 0 if there is none.

    The launch order is ignored: its time is that of a call.
    """
    before = max((known for known in done if known > LAUNCH_ORDER), default=None)
    return count_gemm_flops(order) / done[before].slowest if before else 0.0


def _measure_sustained(
    world: World, effort: Effort, device: torch.device, product: Product, order: int, burst: float
) -> Samples:
    """Measure ten consecutive parts of one run without pause on all ranks: clocks and power limits settle meanwhile."""
    # A first estimate from the burst rate; clocks have fallen when the parts are counted.
    few = count_calls_for(effort.sustained_s / 40, count_gemm_flops(order) / burst)
    once = gather_maxima(world, [measure_seconds(product.multiply, few, device) / few])[0]
    calls = count_calls_for(effort.sustained_s / 10, once)  # a sustained call may take longer than one in a burst
    return measure_on_all_ranks(
        world, lambda: count_gemm_flops(order) * calls / measure_seconds(product.multiply, calls, device), 10
    )


def _measure_warm(product: Product, device: torch.device) -> float:
    """Return the seconds of the second product: the first one initialises the library."""
    measure_seconds(product.multiply, 1, device)
    return measure_seconds(product.multiply, 1, device)


def _build_curve(world: World, dtype: str, library: str, by_order: dict[int, Samples]) -> Curve:
    points = tuple(
        Point(order, s.value, s.n, s.spread, seconds=count_gemm_flops(order) / s.value, error=0.0)
        for order, s in sorted(by_order.items())
    )
    return Curve(
        resource="compute",
        name=library,
        mode="burst",
        x="order",
        unit="FLOP/s",
        ranks=world.size,
        nodes=world.nodes,
        points=points,
        dtype=dtype,
    )


def _explain_unmeasurable(device: torch.device, dtype: str) -> str:
    """Return why a type cannot be measured on this device; "" if it can."""
    if dtype == "tf32" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "this GPU has no TF32"
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "this GPU has no bfloat16"
    return ""


@contextmanager
def _use_tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TensorFloat-32 for float32 products in the body. Restores the earlier setting."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _find_torch_library(device: torch.device, dtype: str) -> str:
    if device.type == "cuda":
        return "hipblaslt" if torch.version.hip else "cublas"
    if dtype == "bfloat16" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return ONEDNN
    match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return f"torch {match.group(1) if match else 'blas'}"


def _find_numpy_library() -> str:
    config = np.show_config(mode="dicts")
    name = (config or {}).get("Build Dependencies", {}).get("blas", {}).get("name", "blas")
    return f"numpy {name}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
