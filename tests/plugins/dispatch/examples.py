"""A file of `mlhpc dispatch` with made-up numbers, for the gallery and tests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mlhpc.plugins.dispatch.results import Dispatch, Interval, NotMeasured, Row


def make_row(controller: str, mode: str, spmd_s: float, overhead_s: float) -> Row:
    limit = Interval(19 * overhead_s, 18 * overhead_s, 20 * overhead_s) if overhead_s > spmd_s / 19 else None
    ratio = 1 + overhead_s / spmd_s
    return Row(
        controller=controller, version=f"{controller} 1.0", mode=mode, n=8, spmd_s=spmd_s,
        overhead_s=Interval(overhead_s, 0.95 * overhead_s, 1.05 * overhead_s),
        ratio=Interval(ratio, 0.98 * ratio, 1.02 * ratio),
        break_even_s=limit, predicted_s=19 * overhead_s if limit else None,
    )  # fmt: skip


def make_result(busy: float = 0.0) -> Dispatch:
    costs = {"mpi": (20e-6, {"sync": 50e-6, "ahead": 11e-6, "chained": 0.3e-6, "gang": 12e-6})}
    costs["ray"] = (80e-6, {"sync": 900e-6, "ahead": 500e-6, "chained": 9e-6, "gang": 510e-6})
    return Dispatch(
        system="north", date="2026-11-29T12:00:00Z", cpu="Made-up CPU", cores=2, busy=busy, ranks=2, depth=64, chain=128,
        clients=2, rows=tuple(make_row(name, mode, spmd, each) for name, (spmd, by) in costs.items() for mode, each in by.items()),
        not_measured=(NotMeasured("monarch", "torchmonarch is not installed (pip install 'mlhpc[monarch]')"),),
    )  # fmt: skip


def write_examples(root: Path) -> list[Path]:
    path = root / "dispatch.json"
    path.write_bytes(msgspec.json.encode(make_result()))
    return [path]
