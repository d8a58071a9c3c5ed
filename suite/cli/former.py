"""Former spellings, each refused with the one that holds now, and mistakes on the command line as one line."""

from __future__ import annotations

from collections.abc import Mapping

import click

from suite.errors import did_you_mean, find_near

FORMER_COMMANDS: Mapping[str, str] = {"moe-bench": "moe"}  # words after mlhpc
FORMER_OPTIONS: Mapping[tuple[str, str], str] = {  # command, option: what it is now; "" stands for every command
    ("", "--json"): "--format json",
    ("moe", "--mode"): "--dispatch",
}
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
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        for name in error.param.opts:
            for (option, value), now in FORMER_VALUES.items():
                if name == option and error.message.startswith(f"{value!r} "):
                    return f"{option} {value} is now {option} {now}"
        if isinstance(error.param.type, click.Choice) and (given := error.message.split("'")[1:2]):
            near = did_you_mean(given[0], map(str, error.param.type.choices))
            return error.format_message().rstrip(".") + near
    return error.format_message()
