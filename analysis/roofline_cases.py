"""Results as cases for the rooflines: what one rank asked of each resource in a step, what it could get, and the step.

Own results take measured ceilings (analysis.roofline_inputs), published ones the table of analysis.roofline_published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.published import published
from analysis.reading import LARGEST_PLAUSIBLE, STEP_PARTS
from analysis.roofline import (
    ALL_REDUCE,
    ALL_TO_ALL,
    Bounds,
    Demand,
    Resource,
    Ring,
    Roof,
    bounds,
    fit_ring,
    moved_by,
    network_scale,
    si,
)
from analysis.roofline_inputs import Ceilings, Curve, MeasuredRoof
from analysis.roofline_published import modelled
from analysis.study import NotAnswerableError, Study
from analysis.whatif import UPDATE, seconds_at

COLD, WARM = "read from the device, as the kernel counts", "samples read, from the page cache"
COLD_SHARE = 0.1  # of what the loader read; below it the device had no part in a step
LARGEST_SPREAD = 0.5  # by which a noisy roof is still a roof
LARGEST_WORK = 1e24  # FLOPs or bytes of a sample or a step
SHORTEST_STEP_S = 1e-9
BUCKET_BYTES = 25 * 2**20  # of a DDP bucket of gradients, torch's default
GRADIENT_BYTES = 4
TF32 = ("tf32", "float32")  # what torch computes float32 convolutions in, on a GPU that has it
COLLECTIVES: Mapping[Resource, int] = {"all_reduce": ALL_REDUCE, "all_to_all": ALL_TO_ALL}


@dataclass(frozen=True)
class Work:
    """A training step of one rank: what is asked of each resource, seconds per phase. ``threads`` None: not logged.

    ``message_bytes`` is the size of one message of a collective.
    """

    ranks: float
    nodes: float
    threads: float | None
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
        """Ranks that share a node."""
        return self.ranks / self.nodes


@dataclass(frozen=True)
class Case:
    """One result, or a published one (``ceilings`` None): its step and the bounds on it.

    ``remark`` says what a reader must know of the ceilings, ``why_not`` why there are none.
    """

    label: str
    benchmark: str
    size: str
    precision: str
    ranks: float
    batch: float
    n: int
    bounds: Bounds
    work: Work | None
    ceilings: Ceilings | None
    remark: str = ""
    scale: int | None = None

    @property
    def modelled(self) -> bool:
        """True where no ceiling was measured."""
        return self.ceilings is None


def measured_cases(study: Study) -> list[Case]:
    """Own results with ceilings. NotAnswerableError says what is missing."""
    found, why = [], []
    for row in study.results[~study.results["published"]].to_dict("records"):
        work = work_of(study, row)
        if isinstance(work, str):
            why.append(f"{row['label']}: {work}")
            continue
        given = ceilings_of(study, row, work)
        if isinstance(given, str):
            why.append(given)
            continue
        file, remark = given
        found.append(_case(row, work, file, remark))
    if not found:
        raise NotAnswerableError("; ".join(dict.fromkeys(why)) or "own results with phases and work per sample")
    return found


def published_cases(study: Study) -> list[Case]:
    """Published results against modelled roofs: those of the study, else the shipped ones of its benchmarks, a machine's best."""
    own = study.results[study.results["published"] & (study.results["mode"] == "strong")]
    if len(own):
        rows = own.assign(train_rate=own["train_rate.mean"])
    else:
        shipped = published()
        rows = shipped[(shipped["mode"] == "strong") & shipped["benchmark"].isin(study.results["benchmark"])]
        labels = [
            f"{machine} {units:g} · {round_}" for machine, units, round_ in rows[["machine", "units", "round"]].values
        ]
        rows = rows.assign(label=labels)
        rows = rows.sort_values("score_s").drop_duplicates(["benchmark", "machine"])
    rows = rows[rows["carried_over_from"].isna()]
    found = [(row, modelled({str(k): v for k, v in row.items()})) for row in rows.to_dict("records")]
    return [
        Case(
            label=row["label"],
            benchmark=row["benchmark"],
            size=row["size"],
            precision="",
            ranks=float(row["units"]),
            batch=float(row["global_batch_size"]),
            n=int(row["n_averaged"]),
            bounds=bounded,
            work=None,
            ceilings=None,
            scale=_modelled_scale(bounded, float(row["units"])),
        )
        for row, bounded in found
        if bounded is not None
    ]


