"""Builds a results package in the MLPerf HPC tree from run folders: reads what the runs left, copies it, describes it.

Logs are copied byte for byte and never edited. The sha256 manifest is written last: a package without one, or with another
one, is not complete. Nothing of an earlier result is overwritten.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.compliance.manifest import render_package_manifest
from suite.compliance.package_rules import blank_fields
from suite.compliance.ruleset import Benchmark, card_benchmark
from suite.descriptor import descriptor
from suite.files import write_whole
from suite.log.reader import read_events
from suite.log.record import RunRecord, summarise
from suite.log.results_tree import MANIFEST, PRUNED
from suite.log.run_folder import RunFolder, RunInfo
from suite.log.score import failure, time_to_train
from suite.machine.facts import Facts
from suite.machine.system import System, describe, differences, read_nodes, system_description


@dataclass(frozen=True)
class Run:
    """One run folder, read: its logs in order of trial, continuations apart."""

    folder: RunFolder
    info: RunInfo
    records: tuple[RunRecord, ...]
    resumed: tuple[Path, ...]
    nodes: tuple[Facts, ...]


@dataclass(frozen=True)
class Result:
    """One result of a package: the runs of one workload and size, of one shape, in one scenario."""

    runs: tuple[Run, ...]
    benchmark: Benchmark
    scored: tuple[RunRecord, ...]
    pruned: tuple[RunRecord, ...]
    left_out: tuple[tuple[RunRecord, str], ...]
    system_id: str
    scenario: str

    @property
    def info(self) -> RunInfo:
        """run.json of the first run folder."""
        return self.runs[0].info

    @property
    def place(self) -> Path:
        """Where the logs go inside the package."""
        return Path("results") / self.system_id / self.scenario / self.benchmark.name

    @property
    def names(self) -> dict[Path, str]:
        """Where each log goes, below `place`, by its path in its run folder."""
        scored = {record.path: f"result_{index}.txt" for index, record in enumerate(self.scored)}
        pruned = {
            record.path: f"{PRUNED}/result_{index}.txt" for index, record in enumerate(self.pruned, len(self.scored))
        }
        return {path: name for path, name in (scored | pruned).items() if path is not None}

    @property
    def implementation(self) -> Path:
        """Where code, configuration and provenance go inside the package."""
        name = f"mlhpc-{self.info.suite_version}"
        base = Path("benchmarks") / self.benchmark.name / "implementations"
        return base / name / self.system_id / self.scenario


@dataclass(frozen=True)
class Package:
    """What was built: where, which results, and what a person should know of them."""

    folder: Path
    results: tuple[Result, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def build_package(
    folders: Sequence[Path],
    *,
    system: str,
    out: Path | None = None,
    submitter: str | None = None,
    division: str | None = None,
    status: str | None = None,
    stated: System | None = None,
    count_failed: bool = False,
) -> Package:
    """Build or extend the package ``out``, by default submissions/<submitter>, from run folders.

    Submitter, division and status default to what the logs say; ``stated`` is the description block of a system file.
    ``count_failed`` takes logs without run_stop. ValueError, before anything is written, if the runs do not fit.
    """
    _name("--system", system)
    runs = [read_run(folder) for folder in folders]
    _one_suite(runs)
    submitter = _name("--submitter", submitter or _common(runs, "submission_org", lambda record: record.org))
    package = out if out is not None else Path("submissions") / submitter
    if package.absolute().name != submitter:
        raise ValueError(
            f"-o {package}: a package's folder has the name of its submitter; expected -o {package / submitter}"
        )
    division = division or _common(runs, "submission_division", lambda record: record.division)
    status = status or _common(runs, "submission_status", lambda record: record.submission_status)
    results = tuple(_results(runs, system))
    for result in results:
        _none_failed_silently(result, count_failed)
    for result in results:
        if (package / result.place).exists():
            raise ValueError(
                f"{package / result.place}: exists already; a result is never overwritten (choose another --system)"
            )
    package.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{submitter}-", dir=package.absolute().parent) as scratch:
        staged = Path(scratch)
        for result in results:
            described = describe(result.runs[0].nodes, stated)
            named = described.model_copy(update={"system_name": described.system_name or system})
            _write_system(staged, package, result, named, (submitter, division, status))
            _write_logs(staged, result)
            _write_implementation(staged, result)
        _move(staged, package)
    write_package_manifest(package)
    return Package(package, results, tuple(_notes(results, submitter, division)), tuple(_unknown(package, results)))


def read_run(root: Path) -> Run:
    """Read a run folder. ValueError if it is none, or has no log."""
    folder = RunFolder(root)
    info = folder.read_info()
    logs = sorted(root.glob("result_*.txt"), key=_trial)
    if not logs:
        raise ValueError(f"{root}: no result_*.txt; the run left no log")
    resumed = tuple(sorted(root.glob("resumed_*.txt"), key=_trial))
    return Run(folder, info, tuple(summarise(read_events(path)) for path in logs), resumed, read_nodes(root))


def write_package_manifest(package: Path) -> None:
    """Write the manifest of all files of a package: the last file written, so a package that has one is complete."""
    write_whole(package / MANIFEST, render_package_manifest(package))


# What belongs together


def _results(runs: Sequence[Run], system: str) -> Iterator[Result]:
    groups: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        shape = _shape(run, system)
        groups.setdefault((run.info.workload, run.info.size, run.info.mode, shape), []).append(run)
    for (workload, size, mode, system_id), members in groups.items():
        benchmark = card_benchmark(descriptor(workload), size)
        deviating = differences(run.nodes[0] for run in members)
        if deviating:
            raise ValueError(f"the runs were made on different systems: {deviating[0]}")
        records = [record for run in members for record in run.records]
        for record in records:
            if record.benchmark is None and record.run_start_s is None:
                raise ValueError(f"{record.path}: ended before run_start and is no run; move it out of the run folder")
            if (record.benchmark, record.size) != (benchmark.name, size):
                raise ValueError(
                    f"{record.path}: a log of {record.benchmark} {record.size} in a run of {workload} {size}"
                )
        scored, pruned, left_out = _choose(records, benchmark, mode)
        scenario = "weak" if mode == "weak" else "strong"
        yield Result(tuple(members), benchmark, scored, pruned, left_out, system_id, scenario)


def _shape(run: Run, system: str) -> str:
    """``<system>_[<instances>x]<nodes>x<ranks per node>_<size>``: results of another shape or size never share a folder."""
    first = next((record for record in run.records if record.nodes and record.ranks), None)
    if first is None or first.nodes is None or first.ranks is None:
        raise ValueError(f"{run.folder.root}: no log says number_of_nodes and number_of_ranks")
    instances = f"{len(run.records)}x" if run.info.mode == "weak" else ""
    return f"{system}_{instances}{first.nodes}x{max(first.ranks // first.nodes, 1)}_{run.info.size}"


_Choice = tuple[tuple[RunRecord, ...], tuple[RunRecord, ...], tuple[tuple[RunRecord, str], ...]]


def _choose(records: Sequence[RunRecord], benchmark: Benchmark, mode: str) -> _Choice:
    """The runs of the result, those pruned from it, and those left out with the reason.

    Time to train: of more runs than required, the N consecutive ones with the median score. Throughput: instances that did
    not converge or repeat a seed are pruned, as long as the required number remains.
    """
    if mode == "weak":
        seeds: set[int | None] = set()
        kept = []
        for record in records:
            if failure(record, benchmark) is None and record.seed not in seeds:
                seeds.add(record.seed)
                kept.append(record)
        enough = len(kept) >= benchmark.required_runs
        return (
            (tuple(kept), tuple(item for item in records if item not in kept), ())
            if enough
            else (tuple(records), (), ())
        )
    if len(records) <= benchmark.required_runs:
        return tuple(records), (), ()
    score = time_to_train(records, benchmark)
    outside = [run for run in score.runs if run.dropped is not None and run.dropped.startswith(("outside", "resumed"))]
    chosen = tuple(run.record for run in score.runs if run not in outside)
    return chosen, (), tuple((run.record, str(run.dropped)) for run in outside)


def _none_failed_silently(result: Result, count_failed: bool) -> None:
    """ValueError for a run that stopped without saying so, or that says success without having reached the target."""
    for record in (*result.scored, *result.pruned):
        if record.run_stop_s is None and not count_failed:
            raise ValueError(
                f"{record.path}: no run_stop, the run failed without saying so; run it again, "
                "or take it as the one run that may fail with --count-failed"
            )
        if record.status == "success" and (why := failure(record, result.benchmark)) is not None:
            raise ValueError(f"{record.path}: status is 'success', but: {why}")


def _one_suite(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        for what in ("suite_version", "git"):
            one, other = getattr(runs[0].info, what), getattr(run.info, what)
            if one != other:
                raise ValueError(
                    f"{run.folder.root}: {what} is {other}, in {runs[0].folder.root} {one}; package them apart"
                )


def _common(runs: Sequence[Run], key: str, value: object) -> str:
    assert callable(value)
    found = {value(record): record.path for run in runs for record in run.records if value(record) is not None}
    if len(found) != 1:
        raise ValueError(f"the logs say {key} = {', '.join(map(repr, found)) or 'nothing'}; expected one value")
    return str(next(iter(found)))


def _name(option: str, name: str) -> str:
    """A name that becomes a folder."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,99}", name):
        raise ValueError(f"{option} {name!r}: expected letters, digits and _ . + - (it becomes a folder's name)")
    return name


