"""FLOPs and bytes of the fused kernels by hardware counters beside those that `kernel_traffic` and the shapes give.

    ncu --csv --profile-from-start off --metrics … python benchmarks/kernels.py --counters 0 > ncu.csv
    python benchmarks/kernel_counters.py ncu.csv --shape 0

The metrics are those of `plugins/exchange/counters.py`, which reads the file. A closed form takes each input and each output once:
bytes of DRAM are above it where a cache misses, and below it where L2 keeps what the kernel before wrote. Exit code 1: FLOPs of a
kernel differ by more than 5 %, or a kernel is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernel_traffic import KEPT
from benchmarks.kernels import SHAPES, Shape
from mlhpc.suite.errors import InputError

if TYPE_CHECKING:
    from mlhpc.plugins.exchange.counters import Kernel

NEAR = 0.05


def compute_expected(shape: Shape) -> dict[str, tuple[float, float]]:
    """Compute FLOPs and bytes of each of five kernels in a training pass, all its launches together."""
    b = 4 if "32" in str(shape.dtype) else 2
    rows, hidden, tokens = shape.rows * shape.width * b, shape.rows * shape.hidden * b, shape.tokens * shape.width * b
    weight = shape.experts * shape.hidden * shape.width * b
    up = 2 if shape.activation == "swiglu" else 1
    kept, product = KEPT[shape.activation], 2.0 * shape.rows * shape.width * shape.hidden
    written = 1 + (0 if shape.activation == "relu" else kept)
    return {
        "hidden_rows": (up * product, rows + up * weight + written * hidden),
        # forward with the down projection, backward with up and gate
        "wide_rows": ((1 + up) * product, (1 + up) * (hidden + weight) + 2 * rows),
        "hidden_gradient": (product, rows + weight + kept * hidden + (1 + up) * hidden),
        "weight_gradient": ((1 + up) * product, (1 + up) * (hidden + weight) + 2 * rows),
        "add_rows": (0.0, 2 * (rows + tokens)),
    }


def compare(kernels: list[Kernel], expected: Mapping[str, tuple[float, float]]) -> tuple[list[str], bool]:
    """Render a line for each expected kernel; and whether all FLOPs are near."""
    lines = [f"{'':16} {'GFLOP counted':>14} {'/ expected':>10} {'GB DRAM':>9} {'/ expected':>10} {'ms':>8}"]
    good = True
    for name, (flops, moved) in expected.items():
        # a kernel's name ends where its arguments or numbers begin
        mine = [each for each in kernels if each.name.split("(")[0].strip() == name]
        if not mine:
            lines.append(
                f"{name:16} not in the file, which has {', '.join(sorted({each.name for each in kernels}))[:80]}"
            )
            good = False
            continue
        counted, dram = sum(each.flops for each in mine), sum(each.bytes.get("dram", float("nan")) for each in mine)
        ratio = counted / flops if flops else float("nan")
        good = good and (not flops or abs(ratio - 1) <= NEAR)
        seconds = sum(each.seconds for each in mine)
        lines.append(
            f"{name:16} {counted / 1e9:14.1f} {ratio:10.3f} {dram / 1e9:9.3f} {dram / moved:10.3f} {1e3 * seconds:8.3f}"
        )
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", type=int, default=0, choices=range(len(SHAPES)))
    args = parser.parse_args()
    from mlhpc.plugins.exchange.counters import read  # only here: the tests of the closed forms need no wing

    try:
        lines, good = compare(read("ncu", args.file), compute_expected(SHAPES[args.shape]))
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(SHAPES[args.shape], *lines, sep="\n")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
