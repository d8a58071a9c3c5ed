"""One trial in the world it was started in: log, stage, train, and say how it ended. The only caller of the training loop.

Order: facts, cache drop, init (model, optimizer, data, staging), run_start, training, run_stop. The status of run_stop is computed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from suite import RULESET, VERSION
from suite.config import RunConfig, default_data_root
from suite.data.baselines import read_baselines
from suite.data.build import find_data
from suite.data.sampling import check_batch, steps_per_epoch
from suite.data.shards import Manifest
from suite.data.staging import StagingReport, own_world, stage
from suite.descriptor import Descriptor
from suite.log import mllog
from suite.log.mllog import EventLog
from suite.log.run_folder import RunFolder
from suite.machine.facts import write_facts
from suite.training.allocator import keep_freed_memory
from suite.training.checkpoint import Position, TrainingState, load_checkpoint, remove_checkpoint, save_checkpoint
from suite.training.loop import Outcome, Trainer, average
from suite.workload import Dataset, Workload
from suite.world import World

REACHED, MISSED, STOPPED = 0, 1, 3  # exit codes of a worker (2: usage)
SEED_BITS = 31
COLD_BY_SIZE_FACTOR = 5  # data over memory from which no cache can hold it (rule of MLPerf Storage)
SHAPING = {
    *("workload", "size", "global_batch_size", "gradient_accumulation_steps"),
    *("precision", "channels_last", "compile", "hyperparameters"),
}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class InterruptedTrialError(Exception):
    """A signal asked the trial to stop while there was nothing to save."""


@dataclass(frozen=True)
class Startup:
    """Seconds of this process before the trial: to the suite's first line, and from there to the end of the imports."""

    interpreter_s: float
    imports_s: float


class StopSignals:
    """Remembers a stop signal while training; before that, or the second time, it interrupts at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.deferred = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.deferred or self.name is not None:
            raise InterruptedTrialError(f"stopped by {name}")
        self.name = name

    def ignore(self) -> None:
        """From here to the end of the process: the launcher may answer the first rank's exit code with a signal to all.

        Python puts its own handlers back to the default while it shuts down, but leaves an ignored signal ignored.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def run_trial(
    descriptor: Descriptor,
    config: RunConfig,
    folder: RunFolder,
    trial: int,
    world: World,
    *,
    base_seed: int | None,
    mode: str,
    resume: bool,
    startup: Startup,
) -> int:
    """Run one trial on every rank and return the worker's exit code. ValueError is one line for the user, equal on all ranks."""
    signals = StopSignals()
    began = time.perf_counter()
    torch.set_num_threads(threads_per_rank(world))
    device = pick_device(config.device, world)
    kept = device.type == "cpu" and keep_freed_memory()
    check_batch(config.global_batch_size, world.size, config.gradient_accumulation_steps)
    source, manifest = open_data(config, world)
    path = folder.next_resumed(trial) if resume else folder.result(trial)
    _collect_facts(folder, world)
    cache_state = drop_caches(config, world, manifest)
    log = _open_log(path, world)
    try:
        return _Trial(
            descriptor=descriptor,
            config=config,
            folder=folder,
            trial=trial,
            world=world,
            device=device,
            source=source,
            manifest=manifest,
            log=log,
            mode=mode,
            base_seed=base_seed,
            resume=resume,
            startup=startup,
            keeps_freed_memory=kept,
            began=began,
            signals=signals,
            cache_state=cache_state,
        ).run()
    finally:
        log.close()


