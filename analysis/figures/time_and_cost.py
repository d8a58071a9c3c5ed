"""Figure: time to train against what it takes: size and hours of the machine, money, energy."""

from __future__ import annotations

import math
from functools import partial

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    Chart,
    draw_panels,
    draw_points,
    draw_result_panels,
    make_minutes_channel,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import (
    CHOOSE_SYSTEMS,
    FAR_APART,
    Answer,
    Question,
    View,
    join_statements,
    render_number,
    render_seconds,
    varies,
)
from mlhpc.analysis.results.machine_size import PLURAL, add_extent
from mlhpc.analysis.results.names import PROBLEM_COLUMNS, build_result_table, group_tasks
from mlhpc.analysis.study import NotAnswerableError, Study

TITLE = "Time and cost"
_MJ = 1e6  # joules


def build_size_table(study: Study) -> pd.DataFrame:
    """Build score, machine size and hours by result."""
    frame = _select_with_size(study)
    values = {
        "machine size": frame["extent"],
        "counts": frame["one"].map(PLURAL),
        "compute units": frame["units"],
        "score [min]": frame["score_s"] / 60,
        "mean of runs [min]": frame["run_s.mean"] / 60,
        "n": frame["n_averaged"],
        "machine hours": frame["hours"],
        "cost": frame["cost"],
    }
    return build_result_table(frame, ("label", "division", "device"), values)


def render_size_answer(study: Study) -> Answer:
    """Name the fastest result of each task that has several, and of each device the one with the fewest hours."""
    sentences = []
    frame = _select_with_size(study).reset_index(drop=True)  # the rows of the table
    for _, short, rows in group_tasks(frame):
        if len(rows) < 2:
            continue  # nothing to rank it beside
        scored = rows[rows["score_s"].notna()]
        rows, without = (scored, "") if len(scored) else (rows, ", none with a score")
        fast = rows.sort_values(["run_s.mean", "label"]).iloc[0]
        ordered = rows.sort_values(["hours", "label"]).groupby(["device", "one"], sort=True)
        # Hours of unlike devices say nothing together. Of nearly equal ones the fastest is named, with its own hours
        few = [_choose_cheap(same) for _, same in ordered if len(same) > 1]
        named = [f"fastest {fast['label']} ({render_seconds(fast['run_s.mean'])})"]
        alike = rows["device"].nunique() == 1
        of = f" of {fast['device']}" if alike else ""
        named += [
            f"{nearly}fewest {_name_hours(row, alike=alike)} {row['label']} ({render_number(row['hours'])} h{of})"
            for row, nearly in few
        ]
        sentences.append(Answer(f"{short}: {', '.join(named)}{_cheapest(study, rows)}{without}", rows.index))
    return join_statements(
        sentences or ["no two of these results may be ranked against each other: other divisions, rules or data"]
    )


def _choose_cheap(rows: pd.DataFrame) -> tuple[pd.Series, str]:
    """Choose the fastest of the results whose hours are near the fewest, and say so if it is another."""
    fewest = rows["hours"].min()
    row = rows[rows["hours"] < FAR_APART * fewest].sort_values(["run_s.mean", "label"]).iloc[0]
    return row, "nearly the " * bool(row["hours"] > fewest)


def draw_size_chart(table: pd.DataFrame) -> Chart:
    """Draw log-log panels of time over machine size. Hollow: the mean of runs, because there is no score."""
    shown = table.assign(
        _sign=table["device"], _time=table["score [min]"].fillna(table["mean of runs [min]"]),
        _hollow=table["score [min]"].isna(),
    )  # fmt: skip

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_number_channel(alt.X, "machine size", str(rows["counts"].iloc[0]), log=True)
        y = make_minutes_channel(alt.Y, "_time", "time to train")
        return draw_points(rows, x, y, table["device"], hollow="_hollow", names="label")

    return draw_result_panels(shown, draw, zoom=True)


def build_cost_table(study: Study) -> pd.DataFrame:
    """Build time, cost, its unit, and whether a result is on the Pareto front."""
    frame = _select_with_price(study)
    values = {
        "time to train [min]": frame["run_s.mean"] / 60,
        "machine hours": frame["hours"],
        "cost": frame["paid"],
        "cost in": frame["paid_in"],
        "on the front": frame["front"],
    }
    return build_result_table(frame, ("label", "division"), values)


