"""`ahead_worker.py quick|long`: compiles the kernels for GPUs that need not be here, prints a table, fails on what must not be.

A program may ask for more shared memory than a target has, and is not chosen there; every kernel must have one that fits and spills
nothing. On Hopper and later, for which the sizes of blocks were chosen, none that fits may spill more than a few bytes.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import triton

from tests.workloads.moe.kernels.ahead import TARGETS, Compiled, compile_form, list_forms, list_programs

SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
FEW_BYTES = 16  # of two float32 programs for sm_100 that Triton 3.9 makes; 3.6 had none
BF16, F32 = torch.bfloat16, torch.float32


def quick() -> Iterator[Compiled]:
    """The smallest blocks of the kernel that is compiled fastest, and of the one that holds most, on every target."""
    plain = [(form, blocks) for form, blocks, _ in list_programs((BF16,)) if not blocks.described]
    programs = {form.name: (form, blocks) for form, blocks in plain if form.constants.get("ACTIVATION") != "gelu"}
    for target in TARGETS:
        for name in ("wide_rows", "hidden_gradient"):
            yield compile_form(*programs[name], BF16, target)


def everything() -> Iterator[Compiled]:
    """All programs on all targets. Descriptors are for Hopper and later."""
    for form, blocks, dtype in list_programs((BF16, F32)):
        for target in TARGETS:
            if not blocks.described or target in ("sm_90", "sm_100"):
                yield compile_form(form, blocks, dtype, target)


def main() -> None:
    print(f"Triton {triton.__version__}")
    print(
        f"{'target':6}  {'kernel and its settings':50}  {'type':4}  {'blocks':26}  registers   shared  spilled  product"
    )
    made, fits, wrong = [], defaultdict(list), []
    for one in quick() if sys.argv[1] == "quick" else everything():
        made.append(one)
        b = one.blocks
        sizes = f"{b.m}x{b.n}x{b.k} w{b.warps} s{b.stages}{' described' * b.described}" if b.m else ""
        large = one.shared_bytes > SHARED[one.target]
        print(
            f"{one.target:6}  {one.form:50}  {one.dtype:4}  {sizes:26}  {one.registers:9}  {one.shared_bytes:7}  {one.spilled:7}  "
            f"{one.product} {'too large' * large}".rstrip(),
            flush=True,
        )
        fits[one.target, one.form, one.dtype].append(not large and not one.spilled)
        if one.spilled > FEW_BYTES and not large and one.target in ("sm_90", "sm_100"):
            wrong.append(one)
    assert all(any(each) for each in fits.values()), [key for key, each in fits.items() if not any(each)]
    assert not wrong, wrong
    if sys.argv[1] == "long":
        assert {one.form.split()[0] for one in made} == {form.name for form in list_forms()}


if __name__ == "__main__":
    main()
