"""The command `mlhpc dispatch`: starts the ranks, measures each controller, and prints the table."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import psutil

from mlhpc.plugins.dispatch.loops import Controller, FirstRank, Mode, list_modes, make_link, serve
from mlhpc.plugins.dispatch.measure import extrapolate, measure_overheads, measure_rows
from mlhpc.plugins.dispatch.results import Beyond, Dispatch, NotMeasured, Row
from mlhpc.suite.cli.options import (
    JSON,
    FiniteRange,
    IntegerRange,
    format_option,
    output_option,
    ranks_option,
    render_option_words,
)
from mlhpc.suite.errors import InputError, explain_missing
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, print_progress, read_bytes, render_error, write_file_atomically
from mlhpc.suite.launch.command_on_ranks import run_as_rank, start_ranks
from mlhpc.suite.launcher import find_world
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.machine.probes.processor import find_machine_root, read_cpu
from mlhpc.suite.plugins import explain_unusable, find_plugins
from mlhpc.suite.world import find_node_name

if TYPE_CHECKING:
    from mlhpc.suite.world import World

GROUP = "mlhpc.dispatch"  # entry points of controllers that start ranks of their own
LIBRARIES = ("mpi", "torch")  # what our own controller sends by
LARGEST_PART = 2**20  # bytes


class Part(msgspec.Struct):
    """What was measured of some controllers."""

    rows: list[Row] = []
    extrapolated: list[Beyond] = []
    not_measured: list[NotMeasured] = []

    def add(self, other: Part) -> None:
        """Add another part."""
        self.rows += other.rows
        self.extrapolated += other.extrapolated
        self.not_measured += other.not_measured


@dataclass(frozen=True)
class Settings:
    """What a person may choose."""

    modes: Sequence[Mode]
    repeats: int
    delay_s: float


@click.command(
    epilog="""\b
Examples:
  mlhpc dispatch --ranks 2 -o dispatch.json
  mlhpc dispatch --ranks 2 --over ray --over monarch --depth 8
  srun --nodes=4 --ntasks-per-node=1 mlhpc dispatch --over mpi
  mlhpc report runs/mine dispatch.json

\b
Exit codes: 0 measured, 1 a controller of --over could not be measured, 2 usage.
""",
)
@ranks_option(None, "Number of ranks to start on this machine, at most one per core. [2, or those of the launcher]")
@click.option(
    "--over", multiple=True, metavar="NAME", help="Measure this one only: mpi, torch, ray, monarch; repeatable."
)
@click.option("--depth", type=IntegerRange(1), default=16, show_default=True, help="Commands on their way at most.")
@click.option(
    "--chain", type=IntegerRange(2), default=128, show_default=True, help="Computations of a chained command."
)
@click.option("--clients", type=IntegerRange(2, 4), default=2, show_default=True, help="Programs that take turns.")
@click.option("--repeats", type=IntegerRange(2), default=8, show_default=True, help="Number of timings of each mode.")
@click.option(
    "--delay", type=FiniteRange(0, 1e4), default=0.0, help="Slow each command by so many ms, to see that it shows. [0]"
)
@format_option()
@output_option("JSON file for the results.", "none")
@click.option("--part", type=click.Path(path_type=Path), hidden=True, help="For ranks that were started: rows go here.")
def dispatch(
    ranks: int | None,
    over: tuple[str, ...],
    depth: int,
    chain: int,
    clients: int,
    repeats: int,
    delay: float,
    style: str,
    output: Path | None,
    part: Path | None,
) -> None:
    """Measure how long a computation must be, so that a controller does not slow it.

    Each mode is compared with ranks that need no controller (SPMD): acknowledged commands (sync), commands sent ahead,
    chains, and several programs in one order for all ranks (gang).
    """
    settings = Settings(list_modes(depth, chain, clients), repeats, delay / 1e3)
    remote = find_plugins(GROUP)
    if unknown := set(over) - {*LIBRARIES, *remote}:
        raise InputError(f"--over {min(unknown)}: expected one of {', '.join((*LIBRARIES, *remote))}")
    own, others = ([name for name in names if name in (over or names)] for names in (LIBRARIES, remote))
    busy = psutil.cpu_percent(0.5) / 100 * (psutil.cpu_count() or 1)
    launch = find_world(ranks or 1)
    found = Part()
    if launch is not None and launch.size > 1:
        code = run_as_rank(launch, lambda: None, lambda world: found.add(_measure_own(world, own, settings)))
        found.not_measured += [NotMeasured(name, "starts ranks of its own: call it in a shell") for name in others]
        if code or launch.rank:
            sys.exit(code)
    else:
        _refuse_crowd(ranks or 2)
        words = {"--depth": depth, "--chain": chain, "--clients": clients, "--repeats": repeats, "--delay": delay}
        if own:
            found.add(_start_own(ranks or 2, render_option_words({**words, "--over": tuple(own)})))
        for name in others:
            found.add(_measure_remote(name, ranks or 2, settings))
    if part is not None:  # the command that started these ranks prints
        write_file_atomically(part, msgspec.json.encode(found))
        return
    result = Dispatch(
        system=find_node_name(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpu=read_cpu(find_machine_root(os.environ)).model,
        cores=find_usable_resources().cores,
        busy=busy,
        ranks=launch.size if launch is not None and launch.size > 1 else ranks or 2,
        depth=depth,
        chain=chain,
        clients=clients,
        delay_s=settings.delay_s,
        rows=tuple(found.rows),
        extrapolated=tuple(found.extrapolated),
        not_measured=tuple(found.not_measured),
    )
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    print_line(text if style == JSON else "\n".join(result.render()))
    if output is not None:
        write_file_atomically(output, text + "\n")
    missed = {each.controller for each in result.not_measured} & {*over}
    sys.exit(ExitCode.FAILED if missed or not result.rows else ExitCode.OK)


def _refuse_crowd(ranks: int) -> None:
    """Raise InputError if ranks would share a core: one that waits would take the time of one that computes."""
    cores = find_usable_resources().cores
    if not 2 <= ranks <= cores:
        raise InputError(f"--ranks {ranks}: expected 2 to {cores}, one on each core")


def _start_own(ranks: int, words: list[str]) -> Part:
    """Measure our own controller on ranks that mpiexec starts. If one of them dies, all end."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-dispatch-") as folder:
        path = Path(folder) / "part.json"
        echo = partial(print_line, error=True)  # standard output has the table alone
        if code := start_ranks(["dispatch", *words, "--part", str(path)], ranks, echo=echo):
            sys.exit(code)
        return msgspec.json.decode(read_bytes(path, LARGEST_PART), type=Part)


