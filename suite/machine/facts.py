"""Defines the facts of one compute node and their file ``facts/<node>.json``. `probes` fills them.

An unknown text is "unknown", an unknown number null. A probe that failed is named under ``problems``.

Reads and writes measurements of one node: one JSON object per metric and line, versioned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import DecodeError, Meta, Struct

from mlhpc.suite.documents import Positive, YamlSource, convert_to_plain_data, read_json_document, render_json
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import write_file_atomically

FACTS_VERSION: Final = 1
UNKNOWN = "unknown"


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Cache(_Part, frozen=True, kw_only=True):
    """Caches of one level, kind and size; ``instances`` counts them on the whole node."""

    level: int
    kind: str
    size_kib: int
    instances: int


class Cpu(_Part, frozen=True, kw_only=True):
    """The processors of the node. All counts are of the node, not of the job."""

    model: str = UNKNOWN
    architecture: str = UNKNOWN
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    numa_nodes: int | None = None
    max_frequency_mhz: float | None = None
    governor: str = UNKNOWN
    boost: str = UNKNOWN
    smt: str = UNKNOWN
    simd: tuple[str, ...] = ()
    virtualised: bool | None = None
    caches: tuple[Cache, ...] = ()


class Memory(_Part, frozen=True, kw_only=True):
    """Main memory. ``modules`` maps the description of a DIMM to the number of such DIMMs."""

    total_gib: float | None = None
    swap_gib: float | None = None
    modules: dict[str, int] = {}
    transparent_hugepages: str = UNKNOWN


class BlockDevice(_Part, frozen=True, kw_only=True):
    """A disk."""

    name: str
    model: str
    rotational: bool | None
    size_gib: float | None


class FileSystem(_Part, frozen=True, kw_only=True):
    """The file system of a folder that the run uses. ``purpose`` names the folder's use."""

    purpose: str
    path: str
    mount: str = UNKNOWN
    type: str = UNKNOWN
    device: str = UNKNOWN
    size_gib: float | None = None
    free_gib: float | None = None


class NetworkInterface(_Part, frozen=True, kw_only=True):
    """A network port. ``link`` is its kind: ethernet, infiniband, "rdma over infiniband", slingshot or other."""

    name: str
    link: str
    driver: str
    speed_gbit_s: float | None
    state: str

    @property
    def link_text(self) -> str:
        """The kind, and the speed if it is known."""
        return f"{self.link} {self.speed_gbit_s:g} Gbit/s" if self.speed_gbit_s else self.link


class Accelerator(_Part, frozen=True, kw_only=True):
    """One accelerator, as the node's driver reports it."""

    vendor: str
    model: str
    memory_gib: float | None = None
    driver: str = UNKNOWN
    max_clock_mhz: float | None = None
    power_limit_w: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    mig: str = UNKNOWN


class Limits(_Part, frozen=True, kw_only=True):
    """The share of the node that the control group and the affinity mask allow this process."""

    memory_gib: float | None = None
    cpu_quota: float | None = None
    cpus_allowed: int | None = None
    open_files: int | None = None


class Software(_Part, frozen=True, kw_only=True):
    """Operating system, container, Python packages and environment modules."""

    operating_system: str = UNKNOWN
    kernel: str = UNKNOWN
    libc: str = UNKNOWN
    container: str = UNKNOWN
    clock_source: str = UNKNOWN
    python: str = UNKNOWN
    packages: dict[str, str] = {}
    mpi: str = UNKNOWN
    loader: str = UNKNOWN
    preloaded: str = ""
    time_zone: str = UNKNOWN
    locale: str = UNKNOWN
    modules: tuple[str, ...] = ()


class Firmware(_Part, frozen=True, kw_only=True):
    """The board's own statements about its firmware; no serial numbers."""

    bios_vendor: str = UNKNOWN
    bios_version: str = UNKNOWN
    bios_date: str = UNKNOWN
    board: str = UNKNOWN


class Facts(_Part, frozen=True, kw_only=True):
    """All facts of one node."""

    version: Literal[1] = FACTS_VERSION
    collected: str
    node: str
    hostname: str
    simulated: Annotated[bool, Meta(description="the probes read a folder of files instead of this machine")] = False
    product: str = UNKNOWN
    firmware: Firmware = Firmware()
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    storage: tuple[BlockDevice, ...] = ()
    file_systems: tuple[FileSystem, ...] = ()
    network: tuple[NetworkInterface, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    accelerator_links: str = UNKNOWN
    limits: Limits = Limits()
    software: Software = Software()
    slurm: dict[str, str] = {}
    tuning: dict[str, str] = {}
    problems: tuple[str, ...] = ()


def write_facts(facts: Facts, run_folder: Path) -> Path:
    """Write ``<run folder>/facts/<node>.json`` atomically and return its path."""
    path = run_folder / "facts" / f"{facts.node.replace('/', '_')}.json"
    write_file_atomically(path, json.dumps(convert_to_plain_data(facts), indent=1) + "\n")
    return path


def read_facts(path: Path) -> Facts:
    """Read the facts of one node. ValueError names the file, what was expected and what it holds instead."""
    return read_json_document(path, Facts, "facts", FACTS_VERSION)


END_METRIC = "measuring"  # the last metric of a node's own file: how long measuring took, or why it did not end

Better = Literal["more", "less"]
Severity = Literal["", "watch", "reset", "isolate"]  # of a wrong result; "watch": it may be honest


class Sample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The repetitions of one metric on one node. Only nodes with the same ``hardware`` are compared.

    ``values`` are positive, in ``unit``; ``component`` is what the benchmark stresses. A metric with a ``bound``, its
    worst allowed value, is judged only by that. ``failed`` says why there are no values. With a ``severity`` the node
    computed something wrong.
    """

    version: Literal[1] = 1
    node: Annotated[str, Meta(min_length=1)]
    hardware: str = ""
    metric: Annotated[str, Meta(min_length=1)]
    unit: str = ""
    better: Better
    component: str = ""
    values: tuple[Positive, ...] = ()
    bound: Positive | None = None
    failed: str = ""
    severity: Severity = ""

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.failed):
            raise InputError("expected values, or failed with the reason why there are none")


def render_samples(samples: Iterable[Sample]) -> str:
    """Render a file of samples."""
    return "".join(f"{render_json(sample)}\n" for sample in samples)


def parse_samples(path: Path, content: bytes) -> list[Sample]:
    """Parse a file of samples, one JSON object per line. InputError names the line and the field."""
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            data = msgspec.json.decode(line)
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{path}:{number}: expected JSON: {error}") from None
        found.append(YamlSource(Path(f"{path}:{number}"), data, {}).convert(Sample))
    return found
