"""Reads energy counters: RAPL, Cray's pm_counters, NVML. An absent counter has a reason, never a zero.

Reads files, and NVML through the optional package ``pynvml`` (pip: nvidia-ml-py). Slurm's ``sacct -o ConsumedEnergy``
is known only after the job: docs/architecture.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.suite.machine.probes.processor import REAL_ROOT

POWERCAP = Path("sys/class/powercap")
PM_COUNTERS = Path("sys/cray/pm_counters")
SCOPES = {
    "rapl": "CPU package or DRAM of the nodes, with everything that runs on them",
    "pm_counters": "the nodes, or the named part of them, at the blade controller",
    "nvml": "the GPU boards that the ranks use",
}


@dataclass(frozen=True)
class EnergyCounter:
    """A counter of joules. ``name`` begins with its source. It wraps to zero at ``range_j``, or never if None."""

    name: str
    read: Callable[[], float]
    range_j: float | None = None


# A counter to be: its name, the name of its place in the file system, and what makes it, by the name that it gets.
CounterSource = tuple[str, str, Callable[[str], EnergyCounter]]


@dataclass(frozen=True)
class FoundCounters:
    """The counters that can be read here. ``absent``: the reason for each unreadable source or counter."""

    counters: Sequence[EnergyCounter] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EnergyReading:
    """One rank's joules by counter since the last reading. ``lost``: the reason for each counter that failed."""

    joules: Mapping[str, float]
    lost: Mapping[str, str]


@dataclass(frozen=True)
class CounterSum:
    """The joules of all counters with one name, and how many counters there are."""

    joules: float = 0.0
    counters: int = 0


