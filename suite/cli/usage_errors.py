"""Explains mistakes on the command line in one line, with the right form: the nearest in meaning, else in spelling."""

from __future__ import annotations

import difflib
import re
import sys
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from mlhpc.suite.config import list_setting_keys, split_mapping
from mlhpc.suite.errors import explain_near_names, explain_unknown_name, find_near
from mlhpc.suite.meanings import find_same_meaning, find_tool, has_word, read_meanings, simplify, split_parts
from mlhpc.suite.plugins import WORKLOADS, find_plugins

# Messages of click, whose classes do not carry these values.
_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)", re.DOTALL)
_NO_NUMBER = re.compile(r"('.*') is not a valid (integer|float)( range)?", re.DOTALL)
_DIRECTORY = re.compile(r"File '(.*)' is a directory", re.DOTALL)
_FILE = re.compile(r"Directory '(.*)' is a file", re.DOTALL)
_ABSENT = re.compile(r"(?:File|Directory|Path) (['\"].*['\"]) does not exist")
FEW = 24  # options of a command that are listed
SLIP = 0.8  # a name as similar as this was meant and mistyped
# Keys of a system file (mlhpc.suite.launch.job.SystemFile; a test compares)
SYSTEM_KEYS = (
    *("site.queue", "site.account", "site.qos", "site.constraint", "site.requeue", "site.mpi", "site.options"),
    *("site.launch_options", "site.modules", "site.environment", "site.setup", "site.scratch", "site.max_nodes"),
    *("resources.gpus_per_node", "resources.cpus_per_rank", "resources.exclusive", "container.image"),
)
SCRIPTS = {".sh", ".sbatch", ".slurm", ".pbs", ".job", ".lsf"}
SIZES = ("smoke", "mini", "small", "full")


def explain_usage(error: click.ClickException, group: click.Group) -> str:
    """Return the message for a mistake on the command line of a group."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = " ".join(context.command_path.split()[1:]) if context is not None else ""
    if isinstance(error, click.NoSuchOption) and context is not None:
        return _explain_option(error.option_name, context, command)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return _explain_absent(error.param, context or click.Context(click.Command(command)), command)
    if isinstance(error, click.BadOptionUsage):  # it comes without a context
        return _explain_count(error, _find_innermost(click.Context(group)))
    # Not its subclasses
    if type(error) is click.BadParameter and error.param is not None:
        return _explain_value(error, error.param, command)
    if type(error) is click.UsageError and context is not None and (extra := _EXTRA.fullmatch(error.message)):
        return f"unexpected argument {extra[1]!r}; {_explain_extra(extra[1], context, command)}"
    return error.format_message()


def explain_command(name: str, group: click.Group, context: click.Context) -> str:
    """Return the message for a command that a group does not have."""
    inside = " ".join(context.command_path.split()[1:])
    known = group.list_commands(context)
    unknown = f"unknown command {name!r}"
    if name in find_plugins(WORKLOADS):
        taking = [path for path, command in _walk(context) if any(each.name == "workload" for each in command.params)]
        path = f"{inside} {taking[0]}" if inside and taking else "run"
        return f"{unknown}: it is a workload: mlhpc {path} {name}"
    if name.endswith(".py"):
        return f"{unknown}: {_explain_program(name)}"
    if Path(name).suffix in {".yaml", ".yml"}:
        return f"{unknown}: a file is given to a command: mlhpc run WORKLOAD --config {name}, or submit --system {name}"
    following = _find_following(name)
    mistyped = (near := find_near(name, known)) and _are_alike(name, near)
    if mistyped and (not _has_meaning(name) or following in find_plugins(WORKLOADS)):
        return explain_unknown_name("command", name, known)
    parts = () if mistyped else (following, *split_parts(name))
    form = _find_any_command(name, following, parts, inside, context.find_root())
    return f"{unknown}: {form}" if form else explain_unknown_name("command", name, known)


def _find_any_command(name: str, following: str, parts: Iterable[str], inside: str, top: click.Context) -> str:
    """Return what to call for a name, for another tool's words, or for a part of the name. "" if there is nothing."""
    form = find_tool("commands", f"{name}-{following}") or _find_command(name, inside, top, following)
    form = form or find_tool("commands", name)
    return form or next(filter(None, (_find_command(part, inside, top) for part in parts)), "")