def render_cost_answer(study: Study) -> Answer:
    """Name the Pareto front of each task, and without prices of each device: each saves enough against the one before."""
    frame = _select_with_price(study).reset_index(drop=True)  # the rows of the table
    sentences = [
        Answer(f"{short}{which}: {', '.join(_list_trades(rows))}", rows.index)
        for _, short, alike in group_tasks(frame)
        for paid_in, rows in alike.groupby("paid_in", sort=True)
        if len(rows) > 1
        for which in [f" ({paid_in})" if frame["paid_in"].nunique() > 1 else ""]
    ]
    unit = frame["paid_in"].iloc[0] if frame["paid_in"].nunique() == 1 else "machine hours"
    said = join_statements(sentences)
    answer = Answer(f"best trades of time for {unit} among ranked results of one device: {said}{_unpriced(study)}")
    answer.parts = said.parts
    return answer


def _list_trades(rows: pd.DataFrame) -> list[str]:
    """List the labels of a front, the fastest first, without what costs nearly as much as a faster one."""
    named: list[str] = []
    least = math.inf
    for row in rows[rows["front"]].sort_values("run_s.mean").to_dict("records"):
        if row["paid"] * FAR_APART < least:
            named, least = [*named, str(row["label"])], row["paid"]
    return named


def draw_cost_chart(table: pd.DataFrame) -> Chart:
    """Draw log-log panels; a line joins the Pareto front of each division."""

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_minutes_channel(alt.X, "time to train [min]", "time to train")
        y = make_number_channel(alt.Y, "cost", f"cost [{rows['cost in'].iloc[0]}]", log=True)
        return draw_points(rows, x, y, table["division"], joined="on the front", names="label")

    return draw_panels(table.assign(_sign=table["division"]), [*PROBLEM_COLUMNS, "cost in"], draw, zoom=True)


def build_energy_table(study: Study) -> pd.DataFrame:
    """Build time, energy with interval and kind, power per node, energy x delay and idle share.

    The last column says whether a result is on the Pareto front.
    """
    frame = _select_with_energy(study)
    values = {
        "time to train [min]": frame["run_s.mean"] / 60,
        "energy [MJ]": frame["energy_j"] / _MJ,
        "energy, low [MJ]": frame["energy_low_j"] / _MJ,
        "energy, high [MJ]": frame["energy_high_j"] / _MJ,
        "energy of": frame["energy_kind"],
        "network estimated": frame["interconnect_estimated"],
        "no score": frame["energy_note"],
        "power per node [W]": frame["watts_per_node"],
        "energy x delay [MJ s]": frame["energy_delay_js"] / _MJ,
        "idle share": frame["idle_share"],
        "on the front": frame["front"],
    }
    return build_result_table(frame, ("label", "division"), values)


def render_energy_answer(study: Study) -> Answer:
    """Say what speed costs in energy, from the least energy to the fastest of each front."""
    sentences = []
    frame = _select_with_energy(study).reset_index(drop=True)  # the rows of the table
    for (benchmark, size, kind), alike in _group_by_energy_kind(frame):
        tasks = group_tasks(alike)
        for title, _, rows in tasks:
            title = title if len(tasks) > 1 else f"{benchmark} {size}"
            front = rows[rows["front"]].sort_values("run_s.mean")
            fast, slow = front.iloc[0], front.iloc[-1]
            said = f"{title} · {kind}: {fast['label']} is"
            if len(front) < 2:
                sentences.append(Answer(f"{said} both the fastest and takes the least", rows.index))
                continue
            speed, cost = slow["run_s.mean"] / fast["run_s.mean"], fast["energy_j"] / slow["energy_j"]
            than = f"{speed:.3g} times faster than {slow['label']} for {cost:.3g} times the energy"
            sentences.append(Answer(f"{said} {than}", [fast.name, slow.name]))
    return join_statements(sentences)


