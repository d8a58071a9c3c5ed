"""Figure: the speed-up between two results as a product of machine size, speed per unit, epochs and staging."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    TEXT_COLOUR,
    VERMILION,
    Chart,
    draw_panels,
    layer_charts,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import (
    CHOOSE_SYSTEMS,
    FACTORS,
    MACHINE,
    STAGED_BEFORE,
    Answer,
    Question,
    View,
    list_ordered_runs,
    number_sessions,
    rankable,
    render_label,
)
from mlhpc.analysis.figures.comparison import compare_results
from mlhpc.analysis.results.decompose import Factors, build_split, compute_factors
from mlhpc.analysis.results.machine_size import PLURAL, add_extent
from mlhpc.analysis.results.names import CLASS_COLUMNS, group_tasks, render_heading
from mlhpc.analysis.study import NotAnswerableError, Study, build_once
from mlhpc.suite.log.score import list_differences
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.comparison import MIN_RUNS, Comparison, compute_ratio

TITLE = "Why is it faster?"
QUESTION = Question(
    CHOOSE_SYSTEMS,
    "Why is one result faster than another, size of the machine, speed of each part, epochs or staging?",
    ("units", "tau_s.mean", "epochs.mean", "staging_exposed_s.mean"),
    needs="a second result of the same benchmark and size",
)
CAPTION = (
    "Speed-up from the first to the second result, factor by factor, on a logarithmic axis: they multiply to the "
    "total. First bar: how many more accelerators, processors, nodes, cores or ranks (whichever varies) train. Speed "
    "each: epochs that one of them trains per second, below 1 where scaling is not perfect. Evaluation: the wait for "
    "it. Epochs: those trained, below 1 where the second trains more, usually for its larger batch; where "
    "evaluations run beside training, an epoch may follow the one that meets the target. Staging: in the run, and "
    "what the first epoch trains longer than later ones. Other: time outside of both. Where the parallel plans of "
    "runs of this suite differ, table and answer name them. In sight are the pairs of the summary and those asked "
    "for (--between); the choice has consecutive sizes of one machine and the way to the fastest, the table every "
    "result against the fastest of its task. An inconclusive difference is not explained. The factors multiply to "
    "the ratio of scores. The table has the 95 % interval of each factor, by Welch's t on its logs over the runs. "
    "Where a result has several sessions, these are what is compared, and the interval is at least that of the runs. "
    "A factor whose interval holds 1 may be chance. On unlike devices the number of parts and the speed of each go "
    "together: a new device is fewer and faster parts."
)
MOST_PANELS = 6  # panels per class
LEAST_PANELS = 3  # that are in sight; others by a choice
LEAST_DIFFERENCE = 0.01  # difference of a factor from 1
PARTS = ("units", "system", "evaluation", "algorithmic", "staging", "other")
NAMES = (*FACTORS, "total")

Interval = tuple[float, float]


@dataclass(frozen=True)
class ResultPair:
    """Holds two results of one class and the speed-up of scores from ``a`` to ``b``. Only a ``shown`` pair has a panel.

    ``intervals`` has the 95 % interval of each factor that varies between runs: all but the size of the machine.
    """

    title: str
    a: pd.Series
    b: pd.Series
    factors: Factors
    comparison: Comparison | None
    shown: bool
    intervals: Mapping[str, Interval]
    plans: str = ""

    @property
    def unlike(self) -> str:
        """Say why the two may not be ranked against each other; empty if they may."""
        return "; ".join(list_differences(*(row[name] for name in ("round", "division") for row in (self.a, self.b))))

    @property
    def verdict(self) -> str:
        """Say whether the second result is slower or faster than the first, or that it is inconclusive."""
        if self.comparison is None:
            return "inconclusive: too few runs"
        return self.comparison.outcome.value


@build_once
def build_table(study: Study) -> pd.DataFrame:
    """Build the factors of every pair; the ``first`` ones were asked for, or the summary names them."""
    leading = {*study.between, *_list_leading(study)}
    lines = [
        {name: pair.b[name] for name in ("benchmark", "size")}
        | {"class": pair.title, "from": pair.a["label"], "to": pair.b["label"], "counts": PLURAL[pair.b["one"]]}
        | {
            f"{name} {end}": value
            for end, row in (("from", pair.a), ("to", pair.b))
            for name, value in (
                ("device", row["device"]),
                ("extent", row["extent"]),
                (STAGED_BEFORE, row["staging_before_run_s.mean"]),
                ("repeats", study.repeats_courses(row["group"])),
            )
        }
        | {name: getattr(pair.factors, part) for name, part in zip(NAMES, PARTS, strict=False)}
        | {MACHINE: pair.factors.units * pair.factors.system}
        | {
            f"{name} {end}": at
            for name, ends in pair.intervals.items()
            for end, at in zip(("from", "to"), ends, strict=True)
        }
        | {
            "speed-up": pair.factors.speed_up,
            "efficiency": pair.factors.efficiency,
            # The comparison is a ratio of times, b over a: its inverse is the speed-up, and the ends change places
            "speed-up, geometric means": 1.0 / pair.comparison.ratio if pair.comparison else math.nan,
            "95 % from": 1.0 / pair.comparison.high if pair.comparison else math.nan,
            "95 % to": 1.0 / pair.comparison.low if pair.comparison else math.nan,
            "verdict": pair.verdict,
            "unlike": pair.unlike,
            "plans": pair.plans,
            "shown": pair.shown,
            "first": (pair.a["group"], pair.b["group"]) in leading,
        }
        for pair in _pairs(study)
    ]
    if not lines:
        raise NotAnswerableError(
            "two time-to-train results of one benchmark and size with a known machine size and epochs"
        )
    return pd.DataFrame(lines)


def render_answer(study: Study) -> Answer:
    """Describe the first pair in words."""
    shown = build_table(study).query("shown")
    if shown.empty:
        return Answer("no two results that may be ranked beside each other differ by more than their runs do")
    row = shown.iloc[0]
    real = f"{row['speed-up, geometric means']:.3g}× [{row['95 % from']:.3g}, {row['95 % to']:.3g}]"
    is_real = row["verdict"] in (Outcome.FASTER, Outcome.SLOWER)
    known = f"{real}, by score" if is_real else "too few runs to tell whether it is real; by score"
    parts = (
        ("size", row["size"], f"({row['counts']})"),
        ("speed/size", row["speed/size"], "(speed of each)"),
        ("evaluation", row["evaluation"], "(evaluation)"),
        ("epochs", row["epochs"], "(epochs)"),
        ("staging", row["staging"], "(staging)"),
        ("other", row["other"], "(other)"),
    )
    product = " × ".join(f"{value:.3g} {what}" for _, value, what in parts)
    by_chance = [what.strip("()") for name, _, what in parts if may_be_chance(row, name)]
    text = (
        f"{row['class']}: {row['from']} to {row['to']}: {known} {row['speed-up']:.3g}× = {product}"
        + (f"; {' and '.join(by_chance)} may be chance: the interval holds 1" if by_chance else "")
        + "".join(f"; {row[name]}" for name in ("plans", "unlike") if row[name])
    )
    return Answer(text, [shown.index[0]])


def _list_leading(study: Study) -> Iterator[tuple[str, str]]:
    """Yield of each task of the summary the second and the fastest."""
    for task, shown in study.ordered_tasks():
        rows = task.rows[task.rows["run_s.mean"] > 0].sort_values(["run_s.mean", "label"])
        if shown and len(rows) > 1:
            yield str(rows["group"].iloc[1]), str(rows["group"].iloc[0])


def may_be_chance(row: Mapping[Hashable, Any] | pd.Series, name: str) -> bool:
    """Return True if a factor differs from 1 by a per cent or more, and its interval contains 1."""
    low, high = row.get(f"{name} from", math.nan), row.get(f"{name} to", math.nan)
    return bool(abs(row[name] - 1.0) >= LEAST_DIFFERENCE and low <= 1.0 <= high)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per shown pair: bars that each begin where the one before ends."""
    shown = table[table["shown"]].sort_values("first", ascending=False, kind="stable").reset_index(drop=True)
    # A narrow panel has room for 60 letters: what is usual of the class is left out
    task = shown["class"].str.replace(" · size full", "").str.replace(" · time to train", "")
    first, second = (shown[end].map(lambda label: render_label(label, 24)) for end in ("from", "to"))
    shown = shown.assign(_pair=task + ": " + first + " → " + second)
    # Without a shown pair the chart is empty, but has the column that it is made of
    bars = pd.concat([_bars(row) for row in shown.to_dict("records")]) if len(shown) else shown.assign(_part=[])

    def draw(rows: pd.DataFrame) -> Chart:
        x = alt.X("_part:N", sort=None, title=None, axis=alt.Axis(labelAngle=-35))
        base = alt.Chart(rows).encode(x=x)
        colours = alt.Scale(domain=["faster", "slower", "total"], range=[GREEN, VERMILION, BLUE])
        bar = base.mark_bar(size=26).encode(
            y=make_number_channel(alt.Y, "_from", "speed-up", log=True),
            y2="_to:Q",
            color=alt.Color("_kind:N", scale=colours),
        )
        text = base.mark_text(dy=-8).encode(y="_top:Q", text=alt.Text("_factor:Q", format=".3~g"))
        one = alt.Chart().mark_rule(color=TEXT_COLOUR).encode(y=alt.datum(1.0))
        return layer_charts(bar, text, one, height=220)

    return draw_panels(bars, ["_pair"], draw, sort=False, first=max(LEAST_PANELS, int(shown["first"].sum())))