def _has_meaning(name: str) -> bool:
    return any(has_word(words, name) for words in read_meanings()["commands"].values())


def _find_following(word: str) -> str:
    """Return the word that follows another one on the command line. "" if none does."""
    return next((second for first, second in pairwise(sys.argv[1:]) if first == word), "")


def _find_command(name: str, inside: str, top: click.Context, following: str = "") -> str:
    """Return what to call for the name of a command elsewhere. Commands of the group ``inside`` come first, then those
    that take what ``following`` is: a workload, or a path.
    """
    commands = dict(_walk(top))
    taken = "workload" if following in find_plugins(WORKLOADS) else "path" if Path(following or "-").exists() else ""
    paths = [path for path, words in read_meanings()["commands"].items() if has_word(words, name)]
    paths += [path for path in commands if path.split()[-1] == name]
    # A stable order
    paths.sort(key=lambda path: (not path.startswith(f"{inside} "), not _takes_argument(commands.get(path), taken)))
    for path in paths:
        if path in commands:
            return _describe(path, commands[path])
        if path in ("help", "--version"):
            return f"mlhpc {path} {inside if path == 'help' else ''}".rstrip()
        if path.endswith("WORKLOAD"):
            return f"use mlhpc {path}"
    return _find_text(name)


def _takes_argument(command: click.Command | None, name: str) -> bool:
    named = [each.name or "" for each in command.params] if command is not None else []
    return any(each.startswith(name) for each in named)


def _describe(path: str, command: click.Command) -> str:
    """Return a command with its arguments, and what it does."""
    words = [each for each in command.collect_usage_pieces(click.Context(command)) if each not in ("", "[OPTIONS]")]
    return f"use mlhpc {' '.join([path, *words])} ({command.get_short_help_str(limit=100).rstrip('.')})"


