"""Says how many runs can show a difference on this machine, or which difference a time can show, before any is run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.card import ReferencePoints
from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_duration
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.statistics.power import RunsNeeded, estimate_runs_needed, find_detectable_ratio

LEAST_RUNS = 3  # earlier ones; two give no idea of their spread
MOST_FOLDERS = 200  # that are looked at


@dataclass(frozen=True)
class KnownSpread:
    """The spread of log time between runs of one session, with its degrees of freedom, and the seconds of a run.

    ``run_s`` None: not known. ``source`` says of which runs.
    """

    spread: float
    dof: float
    run_s: float | None
    source: str

    @staticmethod
    def of(sessions: Sequence[Sequence[float]], source: str, *, seconds: bool = True) -> KnownSpread:
        """Pool the spread inside each session. Each needs two values, which vary."""
        logs = [[math.log(value) for value in values] for values in sessions if len(values) > 1]
        dof = sum(len(values) - 1 for values in logs)
        squares = sum((len(values) - 1) * statistics.variance(values) for values in logs)
        every = [value for values in sessions for value in values]
        return KnownSpread(math.sqrt(squares / dof), dof, statistics.fmean(every) if seconds else None, source)

    def count_runs(self, difference: float) -> RunsNeeded:
        """Count the runs of each side that show a difference (0.05: 5 %) in 8 of 10 cases."""
        return estimate_runs_needed(self.spread, self.dof, difference)

    def explain_difference(self, difference: float) -> str:
        """Say how many runs show a difference, and how long they take."""
        needed = self.count_runs(difference)
        took = ""
        if needed.runs is not None and self.run_s is not None:
            took = f"; {needed.runs} runs take about {render_duration(needed.runs * self.run_s)}"
        return f"{needed.render()}{took} ({self._describe()})"

    def explain_time(self, seconds: float) -> str:
        """Say how many runs a time is enough for, and which difference they show. InputError: fewer than two."""
        if self.run_s is None:
            raise InputError(f"how long a run takes here is not known ({self._describe()}); run one first")
        runs = int(seconds / self.run_s)
        if runs < 2:
            raise InputError(
                f"{render_duration(seconds)} is enough for {runs} of two runs: one takes about"
                f" {render_duration(self.run_s)}"
            )
        ratio = find_detectable_ratio(self.spread, self.dof, (runs, runs))
        return (
            f"{runs} runs fit into {render_duration(seconds)}; so many of each side show {100 * (ratio - 1):.2g} % in "
            f"8 of 10 cases of normal noise ({self._describe()})"
        )

    def _describe(self) -> str:
        return f"spread {100 * self.spread:.2g} %, {self.source}"


def find_known_spread(
    config: RunConfig, ranks: int, places: Sequence[Path], points: ReferencePoints | None
) -> KnownSpread | None:
    """Find the spread of earlier runs of this configuration in run folders, else that of the reference points.

    None if there is neither. Runs count that reached the target on as many ranks with this batch.
    """
    sessions: list[list[float]] = []
    pace: list[float] = []  # seconds of an epoch
    for folder in _list_folders(config, places):
        records = [summarise_log(read_events(path, steps=False)) for path in folder.results()]
        alike = [each for each in records if each.ranks == ranks and each.global_batch_size == config.global_batch_size]
        times = [each.time_to_train_s for each in alike if _reached(each) and each.time_to_train_s]
        pace += [epoch.stop_s - epoch.start_s for each in alike for epoch in each.epochs if epoch.complete]
        sessions.append(times)
    several = [times for times in sessions if len(set(times)) > 1]
    count = sum(map(len, several))
    if count >= LEAST_RUNS:
        return KnownSpread.of(several, f"of {count} earlier runs here in {len(several)} run folders")
    reference = {point.global_batch_size: point.epochs for point in points.points} if points is not None else {}
    epochs = reference.get(config.global_batch_size, ())
    if len(set(epochs)) < 2:
        return None
    known = KnownSpread.of([epochs], f"of the epochs of {len(epochs)} reference runs", seconds=False)
    run_s = statistics.fmean(epochs) * statistics.fmean(pace) if pace else None
    return KnownSpread(known.spread, known.dof, run_s, known.source)


def _reached(record: RunRecord) -> bool:
    return record.status == "success" and not record.resumed


def _list_folders(config: RunConfig, places: Sequence[Path]) -> list[RunFolder]:
    """List the run folders of this workload and size in some folders, the newest first."""
    infos = [info for place in places if place.is_dir() for info in place.glob("*/run.json")]
    found = []
    for info in sorted(infos, key=lambda path: path.stat().st_mtime, reverse=True)[:MOST_FOLDERS]:
        folder = RunFolder(info.parent)
        try:
            known = folder.read_info()
        except InputError:
            continue
        if (known.workload, known.size, known.loop) == (config.workload, config.size, None):
            found.append(folder)
    return found
