"""Reads and writes measurements of one node: one JSON object per metric and line, versioned."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from msgspec import DecodeError, Meta, Struct, json

from mlhpc.suite.documents import Positive, YamlSource, render_json
from mlhpc.suite.errors import InputError

END_METRIC = "measuring"  # the last metric of a node's own file: how long measuring took, or why it did not end

Better = Literal["more", "less"]


class Sample(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The repetitions of one metric on one node. Only nodes with the same ``hardware`` are compared.

    ``values`` are positive, in ``unit``; ``component`` is what the benchmark stresses. A metric with a ``bound``, its
    worst allowed value, is judged only by that. ``failed`` says why there are no values.
    """

    version: Literal[1] = 1
    node: Annotated[str, Meta(min_length=1)]
    hardware: str = ""
    metric: Annotated[str, Meta(min_length=1)]
    unit: str = ""
    better: Better
    component: str = ""
    values: tuple[Positive, ...] = ()
    bound: Positive | None = None
    failed: str = ""

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.failed):
            raise InputError("expected values, or failed with the reason why there are none")


def render_samples(samples: Iterable[Sample]) -> str:
    """Render a file of samples."""
    return "".join(f"{render_json(sample)}\n" for sample in samples)


def parse_samples(path: Path, content: bytes) -> list[Sample]:
    """Parse a file of samples, one JSON object per line. InputError names the line and the field."""
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            data = json.decode(line)
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{path}:{number}: expected JSON: {error}") from None
        found.append(YamlSource(Path(f"{path}:{number}"), data, {}).convert(Sample))
    return found
