"""Reads roofs and work of the published systems from analysis/roofline/published.yaml. None of its numbers is ours.

`predict_bounds` makes an extended roofline of them. It assumes the fastest number format of the device and one transfer
of every sample over the host link. Gradients are exchanged once, over a ring at the nodes' network rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import pandas as pd
from msgspec import Meta, Struct

from mlhpc.analysis.roofline.bounds import (
    ALL_REDUCE,
    Bounds,
    Demand,
    Resource,
    Roof,
    compute_bounds,
    compute_ring_traffic,
)
from mlhpc.suite.documents import convert, parse_yaml
from mlhpc.suite.errors import InputError

VERSION = 1
NO_STORAGE = "published packages state no storage bandwidth"
NO_NETWORK = "published packages and documents at hand state no network rate"


class _DocumentPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serves as the base class of the parts of the document."""


class Number(_DocumentPart, frozen=True, kw_only=True):
    """Holds one ceiling, and the key of its source."""

    per_s: Annotated[float, Meta(gt=0)]
    name: str
    origin: Literal["vendor", "literature"]
    source: str


class Device(_DocumentPart, frozen=True, kw_only=True):
    """Describes a device family. ``element_bytes`` is the size of the number format that ``compute`` was stated for."""

    element_bytes: Literal[2, 4]
    compute: Number
    memory: Number
    host_link: Number | None = None


class Machine(_DocumentPart, frozen=True, kw_only=True):
    """Describes where a machine differs from its device, and the rate at which a node sends."""

    machine: str
    rounds: tuple[str, ...] | None = None
    network: Number | None = None
    memory: Number | None = None


class SampleWork(_DocumentPart, frozen=True, kw_only=True):
    """Holds the work of training on one sample at size full. ``bytes`` is a table by the size of a number."""

    flops: float
    bytes: dict[int, float]
    sample_bytes: float
    parameters: int


class PublishedRoofs(_DocumentPart, frozen=True, kw_only=True):
    """Holds the content of published.yaml."""

    version: Literal[1]
    sources: dict[str, str]
    devices: dict[str, Device]
    machines: tuple[Machine, ...]
    work: dict[str, SampleWork]

    def roof(self, number: Number) -> Roof:
        """Return a number of the file as a roof, its source written out."""
        return Roof(number.per_s, number.name, number.origin, self.sources[number.source])


@cache
def read_roofs() -> PublishedRoofs:
    """Read published.yaml. Raises InputError if the source of a number is missing."""
    text = (files("mlhpc.analysis.roofline") / "published.yaml").read_text("utf-8")
    file = convert(parse_yaml(text), PublishedRoofs)
    # A number without its source must not be drawn: nobody could check it
    missing = {number.source for _, _, number in list_ceilings(file)} - set(file.sources)
    if missing:
        raise InputError(
            f"published.yaml: no entry {sorted(missing)[0]!r} under `sources`, which a number names; add the source"
        )
    return file


def list_ceilings(file: PublishedRoofs) -> list[tuple[str, str, Number]]:
    """Return every ceiling of the file as (device or machine, resource, number)."""
    devices = [
        (name, resource, value)
        for name, device in file.devices.items()
        for resource in ("compute", "memory", "host_link")
        if (value := getattr(device, resource)) is not None
    ]
    machines = [
        (machine.machine + (f" {', '.join(machine.rounds)}" if machine.rounds else ""), resource, value)
        for machine in file.machines
        for resource in ("network", "memory")
        if (value := getattr(machine, resource)) is not None
    ]
    return devices + machines


def predict_bounds(row: Mapping[str, Any]) -> Bounds | None:
    """Predict the modelled extended roofline of a row of `mlhpc.analysis.published.scores.read_scores`.

    None: the row lacks a number, or published.yaml its device or benchmark.
    """
    file = read_roofs()
    benchmark = str(row["benchmark"])
    device = file.devices.get(str(row["device"]))
    # Rounds changed data and models: an entry for this round comes before that of the benchmark
    sample = file.work.get(f"{benchmark} {row['round']}", file.work.get(benchmark))
    units, batch, rate = (_number(row[name]) for name in ("units", "global_batch_size", "train_rate"))
    # Also zero, which `_number` makes of a missing value
    if device is None or sample is None or row["size"] != "full" or not units or not batch or not rate:
        return None
    roofs = _roofs(file, device, str(row["machine"]), str(row["round"]))
    return compute_bounds(batch / rate, compute_demands(sample, batch / units, units, device.element_bytes), roofs)


def compute_demands(sample: SampleWork, samples: float, units: float, element_bytes: int) -> dict[Resource, Demand]:
    """Return what one compute unit needs of each resource in a step, if ``samples`` are its share of the batch."""
    _, moved = compute_ring_traffic(ALL_REDUCE, units, sample.parameters * element_bytes)
    of_format = f"{8 * element_bytes}-bit numbers"
    return {
        "compute": Demand(sample.flops * samples, "modelled", "closed form of the workload"),
        "memory": Demand(sample.bytes[element_bytes] * samples, "modelled", f"algorithmic bytes, {of_format}"),
        "host_link": Demand(sample.sample_bytes * samples, "modelled", "every sample once"),
        "storage": Demand(sample.sample_bytes * samples, "modelled", "every sample once"),
        "all_reduce": Demand(moved, "modelled", f"gradients once over a ring, {of_format}"),
        "all_to_all": Demand(0.0, "modelled", "none"),
    }


def _roofs(file: PublishedRoofs, device: Device, machine: str, round_: str) -> dict[Resource, Roof | str]:
    entry = next(
        # A machine may have been rebuilt between rounds, so an entry can be limited to rounds
        (m for m in file.machines if m.machine == machine and (m.rounds is None or round_ in m.rounds)),
        Machine(machine=machine),
    )
    roofs: dict[Resource, Roof | str] = {
        "compute": file.roof(device.compute),
        "memory": file.roof(entry.memory or device.memory),
        "host_link": file.roof(device.host_link) if device.host_link else "the processor is the host",
        "storage": NO_STORAGE,
        "all_reduce": file.roof(entry.network) if entry.network else NO_NETWORK,
    }
    return roofs


def _number(value: Any) -> float:
    """Return the value as a number; 0 if it is missing."""
    return float(value) if isinstance(value, int | float) and not pd.isna(value) else 0.0


def list_vendor_roofs(device: str, precision: str) -> list[Roof]:
    """List the vendor's peaks of matrix products of a device in a number format; empty if the file has none."""
    file = read_roofs()
    width = 2 if precision in {"bfloat16", "float16"} else 4
    # torch names a device in full ("NVIDIA A100-SXM4-80GB"); the file has families
    known = [entry for name, entry in file.devices.items() if name.casefold() in device.casefold()]
    return [file.roof(entry.compute) for entry in known if entry.element_bytes == width]
