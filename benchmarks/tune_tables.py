"""Searches complete tables of configurations: how many evaluations does `mlhpc tune` need, and how often is it wrong?

    python benchmarks/tune_tables.py measure cosmoflow -o cosmoflow.json       (hours on a busy machine; goes on if stopped)
    python benchmarks/tune_tables.py replay cosmoflow.json moe_lm.json
    python benchmarks/tune_tables.py replay --synthetic

`measure` runs every feasible configuration of a space in blocks, chunk by chunk, the default in each chunk. The value of a
configuration is its time over the default's in the same blocks, so a drift of the machine cancels out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from scipy import stats

from mlhpc.plugins.tune.candidates import Candidates, Limits, list_plan_values
from mlhpc.plugins.tune.job import DEFAULT, OBJECTIVES, TUNED, Blocks, FailedJobError, run_job
from mlhpc.plugins.tune.search import History, Proxy, Search, SearchRules
from mlhpc.plugins.tune.space import (
    Point,
    Space,
    TunedTrial,
    add_default,
    build_space,
    find_default,
    key_of_point,
    narrow,
)
from mlhpc.suite.card import Tunable
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.files import write_file_atomically
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.statistics import Outcome

CHUNK = 10  # configurations of one job, beside the default


def measure(options: argparse.Namespace) -> None:
    chosen = load_descriptor(options.workload)
    resources = find_usable_resources()
    overrides = [] if options.data is None else [f"data={options.data}"]
    batch = Candidates(chosen, options.size, overrides, Space({}), Limits(resources.cores, None), "").config({})
    space = build_space(
        chosen.card().tunable,
        places=resources.cores,
        cores=resources.cores,
        gpu=False,
        batch=batch.global_batch_size,
        plans=list_plan_values(chosen, range(2, resources.cores + 1)),
    )
    default = find_default(space, batch, 1, options.threads)
    space = narrow(add_default(space, default), default, options.fix, options.only)
    limits = Limits(resources.cores, resources.memory_free)
    candidates = Candidates(chosen, options.size, overrides, space, limits, options.objective)
    points = [point for point in space.points() if not candidates.explain_refused(point)]
    rows: dict[str, Any] = {}
    if options.output.exists():
        rows = {key_of_point(row["point"]): row for row in json.loads(options.output.read_text())["rows"]}
    quantity = OBJECTIVES[options.objective]
    left = [point for point in points if key_of_point(point) not in rows]
    random.Random(0).shuffle(left)
    print(f"{len(points)} configurations, {len(left)} to measure", flush=True)

    def run(chunk: list[Any]) -> list[Any]:
        launch = candidates.launch(chunk[0])
        beside = {**default, "ranks": launch.ranks, "threads": launch.threads}
        together = [candidates.config(space.restrict(point)) for point in (beside, *chunk)]
        return run_job(options.workload, together, launch, Blocks(options.blocks, options.steps, 0), options.limit)

    def keep(point: Any, base: list[Any] | None, blocks: list[Any] | None, why: str) -> None:
        values = (
            []
            if base is None or blocks is None
            else [b[quantity] / a[quantity] for a, b in zip(base, blocks, strict=True)]
        )
        seconds = None if base is None else [a[quantity] for a in base]
        rows[key_of_point(point)] = {
            "point": point,
            "closed_form_s": candidates.closed_form_s(point),
            "over_base": values,
            "base_s": seconds,
            "why": why,
        }

    groups: dict[Any, list[Any]] = {}
    for point in left:
        groups.setdefault(candidates.launch(point), []).append(point)

    def run_or_split(chunk: list[Any]) -> None:
        try:
            base, *sides = run(chunk)
        except FailedJobError as error:
            if len(chunk) == 1:
                keep(chunk[0], None, None, str(error))
            else:  # one of them fails: which?
                run_or_split(chunk[: len(chunk) // 2])
                run_or_split(chunk[len(chunk) // 2 :])
            return
        for point, blocks in zip(chunk, sides, strict=True):
            keep(point, base, blocks, "")

    for same in groups.values():
        for start in range(0, len(same), CHUNK):
            run_or_split(same[start : start + CHUNK])
            write_table(options, default, rows)
            print(f"{len(rows)} of {len(points)}", flush=True)


def write_table(options: argparse.Namespace, default: Any, rows: dict[str, Any]) -> None:
    about = {key: str(value) for key, value in vars(options).items() if key not in ("run", "output")}
    document = {"version": 1, "about": about, "default": default, "rows": list(rows.values())}
    write_file_atomically(options.output, json.dumps(document, indent=1) + "\n")


@dataclass(frozen=True)
class Table:
    """A complete table: of each point the log of its closed form, the log of its time over the default's, and noise."""

    name: str
    space: Space
    points: Sequence[Point]
    default: int
    prior: Sequence[float]
    truth: Sequence[float]
    noise: Sequence[Sequence[float]]  # of single blocks, in log time: drawn at random for a measurement

    def draw(self, place: int, drawn: random.Random, blocks: int) -> float:
        return self.truth[place] + statistics.fmean(drawn.choice(self.noise[place]) for _ in range(blocks))

    @property
    def tenth(self) -> int:
        return len(self.points) // 10


