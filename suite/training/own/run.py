"""`mlhpc.Run`: a person's own training loop writes the run folder that `mlhpc run` writes, on one rank or many.

It calls what the harness's trial calls: the same run header, records, clocks, facts and lock. The loop itself stays the
person's.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn, optim

from mlhpc.suite import FIRST_LINE_S
from mlhpc.suite.data.lock import create_lock_for_all_ranks
from mlhpc.suite.data.manifest import Verification, compute_fingerprint
from mlhpc.suite.descriptor import load_object
from mlhpc.suite.errors import InputError, explain_attribute
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import convert_to_path, expand_home, print_line
from mlhpc.suite.log import mllog
from mlhpc.suite.log.run_folder import choose_default_folder
from mlhpc.suite.training.devices import InterruptedTrialError, compute_process_age_s, end_hung_start
from mlhpc.suite.training.gradient_exchange import register_exchange_timing
from mlhpc.suite.training.instrument import CollectiveCounter
from mlhpc.suite.training.own.draft import begin_draft
from mlhpc.suite.training.own.folder import (
    collect_hyperparameters,
    find_benchmark,
    make_run_folder,
    read_config,
    select_logged_config,
)
from mlhpc.suite.training.own.steps import CardCounter, OwnSteps, convert_to_number
from mlhpc.suite.training.records import TrainingLog
from mlhpc.suite.training.session import RunSession, describe_error
from mlhpc.suite.training.statement import (
    RunHeader,
    Startup,
    TrialPlan,
    check_parameters,
    draw_seed,
    print_for_trial,
    write_exit_code,
)
from mlhpc.suite.training.step_timing import DATA_WAIT, OPTIMIZER, ProgressMarks
from mlhpc.suite.training.watchdog import start_watchdog
from mlhpc.suite.world import World

Batch = TypeVar("Batch")
# At the import of this module: what the program does before mlhpc.Run counts as set-up, not as import.
_IMPORTED_S = time.perf_counter()
_STARTUP = Startup(compute_process_age_s() - (_IMPORTED_S - FIRST_LINE_S), _IMPORTED_S - FIRST_LINE_S, _IMPORTED_S)
HEX_DIGITS = 64  # of a sha256


class Run:
    """One run of a person's own training loop, as a context. Set up first; `start` begins the run.

    ``benchmark`` is the path of a card (``.yaml``) or the name of an installed workload. Where no card is yet, the run
    drafts one from what it sees, and is no result.

    ``config`` is a mapping or a YAML file with ``size``, ``global_batch_size``, ``max_epochs`` and ``hyperparameters``
    (logged as they are). Optional keys: ``submission``, ``precision``, ``device``, ``gradient_accumulation_steps``,
    ``window_steps``, ``instrumentation``, ``cache_drop_command`` and ``watchdog``.

    ``data`` is the file or folder that the loop reads; its checksum is logged. A sha256 of the data as 64 hex digits is
    allowed too. ``output`` is the run folder. A further run with the same configuration becomes the next trial in it.
    ``seed`` is the seed of the loop; by default one is drawn, see the attribute ``seed``.

    Every rank makes every call, in the same order. A user's mistake raises InputError on every rank. An error in the
    body ends the log as aborted and goes on to the caller.
    """

    def __init__(
        self,
        benchmark: str | Path,
        config: str | Path | Mapping[str, Any],
        *,
        data: str | Path,
        output: str | Path | None = None,
        seed: int | None = None,
        trial: int | None = None,
    ) -> None:
        benchmark = expand_home(benchmark) if isinstance(benchmark, str) else benchmark
        config = expand_home(config) if isinstance(config, str) else config
        self._draft = begin_draft(benchmark, config)
        if self._draft is None:
            self._benchmark = find_benchmark(benchmark)
            self.config = read_config(self._benchmark, config)
        self._data, self._seed, self._trial = data, seed, trial
        self._root = convert_to_path(output) if output is not None else None
        self._stack = ExitStack()
        self._progress = ProgressMarks()
        self._clock = _Clock()
        self._steps: OwnSteps | None = None
        self._counter: CardCounter | None = None
        self._entered = False
        self.over = self.reached = False

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._world.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._world.size

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, from 0."""
        return self._world.local_rank

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._plan.folder.root

    @property
    def trial(self) -> int:
        """The number of this run in its folder, from 0."""
        return self._plan.trial

    def __getattr__(self, name: str) -> Any:
        # What `with` makes
        if name in ("_world", "_plan", "_session", "seed") and not self.__dict__.get("_entered", True):
            raise InputError("mlhpc.Run is used with `with`: with mlhpc.Run(...) as run: ... (docs/own_loop.md)")
        raise AttributeError(explain_attribute(self, name))

    def __enter__(self) -> Self:
        if self._entered:
            raise InputError("mlhpc.Run: this object has been used for a run; make a new mlhpc.Run for the next run")
        self._entered = True
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        """Connect the ranks, make the folder, look at machine and data, and begin the log with init_start."""
        if self._draft is not None:
            self._world = World.create()
            self.seed = self._world.broadcast(self._seed if self._seed is not None else draw_seed(None, 0))
            return
        config = self.config
        # The watchdog needs connected ranks, so a hang of MPI's start is found in another way.
        with end_hung_start(config.watchdog):
            self._world = World.create()
        card = self._benchmark.card().size(config.size)
        now = datetime.now(UTC)
        root = self._root or self._world.broadcast(choose_default_folder(config.workload, config.size, now), Path)
        folder, trial = make_run_folder(root, self._benchmark, config, self._trial, card.required_runs, self._world)
        self._plan = TrialPlan(self._benchmark, config, folder, trial, card.required_runs)
        watchdog = None
        # Only on request: nobody but the author knows how long the loop may be silent between two calls.
        if "watchdog" in config.stated:
            stacks = folder.stacks(trial, self._world.rank)
            self._world, watchdog = start_watchdog(self._world, config.watchdog, stacks, self._complain, self._progress)
        self._session = RunSession(self._plan, self._world, _STARTUP, folder.result(trial), self._clock)
        if watchdog is not None:
            watchdog.before_end = self._hung
            self._stack.callback(watchdog.close)
        self._stack.enter_context(create_lock_for_all_ranks(folder.lock(trial), f"trial {trial}", self._world))
        self._stack.enter_context(_sigterm_raises())
        self.seed = self._world.broadcast(self._seed if self._seed is not None else draw_seed(None, trial))
        # The checker stands above training and imports parts of it.
        explain: Callable[..., list[str]] = load_object("mlhpc.suite.compliance.before:explain_refusals_of")
        for note in explain(self._benchmark, config, collect_hyperparameters(config)):
            self._say(note)
        self._session.collect_facts()
        self._manifest, self._read = _compute_data_sha256(self._data, self._world, self._progress)
        self._session.drop_caches(self._read.bytes if self._read else 0)
        self._session.open_log()
        # Callbacks run in reverse order: the log is closed, then the exit code is written, then the lock is released.
        self._stack.callback(self._keep_code)
        self._stack.callback(self._session.log.close)
        if self._world.is_first:
            # The code of an earlier attempt must not stand for this run.
            folder.exit_code(trial).unlink(missing_ok=True)
        self._session.begin_init()

    def init_process_group(self) -> None:
        """Start torch.distributed for these ranks, under any launcher. Does nothing on one rank or if it is started."""
        self._world.init_torch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Log the body as the copying of data to fast storage. In the run it counts as time of the run, before `start`
        not.
        """
        if self._draft is not None:
            yield
            return
        self._session.log.start(mllog.STAGING)
        begin = time.perf_counter()
        yield
        self._world.barrier()
        seconds = time.perf_counter() - begin
        # Staging before the run is subtracted from the start-up time; staging in the run is training time.
        self._session.staged_s += 0.0 if self._session.in_run else seconds
        self._session.log.stop(mllog.STAGING, metadata={"staging_duration": seconds})

    def start(
        self,
        model: nn.Module | None = None,
        optimizer: optim.Optimizer | None = None,
        *,
        train_samples: int,
        eval_samples: int,
        parameters: int | None = None,
    ) -> None:
        """End the set-up and begin the run.

        ``train_samples`` and ``eval_samples`` are of the whole data set, not of this rank. ``model`` gives the number
        of parameters and the device. Without a model, or where a rank holds only a share, give the number as
        ``parameters``.

        With ``optimizer`` the phases of a step are timed. Forward and backward pass last until the optimizer's own step
        begins. Under DistributedDataParallel the wait for gradients is a phase of its own.
        """
        if self._steps is not None:
            raise InputError("run.start(): the run has begun already; call it once per mlhpc.Run")
        if parameters is None and model is None:
            raise InputError("run.start(): the number of parameters is unknown; pass the model, or parameters=N")
        counted = sum(each.numel() for each in model.parameters()) if model is not None else 0
        total = parameters if parameters is not None else counted
        if self._draft is not None:
            self._draft.begin(train_samples, eval_samples, total)
            return
        self._session  # noqa: B018  says that `with` is missing
        if self._counts_for_the_card(model, train_samples, eval_samples, total):
            return
        check_parameters(self._plan, total)
        session, device = self._session, _find_device(model)
        header = RunHeader(
            device=_find_device_kind(device, self.config.device),
            seed=self.seed,
            config=select_logged_config(self.config),
            about_config={"loop": "own", "threads_per_rank": torch.get_num_threads()},
            facts={**collect_hyperparameters(self.config), mllog.MODEL_PARAMETERS: total},
            data_manifest=self._manifest,
        )
        session.log_header(header)
        session.log_data(
            self._read, mllog.DATA_ROOT if self._read else "the checksum of the data was stated, not computed"
        )
        where, measured = device or torch.device("cpu"), self.config.instrumentation
        records = TrainingLog(session.log, self._world, where, self._progress, measured=measured)
        self._steps = OwnSteps(self._plan, records, session.log, self._clock, train_samples, self._say)
        _time_phases(model, optimizer, records, self._stack)
        session.end_init(train_samples=train_samples, eval_samples=eval_samples)
        session.begin_run()
        self._stack.enter_context(records.counting())

    def _counts_for_the_card(
        self, model: nn.Module | None, train_samples: int, eval_samples: int, parameters: int
    ) -> bool:
        """Start to count, in the first step, what the card leaves at 0. True if the run ends there: the card has no
        parameters.
        """
        stored = self._read.bytes / (train_samples + eval_samples) if self._read is not None else None
        known: dict[str, float | None] = {
            **{"train_samples": train_samples, "eval_samples": eval_samples},
            **{"model_parameters": parameters, "sample_bytes": stored},
        }
        samples = self.config.samples_per_pass(self.size) * self.config.gradient_accumulation_steps
        counter = CardCounter(self._plan.size_card, known, model, samples)
        if not counter.needs_a_step:
            self._tell_counts(counter)
            return False
        self._counter = counter
        self._stack.callback(counter.close)
        counter.begin()
        return counter.must_end

    def _tell_counts(self, counter: CardCounter) -> None:
        """Print the lines that the card lacks. InputError without parameters: nothing could judge this run."""
        lines = counter.lines()
        if not lines:
            return
        where = f"{self._benchmark.card_path}: sizes: {self.config.size}"
        self._say("\n".join([f"{where} has counts of 0; counted here, to paste in their place:", *lines]))
        if counter.must_end:
            raise InputError(
                f"{where}: field model_parameters is 0; "
                "put the lines above into the card, then start this program again"
            )

    def epoch(self) -> None:
        """Begin an epoch, or the steps up to the next evaluation if the card evaluates every N steps."""
        if self._draft is None and not self._only_counts:
            self._running("epoch").begin()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader, and log the time that it takes as waiting for data. Optional."""
        if self._draft is not None or self._only_counts:
            yield from loader
            return
        timer = self._running("batches").timer
        iterator = iter(loader)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            timer.mark(DATA_WAIT)
            yield batch

    def step(self, loss: Any = None) -> None:
        """End a training step: one update of the weights by all ranks.

        ``loss``: a number or a tensor of one element.
        """
        if self._draft is not None:
            return
        if self._counter is not None:
            # Only the first step is counted: later ones have the same FLOPs.
            counter, self._counter = self._counter, None
            self._tell_counts(counter)
        self._running("step").step(loss)
        self._progress.tick()

    def evaluation(self, value: float | None, **metrics: float) -> bool:
        """End an evaluation and its epoch. Returns True when the run is over: target reached, diverged, or last epoch.

        ``value`` is the card's metric over the whole validation set, the same on every rank. A rank that does not know
        it passes None. ``metrics`` are logged with it. The evaluation began when the last step ended. InputError if
        ranks differ in the value.
        """
        number = None if value is None else convert_to_number("value", value)
        numbers = {name: convert_to_number(name, each) for name, each in metrics.items()}
        if self._draft is not None:
            self.over = self._draft.evaluate(number)
            return self.over
        outcome = self._running("evaluation").evaluate(number, numbers)
        if outcome is None:
            return False
        self.over, self.reached = True, outcome[0]
        # The run ends at once: the loop's later work is not its time.
        self._session.end_run(*outcome)
        return True

    @property
    def _only_counts(self) -> bool:
        """True between `start` and the first step, if the card has no parameters yet."""
        return self._counter is not None and self._counter.must_end

    def _running(self, call: str) -> OwnSteps:
        if self._steps is None:
            self._session  # noqa: B018  says that `with` is missing
            raise InputError(f"run.{call}(): call run.start() first")
        if self.over:
            raise InputError(f"run.{call}(): the run is over; the loop ends when run.evaluation() returns True")
        return self._steps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # sys.exit() and sys.exit(0) are proper ends.
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if self._draft is not None:
            if not failed and self._world.is_first:
                print_line(self._draft.write(), error=True)
            return
        if self._session.in_run:
            self.over, self.reached = True, False
            self._session.stop(
                False, describe_error(error) if failed and error else "the loop ended before the target was reached"
            )
        if failed and error is not None and self._world.size > 1:
            self._abort(error)
        self._stack.close()

    def _keep_code(self) -> None:
        if self._world.is_first:
            write_exit_code(self._plan, ExitCode.OK if self.reached else ExitCode.FAILED)

    def _abort(self, error: BaseException) -> None:
        """End every rank. MPI would wait at the end of this rank for the others, which wait for it in a collective."""
        if self._world.launcher in ("torchrun", "torch.distributed"):
            return  # their launcher ends the others
        self._session.log.close()
        if not self._world.is_first:
            time.sleep(2.0)  # if all have the error, rank 0 reports it
        self._complain(f"{describe_error(error)} [rank {self.rank}]")
        traceback.print_exception(error)
        self._world.transport.abort(1)

    def _say(self, text: str) -> None:
        """Print a line on rank 0. A program may make several runs."""
        self._session.say(f"run {self._plan.trial}: {text}")

    def _hung(self, text: str) -> None:
        if self._session.in_run:
            self._session.log_stop(False, text)

    def _complain(self, text: str) -> None:
        print_for_trial(self._plan, text)