def _walk(context: click.Context, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands below a group with their paths. All are imported: a second, after a mistake."""
    group = context.command
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            try:
                command = group.get_command(context, name)
            except click.ClickException:  # of another package, or with a library that is not installed
                continue
            if command is not None:
                yield f"{path} {name}".strip(), command
                yield from _walk(click.Context(command, context, name), f"{path} {name}".strip())


def _explain_absent(parameter: click.Parameter, context: click.Context, command: str) -> str:
    """Return the message for an absent argument or option that the command needs: its name and what it is."""
    if not isinstance(parameter, click.Option):
        can_be = f": {', '.join(find_plugins(WORKLOADS))}" if parameter.name == "workload" else ""
        return f"{parameter.make_metavar(context)} is missing{can_be}; mlhpc help {command} says what it can be"
    if script := next((word for word in sys.argv[2:] if Path(word).suffix in SCRIPTS), None):
        return f"{script}: the job script is written by mlhpc submit WORKLOAD --system NAME (--dry-run prints it)"
    # The longest spelling is the one with two dashes.
    return f"{max(parameter.opts, key=len)} is missing ({_summarize(parameter)}); mlhpc help {command} has all"


def _explain_option(name: str, context: click.Context, command: str) -> str:
    """Return the message for an option that the command does not have."""
    if len(name) == 2 and name not in sys.argv:  # click reads `-lr` as -l -r
        name = next((word for word in sys.argv if re.fullmatch(rf"{name}[A-Za-z-]+", word)), name)
    program = next((word for word in sys.argv[2:] if word.endswith(".py")), None)
    form = _explain_program(program) if program else _find_form(name, _find_value(name), context, command)
    return f"no such option {name}; {form}"


def _explain_count(error: click.BadOptionUsage, context: click.Context) -> str:
    """Return the message for an option with a value that it does not take, or without one that it needs."""
    option = _map_options(context.command).get(error.option_name)
    if option is None:
        return error.format_message()
    said = "it takes no value" if option.is_flag else f"a value is missing: {option.make_metavar(context)}"
    return f"{error.option_name}: {said} ({_summarize(option)})"


def _summarize(option: click.Option) -> str:
    what = (option.help or "").partition(". ")[0].rstrip(".")
    # The first word of a sentence, unless it is written in capitals: YAML.
    return what if re.match(r"\w[a-z]*[A-Z]", what) else what[:1].lower() + what[1:]


def _find_value(name: str) -> str:
    """Return the value that was given to an option of the command line. "" if none was."""
    words = sys.argv[1:]
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and not following.startswith("-"):
            return following
    return ""


def _find_form(name: str, value: str, context: click.Context, command: str) -> str:
    """Return the right form of an option that the command does not have, with the value that it was given."""
    top = context.find_root()
    if isinstance(context.command, click.Group):
        if called := _find_called(context):
            inner = f"{command} {called.info_name}".strip()
            return f"options stand behind the command {inner}: {_find_form(name, value, called, inner)}"
        if workload := next((word for word in sys.argv[1:] if word in find_plugins(WORKLOADS)), None):
            return f"a workload is an argument of a command: mlhpc {command or 'run'} {workload}"
        # A name says more than a letter
        name = max((word.partition("=")[0] for word in sys.argv[1:] if word.startswith("-")), key=len, default=name)
    options = _map_options(context.command)
    bare = {option.lstrip("-"): option for option in options}  # else the dashes alone would make options alike
    near = find_near(name.lstrip("-"), bare) if len(name) > 2 else None
    if form := _find_by_value(value, options, command) or _find_here(name, value, context, command):
        return form
    if near and _are_alike(name.lstrip("-"), near):
        return f"did you mean {bare[near]!r}? mlhpc help {command} has all"
    if "--set" in options and (key := find_same_meaning(name, _list_keys())):
        return f"it is a setting: --set {_render_setting(key, name, value)}"
    return (
        (_find_command(name.lstrip("-"), "", top) if context is top else "")
        or find_tool("options", name, f"{name}={value}" if value else name)
        or _find_elsewhere(name, top)
        or ("" if value.isdecimal() else _find_kind(value, options, command))
        or _find_by_part(name, value, options, top)
        or f"{f'did you mean {bare[near]!r}? ' if near else ''}{_list_options(options)}mlhpc help {command}".rstrip()
        + " has all"
    )


def _list_options(options: Mapping[str, click.Option]) -> str:
    """Return the options of a command, if they are few."""
    own = list(dict.fromkeys(max(each.opts, key=len) for each in options.values()))
    return f"it has {', '.join(own)}; " if 0 < len(own) <= FEW else ""


def _find_by_value(value: str, options: Mapping[str, click.Option], command: str) -> str:
    """Return what to do about an unknown option whose value is settings, variables or workloads. Else ""."""
    if (pairs := _list_pairs(value)) and (form := _explain_pairs(pairs, options, command)):
        return form
    takes_one = "--set" in options or command.endswith("generate")
    named = [word for word in re.split(r"[,:@/.]", value) if takes_one and word in find_plugins(WORKLOADS)]
    return (
        f"a workload is an argument and has no name: {' && '.join(f'mlhpc {command} {each}' for each in named)}"
        * bool(named)
    )


def _list_pairs(text: str) -> list[tuple[str, str]]:
    """Return the keys and values of ``a=1``, ``a=1,b=2`` or ``{a: 1}``. Empty if a text is neither."""
    if text.startswith("{"):
        return split_mapping(text)
    pairs = [each.lstrip("+~-").partition("=")[::2] for each in re.split(r",(?=[\w.]+=)", text)]
    return [(key.replace("/", "."), value) for key, value in pairs if key and value]  # / names a group of Hydra


def _find_here(name: str, value: str, context: click.Context, command: str) -> str:
    """Return the option or argument of the command that means the same. "" if it has none."""
    options = _map_options(context.command)
    if own := find_same_meaning(name, options):
        return f"here it is {_render_option(options[own], value, name)}"
    for argument in context.command.params:
        words = read_meanings()["arguments"].get(argument.name, "")
        named = has_word(words, name) or (argument.name == "workload" and value in find_plugins(WORKLOADS))
        if isinstance(argument, click.Argument) and named:
            known = argument.name != "workload" or value in find_plugins(WORKLOADS)
            given = value if value and known else argument.make_metavar(context)
            return f"it is an argument and has no name: mlhpc {command} {given}"
    return ""


def _find_by_part(name: str, value: str, options: Mapping[str, click.Option], top: click.Context) -> str:
    """Return the option, setting or command that a part of a name means. "" if no part means one."""
    for part in split_parts(name):
        if own := find_same_meaning(part, options):
            return f"the nearest here is {_render_option(options[own], value, part)}"
        if where := _find_elsewhere(part, top) or _find_command(part, "", top):
            return f"the nearest in meaning: {where}"
    return ""


def _find_called(context: click.Context) -> click.Context | None:
    """Return the context of the command of a group that the command line names. None if it names none."""
    group = context.command
    assert isinstance(group, click.Group)
    named = next((word for word in sys.argv[1:] if word in group.list_commands(context)), None)
    command = group.get_command(context, named) if named is not None else None
    return None if command is None else click.Context(command, context, named)


def _find_innermost(context: click.Context) -> click.Context:
    called = _find_called(context) if isinstance(context.command, click.Group) else None
    return _find_innermost(called) if called else context


def _find_elsewhere(name: str, top: click.Context) -> str:
    """Return where another command, a setting or a system file has what an option means. "" if none has."""
    if key := find_same_meaning(name, SYSTEM_KEYS):
        return f"a system file states it ({key}; submissions/systems/example.yaml): mlhpc submit --system FILE"
    if text := _find_text(name):
        return text
    if key := find_same_meaning(name, _list_keys()):
        return f"it is a setting of a run: mlhpc run WORKLOAD --set {_render_setting(key, name, _find_value(name))}"
    others: dict[str, tuple[str, click.Option]] = {}
    for path, command in _walk(top):
        for spelled, option in _map_options(command).items():
            # A letter alone means another thing elsewhere; an option that does not take the value was not meant
            if (
                len(spelled) > 3
                and _suits(option, _find_value(name))
                and (spelled not in others or (option.required and not others[spelled][1].required))
            ):
                others[spelled] = path, option
    if found := find_same_meaning(name, others):
        path, option = others[found]
        return f"mlhpc {path} has {found} ({_summarize(option)})"
    return ""


def _find_text(name: str) -> str:
    return next((text for words, text in read_meanings()["texts"] if has_word(words, name)), "")


def _map_options(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their spellings, the longest first."""
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name: each for each in options for name in sorted(each.opts, key=len, reverse=True)}


