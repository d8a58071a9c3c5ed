"""Completes values in a shell: workloads, sizes, systems, rules, plans, and the keys of ``--set``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from mlhpc.suite.config import list_setting_keys
from mlhpc.suite.descriptor import load_descriptor, load_object
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import WORKLOADS, find_plugins

Lister = Callable[[click.Context], Iterable[str]]


def _find_workloads(context: click.Context) -> list[str]:
    """Return the workload that the command line names so far, else all."""
    workloads = find_plugins(WORKLOADS)
    # click sets no argument while an option waits for its value; the shell passes all words
    words = [context.params.get("workload"), *os.environ.get("COMP_WORDS", "").split()]
    return [word for word in words if word in workloads][:1] or list(workloads)


def _list_sizes(context: click.Context) -> Iterable[str]:
    found = (load_descriptor(name).card().sizes for name in _find_workloads(context))
    return dict.fromkeys(size for sizes in found for size in sizes)


def _list_systems(context: click.Context) -> Iterable[str]:
    folders = (Path("submissions/systems"), Path(__file__).parents[2] / "submissions" / "systems")
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _list_plans(context: click.Context) -> Iterable[str]:
    folders = (load_descriptor(name).folder / "plans" for name in _find_workloads(context))
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _list_keys(context: click.Context) -> Iterable[str]:
    names = _find_workloads(context)
    return dict.fromkeys(f"{key}=" for name in names for key in list_setting_keys(name))


# By the name of the parameter, which has one meaning in all commands
_LISTERS: dict[str, Lister] = {
    "workload": lambda context: find_plugins(WORKLOADS),
    "size": _list_sizes,
    "system_name": _list_systems,
    "system": _list_systems,
    "plan_name": _list_plans,
    "overrides": _list_keys,
    "ruleset": lambda context: load_object("mlhpc.suite.compliance.ruleset:list_rulesets")(),
    "ruleset_name": lambda context: load_object("mlhpc.suite.compliance.ruleset:list_rulesets")(),
    "explain": lambda context: load_object("mlhpc.suite.compliance.all_rules:RULES"),
}


def _complete(
    lister: Lister, files: Callable[..., list[CompletionItem]], ctx: click.Context, incomplete: str
) -> object:
    """Return the names that begin as the word does. Without one, what click itself completes, such as files."""
    try:
        found = [CompletionItem(name) for name in lister(ctx) if name.startswith(incomplete)]
    except (InputError, ImportError):
        found = []
    return found or files(ctx, incomplete)


def add_completion(command: click.Command) -> None:
    """Let each parameter of a known name complete its values."""
    for parameter in command.params:
        flag = isinstance(parameter, click.Option) and parameter.is_flag
        if (lister := _LISTERS.get(parameter.name or "")) and not flag:
            parameter.shell_complete = partial(_complete, lister, parameter.shell_complete)  # type: ignore[method-assign, assignment]
