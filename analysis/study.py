"""Everything a figure or the report may look at: the tables, each run decomposed, one row per result. No drawing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from analysis.decompose import choose, per_run, results
from analysis.network.fit import Fit
from analysis.roofline.inputs import Inputs
from analysis.selection import Selection
from analysis.tables.ingest import Tables, ingest
from suite.card import Card

CLASS = ["benchmark", "size", "mode"]
FAMILY = re.compile(r"\b(?:[VPAHB][12]00|GH200|MI\d{3}[AX]?|RTX \d{4}|A64FX|Xeon Phi)\b")
MACHINES = {  # folder of a published system begins with: what the machine is called
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


class NotAnswerableError(ValueError):
    """The data for a figure are not there; the message says what is missing."""


@dataclass(frozen=True)
class Study:
    """``runs`` is `decompose.per_run` of every log, ``results`` one row per group, both with a ``label`` to show.

    ``inputs`` are the ceilings files that were given beside the logs, ``networks`` the fitted all-to-all sweeps,
    ``between`` the pairs of results (groups of one class, from and to) that were asked for by name.
    """

    tables: Tables
    runs: pd.DataFrame
    results: pd.DataFrame
    selections: Mapping[str, Selection]
    inputs: Inputs = field(default_factory=Inputs)
    networks: tuple[Fit, ...] = ()
    between: tuple[tuple[str, str], ...] = ()

    def classes(self) -> list[tuple[str, pd.DataFrame]]:
        """Results by benchmark, size and mode, each with a heading: what may stand beside each other in a figure."""
        return [(heading(*key), group) for key, group in self.results.groupby(CLASS, sort=True)]

    def runs_of(self, group: str) -> pd.DataFrame:
        """The runs of one result."""
        return self.runs[self.runs["group"] == group]


def study(
    paths: Sequence[Path],
    cards: Mapping[str, Card],
    inputs: Inputs | None = None,
    networks: Sequence[Fit] = (),
    between: Sequence[tuple[str, str]] = (),
) -> Study:
    """Read paths and decompose. ValueError as of `ingest`, and for names in ``between`` that fit no or several results."""
    tables = ingest(paths, cards)
    runs = per_run(tables.runs)
    selections = choose(tables)
    runs["fate"] = [selections[group].fate[run] for group, run in zip(runs["group"], runs["run"], strict=True)]
    rows = results(runs, selections)
    rows["device"], rows["machine"] = _described(rows, tables)
    rows["name"], rows["label"] = _names(rows)
    runs["label"] = runs["group"].map(rows.set_index("group")["label"])
    pairs = tuple(pair for names in between for pair in _named_pairs(rows, *names))
    return Study(tables, runs, rows, selections, inputs or Inputs(), tuple(networks), pairs)


def _named_pairs(rows: pd.DataFrame, *names: str) -> list[tuple[str, str]]:
    """The groups that two names stand for, in every class that has both: the whole label, else a part of one label."""
    pairs, seen = [], set()
    for key, group in rows[rows["mode"] == "strong"].groupby(CLASS, sort=True):
        found = []
        for name in names:
            labels = group["label"].str.lower()
            fits = group[labels == name.lower()]
            fits = fits if len(fits) else group[labels.str.contains(name.lower(), regex=False)]
            if len(fits) > 1:
                several = ", ".join(fits["label"])
                raise ValueError(f"{name!r} is the name of {len(fits)} results of {heading(*key)}: {several}")
            seen |= {name} if len(fits) else set()
            found += list(fits["group"])
        if len(found) == 2 and found[0] != found[1]:
            pairs.append((found[0], found[1]))
    if not pairs:
        unknown = [name for name in names if name not in seen]
        labels = ", ".join(sorted(set(rows.loc[rows["mode"] == "strong", "label"]))[:20])
        problem = (
            f"no result is called {unknown[0]!r}" if unknown else f"no class has both {names[0]!r} and {names[1]!r}"
        )
        raise ValueError(f"{problem}; results: {labels}")
    return pairs


def heading(benchmark: str, size: str, mode: str) -> str:
    """How a class of results is called."""
    return f"{benchmark} · size {size} · {'throughput' if mode == 'weak' else 'time to train'}"


def _described(rows: pd.DataFrame, tables: Tables) -> tuple[pd.Series, pd.Series]:
    """The accelerator (the processor where there is none), without form factor; and the machine's name."""
    systems = tables.systems.set_index("system_key")
    device = systems["accelerator"].where(systems["accelerators_per_node"] > 0).fillna(systems["processor"])
    named = rows["system_key"].map(device).fillna("unknown device").astype(str)
    own = rows["system_key"].map(systems["name"]).fillna(rows["system"]).astype(str)
    public = rows["system"].map(_machine).where(rows["published"])
    return named.map(_family), public.fillna(own)


def _family(device: str) -> str:
    """The device's family, where it is one of those that published systems used."""
    match = FAMILY.search(device)
    return match.group() if match else device


def _machine(system: str) -> str | None:
    """What the machine behind a published folder name is called."""
    return next((name for sign, name in MACHINES.items() if system.lower().startswith(sign)), None)


def _names(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """A name that is unique among results of one class and round; and that with the round where rounds are mixed.

    Published systems whose machine is known are called by it and their size; others by their folder. What shares a name
    gets division, submitter or folder added.
    """
    known = rows["published"] & rows["system"].map(_machine).notna() & rows["units"].notna()
    name = rows["system"].astype(str)
    name = name.mask(known, rows["machine"] + " " + rows["units"].map("{:g}".format))
    name = name.mask(known & (rows["division"] == "open"), name + " (open)")
    for added in ("submitter", "system"):
        clash = name.groupby([rows[key] for key in (*CLASS, "round")] + [name]).transform("size") > 1
        name = name.mask(clash, name + " · " + rows[added].astype(str))
    mixed = rows["round"].nunique() > 1
    return name, name + " · " + rows["round"].astype(str) if mixed else name
