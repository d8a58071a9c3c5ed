"""Computes the demand of a training step on each resource, the resource's rate, and bounds on the step's time. Pure.

All quantities are of one rank and one training step. The extended roofline is T_r = Q_r / C_r for each resource r. A
step takes at least the largest T_r (everything overlaps). If every resource runs at its ceiling, it takes at most their
sum (nothing overlaps). The classic roofline is Williams et al., CACM 2009. The hierarchical one is Yang et al., arXiv
2009.05257. The time-based one is Wang et al., arXiv 2009.04598. docs/roofline.md has the definitions in words.

Reads roofs and work of the published systems from analysis/roofline/published.yaml. None of its numbers is ours.

`predict_bounds` makes an extended roofline of them. It assumes the fastest number format of the device and one transfer
of every sample over the host link. Gradients are exchanged once, over a ring at the nodes' network rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import pandas as pd
from msgspec import Meta, Struct

from mlhpc.suite.documents import convert, parse_yaml
from mlhpc.suite.errors import InputError

Resource = Literal["compute", "memory", "host_link", "storage", "all_reduce", "all_to_all"]
Basis = Literal["counted", "logged", "algorithmic", "modelled"]
Origin = Literal["measured", "literature", "vendor"]

RESOURCES: tuple[Resource, ...] = ("compute", "memory", "host_link", "storage", "all_reduce", "all_to_all")
RESOURCE_NAMES: Mapping[str, str] = {
    "compute": "compute", "memory": "memory", "host_link": "host link", "storage": "storage",
    "all_reduce": "all-reduce", "all_to_all": "all-to-all",
}  # fmt: skip
UNITS: Mapping[str, str] = {name: "FLOP" if name == "compute" else "B" for name in RESOURCES}
TOLERANCE = 0.05  # roof and step both have measurement errors: a point is above its roof only beyond this
# The search for n* ends here, beyond every machine: a slow network model might never reach the computation
MOST_RANKS = 2**24
# Share of a time that one roof must explain before the report says that it binds. Below one half, other causes together
# weigh more. The limit is ours, not from the literature.
LEAST_BINDING_SHARE = 0.5


@dataclass(frozen=True)
class Demand:
    """Holds what one rank needs of a resource in one step: FLOPs or bytes.

    ``basis`` is how it is known, ``note`` the source.
    """

    amount: float
    basis: Basis
    note: str


@dataclass(frozen=True)
class Roof:
    """Holds the rate of a resource for one rank, FLOP/s or bytes/s, under the conditions that ``name`` states.

    ``spread`` is relative; ``source`` is a measurement with its n, or a citation.
    """

    per_s: float
    name: str
    origin: Origin
    source: str
    spread: float = 0.0

    @property
    def most_per_s(self) -> float:
        """Return the highest rate that a measurement may have and still be believed."""
        return self.per_s * (1 + max(TOLERANCE, self.spread))


@dataclass(frozen=True)
class Term:
    """Holds demand and roof of one resource in a step."""

    resource: Resource
    demand: Demand
    roof: Roof

    @property
    def seconds(self) -> float:
        """Return T_r = Q_r / C_r."""
        return self.demand.amount / self.roof.per_s


@dataclass(frozen=True)
class RefusedTerm:
    """Holds a term whose rate would be above the roof, and the likely reason. It is shown as an input error."""

    term: Term
    reason: str


@dataclass(frozen=True)
class Bounds:
    """Holds the extended roofline of one step that took ``step_s``.

    ``terms`` are consistent with the measured step, ``refused`` contradict it. ``unknown`` maps each resource without
    quantity or ceiling to what is missing.
    """

    step_s: float
    terms: tuple[Term, ...]
    refused: tuple[RefusedTerm, ...]
    unknown: Mapping[Resource, str]

    @property
    def lower_s(self) -> float:
        """Return the largest T_r: the time of a step in which everything overlaps."""
        # NaN without terms: 0 would claim that the step could take no time
        return max((term.seconds for term in self.terms), default=math.nan)

    @property
    def upper_s(self) -> float:
        """Return the sum of all T_r: the time of a step in which nothing overlaps."""
        return sum(term.seconds for term in self.terms) if self.terms else math.nan

    @property
    def nearest(self) -> Term | None:
        """Return the resource with the largest T_r: the one that binds, if any does (`describe_roof_share`)."""
        return max(self.terms, key=lambda term: term.seconds, default=None)

    @property
    def distance(self) -> float:
        """Return the time of the step over the largest T_r; 1 is at the roof."""
        return self.step_s / self.lower_s

    @property
    def verdict(self) -> str:
        """Say whether the step lies within the bounds or above them.

        Above them, no resource with a known roof explains its time.
        """
        if not self.terms:
            return "no resource has both a quantity and a ceiling"
        if self.step_s > self.upper_s * (1 + TOLERANCE):
            return "the step takes longer than its roofs explain"
        return "within the band"


def is_binding(share: float) -> bool:
    """Return True if a roof that explains this share of a time binds it.

    The share is T / t, or the achieved rate over the roof's rate.
    """
    return share >= LEAST_BINDING_SHARE


def describe_roof_share(roof: str, share: float, kind: str = "known") -> str:
    """Describe a time if a roof explains ``share`` of it. ``kind`` says what roofs there are."""
    if is_binding(share):
        return f"{roof} is the limit, at {100 * share:.0f} % of its ceiling"
    if share <= 0:
        return f"no {kind} ceiling explains the time"
    return f"no {kind} ceiling explains the time; {roof} alone would allow {1 / share:.3g} times the speed"


def compute_bounds(step_s: float, demands: Mapping[Resource, Demand], roofs: Mapping[Resource, Roof | str]) -> Bounds:
    """Compute the extended roofline. A roof may be text that says why there is none. A demand of zero makes no term.

    A term longer than the measured step is refused as an input error: a wrong unit, number format or memory level.
    """
    terms: list[Term] = []
    refused: list[RefusedTerm] = []
    unknown: dict[Resource, str] = {}
    for resource in RESOURCES:
        demand, roof = demands.get(resource), roofs.get(resource, "no ceiling")
        if demand is None:
            unknown[resource] = "quantity not logged"
        # Nothing was asked for: neither a term nor unknown
        elif demand.amount == 0.0:
            continue
        elif isinstance(roof, str):
            unknown[resource] = roof
        else:
            term = Term(resource, demand, roof)
            reason = explain_contradiction(term, step_s)
            if reason is None:
                terms.append(term)
            else:
                refused.append(RefusedTerm(term, reason))
    return Bounds(step_s, tuple(terms), tuple(refused), unknown)


_LIKELY_REASONS = {
    "counted": "counters of another run or level",
    "logged": "a wrong unit, or a ceiling measured in another regime (message size, cache state, concurrency)",
    "algorithmic": (
        "algorithmic bytes are what operators read and write, and caches serve part of it: "
        "this needs counters of the memory level"
    ),
    "modelled": "the model's assumptions (number format, data in memory) do not hold for this run",
}


def explain_contradiction(term: Term, step_s: float) -> str | None:
    """Say why a term is impossible: it would take longer than the step that contained it. None: it is possible."""
    # The roof is measured too: a rate within its error is believed
    if term.demand.amount <= step_s * term.roof.most_per_s:
        return None
    unit = UNITS[term.resource]
    return (
        f"{RESOURCE_NAMES[term.resource]}: {render_si(term.demand.amount)}{unit} ({term.demand.basis}) in"
        f" {render_si(step_s)}s is {render_si(term.demand.amount / step_s)}{unit}/s, above the roof of"
        f" {render_si(term.roof.per_s)}{unit}/s ({term.roof.name}); {_LIKELY_REASONS[term.demand.basis]}"
    )


@dataclass(frozen=True)
class Point:
    """Holds a phase or kernel: FLOPs, bytes and seconds of all its launches in a step.

    ``count`` is the number of launches; 0 if unknown.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    basis: Basis
    level: str = "dram"
    count: float = 0.0

    @property
    def intensity(self) -> float:
        """Return FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Return FLOP/s."""
        return self.flops / self.seconds