def read_table(path: Path) -> Table:
    """Read a measured table. A configuration that failed is not in it."""
    document = json.loads(path.read_text())
    rows = [row for row in document["rows"] if row["over_base"]]
    names: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row["point"].items():
            values = names.setdefault(name, [])
            if not any(json.dumps(value) == json.dumps(known) for known in values):
                values.append(value)
    # a launch's base ran in each of its chunks
    launches: dict[tuple[Any, Any], list[float]] = {}
    for row in rows:
        launches.setdefault((row["point"]["ranks"], row["point"].get("threads")), []).extend(
            map(math.log, row["base_s"])
        )
    middle = {launch: statistics.median(values) for launch, values in launches.items()}
    default = next(place for place, row in enumerate(rows) if row["point"] == document["default"])
    base = middle[document["default"]["ranks"], document["default"].get("threads")]
    logs = [[math.log(value) for value in row["over_base"]] for row in rows]
    means = [statistics.fmean(values) for values in logs]
    truth = [
        mean + middle[row["point"]["ranks"], row["point"].get("threads")] - base
        for mean, row in zip(means, rows, strict=True)
    ]
    return Table(
        path.stem,
        Space({name: Tunable(values=tuple(values)) for name, values in names.items()}),
        [row["point"] for row in rows],
        default,
        [math.log(row["closed_form_s"] / rows[default]["closed_form_s"]) for row in rows],
        [value - truth[default] for value in truth],
        [[value - mean for value in values] for values, mean in zip(logs, means, strict=True)],
    )


def make_table(seed: int, *, noise: float = 0.03, flat: bool = False) -> Table:
    """Make a synthetic table of 288 points: effects of values, and of pairs of values. The closed form knows a part.

    ``flat``: all points take equally long.
    """
    drawn = random.Random(seed)
    space = Space(
        {
            "ranks": Tunable(values=(1, 2, 4, 8)),
            "threads": Tunable(values=(1, 2, 4)),
            "gradient_accumulation_steps": Tunable(values=(1, 2, 4)),
            "precision": Tunable(values=("float32", "bfloat16")),
            "backend": Tunable(values=("loop", "bmm", "grouped_mm", "onednn")),
        }
    )
    points = list(space.points())
    rates = {p["ranks"] * p["threads"] for p in points}  # type: ignore[operator]
    bends = {rate: 0.85 + 0.1 * drawn.random() for rate in rates}
    single = {(name, value): drawn.gauss(0, 0.2) for name, t in space.tunables.items() for value in t.values[1:]}
    double: dict[Any, float] = {}

    def time_of(point: Point) -> tuple[float, float]:
        rate = point["ranks"] * point["threads"]  # type: ignore[operator]
        closed = 0.1 * point["gradient_accumulation_steps"] - math.log(min(rate, 8))  # type: ignore[operator]
        own = sum(single.get(item, 0.0) for item in point.items()) - math.log(min(rate, 8) ** bends[rate])
        items = [(name, str(value)) for name, value in point.items()]
        pairs = [(a, b) for at, a in enumerate(items) for b in items[at + 1 :]]
        return closed, own + sum(double.setdefault(pair, drawn.gauss(0, 0.08)) for pair in pairs)

    closed, times = zip(*map(time_of, points), strict=True)
    truth = [0.0 if flat else time - times[0] for time in times]
    spread = [[drawn.gauss(0, noise) for _ in range(32)] for _ in points]
    return Table(f"synthetic {seed}", space, points, 0, [c - closed[0] for c in closed], truth, spread)


def shuffle(table: Table, seed: int) -> Table:
    """Put the points in another order, which decides between points of equal promise."""
    order = list(range(len(table.points)))
    random.Random(seed).shuffle(order)

    def pick(values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in order]

    return Table(
        table.name,
        table.space,
        pick(table.points),
        order.index(table.default),
        pick(table.prior),
        pick(table.truth),
        pick(table.noise),
    )


