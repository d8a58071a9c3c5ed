"""Selects measured roofs for the conditions of a step: number format, memory level, cache state, message size.

A ceilings file has rates per rank of its own measurement; here they become rates per rank of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlhpc.analysis.roofline.bounds import (
    ALL_REDUCE,
    ALL_TO_ALL,
    Demand,
    Resource,
    Ring,
    Roof,
    compute_ring_traffic,
    find_scale_range,
    fit_ring,
    render_si,
)
from mlhpc.analysis.roofline.whatif import UPDATE_PHASE, compute_resource_seconds
from mlhpc.analysis.sources.ceilings import Ceilings, Curve, MeasuredRoof

COLD, WARM = "read from the device, as the kernel counts", "samples read, from the page cache"
# The spread widens what is believed (`Roof.most_per_s`); a noisier roof would refute nothing any more
LARGEST_SPREAD = 0.5  # limit of the spread that is taken from a noisy roof
COLLECTIVES: Mapping[Resource, int] = {"all_reduce": ALL_REDUCE, "all_to_all": ALL_TO_ALL}


@dataclass(frozen=True)
class Work:
    """Holds a training step of one rank: its demand on each resource, and seconds per phase.

    ``threads`` and ``device`` (cpu or cuda) are None if they were not logged. ``message_bytes`` is the size of one
    message of a collective.
    """

    ranks: float
    nodes: float
    threads: float | None
    device: str | None
    samples: float
    precision: str
    demands: Mapping[Resource, Demand]
    phases: Mapping[str, float]
    gradient_bytes: float
    message_bytes: Mapping[Resource, float]
    update_flops: float
    update_bytes: float

    @property
    def ranks_per_node(self) -> float:
        """Return the ranks that share a node."""
        return self.ranks / self.nodes


def find_roofs_of(file: Ceilings, work: Work) -> dict[Resource, Roof | str]:
    """Find the roof of each resource under the conditions of this step, or text that says why there is none."""
    return {
        "compute": _find_compute_roof(file, work),
        "memory": _find_memory_roof(file, work),
        "host_link": _find_host_link_roof(file, work),
        "storage": _find_storage_roof(file, work),
        "all_reduce": _find_collective_roof(file, "all_reduce", work),
        "all_to_all": _find_collective_roof(file, "all_to_all", work),
    }


def find_scale_of(
    file: Ceilings, work: Work, roofs: Mapping[Resource, Roof | str], step_s: float
) -> tuple[int, int] | None:
    """Find n*: the ranks at which the gradients' all-reduce takes as long as the computation, at the same global batch.

    The first number is for the computation at its roof, the second for one as slow as the measured step. None: one of
    them is beyond 2^24 ranks.
    """
    ring, peak = fit_ring_of(file, "all_reduce"), roofs["compute"]
    if ring is None or isinstance(peak, str) or not work.gradient_bytes:
        return None
    # Seconds of the whole global batch on one rank, which n ranks divide
    at_roof = work.demands["compute"].amount * work.ranks / peak.per_s
    return find_scale_range(at_roof, step_s * work.ranks, lambda n: ring.seconds(n, work.gradient_bytes))


def compute_term_seconds(file: Ceilings, work: Work) -> dict[str, float]:
    """Compute seconds Q / C of each resource that the file has a roof for, and of the optimizer's memory traffic."""
    roofs = find_roofs_of(file, work)
    seconds = compute_resource_seconds({name: demand.amount for name, demand in work.demands.items()}, roofs)
    last = list_memory_levels(file)
    if last and work.update_bytes:
        # An update touches all parameters and the optimizer's state once: that is taken as traffic of the last level
        seconds[UPDATE_PHASE] = work.update_bytes / compute_rank_roof(file, work, last[-1], "", shared=True).per_s
    return seconds


