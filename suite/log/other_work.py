"""Reads the event ``other_work``, what other processes took of a run's CPUs, and explains it in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlhpc.suite.files import render_duration
from mlhpc.suite.log.reader import Event, convert_to_float, parse_int64

MAX_SHARE: Final = 0.05  # others took more of the CPUs than this: the run had company
MAX_CPUS: Final = (
    1.0  # or more than this: on a large node one busy process is a small share, but ranks wait for the slowest
)
MIN_TAKEN_S: Final = 0.5  # of CPU time: less may be the error of counting in ticks of 10 ms
MAX_LISTED_NODES: Final = 64  # nodes that an event lists: those of which others took the largest share
_TIMES = ("own_s", "other_s", "stolen_s")


@dataclass(frozen=True)
class OtherWork:
    """What other processes took of the CPUs of the node with the largest share.

    ``taken`` of ``cpus``, mean over the run's ``seconds``. ``stolen`` is the part of it that the hypervisor gave to
    other guests.
    """

    node: int
    cpus: int
    taken: float
    stolen: float
    seconds: float

    @property
    def share(self) -> float:
        """Their share of the CPUs that the job may use there."""
        return self.taken / self.cpus

    @property
    def counts(self) -> bool:
        """True if others took so much that the run may have been slower."""
        return self.taken * self.seconds > MIN_TAKEN_S and (self.share > MAX_SHARE or self.taken > MAX_CPUS)

    @property
    def text(self) -> str:
        """Text for people: ``other programs used 23 % of the CPUs (0.46 of 2)``."""
        by = f", {self.stolen:.2g} by the hypervisor" if self.stolen > self.taken / 2 else ""
        return f"other programs used {render_percent(self.share)} of the CPUs ({self.taken:.2g} of {self.cpus}{by})"


def render_percent(share: float) -> str:
    """Render a share: ``23 %``; below a tenth with two digits."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def render_busy_warning(found: Sequence[OtherWork | None]) -> str:
    """Warn of runs that other programs may have slowed, from `RunRecord.company` of each run.

    Empty if there are none.
    """
    busy = [each for each in found if each is not None]
    if not busy:
        return ""
    most = max(busy, key=lambda each: each.share)
    up_to = "up to " if len(busy) > 1 else ""
    number = f"{len(busy)} of {len(found)} runs" if len(found) > 1 else "the run"
    by = ", part of it other guests of the hypervisor" if most.stolen > most.taken / 2 else ""
    return (
        f"warning: other programs used {up_to}{render_percent(most.share)} of the CPUs during {number}{by}; "
        "do not trust these times (mlhpc run --wait-for-quiet)"
    )


def compute_share(entry: Mapping[str, Any], seconds: float) -> float:
    """Return the share of one node's CPUs that others took in ``seconds``."""
    return float((entry["other_s"] + entry["stolen_s"]) / (entry["cpus"] * seconds)) if seconds > 0 else 0.0


def read_other_work(event: Event | None) -> OtherWork | None:
    """Read an event's node with the largest share. None if it lists no node, or `find_problem` finds a fault."""
    if event is None or not isinstance(event.value, list) or not event.value or find_problem(event) is not None:
        return None
    seconds = convert_to_float(event.metadata.get("seconds")) or 0.0
    most = max(event.value, key=lambda entry: compute_share(entry, seconds))
    taken_s = most["other_s"] + most["stolen_s"]
    return OtherWork(most["node"], most["cpus"], taken_s / seconds, most["stolen_s"] / seconds, seconds)


def sum_own_seconds(event: Event | None) -> float | None:
    """Sum the CPU seconds of a run's own ranks over its nodes. None if the event does not list every node."""
    if event is None or not isinstance(event.value, list) or len(event.value) != event.metadata.get("nodes"):
        return None
    each = [convert_to_float(node.get("own_s")) if isinstance(node, dict) else None for node in event.value]
    seconds = [number for number in each if number is not None and number > 0]
    return math.fsum(seconds) if seconds and len(seconds) == len(each) else None


def find_problem(event: Event) -> str | None:
    """Return why an event is no measurement of CPU time. None if it may be one."""
    seconds, nodes = convert_to_float(event.metadata.get("seconds")), parse_int64(event.metadata.get("nodes"))
    absent = event.metadata.get("absent", {})
    if seconds is None or seconds <= 0 or nodes is None or not isinstance(absent, dict):
        return "expected seconds, the number of nodes and absent beside it"
    entries: list[Any] = event.value if isinstance(event.value, list) else [None]
    if not all(_is_entry(entry, nodes) for entry in entries):
        return f"expected a list with node, cpus, {', '.join(_TIMES)} of each node"
    without = sum(parse_int64(count) or 0 for count in absent.values())
    if len({entry["node"] for entry in entries}) < len(entries) or len(entries) + without < min(
        nodes, MAX_LISTED_NODES
    ):
        return f"expected an entry for each of {nodes} nodes"
    for entry in entries:
        used, most = sum(entry[name] for name in _TIMES), entry["cpus"] * seconds
        if used > 1.1 * most + 1.0:  # times come in ticks
            took = f"{render_duration(used)} of CPU time on {entry['cpus']} CPUs in {render_duration(seconds)}"
            return f"node {entry['node']}: {took}"
    return None


def _is_entry(entry: Any, nodes: int) -> bool:
    if not isinstance(entry, dict):
        return False
    node, cpus = entry.get("node"), entry.get("cpus")
    if type(node) is not int or type(cpus) is not int or not 0 <= node < nodes or not 0 < cpus < 1 << 20:
        return False
    return all((number := convert_to_float(entry.get(name))) is not None and number >= 0 for name in _TIMES)
