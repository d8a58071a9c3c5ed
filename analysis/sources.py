"""The paths of one report, sorted by what they hold: logs, ceilings and counters, all-to-all sweeps, steps of a demo, rankings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.network.fit import Fit, fit_sweep
from analysis.network.sweep import is_sweep, read_sweep
from analysis.page.contests import Section, is_ranking, read_rankings
from analysis.page.issues import Issue
from analysis.page.steps import is_steps, read_failures
from analysis.roofline.inputs import Inputs, read_inputs, split
from suite.errors import InputError
from suite.log.reader import read_events


@dataclass(frozen=True)
class Sources:
    """What is at some paths: folders and files of logs, ceilings and counters, sweeps, failures of a demo, contests."""

    logs: tuple[Path, ...]
    inputs: Inputs
    networks: tuple[Fit, ...]
    failures: tuple[Issue, ...]
    contests: tuple[Section, ...] = ()


def read_sources(paths: Sequence[Path], what_if: Sequence[Path] = ()) -> Sources:
    """Sort paths by what they hold and read all but the logs. InputError if there is no log, or a file is none of these."""
    steps = [path for path in paths if is_steps(path)]
    sweeps = [path for path in paths if is_sweep(path)]
    rankings = [path for path in paths if is_ranking(path)]
    logs, files = split([path for path in paths if path not in (*steps, *sweeps, *rankings)])
    if not logs:
        raise InputError(f"{paths[0]}: no report without logs; give run folders or packages as well")
    for path in logs:
        if path.is_file() and not read_events(path, steps=False).events:
            raise InputError(f"{path}: holds no MLLOG event and is no file that a report reads")
    networks = tuple(fit_sweep(read_sweep(path)) for path in sweeps)
    failures, contests = tuple(read_failures(steps)), read_rankings(rankings)
    return Sources(tuple(logs), read_inputs(files, what_if), networks, failures, contests)
