"""`mlhpc workload`: lists workloads, starts a new one, counts what its card says, and records its reference points."""

from __future__ import annotations

import click

from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.commands.workload.subcommands import card, list_, new, rcp, schema


@click.group(cls=Subcommands)
def workload() -> None:
    """List workloads with sizes and targets, or create one of your own.

    \b
    Examples:
      mlhpc workload list
      mlhpc workload new tides && pip install --no-deps --no-build-isolation -e tides && mlhpc run tides --size smoke
      mlhpc workload card tides
      mlhpc workload rcp record runs/tides-smoke-*
    """


workload.add_command(list_)
workload.add_command(new)
workload.add_command(card)
workload.add_command(rcp)
workload.add_command(schema)
