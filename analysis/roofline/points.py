"""Places phases and kernels of own results under the measured roofs of their machine. Pure: no drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlhpc.analysis.roofline.bounds import (
    Complexity,
    Point,
    Roof,
    compute_attainable,
    compute_complexity,
    explain_above_roof,
)
from mlhpc.analysis.roofline.regime import (
    Case,
    compute_rank_roof,
    find_holding_level,
    list_measured_cases,
    list_memory_levels,
    list_peaks,
)
from mlhpc.analysis.sources.readers import Counters
from mlhpc.analysis.study import Study
from mlhpc.suite.performance.ceilings_file import Ceiling, Ceilings

TOP_KERNELS = 8  # more signs would hide each other; the others are one point
TINY_ORDER = 64  # a matrix product of this order or less takes only the time of issuing it
STEP, PASSES, UPDATES = "training step", "forward + backward", "optimizer"


@dataclass(frozen=True)
class PlacedPoint:
    """Holds a point of a case with the roofs above it. ``refused`` says why it is not believed; empty if it is."""

    case: Case
    point: Point
    peak: Roof
    bandwidth: Roof
    refused: str

    @property
    def allowed(self) -> float:
        """Return the FLOP/s that the roofs allow at this intensity."""
        return compute_attainable(self.peak.per_s, self.bandwidth.per_s, self.point.intensity)

    @property
    def state(self) -> str:
        """Say whether the classic roofline can show the point, and if not, why."""
        if self.refused:
            return f"refused: {self.refused}"
        return "drawn" if self.point.flops else "not drawn: no FLOPs"

    @property
    def roof(self) -> str:
        """Return the roof above the point: compute, or the memory level."""
        compute = self.peak.per_s <= self.bandwidth.per_s * self.point.intensity
        return "compute" if compute else f"memory ({self.bandwidth.name.split(',')[0]})"

    @property
    def identity(self) -> dict[str, object]:
        """Return the first columns of the point's row in a figure's table."""
        return {
            "label": self.case.label,
            "benchmark": self.case.benchmark,
            "size": self.case.size,
            "ranks": self.case.ranks,
            "point": self.point.name,
        }


@dataclass(frozen=True)
class Machine:
    """Holds a ceilings file, the results on that machine, and their points.

    ``levels``: memory roofs, the smallest level first.
    """

    file: Ceilings
    cases: tuple[Case, ...]
    levels: tuple[Roof, ...]
    placed: tuple[PlacedPoint, ...]

    @property
    def title(self) -> str:
        """Return the file's title, and the run's ranks and threads if they differ from those of the measurement."""
        work = self.cases[0].work
        assert work is not None
        mine, theirs = self.file.device.threads or 1, work.threads or self.file.device.threads or 1
        # Only then are the file's rates those of the run, and the title needs no remark
        if (work.ranks_per_node, theirs) == (self.file.ranks_per_node, mine):
            return self.file.title
        return f"{self.file.title}; the run: {work.ranks_per_node:g} × {theirs:g} threads a node"

    @property
    def lesser_peaks(self) -> list[Roof]:
        """Return the lower compute roofs, which are sustained rates where the highest one is a burst."""
        roofs = {roof.name: roof for case in self.cases if case.work for roof in list_peaks(self.file, case.work)[1:]}
        return list(roofs.values())

    @property
    def launch_s(self) -> float:
        """Return the seconds to issue one operator: the time of the smallest measured matrix product; 0 if unknown."""
        # The time of a tiny product is nearly all launch: its FLOPs take nanoseconds
        products = [curve for curve in self.file.curves if curve.resource == "compute"]
        times = [p.seconds for curve in products for p in curve.points if p.seconds and p.x <= TINY_ORDER]
        return min(times, default=0.0)

    def complexities(self) -> list[tuple[PlacedPoint, Complexity]]:
        """Return the believed points in the time-based roofline."""
        return [
            (placed, compute_complexity(placed.point, placed.peak, placed.bandwidth, self.launch_s))
            for placed in self.placed
            if not placed.refused
        ]


def list_machines(study: Study) -> list[Machine]:
    """Return ceilings files with the points of their results, one entry per number of ranks and threads on a node.

    Raises NotAnswerableError as `list_measured_cases` does.
    """
    groups: dict[tuple[str, float, float], list[Case]] = {}
    for case in list_measured_cases(study):
        assert case.ceilings is not None
        assert case.work is not None
        groups.setdefault((case.ceilings.title, case.work.ranks_per_node, case.work.threads or 0.0), []).append(case)
    return [_machine(study, cases) for _, cases in sorted(groups.items())]


def _machine(study: Study, cases: Sequence[Case]) -> Machine:
    file, work = cases[0].ceilings, cases[0].work
    assert file is not None
    assert work is not None
    measured = list_memory_levels(file)
    levels = tuple(compute_rank_roof(file, work, m, f"{m.name}, {m.mode}", shared=m is measured[-1]) for m in measured)
    return Machine(
        # Results of one machine and one use of it share a panel
        file,
        tuple(cases),
        levels,
        tuple(placed for case in cases for placed in _place_points(study, file, case)),
    )


def _place_points(study: Study, file: Ceilings, case: Case) -> Iterator[PlacedPoint]:
    assert case.work is not None
    peaks, levels = list_peaks(file, case.work), list_memory_levels(file)
    if not peaks or not levels:
        return
    peak = peaks[0]
    points = [*_points(case), *list_kernels(find_counters(study, case), find_last_level(levels))]
    for point in points:
        # Hardware counted the bytes behind all caches; algorithmic bytes may be served by a cache that holds them
        level = levels[-1] if point.basis == "counted" else find_holding_level(file, case.work, point.bytes)
        bandwidth = compute_rank_roof(file, case.work, level, f"{level.name}, {level.mode}", shared=level is levels[-1])
        yield PlacedPoint(case, point, peak, bandwidth, explain_above_roof(point, peak, bandwidth) or "")


def find_last_level(levels: Sequence[Ceiling]) -> str:
    """Return the name of the memory level behind all caches."""
    return levels[-1].name


def find_counters(study: Study, case: Case) -> Counters | None:
    """Return the counters file of a case's workload on its system. None: there is none."""
    assert case.ceilings is not None
    wanted = (case.ceilings.system, case.benchmark, case.size)
    matching = [c for c in study.inputs.counters if (c.system, c.benchmark, c.size) == wanted]
    return matching[0] if matching else None