def _render_option(option: click.Option, value: str, asked: str = "") -> str:
    """Return an option with a value as it is written. ``asked``: its name elsewhere, which may be the value here."""
    name = max(option.opts, key=len)
    if option.is_flag:
        return f"{name} (it takes no value)" if value else name
    if isinstance(option.type, click.Choice) and (same := find_same_meaning(asked, map(str, option.type.choices))):
        return f"{name} {same}"
    kind = option.metavar or option.make_metavar(click.Context(click.Command(""))).replace("INTEGER RANGE", "N")
    counts = value.isdigit() and option.metavar in ("AXES", "NAME")  # elsewhere; here it is a name
    return f"{name} {value if value and not counts and _takes(option, value) else kind}"


def _takes(option: click.Option, value: str) -> bool:
    try:
        option.type.convert(value, option, None)
    except click.ClickException:
        return False
    return True


def _suits(option: click.Option, value: str) -> bool:
    """Return False if an option does not take a value. A flag takes none; a path may come to exist."""
    return not value or option.is_flag or isinstance(option.type, click.Path | click.Choice) or _takes(option, value)


def _list_keys() -> Iterable[str]:
    """Return the dotted keys of settings: of the workload that the command line names, else of all."""
    workloads = find_plugins(WORKLOADS)
    named = [word for word in sys.argv[1:] if word in workloads]
    return dict.fromkeys(key for name in named or workloads for key in list_setting_keys(name))


