"""Names results, their classes, devices and machines, and finds the results that a name stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from mlhpc.analysis.results.machine_size import find_system_units
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.score import find_round_group

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
            which, short = "", ""
            if len(alike) > 1:
                there = sorted(members["round"].dropna().unique()) or [rounds]  # of rounds with the same rules
                which, short = (f" · {division} · {each}" for each in (rounds, " and ".join(map(str, there))))
            parts.append(Task(render_heading(*key) + which, render_short_heading(*key) + short, members))
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
