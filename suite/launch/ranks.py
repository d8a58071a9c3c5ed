"""Commands that measure on all ranks of a world: started under an mpiexec of their own, or being one rank of a launcher's."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from suite.files import one_line
from suite.launch.local import run_local

if TYPE_CHECKING:
    from suite.world import Launch, World

FAILED, USAGE = 1, 2


def start_ranks(words: Sequence[str], ranks: int) -> int:
    """Run ``mlhpc WORDS`` on so many ranks of this machine, show what they say, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-ranks-") as folder:
        return run_local(
            [sys.executable, "-m", "suite", *words],
            ranks=ranks,
            log=Path(folder) / "ranks.log",
            say=lambda text: click.echo(f"mlhpc: {text}", err=True),
            echo=click.echo,
        )


def refuse_ranks(launch: Launch | None, ranks: int) -> None:
    """Usage error for --ranks inside a launcher, whose ranks are already there."""
    if launch is not None and ranks != 1:
        raise click.UsageError(f"inside {launch.launcher} the ranks are already there: leave --ranks out")


def in_world(launch: Launch | None, check: Callable[[], None], body: Callable[[World], None]) -> int:
    """Be one rank: rank 0 checks (ValueError, OSError) before anything is measured, then all ranks do the work.

    Returns the exit code. What ``check`` finds is said once; an error of one rank in ``body`` ends all of them with its line.
    """
    from suite.world import World

    world = World.create(launch)
    found: Exception | None = None
    if world.is_first:
        try:
            check()
        except (ValueError, OSError) as error:
            found = error
    try:
        world.check_together(found)
    except ValueError as error:
        if world.is_first:
            click.echo(f"mlhpc: {one_line(error)}", err=True)
        return USAGE
    try:
        body(world)
        world.barrier()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        where = "" if world.size == 1 else f" [rank {world.rank}]"
        click.echo(f"mlhpc: {one_line(error)}{where}", err=True)
        code = USAGE if isinstance(error, ValueError) else FAILED
        if world.size > 1:
            world.transport.abort(code)
        return code
    return 0
