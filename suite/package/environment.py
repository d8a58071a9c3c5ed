"""Locks of environments: which wheels an environment was made of, found among wheels at hand, and whether another is the same.

The hash of a wheel is known where the wheel is at hand (a wheelhouse): it is the right one if the list of its files, RECORD, has
the digest of what was installed. Without wheels an environment is made from an index and then compared by these digests.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from suite.documents import read_json_document
from suite.errors import InputError
from suite.log.origin.installed import (
    ENVIRONMENT_VERSION,
    Environment,
    Installed,
    digest_record,
    normal,
    read_environment,
)
from suite.log.run_folder import RunFolder

SUITE = "mlhpc"
_RECORD_BYTES = 64 * 2**20
_IN_PACKAGE = "benchmarks/*/implementations/mlhpc-*/*/*/provenance/run_*/environment.json"


@dataclass(frozen=True)
class Wheel:
    """A wheel at hand. ``record`` is its list of files, ``sha256`` that of the wheel itself."""

    path: Path
    name: str
    version: str
    record: str
    sha256: str


def find_environment(source: Path) -> tuple[Environment, Path]:
    """Find the environment of a package, a run folder or in an environment.json; also returns its file.

    InputError if there is none, or a package has several that differ.
    """
    if source.is_file():
        return read_environment_file(source), source
    beside = RunFolder(source).environment_path
    paths = [beside] if beside.is_file() else sorted(source.glob(_IN_PACKAGE))
    paths = [path for path in paths if not any(part.is_symlink() for part in (path, *path.parents) if part != source)]
    if not paths:
        raise InputError(f"{source}: no environment.json: expected a package, a run folder or the file itself")
    found = [read_environment_file(path) for path in paths]
    other = next((path for path, each in zip(paths, found, strict=True) if each != found[0]), None)
    if other is not None:
        raise InputError(f"{source}: its runs had several environments; give one file: {paths[0]} or {other}")
    return found[0], paths[0]


def read_environment_file(path: Path) -> Environment:
    """Read an environment.json. InputError names the file and what was expected."""
    return read_json_document(path, Environment, "an environment", ENVIRONMENT_VERSION)


def list_wheels(folder: Path, names: Sequence[str]) -> list[Wheel]:
    """List the wheels of some distributions in a folder. A file that is no wheel is left out."""
    wanted = {normal(name) for name in names}
    found = []
    for path in sorted(folder.glob("*.whl")):
        parts = path.name.split("-")
        if len(parts) >= 5 and normal(parts[0]) in wanted and (record := _read_record(path)) is not None:
            found.append(Wheel(path, normal(parts[0]), parts[1], record, _digest(path)))
    return found


def match_wheels(environment: Environment, wheels: Sequence[Wheel]) -> tuple[dict[str, Wheel], dict[str, str]]:
    """Match each distribution with the wheel that it was installed from: by name, version and the digest of the files.

    The second mapping has the distributions without one, each with the reason.
    """
    matched: dict[str, Wheel] = {}
    missing: dict[str, str] = {}
    for each in others(environment):
        name = normal(each.name)
        same = [wheel for wheel in wheels if wheel.name == name and same_version(wheel.version, each.version)]
        right = [wheel for wheel in same if _is_of(wheel, each)]
        if right:
            matched[name] = right[0]
        elif each.source == "editable":
            missing[name] = "was installed from a checkout (editable): its files are in no wheel"
        else:
            missing[name] = (
                f"{same[0].path.name} holds other files" if same else f"no wheel of {each.name} {each.version}"
            )
    return matched, missing


def render_lock(environment: Environment, matched: Mapping[str, Wheel], missing: Mapping[str, str]) -> str:
    """The lock as a requirements file for `pip install --require-hashes --no-deps -r` and `uv pip sync --require-hashes`.

    What has no known hash is a comment: a file with a hash of some and not of others is refused by pip.
    """
    lines = [f"# Lock of {environment.python} on {environment.machine}, written by mlhpc environment lock"]
    for each in others(environment):
        name = normal(each.name)
        known = matched[name].sha256 if name in matched else each.wheel_sha256
        if known is not None:
            lines += [f"{name}=={each.version} \\", f"    --hash=sha256:{known}"]
        else:
            lines.append(f"# {name}=={each.version}: no known hash: {missing.get(name, 'no wheel at hand')}")
    return "\n".join(lines) + "\n"


def others(environment: Environment) -> list[Installed]:
    """All distributions but the suite itself, which is identified by its own files (sources.json)."""
    return [each for each in environment.distributions if normal(each.name) != SUITE]


def compare_installed(environment: Environment, site_packages: Path) -> list[str]:
    """Compare an environment with what is installed in a folder: one line for each distribution that is not the same."""
    found = read_environment(distributions(path=[str(site_packages)])).by_name()
    problems = []
    for each in others(environment):
        now = found.get(normal(each.name))
        if now is None:
            problems.append(f"{each.name} {each.version}: not installed")
        elif now.version != each.version:
            problems.append(f"{each.name}: {now.version} in place of {each.version}")
        elif None not in (each.record_sha256, now.record_sha256) and each.record_sha256 != now.record_sha256:
            problems.append(f"{each.name} {each.version}: other files than those of the package")
    return problems


def compare_suite(wheel: Wheel, sources: Mapping[str, str]) -> list[str]:
    """List the files of the suite that a wheel of it has otherwise than the runs had, or lacks."""
    digests = dict(_files_of(wheel.record))
    return sorted(name for name, sha256 in sources.items() if digests.get(name) != sha256)


def same_version(one: str, other: str) -> bool:
    """True for two spellings of a version, as in names of wheels, where a hyphen is an underscore."""
    return re.sub(r"[-_]", "+", one) == re.sub(r"[-_]", "+", other)


def _files_of(record: str) -> Iterator[tuple[str, str]]:
    """Path and sha256 in hex of each file that a RECORD lists."""
    for line in record.splitlines():
        path, hashed, rest = line.rpartition(",sha256=")
        coded = rest.partition(",")[0]
        if hashed and re.fullmatch(r"[\w-]{43}", coded):
            yield path, base64.urlsafe_b64decode(coded + "=").hex()


def _is_of(wheel: Wheel, each: Installed) -> bool:
    if each.wheel_sha256 is not None:
        return wheel.sha256 == each.wheel_sha256
    return each.record_sha256 is not None and digest_record(wheel.record) == each.record_sha256


def _read_record(path: Path) -> str | None:
    """The RECORD of a wheel; None if it has none, or is no wheel."""
    try:
        with zipfile.ZipFile(path) as wheel:
            entry = next(
                (item for item in wheel.infolist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", item.filename)), None
            )
            if entry is None or entry.file_size > _RECORD_BYTES:
                return None
            return wheel.read(entry).decode("utf-8", "replace")
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
