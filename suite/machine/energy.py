"""Joules that the machine itself counts: RAPL, Cray's pm_counters, NVML. What a machine does not tell is named, never zero.

Files and clocks only; NVML through the optional package ``pynvml`` (pip: nvidia-ml-py). Slurm's ``sacct -o ConsumedEnergy`` is for
afterwards: docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
PM_COUNTERS = Path("/sys/cray/pm_counters")
SCOPES = {
    "rapl": "CPU package or DRAM of the nodes, with everything that runs on them",
    "pm_counters": "the nodes, or the named part of them, at the blade controller",
    "nvml": "the GPU boards that the ranks use",
}


@dataclass(frozen=True)
class EnergyCounter:
    """A counter of joules. It starts anew at ``range_j``, where it has one; ``name`` begins with its source."""

    name: str
    read: Callable[[], float]
    range_j: float | None = None


@dataclass
class EnergyMeter:
    """Joules of some counters since the last `take`. `sample` often enough that no counter wraps twice in between.

    A counter that fails on the way is left out from then on; ``lost`` says why.
    """

    counters: Sequence[EnergyCounter]
    lost: dict[str, str] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _joules: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last = {counter.name: counter.read() for counter in self.counters}

    def sample(self) -> None:
        """Read all counters."""
        for counter in self.counters:
            if counter.name in self.lost:
                continue
            try:
                now = counter.read()
            except Exception as error:  # a file that is gone, a driver that failed: no reason to end a run
                self.lost[counter.name] = f"{type(error).__name__}: {error}"
                self._joules.pop(counter.name, None)
                continue
            used = now - self._last[counter.name]
            if used < 0 and counter.range_j is not None:
                used += counter.range_j
            self._joules[counter.name] = self._joules.get(counter.name, 0.0) + used
            self._last[counter.name] = now

    def take(self) -> dict[str, float]:
        """Joules by counter since the last call."""
        self.sample()
        joules, self._joules = self._joules, {}
        return joules


def node_counters(
    powercap: Path = POWERCAP, pm_counters: Path = PM_COUNTERS
) -> tuple[list[EnergyCounter], dict[str, str]]:
    """The counters of this node, and of each source that gives none the reason."""
    found: list[EnergyCounter] = []
    absent: dict[str, str] = {}
    for source, folder, counters in (("rapl", powercap, _rapl), ("pm_counters", pm_counters, _pm_counters)):
        try:
            here = list(counters(folder))
        except (OSError, ValueError) as error:
            absent[source] = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        else:
            found += here
            if not here:
                absent[source] = f"{folder}: no counter of energy there"
    return found, absent


def gpu_counter(uuid: str) -> tuple[list[EnergyCounter], dict[str, str]]:
    """The counter of the GPU with this UUID, or the reason why there is none."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return [], {"nvml": "the package nvidia-ml-py is not installed (pip install 'mlhpc[nvml]')"}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return [], {"nvml": str(error)}
    return [EnergyCounter("nvml/gpu", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)], {}


def _rapl(folder: Path) -> Iterable[EnergyCounter]:
    """Packages and their DRAM; cores and GPUs on the die are parts of the package."""
    for zone in sorted(path for path in folder.iterdir() if path.name.startswith("intel-rapl:")):
        name = (zone / "name").read_text().strip()
        parent = zone.parent / zone.name.rpartition(":")[0]
        if name.startswith("package"):
            label = f"rapl/{name}"
        elif name == "dram":
            label = f"rapl/{(parent / 'name').read_text().strip()}/dram"
        else:
            continue
        range_j = int((zone / "max_energy_range_uj").read_text()) / 1e6
        yield _file_counter(label, zone / "energy_uj", 1e-6, range_j)


def _pm_counters(folder: Path) -> Iterable[EnergyCounter]:
    """``energy`` is the whole node; ``cpu_energy``, ``memory_energy`` and ``accel<i>_energy`` are parts of it."""
    for path in sorted(folder.iterdir()):
        if path.name == "energy" or path.name.endswith("_energy"):
            part = path.name.removesuffix("energy").rstrip("_") or "node"
            yield _file_counter(f"pm_counters/{part}", path, 1.0, None)


def _file_counter(name: str, path: Path, joules: float, range_j: float | None) -> EnergyCounter:
    def read() -> float:
        text = path.read_text()
        number = text.split(maxsplit=1)[0] if text.strip() else text
        if not number.isdigit():
            raise ValueError(f"{path}: {text[:40]!r} is not a count")
        return int(number) * joules

    read()  # an unreadable counter is absent from the start
    return EnergyCounter(name, read, range_j)
