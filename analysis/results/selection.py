"""Selects the scored runs of a result and computes its score, with `mlhpc.suite.log.score`.

Runs have their names in the table.

Names results, their classes, devices and machines.

Finds a count for the size of machines that differs between the results to be compared.

Measures how much the runs of one result differ, split into epochs and seconds per epoch.

Computes the reference's epochs to target by batch size, from the rulesets and the cards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from mlhpc.suite import RULESET
from mlhpc.suite.card import Target
from mlhpc.suite.compliance.rcp_limit import RcpLimit, compute_limit
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.energy.score import EnergyToSolution, find_energy
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.score import JudgedRun, compute_throughput, compute_time_to_train, find_round_group
from mlhpc.suite.statistics.sessions import TimedRun

Convergence = Literal["rules", "status"]
ENERGY_COLUMNS = (
    "energy_j",
    "energy_low_j",
    "energy_high_j",
    "energy_kind",
    "energy_valid",
    "energy_note",
    "watts_per_node",
    "energy_delay_js",
    "idle_share",
    "interconnect_estimated",
)


@dataclass(frozen=True)
class Selection:
    """Holds the runs that enter means, ``averaged``: the scored runs. Without a score they are all that converged.

    ``score_s`` is the time to train; in throughput mode, the time to train all. None: there is no score, and ``note``
    gives the reason. ``fate`` says for every run whether it was scored, or why not.
    """

    averaged: tuple[str, ...]
    scored: int
    score_s: float | None
    score_with_staging_s: float | None
    note: str
    fate: Mapping[str, str]
    interval_s: tuple[float, float] | None = None
    interval_words: str = ""
    models: int | None = None
    models_per_min: float | None = None
    energy: EnergyToSolution | None = None


def select(
    group: pd.DataFrame, records: Mapping[str, RunRecord], target: Target | None, convergence: Convergence = "rules"
) -> Selection:
    """Select the runs of one result that are scored, and score them. Pruned runs are left out.

    With ``status``, a logged success counts as convergence.
    """
    pruned = {str(name): "pruned" for name in group.loc[group["pruned"], "run"]}
    names = [str(name) for name in group.loc[~group["pruned"], "run"]]
    if target is None:
        fate = pruned | dict.fromkeys(names, "not judged: no target known")
        return Selection((), 0, None, None, "no target is known for this benchmark and size", fate)
    judge = _make_status_target(target) if convergence == "status" else target
    # The folder, too, may say that a run was resumed, which its log alone does not show
    entered = [replace(records[name], resumed=resumed) for name, resumed in _resumed(group, names)]
    if group["mode"].iloc[0] == "weak":
        return _throughput(names, entered, judge, pruned)
    score = compute_time_to_train(entered, judge, _find_points(group))
    fate = pruned | {name: _fate(run, score.valid) for name, run in zip(names, score.runs, strict=True)}
    # Means are still of interest without a score: they are over all runs that converged
    if not score.valid:
        done = _converged(names, score.runs)
        return Selection(done, 0, None, None, _reason(score.reason), fate)
    averaged = tuple(name for name, run in zip(names, score.runs, strict=True) if run.dropped is None)
    # The rules let one run fail, which then counts as the slowest. Runs outside of the required number do not count
    failed = any(not run.converged and "outside" not in (run.dropped or "") for run in score.runs)
    return Selection(
        averaged=averaged,
        scored=score.required_runs,
        score_s=score.mean_s,
        score_with_staging_s=score.mean_with_staging_s,
        note=f"olympic mean of {score.required_runs} runs" + (", one of which failed" if failed else ""),
        fate=fate,
        interval_s=score.interval_s,
        interval_words=score.interval_words,
        energy=find_energy(score),
    )


def _find_points(group: pd.DataFrame) -> Mapping[int, Sequence[float]]:
    """Find the reference points of a result: their spread bounds that of its epochs from below."""
    first = group.iloc[0]
    return find_reference_points(first["benchmark"], first["size"], str(first["round"]), float(first["train_samples"]))


def _make_status_target(target: Target) -> Target:
    return _StatusTarget(**{name: getattr(target, name) for name in Target.__struct_fields__})


class _StatusTarget(Target, frozen=True):
    """Accepts any evaluation as reaching the target, so that only a log's own status decides."""

    def reached(self, value: float) -> bool:
        """Return True."""
        return True


