"""Checks values that follow from others in the same log: a learning rate, the samples between two evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlhpc.suite.log.reader import convert_to_float

# Bounds of a batch size or a rate from which another value follows: no real one is near them.
_SMALLEST, _LARGEST = 1e-15, 1e15
_INTERVAL_SLACK = 0.1  # published evaluations of the prescribed interval are within 0.063 of it and its batches
_EPOCH_DIGIT = 0.01  # some codes log epochs with two decimals
_FEWEST = 3  # evaluations whose gaps alone have a usual one


class ScaledValue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that must be ``value`` * (``by`` / ``at``) ** ``power`` - ``minus``.

    ``by`` and ``minus`` are keys of the log. With ``whole`` the product is rounded up; ``less``, scaled and rounded the
    same way, is subtracted. With ``multiple_of``, a key, it is rounded up to a multiple of that key's value. The logged
    value may differ by the share ``within``.
    """

    value: float
    by: str | None = None
    at: float = 1.0
    power: float = 1.0
    whole: bool = False
    less: float = 0.0
    minus: str | None = None
    multiple_of: str | None = None
    within: float = 1e-6

    def problem(self, value: Any, logged: Callable[[str], Any]) -> str | None:
        """Return what is wrong with a value. None if nothing is, or if a value that it depends on is no number."""
        expected, number = self._expected(logged), convert_to_float(value)
        if expected is None:
            return None
        # The last number is for an expected value of 0.
        if number is not None and abs(number - expected) <= self.within * abs(expected) + 1e-9:
            return None
        others = " and ".join(key for key in (self.by, self.minus, self.multiple_of) if key)
        share = f" within {self.within:.0%}" if self.within > 1e-6 else ""
        return f"expected {expected:.10g}{share}, which follows from {others}"

    def _expected(self, logged: Callable[[str], Any]) -> float | None:
        by = self.at if self.by is None else convert_to_float(logged(self.by))
        minus = 0.0 if self.minus is None else convert_to_float(logged(self.minus))
        step = _SMALLEST if self.multiple_of is None else convert_to_float(logged(self.multiple_of))
        if by is None or minus is None or step is None:
            return None
        # A forged value must neither divide by zero nor overflow.
        if not (_SMALLEST <= by < _LARGEST and 0.0 <= minus < _LARGEST and _SMALLEST <= step < _LARGEST):
            return None
        scale = math.pow(by / self.at, self.power)
        amount = self.value * scale
        if self.whole:
            amount = float(math.ceil(amount) - math.ceil(self.less * scale))
        if self.multiple_of is not None:
            amount = math.ceil(amount / step) * step
        return amount - minus


class EvalSchedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The samples after which a run is evaluated, on a grid of multiples of the batch size.

    The first evaluation is at (``per_batch`` * batch + ``plus``) / ``over`` samples, rounded up or down to the grid. A
    grid step is the smallest multiple of the batch that has at least ``grid`` samples.
    """

    per_batch: int
    plus: int
    over: int = 1
    up: bool
    grid: Annotated[float, Meta(ge=0.0)] = 0.0
    then: Literal["any", "next", "multiple"]  # where later evaluations are: anywhere, at every, at any grid point

    def step(self, batch: int) -> int:
        """Return the samples from one point of the grid to the next."""
        return max(1, math.ceil(self.grid / batch)) * batch

    def first(self, batch: int) -> int:
        """Return the samples before the first evaluation."""
        step = self.step(batch)
        samples = (self.per_batch * batch + self.plus) // self.over
        return (-(-samples // step) if self.up else samples // step) * step

    def breach(self, batch: int, seen: list[float | None]) -> tuple[int, int] | None:
        """Return (index, samples due) of the first misplaced evaluation. ``seen`` has the samples before each."""
        due, step = self.first(batch), self.step(batch)
        for index, samples in enumerate(seen):
            if index and self.then == "any":
                return None
            if index and self.then == "multiple":
                due = round((samples or 0.0) / step) * step
            if samples != due or not due:
                return index, due
            due += step
        return None


class EvalInterval(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The samples, or epochs, from one evaluation to the next, of benchmarks that prescribe no exact places.

    They are ``every`` + ``per_batch`` * batch, rounded down to a multiple of ``multiple_of``. If they are samples, an
    evaluation comes at a batch before or after. The first ``skipped`` + ``skipped_per_batch`` * batch evaluations may
    be left out. Numbers may differ by the share ``_INTERVAL_SLACK``: codes count the last batch in different ways.
    """

    every: float
    per_batch: float = 0.0
    multiple_of: float | None = None
    skipped: float = 0.0
    skipped_per_batch: float = 0.0

    def bounds(self, batch: int, *, samples: bool) -> tuple[float, float]:
        """Return the shortest and the longest allowed interval."""
        due = self.every + self.per_batch * batch
        if self.multiple_of is not None:
            due = due // self.multiple_of * self.multiple_of
        low, high = due - _EPOCH_DIGIT, due + _EPOCH_DIGIT
        if samples:
            low, high = max(due // batch, 1) * batch, math.ceil(due / batch) * batch
        return low * (1.0 - _INTERVAL_SLACK), high * (1.0 + _INTERVAL_SLACK)

    def breach(self, batch: int, places: list[float], *, samples: bool) -> tuple[int, str] | None:
        """Return (index, what is wrong) of the first evaluation too late after the one before, or else too early.

        ``places`` are the samples or epochs before each evaluation. One evaluation more does no harm, so the
        usual interval decides whether they are too frequent.
        """
        low, high = self.bounds(batch, samples=samples)
        first = high * (1 + math.floor(self.skipped + self.skipped_per_batch * batch))
        gaps = [after - before for before, after in pairwise(places)]
        late = next((index for index, gap in enumerate(gaps, 1) if gap > high), None)
        unit = "samples" if samples else "epochs"
        if places and places[0] > first:
            return 0, f"the first evaluation is after {places[0]:g} {unit}; expected at most {first:g}"
        if late is not None:
            return late, f"{gaps[late - 1]:g} {unit} after the evaluation before; expected at most {high:g}"
        usual = statistics.median_high([places[0], *gaps] if len(places) < _FEWEST else gaps) if places else low
        if usual < low:
            return 0, f"evaluated every {usual:g} {unit}; expected at least {low:g}"
        return None
