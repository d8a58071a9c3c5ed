"""The page of commands, from the commands themselves: each with its options, defaults, exit codes and examples."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from mlhpc.suite.cli.commands import SECTIONS
from mlhpc.suite.cli.main import group
from mlhpc.suite.plugins import list_missing_wings

VERBATIM = "\b"  # click: the paragraph that follows keeps its lines

HEAD = """# Commands

`mlhpc help COMMAND` says the same.

| spelling | means, on every command that has it |
| --- | --- |
| `--size NAME` | size of the workload, such as `smoke` or `full` (`mlhpc workload list` shows all) |
| `--config FILE` | YAML file of your own settings, used instead of a size's |
| `--set KEY=VALUE` | change one setting |
| `--ranks N` | number of MPI ranks to start on this machine; inside srun, mpiexec or torchrun leave it out |
| `-o`, `--output PATH` | optional output path, the default in brackets; an existing folder is an error, or is added to |
| `--format text\\|json` | print text for people or JSON for programs |
| `-q`, `--quiet` | print only results and errors, no progress |
| `--no-color` | print without colours, as with the environment variable `NO_COLOR` |

Exit codes of every command: 0 success; 1 findings, or a failed run; 2 a mistake in the command, a file or the
environment; 70 a defect of mlhpc itself; 130 Ctrl-C; 143 SIGTERM. A command with further codes lists them. An error is
one line on standard error.
"""


def page() -> str:
    """The whole page. Commands of packages other than ours are left out."""
    context = click.Context(group, info_name="mlhpc")
    lines = [HEAD]
    for heading, entries in SECTIONS.items():
        lines.append(f"## {heading}\n")
        for entry in entries:
            if entry.wing in list_missing_wings():
                continue
            command = group.get_command(context, entry.name)
            assert command is not None
            lines += _command(command, click.Context(command, info_name=entry.name, parent=context), 3)
    return "\n".join(lines).rstrip() + "\n"


def _command(command: click.Command, context: click.Context, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {context.command_path}\n"
    if not isinstance(command, click.Group):
        yield f"    {command.get_usage(context).removeprefix('Usage: ')}\n".replace("\n      ", " ")
    yield from _text(inspect.cleandoc(command.help or ""))
    yield from _options(command)
    yield from _text(inspect.cleandoc(command.epilog or ""))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=context), depth + 1)


def _text(text: str) -> Iterator[str]:
    """Paragraphs; those whose lines are kept become code, under their first line."""
    for paragraph in filter(None, (part.strip("\n") for part in text.split("\n\n"))):
        if paragraph.lstrip().startswith(VERBATIM):
            first, *rest = [line for line in paragraph.replace(VERBATIM, "").splitlines() if line.strip()]
            yield f"{first.strip()}\n"
            if rest:
                yield "\n".join(f"    {line.strip()}" for line in rest) + "\n"
        else:
            yield paragraph.replace("<", "&lt;") + "\n"


def _options(command: click.Command) -> Iterator[str]:
    shared = {"--quiet", "--no-color"}
    options = [
        each
        for each in command.params
        if isinstance(each, click.Option) and not each.hidden and not shared & set(each.opts)
    ]
    if options:
        yield "| option | default | meaning |"
        yield "| --- | --- | --- |"
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.opts)
            yield f"| {names}{_value(option)} | {_default(option)} | {_cell(option.help or '')} |"
        yield ""


def _value(option: click.Option) -> str:
    """What the option takes, as it is typed."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" `{_cell('|'.join(map(str, option.type.choices)))}`"
    return f" `{option.metavar or option.type.name.split()[0].upper()}`"


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    value = option.default
    plain = value is not None and not option.is_flag and isinstance(value, (str, int, float)) and option.show_default
    return f"`{value}`" if plain else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