def make_search(table: Table, most: int, seed: int) -> Search:
    rules = SearchRules(math.inf, most, 16, 0.05, seed)
    proxy = Proxy(table.space, table.points, table.prior)
    return Search(History(None, table.space, ""), table.points, table.default, proxy, rules)


def search_by_proxy(table: Table, most: int, seed: int, blocks: int) -> list[float]:
    """Search, and return the true log time of the chosen point after each evaluation."""
    drawn, search = random.Random(seed), make_search(table, most, seed)

    def measure(point: Point) -> TunedTrial:
        ratio = math.exp(table.draw(search.places[key_of_point(point)], drawn, blocks))
        return TunedTrial(point=dict(point), ratio=ratio, seconds=1.0)

    found = [table.truth[search.choose_best()] for _ in search.run(measure)]
    return found + [found[-1]] * (most - len(found))


def search_by_sampler(
    make: Callable[[int], optuna.samplers.BaseSampler] | None, table: Table, most: int, seed: int, blocks: int
) -> list[float]:
    """Search with a sampler of Optuna; None: at random. What it repeats, or proposes outside the table, costs nothing."""
    drawn, places = random.Random(seed), {key_of_point(point): place for place, point in enumerate(table.points)}
    known: dict[int, float] = {table.default: 0.0}
    found: list[float] = []
    study = optuna.create_study(sampler=None if make is None else make(seed))
    order = list(range(len(places)))
    drawn.shuffle(order)
    place: int | None
    for asked in range(50 * most):
        if make is None:
            place = order[asked]
        else:
            trial, point = study.ask(), {}
            for name, tunable in table.space.tunables.items():
                point[name] = trial.suggest_categorical(name, tunable.values)
            place = next(
                (p for p, each in enumerate(table.points) if all(point[k] == v for k, v in each.items())), None
            )
        if place is not None and place not in known:
            known[place] = table.draw(place, drawn, blocks)
            found.append(table.truth[min(known, key=lambda each: known[each])])
        if make is not None:
            study.tell(trial, *(() if place is None else (known[place],)), state=None if place is not None else FAIL)
        if len(found) == most:
            break
    return found + [found[-1] if found else 0.0] * (most - len(found))


FAIL = optuna.trial.TrialState.FAIL
SAMPLERS: Mapping[str, Callable[[int], optuna.samplers.BaseSampler] | None] = {
    "random": None,
    "TPE": lambda seed: optuna.samplers.TPESampler(seed=seed),
    "Optuna's GP": lambda seed: optuna.samplers.GPSampler(seed=seed),
}
WITHIN = math.log(1.03)


def count_needed(courses: Sequence[Sequence[float]], best: float, share: float) -> int | None:
    """Return after how many evaluations this share of the seeds has chosen a point within 3 % of the best."""
    for count in range(len(courses[0])):
        if sum(course[count] <= best + WITHIN for course in courses) >= share * len(courses):
            return count + 1
    return None


def compare_engines(table: Table, options: argparse.Namespace) -> None:
    most, best = 4 * table.tenth, min(table.truth)
    near = sum(value <= best + WITHIN for value in table.truth)
    print(
        f"\n{table.name}: {len(table.points)} configurations, {near} within 3 % of the best; best / default {math.exp(best):.3f}"
    )
    print(
        f"  {'engine':<14} {'within 3 % after 10 % of evaluations':>37} {'median excess':>14} {'90 % of seeds need':>19}"
    )
    for name in ("mlhpc tune", *options.engines):
        courses = []
        for seed in range(options.seeds):
            mixed = shuffle(table, seed)
            if name == "mlhpc tune":
                courses.append(search_by_proxy(mixed, most, seed, options.blocks))
            else:
                courses.append(search_by_sampler(SAMPLERS[name], mixed, most, seed, options.blocks))
        at = [course[table.tenth - 1] - best for course in courses]
        hits, needed = sum(value <= WITHIN for value in at), count_needed(courses, best, 0.9)
        excess = 100 * math.expm1(statistics.median(at))
        print(
            f"  {name:<14} {hits:>28} of {len(at):<5} {excess:>12.1f} % {needed or f'more than {most}':>19}", flush=True
        )


