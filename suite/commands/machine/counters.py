"""`mlhpc ceilings counters`: converts the CSV of a profiler to a counters file for the report's rooflines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from mlhpc.suite.cli.options import IntegerRange, output_option
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.files import print_line, render_duration
from mlhpc.suite.performance.ceilings_file import refuse_existing, write
from mlhpc.suite.performance.counters import TOOLS, VERSION, read


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
