"""Builds a results package in the MLPerf HPC tree from run folders.

Logs are copied byte for byte and never edited. An earlier result is never overwritten. The whole package, with what it
had before, is first made in a temporary folder next to it, and then takes its place by a rename. So a build that is
killed leaves the package as it was; the next build removes the temporary folder. The sha256 manifest is written last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite import NO_SUBMITTER
from mlhpc.suite.compliance.package_files import check_manifest, render_package_manifest
from mlhpc.suite.compliance.rebuild import build_description
from mlhpc.suite.compliance.rules.package_rules import list_blank_fields
from mlhpc.suite.config import SUBMITTER_HINT, check_folder_name, find_default_submitter
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import add_path_to_errors, make_folder, make_scratch_folder, write_file_atomically
from mlhpc.suite.log.energy.power_log import render_estimate
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import CRATE, MANIFEST, POWER
from mlhpc.suite.log.score import find_failure
from mlhpc.suite.machine.secrets import remove_secrets
from mlhpc.suite.machine.system import System
from mlhpc.suite.package.implementation import list_kept, write_implementation
from mlhpc.suite.package.redaction import describe_personal_words
from mlhpc.suite.package.results import NO_SUBMITTERS, Result, Run, compute_score, group_results, list_notes, read_run
from mlhpc.suite.plugins import EXCHANGE, explain_missing_wing, list_missing_wings, load_export

Meter = Callable[[RunRecord, Path], None]  # writes the readings of an external meter during a run into a folder

# The option that states what the logs do not agree on, by the key of the logs.
_OPTIONS = {
    "submission_org": "--submitter",
    "submission_division": "--division",
    "submission_status": "--status",
}


@dataclass(frozen=True)
class Package:
    """A package that was built: its folder and results, and messages for a person.

    ``personal`` lists the names of hosts, paths and accounts that it contains. ``incomplete`` names each result without
    a score, with the reason.
    """

    folder: Path
    results: tuple[Result, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    personal: tuple[str, ...]
    incomplete: tuple[str, ...]


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
    redact: Collection[str] = (),
    meter: Meter | None = None,
    network_w: float | None = None,
    system_submitter: str | None = None,
) -> Package:
    """Build the package ``out``, or add to it, from run folders. The default of ``out`` is submissions/<submitter>.

    Submitter, division and status default to those in the logs. If the logs name no submitter, it is marked as late.
    Then its default is the person's own, else ``system_submitter``. ``stated`` is the description block of a system
    file.

    ``count_failed`` accepts logs without run_stop as failed runs. ``redact`` names the
    `mlhpc.suite.package.redaction.KINDS` to remove; secrets are always removed. ``meter`` writes readings of an
    external meter. ``network_w`` is the network's estimated power in W. InputError, before anything is written, if the
    runs cannot be packaged together.
    """
    check_folder_name("--system", system)
    runs = [read_run(folder) for folder in folders]
    _check_ended(runs)
    # Every check comes before the first file is written.
    _check_one_suite(runs)
    _check_kept_files(runs)
    submitter = submitter or _choose_submitter(runs, system_submitter)
    check_folder_name("--submitter", submitter)
    _check_submitter(runs, submitter)
    package = out if out is not None else Path("submissions") / submitter
    if package.absolute().name != submitter:
        # In the folder of another submitter a package would be a part of that one's
        above = (package, *package.parents, *package.absolute().parents)
        other = next((each for each in above if (each / MANIFEST).is_file()), None)
        why = f"{other} is the package of {other.absolute().name}; " if other is not None else ""
        place = package / submitter if other is None else other.parent / submitter
        raise InputError(f"-o {package}: a package's folder has the name of its submitter; {why}expected -o {place}")
    division = division or _find_common_value(runs, "submission_division", lambda record: record.division)
    status = status or _find_common_value(runs, "submission_status", lambda record: record.submission_status)
    results = tuple(group_results(runs, system))
    if (meter is not None or network_w is not None) and any(result.scenario == "weak" for result in results):
        raise InputError("a throughput result has no energy; leave --power and --network-power out")
    _check_failures(results, count_failed)
    place = Path(os.path.realpath(package))  # a package may be a link to another disk
    if Path.cwd().is_relative_to(place):  # it would stay in the old folder, which is removed
        raise InputError(
            f"{package}: the working directory lies in it, and a package is replaced as a whole: cd out of it"
        )
    make_folder(place.parent)
    with ExitStack() as stack:
        lock = place.parent / f".{submitter}.lock"
        stack.enter_context(add_path_to_errors(package, lock))
        stack.enter_context(create_lock(lock, f"package {package}", ends=True))
        _remove_remains(place, submitter)
        _check_unchanged(package)
        _check_absent(results, package)
        # On the file system of the package, so that it can be renamed.
        scratch = stack.enter_context(make_scratch_folder(place.parent, f".{submitter}-"))
        staged = scratch / submitter  # the name that its crate has
        stack.enter_context(add_path_to_errors(package, staged))
        if place.exists():
            shutil.copytree(place, staged, symlinks=True)
        personal: list[tuple[Path, str, str]] = []
        for result in results:
            _write_logs(staged, result, meter, network_w)
            personal += write_implementation(staged, result, redact, submitter, stated)
            names = {"submitter": submitter, "division": division, "status": status}
            _write_system(staged, package, result, system, names)
        undescribed = _write_crate(staged, package)  # before the manifest, which lists its checksum
        write_package_manifest(staged)
        _put_in_place(staged, place, scratch / _BEFORE)
    warnings = (*undescribed, *_list_blank_fields(package, results))
    incomplete = tuple(
        f"{package / result.folder}: {score.reason}" for result in results if not (score := compute_score(result)).valid
    )
    remarks = tuple(list_notes(results, division, submitter))
    return Package(package, results, remarks, warnings, tuple(describe_personal_words(personal)), incomplete)


def _remove_remains(place: Path, submitter: str) -> None:
    """Remove the temporary folders of killed builds. The caller holds the lock, so nobody uses them.

    One that was killed between the two renames of a package had put the old one aside: it comes back.
    """
    for folder in place.parent.glob(f".{submitter}-*"):
        if not re.fullmatch(r"[0-9a-f]{16}", folder.name.removeprefix(f".{submitter}-")) or folder.is_symlink():
            continue
        if (folder / _BEFORE).is_dir() and not place.exists():
            (folder / _BEFORE).rename(place)
        shutil.rmtree(folder)


def _put_in_place(staged: Path, place: Path, before: Path) -> None:
    """Rename a package to its place. The one that lies there is put aside first, and comes back if that fails."""
    try:
        if place.exists():
            place.rename(before)
        staged.rename(place)
    finally:
        if before.exists() and not place.exists():
            before.rename(place)


_BEFORE = ".before"  # the package that a new one replaces, in the temporary folder


def _write_crate(staged: Path, package: Path) -> tuple[str, ...]:
    """Describe the package for other tools (RO-Crate). Return a warning if the wing that does it is not installed."""
    if EXCHANGE in list_missing_wings():
        return (f"{package / CRATE}: not written: {explain_missing_wing(EXCHANGE)}",)
    write_file_atomically(staged / CRATE, load_export("ro-crate", "RO-Crate")(staged))
    return ()


def write_package_manifest(package: Path) -> None:
    """Write the manifest of all files of a package. It is the last file: a package with a manifest is complete."""
    write_file_atomically(package / MANIFEST, render_package_manifest(package))


def _check_ended(runs: Sequence[Run]) -> None:
    """Raise InputError if a run goes on: its log would be that of a failed one."""
    for run in runs:
        if text := run.folder.under_way_text():
            raise InputError(
                f"{text}: wait until mlhpc status {run.folder.root} shows that all runs have ended, then package them"
            )


def _check_failures(results: Sequence[Result], count_failed: bool) -> None:
    """Raise InputError for a run without run_stop, or with status success that did not reach the target."""
    for result in results:
        for record in (*result.scored, *result.pruned):
            if record.run_stop_s is None and not count_failed:
                raise InputError(
                    f"{record.path}: the log has no run_stop, so the run was cut off; "
                    "run it again, or count it as the one run that may fail with --count-failed"
                )
            why = find_failure(record, result.benchmark)
            if record.status == "success" and why is not None:
                raise InputError(f"{record.path}: status is 'success', but: {why}")


def _check_absent(results: Sequence[Result], package: Path) -> None:
    for folder in (package / result.folder for result in results):
        if folder.exists():
            raise InputError(
                f"{folder}: exists already, and results are never overwritten; choose another --system or -o"
            )


def _check_unchanged(package: Path) -> None:
    """Raise InputError if an existing package differs from its manifest: a new manifest would hide the damage."""
    if not package.exists() or (package.is_dir() and not any(package.iterdir())):
        return
    if not os.path.lexists(package / MANIFEST):
        raise InputError(
            f"{package}: a package without {MANIFEST} is not whole (was its build interrupted?): move it away or"
            " remove it and give the same command again, or choose another -o"
        )
    # One difference is enough to refuse.
    for _, path, message in check_manifest(package):
        raise InputError(
            f"{path}: {message}; nothing can be added to a changed package: restore the file, or build the package anew"
        )


def _check_one_suite(runs: Sequence[Run]) -> None:
    """Raise InputError if the runs were made by different versions or commits of the suite."""
    for run in runs[1:]:
        for what in ("suite_version", "git"):
            one, other = getattr(runs[0].info, what), getattr(run.info, what)
            if one != other:
                raise InputError(
                    f"{run.folder.root}: {what} is {other}, in {runs[0].folder.root} {one}; package them with separate"
                    " commands"
                )


def _choose_submitter(runs: Sequence[Run], system_submitter: str | None) -> str:
    """Return the submitter that the logs name, or else the person's default, or that of the system file."""
    if any(record.org not in NO_SUBMITTERS for run in runs for record in run.records):
        return _find_common_value(
            runs, "submission_org", lambda record: None if record.org in NO_SUBMITTERS else record.org
        )
    submitter = find_default_submitter() or system_submitter
    if submitter is None:
        raise InputError(
            f"no log names a submitter (submission_org is {NO_SUBMITTER!r}): give --submitter ORG, "
            f"which the package marks as late (for later runs {SUBMITTER_HINT})"
        )
    return submitter


