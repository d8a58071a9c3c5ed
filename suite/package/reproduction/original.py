"""Reads the results of a package to reproduce: their scores, and the files of each run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.ruleset import Benchmark, build_card_benchmark
from mlhpc.suite.descriptor import Descriptor, load_descriptors
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.provenance import find_kept_folder, read_provenance
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.package.reproduction.run_facts import RunFacts, read_log, read_run_facts, read_small_json
from mlhpc.suite.package.stated import STATED

_PLAIN_TEXT = re.compile(r"[\w.+ -]{1,100}")


@dataclass(frozen=True)
class Original:
    """One result of a package. ``folders`` are its run folders in the package; a package of another suite has none."""

    package: Path
    scored: Result
    folders: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The folder of the logs, relative to the package."""
        # Both are resolved: a link on the way to one would make them unrelated.
        return self.scored.group.folder.resolve().relative_to(self.package.resolve()).as_posix()

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """The runs that count, in order of their logs."""
        return self.scored.runs

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """The content of run.json of the first run folder."""
        return read_small_json(self.folders[0] / "run.json") if self.folders else {}

    @cached_property
    def stated(self) -> Mapping[str, Any]:
        """result.json, the score that the package states; empty where there is none."""
        # A run folder is provenance/run_<i>, next to which result.json lies.
        return read_small_json(self.folders[0].parent.parent / STATED) if self.folders else {}

    @cached_property
    def data_manifest(self) -> Mapping[str, Any]:
        """The manifest of the data set, as a run kept it; empty where there is none."""
        return next((found for folder in self.folders if (found := read_small_json(folder / "data.json"))), {})

    @cached_property
    def descriptor(self) -> Descriptor | None:
        """The installed workload of the result. None if it is not installed, or if another suite made the result."""
        name = self.info.get("workload")
        return load_descriptors().get(name) if isinstance(name, str) and self.records[0].suite_version else None

    @cached_property
    def benchmark(self) -> Benchmark | None:
        """The installed card's benchmark of the size; None if there is none."""
        size = self.records[0].size
        try:
            return build_card_benchmark(self.descriptor, size) if self.descriptor is not None and size else None
        except (InputError, KeyError):
            return None

    def folder_of(self, record: RunRecord) -> Path | None:
        """Return the run folder of a run: the one whose origin.json names the log, else the first."""
        assert record.path is not None
        return find_kept_folder(self.folders, record.path.name)

    def run_facts(self, record: RunRecord) -> RunFacts:
        """Read the facts of a run of the result."""
        assert record.path is not None
        return read_run_facts(record, read_log(record.path), self.folder_of(record))

    def cannot_run(self) -> str | None:
        """Return why the installed suite cannot repeat a run of this result. None if it can."""
        if not self.folders or not self.records[0].suite_version:
            return "the package was not made by mlhpc: it has no configuration that the installed suite could run"
        if self.info.get("loop") is not None:
            program = str(self.info["loop"])
            # A stranger's text is shown only if a terminal shows it as it is.
            shown = program if _PLAIN_TEXT.fullmatch(program) else "a program of the submitter's"
            return f"{shown} trained, a loop of the submitter's own: code of a package is never run"
        if self.descriptor is None:
            return f"workload {str(self.info.get('workload'))[:60]!r} is not installed here"
        if self.benchmark is None:
            return f"workload {self.descriptor.name} has no size {str(self.records[0].size)[:60]!r} here"
        return None


def read_originals(package: Path, wanted: str | None = None) -> list[Original]:
    """Read the results of a package, or those whose folder ends with ``wanted``. Empty if there is none at all.

    InputError if it is no folder, or has no such result.
    """
    if not package.is_dir():
        raise InputError(f"{package}: expected the folder of a package, <submitter>/{{systems,benchmarks,results}}")
    found = list(_read_results(package))
    if wanted is None or not found:
        return found
    parts = Path(wanted).parts
    chosen = [each for each in found if Path(each.name).parts[-len(parts) :] == parts]
    if not chosen:
        names = ", ".join(each.name for each in found[:5])
        raise InputError(f"--result {wanted}: {package} has no such result; results: {names}")
    return chosen


def _read_results(package: Path) -> Iterator[Original]:
    for scored in check([package]).results:
        group = scored.group
        # Logs outside of a package, and results without a run, have nothing to compare with.
        if group.package is None or not scored.runs:
            continue
        infos = read_provenance(group).infos
        yield Original(group.package, scored, tuple(item.path.parent for item in infos))