def draw_energy_chart(table: pd.DataFrame) -> Chart:
    """Draw log-log panels with intervals of energy, one for each place of measurement."""

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_minutes_channel(alt.X, "time to train [min]", "time to train")
        y = make_number_channel(alt.Y, "energy [MJ]", "energy of a run [MJ]", log=True)
        ends = ("energy, low [MJ]", "energy, high [MJ]")
        drawn = draw_points(
            rows, x, y, table["division"], y_ends=ends, hollow="_hollow", joined="on the front", names="label"
        )
        return drawn

    shown = table.assign(_sign=table["division"], _hollow=table["no score"].notna())
    return draw_panels(shown, [*PROBLEM_COLUMNS, "energy of"], draw, zoom=True)


def add_pareto_front(frame: pd.DataFrame, against: str) -> pd.DataFrame:
    """Add the column ``front``: True on the Pareto front of ``run_s.mean`` and ``against``, by task."""
    front = pd.Series(False, index=frame.index)
    for *_, alike in group_tasks(frame):
        front.loc[alike.index] = [_is_on_front(row, alike, against) for _, row in alike.iterrows()]
    return frame.assign(front=front)


def _is_on_front(row: pd.Series, others: pd.DataFrame, against: str) -> bool:
    # Better in both, not only as good: two equal results are both on the front
    faster, less = others["run_s.mean"] < row["run_s.mean"], others[against] < row[against]
    return not bool((faster & less).any())


def _select_with_size(study: Study) -> pd.DataFrame:
    frame = _select_repeated(add_extent(_select_ranked(study), PROBLEM_COLUMNS), PROBLEM_COLUMNS)
    if frame.empty:
        raise NotAnswerableError("two time-to-train results of one benchmark and size on machines of known size")
    return frame


def _select_ranked(study: Study) -> pd.DataFrame:
    """Select the results by time to train that may be ranked."""
    frame = study.ranked
    return frame[(frame["mode"] == "strong") & (frame["run_s.mean"] > 0)]


def _select_with_price(study: Study) -> pd.DataFrame:
    frame = add_extent(_select_ranked(study), PROBLEM_COLUMNS)
    # Without prices, hours of unlike devices are not compared
    alike = frame["device"].nunique() == 1
    paid_in = [study.prices.unit if study.prices else _name_hours(row, alike=alike) for _, row in frame.iterrows()]
    frame = frame.assign(paid=frame["cost"] if study.prices else frame["hours"], paid_in=paid_in)
    frame = frame[frame["paid"].notna()]
    scored = frame["score_s"].notna()
    # Results without a score are shown only if no other of the benchmark and size has one
    frame = frame[scored | ~scored.groupby([frame["benchmark"], frame["size"]]).transform("any")]
    frame = _select_repeated(frame, [*PROBLEM_COLUMNS, "paid_in"])
    if frame.empty:
        on = "of known size with a price (--price)" if study.prices else "of known size with one kind of device"
        raise NotAnswerableError(f"two time-to-train results of one benchmark and size on machines {on}")
    return _add_front_by(frame, ["paid_in"], "paid")


def _name_hours(row: pd.Series, *, alike: bool) -> str:
    """Name what a result's hours are of, with the device unless all are ``alike``."""
    return f"{row['one']} hours" if alike else f"{row['one']} hours of {row['device']}".removeprefix("unit ")


def _add_front_by(frame: pd.DataFrame, by: list[str], against: str) -> pd.DataFrame:
    """Add the Pareto fronts of results that are alike in ``by``."""
    parts = [add_pareto_front(rows, against) for _, rows in frame.groupby(by, sort=True, dropna=False)]
    return pd.concat(parts).loc[frame.index]


def _select_with_energy(study: Study) -> pd.DataFrame:
    frame = _select_ranked(study)
    # The column is missing if no result has energy
    if "energy_j" in frame:
        frame = frame[frame["energy_j"].notna()]
    if "energy_j" not in frame or frame.empty:
        raise NotAnswerableError("a time-to-train result with power readings or energy counters (docs/energy.md)")
    frame = frame.assign(energy_j=frame["energy_j"].astype(float))
    return _add_front_by(frame, [*PROBLEM_COLUMNS, "energy_kind"], "energy_j")


