"""`mlhpc energy`: what a run took in joules, from its power logs or the counters in its log; brings in files of other meters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from suite.cli.group import Subcommands
from suite.cli.options import JSON, card_option, format_option
from suite.compliance.check import check
from suite.compliance.result import Result
from suite.errors import InputError
from suite.exit_codes import ExitCode
from suite.files import print_line, printable, write_whole
from suite.log.energy.carbon import Carbon, read_carbon
from suite.log.energy.keys import SCOPES
from suite.log.energy.score import EnergyToSolution, RunEnergy
from suite.log.reader import read_events
from suite.log.record import summarise
from suite.log.run_folder import RunFolder
from suite.machine.power.sampler import file_name
from suite.machine.power.sources import read_readings, render_estimate, render_power_log

_KWH = 3.6e6
_UNKNOWN_OFFSET = (
    "state --clock-offset (seconds to add to the meter's times) and --clock-bound (how well that is known)"
)


@click.group(cls=Subcommands)
def energy() -> None:
    """Show the energy to solution of runs and results, in joules, and import readings of other meters.

    \b
    Examples:
      mlhpc energy show runs/cosmoflow-mini-20260101T120000Z
      mlhpc energy import pdu.csv --run runs/cosmoflow-mini-20260101T120000Z --current AC --scope node
    """


@energy.command()
@card_option
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--price", metavar="NUMBER", type=float, help="Price of a kWh, in the unit of your choice.")
@click.option("--carbon", metavar="G|FILE", help="Grams of CO2 per kWh, or a CSV of hours and grams (docs/energy.md).")
@format_option()
def show(paths: tuple[Path, ...], price: float | None, carbon: str | None, style: str) -> None:
    """Show the energy of results: of each run, and of those that the time score keeps, with its 95 % interval.

    Exit code 0 if every result here has a score of energy, 1 if not.
    """
    if price is not None and not 0.0 < price < 1e9:
        raise InputError(f"--price {price}: expected more than 0 per kWh")
    factor = read_carbon(carbon) if carbon is not None else None
    found = [(each, each.energy) for each in check(list(paths)).results]
    if style == JSON:
        print_line(json.dumps({"version": 1, "groups": [as_dict(*item, price, factor) for item in found]}, indent=1))
    else:
        for item in found:
            print_line("\n".join(map(printable, lines(*item, price, factor))))
    if not found or not all(item is not None and item.valid for _, item in found):
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def as_dict(
    scored: Result, result: EnergyToSolution | None, price: float | None, carbon: Carbon | None
) -> dict[str, Any]:
    """The JSON form of one result; a number that does not exist is null."""
    head = {"path": str(scored.group.folder), "valid": result is not None and result.valid}
    if result is None:
        return head | {"reason": "no power readings and no counters"}
    return head | {
        "reason": result.reason,
        "joules": result.mean_j,
        "interval95_j": result.interval_j,
        "scope": result.scope,
        "current": result.current,
        "nodes": result.nodes,
        "interconnect_estimated": result.estimated,
        "seconds": result.mean_s,
        "joule_seconds": result.delay_product_js,
        "watts_per_node": result.watts_per_node,
        "joules_per_sample": result.joules_per_sample,
        "idle_share": result.idle_share,
        "phases_j": dict(result.phases),
        "cost": None if price is None or result.mean_j is None else price * result.mean_j / _KWH,
        "carbon_g": _grams(scored, result, carbon),
        "carbon_source": carbon.source if carbon else None,
        "run_list": [_run_dict(run, result) for run in result.runs],
    }


def lines(scored: Result, result: EnergyToSolution | None, price: float | None, carbon: Carbon | None) -> list[str]:
    """One result for a terminal."""
    text = [str(scored.group.folder)]
    if result is None:
        return [*text, "  no power readings and no counters: docs/energy.md says how to measure"]
    if result.mean_j is None:
        return [*text, f"  no energy: {result.reason}", *_run_lines(result.runs, result)]
    low_high = result.interval_j
    between = f", 95 % [{low_high[0]:.6g}, {low_high[1]:.6g}]" if low_high else ", no interval: too few readings"
    text.append(
        f"  {result.mean_j:.6g} J ({result.mean_j / _KWH:.4g} kWh), {result.what}, n={len(result.kept)}{between}"
    )
    if result.reason:
        text.append(f"  {result.reason}")
    if result.estimated:
        text.append("  the network is estimated: stated power x time")
    if scored.scale_factor:
        text.append(f"  with the shipped scaling.json {result.mean_j * scored.scale_factor:.6g} J")
    text.append(f"  {_derived(result)}")
    if result.phases:
        text.append(
            "  nodes by phase: " + ", ".join(f"{name} {joules:.4g} J" for name, joules in result.phases.items())
        )
    if price is not None:
        text.append(f"  {price * result.mean_j / _KWH:.4g} at {price:g} a kWh")
    if carbon is not None and (grams := _grams(scored, result, carbon)) is not None:
        text.append(f"  {grams:.4g} g CO2 by {carbon.source}; making of the machine and cooling not in it")
    return [*text, *_run_lines(result.runs, result)]


def _derived(result: EnergyToSolution) -> str:
    parts = [f"{result.watts_per_node:.5g} W a node" if result.watts_per_node else ""]
    parts.append(f"energy x delay {result.delay_product_js:.5g} J s" if result.delay_product_js else "")
    parts.append(f"{result.joules_per_sample:.4g} J a sample" if result.joules_per_sample else "")
    known = result.idle_share is not None
    parts.append(f"idle power would be {result.idle_share:.0%} of it" if known else "idle power not measured")
    return ", ".join(filter(None, parts))


def _run_lines(runs: Sequence[RunEnergy], result: EnergyToSolution) -> list[str]:
    rows = []
    for run in runs:
        name = run.path.name if run.path else "?"
        kept = "" if run.path in result.kept else ", not in the score"
        half = f" ± {run.halfwidth_j:.3g}" if run.halfwidth_j is not None else ""
        number = f"{run.joules:.6g}{half} J" if run.joules is not None else "no energy"
        rows.append(f"    {name}  {number}{kept}{f': {run.reason}' if run.reason else ''}")
    return rows + [f"    note: {note}" for note in dict.fromkeys(note for run in runs for note in run.notes)][:8]


def _run_dict(run: RunEnergy, result: EnergyToSolution) -> dict[str, Any]:
    return {
        "file": run.path.name if run.path else None,
        "kept": run.path in result.kept,
        "joules": run.joules,
        "nodes_j": run.nodes_j,
        "interconnect_j": run.interconnect_j,
        "halfwidth95_j": run.halfwidth_j,
        "uncovered_s": run.uncovered_s,
        "reason": run.reason,
        "notes": list(run.notes),
    }


def _grams(scored: Result, result: EnergyToSolution, carbon: Carbon | None) -> float | None:
    """Grams of CO2 of the mean run, each kept run by the hours in which it ran."""
    if carbon is None or not result.kept:
        return None
    by_path = {run.path: run for run in result.runs}
    grams = []
    for record in scored.runs:
        run = by_path.get(record.path)
        if run is not None and run.path in result.kept and run.joules is not None:
            start = record.run_start_s or 0.0
            grams.append(run.joules / _KWH * carbon.mean(start, start + run.seconds))
    return sum(grams) / len(grams) if grams else None


@energy.command(name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--run", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="Run folder.")
@click.option("--trial", type=click.IntRange(0), default=0, show_default=True, help="Which run of the folder.")
@click.option("--node", type=click.IntRange(0), default=0, show_default=True, help="Number of the node.")
@click.option("--scope", type=click.Choice(SCOPES), help="What the meter sees; needed where its file does not say.")
@click.option("--current", type=click.Choice(["AC", "DC"]), required=True, help="Before or behind the supply.")
@click.option("--accuracy", type=click.FloatRange(0, 1), help="Of a reading, as a share: 0.01 is 1 %.")
@click.option("--rating", type=click.FloatRange(0, min_open=True), help="What the supplies are rated for, in W.")
@click.option("--duty", type=click.FloatRange(0, 1, min_open=True), help="Share of the time that the sensor looks.")
@click.option("--clock-offset", type=float, help="Seconds to add to the meter's times.")
@click.option("--clock-bound", type=click.FloatRange(0), help="How well the offset is known, in s.")
def import_(
    file: Path,
    run: Path,
    trial: int,
    node: int,
    scope: str | None,
    current: str,
    accuracy: float | None,
    rating: float | None,
    duty: float | None,
    clock_offset: float | None,
    clock_bound: float | None,
) -> None:
    """Bring the readings of a meter into a run folder, in the official form: power/result_<trial>/node_<node>.txt.

    FILE is a CSV of times and watts (PDU, IPMI, jpwr), the text of ipmitool, Redfish JSON, sacct's ConsumedEnergyRaw, or an
    official power log. Times without a zone are UTC. A file that is there already is never written over.
    """
    folder = RunFolder(run)
    folder.read_info()
    log = folder.result(trial)
    if not log.is_file():
        raise InputError(f"{log}: no such run; expected --trial of one of {len(folder.results())} logs")
    readings = read_readings(file)
    sees = scope or readings.scope
    if sees is None:
        raise InputError(f"{file}: says not what the meter sees; expected --scope {'|'.join(SCOPES)}")
    if (clock_offset is None) != (clock_bound is None):
        raise InputError(f"--clock-offset and --clock-bound: give both: {_UNKNOWN_OFFSET}")
    given = {"accuracy": accuracy, "rating_w": rating, "duty": duty}
    given |= {"clock_offset_s": clock_offset, "clock_bound_s": clock_bound}
    stated = {"scope": sees, "measurement_type": current} | {
        name: item for name, item in given.items() if item is not None
    }
    others = list(folder.power(log).glob(f"node_{node}.txt"))
    target = folder.power(log) / file_name(node, sees, widest=not others or sees in ("node", "rack"))
    try:
        write_whole(target, render_power_log(readings, stated), overwrite=False)
    except FileExistsError:
        raise InputError(f"{target}: exists already; readings are never written over (move it away first)") from None
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None
    print_line(f"{target}: {len(readings.points)} readings ({readings.form})")
    _warn(log, readings.points, clock_offset)


@energy.command()
@click.argument("watts", type=click.FloatRange(0, 1e9, min_open=True))
@click.option("--run", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="Run folder.")
@click.option("--switch", type=click.IntRange(0), default=0, show_default=True, help="Number of the switch.")
def network(watts: float, run: Path, switch: int) -> None:
    """State the estimated power of a switch or network: highest specified power times the share that the runs were provided.

    It is written for every run of the folder that has power readings, as interconnect_power_est, and counts over the run's time.
    """
    folder = RunFolder(run)
    folder.read_info()
    logs = [log for log in folder.results() if folder.power(log).is_dir()]
    if not logs:
        raise InputError(f"{run}: no run has power readings; the network alone is no energy")
    for log in logs:
        start = summarise(read_events(log, steps=False)).run_start_s or 0.0
        target = folder.power(log) / f"sw_{switch}.txt"
        try:
            write_whole(target, render_estimate(watts, start), overwrite=False)
        except FileExistsError:
            raise InputError(f"{target}: exists already; it is never written over (move it away first)") from None
        print_line(f"{target}: {watts:g} W, estimated")


def _warn(log: Path, points: Sequence[tuple[float, float]], offset: float | None) -> None:
    """Say what the checker will find: a window that does not fit, an unknown clock."""
    record = summarise(read_events(log, steps=False))
    begin, end = (points[0][0] + (offset or 0.0), points[-1][0] + (offset or 0.0))
    start, stop = record.run_start_s, record.run_stop_s
    if start is not None and stop is not None and (begin > start or end < stop):
        text = f"the readings are from {begin - start:+.1f} s after run_start to {end - stop:+.1f} s after run_stop"
        print_line(f"mlhpc: {text}: they do not cover the run", error=True)
    if offset is None:
        print_line(f"mlhpc: the meter's clock is not known (rule power-clock): {_UNKNOWN_OFFSET}", error=True)
