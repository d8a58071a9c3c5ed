"""The command `mlhpc preflight`: finds slow nodes at a given false-alarm rate, and computes the gain of checks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mlhpc.analysis.commands.select import select
from mlhpc.analysis.commands.simulate import simulate_
from mlhpc.analysis.commands.watch import watch
from mlhpc.analysis.fleet import slow_nodes
from mlhpc.analysis.fleet.levels import read_ceilings, read_history
from mlhpc.analysis.fleet.one_metric import LEAST_FACTOR, MetricReport
from mlhpc.analysis.fleet.samples import Metric, group_by_metric, read_samples
from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import JSON, FiniteRange, IntegerRange, format_option, output_option
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import ExitCode, InputError
from mlhpc.suite.files import make_folder, print_line, render_printable, write_file_atomically
from mlhpc.suite.machine.facts import Sample, render_samples
from mlhpc.suite.node_list import parse_node_list
from mlhpc.suite.plugins import explain_unusable, find_plugins, print_skipped
from mlhpc.suite.statistics.outliers import MIN_FOR_SPREAD

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SAMPLES = click.Path(exists=True, path_type=Path)
COMMAND_ENTRY_POINTS = "mlhpc.preflight"  # the entry points of the commands that measure


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc preflight node --ranks 2 -o preflight
  mlhpc preflight judge preflight
  mlhpc preflight judge today.jsonl --history last-week.jsonl --ceilings ceilings.json
  mlhpc preflight watch times.csv
  mlhpc preflight select --nodes nodes.csv --checks checks.yaml --job 24h
  mlhpc preflight simulate --fleet rsc-1 --degraded 0.1
""",
)
def preflight() -> None:
    """Find slow nodes before a run: measure each node, then judge them at a stated false-alarm rate."""


for _plugin in find_plugins(COMMAND_ENTRY_POINTS).values():
    try:
        preflight.add_command(_plugin.point.load())
    except Exception as error:  # foreign code: the other commands are not affected
        print_skipped("command", _plugin.point.name, _plugin.package, explain_unusable(error))


@preflight.command()
@click.argument("files", nargs=-1, required=True, type=_SAMPLES)
@click.option(
    "--again",
    multiple=True,
    type=_SAMPLES,
    help="Second measurement of the same nodes: then a node is bad only if it is bad in both; repeatable.",
)
@click.option(
    "--nodes",
    "expected",
    metavar="NODELIST",
    help="Nodes that were to be measured, such as n[1-4]; one without samples is bad. [those in FILES]",
)
@click.option(
    "--false-alarms",
    "rate",
    type=FiniteRange(1e-6, 0.2),
    default=slow_nodes.FALSE_ALARM_RATE,
    show_default=True,
    help="Probability that a healthy node is called bad, over all its metrics.",
)
@click.option(
    "--effect",
    type=FiniteRange(0.001, 0.9),
    default=slow_nodes.EFFECT,
    show_default=True,
    help="Smallest slowdown that matters (0.05: 5 %). A node is good if it is slower by less, with 95 % confidence.",
)
@click.option(
    "--history",
    multiple=True,
    type=_SAMPLES,
    help="Earlier samples of healthy nodes (file or folder): a node that is slower than these is bad; repeatable.",
)
@click.option(
    "--ceilings",
    type=_FILE,
    help="File of `mlhpc ceilings`, the highest rates measured; a node below two thirds of one is bad.",
)
@click.option(
    "--remember",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to which the samples of nodes that are not bad are added, to use as --history next time.",
)
@click.option(
    "--choose", type=IntegerRange(1), metavar="N", help="With -o: write the names of the N best nodes to OUTPUT/chosen."
)
@output_option("Folder in which to write verdict.json, the verdict as data.", "none")
@click.option(
    "--bounds",
    type=_FILE,
    help="YAML file with lines METRIC: NUMBER, the worst allowed values; a node beyond one is bad.",
)
@format_option()
def judge(
    files: tuple[Path, ...],
    again: tuple[Path, ...],
    expected: str | None,
    rate: float,
    effect: float,
    history: tuple[Path, ...],
    ceilings: Path | None,
    remember: Path | None,
    choose: int | None,
    output: Path | None,
    bounds: Path | None,
    style: str,
) -> None:
    """Call each node in FILES good, bad or inconclusive; say why, and which slowdown would be found.

    FILES are folders or files of `mlhpc preflight node` (docs/fleet.md), or SuperBench's results.jsonl. No node is
    drained; the last line is an --exclude option for Slurm.

    Exit code 0 if all nodes are good, 1 if one is bad, 4 if one is inconclusive.
    """
    if choose is not None and output is None:
        raise click.UsageError("--choose writes the names to the folder of -o: state -o FOLDER as well")
    nodes = parse_node_list(expected) if expected is not None else ()
    looks = [_read_sample_files(files), *([_read_sample_files(again)] if again else [])]
    known = read_history(history)
    # Each look apart: a node and metric may occur once in each
    metrics = [group_by_metric(samples) for samples in looks]
    every = [metric for of_look in metrics for metric in of_look]
    # All files are read before anything is judged or written
    limits = _bounds(bounds, every)
    reached, remark = read_ceilings(ceilings, every) if ceilings is not None else ({}, "")
    verdicts = [
        slow_nodes.judge(of_look, rate=rate, effect=effect, history=known, bounds=limits, ceilings=reached, nodes=nodes)
        for of_look in metrics
    ]
    found = verdicts[0] if len(verdicts) == 1 else slow_nodes.merge_verdicts(*verdicts)
    if remark:
        found = replace(found, warnings=(remark, *found.warnings))
    if output is not None:
        _write_verdict(output, found, nodes, choose)
    if remember is not None:
        # The newest look, by the verdict of both
        _add_to_history(remember, looks[-1], found)
    if style == JSON:
        print_line(json.dumps(convert_verdict_to_dict(found), indent=1))
    else:
        print_line("\n".join(map(render_printable, render_verdict(found))))
    words = set(found.words.values())
    if "bad" in words:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if "inconclusive" in words:
        raise click.exceptions.Exit(ExitCode.INCONCLUSIVE)


