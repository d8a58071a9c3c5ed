"""What was measured of one node: a JSON object per metric in each line of a file, versioned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

END = "measuring"  # the last metric of a node's own file: how long measuring took, or why it did not end

Better = Literal["more", "less"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Sample(BaseModel):
    """The repetitions of one metric on one node. ``hardware``: only nodes of one hardware are compared with each other.

    ``values`` are positive, in ``unit``; ``component`` is what the benchmark stresses. A metric with a ``bound``, the worst
    value that is allowed, is judged by that alone. ``failed`` says why there are no values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    node: str = Field(min_length=1)
    hardware: str = ""
    metric: str = Field(min_length=1)
    unit: str = ""
    better: Better
    component: str = ""
    values: tuple[Positive, ...] = ()
    bound: Positive | None = None
    failed: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> Sample:
        if bool(self.values) == bool(self.failed):
            raise ValueError("expected values, or failed with the reason why there are none")
        return self


def render(samples: Iterable[Sample]) -> str:
    """The text of a file of samples."""
    return "".join(f"{sample.model_dump_json(exclude_defaults=True)}\n" for sample in samples)
