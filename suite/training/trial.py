"""Runs one trial on this rank: facts, cache drop, init, run_start, training, run_stop.

Init builds model and optimizer and opens the data. The status in run_stop is computed from the evaluations,
never assumed.

Finds the data set of a trial, stages it before or during training, and opens its splits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mlhpc.suite import VERSION
from mlhpc.suite.card import read_reference_courses, render_baselines
from mlhpc.suite.config import RunConfig, choose_default_data_root
from mlhpc.suite.data.build import find_data
from mlhpc.suite.data.manifest import Manifest, Verification, verify_shards
from mlhpc.suite.data.sampling import check_batch, count_steps_per_epoch
from mlhpc.suite.data.staging import StagingReport, create_own_world, stage
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import read_choices, summarise_log
from mlhpc.suite.log.reference_course import describe_run_course
from mlhpc.suite.log.run_folder import find_newest_log, plan_and_prepare_resume
from mlhpc.suite.machine.choice.chooser import Chooser, make_chooser
from mlhpc.suite.machine.choice.precision import choose_precision
from mlhpc.suite.machine.power.beside import run_power_sampler
from mlhpc.suite.training.checkpoint import Checkpoint, find_refusal
from mlhpc.suite.training.cuda_graphs import choose_graphs, find_graph_problem
from mlhpc.suite.training.devices import StopSignals, set_up_rank
from mlhpc.suite.training.loop import Trainer, TrainingOutcome
from mlhpc.suite.training.parallel.apply import build
from mlhpc.suite.training.parallel.parallel_dims import Parallel, cut
from mlhpc.suite.training.session import RunSession, describe_error
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.training.statement import (
    SEED_BITS,
    RunHeader,
    Startup,
    TrialPlan,
    check_parameters,
    draw_seed,
    keep_data_manifest,
)
from mlhpc.suite.training.step_timing import ProgressMarks
from mlhpc.suite.training.watchdog import Watchdog
from mlhpc.suite.workload import Dataset, Workload, load_workload
from mlhpc.suite.world import World


def open_data(config: RunConfig, world: World) -> tuple[Path, Manifest]:
    """Find the data root and read its manifest, on rank 0 only. ValueError says how to make the data."""
    root = config.data or choose_default_data_root(config.workload, config.size)
    return root, world.compute_on_first(partial(find_data, root, config.workload, config.size), Manifest)


def verify_source(
    config: RunConfig, root: Path, manifest: Manifest, world: World, tick: Callable[[], None]
) -> Verification | None:
    """Compare the shards of the run with their checksums. ValueError names a damaged shard.

    None if the config forbids it, or if the run reads a staged copy. Call it before caches are dropped: it reads all
    data.
    """
    # Staging compares what arrives on each node, so the source need not be read twice.
    staged = config.staging.directory is not None and not config.staging.overlap
    return verify_shards(root, manifest.shards, world, tick) if config.verify_data and not staged else None


def _require_all_samples(found: int, manifest: Manifest, root: Path, split: str) -> None:
    """Raise InputError unless a data set has the samples that its manifest states, as the log does."""
    stated = manifest.samples(split)
    if found != stated:
        raise InputError(
            f"{root / split}: the workload's dataset() has {found:,} samples, the manifest {stated:,}; take all, or "
            "generate data with as many as are taken"
        )


class RunData:
    """Opens the splits of a data set, from the data root. Once it is staged, from node-local storage."""

    def __init__(
        self, session: RunSession, workload: Workload, source: Path, manifest: Manifest, parallel: Parallel
    ) -> None:
        self._session, self._workload, self._source, self._manifest = session, workload, source, manifest
        self._config, self._world, self._log = session.plan.config, session.world, session.log
        self._root, self._parallel = source, parallel
        # The root that a split was opened from tells whether it is still the present one.
        self._open: dict[str, tuple[Path, Dataset]] = {}
        self._thread: threading.Thread | None = None
        self._report: StagingReport | None = None
        self._error: Exception | None = None
        # Background staging and training call collectives at the same time. On shared communicators they would mix.
        self._staging_world = create_own_world(session.world)

    def open_or_stage(self, verified: Verification | None) -> None:
        """Stage the data if the config says so, then open both splits. Errors are raised here, not during training.

        ``verified``: the result of `verify_source`.
        """
        directory = self._config.staging.directory
        if directory is not None and not self._config.staging.overlap:
            begin = time.perf_counter()
            self._log.start(mllog.STAGING)
            self._stage()
            self._session.staged_s = time.perf_counter() - begin
            self._log_staged(overlapped=False)
        # After staging, because its report says whether the copies were verified.
        self._log_verified(verified)
        for split in ("train", "validation"):
            self._split(split)

    def _log_verified(self, verified: Verification | None) -> None:
        if not self._config.verify_data:
            self._session.log_data(None, "verify_data is false")
        elif verified is not None:
            self._session.log_data(verified, mllog.DATA_ROOT)
        elif self._report is not None:
            shards = self._report.manifest.shards
            staged = Verification(self._report.manifest.bytes, len(shards), self._report.seconds)
            self._session.log_data(staged, mllog.STAGED_COPY)

    def begin_overlapped(self) -> None:
        """Start background staging, if the config asks for it."""
        if self._config.staging.directory is not None and self._config.staging.overlap:
            self._log.start(mllog.STAGING)
            # A daemon, so that a failed training does not wait for the copy.
            self._thread = threading.Thread(target=self._stage_guarded, name="staging", daemon=True)
            self._thread.start()

    def train(self, block: int) -> Dataset:
        """Return the training data of a block.

        Before the second block, waits for background staging and changes over to the copy.
        """
        # The first block reads from the source. All ranks change over at the same block, because `finish` is a
        # collective.
        if self._thread is not None and block > 1:
            self.finish()
        return self._split("train")

    def validation(self, block: int) -> Dataset:
        """Return the evaluation data."""
        return self._split("validation")

    def finish(self) -> None:
        """Wait for background staging. Its error is raised here, on every rank."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        # Staging may have failed on one node only; the others would wait for it in the next collective.
        self._world.check_together(self._error)
        self._log_staged(overlapped=True)

    def _split(self, split: str) -> Dataset:
        opened = self._open.get(split)
        if opened is None or opened[0] != self._root:
            error, dataset = None, None
            try:
                # With a plan that splits samples, this rank reads only its part of each.
                slabs = self._parallel.slabs(evaluation=split != "train")
                dataset = cut(self._workload.dataset(split, self._root), slabs)
                _require_all_samples(len(dataset), self._manifest, self._root, split)
            except (ValueError, OSError) as caught:
                error = caught
            self._world.check_together(error)
            assert dataset is not None
            opened = self._open[split] = (self._root, dataset)
        return opened[1]

    def _stage(self) -> None:
        directory = self._config.staging.directory
        assert directory is not None
        # Trials that run at the same time on one node need different folders.
        place = Path(str(directory).replace("{trial}", str(self._session.plan.trial)))
        self._report = stage(self._source, place, self._staging_world, verify=self._config.verify_data)

    def _stage_guarded(self) -> None:
        try:
            self._stage()
        # Kept for `finish`: an error raised in this thread would reach nobody.
        except (ValueError, OSError) as error:
            self._error = error

    def _log_staged(self, *, overlapped: bool) -> None:
        report = self._report
        assert report is not None
        self._root = report.root
        self._log.stop(mllog.STAGING, metadata={"staging_duration": report.seconds})
        self._log.event(mllog.STAGING_STATS, report.stats(overlapped=overlapped))