def compute_attainable(peak: float, bandwidth: float, intensity: float) -> float:
    """Return the FLOP/s that the classic roofline allows: min(P, B * I)."""
    return min(peak, bandwidth * intensity)


def explain_above_roof(point: Point, peak: Roof, bandwidth: Roof) -> str | None:
    """Say why a point above its roof is not believed. None: it lies under its roof."""
    allowed = compute_attainable(peak.per_s, bandwidth.per_s, point.intensity)
    if point.rate <= compute_attainable(peak.most_per_s, bandwidth.most_per_s, point.intensity):
        return None
    roof = peak if peak.per_s <= bandwidth.per_s * point.intensity else bandwidth
    cause = "the number format or the FLOP count is wrong" if roof is peak else _LIKELY_REASONS[point.basis]
    return (
        f"{point.name}: {render_si(point.rate)}FLOP/s is above the {render_si(allowed)}FLOP/s that {roof.name} allows;"
        f" {cause}"
    )


@dataclass(frozen=True)
class Complexity:
    """Holds a point of the time-based roofline: seconds of FLOPs, of bytes and of launches, at the ceilings."""

    name: str
    compute_s: float
    memory_s: float
    launch_s: float
    seconds: float

    @property
    def bound(self) -> str:
        """Return the largest of the three: compute, memory or launch."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "launch": self.launch_s}
        return max(parts, key=lambda name: parts[name])

    @property
    def roof_s(self) -> float:
        """Return t = max(F / P, Q / B, n * t_launch)."""
        return max(self.compute_s, self.memory_s, self.launch_s)


def compute_complexity(point: Point, peak: Roof, bandwidth: Roof, launch_s: float) -> Complexity:
    """Compute a point's coordinates in the time-based roofline."""
    return Complexity(
        point.name,
        point.flops / peak.per_s,
        point.bytes / bandwidth.per_s,
        point.count * launch_s,
        point.seconds,
    )


