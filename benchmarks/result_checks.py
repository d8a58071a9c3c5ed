"""What the checks of results of `mlhpc preflight node` find of single flipped bits, and how often they alarm without one.

    python -m benchmarks.result_checks --healthy 10000 --flips 100 -o table.txt

A product of normal data has a bound: flips that change an element by more than twice of it must be found, and the table
says how many of the others are, by bit. Healthy repetitions state the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.plugins.fleet.checks import (
    check_product,
    compute_product_bound,
    draw_integers,
    make_convolution_check,
    make_product_check,
    make_repeat_check,
    make_storage_check,
    make_sum_check,
)

CPU, ORDER, RANKS = torch.device("cpu"), 512, 4
SHARES = {"product": 0.4, "convolution": 0.2, "repeat": 0.2, "all_reduce": 0.1, "storage": 0.1}
CHANCE = random.Random(0)


def flip(value: Tensor) -> tuple[int, float, float]:
    """Flip a bit of an element. Returns the bit, the change, and the change over the element."""
    flat, bit = value.view(-1), CHANCE.randrange(32)
    place = CHANCE.randrange(flat.numel())
    before = float(flat[place])
    flat.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    change = abs(float(flat[place]) - before)
    return bit, change, change / abs(before) if before else float("inf")


def add_others(values: Tensor) -> None:
    """Add the integers of the other ranks, one after the other, as an all-reduce would."""
    index = torch.arange(len(values))
    for rank in range(1, RANKS):
        values += ((index * (2 * rank + 1) * 40_503 + add_others.turn * 9_973 + rank) % ((1 << 23) // RANKS)).float()  # type: ignore[attr-defined]
    add_others.turn += 1  # type: ignore[attr-defined]


def list_healthy_rows(repetitions: int, folder: Path) -> list[str]:
    add_others.turn = 0  # type: ignore[attr-defined]
    checks = {
        "product": make_product_check(ORDER, CPU, 0),
        "convolution": make_convolution_check(CPU, 0),
        "repeat": make_repeat_check(ORDER, CPU, 0),
        "all_reduce": make_sum_check(0, RANKS, CPU, add_others),
        "storage": make_storage_check(folder / "file"),
    }
    rows = [f"{'check':<12} {'healthy':>8} {'alarms':>7} {'largest error / bound':>22}"]
    for name, check in checks.items():
        values = [check() for _ in range(int(SHARES[name] * repetitions))]
        rows.append(f"{name:<12} {len(values):>8} {sum(value > 1 for value in values):>7} {max(values):>22.3g}")
    load, cpus = os.getloadavg()[1], os.cpu_count()
    return [*rows, f"other programs ran: load {load:.1f} on {cpus} processors at the end"]


def list_flip_rows(flips: int, folder: Path) -> list[str]:
    found: Counter[str] = Counter()
    by_bit: Counter[tuple[int, bool]] = Counter()
    smallest, above, total = float("inf"), 0, 0
    while above < flips:
        a, b, seen = torch.randn(ORDER, ORDER), torch.randn(ORDER, ORDER), []

        def multiply(a: Tensor, b: Tensor, seen: list[tuple[int, float, float]] = seen) -> Tensor:
            c = torch.mm(a, b)
            seen.append(flip(c))
            return c

        bound = compute_product_bound(a, b)
        hit = check_product(multiply, a, b, bound) > 1.0
        (bit, change, relative), total = seen[0], total + 1
        by_bit[bit, hit] += 1
        if hit:
            smallest = min(smallest, relative)
        if not change <= 2 * bound:
            above += 1
            found["product, normal data, above twice the bound"] += hit
    kinds: dict[str, Callable[[], bool]] = {
        "product, integers, any bit": lambda: spoiled_product(),
        "convolution, integers, by more than a half": lambda: make_convolution_check(CPU, 0, spoil_convolution)() > 1.0,
        "all_reduce, any bit": lambda: make_sum_check(0, 1, CPU, spoil)() > 1.0,
        "storage, any bit": lambda: make_storage_check(folder / "file", read_spoiled)() > 1.0,
    }
    for name, once in kinds.items():
        found[name] = sum(once() for _ in range(flips))
    rows = [f"{'one flipped bit in':<46} {'flips':>6} {'found':>6}"]
    rows += [f"{name:<46} {flips:>6} {number:>6}" for name, number in found.items()]
    missed = sorted({bit for bit, hit in by_bit if not hit})
    hits = sum(number for (_, hit), number in by_bit.items() if hit)
    rows.append(f"product of normal data, any bit: {hits} of {total} found; missed were bits {missed} of 0 to 31")
    rows.append(f"smallest change found: {smallest:.2g} of the element")
    return rows


def spoil(values: Tensor) -> None:
    while flip(values)[1] == 0.0:  # the sign of a zero
        pass


def spoiled_product() -> bool:
    generator = torch.Generator().manual_seed(CHANCE.randrange(2**31))
    a, b = (draw_integers((ORDER, ORDER), generator) for _ in range(2))

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        c = torch.mm(a, b)
        spoil(c)
        return c

    return check_product(multiply, a, b, 0.0) > 1.0


def spoil_convolution(*inputs: Tensor, **options: int) -> Tensor:
    found = F.conv2d(*inputs, **options)
    while flip(found)[1] <= 0.5:
        pass
    return found


def read_spoiled(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[CHANCE.randrange(len(content))] ^= 1 << CHANCE.randrange(8)
    return bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--healthy", type=int, default=10_000)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        command = f"python -m benchmarks.result_checks --healthy {options.healthy} --flips {options.flips}"
        head = f"# {command}; order {ORDER}, torch {torch.__version__}"
        lines = [head, *list_flip_rows(options.flips, Path(name)), *list_healthy_rows(options.healthy, Path(name))]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
