"""Selects measured roofs for the conditions of a step: number format, memory level, cache state, message size.

A ceilings file has rates per rank of its own measurement; here they become rates per rank of the run.

Makes cases for the rooflines of results.

A case has what one rank asked of each resource in a step, the roofs, and the time of the step. Own results are compared
with measured ceilings (mlhpc.analysis.sources.readers), published ones with mlhpc.analysis.roofline.bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mlhpc.analysis.published.scores import read_scores
from mlhpc.analysis.roofline.bounds import (
    ALL_REDUCE,
    ALL_TO_ALL,
    Bounds,
    Demand,
    Resource,
    Ring,
    Roof,
    compute_bounds,
    compute_ring_traffic,
    find_scale_range,
    fit_ring,
    predict_bounds,
    render_si,
)
from mlhpc.analysis.roofline.whatif import UPDATE_PHASE, compute_resource_seconds
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.analysis.tables.run_row import LARGEST_PLAUSIBLE, STEP_PARTS
from mlhpc.suite.performance.ceilings_file import Ceiling, Ceilings, Curve

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


def compute_rank_roof(file: Ceilings, work: Work, roof: Ceiling, name: str, *, shared: bool = False) -> Roof:
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


def compute_roofs(file: Ceilings, precision: str) -> list[Ceiling]:
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


def list_memory_levels(file: Ceilings) -> list[Ceiling]:
    """List the fastest kernel's roof at each memory level, the smallest level first."""
    best: dict[str, Ceiling] = {}
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


def find_holding_level(file: Ceilings, work: Work, traffic: float) -> Ceiling:
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


def find_host_link(file: Ceilings) -> Ceiling | None:
    """Return the fastest way of copying from the host to the device. None: none was measured."""
    links = [roof for roof in file.of("host_link") if roof.name == "host_to_device"]
    return max(links, key=lambda roof: roof.value, default=None)


def _find_host_link_roof(file: Ceilings, work: Work) -> Roof | str:
    best = find_host_link(file)
    if best is None:
        return file.why_not("host_link")
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


COLD_SHARE = 0.1  # share of the loaded bytes that came from the device; below it the page cache served the step
# Limits of what is believed: a log may hold any number, and one false value would decide a mean
LARGEST_WORK = 1e24  # FLOPs or bytes of a sample or a step
SHORTEST_STEP_S = 1e-9
BUCKET_BYTES = 25 * 2**20  # of a DDP bucket of gradients, torch's default
GRADIENT_BYTES = 4  # DDP exchanges gradients in the parameters' float32


@dataclass(frozen=True)
class Case:
    """Holds one result: its step and the bounds on it. ``ceilings`` is None for a published one.

    ``group`` identifies the result: results of different classes may have the same ``label``. ``remark`` is what a
    reader must know about the ceilings. ``scale`` is n*, the ranks at which the network takes as long as the
    computation. It is given for a computation at its roof, and for one as slow as the whole step was.
    """

    group: str
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
    scale: tuple[int, int] | None = None

    @property
    def modelled(self) -> bool:
        """Return True where no ceiling was measured."""
        return self.ceilings is None


def list_measured_cases(study: Study) -> list[Case]:
    """List own results that have ceilings and logged their work. Raises NotAnswerableError if there is none."""
    cases, reasons = [], []
    for row in study.results[~study.results["published"]].to_dict("records"):
        work = compute_step_work(study, row)
        if isinstance(work, str):
            # Kept for the error, which names what each result lacks
            reasons.append(f"{row['label']}: {work}")
            continue
        ceilings = find_ceilings_of(study, row, work)
        if isinstance(ceilings, str):
            reasons.append(ceilings)
            continue
        file, remark = ceilings
        cases.append(_case(row, work, file, remark))
    if not cases:
        raise NotAnswerableError("; ".join(dict.fromkeys(reasons)) or "own results with phases and work per sample")
    return cases