def render_verdict(found: slow_nodes.FleetVerdict) -> list[str]:
    """Render the verdict: metrics, nodes that are not good with their reasons, and the option for Slurm."""
    text = [
        f"false alarms: a healthy node is called bad with a probability of at most {found.rate:g} over all metrics; "
        f"with the tails seen here, of {found.chance:.1g}",
        f"assumed: {'; '.join(list_assumptions(found))}",
        f"bad: surely more than {found.effect:.0%} slower; good: surely less",
    ]
    text += [_metric_line(report) for report in found.compared]
    alone = {report.metric.name for report in found.metrics if report.repeats is None}
    if alone:
        text.append(f"  too few nodes to compare: {', '.join(sorted(alone))}")
    text += [f"  warning: {warning}" for warning in found.warnings]
    for node in sorted(found.words):
        if found.words[node] != "good":
            text.append(f"{node}: {found.words[node]}")
            text += [f"  {reason}" for reason in found.reasons[node]]
    if found.are_equal:
        text.append(_level_line(found))
    words = list(found.words.values())
    text.append(", ".join(f"{words.count(word)} {word}" for word in ("good", "bad", "inconclusive")))
    bad = sorted(node for node, word in found.words.items() if word == "bad")
    if bad:
        # An --exclude of all nodes would leave a job that can never start
        all_bad = len(bad) == len(words)
        text.append("all nodes are bad: none is left" if all_bad else f"to leave them out: --exclude={','.join(bad)}")
    return text


def list_assumptions(found: slow_nodes.FleetVerdict) -> list[str]:
    """List what the rate of false alarms depends on."""
    few = any(len(report.metric.samples) < MIN_FOR_SPREAD for report in found.compared)
    return [
        "nodes of one hardware are of one kind",
        "they differ no heavier than by Student's t3" if found.heavy else "they differ normally, as their values do",
        *(["fewer than 8 nodes differ by less than half of the effect"] if few else []),
        "repetitions are independent, and late no more often than seen in all metrics",
    ]


