"""The command `mlhpc preflight`. Its `node` and `links` measure the nodes of an allocation, within a stated time
whatever happens.

`judge` finds the slow ones at a stated false-alarm rate. The other commands have files of their own.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlhpc.plugins.fleet import slow_nodes
from mlhpc.plugins.fleet.outliers import MIN_FOR_SPREAD
from mlhpc.plugins.fleet.samples import Metric, group_by_metric, read_ceilings, read_history, read_samples
from mlhpc.plugins.fleet.select import select
from mlhpc.plugins.fleet.simulate import simulate_
from mlhpc.plugins.fleet.slow_nodes import LEAST_FACTOR, MetricReport
from mlhpc.plugins.fleet.watch import watch
from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import (
    JSON,
    FiniteRange,
    IntegerRange,
    PercentRange,
    device_option,
    format_option,
    output_option,
    ranks_option,
    render_option_words,
)
from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import (
    make_folder,
    print_line,
    render_duration,
    render_printable,
    write_file_atomically,
    write_file_of_folder,
)
from mlhpc.suite.launch.command_on_ranks import run_as_rank, start_ranks
from mlhpc.suite.machine.facts import END_METRIC, Sample, render_samples
from mlhpc.suite.node_list import parse_node_list

if TYPE_CHECKING:
    from mlhpc.suite.world import World


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SAMPLES = click.Path(exists=True, path_type=Path)
BUDGET_S = 20
SHORTEST_S = 5  # starting the ranks alone takes seconds
END_GRACE_S = 2.0  # of the time: to write the files and to end
END_STAGE = "the end"  # what the ranks say last
STAGE_PREFIX = "at: "  # begins the lines by which ranks say what comes next
SIZE = "smoke"  # of the workloads whose steps are measured


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc preflight node --ranks 2 -o preflight
  mlhpc preflight judge preflight
  mlhpc preflight judge today.jsonl --history last-week.jsonl --ceilings ceilings.json
  mlhpc preflight watch times.csv
  mlhpc preflight select --nodes nodes.csv --checks checks.yaml --job 24h
  mlhpc preflight simulate --fleet rsc-1 --degraded 10%
""",
)
def preflight() -> None:
    """Find slow nodes before a run: measure each node, then judge them at a stated false-alarm rate."""


budget_option = click.option(
    "--budget",
    type=IntegerRange(SHORTEST_S, 3600),
    default=BUDGET_S,
    show_default=True,
    metavar="SECONDS",
    help="Total time limit in seconds, start-up included; unfinished measurements are stopped.",
)
rounds_option = click.option(
    "--rounds", type=IntegerRange(1), help="Stop after this many repetitions. [as many as fit into --budget]"
)


@click.command(
    epilog="""\b
Examples:
  mlhpc preflight node --ranks 2 -o preflight           this machine
  srun --ntasks-per-node=1 mlhpc preflight node --ranks 4 --directory "$TMPDIR" -o preflight
"""
)
@ranks_option()
@device_option()
@budget_option
@rounds_option
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Measure storage in this folder; take the one to which data are staged. [$TMPDIR, else the output folder]",
)
@click.option(
    "--workload",
    "names",
    multiple=True,
    help="Time training steps only of this workload; repeatable. [all with a smoke data set]",
)
@output_option("Folder for one file NODE.jsonl per node.", "preflight")
@click.option("--started-at", type=FiniteRange(), hidden=True, help="For the ranks: when the command began.")
def node(
    ranks: int,
    device: str,
    budget: int,
    rounds: int | None,
    directory: Path | None,
    names: tuple[str, ...],
    output: Path | None,
    started_at: float | None,
) -> None:
    """Measure this node alone: GEMM, memory, caches, storage, collectives within the node, training steps.

    Under srun every task measures its own node. If a node hangs, it is stopped at the time limit, and its file says
    where. Training steps need the smoke data sets.

    Products, convolutions, sums and files are checked too: wrong is not slow.

    Exit code 0: measured. Exit code 1: stopped before the end. Exit code 2: usage. Exit code 5: a result is wrong.
    """
    from mlhpc.suite.launcher import find_launch
    from mlhpc.suite.world import find_node_name

    folder = output or Path("preflight")
    path = folder / f"{find_node_name()}.jsonl"
    storage = directory or Path(os.environ.get("TMPDIR") or folder)
    if started_at is not None:  # this process is a rank, started below
        left = budget - END_GRACE_S - (time.time() - started_at)

        def body(world: World) -> None:
            _measure_node(world, device, storage, names, left, rounds, path)

        sys.exit(run_as_rank(find_launch(), lambda: None, body))
    for name in names:
        load_descriptor(name)
    make_folder(folder)
    if path.exists():
        raise InputError(f"{path}: exists already; choose another folder with -o")
    begin = time.time()
    words = render_option_words(
        {
            **{"--ranks": ranks, "--device": device, "--budget": budget, "--rounds": rounds},
            **{"--directory": storage, "--workload": names, "-o": folder, "--started-at": begin},
        }
    )
    code, where, at = _start_node(words, ranks, begin, budget)
    took = at - begin
    why = "" if code == 0 else _explain_end(took, budget, where)
    _write_end(path, find_node_name(), took, budget, why)
    print_line(f"{path}: {'measured' if code == 0 else why} ({render_duration(took)})", error=code != 0)
    wrong = [sample for sample in read_samples(path) if sample.severity]
    for sample in wrong:
        print_line(f"{sample.node}: {sample.severity}: {sample.metric}: {sample.failed}", error=True)
    if any(sample.severity != "watch" for sample in wrong):
        sys.exit(ExitCode.WRONG)
    sys.exit(ExitCode.FAILED if code else ExitCode.OK)


