"""The command `mlhpc goodput`: how much of a run's time was training that counts, and how often to save a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from analysis.fleet import checkpoint_interval as model
from suite.cli.options import JSON, format_option
from suite.errors import InputError
from suite.files import duration_text, print_line, printable
from suite.log.goodput import Goodput, find_goodput
from suite.log.run_folder import RunFolder

HELP_GROUP = "Machine"
HELP_ORDER = 7


@click.command(
    epilog="""\b
Examples:
  mlhpc goodput runs/mine
  mlhpc goodput runs/* --mtbf-h 6 --format json
""",
)
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--mtbf-h",
    type=click.FloatRange(0, min_open=True),
    help="Mean hours between failures of such a job. [learned from the interruptions of RUNS]",
)
@format_option()
def goodput(runs: tuple[Path, ...], mtbf_h: float | None, style: str) -> None:
    """Say of run folders how much of their time was training that counts, what was lost, and how often to save a checkpoint.

    The time of a trial is that from the start of its first process to the end of its last attempt.
    """
    found = []
    for root in runs:
        folder = RunFolder(root)
        each = [find_goodput(folder, trial) for trial in range(folder.read_info().runs)]
        found += [trial for trial in each if trial is not None]
    if not found:
        raise InputError(f"{', '.join(map(str, runs))}: no log with an event")
    advice = find_advice(found, None if mtbf_h is None else 3600 * mtbf_h)
    if style == JSON:
        trials = [asdict(trial) | {"folder": str(trial.folder), "ratio": trial.ratio} for trial in found]
        print_line(json.dumps({"version": 1, "trials": trials, "advice": advice}, indent=1))
        return
    for trial in found:
        print_line(printable(trial_line(trial)))
    print_line(advice_line(advice))


def trial_line(trial: Goodput) -> str:
    """One trial: its ratio and where the other time went."""
    parts = (
        ("lost", trial.lost_s),
        ("checkpoints", trial.stalled_s),
        ("starting", trial.starting_s),
        ("down", trial.down_s),
    )
    rest = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in parts)
    share = "no part" if trial.ratio is None else f"{trial.ratio:.1%}"
    count = f"{trial.interruptions} interruption{'s' * (trial.interruptions != 1)}"
    return f"{trial.folder} trial {trial.trial}: {share} of {duration_text(trial.wall_s)} counts; {rest}; {count}"


def find_advice(found: list[Goodput], mtbf_s: float | None) -> dict[str, Any]:
    """The interval between checkpoints that the measured costs and the failure rate ask for, and what it rests on."""
    costs = [(trial.stall_s, trial.write_s or 0.0, trial.saves) for trial in found if trial.stall_s is not None]
    interruptions = sum(trial.interruptions for trial in found)
    wall_s = math.fsum(trial.wall_s for trial in found)
    advice: dict[str, Any] = {"interruptions": interruptions, "mtbf_s": mtbf_s, "mtbf_interval_s": None}
    if mtbf_s is None and interruptions and wall_s > 0.0:
        learned = model.learned_mtbf_s(wall_s, interruptions)
        advice |= {"mtbf_s": learned[0], "mtbf_interval_s": learned[1:]}
    saves = sum(count for *_, count in costs)
    save_s = math.fsum(stall * count for stall, _, count in costs) / max(1, saves)
    write_s = math.fsum(write * count for _, write, count in costs) / max(1, saves)
    advice["saves"] = saves
    if advice["mtbf_s"] is None or save_s == write_s == 0.0:
        return advice
    restarts = [trial.restarting_s / trial.interruptions for trial in found if trial.interruptions]
    starts = restarts or [trial.starting_s for trial in found]
    restart_s = math.fsum(starts) / len(starts)
    interval_s = max(model.daly_s(save_s, advice["mtbf_s"]), save_s, write_s)  # none begins while one is written
    return advice | {
        "save_s": save_s,
        "restart_s": restart_s,
        "young_s": model.young_s(save_s, advice["mtbf_s"]),
        "daly_s": model.daly_s(save_s, advice["mtbf_s"]),
        "interval_s": interval_s,
        "expected_ratio": model.expected_ratio(save_s, restart_s, interval_s, advice["mtbf_s"]),
    }


def advice_line(advice: dict[str, Any]) -> str:
    """The advice as a sentence, or what is missing for one."""
    if advice["mtbf_s"] is None:
        return "no advice on checkpoints: no interruption was seen; state the time between failures with --mtbf-h"
    if "interval_s" not in advice:
        why = "those saved cost no time" if advice["saves"] else "none was saved, so what one costs is not known"
        return f"no advice on checkpoints: {why}"
    basis = "as stated"
    if advice["mtbf_interval_s"] is not None:
        low, high = advice["mtbf_interval_s"]
        basis = f"from {advice['interruptions']} seen, 90 % {duration_text(low)} to {duration_text(high)}"
    return (
        f"checkpoint.interval_s={advice['interval_s']:.3g} (Daly; Young {advice['young_s']:.3g}) for a failure every "
        f"{duration_text(advice['mtbf_s'])} ({basis}), a checkpoint that stalls {advice['save_s']:.3g} s and a restart of "
        f"{advice['restart_s']:.3g} s; then {advice['expected_ratio']:.1%} would count (modelled)"
    )
