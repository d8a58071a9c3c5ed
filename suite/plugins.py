"""Finds what installed packages add to the suite by entry points: commands, workloads and figures.

A broken package is left out with one line. It is an error only if it is asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from mlhpc.suite.errors import InputError, explain_missing
from mlhpc.suite.files import print_line, render_error
from mlhpc.suite.shadowed import explain_shadowed

COMMANDS = "mlhpc.commands"
WORKLOADS = "mlhpc.workloads"
FIGURES = "mlhpc.figures"
WINGS_GROUP = "mlhpc.wings"  # the packages of our own wings
SOURCES = "mlhpc.sources"  # readers of JSON files of a report, by the value of their key "kind"
EXPORTS = "mlhpc.exports"  # functions that write or read what another tool has, by its name or form
SCORES = "mlhpc.scores"  # functions that find the official score of a published result
OFFLOAD_GROUP = "mlhpc.offload"  # keeps experts in a slower memory
AXES_GROUP = "mlhpc.axes"  # axes whose ranks share samples, and the compression of gradients
CARDS = "MLHPC_CARDS"  # environment variable: card files of card-only benchmarks, separated as in PATH
FAILURES = (Exception, SystemExit)  # of the code of another package, which may raise anything and end the program
OURS = "mlhpc"  # the package whose entries win over others of the same name
AXES = "axes"  # the wing of spatial, axial, tensor and pipeline parallelism, and of predictions
OFFLOAD = "offload"  # the wing of OFFLOAD_GROUP
EXCHANGE = "exchange"  # the wing of EXPORTS
NETWORK = "network"  # the wing of `moe fit`, whose intervals of extrapolations others use
WINGS: tuple[str, ...] = (
    AXES,
    "dispatch",
    EXCHANGE,
    "fleet",
    NETWORK,
    "numerics",
    OFFLOAD,
    "tune",
)  # those that a whole mlhpc has (plugins/)


@dataclass(frozen=True)
class Plugin:
    """An entry point, and the name of the package that has it."""

    point: EntryPoint
    package: str


def read_name_and_version(package: Distribution) -> tuple[str, str]:
    """Read an installed package's name and version, each "" if it states none."""
    # importlib parses the whole metadata, the package's description too, each time. That takes ten times as long, and a
    # run reads some hundred packages twice.
    places = ("METADATA", "PKG-INFO", "")  # the last: an .egg-info that is a file
    text = next((found for place in places if (found := package.read_text(place))), "")
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(.*\S)", text.partition("\n\n")[0], re.MULTILINE))
    return fields.get("Name", ""), fields.get("Version", "")


@cache
def find_plugins(group: str) -> dict[str, Plugin]:
    """Find the entry points of a group by name, ours first. Of two with one name the first is taken."""
    found = []
    for point in entry_points(group=group):
        assert point.dist is not None  # an entry point that importlib finds has one
        found.append(Plugin(point, point.dist.name))
    # The order in which importlib finds packages differs between machines.
    found.sort(key=lambda plugin: (plugin.package != OURS, plugin.point.name))
    plugins: dict[str, Plugin] = {}
    for plugin in found:
        name = plugin.point.name
        first = plugins.setdefault(name, plugin)
        if first.point.value != plugin.point.value:
            kind = group.removeprefix("mlhpc.").removesuffix("s")
            print_skipped(kind, name, plugin.package, f"its name is taken by {first.point.value} of {first.package}")
    return plugins


def explain_unusable(error: BaseException) -> str:
    """Return in one line why a plug-in cannot be used. Errors with terse texts are shown with their kind."""
    if text := explain_shadowed(error, loaded=False) or explain_missing(error):
        return text
    text = render_error(error)
    if isinstance(error, SyntaxError):
        text = f"{error.msg} ({error.filename}, line {error.lineno})"  # its own text lacks the folder
    return text if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {text}"


def list_missing_wings() -> list[str]:
    """List the wings of a whole mlhpc that are not installed here."""
    return [name for name in WINGS if name not in find_plugins(WINGS_GROUP)]


def explain_missing_wing(wing: str) -> str:
    """Say in one line that a wing is not installed, and what to do."""
    return (
        f"the wing {wing!r} is not installed here; expected the folder plugins/{wing} and its entry points: install"
        " mlhpc anew"
    )


def mark_missing_wing(wing: str, text: str = "") -> str:
    """Return a text of a help page, with a mark behind it if the wing that it is about is not installed."""
    return f"{text} (the wing {wing!r} is not installed)".strip() if wing in list_missing_wings() else text


def load_export(name: str, asked: str) -> Any:
    """Load what writes or reads a form of another tool. InputError, which names what was ``asked``, if it is not
    installed.
    """
    return _load(EXPORTS, EXCHANGE, name, asked)


def load_axis(name: str, asked: str) -> Any:
    """Load a part of the wing of axes. InputError, which names what was ``asked``, if it is not installed."""
    return _load(AXES_GROUP, AXES, name, asked)


def load_offload(name: str, asked: str) -> Any:
    """Load a part of the wing of offload. InputError, which names what was ``asked``, if it is not installed."""
    return _load(OFFLOAD_GROUP, OFFLOAD, name, asked)


def _load(group: str, wing: str, name: str, asked: str) -> Any:
    plugin = find_plugins(group).get(name)
    if plugin is None:
        raise InputError(f"{asked}: {explain_missing_wing(wing)}")
    return plugin.point.load()


@cache
def print_skipped(kind: str, name: str, package: str, why: str) -> None:
    """Print once per process, on stderr, that a plug-in is left out."""
    print_line(f"mlhpc: {kind} {name!r} of package {package} is left out: {why}", error=True)