def compute_rank_roof(file: Ceilings, work: Work, roof: MeasuredRoof, name: str, *, shared: bool = False) -> Roof:
    """Return a file's roof for one rank of the run. It may use other threads and ranks per node than the file's ranks.

    The rate is scaled by threads. All ranks of a node may share a resource (``shared``). Then the ranks of the run get
    no more together than the file's ranks did.
    """
    per_s, source, mine = roof.value, roof.source, file.device.threads or 1
    if file.device.type == "cpu":
        # A log without threads: assume that the run used all threads that the measurement used
        threads = work.threads or mine * file.ranks_per_node / work.ranks_per_node
        theirs, ours = file.ranks_per_node * mine, work.ranks_per_node * threads
        cores = file.device.cores_allowed or max(theirs, ours)
        alone = threads / mine * min(1.0, cores / ours) / min(1.0, cores / theirs)  # more threads than cores take turns
        # With no more threads than the file's ranks, the run's ranks divide what those got together
        per_s *= file.ranks_per_node / work.ranks_per_node if shared and ours <= theirs else alone
        if (file.ranks_per_node, mine) != (work.ranks_per_node, threads):
            used = f"{file.ranks_per_node:g} ranks × {mine:g} threads a node"
            source += f"; with {used}, here {work.ranks_per_node:g} × {threads:g}"
    return Roof(per_s, name, "measured", source, min(roof.spread or 0.0, LARGEST_SPREAD))


def compute_roofs(file: Ceilings, precision: str) -> list[MeasuredRoof]:
    """List the GEMM roofs of a number format, the highest first: usually the burst, then the sustained rate."""
    # A file also has roofs in seconds (launches), which are no rates
    fitting = [roof for roof in file.of("compute") if roof.dtype == precision and roof.unit == "FLOP/s"]
    return sorted(fitting, key=lambda roof: -roof.value)


def list_peaks(file: Ceilings, work: Work) -> list[Roof]:
    """List the compute roofs of a rank of the run, the highest first.

    Lower ones are sustained rates of the same format.
    """
    fitting = compute_roofs(file, work.precision)
    alike = [roof for roof in fitting if roof.dtype == fitting[0].dtype]
    return [compute_rank_roof(file, work, roof, f"GEMM {roof.dtype}, {roof.mode}") for roof in alike]


def list_memory_levels(file: Ceilings) -> list[MeasuredRoof]:
    """List the fastest kernel's roof at each memory level, the smallest level first."""
    best: dict[str, MeasuredRoof] = {}
    for roof in file.of("memory"):
        # A level is measured with several kernels; the fastest shows what the level can do
        if roof.name not in best or roof.value > best[roof.name].value:
            best[roof.name] = roof
    return sorted(best.values(), key=lambda roof: roof.capacity_bytes or math.inf)


def fit_ring_of(file: Ceilings, resource: Resource) -> Ring | None:
    """Fit latency and bandwidth of a collective to all measured sizes and numbers of ranks."""
    return fit_ring(
        COLLECTIVES[resource],
        [
            (float(curve.ranks or file.ranks), point.x, point.seconds)
            for curve in file.curves
            if curve.resource == resource
            for point in curve.points
            if point.seconds
        ],
    )


def _find_compute_roof(file: Ceilings, work: Work) -> Roof | str:
    peaks = list_peaks(file, work)
    if not peaks:
        measured = sorted({str(roof.dtype) for roof in file.of("compute")})
        return f"no GEMM measured in {work.precision}, only in {', '.join(measured) or 'none'}"
    return peaks[0]


def find_holding_level(file: Ceilings, work: Work, traffic: float) -> MeasuredRoof:
    """Find the smallest memory level that holds all bytes of a rank, else the last level.

    The bytes are counted as if each were touched only once.
    """
    levels = list_memory_levels(file)
    # Caches belong to cores: each thread needs its share in the cache of its core
    footprint = traffic / (work.threads or file.device.threads or 1)
    return next((roof for roof in levels if footprint <= (roof.capacity_bytes or math.inf)), levels[-1])