def judge_proxy(table: Table, options: argparse.Namespace) -> None:
    """Print rank correlation and coverage on held-out points, of which no neighbour was measured."""
    taus, held, inside = [], 0, 0
    for seed in range(options.seeds):
        drawn = random.Random(seed)
        out = drawn.sample(range(len(table.points)), max(8, len(table.points) // 20))
        apart = [
            place
            for place in range(len(table.points))
            if min(count_differences(table.points[place], table.points[other]) for other in out) > 1
        ]
        known = drawn.sample(apart, min(len(apart), options.known or 3 * table.tenth))
        measured = {place: [table.draw(place, drawn, options.blocks)] for place in known}
        found = Proxy(table.space, table.points, table.prior).predict(measured)
        mean, std = found.mean, np.hypot(found.std, found.noise)
        seen = [table.draw(place, drawn, options.blocks) for place in out]
        taus.append(float(stats.kendalltau([mean[place] for place in out], [table.truth[place] for place in out])[0]))
        half = stats.norm.ppf(0.95) * std[out]
        inside += int(np.sum(np.abs(np.array(seen) - mean[out]) <= half))
        held += len(out)
    print(
        f"  held out, no neighbour measured: Kendall's tau {statistics.fmean(taus):.2f} (median {statistics.median(taus):.2f}, "
        f"lowest {min(taus):.2f}); 90 % intervals hold {100 * inside / held:.0f} % of {held}; {len(known)} measured"
    )


def count_differences(a: Point, b: Point) -> int:
    return sum(a.get(name) != b.get(name) for name in a.keys() | b.keys())


def judge_decisions(name: str, options: argparse.Namespace, *, flat: bool, drift: float = 0.0) -> None:
    """Print how often searches of synthetic tables end in each answer. ``drift``: of the machine during the search."""
    answers = dict.fromkeys(("faster", "nothing better"), 0)
    for seed in range(options.decisions):
        table = make_table(seed, noise=0.05, flat=flat)
        search, drawn, clock = make_search(table, table.tenth, seed), random.Random(seed), [0]

        def now(place: int, table: Table = table, drawn: random.Random = drawn, clock: list[int] = clock) -> float:
            clock[0] += 1  # one side of a pair after the other, while the machine becomes slower
            return math.exp(table.draw(place, drawn, options.blocks) + math.log1p(drift) * clock[0] / (4 * table.tenth))

        def compare(point: Point, order: Sequence[str], search: Search = search, now: Any = now) -> dict[str, float]:
            places = {TUNED: search.places[key_of_point(point)], DEFAULT: search.default}
            return {entry: now(places[entry]) for entry in order} | {"took": 1.0}

        def measure(point: Point, compare: Any = compare) -> TunedTrial:
            pair = compare(point, (DEFAULT, TUNED))
            return TunedTrial(point=dict(point), ratio=pair[TUNED] / pair[DEFAULT], seconds=1.0)

        list(search.run(measure))
        answer = search.decide(compare)
        answers["faster" if answer.outcome == Outcome.FASTER else "nothing better"] += 1
    print(
        f"  {name:<44} " + ", ".join(f"{word} {count} of {options.decisions}" for word, count in answers.items()),
        flush=True,
    )


def replay(options: argparse.Namespace) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tables = [read_table(path) for path in options.tables]
    if options.synthetic:
        tables += [make_table(seed) for seed in (1, 2)]
    for table in tables:
        compare_engines(table, options)
        judge_proxy(table, options)
    if options.decisions:
        print(f"\nanswers on synthetic tables, noise 5 % a block, {options.blocks} blocks a side, error 5 %")
        judge_decisions("all configurations equal", options, flat=True)
        judge_decisions("all equal, machine 20 % slower by the end", options, flat=True, drift=0.2)
        judge_decisions("effects of 20 %", options, flat=False)
        judge_decisions("effects of 20 %, machine 20 % slower by the end", options, flat=False, drift=0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    table = commands.add_parser("measure")
    table.add_argument("workload")
    table.add_argument("--size", default="smoke")
    table.add_argument("--data")
    table.add_argument("--objective", choices=list(OBJECTIVES), default="cpu-time")
    table.add_argument("--threads", type=int, default=find_usable_resources().cores)
    table.add_argument("--only", action="append", default=[])
    table.add_argument("--fix", action="append", default=[])
    table.add_argument("--blocks", type=int, default=4)
    table.add_argument("--steps", type=int, default=3)
    table.add_argument("--limit", type=float, default=600.0)
    table.add_argument("-o", "--output", type=Path, required=True)
    table.set_defaults(run=measure)
    again = commands.add_parser("replay")
    again.add_argument("tables", type=Path, nargs="*")
    again.add_argument("--synthetic", action="store_true")
    again.add_argument("--seeds", type=int, default=50)
    again.add_argument("--blocks", type=int, default=2)
    again.add_argument("--known", type=int)
    again.add_argument("--decisions", type=int, default=200)
    again.add_argument("--engines", action="append", choices=list(SAMPLERS), default=[])
    again.set_defaults(run=replay)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