def list_kernels(counted: Counters | None, level: str) -> list[Point]:
    """Return the longest kernels of a step, and all others as one point, with their bytes at one memory level."""
    if counted is None:
        return []
    known = sorted((k for k in counted.kernels if k.bytes.get(level)), key=lambda kernel: -kernel.seconds)
    longest, rest = known[:TOP_KERNELS], known[TOP_KERNELS:]
    points = [(k.name, k.flops, k.bytes[level], k.seconds, k.count) for k in longest]
    if rest:
        columns = [
            sum(column) for column in zip(*((k.flops, k.bytes[level], k.seconds, k.count) for k in rest), strict=True)
        ]
        points.append((f"{len(rest)} other kernels", *columns))
    steps = counted.steps
    return [Point(n, f / steps, b / steps, t / steps, "counted", level, c / steps) for n, f, b, t, c in points]


def _points(case: Case) -> Iterator[Point]:
    """Yield the step and those of its phases whose work is known.

    These are forward and backward pass, and the optimizer if it was logged.
    """
    work = case.work
    assert work is not None
    flops, traffic = work.demands.get("compute"), work.demands.get("memory")
    if flops is None or traffic is None or not traffic.amount:
        return
    yield Point(STEP, flops.amount + work.update_flops, traffic.amount, case.bounds.step_s, traffic.basis)
    passes_s, update_s = (work.phases.get(name, 0.0) for name in ("forward_backward", "optimizer"))
    # Only if the optimizer logged its own work can it be taken out of the step's
    split = work.update_flops > 0 and 0 < work.update_bytes < traffic.amount
    if 0.0 < passes_s < case.bounds.step_s:
        moved = traffic.amount - work.update_bytes if split else traffic.amount
        yield Point(PASSES, flops.amount, moved, passes_s, traffic.basis)
    if split and update_s > 0:
        yield Point(UPDATES, work.update_flops, work.update_bytes, update_s, traffic.basis)