def _trial(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name))


def _unknown(package: Path, results: Sequence[Result]) -> Iterator[str]:
    """The fields of each system description that neither the facts nor the system file fill."""
    for result in results:
        path = package / "systems" / f"{result.system_id}.json"
        blank = blank_fields(json.loads(path.read_text(encoding="utf-8")))
        if blank:
            yield f"{path}: {len(blank)} fields are not known: {', '.join(blank)}; state them in the system file"


def _notes(results: Sequence[Result], submitter: str, division: str) -> Iterator[str]:
    for result in results:
        for record in result.pruned:
            yield f"{record.path}: pruned: {failure(record, result.benchmark) or f'seed {record.seed} is repeated'}"
        for record in result.scored:
            if record.org != submitter:
                yield (
                    f"{record.path}: submission_org is {record.org!r}, not {submitter!r}; "
                    "set submission.org in the config of the run"
                )
            if record.division != division:
                yield f"{record.path}: submission_division is {record.division!r}, not {division!r}"
        for record, why in result.left_out:
            yield f"{record.path}: left out of the result: {why}"
        for run in result.runs:
            yield from (f"{path}: a continuation, kept as provenance, not scored" for path in run.resumed)
            yield from (f"{run.folder.root}: {text}" for text in differences(run.nodes))
            if len(run.records) < run.info.runs:
                yield f"{run.folder.root}: {len(run.records)} of {run.info.runs} runs left a log"