def _group_by_energy_kind(frame: pd.DataFrame) -> list[tuple[tuple[str, str, str], pd.DataFrame]]:
    """Group results by benchmark, size and the place at which energy was measured."""
    return list(frame.groupby([*PROBLEM_COLUMNS, "energy_kind"], sort=True, dropna=False))


def _select_repeated(results: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Select the results that are like at least one other in ``by``."""
    return results[results.groupby(by)["group"].transform("size") > 1]


def _cheapest(study: Study, rows: pd.DataFrame) -> str:
    """Name the result that costs least, if the user gave prices."""
    if study.prices is None or rows["cost"].isna().all():
        return ""
    least = rows.assign(cost=rows["cost"].astype(float)).sort_values(["cost", "label"]).iloc[0]
    return f", cheapest {least['label']} ({least['cost']:.3g} {study.prices.unit})"


def _unpriced(study: Study) -> str:
    """Name the devices without a price, as the end of the answer."""
    if study.prices is None:
        return ""
    strong = study.distinct[(study.distinct["mode"] == "strong") & study.distinct["unit_hours"].notna()]
    devices = sorted(set(strong.loc[strong["cost"].isna(), "device"]))
    return f". No price for {', '.join(devices)}" if devices else ""


def _has_choice(table: pd.DataFrame) -> bool:
    """Return True if three results or more have the same kind of cost; of two the summary says it all."""
    return bool(table.groupby([*PROBLEM_COLUMNS, "cost in"]).size().max() > 2)


VIEWS = (
    View(
        "time_and_units", "Time and machine size",
        Question(
            CHOOSE_SYSTEMS,
            "How fast is a result for the machine it took, and how many hours of its parts is that?",
            ("score_s", "run_s.mean", "units", "unit_hours"),
            needs="a second result of the same benchmark and size",
        ),
        "Time to train over the size of the machine, counted in what varies: accelerators, processors, nodes, cores or "
        "ranks. The sign is the score (hollow: the mean of the runs, where there is no score); colour and shape tell "
        "the accelerator, or the processor where there is none. Throughput mode is left out: there many runs share a "
        "machine.",
        build_size_table, render_size_answer, draw_size_chart, partial(varies, column="machine size", by=PROBLEM_COLUMNS),
    ),
    View(
        "pareto", "Time and cost",
        Question(
            CHOOSE_SYSTEMS,
            "Which systems are fast for what they cost, by the prices given or in hours of the machine's parts?",
            ("score_s", "unit_hours"),
            needs="a second result of the same benchmark and size",
            decision=(
                "no other system that may be ranked beside it is faster and costs less, by the prices given or in "
                "hours of the machine's parts"
            ),
        ),
        "Time to train against the cost of one run: its machine hours times the prices given with --price; without "
        "prices the hours of accelerators, processors, nodes, cores or ranks themselves (what varies), in a panel for "
        "each kind of device, because hours of unlike devices are not the same money. Further left is faster, lower is "
        "cheaper; a line joins the results that no other of their division and rounds beats in both. The answer leaves "
        "out those that cost less than 5 % less than a faster one. Results without a score are shown only where no "
        "other has one.",
        build_cost_table, render_cost_answer, draw_cost_chart, _has_choice,
    ),
    View(
        "energy_front", "Time and energy",
        Question(
            CHOOSE_SYSTEMS,
            "What does a result cost in energy, and what does being faster cost?",
            ("score_s", "energy_j"),
            needs="power readings or energy counters of every node in every run",
            decision="no other system measured at the same place is faster and takes less energy",
        ),
        "Time to train against the energy of one run, from run_start to run_stop, over the runs that the time score "
        "keeps. A panel holds results measured at the same place: nodes, packages and devices, AC and DC are never "
        "beside each other. Bars are 95 % intervals, of energy from the spread of runs, the sampling and the accuracy "
        "of the meters (5 % where none is stated). Hollow: no score, as readings lack a part of a run. The energy of a "
        "network may be the rules' estimate (table). A line joins the results that no other in the panel and of its "
        "rounds beats in both.",
        build_energy_table, render_energy_answer, draw_energy_chart,
    ),
)  # fmt: skip
