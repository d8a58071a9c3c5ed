"""`mlhpc workload list`: prints the installed workloads with their sizes and targets. Reads cards only.

`mlhpc workload new NAME`: writes the skeleton of a workload, a Python package that runs unchanged.

`mlhpc workload card`: counts what a workload's card says of its sizes, and fills in what is not counted yet.

`mlhpc workload rcp`: records reference convergence points from runs with many seeds, and shows them.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlhpc.suite import RULESET
from mlhpc.suite.card import (
    RCP_VERSION,
    Card,
    ReferenceCourse,
    ReferenceCourses,
    ReferencePoint,
    ReferencePoints,
    SizeCard,
    read_reference_courses,
    read_reference_points,
)
from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import JSON, card_option, format_option, output_option, size_option
from mlhpc.suite.compliance import rcp_limit
from mlhpc.suite.compliance.ruleset import Benchmark, build_card_benchmark, read_ruleset
from mlhpc.suite.config import RunConfig, choose_default_data_root, load_config, make_config_kind
from mlhpc.suite.descriptor import Descriptor, load_descriptor, load_descriptors
from mlhpc.suite.documents import YamlSource, convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import align_columns, print_line, quote_path, render_bytes, write_file_atomically
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, find_first_on_target, summarise_log
from mlhpc.suite.log.reference_course import collect_courses, render_reference_course
from mlhpc.suite.log.results_tree import find_results
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.log.score import find_failure
from mlhpc.suite.machine.facts import read_facts

if TYPE_CHECKING:
    from mlhpc.suite.performance.card_counts import CardCounts
    from mlhpc.suite.workload import Work


@click.group(cls=Subcommands)
def workload() -> None:
    """List workloads with sizes and targets, or create one of your own.

    \b
    Examples:
      mlhpc workload list
      mlhpc workload new tides && pip install --no-deps --no-build-isolation -e tides && mlhpc run tides --size smoke
      mlhpc workload card tides
      mlhpc workload rcp record runs/tides-smoke-*
    """


@click.command(
    name="list",
    epilog="""\b
Examples:
  mlhpc workload list
  mlhpc workload list cosmoflow --format json