@dataclass(frozen=True)
class Ring:
    """Holds a ring collective as latency and bandwidth: ``latency_s`` per message, ``per_s`` bytes/s that one rank
    sends.

    All-reduce moves 2 (1 - 1/n) S bytes in 2 (n - 1) messages. All-to-all moves (1 - 1/n) S in n - 1.
    """

    passes: int
    latency_s: float
    per_s: float

    def seconds(self, ranks: float, size_bytes: float) -> float:
        """Return the seconds of one collective of S bytes per rank; 0 on one rank."""
        # On one rank both are 0
        messages, moved = compute_ring_traffic(self.passes, ranks, size_bytes)
        return messages * self.latency_s + moved / self.per_s


ALL_REDUCE, ALL_TO_ALL = 2, 1  # passes over the ring


def compute_ring_traffic(passes: int, ranks: float, size_bytes: float) -> tuple[float, float]:
    """Return the number of messages and the bytes that one rank sends in one collective."""
    return passes * (ranks - 1), passes * (1 - 1 / ranks) * size_bytes


def fit_ring(passes: int, measured: Iterable[tuple[float, float, float]]) -> Ring | None:
    """Fit latency and bandwidth to (ranks, bytes, seconds) by least squares of relative errors.

    If the best latency would be negative, it is 0 and only the bandwidth is fitted. None: no row is usable.
    """
    rows = [
        (messages / seconds, moved / seconds)
        for ranks, size, seconds in measured
        if ranks > 1 and size > 0 and seconds > 0
        for messages, moved in [compute_ring_traffic(passes, ranks, size)]
    ]
    if not rows:
        return None
    # The normal equations of two unknowns. Rows are divided by their times, so that all sizes weigh the same
    aa, ab, bb = (sum(row[i] * row[k] for row in rows) for i, k in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency, per_byte = -1.0, -1.0
    # Below it all rows have one ratio of messages to bytes, as with one size on one number of ranks
    if determinant > 1e-12 * aa * bb:
        latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0.0 or per_byte <= 0.0:
        # Least squares of the bandwidth alone
        latency, per_byte = 0.0, b / bb
    return Ring(passes, latency, 1.0 / per_byte)


def find_scale_range(fast_s: float, slow_s: float, network_s: Callable[[float], float]) -> tuple[int, int] | None:
    """Find n* for a computation of ``fast_s`` and for one of ``slow_s`` seconds on one rank (`find_network_scale`).

    None: one of them is beyond 2^24 ranks.
    """
    fast = find_network_scale(lambda n: fast_s / n, network_s)
    slow = find_network_scale(lambda n: max(fast_s, slow_s) / n, network_s)
    return None if fast is None or slow is None else (fast, slow)


def find_network_scale(compute_s: Callable[[float], float], network_s: Callable[[float], float]) -> int | None:
    """Find n*: the fewest ranks at which the network takes as long as the computation. None: it is beyond 2^24 ranks.

    ``compute_s(n)`` must fall and ``network_s(n)`` rise with n.
    """

    def reached(ranks: int) -> bool:
        return network_s(ranks) >= compute_s(ranks)

    high = 2
    # Doubling, then bisection: `reached` is monotonic in the ranks
    while not reached(high):
        high *= 2
        if high > MOST_RANKS:
            return None
    low = high // 2  # not reached there, or it is 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def render_si(value: float) -> str:
    """Render a number with three digits and a decimal prefix, to be followed by a unit: "1.23 G", "45 m"."""
    if not math.isfinite(value):
        return "– "
    if value == 0.0:
        return "0 "
    exponent = min(max(math.floor(math.log10(abs(value)) / 3), -4), 6)
    scaled = value / 1000.0**exponent
    # 999.7 would be rounded to 1e+03
    if abs(scaled) >= 999.5 and exponent < 6:
        exponent, scaled = exponent + 1, scaled / 1000.0
    digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:,.0f}"
    return f"{digits} {'pnµm kMGTPE'[exponent + 4].strip()}"


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

    None: the row lacks a number, or published.yaml its device or benchmark. An open result may have another network.
    """
    file = read_roofs()
    benchmark = str(row["benchmark"])
    # A format that a log states has its own rates; without one it is that of the fastest
    device = file.devices.get(f"{row['device']} {row['precision']}", file.devices.get(str(row["device"])))
    # Rounds changed data and models: an entry for this round comes before that of the benchmark
    sample = file.work.get(f"{benchmark} {row['round']}", file.work.get(benchmark))
    units, batch, rate = (_number(row[name]) for name in ("units", "global_batch_size", "train_rate"))
    # Also zero, which `_number` makes of a missing value
    if (
        device is None
        or sample is None
        or row["size"] != "full"
        or row["division"] == "open"
        or not units
        or not batch
        or not rate
    ):
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