def _render_setting(key: str, name: str, value: str) -> str:
    values: Mapping[str, Any] = {simplify(word): each for word, each in read_meanings()["values"].items()}
    return f"{key}={values.get(simplify(value or name), value or 'VALUE')}"


def _are_alike(name: str, near: str) -> bool:
    # Letters that change places count as two slips
    return sorted(name) == sorted(near) or difflib.SequenceMatcher(None, name.lower(), near.lower()).ratio() >= SLIP


def _explain_extra(text: str, context: click.Context, command: str) -> str:
    """Return what to do about arguments that a command does not take. ``text`` has them separated by blanks."""
    word, options = text.split()[0] if text.split() else text, _map_options(context.command)
    if word in find_plugins(WORKLOADS) and (taken := _find_stray(word, options)):
        return f"{taken!r} is no workload: {_explain_extra(taken, context, command)}"
    if "=" in word and (form := _explain_assignment(word, options, command)):
        return form
    if kind := _find_kind(word, options, command):
        return kind
    if word == "help":
        return f"mlhpc help {command}"
    if f"--{word}" in options:
        return f"an option has two dashes: {_render_option(options[f'--{word}'], '')}"
    form = find_tool("commands", word) or _find_form(word, "", context, command)
    return f"mlhpc help {command} says what it takes" if form.endswith("has all") else form


def _explain_assignment(word: str, options: Mapping[str, click.Option], command: str) -> str:
    """Return the right form of KEY=VALUE without an option. "" if nothing is known of it."""
    ((key, value),) = _list_pairs(word)[:1] or [(word, "")]
    if form := _explain_pairs(_list_pairs(word), options, command):
        return form
    if "--set" not in options:
        return ""
    if known := find_same_meaning(value, _list_keys()):
        return f"there is no setting {key!r}; --set {_render_setting(known, value, '')}"
    return (
        _find_text(key)
        or find_tool("options", key)
        or f"there is no setting {key!r}; mlhpc workload schema config has all"
    )


def _explain_pairs(pairs: Sequence[tuple[str, str]], options: Mapping[str, click.Option], command: str) -> str:
    """Return the right form of keys with values. "" if they are no settings, options or variables."""
    keys, variables = tuple(_list_keys()), [f"{key}={value}" for key, value in pairs if re.fullmatch("[A-Z0-9_]+", key)]
    settings = [(known, key, value) for key, value in pairs if (known := find_same_meaning(key, keys))]
    words = " ".join(f"--set {_render_setting(known, key, value)}" for known, key, value in settings)
    if variables and command.startswith("submit"):
        form = ", ".join(each.replace("=", ": ", 1) for each in variables)
        return f"a system file states variables of the ranks (site.environment: {{{form}}}): mlhpc submit --system FILE"
    if variables:
        return f"variables of the environment stand before the command: {' '.join(variables)} mlhpc {command}"
    if settings and any(re.search(r"^[^\[]+,", value) for _, _, value in settings):
        return _find_text("multirun")
    named = dict(pairs)
    if named.get("workload") in find_plugins(WORKLOADS):
        return f"a workload is an argument: mlhpc {command} {named['workload']}"
    if words and "--set" in options:
        return f"a setting needs its option: {words}"
    for key, value in pairs:
        if own := find_same_meaning(key, options):
            return f"an option has two dashes: {_render_option(options[own], value)}"
    return ""


