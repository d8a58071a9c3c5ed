"""Reads run folders and groups their runs to the results of a package. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite import NO_SUBMITTER
from mlhpc.suite.compliance.kept_files import KeptFolder
from mlhpc.suite.compliance.rebuild import compute_stated_score, select_runs
from mlhpc.suite.compliance.ruleset import Benchmark, build_card_benchmark
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.results_tree import PRUNED, describe_near_logs
from mlhpc.suite.log.run_folder import RunFolder, RunInfo, has_run_start
from mlhpc.suite.log.score import Throughput, TimeToTrain, find_failure
from mlhpc.suite.machine.facts import Facts
from mlhpc.suite.machine.system import list_differences, read_nodes

NO_SUBMITTERS = (None, NO_SUBMITTER)  # submission_org of a log that names no submitter


@dataclass(frozen=True)
class Run:
    """One run folder: the records of its logs by trial, and the logs of continued trials (``resumed``)."""

    folder: RunFolder
    info: RunInfo
    records: tuple[RunRecord, ...]
    resumed: tuple[Path, ...]
    nodes: tuple[Facts, ...]
    kept: KeptFolder

    @property
    def unnamed(self) -> list[RunRecord]:
        """The records of logs that name no submitter."""
        return [record for record in self.records if record.org in NO_SUBMITTERS]


@dataclass(frozen=True)
class Result:
    """One result of a package: the runs of one workload, size, shape and scenario.

    ``scored`` runs count. ``pruned`` are instances of a throughput result that do not count. ``left_out`` are surplus
    runs, each with the reason.
    """

    runs: tuple[Run, ...]
    benchmark: Benchmark
    scored: tuple[RunRecord, ...]
    pruned: tuple[RunRecord, ...]
    left_out: tuple[tuple[RunRecord, str], ...]
    system_id: str
    scenario: str

    @property
    def info(self) -> RunInfo:
        """The content of run.json of the first run folder."""
        return self.runs[0].info

    @property
    def folder(self) -> Path:
        """The folder of the logs inside the package."""
        return Path("results") / self.system_id / self.scenario / self.benchmark.name

    @property
    def names(self) -> dict[Path, str]:
        """The new name of each log, below `folder`, by its path in the run folder."""
        scored = {record.path: f"result_{index}.txt" for index, record in enumerate(self.scored)}
        pruned = {
            record.path: f"{PRUNED}/result_{index}.txt" for index, record in enumerate(self.pruned, len(self.scored))
        }
        return {path: name for path, name in (scored | pruned).items() if path is not None}

    @property
    def implementation(self) -> Path:
        """The folder of code, configuration and provenance inside the package."""
        name = f"mlhpc-{self.info.suite_version}"
        base = Path("benchmarks") / self.benchmark.name / "implementations"
        return base / name / self.system_id / self.scenario


def read_run(root: Path) -> Run:
    """Read a run folder. InputError if it is no run folder, or has no log."""
    folder = RunFolder(root)
    info = folder.read_info()
    logs = folder.results()
    if not logs:
        raise InputError(
            f"{root}: no result_*.txt, so there is no run to package{describe_near_logs([root])}; `mlhpc run` writes them"
        )
    records = tuple(summarise_log(read_events(path)) for path in logs)
    return Run(folder, info, records, tuple(folder.resumed()), read_nodes(root), KeptFolder(root, packaged=False))


def group_results(runs: Sequence[Run], system: str) -> Iterator[Result]:
    """Group runs by workload, size, scenario and shape. InputError if the runs of a group do not belong together."""
    groups: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        shape = _build_system_name(run, system)
        groups.setdefault((run.info.workload, run.info.size, run.info.mode, shape), []).append(run)
    for (workload, size, mode, system_id), members in groups.items():
        benchmark = build_card_benchmark(load_descriptor(workload), size)
        # One result describes one system, so that the times are of equal hardware.
        deviating = list_differences(run.nodes[0] for run in members)
        if deviating:
            raise InputError(
                f"the runs were made on different systems: {deviating[0]}; package them with separate commands"
            )
        records = [record for run in members for record in run.records]
        _check_subject(records, benchmark, f"{workload} {size}")
        scored, pruned, left_out = select_runs(records, benchmark, weak=mode == "weak")
        scenario = "weak" if mode == "weak" else "strong"
        yield Result(tuple(members), benchmark, scored, pruned, left_out, system_id, scenario)


def _check_subject(records: Sequence[RunRecord], benchmark: Benchmark, subject: str) -> None:
    """Raise InputError for a log without a run, or of another benchmark or size than its run folder."""
    for record in records:
        # A log that ended while the run started lacks the events of its first lines.
        if None in (record.benchmark, record.size) and record.run_start_s is None:
            raise InputError(
                f"{record.path}: ended before run_start and is no run; "
                "`mlhpc run WORKLOAD --output RUN --resume` moves it aside and runs it again"
            )
        if (record.benchmark, record.size) != (benchmark.name, benchmark.size):
            raise InputError(
                f"{record.path}: a log of {record.benchmark} {record.size} in a run of {subject}; move it out of the"
                " run folder"
            )


def _build_system_name(run: Run, system: str) -> str:
    """Return the system's name in the package, ``<system>_[<instances>x]<nodes>x<ranks per node>_<size>``.

    Results of different shape or size must never share a folder. InputError if no log has nodes and ranks.
    """
    first = next((record for record in run.records if record.nodes and record.ranks), None)
    if first is None or first.nodes is None or first.ranks is None:
        raise InputError(
            f"{run.folder.root}: no log states number_of_nodes and number_of_ranks, which name the folder of the result"
        )
    instances = f"{len(run.records)}x" if run.info.mode == "weak" else ""
    return f"{system}_{instances}{first.nodes}x{max(first.ranks // first.nodes, 1)}_{run.info.size}"


def compute_score(result: Result) -> TimeToTrain | Throughput:
    """Compute the score of the runs of a result."""
    return compute_stated_score(result.scored, result.benchmark, weak=result.scenario == "weak")


def list_notes(results: Sequence[Result], division: str, submitter: str) -> Iterator[str]:
    """Yield notes for a person: runs that do not count, and logs that disagree with the package."""
    for result in results:
        for record in result.pruned:
            yield (
                f"{record.path}: pruned: {find_failure(record, result.benchmark) or f'seed {record.seed} is repeated'}"
            )
        for record in result.scored:
            if record.division != division:
                yield f"{record.path}: submission_division is {record.division!r}, not {division!r}"
        for record, why in result.left_out:
            yield f"{record.path}: left out of the result: {why}"
        unnamed = [record for run in result.runs for record in run.unnamed]
        if unnamed:
            logs = f"{unnamed[0].path}" + (f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else "")
            yield f"{logs}: no submitter in the log; the package marks {submitter!r} as stated late"
        for run in result.runs:
            yield from _list_run_notes(run)


def _list_run_notes(run: Run) -> Iterator[str]:
    for path in run.resumed:
        yield f"{path}: a continuation, kept as provenance, not scored"
    for path in run.folder.failed():
        if has_run_start(path):
            yield f"{path}: began and failed, and was replaced: shown in the package"
    expected: tuple[Path, ...] = (run.folder.sources_path, run.folder.environment_path)
    expected += () if run.info.loop else (run.folder.data_path,)
    missing = [path.name for path in expected if not path.exists()]
    if missing:
        yield f"{run.folder.root}: no {', '.join(missing)}: every run leaves them; the package lacks them too"
    for text in list_differences(run.nodes):
        yield f"{run.folder.root}: {text}"
    if len(run.records) < run.info.runs:
        yield f"{run.folder.root}: {len(run.records)} of {run.info.runs} runs left a log"
