"""Hardware counters from the CSV of ncu, rocprof, likwid-perfctr or perf stat, as FLOPs and bytes by kernel. Torch-free.

What a file lacks is an error that names the counters wanted, never a zero. Formulas are those of the vendors'
documentation and of Yang et al., arXiv:2009.05257 (Nsight); levels are called as in a ceilings file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

VERSION = 1
WHOLE = "(whole program)"  # tools that do not tell kernels apart


@dataclass
class Kernel:
    """Sums over all launches. ``bytes`` by memory level."""

    name: str
    count: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, flops: float, moved: Mapping[str, float]) -> None:
        """One more launch."""
        self.count += 1
        self.seconds += seconds
        self.flops += flops
        for level, amount in moved.items():
            self.bytes[level] = self.bytes.get(level, 0.0) + amount


def read(tool: str, path: Path) -> list[Kernel]:
    """The kernels of a tool's file, longest first. ValueError names the file and what it lacks."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            found = TOOLS[tool](file.read().splitlines())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no kernel in it; is it CSV of {tool}?")
    return sorted(found, key=lambda kernel: -kernel.seconds)


def _ncu(lines: Sequence[str]) -> list[Kernel]:
    """`ncu --csv`, one metric a line, or `--page raw`, one launch a line with a line of units."""
    body = [line for line in lines if not line.startswith("==") and line.strip()]
    rows = list(csv.DictReader(body))
    if not rows or "Kernel Name" not in rows[0]:
        raise ValueError("no column 'Kernel Name'; write it with ncu --csv")
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    if "Metric Name" in rows[0]:
        for row in rows:
            metrics = launches.setdefault(row["ID"], (row["Kernel Name"], {}))[1]
            metrics[row["Metric Name"]] = _number(row["Metric Value"]) * _unit(row["Metric Unit"])
    else:
        units, *rows = rows
        for row in rows:
            known = {k: v for k, v in row.items() if k and "__" in k and v}
            launches[row["ID"]] = (row["Kernel Name"], {k: _number(v) * _unit(units[k]) for k, v in known.items()})
    return _summed((name, *_ncu_launch(metrics)) for name, metrics in launches.values())


def _ncu_launch(metrics: Mapping[str, float]) -> tuple[float, float, dict[str, float]]:
    seconds = _first(metrics, "gpu__time_duration.sum", "gpu__time_duration.avg")
    flops, seen = 0.0, False
    for precision in "hfd":
        for operation, weight in (("add", 1), ("mul", 1), ("fma", 2)):
            name = f"sm__sass_thread_inst_executed_op_{precision}{operation}_pred_on.sum"
            flops, seen = flops + weight * metrics.get(name, 0.0), seen or name in metrics
    tensor = {k: v for k, v in metrics.items() if re.fullmatch(r"sm__ops_path_tensor_src_(?!int)\w+\.sum", k)}
    plain = {k: v for k, v in tensor.items() if "sparsity" not in k}
    flops += sum((plain or tensor).values())
    if not seen and not tensor:
        wanted = "sm__sass_thread_inst_executed_op_{hadd,…,dfma}_pred_on.sum and sm__ops_path_tensor_src_*.sum"
        raise ValueError(f"no counter of FLOPs; collect {wanted}")
    levels = {"L1": "l1tex__t_bytes.sum", "L2": "lts__t_bytes.sum", "dram": "dram__bytes.sum"}
    moved = {level: metrics[name] for level, name in levels.items() if name in metrics}
    if not moved:
        raise ValueError(f"no counter of bytes; collect {', '.join(levels.values())}")
    return seconds, flops, moved


def _rocprof(lines: Sequence[str]) -> list[Kernel]:
    """rocprof's results.csv: one launch a line, a column per counter (CDNA2 and later)."""
    rows = list(csv.DictReader(lines))

    def launches() -> Iterator[tuple[str, float, float, dict[str, float]]]:
        for row in rows:
            name = row.get("KernelName") or row.get("Kernel_Name")
            if not name:
                raise ValueError("no column 'KernelName' or 'Kernel_Name'")
            counters = {k: float(v) for k, v in row.items() if k and v and re.fullmatch(r"[-+.\deE]+", v)}
            yield name, *_rocprof_launch(counters)

    return _summed(launches())