def _check_kept_files(runs: Sequence[Run]) -> None:
    """Raise InputError if a file of a run folder that the package would keep is damaged."""
    damaged = [(run, *found) for run in runs for found in run.kept.list_problems(run.records)]
    if damaged:
        run, path, problem = damaged[0]
        others = ", ".join(str(other) for _, other, _ in damaged[1:4])
        more = f"; {len(damaged) - 1} more damaged: {others}" if others else ""
        way_on = "restore it, or move it away to package without it"
        if path.relative_to(run.folder.root).as_posix() in run.kept.list_required(run.records):
            way_on = "restore it from a copy of the run folder, or run again: no run is packaged without it"
        raise InputError(f"{path}: {problem}; {way_on}{more}")


def _check_submitter(runs: Sequence[Run], submitter: str) -> None:
    """Raise InputError if a log names another organisation: the package would break rule submitter-agrees.

    A log that names none may get a late submitter.
    """
    if submitter == NO_SUBMITTER:
        raise InputError(f"--submitter {submitter!r} names nobody; expected the name of an organisation")
    for run in runs:
        for record in run.records:
            if record.org in (submitter, *NO_SUBMITTERS):
                continue
            again = f"--set submission.org={submitter}"
            if run.info.loop is not None:
                again = f"submission: {{org: {submitter}}} in the configuration of mlhpc.Run"
            raise InputError(
                f"{record.path}: the log names the submitter {record.org!r} (submission_org), the package"
                f" {submitter!r}; give --submitter {record.org!r}, or repeat the training with {again}"
            )