# Settings that change the losses. A checkpoint made with other values must not be continued.
IDENTITY_SETTINGS = {
    "workload",
    "size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "precision",
    "channels_last",
    "compile",
    "hyperparameters",
}


def run_trial(
    plan: TrialPlan, world: World, startup: Startup, progress: ProgressMarks, watchdog: Watchdog | None
) -> int:
    """Run one trial and return the worker's exit code. Every rank calls it.

    InputError is one line for the user, equal on all ranks.
    """
    signals = StopSignals()
    config, folder = plan.config, plan.folder
    device, keeps_freed_memory = set_up_rank(config, world)
    parallel = Parallel.of(config, plan.descriptor, world.rank, world.size)
    config = parallel.with_microbatches(config)
    plan = replace(plan, config=config)
    check_batch(config.global_batch_size, parallel.mesh.data_size, config.gradient_accumulation_steps)
    source, manifest = open_data(config, world)
    plan = _replace_refused(plan, manifest, world)
    path = folder.next_resumed(plan.trial) if plan.resume else folder.result(plan.trial)
    session = RunSession(plan, world, startup, path)
    progress.enter("collecting facts")
    session.collect_facts()
    keep_data_manifest(folder, manifest.text(), world)
    progress.enter("comparing data with their checksums")
    # Before caches are dropped: it reads all data into them.
    verified = verify_source(config, source, manifest, world, progress.tick)
    progress.enter("dropping caches")
    session.drop_caches(manifest.bytes)
    # A resumed trial opens its log only after its checkpoint was loaded: one that does not fit leaves no log.
    if not plan.resume:
        session.open_log()
    try:
        session.begin_init()
        trial = _Trial(
            session=session,
            device=device,
            source=source,
            manifest=manifest,
            verified=verified,
            signals=signals,
            keeps_freed_memory=keeps_freed_memory,
            progress=progress,
            parallel=parallel,
        )
        if watchdog is not None:
            watchdog.before_end = trial.hung
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        sampled = config.instrumentation and plan.mode != "weak"
        with run_power_sampler(path, world, gpu, plan.folder.lock(plan.trial), wanted=sampled):
            return trial.run()
    finally:
        session.log.close()


