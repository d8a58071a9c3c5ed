"""Writes the files under benchmarks/<benchmark>/implementations: provenance, a README and scripts.

Renders the environment of a package's runs as a requirements file, for pip or uv, offline too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from mlhpc.suite.compliance.kept_files import ORIGIN_FILE, ORIGIN_VERSION, VERBATIM, KeptFolder, Origin
from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.compliance.rebuild import README, STATED, build_stated_result, render_readme, render_scripts
from mlhpc.suite.documents import convert_to_plain_data, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder, write_file_atomically
from mlhpc.suite.log.origin.sources import ENVIRONMENT_VERSION, Environment, convert_distribution_name
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.machine.secrets import remove_random_words, remove_secrets
from mlhpc.suite.machine.system import System
from mlhpc.suite.package.redaction import PersonalNames, Redaction
from mlhpc.suite.package.results import Result, Run, compute_score


def write_implementation(
    staged: Path, result: Result, kinds: Collection[str], submitter: str, stated: System | None
) -> list[tuple[Path, str, str]]:
    """Write the implementation folder of one result below ``staged``, without secrets and the ``kinds`` to redact.

    Scripts and result.json are derived from what is kept, as the checker derives them again. Returns the words about
    people and places that are still in it: file, kind and words (`Redaction.find`).
    """
    folder = staged / result.implementation
    left: list[tuple[Path, str, str]] = []
    for number, run in enumerate(result.runs):
        provenance = Path("provenance") / f"run_{number}"
        found = _write_provenance(folder / provenance, run, result, kinds, submitter, stated)
        left += [(result.implementation / provenance / name, kind, words) for name, kind, words in found]
    score = build_stated_result(compute_score(result), result.benchmark, result.names, staged / result.folder)
    write_file_atomically(folder / STATED, json.dumps(score, indent=1) + "\n")
    kept, selection = list_kept(staged, result), (result.scored, result.pruned, result.left_out)
    readme = render_readme(kept, result.benchmark, selection, result.folder.as_posix(), submitter)
    texts = render_scripts(kept, result.scored[0].data_manifest) | {README: readme}
    for name, text in texts.items():
        write_file_atomically(folder / name, text)
        (folder / name).chmod(0o644 if name == README else 0o755)
    return left


def list_kept(staged: Path, result: Result) -> list[KeptFolder]:
    """Return what the package keeps of each run folder of a result."""
    return [KeptFolder(staged / result.implementation / f"provenance/run_{n}") for n in range(len(result.runs))]


def _write_provenance(
    target: Path, run: Run, result: Result, kinds: Collection[str], submitter: str, stated: System | None
) -> list[tuple[Path, str, str]]:
    """Copy the provenance of a run folder. Write origin.json, which maps logs to their names in the package.

    Returns the personal words that are left, by the name of their file in ``target``.
    """
    root, names = run.folder.root, result.names
    redaction = _make_redaction(run, kinds)
    for path in names:
        if path.parent == root:
            redaction.check_log(path)
    changed: dict[str, str] = {}
    left = []
    for path in _list_provenance(run, result):
        name = redaction.name(path.relative_to(root))
        left += [(name, kind, words) for kind, words in _copy_file(path, target / name, redaction)]
        if not _is_copied(path) and (target / name).read_bytes() != path.read_bytes():
            changed[name.as_posix()] = compute_sha256(path)
    origin = Origin(
        version=ORIGIN_VERSION,
        folder=root.name,
        logs={record.path.name: names[record.path] for record in run.records if record.path and record.path in names},
        redacted=changed,
        description=stated,
        late_submitter=submitter if run.unnamed else None,
    )
    document = convert_to_plain_data(origin, without_none=True)
    write_file_atomically(target / ORIGIN_FILE, remove_secrets(json.dumps(document, indent=1)))
    return left


def _list_provenance(run: Run, result: Result) -> Iterator[Path]:
    """Yield the files of a run folder that show how the result was made, without its logs."""
    yield from (run.folder.root / name for name in run.kept.files)
    yield from (record.path for record, _ in result.left_out if record.path and record.path.parent == run.folder.root)


def _make_redaction(run: Run, kinds: Collection[str]) -> Redaction:
    script = run.folder.root / "job.sbatch"
    texts = [script.read_text("utf-8", "replace")] if script.is_file() else []
    # The preflight measured nodes on which no trial ran, too.
    measured = [path.stem for path in run.folder.preflights() if path.suffix == ".jsonl"]
    return Redaction(PersonalNames.collect(run.nodes, texts, measured), kinds)


def _copy_file(source: Path, target: Path, redaction: Redaction) -> list[tuple[str, str]]:
    """Copy a file of the provenance, redacted unless it must stay as it is. Returns the personal words in the copy."""
    make_folder(target.parent)
    # A file that is not UTF-8 is searched for personal words all the same.
    text = source.read_text("utf-8", "replace")
    if _is_copied(source):
        redaction.check_secrets(source, text) if source.name in VERBATIM else redaction.check_log(source)
        shutil.copyfile(source, target)
    else:
        text = redaction.apply(text)
        if source.suffix == ".diff":  # uncommitted changes: people try out keys there
            text = remove_random_words(text)
        write_file_atomically(target, text)
    return list(redaction.find(text))


def _is_copied(path: Path) -> bool:
    """Return True for a log, and for a file that only identifies: their sha256 must stay."""
    return path.suffix == ".txt" or path.name in VERBATIM


SUITE = "mlhpc"
_IN_PACKAGE = "benchmarks/*/implementations/mlhpc-*/*/*/provenance/run_*/environment.json"


def find_environment(package: Path) -> Environment:
    """Find the environment of a package's runs. InputError if there is none, or if they had several."""
    paths = [
        path
        for path in sorted(package.glob(_IN_PACKAGE))
        if not any(part.is_symlink() for part in (path, *path.parents) if part != package)
    ]
    if not paths:
        raise InputError(f"{package}: no environment.json in its provenance; only packages of runs by mlhpc have one")
    found = [
        read_json_document(path, Environment, "an environment", ENVIRONMENT_VERSION, largest=read_limits().json)
        for path in paths
    ]
    for path, environment in zip(paths, found, strict=True):
        if environment != found[0]:
            raise InputError(
                f"{package}: its runs were made with different packages or Pythons, expected the same for all: "
                f"compare {paths[0]} and {path}"
            )
    return found[0]


def render_requirements(environment: Environment) -> str:
    """Render every distribution but the suite itself with its version.

    Names and versions fit the patterns of `InstalledPackage`, so a package cannot bring options of pip in.
    """
    lines = [f"# {environment.python} on {environment.machine}"]
    for each in environment.distributions:
        if convert_distribution_name(each.name) == SUITE:
            lines.append(f"# {SUITE} {each.version}: install it from its checkout or wheel")
        # No index has the state of that checkout.
        elif each.source == "editable":
            lines.append(f"# {convert_distribution_name(each.name)}=={each.version}: was installed from a checkout")
        else:
            lines.append(f"{convert_distribution_name(each.name)}=={each.version}")
    return "\n".join(lines) + "\n"
