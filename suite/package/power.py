"""Writes the power readings of a run into a package: its own, a meter's, and the network's estimate."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder
from mlhpc.suite.log.energy.power_csv import MeterReadings, render_estimate, render_power_log
from mlhpc.suite.log.energy.power_log import SCOPES, read_power_log
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import POWER

_MARGIN_S = 60.0  # of an external meter's readings before and after a run, to show the idle power


def write_power(
    record: RunRecord, log: Path, target: Path, meter: MeterReadings | None, network_w: float | None
) -> None:
    """Write the readings of a run into a folder of the package. ``log`` is in the run folder.

    InputError if the meter has no readings of the run. InputError if its scope is not wider than the run's own.
    """
    own = log.parent / POWER / log.stem
    for path in sorted(own.glob("*.txt")) if own.is_dir() and not own.is_symlink() else ():
        # A link may lead out of the run folder.
        if path.is_file() and not path.is_symlink():
            make_folder(target)
            shutil.copyfile(path, target / path.name)
    if meter is not None:
        _write_meter(record, target, meter)
    if network_w is not None:
        if not target.is_dir():
            raise InputError(f"{log}: has no power readings of nodes; --network-power alone gives no energy")
        if (target / "sw_0.txt").exists():
            raise InputError(f"{own / 'sw_0.txt'}: the power of the network was measured; leave --network-power out")
        (target / "sw_0.txt").write_text(render_estimate(network_w, record.run_start_s or 0.0), encoding="utf-8")


def _write_meter(record: RunRecord, target: Path, meter: MeterReadings) -> None:
    """Write the readings of each node. The run's own readings have a narrower scope and stay as readings of a part."""
    start, stop = record.run_start_s, record.run_stop_s
    if start is None or stop is None:
        raise InputError(
            f"{record.path}: no run_start or no run_stop, so readings cannot be assigned to it; leave this run out"
        )
    # Stretches count from run_start, so staging before it begins below 0.
    staging_s = min((begin for parts in record.stretches.values() for begin, _ in parts), default=0.0)
    scope = meter.columns.scope
    for node, points in meter.during(start + min(staging_s, 0.0) - _MARGIN_S, stop + _MARGIN_S).items():
        path = target / f"node_{node}.txt"
        if path.exists():
            own = read_power_log(path).scope
            if SCOPES.index(own) >= SCOPES.index(scope):
                measured = f"{own} of node {node} was measured beside the run"
                raise InputError(
                    f"{record.path}: {measured}; expected a meter of a wider scope than {own}, not {scope}"
                )
            path.rename(target / f"part_{node}_{own}.txt")
        make_folder(target)
        path.write_text(render_power_log(points, meter.columns.stated), encoding="utf-8")