# Files


def _write_system(staged: Path, package: Path, result: Result, system: System, names: tuple[str, str, str]) -> None:
    first = result.scored[0]
    nodes = len({node.node for run in result.runs for node in run.nodes}) if result.scenario == "weak" else first.nodes
    submitter, division, status = names
    description = system_description(
        system,
        submitter=submitter,
        division=division,
        status=status,
        nodes=nodes or 1,
        accelerators_per_node=first.accelerators_per_node,
    )
    text = json.dumps(description, indent=4, ensure_ascii=False) + "\n"
    name = Path("systems") / f"{result.system_id}.json"
    if (package / name).exists() and (package / name).read_text(encoding="utf-8") != text:
        raise ValueError(f"{package / name}: exists already and describes another system; choose another --system")
    _write(staged / name, text)


def _write_logs(staged: Path, result: Result) -> None:
    for path, name in result.names.items():
        _copy(path, staged / result.place / name)


def _write_implementation(staged: Path, result: Result) -> None:
    folder = staged / result.implementation
    names = result.names
    for number, run in enumerate(result.runs):
        place = folder / "provenance" / f"run_{number}"
        for path in _provenance(run, result):
            _copy(path, place / path.relative_to(run.folder.root))
        origin = {
            record.path.name: names[record.path] for record in run.records if record.path and record.path in names
        }
        _write(
            place / "origin.json", json.dumps({"version": 1, "folder": run.folder.root.name, "logs": origin}, indent=1)
        )
    _write(folder / "README.md", _readme(result))
    _write(folder / "setup.sh", _SETUP.format(commit=_commit(result.info), version=result.info.suite_version))
    _write(folder / "init_datasets.sh", _DATASETS.format(workload=result.info.workload, size=result.info.size))
    _write(folder / "run_and_time.sh", _run_and_time(result))
    for script in folder.glob("*.sh"):
        script.chmod(0o755)


