"""Computes one number for a procurement: how many times as fast as a reference every system is, over weighted
workloads.

The index is the weighted geometric mean of ratios, as NERSC's system improvement metrics have it. Nothing is filled in.
A system without a result of a workload has no index, and its row names the workload. The tiers ``ported`` and
``optimized`` are those of the run rules of OLCF-6 and NERSC-10. No log states the tier of its result, so the file of
weights does.

Reads what an hour of one compute unit costs: money, node hours or energy. The user states it; nothing is assumed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import yaml
from msgspec import Meta, Struct

from mlhpc.analysis.results.machine_size import find_system_units
from mlhpc.analysis.results.names import render_short_heading
from mlhpc.analysis.results.selection import make_timed_runs
from mlhpc.suite.documents import Count, Positive, YamlSource
from mlhpc.suite.errors import InputError, explain_near_names
from mlhpc.suite.log.score import find_round_group
from mlhpc.suite.statistics.comparison import compute_ratio
from mlhpc.suite.statistics.sessions import Error, find_sessions

CONFIDENCE = 0.95
LEAST_VARIANCE = 1e-18  # of the log of an index: less is rounding, so all runs took the same time
PORTED, OPTIMIZED, ANY_TIER = "ported", "optimized", "tier not stated"


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a workload of the index. With ``units`` only results on machines of that many compute units count."""

    benchmark: str
    size: str = "full"
    mode: Literal["strong", "weak"] = "strong"
    units: Count | None = None
    weight: Positive = 1.0

    @property
    def title(self) -> str:
        """Return the workload's name in tables."""
        scale = f" at {self.units} units" if self.units else ""
        return render_short_heading(self.benchmark, self.size, self.mode) + scale


class Weights(Struct, frozen=True, forbid_unknown_fields=True):
    """Holds a file of weights. ``ported`` and ``optimized`` name results by their label or a part of it."""

    version: Literal[1]
    workloads: Annotated[tuple[Workload, ...], Meta(min_length=1)]
    ported: tuple[str, ...] = ()
    optimized: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ratio:
    """Holds how many times as fast as the reference a system is at one workload, and the two results behind it.

    ``error`` is that of the log ratio by their runs and sessions; None: one of them has one run, or it is a throughput,
    whose error is not known. ``runs`` are those of both.
    """

    workload: Workload
    system: pd.Series
    reference: pd.Series
    ratio: float
    error: Error | None = None
    runs: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class SystemIndex:
    """Holds the index of a system in a tier, with its interval.

    The index is None if a workload is ``missing``. The interval is None also if no run varies. ``without`` has the
    index of the other workloads, by the title of the one left out.
    """

    tier: str
    system: str
    value: float | None
    low: float | None
    high: float | None
    ratios: tuple[Ratio, ...]
    missing: tuple[str, ...]
    without: Mapping[str, float | None]


@dataclass(frozen=True)
class Index:
    """Holds the indices of all systems against a reference, the best first in each tier.

    ``without_tier`` has the labels of the other results.
    """

    reference: str
    weights: Weights
    systems: tuple[SystemIndex, ...]
    without_tier: tuple[str, ...]


def read_weights(path: Path, benchmarks: Iterable[str]) -> Weights:
    """Read a file of weights. InputError for a mistake in it, a workload stated twice, or an unknown benchmark."""
    source = YamlSource.read(path)
    weights = source.convert(Weights)
    known = sorted(set(benchmarks))
    where = source.where("workloads")
    for workload in weights.workloads:
        if workload.benchmark not in known:
            near = explain_near_names(workload.benchmark, known)
            raise InputError(f"{where}: no benchmark is called {workload.benchmark!r}{near}")
    titles = Counter(workload.title for workload in weights.workloads)
    # By title, which leaves the weight out: two weights for one workload would silently add up
    title, count = titles.most_common(1)[0]
    if count > 1:
        raise InputError(f"{where}: {title} is stated {count} times; expected one weight for each workload")
    return weights


