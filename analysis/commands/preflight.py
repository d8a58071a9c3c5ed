"""The command `mlhpc preflight`: finds slow nodes at a given false-alarm rate, and computes the gain of checks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from analysis.commands.select import select
from analysis.commands.simulate import simulate_
from analysis.commands.watch import watch
from analysis.fleet import slow_nodes
from analysis.fleet.samples import Metric, by_metric, read_samples
from suite.cli.group import Subcommands
from suite.cli.options import JSON, Finite, Whole, format_option, output_option
from suite.documents import YamlSource
from suite.errors import InputError
from suite.exit_codes import ExitCode
from suite.files import make_folder, print_line, printable, write_whole
from suite.machine.node_samples import Sample, render
from suite.node_list import expand_nodes
from suite.plugins import find_plugins, leave_out, reason

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SAMPLES = click.Path(exists=True, path_type=Path)
PARTS = "mlhpc.preflight"  # the entry points of the commands that measure


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc preflight node --ranks 2 -o preflight
  mlhpc preflight judge preflight
  mlhpc preflight judge today.jsonl --history last-week.jsonl --bounds cluster.yaml
  mlhpc preflight watch times.csv
  mlhpc preflight select --nodes spells.csv --checks checks.yaml --job 24h
  mlhpc preflight simulate --fleet rsc-1 --degraded 0.1
""",
)
def preflight() -> None:
    """Find slow nodes before they cost a run: measure each, and judge with a promised rate of false alarms."""


for _plugin in find_plugins(PARTS).values():
    try:
        preflight.add_command(_plugin.point.load())
    except Exception as error:  # foreign code: the other commands are not affected
        leave_out("command", _plugin.point.name, _plugin.package, reason(error))


@preflight.command()
@click.argument("files", nargs=-1, required=True, type=_SAMPLES)
@click.option(
    "--again", multiple=True, type=_SAMPLES, help="A second look at the same nodes: bad is what is bad in both."
)
@click.option("--nodes", "expected", metavar="NODELIST", help="All nodes, as Slurm lists them: n[1-4].")
@click.option(
    "--false-alarms",
    "rate",
    type=Finite(1e-6, 0.2),
    default=slow_nodes.RATE,
    show_default=True,
    help="How often a healthy node may be called bad, over all its metrics.",
)
@click.option(
    "--effect",
    type=Finite(0.001, 0.9),
    default=slow_nodes.EFFECT,
    show_default=True,
    help="A node is good only if it is surely not slower than by this part.",
)
@click.option(
    "--history", multiple=True, type=_SAMPLES, help="Earlier samples of healthy nodes: were all nodes faster?"
)
@click.option(
    "--remember",
    type=click.Path(file_okay=False, path_type=Path),
    help="Add what is not bad to this folder, a --history of next time.",
)
@click.option("--choose", type=Whole(1), metavar="N", help="With -o: write the N best nodes to OUTPUT/chosen.")
@output_option("Folder; gets verdict.json.", "none")
@click.option("--bounds", type=_FILE, help="YAML file: the worst value that a metric may have, METRIC: NUMBER.")
@format_option()
def judge(
    files: tuple[Path, ...],
    again: tuple[Path, ...],
    expected: str | None,
    rate: float,
    effect: float,
    history: tuple[Path, ...],
    remember: Path | None,
    choose: int | None,
    output: Path | None,
    bounds: Path | None,
    style: str,
) -> None:
    """Say of every node in FILES whether it is good, bad or inconclusive, why, and what slowdown would have been found.

    FILES are folders or files of `preflight node`, with one JSON object per node and metric (docs/fleet.md), or
    SuperBench's results.jsonl. Nothing is drained: the line for Slurm's --exclude is printed.

    Exit code 0 if all nodes are good, 1 if one is bad, 4 if one is inconclusive.
    """
    if choose is not None and output is None:
        raise click.UsageError("--choose writes to the folder of -o: give it too")
    nodes = expand_nodes(expected) if expected is not None else ()
    looks = [_samples(files), *([_samples(again)] if again else [])]
    known = _history(history)
    metrics = [by_metric(samples) for samples in looks]
    limits = _bounds(bounds, [metric for of_look in metrics for metric in of_look])
    verdicts = [
        slow_nodes.judge(of_look, rate=rate, effect=effect, history=known, bounds=limits, nodes=nodes)
        for of_look in metrics
    ]
    found = verdicts[0] if len(verdicts) == 1 else slow_nodes.look_again(*verdicts)
    if output is not None:
        _keep(output, found, nodes, choose)
    if remember is not None:
        _remember(remember, looks[-1], found)
    if style == JSON:
        print_line(json.dumps(as_dict(found), indent=1))
    else:
        print_line("\n".join(map(printable, lines(found))))
    words = set(found.words.values())
    if "bad" in words:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if "inconclusive" in words:
        raise click.exceptions.Exit(ExitCode.INCONCLUSIVE)


