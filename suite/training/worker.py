"""The worker process: connects its rank, imports what training needs, runs one trial, and ends with one line whatever happens."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

from suite.config import RunConfig
from suite.descriptor import Descriptor
from suite.log.run_folder import RunFolder, describe
from suite.training.startup import process_age_s
from suite.world import World, node_name

FAILED = 1
USAGE = 2


def work(
    chosen: Descriptor,
    config: RunConfig,
    output: Path,
    trial: int,
    runs: int,
    seed: int | None,
    mode: str,
    resume: bool,
    *,
    first_line: float,
) -> int:
    """Run one trial in this process's world and return the exit code. ``first_line``: perf_counter at the suite's first line."""
    interpreter_s = process_age_s() - (time.perf_counter() - first_line)
    world = World.create()
    try:
        from suite.training import trial as trials

        chosen.load()
        startup = trials.Startup(interpreter_s, time.perf_counter() - first_line)
        folder = _folder(output, config, world, mode=mode, runs=runs)
        return trials.run_trial(
            chosen, config, folder, trial, world, base_seed=seed, mode=mode, resume=resume, startup=startup
        )
    except ValueError as error:  # the same on every rank, or this rank's alone: either way nobody may be left waiting
        return _end(world, output, trial, f"{error}", USAGE)
    except KeyboardInterrupt:
        return _end(world, output, trial, "stopped by SIGINT before training", FAILED)
    except Exception as error:  # the last line of defence: one line for people, the traceback to a file
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if type(error).__name__ != "InterruptedTrialError":
            text += _keep_traceback(output, trial, world)
        return _end(world, output, trial, text, FAILED)


def _folder(output: Path, config: RunConfig, world: World, *, mode: str, runs: int) -> RunFolder:
    """The run folder: made by whoever is first (mlhpc run, submit, or this job's first worker)."""
    error = None
    if world.is_first:
        try:
            output.mkdir(parents=True, exist_ok=True)
            alone = "SLURM_ARRAY_TASK_ID" not in os.environ
            describe(output, config, mode=mode, runs=runs, ranks=world.size, same_allocation=alone)
        except OSError as caught:
            error = ValueError(f"{output}: cannot be created: {caught.strerror}")
        except ValueError as caught:
            error = caught
    world.check_together(error)
    return RunFolder(output)


def _keep_traceback(output: Path, trial: int, world: World) -> str:
    path = output / "output" / f"error_{trial}_rank{world.rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
    except OSError:
        traceback.print_exc()
        return ""
    return f" (traceback: {path})"


def _end(world: World, output: Path, trial: int, text: str, code: int) -> int:
    """Say one line, then end every rank: rank 0 speaks for an error all ranks share and gets a moment to do so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may answer the first rank's end with it
    where = "" if world.size == 1 else f" [rank {world.rank} on {node_name()}]"
    if not world.is_first:
        time.sleep(2.0)
    print(f"mlhpc: {output} trial {trial}: {text}{where}", file=sys.stderr, flush=True)
    if world.size > 1:
        time.sleep(0.5)  # an abort may discard what the launcher has not yet passed on
        world.transport.abort(code)
        os._exit(code)
    return code