def _find_kind(word: str, options: Mapping[str, click.Option], command: str) -> str:
    """Return where a word stands that is a number, a size, a file, a folder, a workload. "" if it is none."""
    if word.isdecimal() and (numbers := [name for name in ("--ranks", "--runs") if name in options]):
        return f"a number needs its option: {' or '.join(f'{name} {word}' for name in numbers)}"
    if re.match(r"[.~]?/[^:]*:[./~]", word):
        return find_tool("options", "volume", f"-v {word}") + "; mlhpc itself reads $MLHPC_DATA"
    if word in SIZES and "--size" in options:
        return f"a size needs its option: --size {word}"
    if Path(word).suffix in {".yaml", ".yml"} and "--config" in options:
        return f"a file of settings needs its option: --config {word}"
    if word in find_plugins(WORKLOADS):
        if "--size" not in options and not command.startswith(("workload", "data")):
            return "no workload is given here: runs and packages say which they are of"
        return f"one workload for each command: mlhpc {command} {word}"
    if word.endswith(".py"):
        return _explain_program(word)
    if word and Path(word).is_dir() and "--output" in options:
        return f"a folder needs its option: --output {word}"
    return ""


def _find_stray(workload: str, options: Mapping[str, click.Option]) -> str:
    """Return the word before a workload that was taken for one. "" if there is none."""
    before = sys.argv[2 : sys.argv.index(workload)] if workload in sys.argv[2:] else []
    free = [word for last, word in pairwise(["", *before]) if last not in options or options[last].is_flag]
    return next((word for word in free if not word.startswith("-") and word not in find_plugins(WORKLOADS)), "")


def _explain_program(name: str) -> str:
    return f"a program of your own is not started by mlhpc: python {name} with `import mlhpc` in it (docs/own_loop.md)"


def _explain_value(error: click.BadParameter, parameter: click.Parameter, command: str) -> str:
    """Return the message for a value that an option or argument does not accept."""
    name, message = max(parameter.opts, key=len), error.message.rstrip(".")
    if isinstance(parameter, click.Option):
        # `-np 4` is -n with the value p for click
        joined = _find_joined(parameter, sys.argv[1:])
        if joined and error.ctx is not None:
            return _explain_option(joined, error.ctx, command)
        if isinstance(parameter.type, click.Choice) and (given := message.split("'")[1:2]):
            return f"{name}: {message}" + explain_near_names(given[0], map(str, parameter.type.choices))
        if number := _NO_NUMBER.fullmatch(message):
            kind = "whole number" if number[2] == "integer" else "number"
            form = _explain_number(number[1], kind, _summarize(parameter))
            return f"{name} {number[1]}: expected a {kind}{form}"
        if directory := _DIRECTORY.fullmatch(message):
            return f"{name} {directory[1]}: is a directory, expected a file"
        return f"{name}: {message}"
    if absent := _ABSENT.fullmatch(message):
        given = literal_eval(absent[1])  # click shows the repr of a path
        return f"{given}: does not exist; mlhpc help {command} says what is expected"
    if directory := _DIRECTORY.fullmatch(message):
        return f"{directory[1]}: is a directory, expected a file"
    if file := _FILE.fullmatch(message):
        return f"{file[1]}: is a file, expected a folder"
    return f"{parameter.make_metavar(error.ctx or click.Context(click.Command(command)))}: {message}"


def _explain_number(text: str, kind: str, summary: str) -> str:
    """Return what an option's number means, and the right form of one with a comma or a unit."""
    given = text.strip("'")
    if re.fullmatch(r"\d+,\d+", given) and kind == "number":
        return f" with a point: {given.replace(',', '.')} ({summary})"
    unit = " without a unit" if re.match(r"[\d.,]+ ?[A-Za-z%/]", given) else ""
    return f"{unit} ({summary})"


def _find_joined(option: click.Option, words: Sequence[str]) -> str:
    """Return a word such as ``-np`` that begins like a short form of the option. "" if there is none."""
    short = [name[1] for name in option.opts if len(name) == 2]
    return next((word for word in words if re.match(r"-[a-zA-Z][a-z]+(=|$)", word) and word[1] in short), "").partition(
        "="
    )[0]
