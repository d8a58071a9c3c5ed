"""Judges level 1, the data: compares a data set on disk with the manifest of the package's logs. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import ValidationError

from mlhpc.suite.data.manifest import Manifest, check_shard, read_manifest
from mlhpc.suite.documents import convert
from mlhpc.suite.errors import InputError
from mlhpc.suite.package.reproduction.causes import DATA
from mlhpc.suite.package.reproduction.document import Difference, LevelOutcome, LevelVerdict, make_level_verdict

CONVERTED = ("converted", "public")  # names of generators that read files of others instead of making data


def judge_data(logged: str, kept: Mapping[str, Any], root: Path, how: str) -> LevelVerdict:
    """Compare a data set with the manifest's sha256 in the logs, and read every byte of it.

    ``how`` is regenerated or verified. ``kept`` is the manifest in the package. It shows which seed, shard or attribute
    differs first.
    """
    try:
        manifest = read_manifest(root)
    except (InputError, OSError) as error:
        return make_level_verdict(1, LevelOutcome.INCONCLUSIVE, f"the data cannot be read: {error}")
    compared = {"manifest_sha256": logged, "found_sha256": manifest.sha256, "bytes": manifest.bytes, "how": how}
    if manifest.sha256 != logged:
        cause = _name_difference(parse_kept(kept, logged), manifest)
        why = f"{cause.what} of the data set: {cause.was} in the package, {cause.now} here ({how})"
        return make_level_verdict(1, LevelOutcome.NOT_REPRODUCED, why, cause, compared)
    # An equal manifest says nothing about the files: each one is read.
    for entry in manifest.shards:
        problem = check_shard(root, entry, deep=True)
        if problem is not None:
            short = problem.removeprefix(f"{root / entry.file}: ")
            cause = Difference(kind=DATA, what=entry.file, was=f"sha256 {entry.sha256[:12]}", now=short[:120])
            return make_level_verdict(1, LevelOutcome.NOT_REPRODUCED, f"{entry.file}: {short}", cause, compared)
    why = f"{how}: {len(manifest.shards)} shards, {manifest.bytes} bytes, all sha256 equal"
    return make_level_verdict(1, LevelOutcome.REPRODUCED, why, compared=compared)


def parse_kept(kept: Mapping[str, Any], logged: str) -> Manifest | None:
    """Parse the manifest in a package. None if it is not the one that the logs name."""
    try:
        manifest = convert(dict(kept), Manifest)
    except ValidationError:
        return None
    return manifest if manifest.sha256 == logged else None


def explain_not_regenerated(manifest: Manifest | None) -> str | None:
    """Return why the data cannot be made again, as far as the manifest tells. None if they can."""
    if manifest is not None and manifest.generator.get("name") in CONVERTED:
        return "the data were converted from files of others; --data ROOT verifies a copy"
    return None


def _name_difference(was: Manifest | None, now: Manifest) -> Difference:
    """Name the first difference of two data sets, causes before consequences: settings, generator, shards."""
    if was is None:
        return Difference(kind=DATA, what="manifest", was="another sha256", now=now.sha256[:12])
    for what, one, other in (("size", was.size, now.size), ("seed", was.seed, now.seed)):
        if one != other:
            return Difference(kind=DATA, what=f"{what} of the data", was=str(one), now=str(other))
    for key in sorted({*was.generator, *now.generator}):
        recipe_was, recipe_now = was.generator.get(key), now.generator.get(key)
        if recipe_was != recipe_now:
            what = f"generator's {key}"[:100]
            return Difference(kind=DATA, what=what, was=str(recipe_was)[:80], now=str(recipe_now)[:80])
    theirs = {entry.file: f"sha256 {entry.sha256[:12]}" for entry in was.shards}
    ours = {entry.file: f"sha256 {entry.sha256[:12]}" for entry in now.shards}
    for file in sorted({*theirs, *ours}):
        if theirs.get(file) != ours.get(file):
            return Difference(kind=DATA, what=file, was=theirs.get(file, "none"), now=ours.get(file, "none"))
    return Difference(kind=DATA, what="attributes", was="those of the package", now="others")
