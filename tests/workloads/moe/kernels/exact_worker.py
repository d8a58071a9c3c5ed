"""`exact_worker.py CASES [--begin I] [--step J] [--seconds S] [--layers L]`: cases of the kernels against dense float64 experts.

Runs on a GPU if there is one, else in Triton's interpreter. Case i is drawn from seed i. Every tensor that a kernel must write
whole is filled with NaN before; on a GPU a second run must give the same bits. Prints one line for a case that fails and a
count with the largest errors at the end.
"""

import argparse
import contextlib
import os
import random
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from mlhpc.workloads.moe.kernels import blocks, fused  # noqa: E402
from mlhpc.workloads.moe.kernels.blocks import Blocks  # noqa: E402
from mlhpc.workloads.moe.kernels.fused import Source, run_fused  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
NAMES = ("x", "weights", "up", "down", "gate", "up_b", "down_b")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
OTHER_BLOCKS: Counter[bool] = Counter()  # whether other blocks gave the same bits
SMALL = Blocks(16, 16, 16, 4, 2, 2)
WIDER = Blocks(32, 64, 32, 4, 2, 3)


@dataclass(frozen=True)
class Case:
    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int
    activation: str
    bias: bool
    load: str
    dtype: torch.dtype
    rows: bool  # sorted rows in place of tokens
    seed: int


def draw(seed: int) -> Case:
    """The case of a seed; the first ones are the corners."""
    rng = random.Random(seed)
    few = (0, 1, 5, 33) if not GPU else (0, 1, 7, 130, 700, 1500)
    widths = (8, 17, 32, 40) if not GPU else (16, 33, 64, 72, 128, 200, 256, 320)
    experts = rng.choice((1, 2, 3, 5) if not GPU else (1, 2, 8, 17, 64))
    case = Case(
        tokens=rng.choice(few[1:] if rng.random() < 0.9 else few), width=rng.choice(widths), hidden=rng.choice(widths),
        experts=experts, top_k=min(experts, rng.choice((1, 2, 2, 4))),
        activation=rng.choice(("relu", "gelu", "silu", "swiglu", "swiglu")), bias=rng.random() < 0.5,
        load=rng.choice(("random", "random", "skewed", "idle", "one")),
        dtype=rng.choice((torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)), rows=rng.random() < 0.25,
        seed=seed,
    )  # fmt: skip
    if not GPU:
        case = replace(
            case, dtype=rng.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16))
        )
    corner = ({"tokens": 0}, {"experts": 1, "top_k": 1}, {"load": "one", "top_k": 1}, {"rows": True, "tokens": 0})
    return replace(case, **corner[seed]) if seed < len(corner) else case


