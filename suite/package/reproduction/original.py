"""Reads the results of a package to reproduce: their scores, and the files of each run.

Judges level 0, the log: files are intact, and recomputed scores equal the stated or published ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.kept_files import CONFIG
from mlhpc.suite.compliance.package_files import check_manifest, read_package_manifest
from mlhpc.suite.compliance.rebuild import STATED, build_stated_result, compare_values, compute_stated_score
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.ruleset import Benchmark, build_card_benchmark
from mlhpc.suite.descriptor import Descriptor, load_descriptors
from mlhpc.suite.documents import Fields
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import MANIFEST, list_files
from mlhpc.suite.log.score import Throughput
from mlhpc.suite.package.reproduction.judge import (
    ALTERED,
    LOST,
    Difference,
    LevelOutcome,
    LevelVerdict,
    make_level_verdict,
)
from mlhpc.suite.package.reproduction.run_facts import RunFacts, read_run_facts, read_small_json
from mlhpc.suite.plugins import SCORES, find_plugins

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
    def info(self) -> Fields:
        """The content of run.json of the first run folder."""
        return read_small_json(self.folders[0] / "run.json") if self.folders else {}

    @cached_property
    def stated(self) -> Fields:
        """result.json, the score that the package states; empty where there is none."""
        # A run folder is provenance/run_<i>, next to which result.json lies.
        return read_small_json(self.folders[0].parent.parent / STATED) if self.folders else {}

    @cached_property
    def data_manifest(self) -> Fields:
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
        folder = self.scored.provenance.folder_of(record)
        return None if folder is None else folder.path

    def run_facts(self, record: RunRecord) -> RunFacts:
        """Read the facts of a run of the result."""
        return read_run_facts(record, self.folder_of(record))

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
        yield Original(group.package, scored, tuple(folder.path for folder in scored.provenance.folders))


OFFICIAL_DIGITS = 1e-5  # relative: the table of the rounds has six digits
_LISTED = 20


def judge_log(original: Original, changes: Sequence[Difference]) -> LevelVerdict:
    """Judge level 0 of one result. ``changes`` are the package's differences from its manifest (`list_changes`)."""
    if changes:
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        why = f"the package is not whole: {changes[0].kind} {changes[0].what}{more}"
        return make_level_verdict(
            0, LevelOutcome.NOT_REPRODUCED, why, changes[0], {"changed": [each.what for each in changes[:_LISTED]]}
        )
    altered = _find_altered_config(original)
    if altered is not None:
        why = f"{altered.what} is not the file that the run was made with: the log has another sha256"
        return make_level_verdict(0, LevelOutcome.NOT_REPRODUCED, why, altered)
    # The package's own statement is exact; published tables have six digits.
    if original.stated:
        return _compare_stated(original)
    official = _find_official(original)
    if official is not None:
        return _compare_official(original, official)
    why = f"the package states no score to compare with; its logs give {_render_score(original)}"
    return make_level_verdict(0, LevelOutcome.CANNOT, why, compared=_describe_score(original))


def list_changes(package: Path, originals: Sequence[Original]) -> list[Difference]:
    """List how a package differs from its manifest.

    A package of this suite has a manifest. Packages of published rounds have none, so nothing differs.
    """
    manifest = package / MANIFEST
    if manifest.is_symlink() or not manifest.is_file():
        ours = any(original.folders for original in originals)
        return [Difference(kind=LOST, what=MANIFEST, was="in every package of mlhpc", now="gone")] if ours else []
    listed = read_package_manifest(manifest)
    there = {path.relative_to(package).as_posix() for path in list_files(package)}
    lost = sorted((listed or {}).keys() - there)
    found = [Difference(kind=LOST, what=name[:200], was="in the manifest", now="gone") for name in lost[:_LISTED]]
    # A stranger's package may differ in any number of files.
    for _, path, message in islice(check_manifest(package), 1000):
        if path != manifest or listed is None:
            name = path.relative_to(package).as_posix()
            found.append(Difference(kind=ALTERED, what=name[:200], was="in the manifest", now=message[:100]))
    return found