def compute_index(results: pd.DataFrame, runs: pd.DataFrame, weights: Weights, reference: str) -> Index:
    """Compute the index of every system that has a result of one of the workloads.

    InputError if no system or several are called like the reference, or if a tier names no result.
    """
    rows = results[results["score_s"].notna()]
    rows = rows.assign(system_units=find_system_units(rows))
    name = find_system(rows, reference)
    tiers = _tiers(rows, weights)
    systems = []
    for tier, members in tiers.items():
        found = [
            _compute_system_index(runs, tier, members, system, name, weights)
            for system in sorted(set(members["machine"]))
        ]
        systems += sorted((each for each in found if each.ratios), key=lambda each: -(each.value or 0.0))

    with_tier = set().union(*(set(members["label"]) for members in tiers.values()))
    return Index(name, weights, tuple(systems), tuple(sorted(set(rows["label"]) - with_tier)))


def find_system(rows: pd.DataFrame, name: str) -> str:
    """Find the system with this name, else the one whose name contains it."""
    systems: list[str] = sorted(set(rows["machine"]))
    fits = [system for system in systems if system.casefold() == name.casefold()]
    # A part of the name is enough only if no system has the whole of it: "Eos" must not also find "Eos-2"
    fits = fits or [system for system in systems if name.casefold() in system.casefold()]
    if len(fits) != 1:
        problem = f"is the name of {len(fits)} systems" if fits else "is no system with a score"
        raise InputError(f"--reference {name!r} {problem}; systems: {', '.join(fits or systems) or 'none'}")
    return fits[0]


def _tiers(rows: pd.DataFrame, weights: Weights) -> dict[str, pd.DataFrame]:
    """Group the results by tier. An optimized result is optional, so that tier has the ported results too."""
    if not weights.ported and not weights.optimized:
        return {ANY_TIER: rows}
    ported, optimized = _named(rows, weights.ported, PORTED), _named(rows, weights.optimized, OPTIMIZED)
    # A name may be a part of a label, so that two short names can find the same result
    both = rows.loc[ported & optimized, "label"]
    if len(both):
        raise InputError(f"--index: {both.iloc[0]!r} is both {PORTED} and {OPTIMIZED}; expected one of them")
    tiers = {PORTED: rows[ported], OPTIMIZED: rows[ported | optimized]}
    return {tier: members for tier, members in tiers.items() if getattr(weights, tier)}


def _named(rows: pd.DataFrame, names: Sequence[str], tier: str) -> pd.Series:
    labels = rows["label"].str.casefold()
    chosen = pd.Series(data=False, index=rows.index)
    for name in names:
        fits = labels.str.contains(name.casefold(), regex=False)
        if not fits.any():
            raise InputError(f"--index: {tier}: no result is called {name!r}{explain_near_names(name, rows['label'])}")
        chosen |= fits
    return chosen


def _compute_system_index(
    runs: pd.DataFrame, tier: str, rows: pd.DataFrame, system: str, reference: str, weights: Weights
) -> SystemIndex:
    mine, theirs = rows[rows["machine"] == system], rows[rows["machine"] == reference]
    found = {workload: _ratio(runs, workload, mine, theirs) for workload in weights.workloads}
    ratios = tuple(ratio for ratio in found.values() if ratio is not None)
    missing = tuple(workload.title for workload, ratio in found.items() if ratio is None)
    without = {
        left_out.title: _mean([ratio for workload, ratio in found.items() if workload is not left_out])
        # Without the one left out, an index may exist although a ratio is missing in the full one
        for left_out in weights.workloads
    }
    low, high = (None, None) if missing else _interval(ratios)
    return SystemIndex(tier, system, _mean(list(found.values())), low, high, ratios, missing, without)