def _level_line(found: slow_nodes.FleetVerdict) -> str:
    """Say of a fleet without slow nodes whether all may be slow."""
    count, asked = len(found.metrics), sum(report.has_level for report in found.metrics)
    equal = "The nodes are equal to each other."
    if not asked:
        return f"{equal} Whether all are slow was not asked: give --history, --ceilings or --bounds."
    rest = f" In the other {count - asked}, whether all are slow was not asked." if asked < count else ""
    return f"{equal} In {asked} metrics they are not slower than the history, ceilings or bounds.{rest}"


def _metric_line(report: MetricReport) -> str:
    """Render a metric whose nodes could be compared: the sizes of its groups, its spread and its power."""
    slow, middle, fast = report.clusters
    kind = f" on {report.metric.hardware}" if report.metric.hardware else ""
    repeats = report.repeats or 0.0
    spread = f"{repeats:.2%}" if repeats < LEAST_FACTOR else f"a factor of {1 + repeats:.3g}"
    sure = "no slowdown would be found"
    if report.found is not None:
        sure = f"a slowdown of {report.found:.1%} is found 9 times in 10"
    return (
        f"  {report.metric.name}{kind}: {middle} alike, {slow} slower, {fast} faster; "
        f"spread between nodes {spread}; {sure}"
    )


def convert_verdict_to_dict(found: slow_nodes.FleetVerdict) -> dict[str, Any]:
    """Render the verdict as data for JSON."""
    return {
        "version": 1,
        "false_alarms": found.rate,
        "false_alarms_for_the_tails_seen": found.chance,
        "assumed": list_assumptions(found),
        "effect": found.effect,
        "nodes": {node: {"word": word, "reasons": found.reasons[node]} for node, word in sorted(found.words.items())},
        "metrics": [
            {
                "metric": report.metric.name,
                "hardware": report.metric.hardware,
                "spread_between_nodes": report.repeats,
                "found_9_in_10": report.found,
                "level_was_asked": report.has_level,
                "slower_alike_faster": report.clusters,
                "slower": {each.node: each.slower for each in report.verdicts},
            }
            for report in found.metrics
        ],
        "warnings": found.warnings,
    }


def _write_verdict(folder: Path, found: slow_nodes.FleetVerdict, nodes: Sequence[str], choose: int | None) -> None:
    """Write the verdict, and with ``choose`` the names of the best nodes in their order, with commas between them."""
    if choose is not None:
        order = list(nodes or sorted(found.words))
        # A node without a verdict left no samples
        best = sorted(order, key=lambda node: ("good", "inconclusive", "bad").index(found.words.get(node, "bad")))
        best = best[:choose]
        if len(best) < choose:
            raise InputError(f"--choose {choose}: expected at most {len(order)}, the number of nodes")
        # In the order of the node list, not of the verdicts
        write_file_atomically(folder / "chosen", ",".join(node for node in order if node in best) + "\n")
    write_file_atomically(folder / "verdict.json", json.dumps(convert_verdict_to_dict(found), indent=1) + "\n")


def _add_to_history(folder: Path, samples: Sequence[Sample], found: slow_nodes.FleetVerdict) -> None:
    """Add the samples of nodes that are not bad to a folder, as one new file. Metrics with a bound need no history."""
    kept = [each for each in samples if each.values and each.bound is None and found.words[each.node] != "bad"]
    if kept:
        make_folder(folder)
        # A new file for each measurement, so that jobs that end together do not write into one
        write_file_atomically(folder / f"{time.time_ns()}.jsonl", render_samples(kept), overwrite=False)


def _read_sample_files(files: Iterable[Path]) -> list[Sample]:
    return [sample for path in files for sample in read_samples(path)]


def _bounds(path: Path | None, metrics: Sequence[Metric]) -> Mapping[str, float]:
    if path is None:
        return {}
    source = YamlSource.read(path)
    known = {metric.name for metric in metrics}
    for name, value in source.data.items():
        line = source.lines.get((name,), 1)
        if name not in known:
            raise InputError(f"{path}:{line}: metric {name!r} has no sample; metrics here: {', '.join(sorted(known))}")
        # YAML's "yes" is a bool, which Python counts as an int
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise InputError(f"{path}:{line}: {name} = {value!r}: expected a positive number")
    return source.data


preflight.add_command(select)
preflight.add_command(watch)
preflight.add_command(simulate_)
