"""`mlhpc workload rcp`: records reference convergence points from runs with many seeds, and shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from mlhpc.suite import RULESET
from mlhpc.suite.card import RCP_VERSION, ReferencePoint, ReferencePoints, read_reference_points
from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import JSON, card_option, format_option, output_option
from mlhpc.suite.compliance import rcp_limit
from mlhpc.suite.compliance.ruleset import Benchmark, build_card_benchmark, read_ruleset
from mlhpc.suite.descriptor import Descriptor, load_descriptor, load_descriptors
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line, write_file_atomically
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, find_first_on_target, summarise_log
from mlhpc.suite.log.results_tree import find_results
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.log.score import find_failure
from mlhpc.suite.machine.facts import read_facts


@click.group(cls=Subcommands)
def rcp() -> None:
    """Record and show reference convergence points: epochs to the target for each batch size, over many seeds.

    \b
    Examples:
      mlhpc workload rcp record runs/cosmoflow-mini-*
      mlhpc workload rcp show cosmoflow
    """


@rcp.command()
@card_option
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@output_option("Folder of the JSON file.", "rcp/ of the workload")
def record(runs: tuple[Path, ...], output: Path | None) -> None:
    """Record the epochs that the runs under RUNS needed: one point per batch size in <workload>/rcp/<size>.json.

    Points of other batch sizes in the file stay. Use runs on data sets of several seeds (mlhpc data generate --seed).
    Seeds of runs alone spread less than seeds of data.
    """
    logs = [
        summarise_log(read_events(path)) for run in runs for group in find_results(run).groups for path in group.logs
    ]
    if not logs:
        raise InputError(
            f"no result_*.txt under {', '.join(map(str, runs))}; expected run folders of one workload and size"
        )
    descriptor, size = _find_subject(logs)
    folder = descriptor.folder if output is None else output
    system = next((text for run in runs if (text := _read_system(run))), "unknown")
    points = _compute_points(logs, build_card_benchmark(descriptor, size), system)
    recorded = read_reference_points(folder, size)
    # New points replace old ones of the same batch size.
    earlier = {point.global_batch_size: point for point in recorded.points} if recorded else {}
    merged = tuple(point for _, point in sorted((earlier | points).items()))
    document = ReferencePoints(version=RCP_VERSION, workload=descriptor.name, size=size, points=merged)
    path = folder / "rcp" / f"{size}.json"
    write_file_atomically(path, json.dumps(convert_to_plain_data(document), indent=1) + "\n")
    useful = rcp_limit.count_useful_runs(
        descriptor.card().size(size).required_runs, read_ruleset(RULESET).data.rcp_confidence
    )
    for point in points.values():
        more = f"; {useful} runs would show more cut epochs" if len(point.epochs) < useful else ""
        print_line(f"{_render_point(point)}{more}")
    print_line(f"{path}: written")


@rcp.command()
@card_option
@click.argument("workload")
@format_option()
def show(workload: str, style: str) -> None:
    """Show the reference points of WORKLOAD, and the fewest epochs that a submission may need."""
    descriptor = load_descriptor(workload)
    if style == JSON:
        known_points = [read_reference_points(descriptor.folder, size) for size in descriptor.card().sizes]
        print_line(json.dumps([convert_to_plain_data(points) for points in known_points if points], indent=1))
        return
    for size, card in descriptor.card().sizes.items():
        known = read_reference_points(descriptor.folder, size)
        print_line(f"{workload} {size}: {card.metric} target {card.threshold:g}" + ("" if known else ": none recorded"))
        epochs = {point.global_batch_size: point.epochs for point in known.points} if known else {}
        for point in known.points if known else ():
            batch, confidence = point.global_batch_size, read_ruleset(RULESET).data.rcp_confidence
            apart = card.between_evals(batch)
            bound = rcp_limit.compute_limit(epochs, batch, card.required_runs, confidence, between_evals=apart)
            least = (
                f", a submission needs at least {bound.minimum:.3f}: it would not show if {bound.unseen:.3g} were missing"
                if bound
                else ""
            )
            print_line(f"  {_render_point(point)}{least}")


def compute_reference_point(logs: Sequence[RunRecord], benchmark: Benchmark, system: str) -> ReferencePoint:
    """Compute the reference point of logs of one batch size. InputError for equal seeds or other settings."""
    first = logs[0]
    epochs: list[float] = []
    seeds: list[int] = []
    data: list[str] = []
    not_converged: list[int] = []
    for item, seed in zip(logs, _require_distinct_seeds(logs), strict=True):
        if dict(item.hyperparameters) != dict(first.hyperparameters):
            raise InputError(
                f"{item.path}: hyperparameters differ from those of {first.path}; record runs with the same settings"
            )
        reached = find_first_on_target(item, benchmark)
        if find_failure(item, benchmark) is None and reached is not None and reached.epoch is not None:
            epochs.append(reached.epoch)
            seeds.append(seed)
            data.append(item.data_manifest or "unknown")
        else:
            not_converged.append(seed)
    # The date of the newest run: the same logs give the same file on any day.
    latest = max(item.run_stop_s or 0.0 for item in logs)
    return ReferencePoint(
        global_batch_size=first.global_batch_size or 0,
        epochs=tuple(epochs),
        seeds=tuple(seeds),
        data_manifests=tuple(data),
        not_converged=tuple(not_converged),
        hyperparameters=dict(first.hyperparameters),
        recorded=f"{datetime.fromtimestamp(latest, UTC):%Y-%m-%d}",
        suite_version=first.suite_version or "unknown",
        system=system,
    )


def _require_distinct_seeds(logs: Sequence[RunRecord]) -> list[int]:
    """Return the seed of each run. InputError if two runs have the same seed and data: they are one observation."""
    seeds: list[int] = []
    known: set[tuple[int, str | None]] = set()
    for item in logs:
        if item.seed is None:
            raise InputError(f"{item.path}: the log states no seed; leave this run out")
        if (item.seed, item.data_manifest) in known:
            raise InputError(
                f"{item.path}: another run on the same data has seed {item.seed} too; leave one of them out"
            )
        known.add((item.seed, item.data_manifest))
        seeds.append(item.seed)
    return seeds


def _compute_points(logs: Sequence[RunRecord], benchmark: Benchmark, system: str) -> dict[int, ReferencePoint]:
    """Compute the reference point of each batch size in the logs, by batch size."""
    batches = sorted({item.global_batch_size for item in logs if item.global_batch_size is not None})
    return {
        batch: compute_reference_point([item for item in logs if item.global_batch_size == batch], benchmark, system)
        for batch in batches
    }


def _find_subject(logs: Sequence[RunRecord]) -> tuple[Descriptor, str]:
    """Find the workload and size of all logs. InputError if they differ, or are not installed here."""
    named = {(item.benchmark, item.size) for item in logs}
    if len(named) != 1:
        raise InputError(
            f"the logs are of several benchmarks or sizes: {sorted(map(str, named))}; record each with a command of its own"
        )
    benchmark, size = next(iter(named))
    # Logs name a benchmark by its MLPerf name, not by the workload's.
    workload = next((item for item in load_descriptors().values() if item.card().mlperf_name == benchmark), None)
    if workload is None or size is None:
        raise InputError(
            f"{logs[0].path}: benchmark {benchmark!r} of size {size!r} is not installed here; mlhpc workload list shows what is"
        )
    workload.card().size(size)
    return workload, size


def _read_system(run: Path) -> str | None:
    """Read the processor of the first node of a run folder. None if the folder has no facts."""
    paths = RunFolder(run).node_facts()
    return read_facts(paths[0]).cpu.model if paths else None


def _render_point(point: ReferencePoint) -> str:
    n = len(point.epochs)
    spread = f"{point.mean:.2f} +- {point.std:.2f} epochs" if n else "no seed converged"
    sets = len(set(point.data_manifests))
    where = f" on {sets} data sets" if sets > 1 else ""
    missed = f", {len(point.not_converged)} did not converge" if point.not_converged else ""
    return f"batch {point.global_batch_size}: {spread}, n={n}{where}{missed} ({point.system}, {point.recorded})"