def _ratio(runs: pd.DataFrame, workload: Workload, mine: pd.DataFrame, theirs: pd.DataFrame) -> Ratio | None:
    """Compute the ratio of the best comparable results of both systems.

    Results are comparable if they may be ranked against each other. None: no pair is. Closed results come before open
    ones, then the newest rounds that both have.
    """
    sides = [_find_best_results(rows, workload) for rows in (mine, theirs)]
    shared = sorted(set(sides[0]) & set(sides[1]), key=lambda key: (key[0] == "closed", key[1]))
    if not shared:
        return None
    # The last in the order above: closed if both have a closed result
    system, reference = (side[shared[-1]] for side in sides)
    # Models per minute grow with speed and times fall: the ratios are inverted to each other
    if workload.mode == "weak":
        return Ratio(workload, system, reference, system["models_per_min"] / reference["models_per_min"])
    times = [_list_times(runs, str(row["group"])) for row in (system, reference)]
    counts = sum(map(len, times[0])), sum(map(len, times[1]))
    if min(counts) > 1:
        found = compute_ratio(times[0], times[1])
        return Ratio(workload, system, reference, found.ratio, found.error, counts)
    means = [statistics.geometric_mean(statistics.geometric_mean(each) for each in side) for side in times]
    return Ratio(workload, system, reference, means[1] / means[0], None, counts)


def _find_best_results(rows: pd.DataFrame, workload: Workload) -> dict[tuple[str, str], pd.Series]:
    """Find the best result of a workload, by (division, rounds whose times mean the same)."""
    fits = (rows["benchmark"] == workload.benchmark) & (rows["size"] == workload.size)
    fits &= rows["mode"] == workload.mode
    if workload.units is not None:
        fits &= rows["system_units"] == workload.units
    # In both modes the larger rank is better, so the best row comes last and wins in the dict
    rank = rows["models_per_min"] if workload.mode == "weak" else -rows["score_s"]
    best_last = rows.assign(rank=rank)[fits].sort_values("rank")
    return {(str(row["division"]), find_round_group(row["round"])): row for _, row in best_last.iterrows()}


def _list_times(runs: pd.DataFrame, group: str) -> list[list[float]]:
    """List the times of the runs of each session of a result."""
    timed = make_timed_runs(runs[(runs["group"] == group) & runs["converged"] & ~runs["pruned"]])
    return [[run.time_s for run in session] for session in find_sessions(timed)]


