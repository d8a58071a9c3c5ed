"""`mlhpc ceilings counters`: converts the CSV of ncu, rocprof, likwid-perfctr or perf stat to a counters file.

A missing counter is an error that names the counters to collect, never a zero. The formulas are those of the vendors'
documentation and of Yang et al., arXiv:2009.05257 (Nsight). Memory levels have the names of a ceilings file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import click

from mlhpc.suite.cli.options import IntegerRange, output_option
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line, read_bytes, render_duration
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.performance.ceilings_file import refuse_existing, write

VERSION = 1
WHOLE_PROGRAM = "(whole program)"  # the kernel of tools that do not distinguish kernels
NUMBER = re.compile(r"[-+.\deE]+")


@dataclass
class Kernel:
    """Sums over all launches of a kernel. ``bytes`` is by memory level."""

    name: str
    count: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, flops: float, moved: Mapping[str, float]) -> None:
        """Add one launch; ``moved`` is bytes by memory level."""
        self.count += 1
        self.seconds += seconds
        self.flops += flops
        for level, amount in moved.items():
            self.bytes[level] = self.bytes.get(level, 0.0) + amount


def read(tool: str, path: Path) -> list[Kernel]:
    """Read the kernels in a file of a tool of `TOOLS`, longest first. InputError names the file and what it lacks."""
    content = read_bytes(path, read_limits().file, given=True)
    try:
        kernels = TOOLS[tool](content.decode("utf-8", "replace").splitlines())
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if not kernels:
        raise InputError(f"{path}: no kernel found; expected CSV output of {tool}")
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


NCU_FLOPS = {
    f"sm__sass_thread_inst_executed_op_{precision}{operation}_pred_on.sum": weight
    for precision in "hfd"
    for operation, weight in (("add", 1), ("mul", 1), ("fma", 2))
}
# Bytes of all requests to a level, reads and writes together.
NCU_BYTES = {"L1": "l1tex__t_bytes.sum", "L2": "lts__t_bytes.sum", "dram": "dram__bytes.sum"}
NCU_WANTED = "sm__sass_thread_inst_executed_op_{hadd,…,dfma}_pred_on.sum and sm__ops_path_tensor_src_*.sum"


# Sums that may count floating-point operations. Those with derived__ are ncu's own sums of the same counters
NCU_FLOP_LIKE = re.compile(
    r"(?!derived__)\w*(ops_path|tensor|flop|inst_executed_op_"
    r"(?!bit|control|conversion|integer|inter_thread|memory|misc|uniform))\w*\.sum"
)
NCU_TENSOR = re.compile(r"sm__ops_path_tensor_src_(?P<integer>int)?\w+\.sum")
Metrics = Mapping[str, tuple[str, str]]  # value and unit, as the file has them


def _parse_ncu(lines: Sequence[str]) -> list[Kernel]:
    """Parse `ncu --csv`: one metric per line; with `--page raw` one launch per line after a line of units."""
    rows = _read_ncu_rows(lines)
    _refuse_several_ranks(row for row in rows if row["ID"])
    launches = _group_ncu_metrics(rows) if rows and "Metric Name" in rows[0] else _parse_ncu_page(rows)
    used = _select_ncu_metrics({name: cell for _, metrics in launches.values() for name, cell in metrics.items()})
    for number, (_, metrics) in launches.items():
        if lacking := [name for name in used if name not in metrics]:
            raise InputError(f"launch {number} has no {lacking[0]}, which others have; expected the whole file")
    return _sum_launches((name, *_compute_ncu_launch(metrics, used)) for name, metrics in launches.values())


def _read_ncu_rows(lines: Sequence[str]) -> list[dict[str, str]]:
    """Read the table. Messages of ncu (which begin with ==) and lines of the program stand before it and in it."""
    head = next((n for n, line in enumerate(lines) if "Kernel Name" in next(csv.reader([line]), ())), None)
    if head is None:
        raise InputError("no column 'Kernel Name'; write the file with: ncu --csv")
    body = [line for line in lines[head:] if not line.startswith("==") and line.strip()]
    rows = list(csv.DictReader(body))
    for line, row in zip(body[1:], rows, strict=False):
        if None in row or None in row.values():
            raise InputError(f"{line[:60]!r} is no row of the table; expected as many cells as in its head")
    return rows


# Columns whose values are those of one rank: ncu's, rocprofv3's, rocprof's
ONE_RANK = ("Host Name", "Process ID", "Device", "Process_Id", "Agent_Id", "GPU_ID", "pid", "gpu-id")


def _refuse_several_ranks(rows: Iterable[Mapping[str, str]]) -> None:
    """Raise InputError if launches are of several processes or devices: their sum is not the work of one rank."""
    seen: dict[str, str] = {}
    for row in rows:
        for name in ONE_RANK:
            if (value := row.get(name)) is not None and seen.setdefault(name, value) != value:
                raise InputError(
                    f"has launches of {name} {seen[name]} and {value}; expected those of one rank: collect each rank "
                    "into a file of its own"
                )


def _group_ncu_metrics(rows: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, dict[str, tuple[str, str]]]]:
    """Group kernel name and metrics of each launch by its id, from one metric per row."""
    launches: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {}
    for row in rows:
        name, cell = _rename_ncu_metric(row["Metric Name"]), (row["Metric Value"], row["Metric Unit"])
        # A metric stands in several sections of a launch, with one value
        if launches.setdefault(row["ID"], (row["Kernel Name"], {}))[1].setdefault(name, cell) != cell:
            raise _refuse_twice(row, name)
    return launches


def _parse_ncu_page(rows: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, dict[str, tuple[str, str]]]]:
    """Parse kernel name and metrics of each launch by its id, from one launch per row. The first row has the units."""
    units, *launched = rows or ({},)
    launches: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {}
    for row in launched:
        if row["ID"] in launches:
            raise _refuse_twice(row, "a row")
        cells = {
            _rename_ncu_metric(name): (value, units[name]) for name, value in row.items() if "__" in name and value
        }
        launches[row["ID"]] = row["Kernel Name"], cells
    return launches


def _refuse_twice(row: Mapping[str, str], what: str) -> InputError:
    return InputError(
        f"launch {row['ID']} of {row['Kernel Name']} has {what} twice; expected one file of ncu, not several in one"
    )


def _rename_ncu_metric(name: str) -> str:
    """Return a metric's name by SM: the sum over an SM's sub-partitions (smsp__) is the sum over SMs."""
    return f"sm__{name.removeprefix('smsp__')}" if name.startswith("smsp__") else name


def _select_ncu_metrics(metrics: Metrics) -> list[str]:
    """Select the metrics that seconds, FLOPs and bytes are made of.

    InputError if one lacks, and for a counter of floating-point operations that is not known: it would count as zero.
    """
    seconds = next((name for name in ("gpu__time_duration.sum", "gpu__time_duration.avg") if name in metrics), None)
    if seconds is None:
        raise InputError("no metric gpu__time_duration.sum; collect it with ncu --metrics")
    plain = [name for name in NCU_FLOPS if name in metrics]
    tensor = [name for name in metrics if (found := NCU_TENSOR.fullmatch(name)) and not found["integer"]]
    for name in metrics:
        if not NCU_FLOP_LIKE.fullmatch(name) or name in NCU_FLOPS or NCU_TENSOR.fullmatch(name):
            continue
        # Instructions of a kind whose operations are counted
        width = re.search(r"_op_fp(16|32|64)_", name)
        letter = {"16": "h", "32": "f", "64": "d"}[width[1]] if width else ""
        if not (any(f"_op_{letter}" in each for each in plain) if width else "pipe_tensor" in name and tensor):
            raise InputError(f"{name} counts operations in a way that is not known; collect {NCU_WANTED} in its place")
    if not plain and not tensor:
        raise InputError(f"no counter of FLOPs; collect these metrics with ncu --metrics: {NCU_WANTED}")
    moved = [name for name in NCU_BYTES.values() if name in metrics]
    if not moved:
        raise InputError(
            f"no counter of bytes; collect these metrics with ncu --metrics: {', '.join(NCU_BYTES.values())}"
        )
    # Counters by kind of sparsity count the same operations once more: they are used only if there are no others.
    return [seconds, *plain, *([name for name in tensor if "sparsity" not in name] or tensor), *moved]


def _compute_ncu_launch(metrics: Metrics, used: Sequence[str]) -> tuple[float, float, dict[str, float]]:
    """Return seconds, FLOPs and bytes by level of one launch."""
    duration, levels = used[0], {name: level for level, name in NCU_BYTES.items()}
    flops, moved = 0.0, {}
    for name in used[1:]:
        kind: Quantity = "bytes" if name in levels else "counts"
        amount = _parse_number(metrics[name][0]) * _find_unit_factor(metrics[name][1], kind, name)
        if name in levels:
            moved[levels[name]] = amount
        else:
            flops += NCU_FLOPS.get(name, 1) * amount
    text, unit = metrics[duration]
    return _parse_number(text) * _find_unit_factor(unit, "seconds", duration), flops, moved


# A vector instruction works on 64 lanes; an MFMA counter counts in units of 512 operations
ROCPROF_FLOPS = {
    **{
        f"SQ_INSTS_VALU_{operation}_{width}": 64 * weight
        for width in ("F16", "F32", "F64")
        for operation, weight in (("ADD", 1), ("MUL", 1), ("FMA", 2), ("TRANS", 1))
    },
    **{f"SQ_INSTS_VALU_MFMA_MOPS_{width}": 512 for width in ("F16", "BF16", "F32", "F64")},
}
ROCPROF_FLOP_LIKE = re.compile(r"SQ_INSTS_VALU_(MFMA_MOPS|ADD|MUL|FMA|TRANS)_[A-Z]*F\d\w*")


def _parse_rocprof(lines: Sequence[str]) -> list[Kernel]:
    """Parse rocprof's results.csv: one launch per line, one column per counter (CDNA2 and later).

    rocprofv3's counter_collection.csv has one counter of a launch per line instead.
    """
    rows = _join_counters(list(csv.DictReader(lines)))
    _refuse_several_ranks(rows)

    def launches() -> Iterator[tuple[str, float, float, dict[str, float]]]:
        for row in rows:
            name = row.get("KernelName") or row.get("Kernel_Name")
            if not name:
                raise InputError(
                    "no column 'KernelName' or 'Kernel_Name'; expected the results.csv that rocprof writes"
                )
            counters = {k: float(v) for k, v in row.items() if k and v and NUMBER.fullmatch(v)}
            for counter in row:
                if counter in ROCPROF_FLOPS and counter not in counters:
                    raise InputError(f"{counter} of {name} is {row[counter]!r}; expected a number")
                if counter not in ROCPROF_FLOPS and ROCPROF_FLOP_LIKE.fullmatch(counter or ""):
                    raise InputError(f"{counter} counts operations in a way that is not known: leave it out")
            yield name, *_compute_rocprof_launch(counters)

    return _sum_launches(launches())


def _join_counters(rows: Sequence[dict[str, str]]) -> Sequence[dict[str, str]]:
    """Join the rows of each dispatch to one with a column per counter. Other tables stay as they are."""
    if not rows or not {"Counter_Name", "Counter_Value"} <= rows[0].keys():
        return rows
    launches: dict[tuple[str | None, ...], dict[str, str]] = {}
    for row in rows:
        # Each process counts its dispatches from 1.
        key = tuple(row.get(name) for name in ("Process_Id", "Agent_Id", "Dispatch_Id", "Kernel_Name"))
        launch = launches.setdefault(key, {k: v for k, v in row.items() if k not in ("Counter_Name", "Counter_Value")})
        if row["Counter_Name"] in launch:
            which = f"{row['Counter_Name']} of dispatch {row.get('Dispatch_Id')}"
            raise InputError(f"{which} has two values; expected the counter_collection.csv of one pass")
        launch[row["Counter_Name"]] = row["Counter_Value"]
    return [*launches.values()]


def _compute_rocprof_launch(counters: Mapping[str, float]) -> tuple[float, float, dict[str, float]]:
    """Return seconds, FLOPs and bytes by level of one launch."""
    seconds = _compute_rocprof_seconds(counters)
    flops = _sum_weighted(counters, ROCPROF_FLOPS)
    if flops is None:
        raise InputError(
            "no counter of FLOPs; collect SQ_INSTS_VALU_{ADD,MUL,FMA,TRANS}_F* and SQ_INSTS_VALU_MFMA_MOPS_*"
        )
    moved = _compute_rocprof_bytes(counters)
    if not moved:
        raise InputError("no counter of bytes; collect TCC_EA_{RDREQ,RDREQ_32B,WRREQ,WRREQ_64B}_sum")
    return seconds, flops, moved


def _compute_rocprof_seconds(counters: Mapping[str, float]) -> float:
    begin = counters.get("BeginNs", counters.get("Start_Timestamp"))
    end = counters.get("EndNs", counters.get("End_Timestamp"))
    duration_ns = counters.get("DurationNs", None if begin is None or end is None else end - begin)
    if duration_ns is None:
        raise InputError("no duration of kernels; start rocprof with: --timestamp on")
    return duration_ns * 1e-9


def _compute_rocprof_bytes(counters: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by level. A request moves 64 bytes, except reads counted as 32 B and writes not counted as 64 B."""
    moved = {}
    for prefix in ("TCC_EA_", "TCC_EA0_"):  # the name up to MI200, and since MI300
        reads, writes = counters.get(f"{prefix}RDREQ_sum"), counters.get(f"{prefix}WRREQ_sum")
        if reads is not None and writes is not None:
            small, large = counters.get(f"{prefix}RDREQ_32B_sum", 0.0), counters.get(f"{prefix}WRREQ_64B_sum", writes)
            moved["dram"] = 64 * reads - 32 * small + 32 * writes + 32 * large
    if "TCP_TCC_READ_REQ_sum" in counters:
        moved["L2"] = 64 * (counters["TCP_TCC_READ_REQ_sum"] + counters.get("TCP_TCC_WRITE_REQ_sum", 0.0))
    if "TCP_TOTAL_CACHE_ACCESSES_sum" in counters:
        moved["L1"] = 64 * counters["TCP_TOTAL_CACHE_ACCESSES_sum"]
    return moved