def _modelled_scale(found: Bounds, units: float) -> int | None:
    """n* under modelled roofs: a network without latency."""
    terms = {term.resource: term for term in found.terms}
    compute, exchange = terms.get("compute"), terms.get("all_reduce")
    if compute is None or exchange is None or units < 2:
        return None
    ring = Ring(ALL_REDUCE, 0.0, exchange.roof.per_s)
    size = exchange.demand.amount / moved_by(ALL_REDUCE, units, 1.0)[1]
    return network_scale(lambda n: compute.seconds * units / n, lambda n: ring.seconds(n, size))


def work_of(study: Study, row: Mapping[str, Any]) -> Work | str:
    """What a step of a result asked for, mean over its averaged runs; text says what is missing."""
    runs = study.runs[study.runs["run"].isin(study.selections[row["group"]].averaged)]
    if runs.empty:
        runs = study.runs_of(row["group"])
    steps = steps_of(study)
    runs = runs[runs["run"].isin(steps.index) & runs["step_forward_backward_s"].notna()]
    if runs.empty:
        return "step_phases events, which only this suite logs"
    flops = _mean(runs, "executed_flops_per_sample")
    ranks, batch = _plausible(row["ranks"]), _plausible(row["global_batch_size"])
    if not flops or not ranks or not batch:
        return "work_per_sample, ranks and batch size that can be, which this suite logs"
    count = runs["run"].map(steps).to_numpy(float)
    phases = {
        part: float(np.mean(pd.to_numeric(runs[f"step_{part}_s"]).to_numpy(float) / count)) for part in STEP_PARTS
    }
    if not SHORTEST_STEP_S < sum(phases.values()) < LARGEST_PLAUSIBLE:
        return "phases that can be"
    samples = batch / ranks
    asked = _logged(study, runs)
    demands: dict[Resource, Demand] = {"compute": Demand(flops * samples, "logged", "executed FLOPs, closed form")}
    update = _mean(runs, "optimizer_bytes_per_step") or 0.0
    if traffic := _mean(runs, "algorithmic_bytes_per_sample"):
        moved = (traffic - update / batch) * samples + update  # every rank updates all parameters
        demands["memory"] = Demand(moved, "algorithmic", "operands and results of every operator")
    demands |= _reading(asked, on_gpu=(runs["device_type"] == "cuda").any())
    parameters = (_mean(runs, "model_parameters") or 0.0) * GRADIENT_BYTES
    gradient = asked.get("all_reduce_bytes") or _mean(runs, "all_reduce_bytes_per_step") or parameters
    exchanged = (_mean(runs, "all_to_all_bytes_per_sample") or 0.0) * samples
    demands |= _communication(asked, ranks, {"all_reduce": gradient, "all_to_all": exchanged})
    return Work(
        ranks=ranks,
        nodes=min(_plausible(row["nodes"]) or 1.0, ranks),
        threads=_mean(runs, "threads_per_rank"),
        samples=samples,
        precision=str(row["precision"] or "float32"),
        demands=demands,
        phases=phases,
        gradient_bytes=gradient,
        message_bytes=_messages(asked, gradient),
        update_flops=_mean(runs, "optimizer_flops_per_step") or 0.0,
        update_bytes=update or parameters,
    )


def _logged(study: Study, runs: pd.DataFrame) -> dict[str, float]:
    """What the ranks counted of themselves, per step, mean over ranks, blocks and runs."""
    ranks = study.tables.ranks
    ranks = ranks[ranks["run"].isin(runs["run"]) & ranks["mean"].between(0, LARGEST_WORK)]
    totals = ranks.groupby("quantity")[["mean", "steps"]].sum()
    return {str(name): row["mean"] / row["steps"] for name, row in totals.iterrows() if row["steps"] > 0}