""",
)
@click.argument("workload", required=False)
@card_option
@format_option()
def list_(workload: str | None, style: str) -> None:
    """List workloads: sizes, targets, required runs, data sizes.

    WORKLOAD shows only that one. Reads cards (metric, target and rules of a workload); imports no training code.
    """
    chosen = [load_descriptor(workload)] if workload else list(load_descriptors().values())
    if style == JSON:
        print_line(json.dumps([convert_to_data(item) for item in chosen], indent=2))
        return
    for number, item in enumerate(chosen):
        print_line("\n" * (number > 0) + "\n".join(render_workload(item)))


def list_configs(item: Descriptor) -> list[str]:
    """List the names of the configs that a workload ships."""
    return sorted(path.stem for path in (item.folder / "config").glob("*.yaml"))


def convert_to_data(item: Descriptor) -> dict[str, Any]:
    """Convert one workload to data for --format json."""
    card = item.card()
    return {
        "workload": card.workload,
        "mlperf_name": card.mlperf_name,
        "title": card.title,
        "domain": card.domain,
        "reference": card.reference,
        "configs": list_configs(item),
        "sizes": {
            name: {
                "description": size_card.description,
                "metric": size_card.metric_name,
                "threshold": size_card.threshold,
                "direction": size_card.direction,
                "required_runs": size_card.required_runs,
                "train_samples": size_card.train_samples,
                "eval_samples": size_card.eval_samples,
                "model_parameters": size_card.model_parameters,
                "training_flops_per_sample": size_card.training_flops_per_sample,
                "data_bytes": size_card.data_bytes,
                "reference_epochs": [point.mean for point in _read_points(item, name)],
            }
            for name, size_card in card.sizes.items()
        },
    }


def render_workload(item: Descriptor) -> list[str]:
    """Render one workload as lines."""
    card = item.card()
    rows = [("size", "target", "best baseline", "runs", "samples", "parameters", "data", "what it is for")]
    for name, size_card in card.sizes.items():
        relation = "<=" if size_card.direction == "min" else ">="
        rows.append(
            (
                name,
                f"{relation} {size_card.threshold:g}",
                _find_best_baseline(size_card),
                str(size_card.required_runs),
                f"{size_card.train_samples:,}",
                f"{size_card.model_parameters:,}",
                render_bytes(size_card.data_bytes),
                size_card.description,
            )
        )
    table = [f"  {line}" for line in align_columns(rows)]
    # All sizes have one metric as a rule; each is named once.
    metrics = "; ".join(dict.fromkeys(size_card.metric_name for size_card in card.sizes.values()))
    title = f"{card.workload}  {card.title} ({card.domain}), measured by {metrics}"
    return [title, *table] if item.implementation else [title, *table, f"  card only: {item.card_path}"]


def _find_best_baseline(card: SizeCard) -> str:
    """Return the metric of the best predictor without a network that does not know the rule of the data."""
    if card.baselines is None:
        return "not measured"
    best = min if card.direction == "min" else max
    return f"{best(card.baselines.metrics().values()):.4g}"


def _read_points(item: Descriptor, size: str) -> list[Any]:
    points = read_reference_points(item.folder, size)
    return [point for point in points.points if point.epochs] if points else []


FILES = {  # file of the skeleton: template
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{name}/__init__.py": "__init__.py",
    "{name}/config.py": "config.py",
    "{name}/data.py": "data.py",
    "{name}/model.py": "model.py",
    "{name}/workload.py": "workload.py",
    "{name}/card.yaml": "card.yaml",
    "{name}/config/smoke.yaml": "smoke.yaml",
    "tests/test_{name}.py": "test.py",
}


@click.command()
@click.argument("name")
@output_option("New folder for the Python package.", "NAME")
def new(name: str, output: Path | None) -> None:
    """Create a workload NAME that runs: a Python package with data, model, card, settings and test to change."""
    _check_name(name)
    root = output or Path(name)
    if root.exists():
        raise InputError(f"{root}: exists already; choose another folder with -o")
    import jinja2  # here, because `mlhpc workload list` imports this module and would wait for it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mlhpc.suite.commands", "skeleton"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  a name of letters, digits and _, in Python and YAML
    )
    for path, template in FILES.items():
        write_file_atomically(
            root / path.format(name=name), environment.get_template(f"{template}.j2").render(name=name)
        )
    print_line(f"{root}: written; next:")
    print_line(f"  {Path(sys.executable).name} -m pip install --no-deps --no-build-isolation -e {quote_path(root)}")
    print_line(f"  mlhpc data generate {name} --size smoke && mlhpc run {name} --size smoke --runs 3")


def _check_name(name: str) -> None:
    """Raise InputError if no package can have the name, or if an installed module or workload has it."""
    if not name.isidentifier() or not name.isascii() or not name.islower() or keyword.iskeyword(name):
        raise InputError(f"{name!r}: expected the name of a Python package: lower-case letters, digits and _")
    if name in load_descriptors() or name in sys.stdlib_module_names or name == "mlhpc":
        raise InputError(f"{name!r}: is the name of an installed workload or module; choose another")


EXACT_KEYS = ("train_samples", "eval_samples", "model_parameters")  # counted, so equal or wrong
FORWARD, TRAINING = "forward_flops_per_sample", "training_flops_per_sample"
COUNTED_KEYS = (*EXACT_KEYS, FORWARD, TRAINING, "sample_bytes")
REL_TOLERANCE = 0.01  # the checker allows as much between the FLOPs of a log and those of the card


@click.command(
    epilog="""\b
Example:
  mlhpc workload card myworkload --size smoke
