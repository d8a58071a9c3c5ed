"""Reads the course of a training from its log: the numbers that every run logs, by name, in the order of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, Log, convert_to_float

LONGEST = 400  # numbers of a run; a stranger's log may have any
LEAST_CHANCE = 1e-4  # of a share that may be 0 or 1, whose odds are compared
_NAMES = {
    "gradient_norm": "gradient norm",
    "weight_norm": "weight norm",
    "still_weights": "weights without a gradient",
    "coarse_weights": "weights that bfloat16 holds",
    "same_order": "repeated order",
    "loss_spread": "spread of losses",
    "loss_repeat": "repeated losses up to the end",
}
_RIGHT = ("accuracy", "iou")  # shares of what was right; other metrics are errors
_REPEAT, _USE, _OVER = _NAMES["loss_repeat"], "experts in use", " over its loss"
_SHARES = tuple(_NAMES[key] for key in ("still_weights", "coarse_weights", "same_order"))


def read_course(run: Log) -> Mapping[str, float]:
    """Read the losses of the first steps, of windows and epochs, norms, use of experts, and what evaluations found."""
    found: dict[str, float] = {}
    parts: defaultdict[str, list[float]] = defaultdict(list)  # of numbers that are means
    for name, value in _list_numbers(run):
        number = convert_to_float(value)
        if number is not None and name.endswith(_OVER):
            loss = found.get(f"loss of {name.removesuffix(_OVER).rpartition(' after ')[2]}", 0.0)
            number = convert_to_float(number / loss) if loss > 0.0 else None
        if number is not None and name.startswith((_REPEAT, _USE)):  # of one epoch losses that repeat say little
            values = parts[_REPEAT if name.startswith(_REPEAT) else name]
            values.append(number)
            number = convert_to_float(sum(values) / len(values))
        elif name in found:
            continue
        if number is not None and (name in found or len(found) < LONGEST):
            found[name] = number
    return found


def is_share(name: str) -> bool:
    """Whether a number of a course is a share of weights or places, which may be 0."""
    return name.startswith(_SHARES)


def _list_numbers(run: Log) -> Iterator[tuple[str, object]]:
    first = run.first(mllog.FIRST_LOSSES)
    for step, loss in enumerate(first.value if first is not None and isinstance(first.value, list) else (), 1):
        yield f"loss of step {step}", loss
    measured = mllog.STEP_PHASES, mllog.WINDOW_STATS, mllog.RANK_PHASES, mllog.TRAINING_COURSE
    for event in run.every(*measured, mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
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
    elif event.key == mllog.WINDOW_STATS and isinstance(value, dict) and isinstance(value.get("load"), dict):
        yield from ((f"{_USE} of epoch {epoch}", _compute_use(layer)) for layer in value["load"].values())
    elif event.key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        yield f"{event.key} after epoch {epoch}", value
        others = about.get("metrics")
        for name, other in others.items() if isinstance(others, dict) else ():
            number = convert_to_float(other)
            if name == event.key or number is None:
                continue
            if name.startswith(_RIGHT) and 0.0 <= number <= 1.0:  # near 1 odds vary as much as near 0
                chance = min(max(number, LEAST_CHANCE), 1.0 - LEAST_CHANCE)
                yield f"odds of {name} after epoch {epoch}", chance / (1.0 - chance)
            else:
                yield f"{name} after epoch {epoch}{_OVER}", number


def _compute_use(layer: object) -> float | None:
    """Compute the share of experts that would carry a layer's load if each had equally many tokens: 1 / (n sum p^2)."""
    counts = layer.get("tokens_per_expert") if isinstance(layer, dict) else None
    tokens = [convert_to_float(each) for each in counts] if isinstance(counts, list) else []
    known = [each for each in tokens if each is not None and each >= 0.0]
    most = max(known, default=0.0)
    if most == 0.0 or len(known) < len(tokens):
        return None
    shares = [each / most for each in known]
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