def lines(found: slow_nodes.FleetVerdict) -> list[str]:
    """Render the verdict: metrics, nodes that are not good with their reasons, and the option for Slurm."""
    text = [
        f"false alarms: {found.rate:g} per node over all metrics (nodes differ normally; repetitions with "
        "the tails seen, beyond them no heavier than Student's t3; fewer than 8 nodes: nodes that differ by less than "
        f"half of the effect); a good node is surely not {found.effect:.0%} slower, a bad one surely is"
    ]
    text += [_metric_line(report, found.effect) for report in found.metrics if report.repeats is not None]
    alone = {report.metric.name for report in found.metrics if report.repeats is None}
    if alone:
        text.append(f"  too few nodes to compare: {', '.join(sorted(alone))}")
    text += [f"  warning: {warning}" for warning in found.warnings]
    for node in sorted(found.words):
        if found.words[node] != "good":
            text.append(f"{node}: {found.words[node]}")
            text += [f"  {reason}" for reason in found.reasons[node]]
    if found.alike:
        text.append("alike; whether all are slow was not asked: give --history or --bounds")
    words = list(found.words.values())
    text.append(", ".join(f"{words.count(word)} {word}" for word in ("good", "bad", "inconclusive")))
    bad = sorted(node for node, word in found.words.items() if word == "bad")
    if bad:
        text.append(f"to leave them out: --exclude={','.join(bad)}")
    return text


def _metric_line(report: slow_nodes.MetricReport, effect: float) -> str:
    """Render a metric whose nodes could be compared: the sizes of its groups, its spread and its power."""
    slow, middle, fast = report.clusters
    kind = f" on {report.metric.hardware}" if report.metric.hardware else ""
    repeats = report.repeats or 0.0
    spread = f"{repeats:.2%}" if repeats < slow_nodes.MANY else f"a factor of {1 + repeats:.3g}"
    sure = "no slowdown would be found"
    if report.found is not None:
        sure = f"a slowdown of {report.found:.1%} is found 9 times in 10"
    return (
        f"  {report.metric.name}{kind}: {middle} alike, {slow} slower, {fast} faster; spread between nodes {spread}; "
        f"{sure}, of {effect:.0%} with probability {report.power:.2f}"
    )


def as_dict(found: slow_nodes.FleetVerdict) -> dict[str, Any]:
    """Render the verdict as data for JSON."""
    return {
        "version": 1,
        "false_alarms": found.rate,
        "effect": found.effect,
        "nodes": {node: {"word": word, "reasons": found.reasons[node]} for node, word in sorted(found.words.items())},
        "metrics": [
            {
                "metric": report.metric.name,
                "hardware": report.metric.hardware,
                "spread_between_nodes": report.repeats,
                "found_9_in_10": report.found,
                "power": report.power,
                "slower_alike_faster": report.clusters,
                "slower": {each.node: each.slower for each in report.verdicts},
            }
            for report in found.metrics
        ],
        "warnings": found.warnings,
    }


def _keep(folder: Path, found: slow_nodes.FleetVerdict, nodes: Sequence[str], choose: int | None) -> None:
    """Write the verdict, and with ``choose`` the names of the best nodes in their order, with commas between them."""
    if choose is not None:
        order = list(nodes or sorted(found.words))
        # A node without a verdict left no samples
        best = sorted(order, key=lambda node: ("good", "inconclusive", "bad").index(found.words.get(node, "bad")))
        best = best[:choose]
        if len(best) < choose:
            raise InputError(f"--choose {choose}: there are {len(order)} nodes")
        write_whole(folder / "chosen", ",".join(node for node in order if node in best) + "\n")
    write_whole(folder / "verdict.json", json.dumps(as_dict(found), indent=1) + "\n")


def _remember(folder: Path, samples: Sequence[Sample], found: slow_nodes.FleetVerdict) -> None:
    """Add the samples of nodes that are not bad to a folder, as one new file. Metrics with a bound need no history."""
    kept = [each for each in samples if each.values and each.bound is None and found.words[each.node] != "bad"]
    if kept:
        make_folder(folder)
        write_whole(folder / f"{time.time_ns()}.jsonl", render(kept), overwrite=False)


def _samples(files: Iterable[Path]) -> list[Sample]:
    return [sample for path in files for sample in read_samples(path)]


def _history(files: Sequence[Path]) -> Mapping[tuple[str, str], Sequence[float]]:
    """Collect earlier node values, each the median of its repetitions, by (hardware, metric)."""
    # A folder without samples is a history that begins today
    found: dict[tuple[str, str], list[float]] = {}
    for sample in _samples(path for path in files if not path.is_dir() or any(path.glob("*.jsonl"))):
        if sample.failed:
            continue
        value = math.exp(slow_nodes.node_value(sample.values, "less"))
        found.setdefault((sample.hardware, sample.metric), []).append(value)
    return found


def _bounds(path: Path | None, metrics: Sequence[Metric]) -> Mapping[str, float]:
    if path is None:
        return {}
    source = YamlSource.read(path)
    known = {metric.name for metric in metrics}
    for name, value in source.data.items():
        line = source.lines.get((name,), 1)
        if name not in known:
            raise InputError(f"{path}:{line}: no sample of {name!r}; metrics: {', '.join(sorted(known))}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise InputError(f"{path}:{line}: {name} = {value!r}: expected a positive number")
    return source.data


preflight.add_command(select)
preflight.add_command(watch)
preflight.add_command(simulate_)