def _reading(asked: Mapping[str, float], *, on_gpu: bool) -> dict[Resource, Demand]:
    """Samples read, from the device or from the page cache, and carried to a GPU."""
    found: dict[Resource, Demand] = {}
    if (loaded := asked.get("loader_bytes")) is None:
        return found if on_gpu else {"host_link": Demand(0.0, "logged", "the device is the host")}
    found["host_link"] = Demand(loaded if on_gpu else 0.0, "logged", "samples as read")
    fetched = asked.get("storage_bytes", 0.0)
    cold = fetched > COLD_SHARE * loaded
    found["storage"] = Demand(fetched, "logged", COLD) if cold else Demand(loaded, "logged", WARM)
    return found


def _communication(
    asked: Mapping[str, float], ranks: float, closed_form: Mapping[Resource, float]
) -> dict[Resource, Demand]:
    """Bytes a rank must send in a step (docs/ceilings.md: bus bytes), as counted, else by closed form."""
    found: dict[Resource, Demand] = {}
    for resource, passes in COLLECTIVES.items():
        given = asked.get(f"{resource}_bytes", 0.0 if asked else None)
        if given is None:
            _, moved = moved_by(passes, ranks, closed_form[resource])
            found[resource] = Demand(moved, "algorithmic", "closed form")
        else:
            found[resource] = Demand(moved_by(passes, ranks, given)[1], "logged", "every collective counted")
    return found


def _messages(asked: Mapping[str, float], gradient_bytes: float) -> dict[Resource, float]:
    """Mean size of a message; gradients go in buckets where nothing was counted."""
    found: dict[Resource, float] = {"all_reduce": min(gradient_bytes, float(BUCKET_BYTES))}
    for resource in COLLECTIVES:
        if calls := asked.get(f"{resource}_calls"):
            found[resource] = asked[f"{resource}_bytes"] / calls
    return found


def steps_of(study: Study) -> pd.Series:
    """Training steps that each run's phases were measured over."""
    windows = study.tables.phases.drop_duplicates(["run", "source", "epoch_num", "first_step"])
    counts = windows[windows["source"] == "rank 0, window"].groupby("run")["steps"].sum()
    return counts[counts.between(1, LARGEST_PLAUSIBLE)]


def ceilings_of(study: Study, row: Mapping[str, Any], work: Work) -> tuple[Ceilings, str] | str:
    """The ceilings file of a result's system and a remark; text says why there is none."""
    systems = study.tables.systems.set_index("system_key")
    names = {str(row["system"]), str(systems.loc[row["system_key"], "name"]), str(row["machine"])}
    return study.inputs.of_system(names, work.ranks, work.nodes)


def _case(row: Mapping[str, Any], work: Work, file: Ceilings, remark: str) -> Case:
    step_s = sum(work.phases.values())
    roofs = roofs_of(file, work)
    return Case(
        label=row["label"],
        benchmark=row["benchmark"],
        size=row["size"],
        precision=work.precision,
        ranks=work.ranks,
        batch=work.samples * work.ranks,
        n=int(row["n_averaged"]),
        bounds=bounds(step_s, work.demands, roofs),
        work=work,
        ceilings=file,
        remark=remark,
        scale=scale_of(file, work, roofs),
    )


def scale_of(file: Ceilings, work: Work, roofs: Mapping[Resource, Roof | str]) -> int | None:
    """n*: ranks at which the gradients' all-reduce takes as long as the computation at its roof, the global batch kept."""
    ring, peak = ring_of(file, "all_reduce"), roofs["compute"]
    if ring is None or isinstance(peak, str) or not work.gradient_bytes:
        return None
    total = work.demands["compute"].amount * work.ranks
    return network_scale(
        lambda ranks: total / ranks / peak.per_s, lambda ranks: ring.seconds(ranks, work.gradient_bytes)
    )


def roofs_of(file: Ceilings, work: Work) -> dict[Resource, Roof | str]:
    """What one rank gets of each resource in the regime of this step; text says why there is no roof."""
    return {
        "compute": _compute(file, work),
        "memory": _memory(file, work),
        "host_link": _host_link(file, work),
        "storage": _storage(file, work),
        "all_reduce": _collective(file, "all_reduce", work),
        "all_to_all": _collective(file, "all_to_all", work),
    }


