"""Makes cases for the rooflines of results.

A case has what one rank asked of each resource in a step, the roofs, and the time of the step. Own results are compared
with measured ceilings (mlhpc.analysis.sources.ceilings), published ones with mlhpc.analysis.roofline.published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mlhpc.analysis.published.scores import read_scores
from mlhpc.analysis.roofline.bounds import (
    ALL_REDUCE,
    Bounds,
    Demand,
    Resource,
    Ring,
    compute_bounds,
    compute_ring_traffic,
    find_scale_range,
)
from mlhpc.analysis.roofline.published import predict_bounds
from mlhpc.analysis.roofline.regime import COLD, COLLECTIVES, WARM, Work, find_roofs_of, find_scale_of
from mlhpc.analysis.sources.ceilings import Ceilings
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.analysis.tables.epochs import LARGEST_PLAUSIBLE
from mlhpc.analysis.tables.run_row import STEP_PARTS

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
        precision=str(row["precision"] or "float32"),
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


def group_by_class(cases: list[Case]) -> Iterator[tuple[str, list[Case]]]:
    """Yield cases by benchmark and size, own before published, each with a heading."""
    keys = sorted(
        {(case.benchmark, case.size, case.modelled) for case in cases}, key=lambda key: (key[0], key[2], key[1])
    )
    for benchmark, size, is_modelled in keys:
        members = [c for c in cases if (c.benchmark, c.size, c.modelled) == (benchmark, size, is_modelled)]
        title = f"{benchmark} · size {size}" + (" · published systems, modelled roofs" if is_modelled else "")
        yield title, sorted(members, key=lambda case: case.bounds.step_s)
