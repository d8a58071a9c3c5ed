"""Groups the commands of `mlhpc`. Only the command that is called is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pkgutil import resolve_name

import click

from mlhpc.suite.cli.commands import SECTIONS, Command
from mlhpc.suite.cli.options import add_shared
from mlhpc.suite.cli.usage_errors import explain_command
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import (
    COMMANDS,
    EXCHANGE,
    FAILURES,
    OURS,
    Plugin,
    explain_missing_wing,
    explain_unusable,
    find_plugins,
    list_missing_wings,
    load_export,
    mark_missing_wing,
    print_skipped,
)

OTHER = "Other commands"  # the heading of commands of other packages
HELP = "help"  # `mlhpc help X` is `mlhpc X --help`


class Subcommands(click.Group):
    """A group that answers an unknown command with the nearest one in meaning or spelling."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order of their definition."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first word."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(explain_command(args[0], self, ctx))
        return super().resolve_command(ctx, args)


class LazyGroup(Subcommands):
    """The group of our commands (`mlhpc.suite.cli.commands`) and of other packages' commands (entry points)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List our commands in the order of the first page, then other packages'. Missing wings' are left out."""
        missing = list_missing_wings()
        ours = [name for name, command in _list_own_commands().items() if command.wing not in missing]
        return [*ours, *_find_other_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command and give it the options that all commands have."""
        command = _list_own_commands().get(cmd_name)
        if command is not None and not command.wing:
            try:
                return add_shared(resolve_name(command.entry))
            except ImportError as error:  # a library that is not installed; any other error is a defect of ours
                raise _make_load_error(cmd_name, OURS, error) from error
        # Only now are entry points searched: reading all installed packages takes time.
        if command is not None and command.wing in list_missing_wings():
            raise click.ClickException(f"command {cmd_name!r}: {explain_missing_wing(command.wing)}")
        plugin = find_plugins(COMMANDS).get(cmd_name) if command is not None else _find_other_commands().get(cmd_name)
        if plugin is None:
            return None
        try:
            return add_shared(plugin.point.load())
        except FAILURES as error:
            raise _make_load_error(cmd_name, plugin.package, error) from error

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Click itself would print an empty line for an interrupt."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands under their headings. None of ours is imported for it."""
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(each.name, mark_missing_wing(each.wing) or each.summary) for each in commands])
        if others := _find_other_commands():
            with formatter.section(OTHER):
                formatter.write_dl([(name, self._summary(ctx, name)) for name in others])

    def _summary(self, ctx: click.Context, name: str) -> str:
        """Load another package's command. Returns its help in one line, or why it cannot be loaded."""
        try:
            command = self.get_command(ctx, name)
        except click.ClickException as error:
            return f"({error.message})"
        return command.get_short_help_str(limit=120) if command is not None else ""


def find_exchange_command(name: str, asked: str) -> click.Command:
    """Find a command of a group that the wing of other tools' forms has. Without the wing it is one that says so."""
    try:
        found: click.Command = load_export(name, asked)
    except InputError as error:
        why = str(error)

        @click.command(name, help=mark_missing_wing(EXCHANGE), context_settings={"ignore_unknown_options": True})
        @click.argument("words", nargs=-1, type=click.UNPROCESSED)
        def missing(words: tuple[str, ...]) -> None:
            raise InputError(why)

        return missing
    return found


def _make_load_error(name: str, package: str, error: BaseException) -> click.ClickException:
    return click.ClickException(f"command {name!r} of package {package} cannot be loaded: {explain_unusable(error)}")


def _list_own_commands() -> dict[str, Command]:
    return {command.name: command for commands in SECTIONS.values() for command in commands}


def _find_other_commands() -> dict[str, Plugin]:
    """Find the commands of other packages. A command with the name of one of ours is left out."""
    ours = _list_own_commands()
    others = {}
    for name, plugin in find_plugins(COMMANDS).items():
        if name in ours and ours[name].wing and plugin.package == OURS:
            continue
        if name in ours:
            print_skipped("command", name, plugin.package, f"its name is taken by {ours[name].entry} of {OURS}")
        else:
            others[name] = plugin
    return others


def convert_help_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with ``help X`` as ``X --help``. `-hosts` is not `-h`."""
    words = [re.sub(r"^(-h[a-z])", r"-\1", word) for word in words]
    return [*(word for word in words if word != HELP), "--help"] if words[:1] == [HELP] else list(words)
