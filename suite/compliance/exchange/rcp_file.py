"""Reads reference points from a file (--rcp), for batch sizes without points in the ruleset.

The ruleset's own points always win. The file has the form of `mlhpc workload rcp record`, or that of MLCommons'
rcp_checker (--custom_rcps).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlhpc.suite.card import ReferencePoints
from mlhpc.suite.compliance.ruleset import ExtraReferencePoints
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_json, render_repr
from mlhpc.suite.log.limits import read_limits
from mlhpc.suite.log.values import convert_to_float, parse_int64


def read_reference_points(path: Path) -> ExtraReferencePoints:
    """Read a file of reference points. InputError names the file and what was expected."""
    try:
        data = read_json(path, read_limits().json)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: expected JSON: {error}") from None
    if not isinstance(data, dict) or not data:
        raise InputError(f"{path}: expected a JSON object of reference points, found {render_repr(data)}")
    points = _parse_own_format(path, data) if "points" in data else _parse_official_format(path, data)
    return ExtraReferencePoints(str(path), points)


def _parse_own_format(path: Path, data: dict[str, Any]) -> dict[tuple[str, str | None, int], tuple[float, ...]]:
    known = YamlSource(path, data, {}).convert(ReferencePoints)
    name = load_descriptor(known.workload).card().mlperf_name
    return {(name, known.size, point.global_batch_size): point.epochs for point in known.points}


def _parse_official_format(path: Path, data: Mapping[str, Any]) -> dict[tuple[str, str | None, int], tuple[float, ...]]:
    found: dict[tuple[str, str | None, int], tuple[float, ...]] = {}
    for name, entry in data.items():
        fields = entry if isinstance(entry, dict) else {}
        benchmark, batch, epochs = fields.get("Benchmark"), fields.get("BS"), fields.get("Epochs to converge")
        numbers = [convert_to_float(item) for item in epochs] if isinstance(epochs, list) else []
        positive = [number for number in numbers if number is not None and number > 0.0]
        all_positive = bool(numbers) and len(positive) == len(numbers)
        sound = type(batch) is int and batch >= 1 and parse_int64(batch) is not None  # of at most 64 bits
        if not isinstance(benchmark, str) or not isinstance(batch, int) or not sound or not all_positive:
            raise InputError(
                f"{path}: entry {render_repr(name)}: expected the fields Benchmark (text), BS (an integer from 1) and "
                "Epochs to converge (a list of positive numbers)"
            )
        # Their file may have several entries of one batch size, each with some runs.
        found[benchmark, None, batch] = (*found.get((benchmark, None, batch), ()), *positive)
    return found