@dataclass(kw_only=True)
class _Trial:
    descriptor: Descriptor
    config: RunConfig
    folder: RunFolder
    trial: int
    world: World
    device: torch.device
    source: Path
    manifest: Manifest
    log: EventLog
    mode: str
    base_seed: int | None
    resume: bool
    startup: Startup
    keeps_freed_memory: bool
    began: float
    signals: StopSignals
    cache_state: dict[str, Any]
    in_run: bool = False

    def run(self) -> int:
        """The trial from init_start to run_stop; an error after run_start is logged as an aborted run and raised on."""
        try:
            outcome = self._train()
        except (Exception, KeyboardInterrupt) as error:
            if self.in_run:
                self._run_stop(Outcome(False, f"{type(error).__name__}: {error}".splitlines()[0]), Position(0, 0))
            raise
        self.signals.ignore()
        self.world.barrier()  # without MPI, the first rank to exit non-zero makes srun end the others
        if outcome.interrupted:
            return STOPPED
        if self.world.is_first:  # a trial that came to its end is not resumed
            remove_checkpoint(self.folder.checkpoint(self.trial))
        return REACHED if outcome.reached else MISSED

    def _train(self) -> Outcome:
        world, config, log = self.world, self.config, self.log
        size_card = self.descriptor.card().size(config.size)
        log.event(mllog.CACHE_STATE, self.cache_state["state"], metadata=self.cache_state)
        log.start(mllog.INIT)
        log.event(mllog.CACHE_CLEAR, self.cache_state["state"] == "dropped")
        world.init_torch(self.device)
        seed = world.broadcast(draw_seed(self.base_seed, self.trial) if world.is_first else None)
        torch.manual_seed(seed)
        workload = self.descriptor.load()(config)
        model = workload.build_model(world).to(self.device)
        torch.manual_seed(seed + (world.rank << SEED_BITS))  # dropout differs between ranks, initial weights do not
        parameters = count_parameters(model, workload, world)
        if parameters != size_card.model_parameters and config.submission.division == "closed":
            raise ValueError(
                f"{config.size}: model has {parameters} parameters; the card says {size_card.model_parameters}; "
                "another model is for submission.division=open"
            )
        steps = steps_per_epoch(self.manifest.samples("train"), config.global_batch_size)
        optimization = workload.build_optimizer(model, steps)
        if config.compile:
            model = torch.compile(model)
        averaged = average(model, optimization)
        state = TrainingState(model, averaged, optimization.optimizer, workload.sharded_parameters(model))
        path, identity = self.folder.checkpoint(self.trial), self._identity()
        data = _Data(workload, self.source, config, world, log, self.trial)
        trainer = Trainer(
            workload,
            config,
            size_card,
            world,
            self.device,
            state,
            optimization,
            data.train,
            data.validation,
            log,
            seed,
            lambda: self.signals.name,
            lambda at: save_checkpoint(path, world, state, position=at, seed=trainer.seed, identity=identity),
            lambda text: print(text, flush=True) if world.is_first else None,
        )
        position = Position(1, 0)
        if self.resume:
            resumed = load_checkpoint(path, world, state, identity=identity)
            position, trainer.seed = resumed.position, resumed.seed
        self._log_facts(workload, trainer.seed, parameters)
        if self.resume:
            log.event(mllog.RUN_RESUMED, metadata={"block": position.block, "next_step": position.step})
        data.open_or_stage()
        log.event(mllog.TRAIN_SAMPLES, self.manifest.samples("train"))
        log.event(mllog.EVAL_SAMPLES, self.manifest.samples("validation"))
        self._log_startup(self.startup, time.perf_counter() - self.began - data.staged_s)
        log.stop(mllog.INIT)
        world.barrier()
        log.start(mllog.RUN)
        self.in_run = True
        self.signals.deferred = True
        data.begin_overlapped()
        outcome = trainer.run(position)
        world.barrier()
        data.finish()
        self._run_stop(outcome, position)
        return outcome

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to continue: the data, and of the config what shapes the losses."""
        shaping = self.config.model_dump(mode="json", include=SHAPING)
        return {"config": shaping, "data_manifest": self.manifest.sha256, "suite_version": VERSION}

    def _log_facts(self, workload: Workload, seed: int, parameters: int) -> None:
        config, world, log = self.config, self.world, self.log
        card = self.descriptor.card()
        log.event(mllog.SUBMISSION_BENCHMARK, card.mlperf_name)
        log.event(mllog.SUBMISSION_ORG, config.submission.org)
        log.event(mllog.SUBMISSION_DIVISION, config.submission.division)
        log.event(mllog.SUBMISSION_STATUS, config.submission.status)
        log.event(mllog.SUBMISSION_PLATFORM, config.submission.platform)
        log.event(mllog.RULESET, RULESET)
        log.event(mllog.BENCHMARK_SIZE, config.size)
        log.event(mllog.SUITE_VERSION, VERSION)
        log.event(mllog.RUN_MODE, self.mode, metadata={"trial": self.trial, "launcher": world.launcher})
        log.event(mllog.SEED, seed)
        log.event(mllog.NUMBER_OF_RANKS, world.size)
        log.event(mllog.NUMBER_OF_NODES, world.nodes)
        log.event(mllog.ACCELERATORS_PER_NODE, world.local_size if self.device.type == "cuda" else 0)
        threads = torch.get_num_threads()
        log.event(
            mllog.RUN_CONFIG,
            config.model_dump(mode="json"),
            metadata={
                "device": self.device.type,
                "threads_per_rank": threads,
                "keeps_freed_memory": self.keeps_freed_memory,
            },
        )
        log.event(mllog.GRADIENT_ACCUMULATION_STEPS, config.gradient_accumulation_steps)
        for key, value in workload.hyperparameters().items():
            log.event(key, value)
        log.event(mllog.MODEL_PARAMETERS, parameters)
        sample_bytes = self.descriptor.card().size(config.size).sample_bytes
        log.event(mllog.WORK_PER_SAMPLE, asdict(workload.work()) | {"sample_bytes": sample_bytes})
        log.event(mllog.DATA_MANIFEST, self.manifest.sha256)
        log.event(mllog.BASELINE, read_baselines(self.source, self.manifest.sha256))

    def _log_startup(self, startup: Startup, init_s: float) -> None:
        world = self.world
        self.log.event(
            mllog.STARTUP,
            {
                "interpreter": world.summary(startup.interpreter_s),
                "imports": world.summary(startup.imports_s),
                "init": world.summary(init_s),
            },
        )

    def _run_stop(self, outcome: Outcome, position: Position) -> None:
        status = "success" if outcome.reached else "aborted"
        self.log.stop(mllog.RUN, metadata={"status": status, "reason": outcome.reason, "first_block": position.block})
        self.in_run = False
        if self.world.is_first:
            print(outcome.reason, flush=True)


class _Data:
    """The splits of the data set: from the data root, from node-local storage, or from one and then the other."""

    def __init__(
        self, workload: Workload, source: Path, config: RunConfig, world: World, log: EventLog, trial: int
    ) -> None:
        self._workload, self._source, self._trial = workload, source, trial
        self._config, self._world, self._log = config, world, log
        self._root = source
        self._open: dict[str, tuple[Path, Dataset]] = {}
        self._thread: threading.Thread | None = None
        self._report: StagingReport | None = None
        self._error: Exception | None = None
        self.staged_s = 0.0
        self._staging_world = own_world(world)

    def open_or_stage(self) -> None:
        """Stage now if the config says so and not in the background; either way both splits open or fail here."""
        directory = self._config.staging.directory
        if directory is not None and not self._config.staging.overlap:
            begin = time.perf_counter()
            self._log.start(mllog.STAGING)
            self._stage()
            self.staged_s = time.perf_counter() - begin
            self._log_staged(overlapped=False)
        for split in ("train", "validation"):
            self._split(split)

    def begin_overlapped(self) -> None:
        """Start background staging, inside the run, if the config says so."""
        if self._config.staging.directory is not None and self._config.staging.overlap:
            self._log.start(mllog.STAGING)
            self._thread = threading.Thread(target=self._stage_guarded, name="staging", daemon=True)
            self._thread.start()

    def train(self, block: int) -> Dataset:
        """Training data of a block. Background staging ends before a second block begins."""
        if self._thread is not None and block > 1:
            self.finish()
        return self._split("train")

    def validation(self, block: int) -> Dataset:
        """Evaluation data."""
        return self._split("validation")

    def finish(self) -> None:
        """Wait for background staging; its error is raised here, on every rank."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._world.check_together(self._error)
        self._log_staged(overlapped=True)

    def _split(self, split: str) -> Dataset:
        opened = self._open.get(split)
        if opened is None or opened[0] != self._root:
            error, dataset = None, None
            try:
                dataset = self._workload.dataset(split, self._root)
            except (ValueError, OSError) as caught:
                error = caught
            self._world.check_together(error)
            assert dataset is not None
            opened = self._open[split] = (self._root, dataset)
        return opened[1]

    def _stage(self) -> None:
        directory = self._config.staging.directory
        assert directory is not None
        place = Path(str(directory).replace("{trial}", str(self._trial)))
        self._report = stage(self._source, place, self._staging_world)

    def _stage_guarded(self) -> None:
        try:
            self._stage()
        except (ValueError, OSError) as error:
            self._error = error

    def _log_staged(self, *, overlapped: bool) -> None:
        report = self._report
        assert report is not None
        self._root = report.root
        self._log.stop(mllog.STAGING, metadata={"staging_duration": report.seconds})
        self._log.event(mllog.STAGING_STATS, report.stats(overlapped=overlapped))