def _provenance(run: Run, result: Result) -> Iterator[Path]:
    """Every file of a run folder that tells how the result came about, but the logs of the result itself."""
    root = run.folder.root
    fixed = (run.folder.info_path, run.folder.config_path, root / "job.sbatch", root / "job.json")
    yield from (path for path in fixed if path.is_file())
    yield from sorted(run.folder.facts.glob("*.json"))
    yield from run.resumed
    yield from (record.path for record, _ in result.left_out if record.path and record.path.parent == root)


def _move(staged: Path, package: Path) -> None:
    """Move every staged file into the package; folders that hold results are new, so nothing is replaced."""
    for path in sorted(staged.rglob("*")):
        target = package / path.relative_to(staged)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif not target.exists():
            path.rename(target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# Texts that the rules want beside the code


def _readme(result: Result) -> str:
    card = result.benchmark
    first = result.scored[0]
    info = result.info
    logs = f"`{result.place.as_posix()}/result_0.txt` to `result_{len(result.scored) - 1}.txt`"
    left_out = "".join(f"- `{record.path.name}`: {why}\n" for record, why in result.left_out if record.path)
    resumed = "".join(
        f"- `{path.name}`: a continuation of an interrupted run\n" for run in result.runs for path in run.resumed
    )
    return (
        f"# {card.name}, size {card.size}\n\n"
        f"Target: {card.target_text}. Ruleset {first.ruleset}, {card.required_runs} runs required. Logs: {logs}.\n\n"
        f"Made by mlhpc {info.suite_version}, commit {_commit(info)}"
        f"{' with local changes' if info.git and info.git.get('dirty') else ''}, on {info.created}: {first.nodes} nodes, "
        f"{first.ranks} ranks, {first.accelerators_per_node} accelerators per node, "
        f"global batch size {first.global_batch_size}.\n\n"
        "- `setup.sh` installs the suite as it was\n"
        "- `init_datasets.sh` makes the data set\n"
        "- `run_and_time.sh` runs it\n"
        "- `provenance/` holds what each run left: run.json, config.yaml, facts of every node, the job script\n"
        + (f"- `{PRUNED}/` beside the logs: {len(result.pruned)} instances that were pruned\n" if result.pruned else "")
        + (f"\nNot scored, in `provenance/`:\n\n{left_out}{resumed}" if left_out or resumed else "")
    )


_SETUP = """\
#!/bin/bash
# Installs mlhpc {version} at the commit this result was made with. MLHPC_REPO: URL or path of its repository.
set -euo pipefail
: "${{MLHPC_REPO:?set it to the URL or path of the mlhpc repository}}"
git clone "$MLHPC_REPO" mlhpc
git -C mlhpc checkout {commit}
python3 -m venv mlhpc-env
mlhpc-env/bin/pip install -c mlhpc/constraints.txt './mlhpc[run]'
"""

_DATASETS = """\
#!/bin/bash
# Makes the data set: the same bytes on any machine.
set -euo pipefail
mlhpc data generate {workload} --size {size}
"""


def _run_and_time(result: Result) -> str:
    lines = [
        "#!/bin/bash",
        "# The command of each run folder of this result; its events carry the times.",
        "set -euo pipefail",
    ]
    lines.append('cd "$(dirname "$0")"')
    for number, run in enumerate(result.runs):
        script = run.folder.root / "job.sbatch"
        command = f"sbatch provenance/run_{number}/job.sbatch" if script.is_file() else _command(run.info)
        lines.append(command)
    return "\n".join(lines) + "\n"


def _command(info: RunInfo) -> str:
    """The command as a person types it: the program without the path it had on the machine of the run."""
    program, *rest = info.command or ("mlhpc",)
    return shlex.join([Path(program).name, *rest])


def _commit(info: RunInfo) -> str:
    return str(info.git["commit"]) if info.git and info.git.get("commit") else "HEAD"
