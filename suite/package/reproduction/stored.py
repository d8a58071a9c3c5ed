"""Judges level 0, the log: files are intact, and recomputed scores equal the stated or published ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.manifest import check_manifest, read_package_manifest
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log.provenance import find_config_problem
from mlhpc.suite.log.results_tree import MANIFEST, list_files
from mlhpc.suite.log.score import Throughput
from mlhpc.suite.package.reproduction.causes import ALTERED, LOST
from mlhpc.suite.package.reproduction.document import Difference, LevelOutcome, LevelVerdict, make_level_verdict
from mlhpc.suite.package.reproduction.original import Original
from mlhpc.suite.package.stated import build_stated_result, list_differences
from mlhpc.suite.plugins import SCORES, find_plugins

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
        folder = original.folder_of(record)
        problem = None if folder is None else find_config_problem(folder, record)
        if problem is not None and record.config_file is not None:
            return Difference(kind=ALTERED, what="config.yaml", was=record.config_file[1][:12], now=problem[:100])
    return None


def _compare_stated(original: Original) -> LevelVerdict:
    benchmark = original.benchmark
    if benchmark is None:
        return make_level_verdict(0, LevelOutcome.CANNOT, f"the benchmark is not known here; {original.cannot_run()}")
    found = build_stated_result(original.scored.score, benchmark)
    different = list_differences(original.stated, found)
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
