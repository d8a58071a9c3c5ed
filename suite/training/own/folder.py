"""Makes the run folder of an own loop: benchmark, configuration, trial, and copies of card and program."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlhpc.suite.config import RunConfig, load_config, resolve_config
from mlhpc.suite.data.lock import refuse_held
from mlhpc.suite.descriptor import Descriptor, describe_card, load_descriptor
from mlhpc.suite.documents import YamlSource, convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder, render_reason, render_repr, write_file_atomically
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.log.record import NOT_HYPERPARAMETERS
from mlhpc.suite.log.run_folder import RunFolder, has_run_start, may_be_used, parse_trial, write_run_info
from mlhpc.suite.world import World

CARD_SUFFIXES = (".yaml", ".yml")
# Fields of RunConfig that an own loop may set: they describe the loop, or `mlhpc.Run` acts on them. The others steer
# the harness's loop.
LOOP_SETTINGS = frozenset(
    {
        "workload",
        "size",
        "global_batch_size",
        "max_epochs",
        "gradient_accumulation_steps",
        "precision",
        "device",
        "window_steps",
        "instrumentation",
        "cache_drop_command",
        "watchdog",
        "submission",
        "hyperparameters",
    }
)
# The checker (rule config-stated) asks for these in every log, so they are logged even at their defaults.
ALWAYS_LOGGED = frozenset({"gradient_accumulation_steps", "instrumentation", "submission"})

MAX_PROGRAM_BYTES = 1 << 20


def find_benchmark(benchmark: str | Path) -> Descriptor:
    """Find a benchmark by the path of its card or the name of an installed workload. Any hyperparameters are allowed.

    InputError if the file is no card, or the name is not known.
    """
    card = Path(benchmark)
    found = describe_card(card) if card.suffix in CARD_SUFFIXES else load_descriptor(str(benchmark))
    return replace(found, hyperparameters=None)


def read_config(benchmark: Descriptor, config: str | Path | Mapping[str, Any]) -> RunConfig:
    """Read the configuration of an own loop, from a YAML file or a mapping with the same keys.

    InputError for keys that steer the harness's loop, and for hyperparameters with the name of another event.
    """
    if isinstance(config, Mapping):
        data = {"hyperparameters": {}} | dict(config)
        found = resolve_config(benchmark, YamlSource(Path("the config of mlhpc.Run"), data, {}))
    else:
        if Path(config).suffix not in CARD_SUFFIXES:
            raise InputError(f"config {str(config)!r} of mlhpc.Run: expected a dict or the path of a .yaml file")
        found = load_config(benchmark, str(config))
    foreign = sorted(found.stated - LOOP_SETTINGS)
    if foreign:
        raise InputError(
            f"config of mlhpc.Run: key {foreign[0]!r} steers only the loop of mlhpc run; remove it. "
            f"Keys for an own loop: {', '.join(sorted(LOOP_SETTINGS))}"
        )
    taken = sorted(collect_hyperparameters(found).keys() & NOT_HYPERPARAMETERS)
    if taken:
        raise InputError(
            f"config of mlhpc.Run: hyperparameters.{taken[0]}: the log has an event of this name already; "
            "rename the hyperparameter"
        )
    return found.with_stated_precision("an own loop")


def collect_hyperparameters(config: RunConfig) -> dict[str, Any]:
    """Return the hyperparameters to log: those of the configuration, and the global batch size."""
    stated: dict[str, Any] = convert_to_plain_data(config.hyperparameters)
    return {"global_batch_size": config.global_batch_size} | stated


def select_logged_config(config: RunConfig) -> dict[str, Any]:
    """Return the configuration to log: what was stated, without defaults that only the harness's loop makes true."""
    stated = config.stated | ALWAYS_LOGGED
    return {key: value for key, value in config.logged().items() if key in stated}


def make_run_folder(
    root: Path, benchmark: Descriptor, config: RunConfig, trial: int | None, runs: int, world: World
) -> tuple[RunFolder, int]:
    """Make the run folder, or add a trial to it. Without ``trial``, takes the first trial that has no log.

    All ranks call it. InputError on every rank if the folder holds runs of another configuration or cannot be written.
    """
    chosen, error = trial, None
    if world.is_first:
        try:
            chosen = _prepare_folder(RunFolder(root), benchmark, config, trial, runs, world.size)
        except OSError as caught:
            error = InputError(f"{caught.filename or root}: cannot be written: {render_reason(caught)}")
        except InputError as caught:
            error = caught
    world.check_together(error)
    return RunFolder(root), world.broadcast(chosen)


