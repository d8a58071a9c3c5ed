"""`mlhpc ceilings`: measures the roofs of this machine, under a launcher or on ranks that it starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlhpc.suite.cli.group import Subcommands, find_exchange_command
from mlhpc.suite.cli.options import device_option, output_option, ranks_option, render_option_words
from mlhpc.suite.files import print_line, print_progress
from mlhpc.suite.launch.command_on_ranks import run_as_rank, start_ranks
from mlhpc.suite.launcher import find_world
from mlhpc.suite.performance.ceilings_file import refuse_existing, write

if TYPE_CHECKING:
    from mlhpc.suite.world import World

THIS_MACHINE = "this-machine"
BUSY_SHARE = 0.1  # busy cores per allowed core above which a person is warned


@click.group(
    cls=Subcommands,
    invoke_without_command=True,
    epilog="""\b
Examples:
  mlhpc ceilings -o ceilings.json                        one process, all its cores or its GPU
  mlhpc ceilings --ranks 2 --quick -o ceilings.json      with all-reduce and all-to-all; under a minute
  srun --nodes=2 --ntasks-per-node=4 mlhpc ceilings --system mysite --directory "$TMPDIR" -o ceilings.json

\b
Exit codes: 0 written, 1 measuring failed, 2 usage.
""",
)
@click.option(
    "--system",
    default=THIS_MACHINE,
    show_default=True,
    help="Name of the system, to match these ceilings with runs and counters, such as mysite.",
)
@ranks_option()
@device_option()
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Measure storage in this folder; take the one to which data are staged. [$TMPDIR, else the output's folder]",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Measure at most 50 s, with fewer repetitions and smaller sizes; the output says what is left out.",
)
@output_option("New JSON file.", "ceilings.json")
@click.pass_context
def ceilings(
    context: click.Context,
    system: str,
    ranks: int,
    device: str,
    directory: Path | None,
    quick: bool,
    output: Path | None,
) -> None:
    """Measure peak rates of this machine: GEMM, memory levels, host link, storage, all-reduce, all-to-all.

    `mlhpc report` draws them in its rooflines, as limits above your runs. `mlhpc ceilings counters` imports hardware
    counters of a profiler for the same chart.
    """
    if context.invoked_subcommand is not None:  # click calls the group first, then its command
        return
    launch = find_world(ranks)
    path = output or Path("ceilings.json")
    # The ranks check the path too, but only after they have started, which takes seconds.
    if launch is None and ranks > 1:
        refuse_existing(path)
        words = render_option_words(
            {"--system": system, "--device": device, "--directory": directory, "--quick": quick, "-o": path}
        )
        sys.exit(start_ranks(["ceilings", *words], ranks))
    storage = directory or Path(os.environ.get("TMPDIR") or path.parent)

    def measure(world: World) -> None:
        _measure(world, system, device, storage, quick, path)

    sys.exit(run_as_rank(launch, lambda: refuse_existing(path), measure))


ceilings.add_command(find_exchange_command("counters", "ceilings counters"))


def _measure(world: World, system: str, device: str, directory: Path, quick: bool, output: Path) -> None:
    """Measure on all ranks; rank 0 writes."""
    import torch

    from mlhpc.suite.performance.ceilings.measure import measure
    from mlhpc.suite.training.devices import choose_device, compute_threads_per_rank

    torch.set_num_threads(compute_threads_per_rank(world))
    text = measure(
        world,
        system=system,
        quick=quick,
        device=choose_device(device, world),
        directory=directory,
        say=lambda line: print_progress(line, error=True) if world.is_first else None,
    )
    if world.is_first:
        write(output, text)
        _print_ceilings(output, text)


def _print_ceilings(output: Path, text: str) -> None:
    """Print the roofs as a table."""
    document = json.loads(text)
    device = document["device"]
    ranks, nodes = document["ranks"], document["nodes"]
    print_line(f"{output}: {device['name']}, {ranks} ranks of {device['threads']} threads, {nodes} nodes")
    for roof in document["roofs"]:
        name = " ".join(str(roof[key]) for key in ("resource", "name", "dtype", "mode") if roof[key])
        unit = "GFLOP/s" if roof["unit"] == "FLOP/s" else "GB/s"
        notes = [f"n={roof['n']}", f"IQR {roof['spread']:.0%}"]
        if roof["resource"].startswith("all_"):  # collectives, which are measured on several numbers of ranks
            notes.append(f"{roof['ranks']} ranks")
        if roof["capacity_bytes"]:
            notes.append(f"up to {roof['capacity_bytes'] >> 10} KiB per thread")
        print_line(f"  {name:<36} {roof['value'] / 1e9:10.2f} {unit} per rank ({', '.join(notes)})")
    for missing in document["not_measured"]:
        print_line(f"  not measured: {missing['resource']} {missing['name'] or ''}: {missing['reason']}")
    busy = device["busy_cores_at_start"]
    if busy is not None and busy > BUSY_SHARE * device["cores_allowed"]:
        print_line(f"  other processes kept {busy:.1f} cores busy: these roofs are too low")
