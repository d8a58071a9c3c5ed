"""Runs one trial as one rank: connects to the other ranks, then imports torch. Every failure prints one line."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mlhpc.suite import FIRST_LINE_S
from mlhpc.suite.data.lock import LockedError, create_lock_for_all_ranks
from mlhpc.suite.errors import InputError, explain_missing
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import make_folder, print_line, render_error, render_reason
from mlhpc.suite.launcher import ARRAY_VARIABLES
from mlhpc.suite.log.checkpoint_index import find_damage
from mlhpc.suite.log.run_folder import ResumeDecision, plan_and_prepare_resume, plan_resume, write_run_info
from mlhpc.suite.shadowed import explain_shadowed
from mlhpc.suite.training.devices import (
    InterruptedTrialError,
    StopSignals,
    compute_process_age_s,
    end_hung_start,
    end_with_launcher,
)
from mlhpc.suite.training.statement import TrialPlan, print_for_trial, write_exit_code
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World, find_node_name

if TYPE_CHECKING:  # torch is imported once the ranks are connected
    from mlhpc.suite.training.step_timing import ProgressMarks


def run_worker(plan: TrialPlan) -> int:
    """Run one trial as one rank and return the exit code."""
    interpreter_s = compute_process_age_s() - (time.perf_counter() - FIRST_LINE_S)
    # Before the ranks connect, because their sockets need the descriptors.
    set_max_open_files()
    with end_hung_start(plan.config.watchdog), end_with_launcher():
        world = World.create()
    watchdog = None
    try:
        from mlhpc.suite.training import statement, trial
        from mlhpc.suite.training.step_timing import ProgressMarks
        from mlhpc.suite.training.watchdog import start_watchdog

        load_workload(plan.descriptor)
        # Imports leave about 200,000 objects. A full collection would look through them in the middle of a step.
        gc.freeze()
        imported_at = time.perf_counter()
        _make_folder(plan, world)
        stacks, progress = plan.folder.stacks(plan.trial, world.rank), ProgressMarks()
        world, watchdog = start_watchdog(
            world, plan.config.watchdog, stacks, lambda text: print_for_trial(plan, text), progress
        )
        startup = statement.Startup(interpreter_s, imported_at - FIRST_LINE_S, imported_at)
        with create_lock_for_all_ranks(plan.folder.lock(plan.trial), f"trial {plan.trial}", world):
            way = _decide_on_resume(plan, world, progress)
            if way.code is not None:
                StopSignals().ignore()  # the launcher answers the first non-zero exit with a signal to the others
                world.barrier()
                return way.code
            if world.is_first:
                plan.folder.exit_code(plan.trial).unlink(missing_ok=True)
            plan = replace(plan, resume=way.resume)
            with nullcontext() if watchdog is None else watchdog.first():
                code = trial.run_trial(plan, world, startup, progress, watchdog)
            if world.is_first:
                write_exit_code(plan, code)
    except LockedError as error:  # the trial is somebody's: its exit code is not ours to write
        return _end_all_ranks(world, plan, f"{error}", ExitCode.USAGE, tell=False)
    except InputError as error:  # the same on every rank, or this rank's alone: either way nobody may be left waiting
        return _end_all_ranks(world, plan, f"{error}", ExitCode.USAGE)
    except KeyboardInterrupt:
        return _end_all_ranks(world, plan, "stopped by SIGINT before training", ExitCode.FAILED)
    except OSError as error:  # the machine: a full disk, a file server that does not answer
        return _end_all_ranks(world, plan, render_error(error), ExitCode.FAILED)
    except InterruptedTrialError as error:
        return _end_all_ranks(world, plan, f"{type(error).__name__}: {error}", ExitCode.FAILED)
    except Exception as error:  # the last line of defence: one line for people, the traceback to a file
        known = explain_shadowed(error) or explain_missing(error)  # the environment's fault, not ours
        text = known or f"{type(error).__name__}: {error}".splitlines()[0]
        code = ExitCode.USAGE if known else ExitCode.FAILED
        return _end_all_ranks(world, plan, text + _keep_traceback(plan, world), code)
    finally:
        if watchdog is not None:
            watchdog.close()
    return code


def set_max_open_files() -> None:
    """Raise this process's limit of open files to its maximum: gloo connects every rank with every other."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        with suppress(OSError, ValueError):  # a limit of the kernel below that of the process
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _make_folder(plan: TrialPlan, world: World) -> None:
    """Make the run folder if there is none yet. `mlhpc run`, `mlhpc submit` and other workers may have made it."""
    root, error = plan.folder.root, None
    if world.is_first:
        try:
            make_folder(root)
            # The tasks of an array are jobs of their own, each with its own allocation.
            alone = not any(os.environ.get(name) for name in ARRAY_VARIABLES)
            write_run_info(
                root,
                plan.config,
                mode=plan.mode,
                runs=plan.runs,
                ranks=world.size,
                seed=plan.base_seed,
                same_allocation=alone,
            )
        except OSError as caught:
            error = InputError(f"{root}: cannot be created: {render_reason(caught)}")
        except InputError as caught:
            error = caught
    world.check_together(error)


