"""Simulated fleets beside their closed forms, the hazard model beside laws that are known and real failures, then published fleets.

    python benchmarks/preflight_simulate.py [--lanl LA-UR-05-7318-failure-data-1996-2005.csv]

All fleets are simulated; no node was measured. The file of ``--lanl`` is Los Alamos' public table of failures of 1996 to 2005: it
is not part of this repository, and without it that table is left out.
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import date, datetime
from pathlib import Path

import numpy as np

from analysis.fleet import hazard
from analysis.fleet.fleets import Fleet, Sourced, Start
from analysis.fleet.incidents import Node, mtbi_h, together_mtbi_h
from analysis.fleet.simulation import Outcome, Setting, simulate
from analysis.fleet.spells import Spell

CASES = ((500, 100, 24, 1.0), (500, 100, 24, 0.9), (500, 100, 168, 1.0), (500, 24, 24, 1.0))
MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], start=1
    )
}


def made_up(mtbi: float) -> Fleet:
    def each(value: float) -> Sourced:
        return Sourced(value=value, source="made up", mark="assumed")

    start = Start(value=None, source="made up", mark="assumed")
    return Fleet(about="made up", mtbi_h=each(mtbi), ages=each(0.0), shape=each(1.0), defective=start)


def closed_forms(incidents: int) -> None:
    print("\nClosed forms and simulations: single nodes, checks and incidents cost nothing\n")
    print(
        "| healthy, degraded | every | found | next check | closed form | simulated, n incidents | difference | within 1 % |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for healthy, degraded, every, found in CASES:
        node = Node(healthy, degraded)
        for again in (True, False):
            wanted = mtbi_h(node, every, found) if again else together_mtbi_h(node, every, found)
            hours = 50 * every + wanted * incidents / 2000
            given = Setting(
                made_up(healthy + degraded), degraded / (healthy + degraded), 200, 1, hours, 10, job_h=every,
                checkpoint_h=math.inf if again else 0.0, restart_h=0.0, check_h=0.0, finds=found, warm_h=50.0 * every,
            )  # fmt: skip
            show(f"{healthy}, {degraded} h | {every} h | {found:g}", again, wanted, simulate(given, "full", [7, again]))
    for mtbi in (500, 5000):
        given = Setting(
            made_up(mtbi), 0.0, 200, 1, mtbi * incidents / 2000, 10, checkpoint_h=0.0, restart_h=0.0, check_h=0.0
        )
        show(f"{mtbi}, 0 h | 24 h | 1", False, mtbi, simulate(given, "full", [8]))


def show(what: str, again: bool, wanted: float, outcome: Outcome) -> None:
    found, count = outcome.mtbi_h, outcome.incidents.sum()
    assert found is not None
    off = found.value / wanted - 1
    after = "a whole interval after an incident" if again else "at the same times for all"
    print(
        f"| {what} | {after} | {wanted:.1f} h | {found.value:.1f} h [{found.low:.1f}, {found.high:.1f}], "
        f"{count:,.0f} | {off:+.2%} | {'yes' if abs(off) < 0.01 else 'no'} |",
        flush=True,
    )


def memoryless(fleets: int) -> None:
    holds = Counter[str]()
    for seed in range(fleets):
        given = Setting(made_up(500), 0.0, groups=20, job_nodes=4, hours=1000, replicas=10)
        plain = simulate(given, "none", [seed, 0])
        for place, policy in enumerate(("periodic", "full"), start=1):
            gain = simulate(given, policy, [seed, place]).gain(plain)  # type: ignore[arg-type]
            assert gain is not None
            holds[policy] += gain.low <= 1.0 <= gain.high
    print(f"\nFleets without warning: closed form of the gain {mtbi_h(Node(500, 0), 24) / mtbi_h(Node(500, 0)):.3f}")
    print(
        f"of {fleets} simulated, 95 % intervals of the gain that hold 1: periodic {holds['periodic']}, full {holds['full']}"
    )


def laws(fleets: int) -> None:
    print(
        "\nHazard model: how often the Weibull model is chosen on nodes with times between incidents of a known law\n"
    )
    print(
        "| shape | power of earlier incidents | nodes | incidents, mean | chosen | shape found |"
        "\n| --- | --- | --- | --- | --- | --- |"
    )
    for shape, power in ((1.0, 0.0), (0.8, 0.0), (1.5, 0.0), (1.0, 0.4)):
        learned = [hazard.learn(hazard.tabulate(nodes_of(seed, 40, shape, power))) for seed in range(fleets)]
        incidents = np.mean([each.incidents for each in learned])
        shapes = [each.hazard.shape for each in learned if each.remembers]
        found = f"{np.mean(shapes):.3f} ± {np.std(shapes):.3f}" if shapes else ""
        print(f"| {shape} | {power} | 40 | {incidents:.0f} | {len(shapes)} of {fleets} | {found} |", flush=True)


def nodes_of(seed: int, nodes: int, shape: float, power: float, hours: float = 2000.0) -> list[Spell]:
    chance = np.random.default_rng([11, seed])
    found = []
    for number in range(nodes):
        now, incidents = 0.0, 0
        while now < hours:
            lasts = 500.0 * (chance.exponential() / (1 + incidents) ** power) ** (1 / shape)
            ended = "incident" if now + lasts < hours else "open"
            found.append(Spell(node=f"{number}", hours=min(lasts, hours - now), incidents=incidents, ended=ended))  # type: ignore[arg-type]
            now, incidents = now + lasts, incidents + 1
    return found


def los_alamos(path: Path) -> None:
    print(
        "\nHazard model on Los Alamos' failures 1996 to 2005 (LA-UR-05-7318), nodes without any failure included as censored"
    )
    print(
        "better: log likelihood per incident gained over a constant rate on nodes that the fit did not see, ± its standard error\n"
    )
    print(
        "| system | nodes | incidents | hours to one | shape | power of (1 + earlier) of times | hours to the first | better |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = list(csv.DictReader(path.open(encoding="utf-8", errors="replace")))
    for system in ("2", "8", "16", "18", "19", "20"):
        spells, nodes = spells_of([row for row in rows if row["System"] == system])
        table = hazard.tabulate(spells)
        learned, full = hazard.learn(table), hazard.fit(table)
        slope = full.theta[2] / full.scale[0]
        eta = full.theta[1] - slope * full.middle[0]
        first = full.unit_h * math.exp(-eta / full.shape) * math.gamma(1 + 1 / full.shape)
        better = f"{learned.better:.3f} ± {learned.error:.3f}" if learned.better is not None else "not tried"
        print(
            f"| {system} | {nodes} | {learned.incidents} | {learned.constant.unit_h:.0f} | {full.shape:.3f} | "
            f"{slope / full.shape:.3f} | {first:.0f} | {better}{'' if learned.remembers else ', not chosen'} |"
        )


def spells_of(rows: list[dict[str, str]]) -> tuple[list[Spell], int]:
    """Spells of a system's nodes from its production, or first failure, to its last; what overlaps a repair is part of it."""
    nodes = int(Counter(row["nodes"] for row in rows).most_common(1)[0][0])
    times = [moment(row["Prob Started"]) for row in rows]
    start = max(min(times), month(Counter(row["node prod"] for row in rows).most_common(1)[0][0]))
    last = max(times)
    events: dict[str, list[tuple[datetime, datetime]]] = defaultdict(list)
    for row in rows:
        begun = moment(row["Prob Started"])
        events[row["nodenumz"]].append((begun, moment(row["Prob Fixed"]) if row["Prob Fixed"] else begun))
    found = []
    for node, failures in events.items():
        now, earlier = start, 0
        for begun, fixed in sorted(failures):
            hours = (begun - now).total_seconds() / 3600
            if hours > 0:
                found.append(Spell(node=node, hours=hours, incidents=earlier, ended="incident"))
                earlier += 1
            now = max(now, begun, fixed)
        if now < last:
            found.append(Spell(node=node, hours=(last - now).total_seconds() / 3600, incidents=earlier, ended="open"))
    whole = (last - start).total_seconds() / 3600
    found += [Spell(node=f"without {n}", hours=whole, incidents=0, ended="open") for n in range(nodes - len(events))]
    return found, nodes


def moment(text: str) -> datetime:
    return datetime.strptime(text, "%m/%d/%Y %H:%M")


def month(text: str) -> datetime:
    """ "Jan-97" or "2-May": a year of one digit comes first."""
    one, other = text.split("-")
    name, year = (one, int(other)) if one in MONTHS else (other, int(one))
    return datetime(year + (1900 if year > 50 else 2000), MONTHS[name], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanl", type=Path)
    parser.add_argument("--incidents", type=int, default=500_000)
    parser.add_argument("--fleets", type=int, default=400)
    given = parser.parse_args()
    print(f"{date.today()}; simulated, seeds in benchmarks/preflight_simulate.py")
    closed_forms(given.incidents)
    memoryless(given.fleets)
    laws(given.fleets)
    if given.lanl is not None:
        los_alamos(given.lanl)
    for words in ((), ("--fleet", "llama-3", "--nodes", "2048", "--jobs", "1")):
        print(f"\nmlhpc preflight simulate {' '.join(words)}\n", flush=True)
        subprocess.run([sys.executable, "-m", "suite", "preflight", "simulate", *words], check=True)


if __name__ == "__main__":
    main()
