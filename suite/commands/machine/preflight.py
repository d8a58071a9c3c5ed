"""`mlhpc preflight node` and `links`: measure the nodes of an allocation, within a stated time whatever happens."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlhpc.suite.cli.options import (
    FiniteRange,
    IntegerRange,
    device_option,
    output_option,
    ranks_option,
    render_option_words,
)
from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.errors import ExitCode, InputError
from mlhpc.suite.files import make_folder, print_line, render_duration, write_file_atomically
from mlhpc.suite.launch.ranks import run_as_rank, start_ranks
from mlhpc.suite.machine.facts import END_METRIC, Sample, render_samples

if TYPE_CHECKING:
    from mlhpc.suite.world import World

BUDGET_S = 20
SHORTEST_S = 5  # starting the ranks alone takes seconds
END_GRACE_S = 2.0  # of the time: to write the files and to end
END_STAGE = "the end"  # what the ranks say last
STAGE_PREFIX = "at: "  # begins the lines by which ranks say what comes next
SIZE = "smoke"  # of the workloads whose steps are measured

budget_option = click.option(
    "--budget",
    type=IntegerRange(SHORTEST_S, 3600),
    default=BUDGET_S,
    show_default=True,
    metavar="SECONDS",
    help="Total time limit in seconds, start-up included; unfinished measurements are stopped.",
)
rounds_option = click.option(
    "--rounds", type=IntegerRange(1), help="Stop after this many repetitions. [as many as fit into --budget]"
)


@click.command(
    epilog="""\b
Examples:
  mlhpc preflight node --ranks 2 -o preflight           this machine
  srun --ntasks-per-node=1 mlhpc preflight node --ranks 4 --directory "$TMPDIR" -o preflight
"""
)
@ranks_option()
@device_option()
@budget_option
@rounds_option
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="Measure storage in this folder; take the one to which data are staged. [$TMPDIR, else the output folder]",
)
@click.option(
    "--workload",
    "names",
    multiple=True,
    help="Time training steps only of this workload; repeatable. [all with a smoke data set]",
)
@output_option("Folder for one file NODE.jsonl per node.", "preflight")
@click.option("--started-at", type=FiniteRange(), hidden=True, help="For the ranks: when the command began.")
def node(
    ranks: int,
    device: str,
    budget: int,
    rounds: int | None,
    directory: Path | None,
    names: tuple[str, ...],
    output: Path | None,
    started_at: float | None,
) -> None:
    """Measure this node alone: GEMM, memory, caches, storage, collectives within the node, training steps.

    Under srun every task measures its own node. If a node hangs, it is stopped at the time limit, and its file says
    where. Training steps need the smoke data sets.

    Exit code 0: measured. Exit code 1: stopped before the end. Exit code 2: usage.
    """
    from mlhpc.suite.launcher import find_launch
    from mlhpc.suite.world import find_node_name

    folder = output or Path("preflight")
    path = folder / f"{find_node_name()}.jsonl"
    storage = directory or Path(os.environ.get("TMPDIR") or folder)
    if started_at is not None:  # this process is a rank, started below
        left = budget - END_GRACE_S - (time.time() - started_at)

        def body(world: World) -> None:
            _measure_node(world, device, storage, names, left, rounds, path)

        sys.exit(run_as_rank(find_launch(), lambda: None, body))
    for name in names:
        load_descriptor(name)
    make_folder(folder)
    if path.exists():
        raise InputError(f"{path}: exists already; choose another folder with -o")
    begin = time.time()
    words = render_option_words(
        {
            **{"--ranks": ranks, "--device": device, "--budget": budget, "--rounds": rounds},
            **{"--directory": storage, "--workload": names, "-o": folder, "--started-at": begin},
        }
    )
    code, where, at = _start_node(words, ranks, begin, budget)
    took = at - begin
    why = "" if code == 0 else _explain_end(took, budget, where)
    _write_end(path, find_node_name(), took, budget, why)
    print_line(f"{path}: {'measured' if code == 0 else why} ({render_duration(took)})", error=code != 0)
    sys.exit(ExitCode.FAILED if code else ExitCode.OK)


def _explain_end(took: float, budget: int, where: str) -> str:
    """Say that the time limit ended the measurement, or that it ended before that, and at what."""
    if took >= budget - 0.5:  # the ranks are ended a moment before
        return f"the time limit of {render_duration(budget)} (--budget) ended it at {where}"
    return f"ended after {render_duration(took)} of {render_duration(budget)}, at {where}"


def _start_node(words: list[str], ranks: int, begin: float, budget: int) -> tuple[int, str, float]:
    """Run the ranks of this node; return their exit code, where they ended, and when."""
    where, at = "its start", begin

    def hear(line: str) -> None:
        nonlocal where, at
        if line.startswith(STAGE_PREFIX):
            where, at = line.removeprefix(STAGE_PREFIX), time.time()
        else:
            print_line(line)

    # The budget includes what has passed since the command began.
    limit_s = budget - (time.time() - begin)
    code = start_ranks(["preflight", "node", *words], ranks, limit_s=limit_s, echo=hear)
    if where == END_STAGE:  # all is measured and written: only the end of the processes was late
        return 0, where, at
    return code, where, time.time()


@click.command(
    epilog="""\b