def _replace_refused(plan: TrialPlan, manifest: Manifest, world: World) -> TrialPlan:
    """With --replace-failed, begin a trial anew that has a checkpoint of other settings, data or ranks."""
    if not (plan.resume and plan.replace_failed):
        return plan
    identity = describe_identity(plan.config, manifest)
    if plan.config.precision == "auto":  # what was chosen then is chosen again
        del identity["config"]["precision"]

    def move_aside() -> str:
        refusal = find_refusal(Checkpoint(plan.folder.checkpoint(plan.trial), identity), world.size)
        way = plan_and_prepare_resume(plan.folder, plan.trial, replace_failed=True, damage=refusal)
        return way.text if refusal else ""

    text = world.compute_on_first(move_aside, str)
    if text and world.is_first:
        print_line(f"trial {plan.trial}: {text}", result=False)
    return replace(plan, resume=not text)


def describe_identity(config: RunConfig, manifest: Manifest) -> dict[str, Any]:
    """Describe what must be equal for a checkpoint to continue: data, version, settings that change the losses."""
    shaping = {key: value for key, value in convert_to_plain_data(config).items() if key in IDENTITY_SETTINGS}
    moe = shaping["hyperparameters"].get("moe")
    if isinstance(moe, dict):  # where experts lie changes no loss, so a run may go on with or without offload
        moe.pop("offload", None)
    return {"config": shaping, "data_manifest": manifest.sha256, "suite_version": VERSION}