def threads_per_rank(world: World) -> int:
    """OMP_NUM_THREADS if the launcher set it, else the cores this process may use shared among the node's ranks."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(given) if given.isdigit() and int(given) > 0 else max(1, len(os.sched_getaffinity(0)) // world.local_size)
    )


def pick_device(wanted: str, world: World) -> torch.device:
    """This rank's device: ``auto``, ``cpu`` or ``cuda``. ValueError if CUDA is asked for and there is none for this rank."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and available == 0):
        return torch.device("cpu")
    if world.local_rank >= available and available != 1:
        raise ValueError(f"device cuda: local rank {world.local_rank} has no GPU; this node shows {available}")
    device = torch.device("cuda", world.local_rank if available > 1 else 0)  # srun --gpus-per-task shows each rank one
    torch.cuda.set_device(device)
    return device


def count_parameters(model: nn.Module, workload: Workload, world: World) -> int:
    """Parameters of the whole model, of which every rank may hold only a share. A collective."""
    shares = workload.sharded_parameters(model)
    mine = {id(parameter) for parameter in shares}
    replicated = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in mine)
    return replicated + sum(map(int, world.allgather(sum(share.numel() for share in shares))))


def open_data(config: RunConfig, world: World) -> tuple[Path, Manifest]:
    """The data root and its manifest, read by rank 0 alone. ValueError says how to make the data."""
    root = config.data or default_data_root(config.workload, config.size)
    manifest, error = None, None
    if world.is_first:
        try:
            manifest = find_data(root, config.workload, config.size)
        except (ValueError, OSError) as caught:
            error = caught
    world.check_together(error)
    return root, world.broadcast(manifest)