def _throughput(names: Sequence[str], entered: list[RunRecord], target: Target, pruned: dict[str, str]) -> Selection:
    score = compute_throughput(entered, target)
    fate = pruned | {name: _fate(run, score.valid) for name, run in zip(names, score.runs, strict=True)}
    done = _converged(names, score.runs)
    return Selection(
        averaged=done,
        scored=len(done) if score.valid else 0,
        score_s=score.time_to_train_all_s,
        score_with_staging_s=score.time_to_train_all_with_staging_s,
        note=_reason(score.reason)
        or f"time from the first run_start to the last run_stop of {score.instances} instances",
        fate=fate,
        models=score.instances,
        models_per_min=score.models_per_minute,
    )


def _resumed(group: pd.DataFrame, names: Sequence[str]) -> list[tuple[str, bool]]:
    flags = dict(zip(group["run"], group["resumed"], strict=True))
    return [(name, bool(flags[name])) for name in names]


def _converged(names: Sequence[str], runs: Sequence[JudgedRun]) -> tuple[str, ...]:
    return tuple(name for name, run in zip(names, runs, strict=True) if run.converged)


def _fate(run: JudgedRun, valid: bool) -> str:
    if not run.converged:
        return f"not converged: {run.failure}"
    if not valid:
        return "converged; no score"
    return f"left out: {run.dropped}" if run.dropped else "scored"


def _reason(reason: str | None) -> str:
    # The page writes "no score:" before it
    return (reason or "").removeprefix("not a score: ")


def add_energy(rows: pd.DataFrame, selections: Mapping[str, Selection]) -> pd.DataFrame:
    """Add `ENERGY_COLUMNS` to the table of results if any result has energy; otherwise return it as it is.

    ``energy_kind`` names what was measured; results of different kinds must not be compared.
    """
    found = {group: chosen.energy for group, chosen in selections.items() if chosen.energy is not None}
    known = [found.get(str(group)) for group in rows["group"]]
    if not any(each is not None and each.mean_j is not None for each in known):
        return rows
    cells: list[tuple[object, ...]] = []
    for each in known:
        if each is None:
            cells.append((None,) * len(ENERGY_COLUMNS))
            continue
        low, high = each.interval_j or (None, None)
        kind = f"{each.scope}, {each.current or 'AC or DC not stated'}" if each.scope else None
        numbers = (each.watts_per_node, each.delay_product_js, each.idle_share, each.estimated)
        # In the order of ENERGY_COLUMNS
        cells.append((each.mean_j, low, high, kind, each.valid, each.reason, *numbers))
    return rows.assign(**{name: [row[place] for row in cells] for place, name in enumerate(ENERGY_COLUMNS)})


COUNTS = ("units", "nodes", "cores", "ranks")
PLURAL = {
    name: f"{name}s" for name in ("accelerator", "node", "core", "rank")
} | {"processor": "processors", "unit": "compute units"}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """Holds the size of each result's machine, and the name of what is counted.

    It is accelerator, processor, unit, node, core or rank.
    """

    sizes: pd.Series
    one: str

    @property
    def count(self) -> str:
        """Return what the sizes count, as the name of an axis."""
        return PLURAL[self.one]


def choose_extent(rows: pd.DataFrame) -> Extent:
    """Return the size of each machine in the first count that all results have and that varies.

    The order is compute units, nodes, cores (ranks x threads), ranks. Cores decide on one processor, where units and
    nodes are 1. Ranks count only where cores are not known: more ranks on the same cores are no larger machine. If no
    count varies, or a machine has accelerators, it is compute units. These are called accelerators or processors
    (column ``unit``) if all results have the same kind.
    """
    kinds = rows["unit"].dropna().unique()
    unit = str(kinds[0]) if len(kinds) == 1 and rows["unit"].notna().all() else "unit"
    units = pd.to_numeric(rows["units"])
    if "accelerator" in kinds and units.notna().all():
        return Extent(units, unit)  # as many accelerators on half the nodes are no smaller machine
    for column in COUNTS:
        values = pd.to_numeric(rows[column])
        if values.notna().all() and values.nunique() > 1:
            return Extent(values, unit if column == "units" else column.removesuffix("s"))
        # Cores are known and do not vary: more ranks on them are no larger machine
        if column == "cores" and values.notna().all():
            break
    return Extent(units, unit)


