"""Explains mistakes on the command line in one line, with the nearest spelling that exists."""

from __future__ import annotations

import re

import click

from mlhpc.suite.errors import explain_near_names, find_near

# Messages of click, whose classes do not carry these values.
_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)", re.DOTALL)
_NO_NUMBER = re.compile(r"('.*') is not a valid (integer|float)( range)?", re.DOTALL)
_ABSENT = re.compile(r"(?:File|Directory|Path) '(.*)' does not exist", re.DOTALL)


def explain_usage(error: click.ClickException) -> str:
    """Return the message for a mistake on the command line."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = " ".join(context.command_path.split()[1:]) if context is not None else ""
    if isinstance(error, click.NoSuchOption) and context is not None:
        return _explain_option(error, context, command)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return _explain_absent(error.param, context or click.Context(click.Command(command)), command)
    # Not its subclasses
    if type(error) is click.BadParameter and error.param is not None:
        return _explain_value(error, error.param, command)
    if type(error) is click.UsageError and (extra := _EXTRA.fullmatch(error.message)):
        return f"unexpected argument {extra[1]!r}; mlhpc help {command} says what it takes"
    return error.format_message()


def _explain_absent(parameter: click.Parameter, context: click.Context, command: str) -> str:
    """Return the message for an absent argument or option that the command needs: its name and what it is."""
    if not isinstance(parameter, click.Option):
        return f"{parameter.make_metavar(context)} is missing; mlhpc help {command} says what it can be"
    what = (parameter.help or "").partition(". ")[0].rstrip(".")
    # The longest spelling is the one with two dashes.
    return f"{max(parameter.opts, key=len)} is missing ({what[:1].lower()}{what[1:]}); mlhpc help {command} has all"


def _explain_option(error: click.NoSuchOption, context: click.Context, command: str) -> str:
    """Return the message for an option that the command does not have."""
    known = [name for parameter in context.command.get_params(context) for name in parameter.opts]
    bare = {name.lstrip("-"): name for name in known}  # else the dashes alone would make options alike
    near = find_near(error.option_name.lstrip("-"), bare)
    hint = f"; did you mean {bare[near]!r}?" if near else ";"
    return f"no such option {error.option_name}{hint} {f'mlhpc help {command}'.rstrip()} has all"


def _explain_value(error: click.BadParameter, parameter: click.Parameter, command: str) -> str:
    """Return the message for a value that an option or argument does not accept."""
    name, message = max(parameter.opts, key=len), error.message.rstrip(".")
    if isinstance(parameter, click.Option):
        if isinstance(parameter.type, click.Choice) and (given := message.split("'")[1:2]):
            return f"{name}: {message}" + explain_near_names(given[0], map(str, parameter.type.choices))
        if number := _NO_NUMBER.fullmatch(message):
            return f"{name} {number[1]}: expected a {'whole number' if number[2] == 'integer' else 'number'}"
        return f"{name}: {message}"
    if absent := _ABSENT.fullmatch(message):
        return f"{absent[1]}: does not exist; mlhpc help {command} says what is expected"
    return f"{parameter.make_metavar(error.ctx or click.Context(click.Command(command)))}: {message}"