"""
)
@click.argument("workload")
@size_option(None, "Count only this size. [every size with a count of 0]")
@output_option("Card file to write.", "the workload's own, in place")
def card(workload: str, size: str | None, output: Path | None) -> None:
    """Count the FLOPs, parameters and bytes of WORKLOAD by running one step. Fill in or check the counts of its card.

    Counts that are 0 in the card are filled in; the others are compared. A size is counted with its own settings and
    data set, which is generated if there is none. Comments in the card stay.

    A card states the FLOPs of the model for a sample of mean size. The code also executes the FLOPs of losses, padding
    and recomputation. So the counted FLOPs are compared with the workload's formula for executed FLOPs. The card is
    compared with its formula for the model.

    Exit code 0: filled in, or every count is right (FLOPs and bytes within 1 %). Exit code 1: a count is wrong, and was
    not changed. Exit code 2: usage.
    """
    chosen = load_descriptor(workload)
    chosen.code()
    if size is not None:
        wanted = {size: chosen.card().size(size)}
    else:
        wanted = {name: entry for name, entry in chosen.card().sizes.items() if _is_incomplete(entry)}
    if not wanted:
        print_line(
            f"{chosen.card_path}: every count is there; --size NAME counts that size again; a count of 0 is filled in"
        )
        return
    source = YamlSource.read(chosen.card_path)
    before = text = chosen.card_path.read_text(encoding="utf-8")
    wrong = False
    for name, entry in wanted.items():
        counts = _count_size(chosen, load_config(chosen, name))
        wrong |= not _compare_counts(f"{workload} {name}", entry, counts)
        for key in COUNTED_KEYS:
            if not getattr(entry, key):
                text = _fill_in(text, source, ("sizes", name, key), _select_card_value(key, counts))
    target = output or chosen.card_path
    if output is not None or text != before:
        write_file_atomically(target, text)
        print_line(f"{target}: written")
    if wrong:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _is_incomplete(entry: SizeCard) -> bool:
    return not all(getattr(entry, key) for key in COUNTED_KEYS)


def _compare_counts(title: str, entry: SizeCard, counts: CardCounts) -> bool:
    """Print each count of a size next to what card or configuration state. Return True if all are right."""
    fine = True
    for key in COUNTED_KEYS:
        verdict, right = _judge_count(key, getattr(entry, key), counts)
        fine = fine and right
        print_line(f"{title}: {key} {getattr(counts, key):,.0f}: {verdict}")
    for mean, (stated, found) in counts.means.items():
        right = not _differs(stated, found)
        fine = fine and right
        verdict = "as the configuration says" if right else f"the configuration says {stated:,.6g}: WRONG"
        print_line(f"{title}: {mean} of the data {found:,.6g}: {verdict}")
    if counts.uncovered:
        print_line(f"{title}: operators without a formula, not counted: {', '.join(counts.uncovered)}")
    return fine


def _judge_count(key: str, stated: float, counts: CardCounts) -> tuple[str, bool]:
    """Compare a count with the card's: a text, and whether it is right. A ``stated`` 0 was filled in.

    Counted FLOPs are compared with the workload's formula for executed FLOPs on the same samples. FLOPs of the card are
    compared with its formula for the model on a sample of mean size.
    """
    counted = getattr(counts, key)
    if key in (FORWARD, TRAINING):
        executed, model = (
            _select_closed_form_flops(key, counts.counted_form)[0],
            _select_closed_form_flops(key, counts.closed_form)[1],
        )
        if _differs(counted, executed):
            return f"the closed form says that {executed:,.0f} are executed: WRONG", False
        if stated and _differs(stated, model):
            return f"the card says {stated:,.0f}, the closed form of the model {model:,.0f}: WRONG", False
        if stated and _differs(counted, stated):
            return f"executed, as the closed form says; of the model {stated:,.0f}, as the card says", True
        return "as the card says" if stated else "filled in", True
    if not stated:
        return "filled in", True
    right = counted == stated if key in EXACT_KEYS else not _differs(counted, stated)
    return "as the card says" if right else f"the card says {stated:,.0f}: WRONG", right


def _select_closed_form_flops(key: str, form: Work) -> tuple[float, float]:
    """Return executed and model FLOPs of a closed form, for the forward pass or for training by ``key``."""
    if key == TRAINING:
        return form.executed_flops, form.model_flops
    return form.forward_flops + form.forward_extra_flops, form.forward_flops


def _select_card_value(key: str, counts: CardCounts) -> float:
    """Choose what the card states.

    Of FLOPs the model's, if the formula for executed FLOPs is right; else as counted.
    """
    counted = float(getattr(counts, key))
    if key not in (FORWARD, TRAINING) or _differs(counted, _select_closed_form_flops(key, counts.counted_form)[0]):
        return counted
    return _select_closed_form_flops(key, counts.closed_form)[1]


def _differs(one: float, other: float) -> bool:
    return abs(one - other) > REL_TOLERANCE * other


def _count_size(chosen: Descriptor, config: RunConfig) -> CardCounts:
    """Count with the data set at its usual place, or with one generated for this."""
    from mlhpc.suite.data.build import find_data
    from mlhpc.suite.data.manifest import MANIFEST_NAME
    from mlhpc.suite.performance.card_counts import count_size
    from mlhpc.suite.world import World

    root = config.data or choose_default_data_root(config.workload, config.size)
    # The manifest is written last, so only a whole data set has one.
    if (root / MANIFEST_NAME).exists():
        find_data(root, config.workload, config.size)
        return count_size(chosen, config, root)
    with tempfile.TemporaryDirectory(prefix="mlhpc-card-") as folder:
        chosen.load_generator().generate(Path(folder), config.size, seed=0, world=World.create())
        return count_size(chosen, config, Path(folder))


def _fill_in(text: str, source: YamlSource, key: Sequence[str], value: float) -> str:
    """Return the text of a card with one 0 replaced. InputError if it does not stand on a line of its own."""
    number = source.lines.get(tuple(key))
    lines = text.splitlines(keepends=True)
    pattern = rf"(\s*{re.escape(key[-1])}:\s*)0(?:\.0*)?(\s*(?:#.*)?\n?)"
    # The text is edited, not written anew: comments of the card stay.
    match = re.fullmatch(pattern, lines[number - 1]) if number is not None else None
    if match is None or number is None:
        raise InputError(
            f"{source.where(*key)}: {'.'.join(key)} cannot be filled in: write '{key[-1]}: 0' on a line of its own"
        )
    lines[number - 1] = f"{match[1]}{_render_number(value)}{match[2]}"
    return "".join(lines)


def _render_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


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

    Their losses, norms and metrics on the way become the course of healthy runs, <size>_course.json: it judges later
    runs.

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
    if output is None:
        _keep_more_runs(earlier, points, folder)
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
    _record_courses(collect_courses(logs, system), descriptor, size, folder)


def _keep_more_runs(earlier: Mapping[int, ReferencePoint], points: Mapping[int, ReferencePoint], folder: Path) -> None:
    """Raise InputError if the workload's own file would have a point of fewer runs than now."""
    for batch, point in points.items():
        if batch in earlier and len(earlier[batch].epochs) > len(point.epochs):
            raise InputError(
                f"{folder / 'rcp'}: the point of batch {batch} has {len(earlier[batch].epochs)} runs, these are "
                f"{len(point.epochs)}; write it elsewhere with -o FOLDER"
            )


