"""Which files under a path are logs, and what their place says: round, submitter, system, benchmark. Reads no log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ROUND = re.compile(r"(?:^|[_\-])(v\d+\.\d+)$")
TRIAL = re.compile(r"(?:result|resumed)_(\d+)")


@dataclass(frozen=True)
class LogFile:
    """One log and what its place says. ``label`` is a short path that does not depend on where the tree lies.

    ``mode`` is None where the place does not say (run folders). ``kind`` run: a folder with run.json; package: an
    MLPerf tree; loose: anything else. ``round`` is None unless a folder above is named after one.
    """

    path: Path
    label: str
    kind: Literal["run", "package", "loose"]
    round: str | None
    submitter: str | None
    system: str
    mode: Literal["strong", "weak"] | None
    benchmark: str | None
    pruned: bool
    resumed: bool
    trial: int | None
    package: Path
    description: Path | None = None


def find_logs(paths: Sequence[Path]) -> list[LogFile]:
    """Every ``result_*.txt`` and ``resumed_*.txt`` under the paths, once each, in a stable order.

    ValueError names the path that does not exist or that holds no log.
    """
    found: dict[Path, LogFile] = {}
    for given in paths:
        if not given.exists():
            raise ValueError(f"{given}: no such file or folder")
        logs = [_place(path) for path in _candidates(given.resolve())]
        if not logs:
            raise ValueError(
                f"{given}: no result_*.txt below it; expected run folders, or an MLPerf HPC tree "
                "<submitter>/results/<system>/[strong|weak/]<benchmark>/result_*.txt"
            )
        found.update((log.path, log) for log in logs)
    return _distinct(sorted(found.values(), key=lambda log: (log.label, str(log.path))))


def _candidates(given: Path) -> Iterator[Path]:
    if given.is_file():
        yield given
        return
    for pattern in ("result_*.txt", "resumed_*.txt"):
        yield from (path for path in given.rglob(pattern) if path.is_file())


def _place(path: Path) -> LogFile:
    match = TRIAL.match(path.name)
    trial = int(match.group(1)) if match else None
    resumed = path.name.startswith("resumed_")
    if (path.parent / "run.json").is_file():
        folder = path.parent
        label = f"{folder.name}/{path.name}"
        return LogFile(path, label, "run", None, None, folder.name, None, None, False, resumed, trial, folder)
    below = _below_results(path)
    if below is None:
        label = f"{path.parent.name}/{path.name}"
        return LogFile(
            path, label, "loose", None, None, path.parent.name, None, None, False, resumed, trial, path.parent
        )
    package, parts = below
    pruned = "pruned_results" in parts
    folders = [part for part in parts[:-1] if part != "pruned_results"]
    mode: Literal["strong", "weak"] = "weak" if "weak" in folders[1:-1] else "strong"
    round_ = next((m.group(1) for part in reversed(package.parts[:-1]) if (m := ROUND.search(part))), None)
    label = "/".join([*([round_] if round_ else []), package.name, *parts])
    benchmark = folders[-1] if len(folders) > 1 else None
    described = package / "systems" / f"{folders[0]}.json"
    return LogFile(
        path=path,
        label=label,
        kind="package",
        round=round_,
        submitter=package.name,
        system=folders[0],
        mode=mode,
        benchmark=benchmark,
        pruned=pruned,
        resumed=resumed,
        trial=trial,
        package=package,
        description=described if described.is_file() else None,
    )


def _distinct(logs: list[LogFile]) -> list[LogFile]:
    """Logs of two trees that are called the same, told apart by a number after the system's name and the label."""
    trees: dict[tuple[str | None, str | None, str], list[Path]] = {}
    labels: dict[str, int] = {}
    distinct = []
    for log in logs:
        known = trees.setdefault((log.round, log.submitter, log.system), [])
        if log.package not in known:
            known.append(log.package)
        number = known.index(log.package) + 1
        count = labels[log.label] = labels.get(log.label, 0) + 1
        distinct.append(
            replace(
                log,
                system=log.system if number == 1 else f"{log.system} ({number})",
                label=log.label if count == 1 else f"{log.label} ({count})",
            )
        )
    return distinct


def _below_results(path: Path) -> tuple[Path, tuple[str, ...]] | None:
    """The package folder and the path below its ``results``: the innermost one, with a system and a log below it."""
    for parent in path.parents:
        if parent.name == "results":
            parts = path.relative_to(parent).parts
            return (parent.parent, parts) if 2 <= len(parts) <= 5 else None
    return None