def _prepare_folder(
    folder: RunFolder, benchmark: Descriptor, config: RunConfig, trial: int | None, runs: int, ranks: int
) -> int:
    program = find_main_program()
    root = folder.root
    _clear_without_runs(folder)
    fresh = not folder.info_path.exists()
    if fresh and root.exists() and not may_be_used(root):
        raise InputError(f"{root}: has files but no run.json, so it is no run folder; choose another output")
    make_folder(root)
    # Must not be None: by `loop` in run.json an own loop differs from the harness's.
    loop = program or Path("interactive session")
    write_run_info(root, config, mode="strong", runs=runs, ranks=ranks, seed=None, same_allocation=False, loop=loop)
    _check_same(folder, benchmark, config)
    if trial is not None:
        # Before anything of the trial is written: another process may be running it.
        refuse_held(folder.lock(trial), f"trial {trial}")
    # The card of the first trial stays; `_check_same` has compared it.
    with suppress(FileExistsError):
        write_file_atomically(folder.card_path, benchmark.card_path.read_text(encoding="utf-8"), overwrite=False)
    if trial is None:
        taken = {path.name for path in folder.results()}
        # Among N + 1 numbers one is free if N are taken.
        trial = next(number for number in range(len(taken) + 1) if folder.result(number).name not in taken)
    if program is not None:
        _keep_program(folder, program, trial)
    return trial


def _clear_without_runs(folder: RunFolder) -> None:
    """Empty a folder in which no run ever began, so that another card or program may use it.

    Logs are kept as those of failed attempts.
    """
    logs = [*folder.results(), *folder.resumed(), *folder.failed()]
    if not folder.info_path.exists() or folder.read_info().loop is None:
        return
    if folder.under_way() or any(has_run_start(log) for log in logs):
        return
    for log in folder.results():
        folder.move_aside(log, parse_trial(log))
    # Everything that states how the former attempts were made; logs and output stay.
    made = (folder.card_path, folder.config_path, folder.changes_path, folder.sources_path, folder.environment_path)
    for path in (folder.info_path, *made):  # run.json first: what a kill leaves then is a folder that may be used
        path.unlink(missing_ok=True)
    shutil.rmtree(folder.code, ignore_errors=True)


def _check_same(folder: RunFolder, benchmark: Descriptor, config: RunConfig) -> None:
    """Raise InputError if the folder is that of another benchmark or configuration.

    All runs of a result have the same.
    """
    info = folder.read_info()
    if (info.workload, info.size) != (config.workload, config.size):
        raise InputError(
            f"{folder.root}: holds runs of {info.workload} {info.size}, not of {config.workload} {config.size}; "
            "choose another output"
        )
    if info.loop is None:
        raise InputError(f"{folder.root}: holds runs of mlhpc run, not of an own loop; choose another output")
    if folder.card_path.exists() and folder.card_path.read_bytes() != benchmark.card_path.read_bytes():
        raise InputError(
            f"{folder.root}: holds runs for the card {folder.card_path}, which differs from {benchmark.card_path}"
            f"{_describe_difference(folder.card_path, benchmark.card_path, info.size)}; choose another output"
        )
    before = convert_to_plain_data(load_config(benchmark, str(folder.config_path)))
    now = convert_to_plain_data(config)
    different = sorted(key for key in now if now[key] != before[key])
    if different:
        key = different[0]
        raise InputError(
            f"{folder.root}: holds runs with {key} = {render_repr(before[key])}, not {render_repr(now[key])}; "
            "choose another output"
        )


def _describe_difference(kept: Path, given: Path, size: str) -> str:
    """Name the first value of a size in which two cards differ. Empty if they differ only elsewhere."""
    one, other = (convert_to_plain_data(describe_card(path).card().size(size)) for path in (kept, given))
    different = [key for key in other if one[key] != other[key]]
    return (
        f" ({different[0]} = {render_repr(one[different[0]])}, not {render_repr(other[different[0]])})"
        if different
        else ""
    )


def find_main_program() -> Path | None:
    """Return the file of the main module. None in a notebook or at a prompt."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    path = Path(name) if name else None
    return path if path is not None and path.is_file() else None


def _keep_program(folder: RunFolder, program: Path, trial: int) -> None:
    """Copy the program into the run folder, unless it is too large.

    A later trial's changed program gets its own folder.
    """
    if program.stat().st_size > min(MAX_PROGRAM_BYTES, read_limits().json):
        return
    # Only a copy for readers: a byte that is not UTF-8 must not end the run.
    text = program.read_text(encoding="utf-8", errors="replace")
    for target in (folder.code / program.name, folder.code / f"trial_{trial}" / program.name):
        if target.exists() and target.read_text(encoding="utf-8", errors="replace") == text:
            return
        with suppress(FileExistsError):
            write_file_atomically(target, text, overwrite=False)
            return