def _record_courses(new: Sequence[ReferenceCourse], descriptor: Descriptor, size: str, folder: Path) -> None:
    """Write courses beside the reference points. They replace those of the same batch size and precision."""
    replaced = {(course.global_batch_size, course.precision) for course in new}
    earlier = read_reference_courses(folder, size)
    kept = [course for course in earlier if (course.global_batch_size, course.precision) not in replaced]
    if new:
        courses = ReferenceCourses(version=RCP_VERSION, workload=descriptor.name, size=size, courses=(*kept, *new))
        path = folder / "rcp" / f"{size}_course.json"
        write_file_atomically(path, json.dumps(convert_to_plain_data(courses)) + "\n")
        for course in new:
            print_line(render_reference_course(course))
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
                f", a submission needs at least {bound.minimum:.3f}: it would not show if {bound.unseen:.3g} were"
                " missing"
                if bound
                else ""
            )
            print_line(f"  {_render_point(point)}{least}")
        courses = read_reference_courses(descriptor.folder, size)
        for text in map(render_reference_course, courses) if courses else ["no reference course"]:
            print_line(f"  {text}")


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
            f"the logs are of several benchmarks or sizes: {sorted(map(str, named))}; record each with a command of"
            " its own"
        )
    benchmark, size = next(iter(named))
    # Logs name a benchmark by its MLPerf name, not by the workload's.
    workload = next((item for item in load_descriptors().values() if item.card().mlperf_name == benchmark), None)
    if workload is None or size is None:
        raise InputError(
            f"{logs[0].path}: benchmark {benchmark!r} of size {size!r} is not installed here; mlhpc workload list shows"
            " what is"
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


SCHEMAS = ("config", "card", "system")


@click.command(
    epilog="""\b
Examples:
  mlhpc workload schema config cosmoflow > config.schema.json
  mlhpc workload schema system > system.schema.json
In a YAML file an editor reads it from a first line: # yaml-language-server: $schema=system.schema.json
"""
)
@click.argument("kind", type=click.Choice(SCHEMAS))
@click.argument("workload", required=False)
def schema(kind: str, workload: str | None) -> None:
    """Print the JSON schema of a file of settings, a card or a system file, for editors.

    With WORKLOAD the hyperparameters of a file of settings are its own.
    """
    import msgspec

    from mlhpc.suite.launch.job import SystemFile

    if workload is not None and kind != "config":
        raise click.UsageError(f"a {kind} file is the same for all workloads: leave {workload} out")
    kinds = {"card": Card, "system": SystemFile, "config": RunConfig}
    own = make_config_kind(load_descriptor(workload)) if workload is not None else kinds[kind]
    found = msgspec.json.schema(own, schema_hook=lambda _: {"type": "string"})  # paths
    print_line(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **found}, indent=1))


for each in (list_, new, card, rcp, schema):
    workload.add_command(each)
