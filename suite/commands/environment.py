"""`mlhpc environment`: shows and compares environments, writes a lock of one, and makes one anew from a package."""

from __future__ import annotations

import click

from suite.cli.group import Subcommands

HELP_GROUP = "Judge"
HELP_ORDER = 6


@click.group(cls=Subcommands)
def environment() -> None:
    """Show, lock and make anew the Python environment of a package's runs."""