def _bars(row: dict[str, Any]) -> pd.DataFrame:
    """Build the bars of one pair: where each factor begins and ends, then the total from 1."""
    names = (row["counts"], "speed each", *FACTORS[2:])
    reached, lines = 1.0, []
    for part, name in zip(FACTORS, names, strict=True):
        kind = "faster" if row[part] >= 1 else "slower"
        lines.append({"_part": name, "_from": reached, "_to": reached * row[part], "_factor": row[part], "_kind": kind})
        reached *= row[part]
    lines.append({"_part": "total", "_from": 1.0, "_to": reached, "_factor": reached, "_kind": "total"})
    bars = pd.DataFrame(lines)
    own = {name: [value] * len(bars) for name, value in row.items() if name in ("_row", "_of", "_pair", "from", "to")}
    return bars.assign(_top=bars[["_from", "_to"]].max(axis=1), **own)


def _pairs(study: Study) -> list[ResultPair]:
    """List the pairs of every class, those asked for by name first. The first MOST_PANELS of a class get a panel."""
    pairs = []
    for key, rows in study.in_rounds.groupby(CLASS_COLUMNS, sort=True):
        title = render_heading(*key)
        known = rows[(rows["mode"] == "strong") & (rows["train_s.mean"] > 0)]
        known = add_extent(known, CLASS_COLUMNS, training=True)
        panels_left = MOST_PANELS
        for a, b in _pairs_of_class(known, study.between):
            split = compute_factors(build_split(a, a["extent"]), build_split(b, b["extent"]))
            if math.isfinite(split.speed_up) and split.speed_up > 0:
                compared = compare_results(study, a, b)
                # An inconclusive difference is not explained; a pair with too few runs is, with that remark
                shown = panels_left > 0 and (compared is None or compared.outcome != Outcome.INCONCLUSIVE)
                panels_left -= shown
                plans = _plans(study, a["group"], b["group"])
                pairs.append(
                    ResultPair(title, a, b, split, compared, shown, compute_intervals(study, a, b, split), plans)
                )
    return pairs


