"""The `mlhpc` command: finds its subcommands by entry point and imports only the one that is asked for."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import itertools
import os
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import click

from suite import VERSION
from suite.descriptor import CARDS, with_cards
from suite.errors import DEBUG, DEFECT, InputError, keep_traceback
from suite.files import one_line, print_line
from suite.plugins import COMMANDS, OURS, find_plugins, package_of, reason

FINDINGS = 1
USAGE = 2


GROUPS = ("Run", "Package and check", "Compare", "Measure a machine")  # headings of `mlhpc --help`, in order
OTHER = "Other commands"  # of packages that state no heading


@dataclass(frozen=True)
class CommandInfo:
    """What the source of a command's module says of it: its heading and place in ``mlhpc --help``, and its first sentence."""

    name: str
    group: str
    order: int
    summary: str

    @staticmethod
    def read(point: EntryPoint) -> CommandInfo:
        """Read ``HELP_GROUP``, ``HELP_ORDER`` and the docstring from the source, without importing the module."""
        try:
            spec = importlib.util.find_spec(point.module)
            assert spec is not None
            assert spec.origin is not None
            body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        except Exception as error:  # a stranger's package: its parents are imported to find it
            return CommandInfo(point.name, OTHER, 0, f"(cannot be loaded: {reason(error)})")
        constants = {
            node.targets[0].id: node.value.value
            for node in body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == point.attr]
        paragraph = " ".join(((functions and ast.get_docstring(functions[0])) or "").partition("\n\n")[0].split())
        group, order = constants.get("HELP_GROUP"), constants.get("HELP_ORDER")
        return CommandInfo(
            point.name,
            group if group in GROUPS else OTHER,
            order if isinstance(order, int) else 0,
            paragraph.partition(". ")[0].rstrip("."),
        )


class LazyGroup(click.Group):
    """A group whose commands are the entry points of ``mlhpc.commands``."""

    def _points(self) -> dict[str, EntryPoint]:
        return find_plugins(COMMANDS)

    def _infos(self) -> list[CommandInfo]:
        """All commands, in the order of ``mlhpc --help``."""
        headings = [*GROUPS, OTHER]
        infos = [CommandInfo.read(point) for point in self._points().values()]
        return sorted(
            infos,
            key=lambda info: (headings.index(info.group if info.group in GROUPS else OTHER), info.order, info.name),
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order a person meets them, then those of packages that state no heading."""
        return [info.name for info in self._infos()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        point = self._points().get(cmd_name)
        try:
            return point.load() if point else None
        except Exception as error:  # it may be a stranger's code
            assert point is not None
            if package_of(point) == OURS and not isinstance(error, ImportError):
                raise
            raise click.ClickException(
                f"command {cmd_name!r} of package {package_of(point)} cannot be loaded: {reason(error)}"
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands under their headings. No command is imported for it."""
        for group, infos in itertools.groupby(self._infos(), key=lambda info: info.group):
            with formatter.section(group):
                formatter.write_dl([(info.name, info.summary) for info in infos])

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


def _give_cards(context: click.Context, _: click.Parameter, paths: tuple[Path, ...]) -> None:
    context.with_resource(with_cards(paths))


card_option = click.option(  # of every command that judges: what cards say is read while the command runs
    "--card",
    multiple=True,
    expose_value=False,
    callback=_give_cards,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"Card of a card-only benchmark; repeatable. Cards in ${CARDS} are known to every command.",
)


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="mlhpc")
def group() -> None:
    """Benchmark suite for AI on supercomputers: run, package, check, compare.

    Exit codes: 0 fine, 1 findings or a failed run, 2 usage, 70 a defect of mlhpc itself.
    """


def main() -> None:
    """Run the command line. An error is one line: the user's (InputError), the machine's (OSError) or a defect of ours."""
    try:
        sys.exit(group.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as usage:
        usage.show()
        sys.exit(USAGE)
    except click.ClickException as error:
        print_line(f"mlhpc: {error.format_message()}", error=True)
        sys.exit(USAGE)
    except (click.Abort, KeyboardInterrupt):
        print_line("mlhpc: stopped", error=True)
        sys.exit(130)
    except (InputError, OSError) as error:
        print_line(f"mlhpc: {one_line(error)}", error=True)
        sys.exit(USAGE if isinstance(error, InputError) else FINDINGS)
    except Exception as error:
        if DEBUG in os.environ:
            raise
        name, text = type(error).__name__, one_line(error)
        print_line(f"mlhpc: a defect of mlhpc itself: {name}: {text} ({keep_traceback()})", error=True)
        sys.exit(DEFECT)