def _rocprof_launch(counters: Mapping[str, float]) -> tuple[float, float, dict[str, float]]:
    begin, end = (
        counters.get(a, counters.get(b)) for a, b in (("BeginNs", "Start_Timestamp"), ("EndNs", "End_Timestamp"))
    )
    duration = counters.get("DurationNs", None if begin is None or end is None else end - begin)
    if duration is None:
        raise ValueError("no duration; collect with --timestamp on")
    flops, seen = 0.0, False
    for width in ("F16", "F32", "F64"):
        for operation, weight in (("ADD", 1), ("MUL", 1), ("FMA", 2), ("TRANS", 1)):
            name = f"SQ_INSTS_VALU_{operation}_{width}"
            flops, seen = flops + 64 * weight * counters.get(name, 0.0), seen or name in counters
    for width in ("F16", "BF16", "F32", "F64"):
        name = f"SQ_INSTS_VALU_MFMA_MOPS_{width}"
        flops, seen = flops + 512 * counters.get(name, 0.0), seen or name in counters
    if not seen:
        raise ValueError(
            "no counter of FLOPs; collect SQ_INSTS_VALU_{ADD,MUL,FMA,TRANS}_F* and SQ_INSTS_VALU_MFMA_MOPS_*"
        )
    moved = {}
    for prefix in ("TCC_EA_", "TCC_EA0_"):
        reads, writes = counters.get(f"{prefix}RDREQ_sum"), counters.get(f"{prefix}WRREQ_sum")
        if reads is not None and writes is not None:
            small, large = counters.get(f"{prefix}RDREQ_32B_sum", 0.0), counters.get(f"{prefix}WRREQ_64B_sum", writes)
            moved["dram"] = 64 * reads - 32 * small + 32 * writes + 32 * large
    if "TCP_TCC_READ_REQ_sum" in counters:
        moved["L2"] = 64 * (counters["TCP_TCC_READ_REQ_sum"] + counters.get("TCP_TCC_WRITE_REQ_sum", 0.0))
    if "TCP_TOTAL_CACHE_ACCESSES_sum" in counters:
        moved["L1"] = 64 * counters["TCP_TOTAL_CACHE_ACCESSES_sum"]
    if not moved:
        raise ValueError("no counter of bytes; collect TCC_EA_{RDREQ,RDREQ_32B,WRREQ,WRREQ_64B}_sum")
    return duration * 1e-9, flops, moved


def _likwid(lines: Sequence[str]) -> list[Kernel]:
    """`likwid-perfctr -O`: the metric tables of each region of the marker API, or of the whole program."""
    regions: dict[str, dict[str, list[float]]] = {}
    region = None
    for cells in csv.reader(lines):
        if cells and cells[0] == "TABLE":
            is_metric = any(re.fullmatch(r"Group \d+ Metric", cell) for cell in cells)
            named = next((cell.removeprefix("Region ") for cell in cells if cell.startswith("Region ")), WHOLE)
            region = regions.setdefault(named, {}) if is_metric else None
        elif cells and cells[0] == "STRUCT":
            region = None
        elif region is not None and len(cells) > 1 and cells[0] != "Metric":
            region.setdefault(cells[0], [_number(cell) for cell in cells[1:] if re.fullmatch(r"[-+.\deE]+", cell)])
    found = []
    for name, metrics in regions.items():
        runtime = metrics.get("Runtime (RDTSC) [s]")
        rates = [metrics[unit] for unit in ("SP [MFLOP/s]", "DP [MFLOP/s]", "HP [MFLOP/s]") if unit in metrics]
        volumes = {
            "L2": "L2 data volume [GBytes]",
            "L3": "L3 data volume [GBytes]",
            "dram": "Memory data volume [GBytes]",
        }
        moved = {level: 1e9 * sum(metrics[key]) for level, key in volumes.items() if key in metrics}
        if not runtime or not rates or not moved:
            raise ValueError(
                f"region {name}: needs runtime, MFLOP/s and a data volume; measure groups such as MEM_SP or MEM_DP"
            )
        flops = sum(
            1e6 * rate * seconds for per_thread in rates for rate, seconds in zip(per_thread, runtime, strict=False)
        )
        kernel = Kernel(name)
        kernel.add(max(runtime), flops, moved)
        found.append(kernel)
    return found


