"""Compiles the kernels for GPUs that this machine does not have, and reads registers, shared memory and spills from the result.

Imports Triton, which brings the assembler of CUDA; not with TRITON_INTERPRET=1, where there is nothing to compile.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mlhpc.workloads.moe.kernels import fused, gradients, products
from mlhpc.workloads.moe.kernels.blocks import Blocks, list_candidates

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INTEGERS = {
    "tokens_N": "*i64", "choices_N": "*i64", "places_R": "*i64", "rows_E": "*i64", "ends_E": "*i32", "tiles_P3": "*i32",
}  # fmt: skip
FLOATS = {"weights_R": "*fp32", "parts_RC": "*fp32"}
WARPS, STAGES = 4, 3  # Triton's own, of kernels without a choice
PRODUCT = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma")


@dataclass(frozen=True)
class Form:
    """A kernel with its settings: one program to compile."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    described: Mapping[str, Callable[[Blocks], tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What one program needs on a target. ``spilled`` bytes (gfx942: registers); ``product`` its matrix instruction, if any."""

    target: str
    form: str
    dtype: str
    blocks: Blocks
    registers: int
    shared_bytes: int
    spilled: int
    product: str


def _across(blocks: Blocks) -> tuple[int, ...]:
    return 1, blocks.n, blocks.k


def _along(blocks: Blocks) -> tuple[int, ...]:
    return 1, blocks.k, blocks.n


def _rows(blocks: Blocks) -> tuple[int, ...]:
    return blocks.m, blocks.k


def _turned(blocks: Blocks) -> tuple[int, ...]:
    return blocks.k, blocks.m


HIDDEN = {"up_EHD": _across, "gate_EHD": _across, "down_EHD": _across}
TURNED = {"one_NH": _turned, "two_NH": _turned}
WIDE = {"one_NH": _rows, "two_NH": _rows, "one_EHD": _along, "two_EHD": _along}


def list_forms() -> Iterator[Form]:
    """All kernels with the settings that differ most: gathered with a bias and swiglu, and without all of these."""
    for activation, bias in (("swiglu", False), ("gelu", True), ("relu", False)):
        two = "_two" * (activation == "swiglu")
        common = {"GATHER": True, "ACTIVATION": activation}
        yield Form("hidden_rows" + two, products.hidden_rows, {**common, "BIAS": bias, "KEEP": True}, HIDDEN)
        yield Form("hidden_gradient", gradients.hidden_gradient, common, HIDDEN)
    for two_sums in (False, True):
        yield Form("wide_rows", products.wide_rows, {"TWO": two_sums, "BIAS": not two_sums}, WIDE)
        sums = {"TWO": two_sums, "GATHER": True}
        yield Form("weight_gradient" + "_two" * two_sums, gradients.weight_gradient, sums, TURNED)
    yield Form("locate_tiles", products.locate_tiles, {"M": 128, "E2": 128, "P2": fused.TILES_AT_ONCE})
    added = {"K": 8, "WEIGHTED": True, "BLOCK_T": fused.ADD_TOKENS, "BLOCK_D": fused.ADD_COLUMNS}
    yield Form("add_rows", products.add_rows, added)
    summed = {"GATHER": True, "BLOCK_N": fused.BIAS_ROWS, "BLOCK_X": fused.BIAS_COLUMNS}
    yield Form("bias_gradient", gradients.bias_gradient, summed)
    shared = {"BLOCK_M": fused.BIAS_ROWS, "BLOCK_D": fused.BIAS_COLUMNS}
    yield Form("bias_share", gradients.bias_share, shared)


def compile_form(form: Form, blocks: Blocks, dtype: torch.dtype, target: str) -> Compiled:
    """Compile for widths that are multiples of 16."""
    names, given = form.kernel.arg_names, {**blocks.arguments(), "PRECISION": "ieee", "EVEN": True}
    given |= {"DESCRIBED": blocks.described, "TURNED": dtype == torch.float32}
    given |= form.constants
    constants = {name: value for name, value in given.items() if name in names}
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    signature, aligned = {}, {}
    for at, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        integer = "_" not in name
        signature[name] = "i32" if integer else {**INTEGERS, **FLOATS}.get(name, f"*{TYPES[dtype]}")
        if blocks.described and name in form.described:
            shape = ", ".join(str(size) for size in form.described[name](blocks))
            signature[name] = f"tensordesc<{TYPES[dtype]}[{shape}]>"
        elif not integer or name in ("D", "H"):
            aligned[(at,)] = [["tt.divisibility", 16]]
    indexed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=form.kernel, signature=signature, constexprs=indexed, attrs=aligned)
    program = triton.compile(source, target=TARGETS[target], options=options)
    text = program.asm["amdgcn" if "amdgcn" in program.asm else "ptx"]
    registers, spilled = _read_amd(text) if "amdgcn" in program.asm else _read_cuda(program.asm["cubin"])
    product = PRODUCT.search(text)
    settings = " ".join(str(value) for value in form.constants.values())
    return Compiled(
        target, f"{form.name} {settings}", TYPES[dtype], blocks, registers, program.metadata.shared, spilled,
        product.group() if product else "",
    )  # fmt: skip


def list_programs(dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[Form, Blocks, torch.dtype]]:
    """Every form with every block size that may be chosen for it."""
    for form in list_forms():
        for dtype in dtypes:
            for blocks in list_candidates(form.name, dtype) or (Blocks(0, 0, 0, WARPS, STAGES),):
                yield form, blocks, dtype


def _read_cuda(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, where spilled registers go."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack)


def _read_amd(text: str) -> tuple[int, int]:
    """Vector registers (accumulators among them) of a thread and those spilled."""
    vector, spilled = (re.findall(rf"\.{name}:\s*(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count"))
    return int(vector[0]), int(spilled[0])