def _measure_own(world: World, libraries: Sequence[str], settings: Settings) -> Part:
    """Measure our own controller by each library, on all ranks; rank 0 gets the rows."""
    _refuse_crowd(world.local_size if world.nodes == 1 else max(2, world.local_size))
    part, clients = Part(), settings.modes[-1].clients
    for library in libraries:
        overheads: dict[str, dict[int, list[float]]] = {}
        for ranks in [*_list_smaller(world.size), world.size]:
            try:
                link, version = make_link(library, world, ranks, clients)
            except (InputError, ImportError) as error:
                part.not_measured.append(NotMeasured(library, explain_missing(error) or render_error(error)))
                break
            if world.is_first:
                try:
                    _command(FirstRank(link, version), library, world.size, ranks, settings, part, overheads)
                except Exception as error:  # whatever it is: without it the other ranks would wait for ever
                    raise RuntimeError(render_error(error)) from error
            elif world.rank < ranks:
                serve(link)
            world.barrier()
        for mode_name, by_ranks in overheads.items():
            part.extrapolated += extrapolate(library, mode_name, by_ranks)
    return part


def _command(
    controller: FirstRank,
    library: str,
    most: int,
    ranks: int,
    settings: Settings,
    part: Part,
    overheads: dict[str, dict[int, list[float]]],
) -> None:
    """Measure on rank 0: rows on all ranks, overheads by mode on each number of ranks if there are several."""
    if ranks == most:
        part.rows += _measure_rows(library, controller, settings)
    if _list_smaller(most):
        empty = measure_overheads(controller, settings.modes, settings.repeats, settings.delay_s)
        for mode in settings.modes[1:]:
            pairs = zip(empty[settings.modes[0]], empty[mode], strict=True)
            overheads.setdefault(mode.name, {})[ranks] = [slow - fast for fast, slow in pairs]
    controller.stop()


def _list_smaller(ranks: int) -> list[int]:
    """List the powers of two below a number of ranks, from 2 on."""
    return [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]


def _measure_rows(name: str, controller: Controller, settings: Settings) -> list[Row]:
    def tell(text: str) -> None:
        print_progress(f"dispatch: {text}", error=True)

    return measure_rows(name, controller, settings.modes, settings.repeats, settings.delay_s, tell)


def _measure_remote(name: str, ranks: int, settings: Settings) -> Part:
    """Measure a controller of another project, which this process commands."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-dispatch-") as folder:
        try:
            controller = find_plugins(GROUP)[name].point.load()(ranks, settings.modes[-1].clients, folder)
            try:
                return Part(rows=_measure_rows(name, controller, settings))
            finally:
                controller.stop()
        except Exception as error:  # another project's code may raise anything
            return Part(not_measured=[NotMeasured(name, explain_unusable(error))])