def add_extent(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the rows with the columns ``extent``, ``one`` and ``hours``; rows of unknown extent are left out.

    Machines with the same values of ``by`` are counted in the same unit (`choose_extent`), and ``one`` names it.
    ``hours`` is the extent times the mean time of a run, in hours.
    """
    parts = []
    for _, part in rows.groupby(list(by), sort=True):
        found = choose_extent(part)
        hours = found.sizes * pd.to_numeric(part["run_s.mean"]) / 3600
        parts.append(part.assign(extent=found.sizes.astype(float), one=found.one, hours=hours))
    # groupby sorts by key; the caller's order of rows is restored
    whole = pd.concat(parts).loc[rows.index] if parts else rows.assign(extent=None, one="unit", hours=None)
    return whole[whole["extent"] > 0]


def find_system_units(rows: pd.DataFrame) -> pd.Series:
    """Find the compute units of each result's machine; in throughput mode, those of the whole system."""
    # In throughput mode `units` are those of one instance, and the machine runs many
    return rows["units"].mask((rows["mode"] == "weak") & rows["units_described"].notna(), rows["units_described"])


def find_unit_names(rows: pd.DataFrame, systems: pd.DataFrame) -> pd.Series:
    """Return what a compute unit of each result is: "accelerator", or "processor" on a system without.

    None: not known.
    """
    known = systems.set_index("system_key")
    names = pd.Series(None, index=known.index, dtype=object)
    names[known["processors_per_node"] > 0] = "processor"
    # Last, because a system with accelerators has processors too
    names[known["accelerators_per_node"] > 0] = "accelerator"
    return rows["system_key"].map(names)


def make_timed_runs(runs: pd.DataFrame, column: str = "run_s") -> tuple[TimedRun, ...]:
    """Return a time of each run with its start and its batch job, which divide runs into sessions."""
    known = runs[runs[column] > 0]
    starts, jobs = known["run_start_ms"].fillna(0.0) / 1e3, known["job"].fillna("")
    return tuple(
        TimedRun(float(at), float(time), str(job)) for at, time, job in zip(starts, known[column], jobs, strict=True)
    )


CLASS_COLUMNS = ["benchmark", "size", "mode"]
PROBLEM_COLUMNS = ["benchmark", "size"]
# Of the devices in published packages, whose descriptions name one device in many ways ("NVIDIA A100-SXM4-40GB")
DEVICE_FAMILY = re.compile(r"\b(?:[VPAHB][12]00|GH200|MI\d{3}[AX]?|RTX \d{4}|A64FX|Xeon Phi)\b")
UNKNOWN_DEVICE = "unknown device"
OWN_FOLDER = re.compile(r"(.+)_(?:\d+x)?\d+x\d+_\w+")  # of a result in a package of this suite: system, shape, size
MACHINES = {  # start of a published system's folder name: the machine's name
    "abci": "ABCI",
    "corigpu": "Cori GPU",
    "coriknl": "Cori KNL",
    "daint": "Piz Daint",
    "dgxa100": "Selene",
    "eos": "Eos",
    "frontera": "Frontera RTX",
    "fugaku": "Fugaku",
    "hal": "HAL",
    "horeka": "HoreKa",
    "juwels": "JUWELS Booster",
    "longhorn": "Longhorn",
    "perlmutter": "Perlmutter",
    "piz_daint": "Piz Daint",
    "theta": "ThetaGPU",
}


def render_heading(benchmark: str, size: str, mode: str) -> str:
    """Return the heading of a class of results."""
    return f"{benchmark} · size {size} · {'throughput' if mode == 'weak' else 'time to train'}"


def render_short_heading(benchmark: str, size: str, mode: str) -> str:
    """Return the heading without what is usual: the size of the MLPerf problem, and time to train."""
    return benchmark + ("" if size == "full" else f" {size}") + (" throughput" if mode == "weak" else "")


class Task(NamedTuple):
    """Holds results that may be ranked against each other, with a heading for panels and a short one for sentences."""

    title: str
    short: str
    rows: pd.DataFrame


def group_tasks(rows: pd.DataFrame) -> list[Task]:
    """Return the sets of results that may be ranked against each other.

    A set has one benchmark, size, mode and division, and rounds with the same rules (`mlhpc.suite.log.score`). Headings
    name division and rounds where a class has several.
    """
    parts = []
    for key, group in rows.groupby(CLASS_COLUMNS, sort=True):
        alike = list(group.groupby(["division", group["round"].map(find_round_group)], sort=True))
        for (division, rounds), members in alike:
            which = f" · {division} · {rounds}" if len(alike) > 1 else ""
            parts.append(Task(render_heading(*key) + which, render_short_heading(*key) + which, members))
    return parts


def describe_systems(rows: pd.DataFrame, systems: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the device and the machine of each result.

    The device is the accelerator's family; without accelerators, the processor's.
    """
    systems = systems.set_index("system_key")
    device = systems["accelerator"].where(systems["accelerators_per_node"] > 0).fillna(systems["processor"])
    device_names = rows["system_key"].map(device).fillna(UNKNOWN_DEVICE).astype(str)
    described = _strip_shape(rows["system_key"].map(systems["name"]).fillna(rows["system"]).astype(str), rows)
    public = rows["system"].map(_machine).where(rows["published"])
    # Folder names of one machine differ between rounds ("daint", "piz_daint"): MACHINES gives them one name
    return device_names.map(_family), public.fillna(described)


def _family(device: str) -> str:
    """Return the family of a device ("A100") if published systems used it, else the whole name."""
    match = DEVICE_FAMILY.search(device)
    return match.group() if match else device


def _strip_shape(names: pd.Series, rows: pd.DataFrame) -> pd.Series:
    """Return the names of systems; those of this suite's packages without shape and size ("laptop_1x2_smoke")."""
    return names.where(rows["published"].astype(bool), names.str.replace(OWN_FOLDER, r"\1", regex=True))


def _render_shape(row: Mapping[Any, Any]) -> str:
    """Return the shape of a result of one's own: "4 ranks", or "2 nodes of 4 ranks"."""
    if row["published"] or pd.isna(row["ranks"]):
        return ""
    nodes, ranks = (int(row[name]) if pd.notna(row[name]) else 1 for name in ("nodes", "ranks"))
    each = ranks // max(nodes, 1)
    return (f"{nodes} nodes of " if nodes > 1 else "") + f"{each} rank{'' if each == 1 else 's'}"


def _machine(system: str) -> str | None:
    """Return the machine behind the folder name of a published system. None: it is not in MACHINES."""
    return next((name for start, name in MACHINES.items() if system.lower().startswith(start)), None)


def build_result_names(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the name and the label of each result.

    Names are unique in a class and round. A label adds the rounds if there are several. A published result of a known
    machine is named after the machine and its number of compute units. Any other is named after its folder, or the system
    that its folder names. Ranks, submitter or folder are appended to equal names.
    """
    units = find_system_units(rows)
    known = rows["published"] & rows["system"].map(_machine).notna() & units.notna()
    name = _strip_shape(rows["system"].astype(str), rows)
    name = name.mask(known, rows["machine"] + " " + units.map("{:.0f}".format))
    name = name.mask(known & (rows["division"] == "open"), name + " (open)")
    shape = pd.Series([_render_shape(row) for row in rows.to_dict("records")], index=rows.index, dtype=str)
    # The submitter before the folder, which only results of one submitter still need
    for more in (shape, rows["submitter"].astype(str), rows["system"].astype(str)):
        alike = more.groupby([rows[key] for key in (*CLASS_COLUMNS, "round")] + [name])
        name = name.mask(alike.transform("nunique") > 1, name + " · " + more)
    mixed = rows["round"].nunique() > 1
    return name, name + " · " + rows["rounds"].astype(str) if mixed else name


def find_pairs(rows: pd.DataFrame, *names: str) -> list[tuple[str, str]]:
    """Find the groups that two names stand for, in each class that has both results.

    A name is a label or a part of one. Raises InputError if a name fits several results of a class, or if no class
    has both.
    """
    pairs, known = [], set()
    strong = rows[rows["mode"] == "strong"]
    for key, results in strong.groupby(CLASS_COLUMNS, sort=True):
        groups = {
            name: group for name in names if (group := _find_group(results, name, render_heading(*key))) is not None
        }
        known |= set(groups)
        # Both names may fit one result, which has no speed-up over itself
        if len(set(groups.values())) == 2:
            pairs.append((groups[names[0]], groups[names[1]]))
    if not pairs:
        unknown = [name for name in names if name not in known]
        # A public round has more than a hundred results: an error must stay readable
        labels = ", ".join(sorted(set(strong["label"]))[:20])
        problem = (
            f"no result is called {unknown[0]!r}" if unknown else f"no class has both {names[0]!r} and {names[1]!r}"
        )
        raise InputError(f"{problem}; results: {labels}")
    return pairs


def _find_group(results: pd.DataFrame, name: str, title: str) -> str | None:
    """Find the group of the result with this label, or whose label contains the name. None: there is none."""
    labels = results["label"].str.lower()
    fits = results[labels == name.lower()]
    if fits.empty:
        fits = results[labels.str.contains(name.lower(), regex=False)]
    groups = fits["same_as"].fillna(fits["group"]).unique()  # a copy stands for the result that it repeats
    if len(groups) > 1:
        raise InputError(f"{name!r} is the name of {len(groups)} results of {title}: {', '.join(fits['label'])}")
    return str(groups[0]) if len(groups) else None


def build_result_table(
    results: pd.DataFrame, identity: Sequence[str], values: Mapping[str, pd.Series | list[float | None]]
) -> pd.DataFrame:
    """Return a figure's table with one row per result.

    The columns are benchmark, size, those of ``identity`` and the values.
    """
    columns = {name: results[name] for name in (*PROBLEM_COLUMNS, *identity)}
    return pd.DataFrame(columns | dict(values)).reset_index(drop=True)


@dataclass(frozen=True)
class RunSpread:
    """Holds the spread of the training time E·tau over runs.

    ``variance_epochs``, ``variance_epoch_time`` and ``covariance_twice`` (natural logs) sum to the variance of
    log(E·tau). ``axis_1`` and ``axis_2`` are the variances (log10²) along the principal axes of (log10 E, log10 tau),
    larger first. ``along_epochs`` is the squared epochs component of the first axis' direction (1: all spread is
    convergence). ``correlation`` is that of the logs, NaN if one of them does not vary.
    """

    n: int
    variance_epochs: float
    variance_epoch_time: float
    covariance_twice: float
    axis_1: float
    axis_2: float
    along_epochs: float
    correlation: float

    @property
    def axis_1_share(self) -> float:
        """Return the share of the variance along the first axis."""
        return self.axis_1 / (self.axis_1 + self.axis_2) if self.axis_1 + self.axis_2 > 0 else math.nan


def compute_run_spread(epochs: pd.Series, tau_s: pd.Series) -> RunSpread | None:
    """Compute the spread of runs; None for fewer than two runs."""
    usable = epochs.notna() & tau_s.notna() & (epochs > 0) & (tau_s > 0)
    if usable.sum() < 2:
        return None
    # The axes are in log10; the variances of the parts are converted to natural logs below
    logs = np.log10(np.stack([epochs[usable].to_numpy(float), tau_s[usable].to_numpy(float)]))
    covariance = np.cov(logs, ddof=1)
    variances, axes = np.linalg.eigh(covariance)
    natural = covariance * math.log(10) ** 2
    varies = bool((logs.std(axis=1) > 0).all())
    return RunSpread(
        n=int(usable.sum()),
        variance_epochs=float(natural[0, 0]),
        variance_epoch_time=float(natural[1, 1]),
        covariance_twice=float(2 * natural[0, 1]),
        # eigh sorts ascending, and rounding may give a variance just below 0
        axis_1=float(max(variances[1], 0.0)),
        axis_2=float(max(variances[0], 0.0)),
        along_epochs=float(axes[0, 1] ** 2),
        correlation=float(np.corrcoef(logs)[0, 1]) if varies else math.nan,
    )


def find_reference_points(
    benchmark: str, size: str, round_: str, train_samples: float
) -> Mapping[int, Sequence[float]]:
    """Find the epochs to target of reference runs, by global batch size; empty if none were recorded.

    If the rules count convergence in samples (OpenFold), they are divided by the result's ``train_samples``.
    """
    # Rulesets of public rounds are named by version: round v3.0 has ruleset 3.0.0
    public = f"{round_.removeprefix('v')}.0"
    name = public if round_.startswith("v") and public in list_rulesets() else RULESET
    rules = read_ruleset(name).benchmark(benchmark, size)
    if rules is None:
        return {}
    if not rules.epoch_counts_samples:
        return rules.reference_points
    # Written so that NaN, the value where no log states the samples, ends here too
    if not train_samples > 0:
        return {}
    return {batch: [seen / train_samples for seen in points] for batch, points in rules.reference_points.items()}


def compute_reference_limit(
    benchmark: str, size: str, round_: str, train_samples: float, batch: float, required_runs: float
) -> RcpLimit | None:
    """Compute the reference's mean epochs and the least allowed mean at a batch size.

    None: the batch size is outside the reference points, or is not known.
    """
    points = find_reference_points(benchmark, size, round_, train_samples)
    # NaN, a batch that no log states, does not equal itself
    return compute_limit(points, int(batch), int(required_runs)) if points and batch == batch else None
