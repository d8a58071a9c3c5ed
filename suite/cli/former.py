"""Former spellings, each refused with the one that holds now, and mistakes on the command line as one line."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

from suite.errors import did_you_mean, find_near

FORMER_COMMANDS: Mapping[str, str] = {"moe-bench": "moe"}  # words after mlhpc
FORMER_OPTIONS: Mapping[tuple[str, str], str] = {  # command, option: what it is now; "" stands for every command
    ("", "--json"): "--format json",
    ("moe", "--mode"): "--dispatch",
}
_EXTRA = r"(?s)Got unexpected extra arguments? \((.*)\)"
FORMER_VALUES: Mapping[tuple[str, str], str] = {("--format", "table"): "text"}


def explain_usage(error: click.ClickException) -> str:
    """The message of a mistake on the command line: with the present spelling of a former one, or the nearest."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = " ".join(context.command_path.split()[1:]) if context is not None else ""
    if isinstance(error, click.NoSuchOption) and context is not None:
        option = error.option_name
        known = [name for parameter in context.command.get_params(context) for name in parameter.opts]
        for key in ((command, option), ("", option)):
            if (now := FORMER_OPTIONS.get(key)) and now.split()[0] in known:
                return f"{option} is now {now}"
        bare = {name.lstrip("-"): name for name in known}  # dashes are no likeness
        near = find_near(option.lstrip("-"), bare)
        hint = f"; did you mean {bare[near]!r}?" if near else ";"
        return f"no such option {option}{hint} {f'mlhpc help {command}'.rstrip()} has all"
    if type(error) is click.BadParameter and error.param is not None:
        return _explain_value(error, error.param, command)
    if type(error) is click.UsageError and (extra := re.fullmatch(_EXTRA, error.message)):
        return f"unexpected argument {extra[1]!r}; mlhpc help {command} says what it takes"
    return error.format_message()


def _explain_value(error: click.BadParameter, parameter: click.Parameter, command: str) -> str:
    """The message of a value that an option or argument does not take."""
    name, message = max(parameter.opts, key=len), error.message.rstrip(".")
    if isinstance(parameter, click.Option):
        for spelling in parameter.opts:
            for (option, value), now in FORMER_VALUES.items():
                if spelling == option and error.message.startswith(f"{value!r} "):
                    return f"{option} {value} is now {option} {now}"
        if isinstance(parameter.type, click.Choice) and (given := message.split("'")[1:2]):
            return f"{name}: {message}" + did_you_mean(given[0], map(str, parameter.type.choices))
        if number := re.fullmatch(r"('.*') is not a valid (integer|float)( range)?", message, re.DOTALL):
            return f"{name} {number[1]}: expected a {'whole number' if number[2] == 'integer' else 'number'}"
        return f"{name}: {message}"
    if absent := re.fullmatch(r"(?:File|Directory|Path) '(.*)' does not exist", message, re.DOTALL):
        return f"{absent[1]}: does not exist; mlhpc help {command} says what is expected"
    return f"{parameter.make_metavar(error.ctx or click.Context(click.Command(command)))}: {message}"