def _find_common_value(runs: Sequence[Run], key: str, value: Callable[[RunRecord], str | None]) -> str:
    """Return the value on which all logs agree. InputError if they do not, or if none has one."""
    found = dict.fromkeys(value(record) for run in runs for record in run.records)
    values = [text for text in found if text is not None]
    if len(values) != 1:
        option = _OPTIONS[key]
        raise InputError(
            f"the logs say {key} = {', '.join(map(repr, values)) or 'nothing'}; expected one value; "
            f"give {option}, or package the runs with separate commands"
        )
    return values[0]


def _list_blank_fields(package: Path, results: Sequence[Result]) -> Iterator[str]:
    """Yield a warning for each system description with fields that neither the facts nor the system file fill."""
    for result in results:
        path = package / "systems" / f"{result.system_id}.json"
        blank = list_blank_fields(json.loads(path.read_text(encoding="utf-8")))
        if blank:
            keys = ", ".join(name.removeprefix("host_") for name in blank)
            yield f"{path}: not known: {', '.join(blank)}; state them in the system file (description: {keys})"


def _write_system(staged: Path, package: Path, result: Result, system: str, names: Mapping[str, str]) -> None:
    """Describe the system by what the package keeps of the runs, as the checker does again."""
    weak = result.scenario == "weak"
    # The checker asks for a name, and --system is one.
    description = build_description(list_kept(staged, result), result.scored[0], weak=weak, system=system, names=names)
    text = remove_secrets(json.dumps(description, indent=4, ensure_ascii=False)) + "\n"
    name = Path("systems") / f"{result.system_id}.json"
    if (package / name).exists() and (package / name).read_text(encoding="utf-8") != text:
        raise InputError(f"{package / name}: exists already and describes another system; choose another --system")
    write_file_atomically(staged / name, text)


def _write_logs(staged: Path, result: Result, meter: Meter | None, network_w: float | None) -> None:
    """Copy the logs of a result, with the power readings of its scored runs."""
    for path, name in result.names.items():
        target = staged / result.folder / name
        make_folder(target.parent)
        shutil.copyfile(path, target)
    for record in result.scored:
        if record.path is not None:
            name = Path(result.names[record.path]).stem
            _write_power(record, record.path, staged / result.folder / POWER / name, meter, network_w)


def _write_power(record: RunRecord, log: Path, target: Path, meter: Meter | None, network_w: float | None) -> None:
    """Write the readings of a run into a folder of the package. ``log`` is in the run folder.

    InputError if the meter or the estimate does not fit the run's own readings.
    """
    own = log.parent / POWER / log.stem
    for path in sorted(own.glob("*.txt")) if own.is_dir() and not own.is_symlink() else ():
        # A link may lead out of the run folder.
        if path.is_file() and not path.is_symlink():
            make_folder(target)
            shutil.copyfile(path, target / path.name)
    if meter is not None:
        meter(record, target)
    if network_w is not None:
        if not target.is_dir():
            raise InputError(f"{log}: has no power readings of nodes; --network-power alone gives no energy")
        if (target / "sw_0.txt").exists():
            raise InputError(f"{own / 'sw_0.txt'}: the power of the network was measured; leave --network-power out")
        (target / "sw_0.txt").write_text(render_estimate(network_w, record.run_start_s or 0.0), encoding="utf-8")