def _explain_end(took: float, budget: int, where: str) -> str:
    """Say that the time limit ended the measurement, or that it ended before that, and at what."""
    if took >= budget - 0.5:  # the ranks are ended a moment before
        return f"the time limit of {render_duration(budget)} (--budget) ended it at {where}"
    return f"ended after {render_duration(took)} of {render_duration(budget)}, at {where}"


def _start_node(words: list[str], ranks: int, begin: float, budget: int) -> tuple[int, str, float]:
    """Run the ranks of this node; return their exit code, where they ended, and when."""
    where, at = "its start", begin

    def hear(line: str) -> None:
        nonlocal where, at
        if line.startswith(STAGE_PREFIX):
            where, at = line.removeprefix(STAGE_PREFIX), time.time()
        else:
            print_line(line)

    # The budget includes what has passed since the command began.
    limit_s = budget - (time.time() - begin)
    code = start_ranks(["preflight", "node", *words], ranks, limit_s=limit_s, echo=hear)
    if where == END_STAGE:  # all is measured and written: only the end of the processes was late
        return 0, where, at
    return code, where, time.time()


@click.command(
    epilog="""\b
Examples:
  srun --mpi=pmi2 --ntasks-per-node=1 mlhpc preflight links -o preflight
"""
)
@device_option()
@budget_option
@rounds_option
@output_option("Folder for links.jsonl.", "preflight")
def links(device: str, budget: int, rounds: int | None, output: Path | None) -> None:
    """Measure the links between nodes and the offsets of their clocks. Start one rank on each node.

    Exit code 0: measured, or there is only one node. Exit code 1: stopped before the end. Exit code 2: usage.
    """
    from mlhpc.suite.launcher import find_launch

    path = (output or Path("preflight")) / "links.jsonl"
    begin, where = time.time(), "the connection of the nodes"

    def late() -> None:
        print_line(f"mlhpc: links between nodes: ended after {render_duration(budget)}, at {where}", error=True)
        os._exit(ExitCode.FAILED)

    def at(text: str) -> None:
        nonlocal where
        where = text

    def check() -> None:
        make_folder(path.parent)
        if path.exists():
            raise InputError(f"{path}: exists already; choose another folder with -o")

    def body(world: World) -> None:
        if world.nodes == 1:
            print_line("one node: there are no links to measure")
            return
        if world.size > world.nodes:
            raise InputError(
                f"{world.size} ranks on {world.nodes} nodes: expected one rank on each (--ntasks-per-node=1)"
            )
        from mlhpc.plugins.fleet.benches import describe_hardware, measure_links
        from mlhpc.suite.training.devices import choose_device

        chosen = choose_device(device, world)
        left = budget - END_GRACE_S - (time.time() - begin)
        measure_links(
            world, hardware=describe_hardware(chosen), device=chosen, seconds=left, rounds=rounds, output=path, at=at
        )

    # A collective with a dead node never returns: only another thread can end this process.
    timer = threading.Timer(budget, late)
    timer.daemon = True
    timer.start()
    try:
        code = run_as_rank(find_launch(), check, body)
    finally:
        timer.cancel()
    sys.exit(code)


def _measure_node(
    world: World, device: str, directory: Path, names: tuple[str, ...], seconds: float, rounds: int | None, path: Path
) -> None:
    """Measure on all ranks of this node; rank 0 writes the file."""
    import torch

    from mlhpc.plugins.fleet.benches import measure_node
    from mlhpc.suite.training.devices import choose_device, compute_threads_per_rank

    torch.set_num_threads(compute_threads_per_rank(world))
    chosen, missing = _select_workloads(names)
    if world.is_first:
        for text in missing:
            print_line(text, error=True)
    measure_node(
        world,
        device=choose_device(device, world),
        directory=directory,
        workloads=chosen,
        seconds=seconds,
        rounds=rounds,
        output=path,
        at=lambda text: print_line(STAGE_PREFIX + text) if world.is_first else None,
        say=lambda text: print_line(text) if world.is_first else None,
    )
    if world.is_first:
        print_line(STAGE_PREFIX + END_STAGE)


