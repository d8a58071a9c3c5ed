"""Groups of commands: `mlhpc` finds its commands by entry point and imports only the one that is asked for."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from suite.cli.former import FORMER_COMMANDS
from suite.cli.options import add_shared
from suite.errors import unknown
from suite.plugins import COMMANDS, OURS, Plugin, find_plugins, package_of, reason

GROUPS = ("Run", "Judge", "Compare", "Machine", "Extend")  # headings of `mlhpc --help`, in order
OTHER = "Other commands"  # of packages that state no heading
HELP = "help"  # `mlhpc help X` is `mlhpc X --help`


@dataclass(frozen=True)
class CommandInfo:
    """What the source of a command's module says of it: its heading and place in ``mlhpc --help``, and its first sentence."""

    name: str
    group: str
    order: int
    summary: str

    @staticmethod
    def read(point: Plugin) -> CommandInfo:
        """Read ``HELP_GROUP``, ``HELP_ORDER`` and the docstring from the source, without importing the module."""
        try:
            spec = importlib.util.find_spec(point.module)
            assert spec is not None
            assert spec.origin is not None
            text = Path(spec.origin).read_text(encoding="utf-8")
            group, order, docstring = _stated(text, point.attr) or _parsed(text, point.attr)
        except Exception as error:  # a stranger's package: its parents are imported to find it
            return CommandInfo(point.name, OTHER, 0, f"(cannot be loaded: {reason(error)})")
        paragraph = " ".join(docstring.partition("\n\n")[0].split())
        return CommandInfo(
            point.name,
            group if group in GROUPS else OTHER,
            order if isinstance(order, int) else 0,
            paragraph.partition(". ")[0].rstrip("."),
        )


def _stated(text: str, name: str) -> tuple[str, int, str] | None:
    """``HELP_GROUP``, ``HELP_ORDER`` and the docstring in the form in which our modules have them; None for another one.

    To parse the sources of all commands takes as long as everything else that ``mlhpc --help`` does.
    """
    group = re.search(r'^HELP_GROUP = "([^"\\\n]*)"$', text, re.MULTILINE)
    order = re.search(r"^HELP_ORDER = (\d{1,9})$", text, re.MULTILINE)
    function = text.find(f"\ndef {name}(")
    begin = text.find(':\n    """', function)
    if group is None or order is None or min(function, begin) < 0 or "\n\n" in text[function:begin]:
        return None
    docstring = text[begin:].split('"""', 2)[1]
    return None if "\\" in docstring.partition("\n\n")[0] else (group[1], int(order[1]), docstring)


def _parsed(text: str, name: str) -> tuple[object, object, str]:
    """The same of any source."""
    import ast

    body = ast.parse(text).body
    constants = {
        node.targets[0].id: node.value.value
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    docstring = (ast.get_docstring(functions[0]) if functions else None) or ""
    return constants.get("HELP_GROUP"), constants.get("HELP_ORDER"), docstring


class Subcommands(click.Group):
    """A group that answers an unknown command with the nearest and all valid ones."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which they are defined."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first word."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            path = " ".join([*ctx.command_path.split()[1:], args[0]])
            if path in FORMER_COMMANDS:
                ctx.fail(f"{path!r} is now {FORMER_COMMANDS[path]!r}")
            ctx.fail(unknown("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


class LazyGroup(Subcommands):
    """The group whose commands are the entry points of ``mlhpc.commands``."""

    def _points(self) -> dict[str, Plugin]:
        return find_plugins(COMMANDS)

    def infos(self) -> list[CommandInfo]:
        """All commands, in the order of ``mlhpc --help``."""
        headings = [*GROUPS, OTHER]
        infos = [CommandInfo.read(point) for point in self._points().values()]
        return sorted(infos, key=lambda info: (headings.index(info.group), info.order, info.name))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order a person meets them, then those of packages that state no heading."""
        return [info.name for info in self.infos()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command and give it the options that all commands have."""
        point = self._points().get(cmd_name)
        if point is None:
            return None
        try:
            command: click.Command = point.load()
        except Exception as error:  # it may be a stranger's code
            if package_of(point) == OURS and not isinstance(error, ImportError):
                raise
            raise click.ClickException(
                f"command {cmd_name!r} of package {package_of(point)} cannot be loaded: {reason(error)}"
            ) from error
        return add_shared(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands under their headings. No command is imported for it."""
        for group, infos in itertools.groupby(self.infos(), key=lambda info: info.group):
            with formatter.section(group):
                formatter.write_dl([(info.name, info.summary) for info in infos])


def asks_for_help(words: Sequence[str]) -> list[str]:
    """The words of a command line, ``help X`` written as ``X --help``."""
    return [*(word for word in words if word != HELP), "--help"] if words[:1] == [HELP] else list(words)