def _decide_on_resume(plan: TrialPlan, world: World, progress: ProgressMarks) -> ResumeDecision:
    """Decide on rank 0 how the trial continues, and move failed logs aside. Without --resume it starts."""
    if not plan.resume:
        return ResumeDecision()
    folder, trial, replace_failed = plan.folder, plan.trial, plan.replace_failed
    way = _decide_on_first_rank(world, lambda: plan_resume(folder, trial, replace_failed=replace_failed))
    # All ranks read: a checkpoint may be larger than one node reads in reasonable time.
    damage = _find_damage(plan, world, progress) if way.resume else None
    way = _decide_on_first_rank(
        world, lambda: plan_and_prepare_resume(folder, trial, replace_failed=replace_failed, damage=damage)
    )
    if way.text and world.is_first:
        print_line(f"trial {trial}: {way.text}", result=False)
    return way


def _decide_on_first_rank(world: World, decide: Callable[[], ResumeDecision]) -> ResumeDecision:
    """Return what rank 0 decides. InputError on every rank if it cannot."""
    way, error = ResumeDecision(), None
    if world.is_first:
        try:
            way = decide()
        except OSError as caught:
            error = InputError(render_error(caught))
    world.check_together(error)
    decided: ResumeDecision = world.broadcast(way, ResumeDecision)
    return decided


def _find_damage(plan: TrialPlan, world: World, progress: ProgressMarks) -> str | None:
    """Return one line on why the checkpoint cannot be used, or None if it is whole. Each rank reads its share."""
    progress.enter("comparing the checkpoint with its checksums")
    path = plan.folder.checkpoint(plan.trial)
    found = world.allgather(find_damage(path, reader=world.rank, readers=world.size, tick=progress.tick))
    return next((text for text in found if text is not None), None)


def _keep_traceback(plan: TrialPlan, world: World) -> str:
    path = plan.folder.root / "output" / f"error_{plan.trial}_rank{world.rank}.txt"
    try:
        make_folder(path.parent)
        path.write_text(traceback.format_exc())
    except OSError:
        traceback.print_exc()
        return ""
    return f" (traceback: {path})"


def _end_all_ranks(world: World, plan: TrialPlan, text: str, code: int, *, tell: bool = True) -> int:
    """Print one line, then end every rank.

    Other ranks wait a moment, so that rank 0 reports an error that all ranks have.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may answer the first rank's end with it
    where = "" if world.size == 1 else f" [rank {world.rank} on {find_node_name()}]"
    if not world.is_first:
        time.sleep(2.0)
    print_for_trial(plan, f"{text}{where}")
    if tell and plan.folder.info_path.exists():
        write_exit_code(plan, code, overwrite=False)  # the first rank to end says why
    if world.size > 1:
        time.sleep(0.5)  # an abort may discard what the launcher has not yet passed on
        world.transport.abort(code)
        os._exit(code)
    return code