@dataclass(kw_only=True)
class _Trial:
    """A trial between init_start and run_stop.

    Its parts share the session and, after `_connect`, the checkpoint.
    """

    session: RunSession
    device: torch.device
    source: Path
    manifest: Manifest
    verified: Verification | None
    signals: StopSignals
    keeps_freed_memory: bool
    progress: ProgressMarks
    parallel: Parallel

    def __post_init__(self) -> None:
        self.world, self.log = self.session.world, self.session.log
        self.chooser = self._chooser()

    @property
    def plan(self) -> TrialPlan:
        """The plan, with what was chosen so far."""
        return self.session.plan

    @property
    def config(self) -> RunConfig:
        """The configuration, with what was chosen so far."""
        return self.session.plan.config

    @config.setter
    def config(self, chosen: RunConfig) -> None:
        self.session.plan = replace(self.session.plan, config=chosen)

    def run(self) -> int:
        """Run from init_start to run_stop. An error after run_start is logged as an aborted run, then raised again."""
        try:
            outcome = self._initialise_and_train()
        except (Exception, KeyboardInterrupt) as error:
            if self.session.in_run:
                self.session.stop(False, describe_error(error), first_block=0)
                self._say_baselines()
            raise
        self.signals.ignore()
        # Without MPI, the first rank that exits with another code than 0 makes srun end the others.
        self.world.barrier()
        if outcome.interrupted:
            return ExitCode.STOPPED
        # A trial that came to its end is not resumed.
        if self.world.is_first:
            self.checkpoint.remove()
        return ExitCode.OK if outcome.reached else ExitCode.FAILED

    def _initialise_and_train(self) -> TrainingOutcome:
        self._connect()
        workload, state, parameters = self._build()
        self._choose_graphs(workload, state.model)
        data = RunData(self.session, workload, self.source, self.manifest, self.parallel)
        trainer = Trainer(
            plan=self.plan,
            workload=workload,
            world=self.world,
            device=self.device,
            state=state,
            data=data,
            log=self.log,
            checkpoint=self.checkpoint,
            stop_signal=lambda: self.signals.name,
            say=self.session.say,
            progress=self.progress,
            parallel=self.parallel,
        )
        began_s = time.time()
        restored = self.checkpoint.load(self.world, state) if self.plan.resume else None
        reload_s = time.time() - began_s
        self.session.open_log()
        self._log_statement(workload, state.seed, parameters)
        position = Position(1, 0) if restored is None else restored.position
        # An abandoned earlier attempt may have left a checkpoint.
        if restored is None and self.world.is_first:
            self.checkpoint.remove()
        if restored is not None:
            self.session.reloaded = (1000 * began_s, reload_s)
            what = {"block": position.block, "next_step": position.step}
            self.log.event(
                mllog.RUN_RESUMED, metadata=what | {"ranks": restored.ranks, "rederived": restored.rederived}
            )
        self.progress.enter("staging and opening data")
        data.open_or_stage(self.verified)
        train_samples, eval_samples = map(self.manifest.samples, ("train", "validation"))
        self.session.end_init(train_samples=train_samples, eval_samples=eval_samples)
        return self._train(trainer, data, position)

    def _connect(self) -> None:
        """Connect the ranks for collectives, and decide what the configuration leaves open."""
        self.progress.enter("connecting the ranks")
        self.world.init_torch(self.device)
        make = load_workload(self.plan.descriptor)
        self.progress.enter("choosing the precision")
        # From here on plan and config state the chosen precision; the log must show what was computed.
        self.config = choose_precision(self.chooser, self.config, make, self.progress.tick)
        mesh = self.parallel.mesh
        stages = replace(self.parallel, mesh=replace(mesh, rank=0)).stages
        identity = describe_identity(self.config, self.manifest)
        self.checkpoint = Checkpoint(self.plan.folder.checkpoint(self.plan.trial), identity, mesh, stages)

    def _build(self) -> tuple[Workload, TrainingState, int]:
        """Build the workload and its training state on this rank's device.

        Also returns the whole model's parameter count.
        """
        world, config = self.world, self.config
        # A drawn seed differs between ranks.
        seed = world.broadcast(draw_seed(self.plan.base_seed, self.plan.trial) if world.is_first else None)
        self.progress.enter("building the model")
        workload: Workload = load_workload(self.plan.descriptor)(config)
        parameters = 0

        def look(model: nn.Module) -> None:
            nonlocal parameters
            # Choices are measured on the whole model, which a plan divides.
            if self.parallel.plan is None:
                self.progress.enter("measuring what is fastest here")
                workload.choose(model, self.chooser)
            parameters = count_parameters(model, workload, world, alike=self.parallel.mesh.tensor)
            check_parameters(self.plan, parameters)

        model = build(self.parallel, workload, self.plan.descriptor, world, self.device, seed, look)
        # Dropout must differ between ranks with different samples. Weights are drawn before this, from the same seed.
        torch.manual_seed(seed + (self.parallel.mesh.data_rank << SEED_BITS))
        self.progress.enter("building the optimizer")
        steps = count_steps_per_epoch(self.manifest.samples("train"), config.global_batch_size)
        state = TrainingState.create(workload, model, steps, seed)
        if config.compile:
            state.model.compile()
        return workload, state, parameters

    def _choose_graphs(self, workload: Workload, model: nn.Module) -> None:
        """Decide whether passes become CUDA graphs, after all other choices."""
        planned = self.parallel.plan is not None
        problem = find_graph_problem(self.config, self.world.size, workload, model, planned=planned)
        self.progress.enter("measuring graphs")
        make = load_workload(self.plan.descriptor)
        self.config = choose_graphs(self.chooser, self.config, make, problem, self.progress.tick)

    def _train(self, trainer: Trainer, data: RunData, position: Position) -> TrainingOutcome:
        """Train, from run_start to run_stop."""
        self.progress.enter("beginning the run")
        self.session.begin_run()
        # From here on there is something to save, so a signal waits for the end of a step.
        self.signals.deferred = True
        data.begin_overlapped()
        outcome = trainer.run(position)
        self.progress.enter("ending the run")
        # With the run all background copying ends.
        self.session.end_run(outcome.reached, outcome.reason, first_block=position.block, finish=data.finish)
        self._say_baselines()
        self._say_course()
        trainer.saver.close()
        return outcome

    def hung(self, text: str) -> None:
        """Log the end of a run that the watchdog ends.

        Called from the watchdog's thread, while the training thread waits.
        """
        if self.session.in_run:
            # Errors that follow from the end of the other ranks must not write a second run_stop.
            self.session.in_run = False
            self.log.stop(mllog.RUN, metadata={"status": "aborted", "reason": text})

    def _chooser(self) -> Chooser:
        """Build the chooser of this trial. A resumed trial keeps the choices of its earlier part."""
        log = find_newest_log(self.plan.folder, self.plan.trial) if self.plan.resume and self.world.is_first else None
        earlier = self.world.broadcast({} if log is None else read_choices(read_events(log, steps=False)))
        return make_chooser(self.config, self.world, self.device, earlier if self.plan.resume else None)

    def _log_statement(self, workload: Workload, seed: int, parameters: int) -> None:
        threads = torch.get_num_threads()
        header = RunHeader(
            device=self.device.type,
            seed=seed,
            config=self.config.logged(),
            about_config={"threads_per_rank": threads, "keeps_freed_memory": self.keeps_freed_memory},
            facts={
                **workload.hyperparameters(),
                **workload.data_hyperparameters(self.manifest.attributes),
                mllog.MODEL_PARAMETERS: parameters,
                mllog.WORK_PER_SAMPLE: asdict(workload.work()) | {"sample_bytes": self.plan.size_card.sample_bytes},
            },
            data_manifest=self.manifest.sha256,
        )
        self.session.log_header(header)
        for choice in self.chooser.choices.values():
            choice.log(self.log)
        if self.parallel.plan is not None:
            self.log.event(mllog.PARALLEL_PLAN, self.parallel.logged())

    def _say_baselines(self) -> None:
        stated = self.plan.size_card.baselines
        for line in [] if stated is None else render_baselines(stated.metrics(), stated.metrics(oracle=True)):
            self.session.say(line)

    def _say_course(self) -> None:
        """Say whether the run went as healthy runs of this size go. Read from the log, as the checker does."""
        descriptor, size = self.plan.descriptor, self.config.size
        if self.world.is_first and self.log.path is not None:
            record = summarise_log(read_events(self.log.path))
            self.session.say(describe_run_course(record, read_reference_courses(descriptor.folder, size)))


def count_parameters(model: nn.Module, workload: Workload, world: World, *, alike: int = 1) -> int:
    """Count the parameters of the whole model, also where ranks hold only shares. A collective.

    ``alike``: number of ranks that have the same share until a plan divides it.
    """
    shares = workload.sharded_parameters(model)
    mine = {id(parameter) for parameter in shares}
    replicated = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in mine)
    copies = workload.share_copy(model)[1]
    # Ranks of different data groups hold copies of the same shares.
    return replicated + sum(map(int, world.allgather(sum(share.numel() for share in shares)))) // (copies * alike)
