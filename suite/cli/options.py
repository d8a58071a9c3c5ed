"""Defines the options that several commands share: one spelling, one meaning, one help text each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlhpc.suite import LARGEST_NUMBER, MOST_RUNS
from mlhpc.suite.cli.completion import add_completion
from mlhpc.suite.descriptor import use_cards
from mlhpc.suite.files import QUIET, VERBOSE, render_repr
from mlhpc.suite.plugins import CARDS

Function = Callable[..., Any]  # of a command
Decorator = Callable[[Function], Function]
NO_COLOR = "NO_COLOR"  # environment variable that rich, and most programs, honour (no-color.org)
DEFAULT_SIZE = "mini"
TEXT, JSON = "text", "json"
RANKS_PER_CORE = 64  # more are a slip of the finger
LARGEST = 2**62  # a seed, and what a rank adds to it, fit 64 bits


class FiniteRange(click.FloatRange):
    """A number with limits, at most `LARGEST_NUMBER`. click's own range accepts infinity and NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text. The command ends with a usage error if it is no such number."""
        number = float(super().convert(value, param, ctx))
        if not abs(number) <= LARGEST_NUMBER:  # NaN is not either
            self.fail(f"{number:g} is not a finite number up to {LARGEST_NUMBER:g}.", param, ctx)
        return number


class PercentRange(FiniteRange):
    """A share in per cent, with or without the sign: ``5%`` or ``5``. ``fraction``: the command gets 0.05."""

    def __init__(self, low: float, high: float | None = None, *, fraction: bool = True) -> None:
        super().__init__(low, high)
        self.scale = 100.0 if fraction else 1.0

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text. Below 1 the sign is needed: other tools mean 5 % by 0.05."""
        text = str(value).strip()
        if re.fullmatch(r"0?\.\d*[1-9]\d*", text):
            self.fail(f"{text} is in per cent here: write {100 * float(text):g}% or {text}%.", param, ctx)
        return super().convert(text.removesuffix("%").strip(), param, ctx) / self.scale


class Duration(FiniteRange):
    """A time such as 90s, 30min, 2h or 1d, in seconds."""

    def __init__(self) -> None:
        super().__init__(0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text."""
        units = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
        match = re.fullmatch(r"([\d.]+) ?(s|m|min|h|d)", str(value).strip())
        if match is None:
            self.fail(f"{value!r}: expected a time with its unit, such as 90s, 30min or 2h", param, ctx)
        return units[match[2]] * super().convert(match[1], param, ctx)


class IntegerRange(click.IntRange):
    """A whole number with limits, at most `LARGEST`. Python's integers have any length, those of libraries 64 bits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a text. The command ends with a usage error if it is too large."""
        if isinstance(value, str) and len(value) > len(str(LARGEST)) + 1:  # Python refuses 4301 digits with a traceback
            self.fail(f"{render_repr(value, longest=24)} is not a whole number of at most {LARGEST}.", param, ctx)
        number = int(super().convert(value, param, ctx))
        if abs(number) > LARGEST:
            self.fail(f"{number} is more than {LARGEST}.", param, ctx)
        return number


def runs_option(
    default: int | None = 1, text: str = "Number of runs; mlhpc workload list says how many a score needs."
) -> Decorator:
    """``--runs N``, at most `MOST_RUNS`."""
    return click.option(
        "--runs", type=IntegerRange(1, MOST_RUNS), default=default, show_default=default is not None, help=text
    )


def size_option(
    default: str | None = DEFAULT_SIZE,
    text: str = "Size of the workload, such as smoke or full; mlhpc workload list shows all.",
) -> Decorator:
    """``--size NAME``, the name of a size on every command. With ``default`` None it is optional."""
    return click.option("--size", metavar="NAME", default=default, show_default=default is not None, help=text)


def settings_options(function: Function) -> Function:
    """``--size NAME`` or ``--config FILE``, and ``--set KEY=VALUE``: the arguments of `choose_config_name` and
    `load_config`.
    """
    for option in (
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a setting of the size or file, such as hyperparameters.dropout=0.1; repeatable.",
        ),
        click.option(
            "--config",
            metavar="FILE",
            help="YAML file of your own settings, used instead of a size's (docs/architecture.md).",
        ),
        size_option(
            None, f"Size of the workload, such as smoke or full; mlhpc workload list shows all. [{DEFAULT_SIZE}]"
        ),
    ):
        function = option(function)
    return function


def plan_options(function: Function) -> Function:
    """``--plan`` and ``--mesh``: how samples and parameters are distributed over ranks. `convert_plan_to_settings`
    turns them into settings.
    """
    for option in (
        click.option(
            "--mesh", metavar="AXES", help="Ranks on each axis of the plan, such as data=2,spatial=2x1x1. [the plan's]"
        ),
        click.option(
            "--plan",
            "plan_name",
            metavar="NAME",
            help="Parallel plan that divides work over ranks: a name or a YAML file (docs/plans.md).",
        ),
    ):
        function = option(function)
    return function


def convert_plan_to_settings(plan: str | None, mesh: str | None) -> tuple[str, ...]:
    """Return the settings for ``--plan`` and ``--mesh``, as ``--set`` takes them. Paths are absolute."""
    named = None if plan is None else str(Path(plan).absolute()) if is_config_path(plan) else plan
    given = (("plan", named), ("mesh", mesh))
    return tuple(f"{key}={value}" for key, value in given if value is not None)