class _Clock:
    """Gives Unix milliseconds that follow the monotonic clock.

    While ``held_ms`` is set, events get that earlier moment.
    """

    def __init__(self) -> None:
        # Read once: NTP may step the wall clock during a run, and durations would be wrong.
        self._anchor = time.time_ns() - time.monotonic_ns()
        self.last_ms = 0
        self.held_ms: int | None = None

    def now_ms(self) -> int:
        """Return the present time."""
        return (self._anchor + time.monotonic_ns()) // 1_000_000

    def __call__(self) -> int:
        moment = self.now_ms() if self.held_ms is None else self.held_ms
        self.last_ms = max(self.last_ms, moment)  # the clock of a log never goes back
        return self.last_ms


def _compute_data_sha256(data: str | Path, world: World, progress: ProgressMarks) -> tuple[str, Verification | None]:
    """Return the sha256 of the data, and what was read for it. Nothing is read if the user stated the sha256: None."""
    text = str(data)
    if len(text) == HEX_DIGITS and set(text) <= set("0123456789abcdef"):
        return text, None
    progress.enter("reading data for their checksum")
    return compute_fingerprint(convert_to_path(data), world, progress.tick)


def _find_device(model: nn.Module | None) -> torch.device | None:
    """Return the device of a model's first parameter. None if there is none."""
    first = next(model.parameters(), None) if model is not None else None
    return first.device if first is not None else None


