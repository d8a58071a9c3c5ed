"""Reads the file of an all-to-all sweep (`mlhpc moe --sweep-network`)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_json
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.performance.cost_model import ALGORITHMS, Algorithm, LayerShape

SWEEP_KIND = "mlhpc all-to-all sweep"
SWEEP_VERSION = 2
KIB, MIB = 2.0**10, 2.0**20  # bytes


@dataclass(frozen=True)
class Measurement:
    """Holds one all-to-all: seconds of the slowest rank, median over ``repeats``.

    ``size_bytes`` is what one rank sends, including the part that it sends to itself.
    """

    ranks: int
    ranks_per_node: int
    algorithm: Algorithm
    size_bytes: float
    seconds: float
    fastest_s: float
    slowest_s: float
    repeats: int


@dataclass(frozen=True)
class LayerRun:
    """Holds forward and backward pass of the MoE layer with one (r, degree, algorithm).

    ``seconds`` are those of the slowest rank, median over ``repeats``.
    """

    r: int
    degree: int
    algorithm: Algorithm
    seconds: float
    repeats: int


@dataclass(frozen=True)
class Layer:
    """Holds the MoE layer on one grid of ranks.

    ``outside_s`` is the time of gate, permutation and counts in one pass. ``flops_per_s`` is the rate of one rank.
    """

    ranks: int
    shape: LayerShape
    flops_per_s: float
    outside_s: float
    runs: tuple[LayerRun, ...]


@dataclass(frozen=True)
class Sweep:
    """Holds one sweep file.

    ``ranks`` and ``ranks_per_node`` are those of the largest grid. ``description`` has name, ranks, back end and
    device.
    """

    name: str
    description: str
    ranks: int
    ranks_per_node: int
    memory_bandwidth: float
    measurements: tuple[Measurement, ...]
    layers: tuple[Layer, ...]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises InputError that names the file and what is wrong with it."""
    try:
        document = read_json(path, read_limits().file)
    except ValueError as error:
        raise InputError(
            f"{path}: not JSON: {error}; expected a sweep, which `mlhpc moe --sweep-network -o FILE` writes"
        ) from None
    if not isinstance(document, dict) or document.get("kind") != SWEEP_KIND:
        raise InputError(f"{path}: not a sweep; `mlhpc moe --sweep-network -o FILE` writes one")
    return parse_sweep(path, document)


def parse_sweep(path: Path, document: dict[str, Any]) -> Sweep:
    """Parse the document of a sweep file. Raises InputError as `read_sweep`."""
    if document.get("version") != SWEEP_VERSION:
        raise InputError(
            f"{path}: field `version` of the sweep is {document.get('version')}; this suite reads {SWEEP_VERSION}: "
            "measure it again with `mlhpc moe --sweep-network`"
        )
    try:
        # The document was written by a program: any fault in it is damage, and one line is enough
        return _parse(path.stem, document)
    except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError, ValueError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__} {error}"
        raise InputError(f"{path}: damaged sweep: {what}; measure it again with `mlhpc moe --sweep-network`") from None


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{value}: expected a positive number")
    return number


def _parse(name: str, document: dict[str, Any]) -> Sweep:
    grids = document["grids"]
    counts = [int(document[key]) for key in ("ranks", "ranks_per_node", "nodes", "cores_per_node")]
    ranks, per_node, nodes, cores = counts  # of the largest grid, which is the last one
    # The grids are in ascending order, and the intervals rely on that
    if min(counts) < 1 or ranks != int(grids[-1]["ranks"]):
        raise ValueError(f"{ranks} ranks, {per_node} per node, {nodes} nodes, {cores} cores: not those of the grids")
    # With --ranks-per-node the ranks of one real node may be counted as several nodes
    pretended = ", nodes pretended" if nodes < ranks // per_node else ""
    is_crowded = max(ranks // nodes, 1) > cores and document["device"] == "cpu"
    crowded = f", more ranks than the {cores} cores" if is_crowded else ""
    where = f"{document['backend']}, {document['device']}"
    return Sweep(
        name=name,
        description=f"{name}: {ranks} ranks, {per_node} per node{pretended}, {where}{crowded}",
        ranks=ranks,
        ranks_per_node=per_node,
        memory_bandwidth=_positive(grids[-1]["copy_bytes_per_s"]),
        measurements=tuple(_parse_measurement(grid, row) for grid in grids for row in grid["all_to_all"]),
        layers=tuple(_parse_layer(int(grid["ranks"]), grid["layer"]) for grid in grids),
    )


def _parse_measurement(grid: dict[str, Any], row: dict[str, Any]) -> Measurement:
    seconds = [_positive(value) for value in row["seconds"]]
    ranks, per_node = int(grid["ranks"]), int(grid["ranks_per_node"])
    if not 0 < per_node <= ranks or ranks % per_node:
        raise ValueError(f"{ranks} ranks on nodes of {per_node}")
    if row["algorithm"] not in ALGORITHMS:
        raise TypeError(f"algorithm {row['algorithm']!r}")
    return Measurement(
        ranks=ranks,
        ranks_per_node=per_node,
        algorithm=row["algorithm"],
        size_bytes=_positive(row["bytes"]),
        # The median: single repetitions may be disturbed
        seconds=statistics.median(seconds),
        fastest_s=min(seconds),
        slowest_s=max(seconds),
        repeats=len(seconds),
    )


def _parse_layer(ranks: int, row: dict[str, Any]) -> Layer:
    shape, moe = row["shape"], row["shape"]["moe"]
    layer_shape = LayerShape(
        tokens=int(shape["tokens"]),
        width=int(shape["width"]),
        hidden=int(moe["hidden"]),
        experts=int(moe["experts"]),
        top_k=int(moe["top_k"]),
        matrices=3 if moe["activation"] == "swiglu" else 2,  # a gated FFN has a third matrix
        element_bytes=int(row["element_bytes"]),
    )
    runs = tuple(
        LayerRun(
            r=int(run["r"]),
            degree=int(run["degree"]),
            algorithm=run["algorithm"],
            seconds=statistics.median(run["seconds"]),
            repeats=len(run["seconds"]),
        )
        for run in row["runs"]
    )
    if not runs:
        raise ValueError(f"a layer on {ranks} ranks without runs")
    return Layer(ranks, layer_shape, _positive(row["flops_per_s"]), float(row["outside_s"]), runs)