def terms_there(file: Ceilings, work: Work) -> dict[str, float]:
    """Seconds Q / C of each resource that a file has a roof for, and of the optimizer's update of as many parameters."""
    roofs = roofs_of(file, work)
    found = seconds_at({name: demand.amount for name, demand in work.demands.items()}, roofs)
    last = memory_levels(file)
    if last and work.update_bytes:
        found[UPDATE] = work.update_bytes / scaled(file, work, last[-1], "", shared=True).per_s
    return found


def scaled(file: Ceilings, work: Work, roof: MeasuredRoof, name: str, *, shared: bool = False) -> Roof:
    """A roof as one rank of the run gets it at most, where the file's ranks used the host's cores otherwise.

    By threads; what all ranks of a node share (``shared``) is also no more than the file's ranks had together.
    """
    per_s, source, mine = roof.value, roof.source, file.device.threads or 1
    if file.device.type == "cpu":
        threads = work.threads or mine * file.ranks_per_node / work.ranks_per_node
        theirs, ours = file.ranks_per_node * mine, work.ranks_per_node * threads
        cores = file.device.cores_allowed or max(theirs, ours)
        alone = threads / mine * min(1.0, cores / ours) / min(1.0, cores / theirs)  # more threads than cores take turns
        per_s *= file.ranks_per_node / work.ranks_per_node if shared and ours <= theirs else alone
        if (file.ranks_per_node, mine) != (work.ranks_per_node, threads):
            used = f"{file.ranks_per_node:g} ranks × {mine:g} threads a node"
            source += f"; with {used}, here {work.ranks_per_node:g} × {threads:g}"
    return Roof(per_s, name, "measured", source, min(roof.spread or 0.0, LARGEST_SPREAD))


def compute_roofs(file: Ceilings, precision: str) -> list[MeasuredRoof]:
    """GEMM roofs that fit a number format, the highest first: a burst, unless a sustained run was faster."""
    wanted = TF32 if precision == "float32" and file.device.type == "cuda" else (precision,)
    fitting = [roof for roof in file.of("compute") if roof.dtype in wanted and roof.unit == "FLOP/s"]
    return sorted(fitting, key=lambda roof: (wanted.index(str(roof.dtype)), -roof.value))


def peaks_of(file: Ceilings, work: Work) -> list[Roof]:
    """The compute roof of a rank of the run, and what is sustained of it where that is less."""
    fitting = compute_roofs(file, work.precision)
    alike = [roof for roof in fitting if roof.dtype == fitting[0].dtype]
    return [scaled(file, work, roof, f"GEMM {roof.dtype}, {roof.mode}") for roof in alike]


def memory_levels(file: Ceilings) -> list[MeasuredRoof]:
    """The fastest kernel's roof of each memory level, the smallest level first."""
    best: dict[str, MeasuredRoof] = {}
    for roof in file.of("memory"):
        if roof.name not in best or roof.value > best[roof.name].value:
            best[roof.name] = roof
    return sorted(best.values(), key=lambda roof: roof.capacity_bytes or math.inf)


def ring_of(file: Ceilings, resource: Resource) -> Ring | None:
    """Latency and bandwidth of a collective from all sizes and rank counts that were measured."""
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


def _compute(file: Ceilings, work: Work) -> Roof | str:
    peaks = peaks_of(file, work)
    if not peaks:
        measured = sorted({str(roof.dtype) for roof in file.of("compute")})
        return f"no GEMM measured in {work.precision}, only in {', '.join(measured) or 'none'}"
    return peaks[0]


def holding(file: Ceilings, work: Work, traffic: float) -> MeasuredRoof:
    """The smallest memory level that holds all of a rank's bytes even if each was touched only once; else the last."""
    levels = memory_levels(file)
    footprint = traffic / (work.threads or file.device.threads or 1)
    return next((roof for roof in levels if footprint <= (roof.capacity_bytes or math.inf)), levels[-1])