def _mean(ratios: Sequence[Ratio | None]) -> float | None:
    """Compute the weighted geometric mean; None without a ratio, or if one is missing."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        return None
    total = sum(ratio.workload.weight for ratio in known)
    return math.exp(sum(ratio.workload.weight * math.log(ratio.ratio) for ratio in known) / total)


def _interval(ratios: Sequence[Ratio]) -> tuple[float | None, float | None]:
    """Compute the 95 % interval of the index, by the errors of its ratios and Satterthwaite's degrees of freedom.

    A bootstrap over the few runs of a result contains the true index too seldom (tests/analysis/results/test_index.py).
    """
    index = _mean(list(ratios))
    total = sum(ratio.workload.weight for ratio in ratios)
    share: dict[tuple[str, str], float] = {}  # of the index that the log of a ratio has
    errors: dict[tuple[str, str], Error | None] = {}
    for ratio in ratios:
        pair = str(ratio.system["group"]), str(ratio.reference["group"])
        # The reference's own ratio is 1, and a throughput has no run times
        if pair[0] != pair[1] and ratio.workload.mode == "strong":
            share[pair] = share.get(pair, 0.0) + ratio.workload.weight / total  # of two workloads, perhaps
            errors[pair] = ratio.error
    if index is None or not errors or any(error is None for error in errors.values()):
        return None, None
    parts = [((share[pair] * error.size) ** 2, error.dof) for pair, error in errors.items() if error is not None]
    variance = sum(part for part, _ in parts)
    if variance < LEAST_VARIANCE:
        return None, None
    half = Error(math.sqrt(variance), variance**2 / sum(part**2 / dof for part, dof in parts)).find_half()
    return index * math.exp(-half), index * math.exp(half)


def build_index_tables(index: Index) -> dict[str, pd.DataFrame]:
    """Build the tables of the indices, of the indices without one workload, and of the ratios behind them, by name."""
    heads = [{"tier": each.tier, "system": each.system} for each in index.systems]
    indices: list[dict[str, Any]] = [
        head | {"index": each.value, "95 % from": each.low, "95 % to": each.high, "missing": ", ".join(each.missing)}
        for head, each in zip(heads, index.systems, strict=True)
    ]
    left_out: list[dict[str, Any]] = [
        head | {f"without {title}": value for title, value in each.without.items()}
        for head, each in zip(heads, index.systems, strict=True)
    ]
    ratios: list[dict[str, Any]] = [
        head
        | {
            "workload": ratio.workload.title,
            "weight": ratio.workload.weight,
            "ratio": ratio.ratio,
            "result": ratio.system["label"],
            "units": ratio.system["system_units"],
            "n": ratio.runs[0],
            "reference": ratio.reference["label"],
            "units of the reference": ratio.reference["system_units"],
            "n of the reference": ratio.runs[1],
        }
        for head, each in zip(heads, index.systems, strict=True)
        for ratio in each.ratios
    ]
    parts = {"index": indices, "index_without_one": left_out, "index_ratios": ratios}
    return {name: pd.DataFrame(lines) for name, lines in parts.items()}


PRICE_FORMAT = "expected DEVICE=NUMBER UNIT/h, such as H100=2.50 USD/h or A64FX=0.12 kWh/h"
_RATE = re.compile(r"\s*(?P<amount>[0-9.eE+-]+)\s*(?P<unit>[^\s/0-9]+)\s*/\s*h\s*")


@dataclass(frozen=True)
class Prices:
    """Holds the price of a unit hour by device family, all in ``unit``."""

    per_unit_hour: Mapping[str, float]
    unit: str

    def cost(self, results: pd.DataFrame) -> pd.Series:
        """Return the cost of each result: unit hours times the price of its device; missing without a price."""
        # Without case: a person need not write a device exactly as its package does
        known = {device.casefold(): price for device, price in self.per_unit_hour.items()}
        return results["unit_hours"] * results["device"].str.casefold().map(known)

    def without_result(self, devices: Iterable[str]) -> list[str]:
        """Return a line for each price of a device that no result has."""
        there = {device.casefold(): device for device in devices}
        names = ", ".join(sorted(there.values())) or "none"
        return [
            f"--price: no result has the device {device!r}; devices here: {names}"
            for device in self.per_unit_hour
            if device.casefold() not in there
        ]


def read_prices(given: Sequence[str]) -> Prices | None:
    """Read ``DEVICE=NUMBER UNIT/h`` texts and YAML files of such pairs. None: nothing was given.

    Raises InputError for a text that is neither.
    """
    rates: dict[str, tuple[float, str, str]] = {}
    for text in given:
        for device, rate, where in _entries(text):
            # YAML files and options may be mixed; which of two prices holds would depend on their order
            if device in rates:
                raise InputError(
                    f"{where}: {device} has a price already, from {rates[device][2]}; expected one price for each"
                    " device"
                )
            amount, unit = _parse(rate, where)
            rates[device] = (amount, unit, where)
    # One place for each unit, so that the error can name where they disagree
    units = {unit: where for _, unit, where in rates.values()}
    if len(units) > 1:
        raise InputError(
            f"prices have different units: {' and '.join(f'{unit} ({at})' for unit, at in units.items())}; expected one"
            " unit"
        )
    return Prices({device: amount for device, (amount, _, _) in rates.items()}, next(iter(units))) if rates else None


def _entries(text: str) -> list[tuple[str, str, str]]:
    """Return device, rate and where it was stated."""
    device, sign, rate = text.partition("=")
    if sign:
        return [(device.strip(), rate, f"--price {text!r}")]
    path = Path(text)
    try:
        # A text without "=" is the path of a file
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"--price {text}: {error.strerror}; {PRICE_FORMAT}, or a YAML file of them") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: not valid YAML: {str(error).splitlines()[0]}; expected lines such as H100: 2.50 USD/h"
        ) from None
    if not isinstance(content, dict) or not content:
        raise InputError(f"{path}: no prices in this file; expected lines such as H100: 2.50 USD/h")
    return [(str(device), str(rate), f"{path}: {device}") for device, rate in content.items()]


def _parse(rate: str, where: str) -> tuple[float, str]:
    match = _RATE.fullmatch(rate)
    # The pattern also fits texts such as "1.2.3", which are no numbers
    try:
        amount = float(match["amount"]) if match else math.nan
    except ValueError:
        amount = math.nan
    if match is None or not 0 < amount < math.inf:
        raise InputError(f"{where}: {rate.strip()!r} is not a price; {PRICE_FORMAT}")
    return amount, match["unit"]
