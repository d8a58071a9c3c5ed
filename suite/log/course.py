"""Reads the course of a training from its log: the numbers that every run logs, by name, in the order of training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, Log, convert_to_float

LONGEST = 400  # numbers of a run; a stranger's log may have any
_NAMES = {
    "gradient_norm": "gradient norm",
    "weight_norm": "weight norm",
    "still_weights": "weights without a gradient",
    "coarse_weights": "weights that bfloat16 holds",
    "same_order": "repeated order",
    "loss_spread": "spread of losses",
    "loss_repeat": "repeated losses up to the end",
}
_SHARES = tuple(_NAMES[key] for key in ("still_weights", "coarse_weights", "same_order"))


def read_course(run: Log) -> Mapping[str, float]:
    """Read the losses of the first steps, of windows and epochs, norms, and the metric after each evaluation."""
    found: dict[str, float] = {}
    repeats: list[float] = []
    for name, value in _list_numbers(run):
        number = convert_to_float(value)
        if number is None or len(found) == LONGEST or name in found:
            continue
        if name.startswith(_NAMES["loss_repeat"]):  # of one epoch it says little
            repeats.append(number)
            number = math.fsum(repeats) / len(repeats)
        found[name] = number
    return found


def is_share(name: str) -> bool:
    """Whether a number of a course is a share of weights or places, which may be 0."""
    return name.startswith(_SHARES)


def _list_numbers(run: Log) -> Iterator[tuple[str, object]]:
    first = run.first(mllog.FIRST_LOSSES)
    for step, loss in enumerate(first.value if first is not None and isinstance(first.value, list) else (), 1):
        yield f"loss of step {step}", loss
    keys = (mllog.STEP_PHASES, mllog.RANK_PHASES, mllog.TRAINING_COURSE, mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)
    for event in run.every(*keys):
        yield from _list_of_event(event)


def _list_of_event(event: Event) -> Iterator[tuple[str, object]]:
    about, value = event.metadata, event.value
    epoch = about.get("epoch_num")
    steps, begin = convert_to_float(about.get("steps")), convert_to_float(about.get("first_step"))
    if event.key == mllog.STEP_PHASES and begin is not None and steps is not None:
        yield f"loss of epoch {epoch}, steps {begin:.0f} to {begin + steps - 1:.0f}", about.get("loss")
    elif event.key == mllog.RANK_PHASES and steps and isinstance(value, dict):
        total = convert_to_float(value.get("loss_sum"))
        yield f"loss of epoch {epoch}", None if total is None else total / steps
    elif event.key == mllog.TRAINING_COURSE and isinstance(value, dict):
        yield from ((f"{name} of epoch {epoch}", value.get(key)) for key, name in _NAMES.items())
    elif event.key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        yield f"{event.key} after epoch {epoch}", value