def _memory(file: Ceilings, work: Work) -> Roof | str:
    levels = memory_levels(file)
    if not levels:
        return file.why_not("memory")
    demand = work.demands.get("memory")
    level = holding(file, work, demand.amount if demand else math.inf)
    return scaled(file, work, level, f"{level.name}, {level.mode}", shared=level is levels[-1])


def _host_link(file: Ceilings, work: Work) -> Roof | str:
    links = [roof for roof in file.of("host_link") if roof.name == "host_to_device"]
    if not links:
        return file.why_not("host_link")
    best = max(links, key=lambda roof: roof.value)
    return scaled(file, work, best, f"host to device, {best.mode}", shared=True)


def _storage(file: Ceilings, work: Work) -> Roof | str:
    """Cold where the step read from the device, warm where the page cache served it."""
    demand = work.demands.get("storage")
    mode = "cold" if demand is not None and demand.note == COLD else "warm"
    reads = file.of("storage_read")
    if not reads:
        return file.why_not("storage_read")
    best = max(reads, key=lambda roof: (roof.mode == mode, roof.value))
    return scaled(file, work, best, f"reading {best.name}, {best.mode}", shared=True)


def _collective(file: Ceilings, resource: Resource, work: Work) -> Roof | str:
    """Bytes a rank must send over the time of one message of that size, at as many ranks or the nearest number measured."""
    if work.ranks == 1:
        return "one rank communicates with nobody"
    message = work.message_bytes.get(resource, 0.0)
    curve = _nearest(file, resource, work.ranks)
    if curve is not None and message:
        ranks = curve.ranks or file.ranks
        seconds = _interpolated(curve, message)
        name = f"{curve.name}, {si(message)}B messages, {ranks} ranks"
        _, moved = moved_by(COLLECTIVES[resource], ranks, message)
        return Roof(moved / seconds, name, "measured", f"measured, {len(curve.points)} message sizes", 0.1)
    roofs = file.of(resource)
    if not roofs:
        return file.why_not(resource)
    best = min(roofs, key=lambda roof: abs(math.log((roof.ranks or file.ranks) / work.ranks)))
    spread = min(best.spread or 0.0, LARGEST_SPREAD)
    return Roof(best.value, f"{best.name}, {best.ranks or file.ranks} ranks", "measured", best.source, spread)


def _nearest(file: Ceilings, resource: Resource, ranks: float) -> Curve | None:
    curves = [
        curve for curve in file.curves if curve.resource == resource and sum(bool(p.seconds) for p in curve.points) > 1
    ]
    return min(curves, key=lambda curve: abs(math.log((curve.ranks or file.ranks) / ranks)), default=None)


def _interpolated(curve: Curve, size: float) -> float:
    """Seconds of one call, log-log between the measured sizes; beyond them at the bandwidth of the last, or its latency."""
    points = sorted((point.x, point.seconds) for point in curve.points if point.seconds)
    sizes, times = (np.log([point[k] for point in points]) for k in (0, 1))
    if size > points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    return float(np.exp(np.interp(math.log(size), sizes, times)))


def _mean(runs: pd.DataFrame, column: str) -> float | None:
    """Mean of a column's values that can be: from 1 up."""
    values = pd.to_numeric(runs[column], errors="coerce")
    kept = values[values.between(1.0, LARGEST_WORK)]
    return float(kept.mean()) if len(kept) else None


def _plausible(value: Any) -> float:
    """A count that can be, from 1 up; else 0."""
    number = float(value) if isinstance(value, int | float) else 0.0
    return number if 1.0 <= number <= LARGEST_PLAUSIBLE else 0.0


def by_class(cases: list[Case]) -> Iterator[tuple[str, list[Case]]]:
    """Cases by benchmark and size, own before published, each with a heading."""
    keys = sorted(
        {(case.benchmark, case.size, case.modelled) for case in cases}, key=lambda key: (key[0], key[2], key[1])
    )
    for benchmark, size, is_modelled in keys:
        members = [c for c in cases if (c.benchmark, c.size, c.modelled) == (benchmark, size, is_modelled)]
        title = f"{benchmark} · size {size}" + (" · published systems, modelled roofs" if is_modelled else "")
        yield title, sorted(members, key=lambda case: case.bounds.step_s)