@dataclass(frozen=True)
class EnergyUse:
    """The energy that a run used in ``seconds``, by counter name. ``absent``: what is missing, with reasons."""

    by_counter: Mapping[str, CounterSum]
    seconds: float
    absent: Mapping[str, str]

    def value(self) -> dict[str, dict[str, float]]:
        """Return the value of an ``energy`` event."""
        return {name: {"joules": total.joules, "counters": total.counters} for name, total in self.by_counter.items()}

    def sum_widest(self) -> float | None:
        """Return the joules of the widest scope: nodes, else packages, memory and GPUs. None if nothing counted."""
        whole = self.by_counter.get("pm_counters/node")
        counted = [whole] if whole else [self.by_counter[name] for name in self.by_counter if "pm_counters" not in name]
        return sum(each.joules for each in counted) or None

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of an ``energy`` event: duration, the scope of each source, and what is absent."""
        sources = dict.fromkeys(name.partition("/")[0] for name in self.by_counter)
        return {
            "seconds": self.seconds,
            "scopes": {source: SCOPES[source] for source in sources},
            "absent": dict(self.absent),
        }


@dataclass
class EnergyMeter:
    """Follows some counters. Call `sample` so often that no counter wraps twice between two calls.

    A counter that fails once is left out from then on; ``lost`` has the reason.
    """

    counters: Sequence[EnergyCounter]
    lost: dict[str, str] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _joules: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Counters count from boot on: only differences mean energy
        self._last = {counter.name: counter.read() for counter in self.counters}

    def sample(self) -> None:
        """Read all counters and add what they counted since the last call."""
        for counter in self.counters:
            if counter.name in self.lost:
                continue
            try:
                now = counter.read()
            except Exception as error:  # a file that is gone, a driver that failed: no reason to end a run
                self.lost[counter.name] = f"{type(error).__name__}: {error}"
                self._joules.pop(counter.name, None)  # a part of the interval would pass for the whole
                continue
            used = now - self._last[counter.name]
            if used < 0 and counter.range_j is not None:  # it wrapped to zero
                used += counter.range_j
            if used < 0:
                self.lost[counter.name] = f"went back from {self._last[counter.name]:g} to {now:g} J"
                self._joules.pop(counter.name, None)
                continue
            self._joules[counter.name] = self._joules.get(counter.name, 0.0) + used
            self._last[counter.name] = now

    def take(self) -> EnergyReading:
        """Sample, return the joules since the last call, and start anew."""
        self.sample()
        joules, self._joules = self._joules, {}
        return EnergyReading(joules, dict(self.lost))


def sum_readings(readings: Sequence[EnergyReading], seconds: float, absent: Mapping[str, str]) -> EnergyUse:
    """Sum the readings of all ranks over ``seconds``, in rank order. A lost counter is added to ``absent``."""
    by_counter: dict[str, CounterSum] = {}
    reasons = dict(absent)
    for rank, reading in enumerate(readings):
        reasons |= {f"{name} of rank {rank}": reason for name, reason in reading.lost.items()}
        for name, joules in reading.joules.items():
            total = by_counter.get(name, CounterSum())
            by_counter[name] = CounterSum(total.joules + joules, total.counters + 1)
    return EnergyUse(by_counter, seconds, reasons)


def find_node_counters(root: Path = REAL_ROOT) -> FoundCounters:
    """Find the counters of the node whose file system begins at ``root``."""
    counters: list[EnergyCounter] = []
    absent: dict[str, str] = {}
    for source, folder, list_places in (
        ("rapl", root / POWERCAP, _list_rapl),
        ("pm_counters", root / PM_COUNTERS, _list_pm_counters),
    ):
        of_source: list[EnergyCounter] = []
        unreadable: dict[str, str] = {}
        try:
            for name, make in _make_names_unique(list_places(folder)):
                try:
                    of_source.append(make(name))
                except (OSError, ValueError) as error:  # the others still count
                    unreadable[name] = _explain_error(error)
        except OSError as error:
            unreadable[source] = _explain_error(error)
        if not of_source:
            unreadable = {source: next(iter(unreadable.values()), f"{folder}: no counter of energy there")}
        counters += of_source
        absent |= unreadable
    return FoundCounters(counters, absent)


def _explain_error(error: OSError | ValueError) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _make_names_unique(places: Iterable[CounterSource]) -> list[tuple[str, Callable[[str], EnergyCounter]]]:
    """Name the counters. If several places have a name, each place's own name is appended.

    A node whose firmware calls both packages "package-0" has two counters, and the meter knows a counter by its name.
    """
    found = list(places)
    number = Counter(name for name, _, _ in found)
    return [(name if number[name] == 1 else f"{name} ({place})", make) for name, place, make in found]


def find_gpu_counter(uuid: str) -> FoundCounters:
    """Find the counter of the GPU with this UUID."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return FoundCounters(absent={"nvml": explain_not_installed("pynvml")})
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # raises here on boards before Volta, which do not count
    except pynvml.NVMLError as error:
        return FoundCounters(absent={"nvml": str(error)})
    return FoundCounters(
        [
            EnergyCounter("nvml/gpu", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
        ]  # NVML counts in mJ
    )


def _list_rapl(folder: Path) -> Iterable[CounterSource]:
    """Yield packages and their DRAM. Zones of cores and of a GPU on the die are parts of a package and left out."""
    # Zones are intel-rapl:0 (a package) and intel-rapl:0:1 (a part of it).
    for zone in sorted(path for path in folder.iterdir() if path.name.startswith("intel-rapl:")):
        parent = zone.parent / zone.name.rpartition(":")[0]
        try:
            name = _read_zone_name(zone)
            label = f"rapl/{_read_zone_name(parent)}/dram" if name == "dram" else f"rapl/{name}"
        except (OSError, ValueError) as error:
            yield f"rapl/{zone.name}", zone.name, partial(_make_failing_counter, error)
            continue
        if name.startswith("package") or name == "dram":
            yield label, zone.name, partial(_open_rapl_counter, zone)


def _read_zone_name(zone: Path) -> str:
    return (zone / "name").read_text().strip()


def _open_rapl_counter(zone: Path, name: str) -> EnergyCounter:
    range_j = _read_count(zone / "max_energy_range_uj") / 1e6
    return _open_file_counter(name, zone / "energy_uj", 1e-6, range_j)


def _make_failing_counter(error: OSError | ValueError, name: str) -> EnergyCounter:
    """Raise the error of a counter whose name cannot be read."""
    raise error


def _list_pm_counters(folder: Path) -> Iterable[CounterSource]:
    """Yield ``energy``, the whole node, and its parts ``cpu_energy``, ``memory_energy`` and ``accel<i>_energy``."""
    for path in sorted(folder.iterdir()):
        if path.name == "energy" or path.name.endswith("_energy"):
            part = path.name.removesuffix("energy").rstrip("_") or "node"
            yield f"pm_counters/{part}", path.name, partial(_open_pm_counter, path)


def _open_pm_counter(path: Path, name: str) -> EnergyCounter:
    return _open_file_counter(name, path, 1.0, None)


def _open_file_counter(name: str, path: Path, joules_per_count: float, range_j: float | None) -> EnergyCounter:
    def read() -> float:
        return _read_count(path) * joules_per_count

    read()  # raises here if the counter cannot be read, so that it counts as absent from the start
    return EnergyCounter(name, read, range_j)


def _read_count(path: Path) -> int:
    """Read the number at the beginning of a kernel file. InputError if there is none."""
    text = path.read_text()
    count = text.split(maxsplit=1)[0] if text.strip() else text
    if not (count.isascii() and count.isdigit()):
        raise InputError(f"{path}: {text[:40]!r} is not a number, which a counter must show")
    return int(count)
