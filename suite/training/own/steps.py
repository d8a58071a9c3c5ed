"""Writes epochs, steps and evaluations of an own loop as the events that the harness's loop writes.

Counts, in an own loop's first step, the values that its card leaves at 0. Renders them as lines for the card.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from torch import nn

from mlhpc.suite.card import SizeCard, render_metric_value
from mlhpc.suite.errors import InputError
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training.counts.flops import FlopSum
from mlhpc.suite.training.records import TrainingLog
from mlhpc.suite.training.statement import TrialPlan
from mlhpc.suite.training.step_timing import OTHER, NoTimer, PhaseTimer


class LogClock(Protocol):
    """The clock of the log.

    While ``held_ms`` is set, events get that moment, but none earlier than the last event.
    """

    held_ms: int | None
    last_ms: int

    def now_ms(self) -> int:
        """Return Unix milliseconds."""
        ...


def convert_to_number(name: str, value: Any) -> float:
    """Convert an argument of `run.evaluation`: a number, or an array of one element. InputError names it."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        what = f"has the shape {tuple(shape)}" if shape is not None else f"is {type(value).__name__}"
        raise InputError(
            f"run.evaluation(): {name} {what}; expected one number, such as the mean over the validation set"
        ) from None


class OwnSteps:
    """The epochs and steps of one run. All ranks make every call; rank 0's log writes."""

    def __init__(
        self,
        plan: TrialPlan,
        records: TrainingLog,
        log: EventLog,
        clock: LogClock,
        train_samples: int,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._records, self._log, self._clock, self._say = plan, records, log, clock, say
        self._world, self._samples = records.world, train_samples
        self._batch, self._every = plan.config.global_batch_size, plan.size_card.eval_every_steps
        self._block = self._done = self._in_window = self._seen = 0
        self._open = self._told = False
        self._losses: Any = None
        self._begin_ms, self._begin_s, self._together_s, self._last_s = 0, 0.0, 0.0, 0.0

    @property
    def timer(self) -> PhaseTimer | NoTimer:
        """The timer that gets the marks of the phases."""
        return self._records.timer

    @property
    def _label(self) -> int:
        """``epoch_num``: the epoch, or the samples seen by its end if the card evaluates every N steps."""
        return self._block if self._every is None else self._block * self._every * self._batch

    @property
    def _due(self) -> tuple[int, int]:
        """The steps of an epoch: without, and with, a last batch that is not full."""
        return self._samples // self._batch, -(-self._samples // self._batch)

    def begin(self) -> None:
        """Begin an epoch. If the last one was not evaluated, it ends here."""
        if self._open:
            self._end_training()
            self._end_epoch()
        self._block += 1
        self._open, self._done, self._in_window, self._losses = True, 0, 0, None
        self._log.start(mllog.EPOCH, metadata={"epoch_num": self._label})
        self._begin_ms, self._begin_s = self._clock.now_ms(), time.perf_counter()
        self._records.begin_block(self._label)
        # After the barrier of begin_block: from here on all ranks' times have the same beginning.
        self._together_s = time.perf_counter()

    def step(self, loss: Any) -> None:
        """End a step."""
        if not self._open:
            raise InputError("run.step(): call run.epoch() first")
        self.timer.mark(OTHER)
        self._last_s = time.perf_counter()
        # The loss stays on the device until the window closes: reading it here would wait for the device in every step.
        self._done += 1
        self._in_window += 1
        if loss is not None:
            if getattr(loss, "ndim", 0) and math.prod(loss.shape) != 1:
                raise InputError(
                    f"run.step(): loss has the shape {tuple(loss.shape)}; expected one number, such as its mean"
                )
            detached = loss.detach() if hasattr(loss, "detach") else float(loss)
            self._losses = detached if self._losses is None else self._losses + detached
        if self._in_window == self._plan.config.window_steps:
            self._close_window()

    def evaluate(self, value: float | None, metrics: Mapping[str, float]) -> tuple[bool, str] | None:
        """End an evaluation, which began where the last step ended. Returns (reached, reason) if the run is over."""
        if not self._open:
            raise InputError("run.evaluation(): call run.epoch() and its steps first")
        agreed = self._agreed(value)
        self._end_training()
        target = self._plan.target
        where = {"epoch_num": self._label, "samples_count": self._seen}
        self._log.start(mllog.EVAL, metadata=where)
        # eval_start got the moment of the last step, which the clock still holds; the evaluation is timed from there.
        self._clock.held_ms, begin_ms = None, self._clock.last_ms
        self._records.log_value(target.metric, agreed, where, {target.metric: agreed, **metrics})
        seconds = max(0, self._clock.now_ms() - begin_ms) / 1e3
        self._log.stop(mllog.EVAL, metadata=where | {"duration_s": seconds})
        self._end_epoch()
        text = render_metric_value(agreed, target.threshold)
        share = target.direction == "max" and target.threshold <= 1.0 < agreed
        unlike = "; the metric seems to be in per cent, and the target is a share" if share else ""
        shown = f"{text} (target {target.threshold:g}{unlike}), {self._throughput:,.0f} samples/s"
        self._say(f"epoch {self._label}: {target.metric_name} {shown}")
        if not math.isfinite(agreed):
            return False, f"diverged: {target.metric_name} is {agreed} after epoch {self._label}"
        if target.reached(agreed):
            self._log.event(mllog.TARGET_ACCURACY_REACHED, agreed, metadata={"epoch_num": self._label})
            return True, f"target reached in epoch {self._label}"
        most = self._plan.config.max_epochs
        # With evaluations every N steps, max_epochs is converted to blocks.
        last = most if self._every is None else max(1, most * self._due[0] // self._every)
        return (False, f"target not reached in {most} epochs") if self._block >= last else None

    def _agreed(self, value: float | None) -> float:
        """Return the value that all ranks give. InputError on every rank if they differ, or if none has one."""
        given = None if value is None else float(value)
        values = [(rank, each) for rank, each in enumerate(self._world.allgather(given)) if each is not None]
        if not values:
            raise InputError("run.evaluation(): every rank passed None; one must pass the metric's value")
        first, agreed = values[0]
        agreed = float(agreed)
        for rank, other in values:
            # Ranks may add the same float32 numbers in another order.
            alike = math.isclose(other, agreed, rel_tol=1e-6) or (math.isnan(other) and math.isnan(agreed))
            if not alike:
                raise InputError(
                    f"run.evaluation(): rank {first} gives {agreed:g}, rank {rank} {other:g}: "
                    "expected the metric over the whole validation set, the same on every rank"
                )
        return agreed

    def _close_window(self) -> None:
        """Write the window that ends with the last step."""
        mine = None if self._losses is None else float(self._losses) / self._in_window  # waits for the device
        where = {"epoch_num": self._label, "first_step": self._done - self._in_window, "steps": self._in_window}
        self._records.close_window(where, mine, until=self.timer.last)
        self._in_window, self._losses = 0, None

    def _end_training(self) -> None:
        """Write how long the steps of the block took.

        It ends with the last rank's last step. The log's clock stays held there.
        """
        if not self._done:
            raise InputError(
                f"run: epoch {self._label} ended without a step; call run.step() after each update of the weights"
            )
        self._check_steps()
        host_s = self._last_s - self._begin_s
        # What ranks gather for the log below takes time of its own, which must not count as training.
        held = self._begin_ms + int(1e3 * host_s)
        self._clock.held_ms = min(held, self._clock.now_ms())
        if self._in_window:
            self._close_window()

        def elapsed_s() -> float:
            """On a GPU the last step ends after the call that issued it has returned."""
            mine = max(self._last_s - self._together_s, self._records.step_s())
            longest: float = max(self._world.allgather(mine))
            seconds = self._together_s - self._begin_s + longest
            self._clock.held_ms = min(self._begin_ms + int(1e3 * seconds), self._clock.now_ms())
            return seconds

        # Only then is the last batch smaller, and an epoch's samples are not steps x batch.
        whole = self._every is None and self._done == self._due[1]
        samples = self._samples if whole else self._done * self._batch
        self._seen += samples
        self._throughput = self._records.end_block(self._label, self._done, samples, elapsed_s, until=self.timer.last)

    def _end_epoch(self) -> None:
        self._clock.held_ms = None
        self._records.log_energy(self._label)
        self._log.stop(mllog.EPOCH, metadata={"epoch_num": self._label})
        self._open = False

    def _check_steps(self) -> None:
        """Print one line if an epoch's steps do not fit its samples, which the checker compares."""
        # A loader may drop the last batch that is not full, or keep it.
        least, most = self._due if self._every is None else (self._every, self._every)
        if self._done not in (least, most) and not self._told:
            self._told = True
            due = f"{least}" if least == most else f"{least} or {most}"
            self._say(
                f"mlhpc: epoch {self._label} has {self._done} steps; "
                f"{self._samples} samples in batches of {self._batch} need {due}. mlhpc check will report it; "
                "call run.step() once per update of the weights, or correct global_batch_size"
            )


FORWARD, TRAINING = "forward_flops_per_sample", "training_flops_per_sample"


class CardCounter:
    """Counts the FLOPs of a step and collects the lines that a card lacks.

    ``known``: counts that need no step; None if a count is not known. ``samples``: this rank's samples in a step.
    """

    def __init__(self, card: SizeCard, known: dict[str, float | None], model: nn.Module | None, samples: int) -> None:
        # A card states 0 for a value that is not counted yet.
        self._missing = [name for name in (*known, FORWARD, TRAINING) if not getattr(card, name)]
        self._found = {name: value for name, value in known.items() if value}
        self._model, self._samples = model, samples
        self._flops, self._forward, self._begun = FlopSum(), 0, 0
        self._stack = ExitStack()

    @property
    def must_end(self) -> bool:
        """True if the card says 0 parameters: nothing could judge a run by it."""
        return "model_parameters" in self._missing

    @property
    def needs_a_step(self) -> bool:
        """True if FLOPs are missing that a step can show."""
        return self._model is not None and bool({FORWARD, TRAINING} & {*self._missing})

    def begin(self) -> None:
        """Start to count, until `lines`."""
        if self._model is None:
            return

        # FLOPs between both hooks are those of the forward pass. With gradient accumulation the hooks run several
        # times.
        def enter(*_: object) -> None:
            self._begun = self._flops.flops

        def leave(*_: object) -> None:
            self._forward += self._flops.flops - self._begun

        for hook in (self._model.register_forward_pre_hook(enter), self._model.register_forward_hook(leave)):
            self._stack.callback(hook.remove)
        self._stack.enter_context(self._flops)

    def lines(self) -> list[str]:
        """Stop counting. Return the lines to paste into the card."""
        self.close()
        flops = {FORWARD: self._forward / self._samples, TRAINING: self._flops.flops / self._samples}
        found = self._found | {name: value for name, value in flops.items() if value}
        return [f"    {name}: {found[name]:.0f}" for name in self._missing if name in found]

    def close(self) -> None:
        """Stop counting."""
        self._stack.close()