def choose_experts(case: Case, generator: torch.Generator) -> Tensor:
    """(T, K) distinct experts of each token."""
    chances_TE = torch.rand(case.tokens, case.experts, generator=generator)
    if case.load == "skewed":
        chances_TE[:, 0] += 0.8
    if case.load == "idle":
        chances_TE[:, case.experts // 2] -= 2
    if case.load == "one":
        chances_TE += 2.0 * torch.arange(case.experts)
    return chances_TE.topk(case.top_k, dim=1).indices


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor]:
    """Tokens, experts and weights of their choices, tensors of the experts, gradient of the output; in the case's data type."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    E, H, D = case.experts, case.hidden, case.width
    scale = 1 / max(D, H) ** 0.5
    tensors = [
        normal(E, H, D) * scale,
        normal(E, H, D) * scale,
        normal(E, H, D) * scale if case.activation == "swiglu" else None,
        normal(E, H) if case.bias else None,
        normal(E, D) if case.bias else None,
    ]
    experts_TK = choose_experts(case, generator)
    weights_TK = torch.rand(case.tokens, case.top_k, generator=generator) + 0.1
    return normal(case.tokens, D), experts_TK, weights_TK, tensors, normal(case.tokens, D)


def source_of(case: Case, experts_TK: Tensor) -> Source:
    flat_R = experts_TK.t().reshape(-1)
    order_R = flat_R.argsort(stable=True)
    slot_R = order_R.div(max(case.tokens, 1), rounding_mode="floor")
    tokens_N = order_R.remainder(max(case.tokens, 1))
    rows_E = torch.bincount(flat_R, minlength=case.experts)
    if case.rows:
        return Source(rows_E.to(DEVICE))
    return Source(rows_E.to(DEVICE), tokens_N.to(DEVICE), (tokens_N * case.top_k + slot_R).to(DEVICE))


def reference(case: Case, x: Tensor, share_XE: Tensor, tensors: list[Tensor | None]) -> Tensor:
    """Every expert on everything, times its share, in float64."""
    up_w, down_w, gate_w, up_b, down_b = tensors
    out = torch.zeros_like(x)
    for expert in range(case.experts):
        up = x @ up_w[expert].t()
        if up_b is not None:
            up = up + up_b[expert]
        if gate_w is not None:
            hidden = torch.nn.functional.silu(x @ gate_w[expert].t()) * up
        else:
            hidden = getattr(torch.nn.functional, case.activation)(up)
        row = hidden @ down_w[expert]
        out = out + share_XE[:, expert : expert + 1] * (row if down_b is None else row + down_b[expert])
    return out


def run_case(case: Case) -> dict[str, float]:
    """Largest error of the output and of each gradient, relative to the largest value or 1. Raises where bits differ."""
    x, experts_TK, weights_TK, tensors, d_out = inputs(case)
    flat_N = experts_TK.t().reshape(-1).sort(stable=True).values
    if case.rows:
        generator = torch.Generator().manual_seed(case.seed)
        x = torch.randn(len(flat_N), case.width, generator=generator).to(case.dtype)
        d_out = torch.randn(len(flat_N), case.width, generator=generator).to(case.dtype)
    runs = []
    for turn in range((3 if case.seed % 4 == 0 else 2) if GPU else 1):  # the third with other blocks
        vary_blocks(case, turn // 2)
        leaves = [t.to(DEVICE).requires_grad_() for t in (x, weights_TK, *tensors) if t is not None]
        given = iter(leaves)
        mine, mine_TK, *own = (None if t is None else next(given) for t in (x, weights_TK, *tensors))
        source, there = source_of(case, experts_TK), d_out.to(DEVICE)
        with no_waiting():
            y = run_fused(mine, None if case.rows else mine_TK, source, case.activation, tuple(own))
            y.backward(there)
        runs.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert all(a.equal(b) for a, b in zip(runs[0], runs[min(1, len(runs) - 1)], strict=True)), (
        "a second run gave other bits"
    )
    if len(runs) > 2:
        OTHER_BLOCKS[all(a.equal(b) for a, b in zip(runs[0], runs[2], strict=True))] += 1
    wide = [t.detach().to(DEVICE).double().requires_grad_() for t in (x, weights_TK, *tensors) if t is not None]
    given = iter(wide)
    x64, w64, *own64 = (None if t is None else next(given) for t in (x, weights_TK, *tensors))
    if case.rows:
        share_XE = torch.nn.functional.one_hot(flat_N, case.experts).double().to(DEVICE)
    else:
        share_XE = torch.zeros(case.tokens, case.experts, dtype=torch.float64, device=DEVICE)
        share_XE = share_XE.scatter_add(1, experts_TK.to(DEVICE), w64)
    want = reference(case, x64, share_XE, own64)
    want.backward(d_out.to(DEVICE).double())
    wanted = [want.detach(), *(leaf.grad for leaf in wide if leaf.grad is not None)]
    names = [name for name, t in zip(NAMES, (x, weights_TK, *tensors), strict=True)
             if t is not None and not (case.rows and name == "weights")]  # fmt: skip
    return {name: error(a, b) for name, a, b in zip(("y", *names), runs[0], wanted, strict=True)}


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """On a GPU, an error where the host would wait for it."""
    if GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if GPU:
            torch.cuda.set_sync_debug_mode("default")


def error(found: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        assert found.shape == wanted.shape
        return 0.0
    assert found.isfinite().all(), "not finite: read or left unwritten"
    return float((found.double() - wanted).abs().max() / max(1.0, float(wanted.abs().max())))


def limit(case: Case, name: str) -> float:
    """Rounding decides the slope of relu where it bends: one of a million hidden values may have the other one there."""
    bent = GPU and case.activation == "relu" and name in ("x", "up", "up_b")
    return LIMITS[case.dtype] if not bent else max(LIMITS[case.dtype], 3e-2)


def poisoned(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.empty(shape, dtype=like.dtype if dtype is None else dtype, device=like.device)
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-(1 << 30))


def multiply_halves_as_floats() -> None:
    """The interpreter multiplies the bits of bfloat16 as integers; a test of what a GPU does needs their values."""
    from triton.runtime import interpreter

    real = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return real(self, *(as_float(handle) for handle in (a, b)), *rest)

    def as_float(handle):
        data = handle.data
        if data.dtype == np.uint16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return types.SimpleNamespace(data=data.astype(np.float32), dtype=interpreter.tl.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot


def aligned(case: Case) -> bool:
    """Descriptors want rows of whole 16 bytes."""
    return case.width % 8 == case.hidden % 8 == 0


def vary_blocks(case: Case, shift: int = 0) -> None:
    """On a GPU one of the blocks that may be chosen, another in each case; in the interpreter blocks that make many tiles."""

    def run(kernel, key, x, call, *, describable):
        listed = blocks.list_candidates(kernel, x.dtype) if GPU else (SMALL, WIDER)
        if not GPU and aligned(case) and case.tokens:
            listed = (*listed, replace(SMALL, described=True))
            describable = True
        listed = [each for each in listed if describable or not each.described]
        first = (case.seed + shift) % len(listed)
        for each in listed[first:] + listed[:first]:
            try:
                return call(each)
            except Exception as error:  # blocks that do not fit on this GPU, which the choice by time leaves out too
                if type(error).__name__ != "OutOfResources":
                    raise
        raise AssertionError(f"no blocks of {kernel} fit")

    fused.BLOCK_TIMINGS.run = run


def compare_layers(seed: int) -> None:
    """A layer whose back end is triton gives what one with the loop does: dropless (fused), with a capacity, and in evaluation."""
    from mlhpc.workloads.moe.config import MoEConfig
    from mlhpc.workloads.moe.layer import MoELayer

    vary_blocks(draw(seed))
    for mode, training in (("dropless", True), ("dropless", False), ("capacity", True)):
        found = []
        for backend in ("loop", "triton"):
            torch.manual_seed(seed)
            activation = ("swiglu", "relu", "gelu", "silu")[seed % 4]
            config = MoEConfig(experts=4, hidden=20, activation=activation, bias=True, dispatch=mode, backend=backend)
            layer = MoELayer(24, config).to(DEVICE).train(training)
            x = torch.randn(30, 24).to(DEVICE).requires_grad_()
            out = layer(x)
            (out.y_TD.square().sum() + out.auxiliary_loss).backward()
            found.append([out.y_TD.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
        for mine, wanted in zip(*found, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=2e-5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=int)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument(
        "--layers", type=int, default=0, help="then as many layers of each kind against the back end loop"
    )
    options = parser.parse_args()
    fused.make_output_tensor = poisoned
    if not GPU:
        multiply_halves_as_floats()
    worst: dict[str, float] = {}
    ran, failed, began = Counter(), 0, time.monotonic()
    for seed in range(options.begin, options.cases, options.step):
        if time.monotonic() - began > options.seconds:
            break
        case = draw(seed)
        try:
            errors = run_case(case)
            wrong = {name: f"{value:.1e}" for name, value in errors.items() if not value < limit(case, name)}
            assert not wrong, wrong
        except Exception:
            failed += 1
            print(f"FAILED {case}\n{traceback.format_exc(limit=-8)[-3000:]}", flush=True)
            if failed > 5:
                break
            continue
        kind = str(case.dtype).removeprefix("torch.")
        ran[kind] += 1
        worst[kind] = max(worst.get(kind, 0.0), *errors.values())
    said = ", ".join(f"{ran[kind]} {kind} largest error {worst[kind]:.1e}" for kind in sorted(ran))
    if OTHER_BLOCKS:
        print(f"other blocks gave the same bits in {OTHER_BLOCKS[True]} of {OTHER_BLOCKS.total()} cases exact")
    for seed in range(options.layers):
        compare_layers(seed)
    print(f"{sum(ran.values())} cases exact ({said}), {failed} failed, on {DEVICE.type}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