def _find_altered_config(original: Original) -> Difference | None:
    for record in original.records:
        folder = original.scored.provenance.folder_of(record)
        for path, problem in folder.list_problems([record]) if folder is not None and record.config_file else ():
            if path.name == CONFIG:
                return Difference(kind=ALTERED, what=CONFIG, was=str(record.config_file)[:40], now=problem[:100])
    return None


def _compare_stated(original: Original) -> LevelVerdict:
    benchmark = original.benchmark
    if benchmark is None:
        return make_level_verdict(0, LevelOutcome.CANNOT, f"the benchmark is not known here; {original.cannot_run()}")
    names = {run.path: run.path.name for run in original.records if run.path is not None}
    score = compute_stated_score(original.records, benchmark, weak=original.scored.weak)
    found = build_stated_result(score, benchmark, names, original.scored.group.folder)
    # A stranger's document may hold texts of any length.
    different = [tuple(str(each)[:80] for each in item) for item in compare_values(dict(original.stated), found)]
    compared: dict[str, Any] = _describe_score(original) | {"runs": len(original.records)}
    if not different:
        why = (
            f"{_render_score(original)} and the times of {len(original.records)} runs are those that result.json states"
        )
        return make_level_verdict(0, LevelOutcome.REPRODUCED, why, compared=compared)
    name, was, now = different[0]
    cause = Difference(kind=ALTERED, what=f"result.json: {name}"[:200], was=was, now=now)
    why = f"{len(different)} values are not those that result.json states; first: {name}: {was}, from the logs {now}"
    return make_level_verdict(0, LevelOutcome.NOT_REPRODUCED, why, cause, compared)


def _find_official(original: Original) -> dict[str, Any] | None:
    """Find the official score of a published result in the installed tables."""
    group = original.scored.group
    names = (group.round, group.submitter, group.system, original.scored.scenario, group.benchmark)
    for plugin in find_plugins(SCORES).values():
        # The tables of the published rounds belong to the analysis, which this room may not import.
        found = plugin.point.load()(*names)
        if found is not None:
            return dict(found)
    return None


def _compare_official(original: Original, official: dict[str, Any]) -> LevelVerdict:
    result = original.scored.score
    name = "models_per_min" if isinstance(result, Throughput) else "score_s"
    was, now = official.get(name), _describe_score(original)[name]
    compared = {**_describe_score(original), "official": was, "source": official.get("source")}
    if was is None and now is None:
        why = f"the round states no score, and the logs give none: {result.reason}"
        return make_level_verdict(0, LevelOutcome.REPRODUCED, why, compared=compared)
    if was is not None and now is not None and math.isclose(was, now, rel_tol=OFFICIAL_DIGITS):
        why = f"{_render_score(original)} recomputed from {len(original.records)} logs is the official one"
        return make_level_verdict(0, LevelOutcome.REPRODUCED, why, compared=compared)
    cause = Difference(kind=ALTERED, what=name, was=render_repr(was), now=render_repr(now))
    return make_level_verdict(
        0, LevelOutcome.NOT_REPRODUCED, f"{name} is officially {was}, from the logs {now}", cause, compared
    )


def _describe_score(original: Original) -> dict[str, Any]:
    result = original.scored.score
    if isinstance(result, Throughput):
        return {"models_per_min": result.models_per_minute, "reason": result.reason}
    return {"score_s": result.mean_s, "reason": result.reason}


def _render_score(original: Original) -> str:
    result = original.scored.score
    if isinstance(result, Throughput):
        return f"{result.models_per_minute:.3g} models/min" if result.models_per_minute else str(result.reason)
    return f"score {render_duration(result.mean_s)}" if result.mean_s is not None else f"no score ({result.reason})"