LIKWID_RUNTIME = "Runtime (RDTSC) [s]"
LIKWID_RATES = ("SP [MFLOP/s]", "DP [MFLOP/s]", "HP [MFLOP/s]")
LIKWID_BYTES = {
    "L2": "L2 data volume [GBytes]",
    "L3": "L3 data volume [GBytes]",
    "dram": "Memory data volume [GBytes]",
}


def _parse_likwid(lines: Sequence[str]) -> list[Kernel]:
    """Parse `likwid-perfctr -O`: the metric tables of each region of the marker API, or of the whole program."""
    return [_build_likwid_kernel(region, metrics) for region, metrics in _parse_likwid_tables(lines).items()]


def _parse_likwid_tables(lines: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Parse values per thread of each metric, by region. Tables of raw counts and statistics are skipped."""
    regions: dict[str, dict[str, list[float]]] = {}
    metrics: dict[str, list[float]] | None = None  # of the table being read; None outside metric tables
    for cells in csv.reader(lines):
        head = cells[0] if cells else ""
        if head == "TABLE":
            region = _parse_likwid_region(cells)
            metrics = None if region is None else regions.setdefault(region, {})
        elif head == "STRUCT":
            metrics = None
        elif metrics is not None and len(cells) > 1 and head in {LIKWID_RUNTIME, *LIKWID_RATES, *LIKWID_BYTES.values()}:
            # Rows are filled up with empty cells. A cell without a number is an error: a thread would be missing
            metrics.setdefault(head, [_parse_number(cell) for cell in cells[1:] if cell.strip()])
    return regions


def _parse_likwid_region(cells: Sequence[str]) -> str | None:
    """Return the region of a table, from the line that begins it. None if it is not a table of metrics."""
    if not any(re.fullmatch(r"Group \d+ Metric", cell) for cell in cells):
        return None
    return next((cell.removeprefix("Region ") for cell in cells if cell.startswith("Region ")), WHOLE_PROGRAM)


def _build_likwid_kernel(region: str, metrics: Mapping[str, Sequence[float]]) -> Kernel:
    runtime = metrics.get(LIKWID_RUNTIME)
    rates = [metrics[name] for name in LIKWID_RATES if name in metrics]
    moved = {level: 1e9 * sum(metrics[name]) for level, name in LIKWID_BYTES.items() if name in metrics}
    if not runtime or not rates or not moved:
        raise InputError(
            f"region {region}: needs runtime, MFLOP/s and a data volume; "
            "measure with likwid-perfctr -g MEM_SP or -g MEM_DP"
        )
    flops = sum(
        1e6 * rate * seconds for per_thread in rates for rate, seconds in zip(per_thread, runtime, strict=False)
    )
    kernel = Kernel(region)
    # Threads run at the same time: FLOPs and bytes add up, seconds do not.
    kernel.add(max(runtime), flops, moved)
    return kernel


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
CACHE_LINE = 64  # bytes of one CAS of a memory controller


def _parse_perf(lines: Sequence[str]) -> list[Kernel]:
    """Parse `perf stat -x,`, for the whole program. Lines per socket of uncore events are summed."""
    seconds, flops, moved = None, None, 0.0
    for event, amount, unit in _parse_perf_events(lines):
        if event == "duration_time":
            seconds = amount * _find_unit_factor(unit or "ns", "seconds", event)
        elif "cas_count" in event:
            moved += amount * (_find_unit_factor(unit, "bytes", event) if unit else CACHE_LINE)
        else:
            if event not in PERF_FLOPS:
                raise InputError(
                    f"{event} counts operations in a way that is not known; expected {', '.join(PERF_FLOPS)}"
                )
            flops = (flops or 0.0) + PERF_FLOPS[event] * amount
    if seconds is None or flops is None or not moved:
        raise InputError(
            "an event is missing; collect with perf stat -e: duration_time, cas_count_read and cas_count_write "
            f"of uncore_imc, and those that this processor has of {', '.join(PERF_FLOPS)}"
        )
    kernel = Kernel(WHOLE_PROGRAM)
    kernel.add(seconds, flops, {"dram": moved})
    return [kernel]


def _parse_perf_events(lines: Sequence[str]) -> Iterator[tuple[str, float, str]]:
    """Yield (event, amount, unit) of each line with a known event. Options of perf put columns before these three."""
    for cells in _split_perf_lines(lines):
        position = next((i for i, cell in enumerate(cells) if _is_perf_event(cell)), None)
        if position is None or position < 2:
            continue
        # perf adds ":u" to the names of events that it counts in user mode only.
        value, unit, event = cells[position - 2], cells[position - 1], cells[position].removesuffix(":u").lower()
        # A socket and its CPUs may stand before the count. Else it is a time, or what a decimal comma cut off
        if position > 2 and (position > 4 or NUMBER.fullmatch(cells[0].strip())):
            raise InputError(
                f"{event}: {cells[position - 3].strip()} stands before its count; collect it without -I, and with decimal points "
                "(LC_ALL=C)"
            )
        if not NUMBER.fullmatch(value):
            raise InputError(
                f"{event}: {value!r} is not a count, so perf did not measure this event; collect fewer events at a time"
            )
        yield event, float(value), unit


# A line of the text for people; thousands have commas
PERF_TEXT = re.compile(
    r"(<not \w+>|\d{1,3}(?:,\d{3})*(?:\.\d+)?|\d+(?:\.\d+)?)[ ]+(?:([A-Za-z]+)[ ]+)?(\S+)(?:[ ]{2,}.*)?"
)


def _split_perf_lines(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the cells of each line of `perf stat -x`. A line of `-j`, or of the text for people, becomes the same."""
    for_people = any("Performance counter stats for" in line for line in lines)
    separator = max(",;|\t", key=lambda each: sum(each in line for line in lines))
    for line in (line for line in lines if line.strip() and not line.startswith("#")):
        if not for_people:
            yield _split_perf_json(line) if line.startswith("{") else next(csv.reader([line], delimiter=separator))
        elif found := PERF_TEXT.fullmatch(line.strip()):
            yield [found[1].replace(",", ""), found[2] or "", found[3]]
        elif any(_is_perf_event(word) for word in line.split() if "Performance" not in line):
            raise InputError(f"{line.strip()[:60]!r} has no count as 1,234.5; write it with LC_ALL=C")


def _split_perf_json(line: str) -> list[str]:
    try:
        found = json.loads(line)
        before = [name for name in ("interval", "socket") if name in found]
        return [str(found.get(name, "")) for name in (*before, "counter-value", "unit", "event")]
    except (ValueError, RecursionError, AttributeError):
        raise InputError(f"{line[:60]!r} is no line of perf stat -j") from None


def _is_perf_event(cell: str) -> bool:
    name = cell.removesuffix(":u").lower()
    return name == "duration_time" or "cas_count" in name or re.search(r"fp_arith|fp_ret|flop", name) is not None


TOOLS: Mapping[str, Callable[[Sequence[str]], list[Kernel]]] = {
    "ncu": _parse_ncu,
    "rocprof": _parse_rocprof,
    "likwid": _parse_likwid,
    "perf": _parse_perf,
}


def _sum_launches(launches: Iterable[tuple[str, float, float, dict[str, float]]]) -> list[Kernel]:
    """Sum (name, seconds, FLOPs, bytes by level) of launches to one kernel per name."""
    kernels: dict[str, Kernel] = {}
    for name, seconds, flops, moved in launches:
        kernels.setdefault(name, Kernel(name)).add(seconds, flops, moved)
    return list(kernels.values())


def _sum_weighted(counters: Mapping[str, float], weights: Mapping[str, int]) -> float | None:
    """Sum the counters in ``weights``, each times its weight. None if there are none."""
    values = [weight * counters[name] for name, weight in weights.items() if name in counters]
    return sum(values) if values else None


def _parse_number(text: str) -> float:
    """Parse a number of ncu, which writes thousands separators. A decimal comma is not taken for one."""
    if not re.fullmatch(r"-?(\d{1,3}(,\d{3})+|\d+)(\.\d*)?([eE][-+]?\d+)?", text.strip()):
        raise InputError(f"a value is {text!r}; expected a number, as 1,234.5")
    return float(text.replace(",", ""))


Quantity = Literal["seconds", "bytes", "counts"]
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_UNITS: Mapping[Quantity, Mapping[str, float]] = {
    "seconds": {
        f"{prefix}{unit}": factor
        for prefix, factor in (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("µ", 1e-6), ("n", 1e-9))
        for unit in ("s", "sec", "second", "seconds")
    },
    "bytes": {
        **{f"{prefix}{unit}": f for prefix, f in _THOUSANDS.items() for unit in ("b", "byte", "bytes")},
        **{f"{p}i{unit}": 1024.0**n for n, p in enumerate("kmgtp", 1) for unit in ("b", "byte", "bytes")},
        "": 1.0,
    },
    "counts": {f"{prefix}{unit}": f for prefix, f in _THOUSANDS.items() for unit in ("", "inst", "op", "ops", "flop")},
}


def _find_unit_factor(text: str, kind: Quantity, name: str) -> float:
    """Return the factor from the unit of a counter ``name`` to seconds, bytes or counts. InputError if it has none."""
    try:
        return _UNITS[kind][text.strip().lower()]
    except KeyError:
        raise InputError(f"{name} has the unit {text!r}; expected one of {kind}") from None


@click.command(
    epilog="""\b
Examples:
  mlhpc ceilings counters ncu ncu.csv --system mysite --workload cosmoflow --size mini --steps 10 -o counters.json
  mlhpc report runs/mine ceilings.json counters.json -o report
"""
)
@click.argument("tool", type=click.Choice(list(TOOLS)))
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--system",
    required=True,
    help="Name of the system, the same as in the ceilings file, so that one chart shows both.",
)
@click.option(
    "--workload", required=True, help="Workload whose training steps the profiler counted in FILE, such as cosmoflow."
)
@click.option("--size", metavar="NAME", required=True, help="Size of the workload in those steps, such as mini.")
@click.option(
    "--steps",
    type=IntegerRange(1),
    required=True,
    help="Number of training steps that the profiler counted, on one rank; the counts are divided by it.",
)
@output_option("New JSON file.", "counters.json")
def counters(tool: str, file: Path, system: str, workload: str, size: str, steps: int, output: Path | None) -> None:
    """Import FLOPs and bytes of each kernel from hardware counters, for the roofline of a report.

    TOOL is ncu, rocprof, likwid or perf; FILE is its output (docs/ceilings.md)."""
    card = load_descriptor(workload).card()
    card.size(size)
    path = output or Path("counters.json")
    refuse_existing(path)
    kernels = read(tool, file)
    body = {
        "version": VERSION,
        "kind": "counters",
        "system": system,
        "benchmark": card.mlperf_name,
        "size": size,
        "tool": tool,
        "source": file.name,
        "steps": steps,
        "kernels": [asdict(kernel) for kernel in kernels],
    }
    write(path, json.dumps(body, indent=1) + "\n")
    seconds, flops = sum(kernel.seconds for kernel in kernels), sum(kernel.flops for kernel in kernels)
    print_line(f"{path}: {len(kernels)} kernels, {render_duration(seconds)}, {flops:.4g} FLOPs in {steps} steps")