def _find_device_kind(device: torch.device | None, stated: str) -> str:
    """Return where the loop computes, ``cpu`` or ``cuda``. InputError if nothing says it."""
    if device is not None:
        return device.type
    if stated == "auto" and torch.cuda.is_available():
        raise InputError(
            "run.start(): without a model the device is unknown; set device: cpu or device: cuda in the config"
        )
    return "cpu" if stated == "auto" else stated


def _time_phases(
    model: nn.Module | None, optimizer: optim.Optimizer | None, records: TrainingLog, stack: ExitStack
) -> None:
    """Mark the phases around the optimizer's own step."""
    if optimizer is None:
        return
    ledger = records.instruments.ledger if records.instruments else CollectiveCounter()
    computed = register_exchange_timing(model or nn.Identity(), records.timer, ledger)
    # If a subclass's step() calls that of its base class, torch runs the hooks for both.
    depth = 0

    def begin(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            computed()

    def end(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            records.timer.mark(OPTIMIZER)

    before = optimizer.register_step_pre_hook(begin)
    after = optimizer.register_step_post_hook(end)
    stack.callback(before.remove)
    stack.callback(after.remove)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise an error in the body on SIGTERM, so that the log ends. A program's own handler stays."""
    main = threading.current_thread() is threading.main_thread()
    # Python sets signal handlers in the main thread only.
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise InterruptedTrialError("stopped by SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