def compute_intervals(study: Study, a: pd.Series, b: pd.Series, split: Factors) -> dict[str, Interval]:
    """Compute the 95 % interval of each factor that differs from run to run, by Welch's t on its logs.

    Each factor is a ratio of one quantity of the runs: seconds per epoch, epochs, share of staging, share of other
    time. A factor whose interval contains 1 may be chance.
    """
    found: dict[str, Interval] = {}
    for name, (first, second) in _list_quantities(study, str(a["group"]), str(b["group"])).items():
        ratio = compute_ratio(second, first)  # time of the first over that of the second: above 1 is faster
        factor = getattr(split, PARTS[NAMES.index(name)])
        # The factor is of means and the ratio of geometric means: only the width is taken over
        found[name] = (factor * ratio.low / ratio.ratio, factor * ratio.high / ratio.ratio)
    return found


def _list_quantities(study: Study, *groups: str) -> dict[str, list[list[list[float]]]]:
    """List each factor's quantity over the runs of each session of two results.

    Empty with fewer than MIN_RUNS runs that have it.
    """
    found: dict[str, list[list[list[float]]]] = {}
    for group in groups:
        sessions = number_sessions(study, group)
        runs = list_ordered_runs(study, group)
        busy_s = runs["epoch_time_s"] + runs["staging_exposed_s"].fillna(0.0) + runs["first_epoch_extra_s"]
        columns = {
            "speed/size": runs["train_s"] / runs["epochs"],
            "evaluation": runs["epoch_time_s"] / runs["train_s"],
            "epochs": runs["epochs"],
            "staging": busy_s / runs["epoch_time_s"],
            "other": runs["run_s"] / busy_s,
        }
        for name, column in columns.items():
            known = column.where((column > 0) & (column < math.inf)).astype(float).set_axis(sessions).dropna()
            each = [list(values) for _, values in known.groupby(level=0)]
            found.setdefault(name, []).append(each if len(known) >= MIN_RUNS else [])
    return {name: sides for name, sides in found.items() if all(sides)}