# FLOPs per count. Intel counts a fused multiply-add twice itself; AMD's event counts operations
PERF_FLOPS = {
    **{
        f"fp_arith_inst_retired.{kind}_single": n
        for kind, n in (("scalar", 1), ("128b_packed", 4), ("256b_packed", 8), ("512b_packed", 16))
    },
    **{
        f"fp_arith_inst_retired.{kind}_double": n
        for kind, n in (("scalar", 1), ("128b_packed", 2), ("256b_packed", 4), ("512b_packed", 8))
    },
    **{"fp_ret_sse_avx_ops.all": 1},
}
CACHE_LINE = 64


def _perf(lines: Sequence[str]) -> list[Kernel]:
    """`perf stat -x,`: the whole program; per-socket lines of uncore events are summed."""
    seconds = None
    flops, moved, seen = 0.0, 0.0, False
    for cells in csv.reader(line for line in lines if line.strip() and not line.startswith("#")):
        position = next((i for i, cell in enumerate(cells) if _perf_event(cell)), None)
        if position is None or position < 2:
            continue
        value, unit, event = cells[position - 2], cells[position - 1], cells[position].removesuffix(":u").lower()
        if not re.fullmatch(r"[-+.\deE]+", value):
            raise ValueError(f"{event}: {value!r} is not a count (the event was not measured)")
        amount = float(value)
        if event == "duration_time":
            seconds = amount * (1e-9 if unit in {"", "ns"} else _unit(unit))
        elif "cas_count" in event:
            moved += amount * (_unit(unit) if unit else CACHE_LINE)
        else:
            flops, seen = flops + PERF_FLOPS[event] * amount, True
    if seconds is None or not seen or not moved:
        raise ValueError(
            f"needs duration_time, cas_count_read and cas_count_write of uncore_imc, and of {', '.join(PERF_FLOPS)} those there are"
        )
    kernel = Kernel(WHOLE)
    kernel.add(seconds, flops, {"dram": moved})
    return [kernel]


def _perf_event(cell: str) -> bool:
    name = cell.removesuffix(":u").lower()
    return name == "duration_time" or name in PERF_FLOPS or "cas_count" in name


TOOLS: Mapping[str, Callable[[Sequence[str]], list[Kernel]]] = {
    "ncu": _ncu,
    "rocprof": _rocprof,
    "likwid": _likwid,
    "perf": _perf,
}


def _summed(launches: Iterable[tuple[str, float, float, dict[str, float]]]) -> list[Kernel]:
    kernels: dict[str, Kernel] = {}
    for name, seconds, flops, moved in launches:
        kernels.setdefault(name, Kernel(name)).add(seconds, flops, moved)
    return list(kernels.values())


def _first(metrics: Mapping[str, float], *names: str) -> float:
    for name in names:
        if name in metrics:
            return metrics[name]
    raise ValueError(f"no {names[0]}; collect it")


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


_UNITS = {
    **{"": 1.0, "inst": 1.0, "byte": 1.0, "bytes": 1.0, "%": 1.0, "cycle": 1.0, "block": 1.0, "thread": 1.0},
    **{"second": 1.0, "s": 1.0, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6, "nsecond": 1e-9, "ns": 1e-9},
    **{"kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "mb": 1e6},
}


def _unit(text: str) -> float:
    """What a value in this unit is multiplied with; units of metrics that are not used here pass as 1."""
    return _UNITS.get(text.strip().lower(), 1.0)
