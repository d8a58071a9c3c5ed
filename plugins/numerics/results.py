"""Defines the JSON file of `mlhpc numerics`, which a report reads: changes and what each did. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import FolderName, NotNegative

KIND: Literal["numerics"] = "numerics"


Origin = Literal["rounding", "not rounding", "inconclusive", ""]


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a step's difference from float64 comes from.

    ``first`` is the first tensor that rounding does not explain, and ``factor`` its error over its bound. Of rounding they
    are those of the largest factor. ``beyond`` counts tensors that differ by more than their bound. ``undecided``
    counts tensors whose perturbed runs jump, as at a tie of a router: an error above their median is not judged.
    """

    outcome: Origin = ""
    first: str = ""
    factor: NotNegative | None = None
    tensors: int = 0
    beyond: int = 0
    undecided: int = 0


class Reproduced(Finding, frozen=True, kw_only=True, omit_defaults=True):
    """One change of the system and what it does to a step.

    ``module`` is that of the first tensor, and ``error`` that of the loss. ``why``: not run.
    """

    change: str
    precision: str = "float32"
    module: str = ""
    error: NotNegative | None = None
    why: str = ""

    def render(self) -> str:
        """Render the row as one line for people."""
        if self.why:
            return f"{self.change:<24} does not apply: {self.why}"
        kind = self.first.partition(" ")[0]
        place = f"{self.factor:.3g} times the bound" if self.factor is not None else "no bound"
        if self.outcome == "not rounding":
            what = f"not rounding: first differs in `{self.module}`, {kind}, {place}"
        elif self.outcome == "inconclusive":
            what = f"inconclusive: {self.undecided} of {self.tensors} tensors jump, first in `{self.module}`"
        else:
            what = f"rounding: at most {place} (`{self.module}`, {kind})"
        return f"{self.change:<24} {what}"


class Deployed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of the deployment: the metric after it minus before it, of each seed.

    Positive is better. ``group`` joins variants of one kind. ``low`` and ``high`` are the 95 % interval of the mean
    over seeds. ``why``: not run, or it cannot act here.
    """

    change: str
    group: str = ""
    deltas: tuple[float, ...] = ()
    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    why: str = ""


class Numerics(Struct, frozen=True, kw_only=True):
    """The answer to one of two questions, ``reproduce`` or ``deploy``, for a workload and size."""

    version: Literal[1] = 1
    kind: Literal["numerics"] = KIND
    question: Literal["reproduce", "deploy"]
    workload: FolderName
    size: FolderName
    error_rate: Annotated[float, Meta(gt=0, lt=1)] | None = None
    runs: int | None = None
    reproduced: tuple[Reproduced, ...] = ()
    metric: str = ""
    values: tuple[float, ...] = ()
    deployed: tuple[Deployed, ...] = ()

    @property
    def measured(self) -> list[Deployed]:
        """The changes that apply, the largest loss first."""
        return sorted((row for row in self.deployed if not row.why), key=lambda row: row.mean)
