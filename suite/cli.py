"""The `mlhpc` command: finds its subcommands by entry point and imports only the one that is asked for."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click

from suite import VERSION
from suite.files import one_line

DEBUG = "MLHPC_DEBUG"  # environment variable: show the traceback of an unforeseen error


class LazyGroup(click.Group):
    """A group whose commands are the entry points of ``mlhpc.commands``."""

    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group="mlhpc.commands")}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order a person meets them, then any that others installed."""
        order = [
            "demo",
            "doctor",
            "list",
            "data",
            "run",
            "submit",
            "status",
            "package",
            "check",
            "score",
            "compare",
            "report",
            "published",
            "ceilings",
            "profile",
            "counters",
            "rcp",
        ]
        names = self._points()
        return [name for name in order if name in names] + sorted(set(names) - set(order))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        point = self._points().get(cmd_name)
        try:
            return point.load() if point else None
        except ImportError as error:
            raise click.ClickException(f"command {cmd_name!r} cannot be loaded: {error}") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their first sentences, read from their source: no command is imported for it."""
        rows = [(name, _first_sentence(point)) for name, point in self._points().items()]
        order = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows, key=lambda row: order.index(row[0])))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Answer an unknown command with the nearest and all valid ones."""
        if args and args[0] not in self._points() and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], names, 1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"unknown command {args[0]!r};{hint} commands: {', '.join(names)}")
        return super().resolve_command(ctx, args)


def _first_sentence(point: EntryPoint) -> str:
    """The start of a command function's docstring, without importing its module."""
    spec = importlib.util.find_spec(point.module)
    if spec is None or spec.origin is None:
        return "(not importable)"
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    texts = [ast.get_docstring(node) for node in body if isinstance(node, ast.FunctionDef) and node.name == point.attr]
    paragraph = " ".join((texts[0] if texts and texts[0] else "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


EPILOG = """\b
Examples:
  mlhpc demo                                      everything once, on this machine
  mlhpc data generate cosmoflow --size mini       data set of a size
  mlhpc run cosmoflow --config mini --ranks 2 --runs 5
  mlhpc submit cosmoflow --system mysite --config small --nodes 1,2,4 --runs 10 --dry-run
  mlhpc package runs/R --system mysite --submitter ACME -o submissions/ACME && mlhpc check submissions/ACME
  mlhpc compare runs/before runs/after            exit code 1 if after is slower
  mlhpc report submissions/ACME -o report

Shell completion:  eval "$(_MLHPC_COMPLETE=bash_source mlhpc)"
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="mlhpc")
def group() -> None:
    """Benchmark suite for AI on supercomputers: run, package, check, compare.

    Exit codes: 0 fine, 1 findings or a failed run, 2 usage.
    """


def main() -> None:
    """Run the command line; a ValueError of ours is one line, never a traceback."""
    try:
        sys.exit(group.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as usage:
        usage.show()
        sys.exit(2)
    except click.ClickException as error:
        print(f"mlhpc: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("mlhpc: stopped", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"mlhpc: {one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except Exception as error:
        if DEBUG in os.environ:
            raise
        name = type(error).__name__
        print(f"mlhpc: a defect of mlhpc itself: {name}: {error} ({DEBUG}=1 shows where)", file=sys.stderr)
        sys.exit(1)