def _find_memory_roof(file: Ceilings, work: Work) -> Roof | str:
    levels = list_memory_levels(file)
    if not levels:
        return file.why_not("memory")
    demand = work.demands.get("memory")
    level = find_holding_level(file, work, demand.amount if demand else math.inf)
    return compute_rank_roof(file, work, level, f"{level.name}, {level.mode}", shared=level is levels[-1])


def _find_host_link_roof(file: Ceilings, work: Work) -> Roof | str:
    links = [roof for roof in file.of("host_link") if roof.name == "host_to_device"]
    if not links:
        return file.why_not("host_link")
    best = max(links, key=lambda roof: roof.value)
    return compute_rank_roof(file, work, best, f"host to device, {best.mode}", shared=True)


def _find_storage_roof(file: Ceilings, work: Work) -> Roof | str:
    """Return the cold roof if the step read from the device, the warm one if the page cache served it."""
    demand = work.demands.get("storage")
    mode = "cold" if demand is not None and demand.note == COLD else "warm"
    reads = file.of("storage_read")
    if not reads:
        return file.why_not("storage_read")
    # A roof of the right cache state comes first, however slow; without one the fastest is a bound
    best = max(reads, key=lambda roof: (roof.mode == mode, roof.value))
    return compute_rank_roof(file, work, best, f"reading {best.name}, {best.mode}", shared=True)


def _find_collective_roof(file: Ceilings, resource: Resource, work: Work) -> Roof | str:
    """Return the bytes/s of one message at the nearest measured number of ranks.

    It is the bytes that a rank must send over the time of one message of that size.
    """
    if work.ranks == 1:
        return "one rank communicates with nobody"
    message = work.message_bytes.get(resource, 0.0)
    curve = _find_nearest_curve(file, resource, work)
    if curve is not None and message:
        ranks = curve.ranks or file.ranks
        seconds = _interpolate(curve, message)
        name = f"{curve.name}, {render_si(message)}B messages, {ranks} ranks"
        _, moved = compute_ring_traffic(COLLECTIVES[resource], ranks, message)
        # A curve states no spread of its points: a tenth is assumed
        return Roof(moved / seconds, name, "measured", f"measured, {len(curve.points)} message sizes", 0.1)
    roofs = file.of(resource)
    if not roofs:
        return file.why_not(resource)
    # Ratios, not differences: from 4 to 8 ranks a collective changes as much as from 512 to 1,024
    best = min(roofs, key=lambda roof: abs(math.log((roof.ranks or file.ranks) / work.ranks)))
    spread = min(best.spread or 0.0, LARGEST_SPREAD)
    return Roof(best.value, f"{best.name}, {best.ranks or file.ranks} ranks", "measured", best.source, spread)


def _find_nearest_curve(file: Ceilings, resource: Resource, work: Work) -> Curve | None:
    curves = [
        curve for curve in file.curves if curve.resource == resource and sum(bool(p.seconds) for p in curve.points) > 1
    ]

    def distance(curve: Curve) -> tuple[float, float]:
        """Compute the distance in nodes, then in ranks."""
        nodes, mine = curve.nodes or file.nodes, curve.ranks or file.ranks
        # Nodes first: inside one node and across nodes collectives use different networks
        return abs(math.log(nodes / work.nodes)), abs(math.log(mine / work.ranks))

    return min(curves, key=distance, default=None)


def _interpolate(curve: Curve, size: float) -> float:
    """Return the seconds of one call.

    Between measured sizes the interpolation is log-log. Above them the last bandwidth holds, below them the first time.
    """
    points = sorted((point.x, point.seconds) for point in curve.points if point.seconds)
    sizes, times = (np.log([point[k] for point in points]) for k in (0, 1))
    if size > points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    return float(np.exp(np.interp(math.log(size), sizes, times)))