Examples:
  srun --mpi=pmi2 --ntasks-per-node=1 mlhpc preflight links -o preflight
"""
)
@device_option()
@budget_option
@rounds_option
@output_option("Folder for links.jsonl.", "preflight")
def links(device: str, budget: int, rounds: int | None, output: Path | None) -> None:
    """Measure the links between nodes and the offsets of their clocks. Start one rank on each node.

    Exit code 0: measured, or there is only one node. Exit code 1: stopped before the end. Exit code 2: usage.
    """
    from mlhpc.suite.launcher import find_launch

    path = (output or Path("preflight")) / "links.jsonl"
    begin, where = time.time(), "the connection of the nodes"

    def late() -> None:
        print_line(f"mlhpc: links between nodes: ended after {render_duration(budget)}, at {where}", error=True)
        os._exit(ExitCode.FAILED)

    def at(text: str) -> None:
        nonlocal where
        where = text

    def check() -> None:
        make_folder(path.parent)
        if path.exists():
            raise InputError(f"{path}: exists already; choose another folder with -o")

    def body(world: World) -> None:
        if world.nodes == 1:
            print_line("one node: there are no links to measure")
            return
        if world.size > world.nodes:
            raise InputError(
                f"{world.size} ranks on {world.nodes} nodes: expected one rank on each (--ntasks-per-node=1)"
            )
        from mlhpc.suite.performance.preflight import links as measuring
        from mlhpc.suite.performance.preflight.node import describe_hardware
        from mlhpc.suite.training.devices import choose_device

        chosen = choose_device(device, world)
        left = budget - END_GRACE_S - (time.time() - begin)
        measuring.measure(
            world, hardware=describe_hardware(chosen), device=chosen, seconds=left, rounds=rounds, output=path, at=at
        )

    # A collective with a dead node never returns: only another thread can end this process.
    timer = threading.Timer(budget, late)
    timer.daemon = True
    timer.start()
    try:
        code = run_as_rank(find_launch(), check, body)
    finally:
        timer.cancel()
    sys.exit(code)


def _measure_node(
    world: World, device: str, directory: Path, names: tuple[str, ...], seconds: float, rounds: int | None, path: Path
) -> None:
    """Measure on all ranks of this node; rank 0 writes the file."""
    import torch

    from mlhpc.suite.performance.preflight.node import measure
    from mlhpc.suite.training.devices import choose_device, compute_threads_per_rank

    torch.set_num_threads(compute_threads_per_rank(world))
    chosen, missing = _select_workloads(names)
    if world.is_first:
        for text in missing:
            print_line(text, error=True)
    measure(
        world,
        device=choose_device(device, world),
        directory=directory,
        workloads=chosen,
        seconds=seconds,
        rounds=rounds,
        output=path,
        at=lambda text: print_line(STAGE_PREFIX + text) if world.is_first else None,
        say=lambda text: print_line(text) if world.is_first else None,
    )
    if world.is_first:
        print_line(STAGE_PREFIX + END_STAGE)


def _select_workloads(names: tuple[str, ...]) -> tuple[dict[str, Path], list[str]]:
    """Return the data root by workload whose step can be measured, and a line on each other one.

    InputError if a workload of ``names`` has no data.
    """
    chosen: dict[str, Path] = {}
    missing: list[str] = []
    for name in names or (name for name, each in load_descriptors().items() if each.implementation):
        root = choose_default_data_root(name, SIZE)
        if (root / "manifest.json").is_file():
            chosen[name] = root
        else:
            missing.append(
                f"training step of {name} not measured: no data set in {root}; make it with "
                f"mlhpc data generate {name} --size {SIZE}"
            )
    if names and missing:
        raise InputError(missing[0])
    return chosen, missing


def _write_end(path: Path, name: str, took: float, budget: int, why: str) -> None:
    """Add to the node's file how long measuring took, or why it ended early (``why``)."""
    before = path.read_text() if path.exists() else ""
    end = Sample(
        node=name,
        metric=END_METRIC,
        unit="s",
        better="less",
        values=() if why else (took,),
        bound=float(budget),
        failed=why,
    )
    write_file_atomically(path, before + render_samples([end]))