def _select_workloads(names: tuple[str, ...]) -> tuple[dict[str, Path], list[str]]:
    """Return the data root by workload whose step can be measured, and a line on each other one.

    InputError if a workload of ``names`` has no data.
    """
    chosen: dict[str, Path] = {}
    missing: list[str] = []
    for name in names or (name for name, each in load_descriptors().items() if each.implementation):
        root = choose_default_data_root(name, SIZE)
        if (root / "manifest.json").is_file():
            chosen[name] = root
        else:
            missing.append(
                f"training step of {name} not measured: no data set in {root}; make it with "
                f"mlhpc data generate {name} --size {SIZE}"
            )
    if names and missing:
        raise InputError(missing[0])
    return chosen, missing


def _write_end(path: Path, name: str, took: float, budget: int, why: str) -> None:
    """Add to the node's file how long measuring took, or why it ended early (``why``)."""
    before = path.read_text() if path.exists() else ""
    end = Sample(
        node=name,
        metric=END_METRIC,
        unit="s",
        better="less",
        values=() if why else (took,),
        bound=float(budget),
        failed=why,
    )
    write_file_atomically(path, before + render_samples([end]))


@click.command()
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
    type=PercentRange(1e-4, 20),
    default=f"{100 * slow_nodes.FALSE_ALARM_RATE:g}%",
    metavar="PERCENT",
    show_default=True,
    help="Probability that a healthy node is called bad, over all its metrics.",
)
@click.option(
    "--effect",
    type=PercentRange(0.1, 90),
    default=f"{100 * slow_nodes.EFFECT:g}%",
    metavar="PERCENT",
    show_default=True,
    help="Smallest slowdown that matters. A node is good if it is slower by less, with 95 % confidence.",
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
    """Call each node in FILES good, bad, inconclusive or wrong; say why, and which slowdown would be found.

    FILES are folders or files of `mlhpc preflight node` (docs/fleet.md), or SuperBench's results.jsonl. No node is
    drained; the last line is an --exclude option for Slurm.

    Exit code 0 if all nodes are good, 5 if one computes wrong results, else 1 if one is bad, 4 if one is inconclusive.
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
    if "wrong" in words:
        raise click.exceptions.Exit(ExitCode.WRONG)
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
    counted: tuple[slow_nodes.Verdict, ...] = ("good", "bad", "inconclusive")
    counted += ("wrong",) if "wrong" in words else ()
    text.append(", ".join(f"{words.count(word)} {word}" for word in counted))
    text += _list_scheduler_lines(found)
    bad = sorted(node for node, word in found.words.items() if word in ("bad", "wrong"))
    if bad:
        # An --exclude of all nodes would leave a job that can never start
        all_bad = len(bad) == len(words)
        text.append("all nodes are bad: none is left" if all_bad else f"to leave them out: --exclude={','.join(bad)}")
    return text


def _list_scheduler_lines(found: slow_nodes.FleetVerdict) -> list[str]:
    """Say of nodes that compute wrong results what to do: isolate after several, reset and measure again after one."""
    wrong = sorted(node for node, word in found.words.items() if word == "wrong")
    isolated = [node for node in wrong if any(why.startswith("isolate") for why in found.reasons[node])]
    once = [node for node in wrong if node not in isolated]
    text = []
    if isolated:
        names = ",".join(isolated)
        text.append(f'wrong results: scontrol update NodeName={names} State=DRAIN Reason="mlhpc: wrong results"')
    if once:
        text.append(f"one wrong result: reset and measure again: {','.join(once)}")
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
        best = sorted(order, key=lambda node: -slow_nodes.WORST_FIRST.index(found.words.get(node, "bad")))
        best = best[:choose]
        if len(best) < choose:
            raise InputError(f"--choose {choose}: expected at most {len(order)}, the number of nodes")
        # In the order of the node list, not of the verdicts
        write_file_of_folder(folder / "chosen", ",".join(node for node in order if node in best) + "\n")
    write_file_of_folder(folder / "verdict.json", json.dumps(convert_verdict_to_dict(found), indent=1) + "\n")


def _add_to_history(folder: Path, samples: Sequence[Sample], found: slow_nodes.FleetVerdict) -> None:
    """Add the samples of nodes that are not bad to a folder, as one new file. Metrics with a bound need no history."""
    kept = [
        each
        for each in samples
        if each.values and each.bound is None and found.words[each.node] not in ("bad", "wrong")
    ]
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


for _command in (links, node, judge, select, watch, simulate_):
    preflight.add_command(_command)