def choose_config_name(size: str | None, config: str | None) -> str | None:
    """Return the name of a shipped config, or a YAML path, for `load_config`. None if neither is given.

    UsageError if both are given, a file as ``--size`` or a name as ``--config``.
    """
    if size is not None and config is not None:
        raise click.UsageError("--size and --config: give one; a file of settings states its size")
    if size is not None and is_config_path(size):
        raise click.UsageError(f"--size {size}: expected the name of a size; a file of settings is --config {size}")
    if config is not None and not is_config_path(config):
        # JSON is YAML
        form = "; rename it to NAME.yaml" if Path(config).exists() else f"; a size is --size {config}"
        raise click.UsageError(f"--config {config}: expected a YAML file{form}")
    return config or size


def render_config_words(name: str, overrides: Sequence[str]) -> list[str]:
    """Write the result of `choose_config_name`, and ``--set``, as words of a command line."""
    return render_option_words({"--config" if is_config_path(name) else "--size": name, "--set": tuple(overrides)})


def render_option_words(options: Mapping[str, object]) -> list[str]:
    """Write options as words of a command line, for ranks that repeat this command.

    A tuple repeats its option, True is an option without a value. None and False are left out.
    """
    words: list[str] = []
    for name, value in options.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each is True:
                words.append(name)
            elif each is not None and each is not False:
                words += [name, str(each)]
    return words


def is_config_path(text: str) -> bool:
    """Return True if a text is meant as a path of a YAML file."""
    return Path(text).suffix in {".yaml", ".yml"}


def ranks_option(default: int | None = 1, text: str = "Number of MPI ranks to start on this machine.") -> Decorator:
    """``--ranks N`` of every command that starts ranks. At most `RANKS_PER_CORE` per core."""

    def check(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
        cores = os.cpu_count() or 1
        if value is not None and value > RANKS_PER_CORE * cores:
            raise click.BadParameter(f"{value}: this machine has {cores} cores; at most {RANKS_PER_CORE * cores} ranks")
        return value

    kind = IntegerRange(1)
    return click.option(
        "-n", "--ranks", type=kind, default=default, show_default=default is not None, help=text, callback=check
    )


def device_option() -> Decorator:
    """``--device auto|cpu|cuda``."""
    kinds = click.Choice(["auto", "cpu", "cuda"])
    return click.option(
        "--device",
        type=kinds,
        default="auto",
        show_default=True,
        help="Compute on this device; auto takes a GPU if torch finds one, else the CPU.",
    )


def strict_option() -> Decorator:
    """``--strict`` of every command that begins runs."""
    return click.option(
        "--strict",
        is_flag=True,
        help="Begin nothing that the checker would refuse afterwards. [it is said and begun]",
    )


def busy_option() -> Decorator:
    """``--busy`` of every command that ranks results."""
    return click.option(
        "--busy",
        is_flag=True,
        help="Also judge results during which other programs used more than 5 % of the CPUs. Their times say little.",
    )


def tolerance_option() -> Decorator:
    """``--tolerance PERCENT`` of every command that calls a time slower, faster or equivalent."""
    return click.option(
        "--tolerance",
        type=PercentRange(0.0, fraction=False),
        default="0%",
        show_default=True,
        metavar="PERCENT",
        help=(
            "Percentage of slowdown that is accepted: `slower` needs the whole interval above it, `equivalent` the "
            "whole interval below it. An interval wholly below 1 is `faster`, with or without a tolerance."
        ),
    )


def output_option(what: str, default: str) -> Decorator:
    """``-o/--output PATH``, never required. ``default`` describes the default in the help."""
    return click.option("-o", "--output", type=click.Path(path_type=Path), help=f"{what} [{default}]")


def format_option(*more: str, meaning: str = "") -> Decorator:
    """``--format text|json`` of every command that prints results; ``more``: further forms, ``meaning``: their help."""
    help_text = f"Print text for people or JSON for programs{meaning}."
    return click.option(
        "--format", "style", type=click.Choice([TEXT, JSON, *more]), default=TEXT, show_default=True, help=help_text
    )


def _add_cards(context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> None:
    if paths:
        context.with_resource(use_cards(paths))


card_option = click.option(  # of every command that judges: what cards say is read while the command runs
    "--card",
    multiple=True,
    expose_value=False,
    callback=_add_cards,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=(
        "YAML card (metric, target, rules) of a benchmark whose code is not installed, such as tides.yaml; repeatable. "
        f"Cards in ${CARDS}, separated as in PATH, are always read."
    ),
)


def add_shared(command: click.Command) -> click.Command:
    """Give a command, and all commands of a group, ``--quiet``, ``--verbose`` and ``--no-color``."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_shared(each)
    add_completion(command)
    if not isinstance(command, click.Group) or command.invoke_without_command:
        taken = {name for parameter in command.params for name in parameter.opts}
        command.params += [option for option in make_shared_options() if not taken & set(option.opts)]
    return command


def make_shared_options() -> list[click.Option]:
    """Return new options --quiet, --verbose and --no-color, for every command and for mlhpc itself."""
    return [
        _make_flag(["-v", "--verbose"], VERBOSE, "Print also each event that enters the log of a run."),
        _make_flag(["-q", "--quiet"], QUIET, "Print only results and errors, no progress."),
        _make_flag(["--no-color"], NO_COLOR, "Print without colours. The environment variable NO_COLOR does the same."),
    ]


def _make_flag(names: list[str], variable: str, text: str) -> click.Option:
    """Return an option that sets an environment variable, so that ranks and other started processes see it too."""

    def switch(context: click.Context, parameter: click.Parameter, on: bool) -> None:
        before = os.environ.get(variable)
        if on and not before:
            os.environ[variable] = "1"
            # Several commands may run in one process, as in the tests: the next one has its own options.
            context.call_on_close(lambda: _restore_variable(variable, before))

    return click.Option(names, is_flag=True, expose_value=False, is_eager=True, callback=switch, help=text)


def _restore_variable(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
