"""What installed packages add to the suite: commands, workloads and figures, found by entry point.

One broken package must not break everything else: it is left out with one line, and is an error only when it is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from suite.files import one_line, print_line

COMMANDS = "mlhpc.commands"
WORKLOADS = "mlhpc.workloads"
FIGURES = "mlhpc.figures"
SCORES = "mlhpc.scores"  # functions that find the official score of a published result
OURS = "mlhpc"  # the package whose entries win over others of the same name


@cache
def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Find the entry points of a group by name, ours first, then by name. Of two with one name the first is taken."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (package_of(point) != OURS, point.name)):
        first = points.setdefault(point.name, point)
        if first.value != point.value:
            kind = group.removeprefix("mlhpc.").removesuffix("s")
            leave_out(kind, point.name, package_of(point), f"its name is taken by {first.value} of {package_of(first)}")
    return points


def package_of(point: EntryPoint) -> str:
    """The name of the installed package that an entry point comes from."""
    return point.dist.name if point.dist is not None else "an unknown package"


def reason(error: BaseException) -> str:
    """Why a plug-in cannot be used, as one line with the kind of error where its text alone says too little."""
    text = one_line(error)
    return text if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {text}"


@cache
def leave_out(kind: str, name: str, package: str, why: str) -> None:
    """Say once per process, on stderr, that a plug-in is left out."""
    print_line(f"mlhpc: {kind} {name!r} of package {package} is left out: {why}", error=True)