def _plans(study: Study, a: str, b: str) -> str:
    """Name the parallel plans of two results if they differ: they explain a part of the speed per unit."""
    first, second = ({plan or "no plan" for plan in study.converged_of(group)["plan"].fillna("")} for group in (a, b))
    return "" if first == second else f"plan: {' or '.join(sorted(first))} to {' or '.join(sorted(second))}"


def _pairs_of_class(known: pd.DataFrame, between: Sequence[tuple[str, str]]) -> list[tuple[pd.Series, pd.Series]]:
    """List pairs asked for by name, then consecutive sizes of a machine, then each result against the fastest."""
    of_group = {row["group"]: row for _, row in known.iterrows()}
    pairs = [(of_group[a], of_group[b]) for a, b in between if a in of_group and b in of_group]
    pairs += _consecutive(known)
    for *_, alike in group_tasks(rankable(known)):
        best = alike.sort_values(["run_s.mean", "label"]).iloc[0]
        # Own results first, because the number of panels is limited
        own_first = alike.drop(best.name).sort_values(["published", "run_s.mean", "label"])
        pairs += [(row, best) for _, row in own_first.iterrows()]
    # A pair asked for may also be one of consecutive sizes: each once, at its first place
    return list({(a.name, b.name): (a, b) for a, b in pairs}.values())


def _consecutive(known: pd.DataFrame) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Yield each machine's results in one round and division, from one size to the next larger one."""
    for _, series in known.groupby(["round", "division", "machine", "device"], sort=True):
        ordered = [row for _, row in series.sort_values(["extent", "run_s.mean"]).iterrows()]
        yield from ((a, b) for a, b in itertools.pairwise(ordered) if a["extent"] < b["extent"])


VIEWS = (View("waterfall", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart),)
