"""Defines the JSON file of `mlhpc dispatch`, which a report reads: what a controller costs, by library and mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from mlhpc.suite.documents import NotNegative, Positive
from mlhpc.suite.plugins import NETWORK, mark_missing_wing

KIND: Literal["dispatch"] = "dispatch"
SHARE = 0.95  # of SPMD's throughput, from which on a controller counts as hidden
BUSY_SHARE = 0.1  # of the cores, taken by other processes, from which on a person is warned


class Interval(Struct, frozen=True):
    """A number with its 95 % interval. ``high`` is None where only the lower end is known."""

    value: float
    low: float
    high: float | None

    def render(self, scale: float = 1.0, unit: str = "") -> str:
        """Render the number and its ends."""
        if self.high is None:
            return f"not less than {self.low * scale:.3g}{unit}"
        return f"{self.value * scale:.3g}{unit} [{self.low * scale:.3g}, {self.high * scale:.3g}]"


class Row(Struct, frozen=True, kw_only=True):
    """One mode of one controller.

    ``spmd_s`` is an empty computation without a controller, ``overhead_s`` what the mode adds to it, ``ratio`` the time
    of both over that of one. ``break_even_s`` is the shortest computation with `SHARE` of SPMD's throughput, measured;
    None: an empty one has it. ``predicted_s`` is the closed form's.
    """

    controller: str
    version: str
    mode: str
    n: int
    spmd_s: Positive
    overhead_s: Interval
    ratio: Interval
    break_even_s: Interval | None = None
    predicted_s: NotNegative | None = None

    def render_limit(self) -> str:
        """Render the break-even length."""
        if self.break_even_s:
            return self.break_even_s.render(1e3, " ms")
        return "inconclusive" if (self.ratio.high or 0.0) > 1 / SHARE else "every length"


class Beyond(Struct, frozen=True, kw_only=True):
    """An overhead on more ranks than were measured: extrapolated, with a 90 % interval."""

    controller: str
    mode: str
    ranks: int
    overhead_s: Interval


class NotMeasured(Struct, frozen=True):
    """A controller without rows, and the reason."""

    controller: str
    reason: str


class Dispatch(Struct, frozen=True, kw_only=True):
    """What one call of `mlhpc dispatch` measured. ``busy`` are the cores that others kept busy before."""

    version: Literal[1] = 1
    kind: Literal["dispatch"] = KIND
    system: str
    date: str
    cpu: str
    cores: int
    busy: NotNegative
    ranks: int
    depth: int
    chain: int
    clients: int
    delay_s: NotNegative = 0.0
    rows: tuple[Row, ...]
    extrapolated: tuple[Beyond, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()

    @property
    def doubt(self) -> str:
        """Say that other processes were busy, "" if none were."""
        return f"other processes kept {self.busy:.1f} cores busy" if self.busy > BUSY_SHARE * self.cores else ""

    def render(self) -> Iterator[str]:
        """Render the table, a line each."""
        yield (
            f"{self.system}: {self.ranks} ranks, {self.cores} cores, {self.cpu}; depth {self.depth}, chains of "
            f"{self.chain}, {self.clients} clients"
        )
        yield f"{'':18}{'overhead [us]':32}{'time / SPMD':22}{'95 % of SPMD from':28}closed form"
        version = ""
        for row in self.rows:
            if row.version != version:
                version = row.version
                yield f"{version}: SPMD {1e6 * row.spmd_s:.3g} us, n = {row.n}"
            form = "" if row.predicted_s is None else f"{1e3 * row.predicted_s:.3g} ms"
            name = f"  {row.controller} {row.mode}"
            yield f"{name:18}{row.overhead_s.render(1e6):31} {row.ratio.render():21} {row.render_limit():28}{form}".rstrip()
        for missing in self.not_measured:
            yield f"{missing.controller}: {missing.reason}"
        for each in self.extrapolated:
            yield (
                f"extrapolated, not measured: {each.controller} {each.mode} on {each.ranks:,} ranks: overhead "
                f"{each.overhead_s.render(1e6, ' us')}"
            )
        if not self.extrapolated:
            why = "inconclusive: to extrapolate, 2, 4 and 8 ranks must be measured"
            yield mark_missing_wing(NETWORK, f"more than {self.ranks} ranks: {why}")
        if self.doubt:
            yield f"{self.doubt}: these times are too long"