def draw_seed(base_seed: int | None, trial: int) -> int:
    """The seed of a trial: base + trial, or fresh from the operating system."""
    if base_seed is not None:
        return base_seed + trial
    return int.from_bytes(os.urandom(8)) >> (64 - SEED_BITS)


def drop_caches(config: RunConfig, world: World, manifest: Manifest) -> dict[str, Any]:
    """Run the site's cache-drop command on every node, or take what the job script reports, and say what is known of the caches.

    ``dropped`` needs exit code 0 on every node; ``cold-by-size`` a data set no memory can hold; else ``unverified``.
    """
    command, code = config.cache_drop_command, None
    if "MLHPC_CACHE_DROP_COMMAND" in os.environ:
        command, reported = os.environ["MLHPC_CACHE_DROP_COMMAND"], os.environ.get("MLHPC_CACHE_DROP_RC", "")
        code = int(reported) if reported.lstrip("-").isdigit() else None
    elif command and world.local_rank == 0:
        code = _exit_code(command)
    codes = sorted({c for c in world.allgather(code) if c is not None})
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {"command": command, "exit_codes": codes, "data_bytes": manifest.bytes, "memory_bytes": memory_bytes}
    if command and codes == [0]:
        return {"state": "dropped"} | facts
    if manifest.bytes > COLD_BY_SIZE_FACTOR * memory_bytes:
        return {"state": "cold-by-size"} | facts
    return {"state": "unverified"} | facts


def _exit_code(command: str) -> int:
    try:
        return subprocess.run(shlex.split(command), capture_output=True, timeout=300).returncode
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 127


def _collect_facts(folder: RunFolder, world: World) -> None:
    error = None
    if world.local_rank == 0:
        try:
            write_facts(folder.root)
        except OSError as caught:
            error = ValueError(f"{folder.facts}: cannot be written: {caught.strerror}")
    world.check_together(error)


def _open_log(path: Path, world: World) -> EventLog:
    log, error = EventLog(None), None
    if world.is_first:
        try:
            log = EventLog(path)
        except FileExistsError:
            error = ValueError(f"{path}: exists already; a trial never writes over an earlier one")
        except OSError as caught:
            error = ValueError(f"{path}: cannot be written: {caught.strerror}")
    world.check_together(error)
    return log