def list_published_cases(study: Study) -> list[Case]:
    """List published results with modelled roofs.

    They are those of the study, else each machine's best of the study's benchmarks.
    """
    results = study.results[study.results["published"] & (study.results["mode"] == "strong")]
    if len(results):
        rows = results.assign(train_rate=results["train_rate.mean"])
    else:
        shipped = read_scores()
        rows = shipped[(shipped["mode"] == "strong") & shipped["benchmark"].isin(study.results["benchmark"])]
        labels = [
            f"{machine} {units:g} · {round_}" for machine, units, round_ in rows[["machine", "units", "round"]].values
        ]
        rows = rows.assign(label=labels)
        # The report has no published results: each machine's best in the shipped table is compared
        rows = rows.sort_values("score_s").drop_duplicates(["benchmark", "machine"])
    # A carry-over has the logs of an earlier round and would be shown twice
    rows = rows[rows["carried_over_from"].isna()]
    modelled_rows = [(row, predict_bounds({str(k): v for k, v in row.items()})) for row in rows.to_dict("records")]
    return [
        Case(
            group=row["group"],
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
        for row, bounded in modelled_rows
        if bounded is not None
    ]


def _modelled_scale(bounded: Bounds, units: float) -> tuple[int, int] | None:
    """Return n* under modelled roofs, with a network that has no latency: from and to."""
    terms = {term.resource: term for term in bounded.terms}
    compute, exchange = terms.get("compute"), terms.get("all_reduce")
    if compute is None or exchange is None or units < 2:
        return None
    # published.yaml has no latencies
    ring = Ring(ALL_REDUCE, 0.0, exchange.roof.per_s)
    # The demand is what one rank sends; divided by the share of one byte, it is the size of the gradients
    size = exchange.demand.amount / compute_ring_traffic(ALL_REDUCE, units, 1.0)[1]
    return find_scale_range(compute.seconds * units, bounded.step_s * units, lambda n: ring.seconds(n, size))


def compute_step_work(study: Study, row: Mapping[str, Any]) -> Work | str:
    """Compute what one rank asked for in a training step, mean over the averaged runs of a result.

    Returns text that says what is missing if it is not known.
    """
    steps = count_steps(study)
    runs = _runs_with_phases(study, row, steps)
    if runs.empty:
        return "step_phases events, which only this suite logs"
    flops = _mean(runs, "executed_flops_per_sample")
    ranks, batch = _plausible(row["ranks"]), _plausible(row["global_batch_size"])
    if not flops or not ranks or not batch:
        return "work_per_sample, ranks and batch size that can be, which this suite logs"
    phases = _phases(runs, runs["run"].map(steps).to_numpy(float))
    if not SHORTEST_STEP_S < sum(phases.values()) < LARGEST_PLAUSIBLE:
        return "phases that can be"
    samples = batch / ranks
    logged = _logged(study, runs)
    update = _mean(runs, "optimizer_bytes_per_step") or 0.0
    parameters = (_mean(runs, "model_parameters") or 0.0) * GRADIENT_BYTES
    # Counted bytes first, then the closed form that the run logged, then one number for each parameter
    gradient = logged.get("all_reduce_bytes") or _mean(runs, "all_reduce_bytes_per_step") or parameters
    exchanged = (_mean(runs, "all_to_all_bytes_per_sample") or 0.0) * samples
    note = "executed FLOPs, closed form"
    again = _mean(runs, "recomputed_flops_per_sample")
    if again:
        flops, note = flops + again, f"{note}, and those that the plan recomputes, counted"
    # A plan that recomputes but logged no count needs more FLOPs than the demand has: the note says so
    elif runs["plan"].dropna().astype(str).str.contains(", recomputes ").any():
        note += ", without what the plan recomputes"
    demands: dict[Resource, Demand] = {"compute": Demand(flops * samples, "logged", note)}
    if traffic := _mean(runs, "algorithmic_bytes_per_sample"):
        # The logged bytes per sample contain the bytes of one update divided by the global batch
        moved = (traffic - update / batch) * samples + update  # every rank updates all parameters
        demands["memory"] = Demand(moved, "algorithmic", "operands and results of every operator")
    demands |= _compute_read_demands(logged, on_gpu=(runs["device_type"] == "cuda").any())
    demands |= _communication(logged, ranks, {"all_reduce": gradient, "all_to_all": exchanged})
    return Work(
        ranks=ranks,
        # More nodes than ranks cannot be: less than one rank would share a node
        nodes=min(_plausible(row["nodes"]) or 1.0, ranks),
        threads=_mean(runs, "threads_per_rank"),
        device=next(iter(runs["device_type"].dropna()), None),
        samples=samples,
        precision=row["precision"]
        if isinstance(row["precision"], str)
        else "float32",  # NaN beside runs that state one
        demands=demands,
        phases=phases,
        gradient_bytes=gradient,
        message_bytes=_messages(logged, gradient),
        update_flops=_mean(runs, "optimizer_flops_per_step") or 0.0,
        update_bytes=update or parameters,
    )


def _runs_with_phases(study: Study, row: Mapping[str, Any], steps: pd.Series) -> pd.DataFrame:
    """Return the averaged runs of a result that logged steps and phases.

    If no runs are averaged, all its runs are used.
    """
    runs = study.runs[study.runs["run"].isin(study.selections[row["group"]].averaged)]
    if runs.empty:
        # The result has no score; its steps were measured all the same
        runs = study.runs_of(row["group"])
    return runs[runs["run"].isin(steps.index) & runs["step_forward_backward_s"].notna()]


def _phases(runs: pd.DataFrame, steps: np.ndarray) -> dict[str, float]:
    """Return the seconds per step of each phase, mean over the runs."""
    return {part: float(np.mean(pd.to_numeric(runs[f"step_{part}_s"]).to_numpy(float) / steps)) for part in STEP_PARTS}


def _logged(study: Study, runs: pd.DataFrame) -> dict[str, float]:
    """Return the quantities of rank_stats per step, mean over ranks, epochs and runs."""
    ranks = study.tables.ranks
    ranks = ranks[ranks["run"].isin(runs["run"]) & ranks["mean"].between(0, LARGEST_WORK)]
    totals = ranks.groupby("quantity")[["mean", "steps"]].sum()
    return {str(name): row["mean"] / row["steps"] for name, row in totals.iterrows() if row["steps"] > 0}


def _compute_read_demands(logged: Mapping[str, float], *, on_gpu: bool) -> dict[Resource, Demand]:
    """Return the demands of reading samples, from the device or the page cache, and of copying them to a GPU."""
    demands: dict[Resource, Demand] = {}
    # On a CPU no link is used, whether or not the loader counted
    if (loaded := logged.get("loader_bytes")) is None:
        return demands if on_gpu else {"host_link": Demand(0.0, "logged", "the device is the host")}
    demands["host_link"] = Demand(loaded if on_gpu else 0.0, "logged", "samples as read")
    fetched = logged.get("storage_bytes", 0.0)
    cold = fetched > COLD_SHARE * loaded
    demands["storage"] = Demand(fetched, "logged", COLD) if cold else Demand(loaded, "logged", WARM)
    return demands


def _communication(
    logged: Mapping[str, float], ranks: float, closed_form: Mapping[Resource, float]
) -> dict[Resource, Demand]:
    """Return the bytes that a rank must send in a step (bus bytes, docs/ceilings.md): counted, else by closed form."""
    demands: dict[Resource, Demand] = {}
    for resource, passes in COLLECTIVES.items():
        # Counters that exist and have no entry for a collective counted none of it
        counted = logged.get(f"{resource}_bytes", 0.0 if logged else None)
        if counted is None:
            _, moved = compute_ring_traffic(passes, ranks, closed_form[resource])
            demands[resource] = Demand(moved, "algorithmic", "closed form")
        else:
            demands[resource] = Demand(
                compute_ring_traffic(passes, ranks, counted)[1], "logged", "every collective counted"
            )
    return demands


def _messages(logged: Mapping[str, float], gradient_bytes: float) -> dict[Resource, float]:
    """Return the mean bytes of a message.

    If nothing was counted, gradients are sent in buckets of DDP's default size.
    """
    sizes: dict[Resource, float] = {"all_reduce": min(gradient_bytes, float(BUCKET_BYTES))}
    for resource in COLLECTIVES:
        if calls := logged.get(f"{resource}_calls"):
            sizes[resource] = logged[f"{resource}_bytes"] / calls
    return sizes


def count_steps(study: Study) -> pd.Series:
    """Return the number of training steps over which each run measured its phases."""
    # The table has a row for each phase of a window: each window's steps count once
    windows = study.tables.phases.drop_duplicates(["run", "source", "epoch_num", "first_step"])
    counts = windows[windows["source"] == "rank 0, window"].groupby("run")["steps"].sum()
    return counts[counts.between(1, LARGEST_PLAUSIBLE)]


def find_ceilings_of(study: Study, row: Mapping[str, Any], work: Work) -> tuple[Ceilings, str] | str:
    """Find the ceilings file of a result's system, with a remark; or text that says why there is none."""
    systems = study.tables.systems.set_index("system_key")
    names = {str(row["system"]), str(systems.loc[row["system_key"], "name"]), str(row["machine"])}
    chosen = study.inputs.of_system(names, work.ranks, work.nodes)
    if not isinstance(chosen, str) and work.device not in (None, chosen[0].device.type):
        return (
            f"{row['label']} ran on {work.device}, the ceilings of {chosen[0].system!r} are of {chosen[0].device.type}"
        )
    return chosen


def _case(row: Mapping[str, Any], work: Work, file: Ceilings, remark: str) -> Case:
    step_s = sum(work.phases.values())
    roofs = find_roofs_of(file, work)
    return Case(
        group=row["group"],
        label=row["label"],
        benchmark=row["benchmark"],
        size=row["size"],
        precision=work.precision,
        ranks=work.ranks,
        batch=work.samples * work.ranks,
        n=int(row["n_averaged"]),
        bounds=compute_bounds(step_s, work.demands, roofs),
        work=work,
        ceilings=file,
        remark=remark,
        scale=find_scale_of(file, work, roofs, step_s),
    )


def _mean(runs: pd.DataFrame, column: str) -> float | None:
    """Return the mean of a column's plausible values, 1 to LARGEST_WORK. None: there is none."""
    values = pd.to_numeric(runs[column], errors="coerce")
    plausible = values[values.between(1.0, LARGEST_WORK)]
    return float(plausible.mean()) if len(plausible) else None


def _plausible(value: Any) -> float:
    """Return the value if it is a plausible count, from 1 up; else 0."""
    number = float(value) if isinstance(value, int | float) else 0.0
    return number if 1.0 <= number <= LARGEST_PLAUSIBLE else 0.0
