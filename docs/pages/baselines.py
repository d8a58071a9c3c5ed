"""The page of baselines, from the cards and the newest benchmarks/results/*-baselines_*.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.card import SizeCard
from mlhpc.suite.descriptor import load_descriptors

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Baselines and targets

What predictors without a network reach on the validation split of generated data, next to the target. The standard error is the
baseline's, over the evaluation samples; the margin is (target - baseline) / standard error with the sign turned so that more is
better. Where it is negative, the baseline meets the target: a target tells broken trainings from healthy ones, not networks from
regressions. `python benchmarks/baselines.py WORKLOAD` measures anew.
"""
ATTAINABLE = """
### Attainable (told the rule)

These predictors are told the rule that made the data. They are no baselines: they show what is attainable.

| size | target | predictor | value | standard error |
| --- | --- | --- | --- | --- |"""
NOTES = {
    "moe_lm": "`known_language` is told which words may follow a word in each topic, and their odds ([moe.md](moe.md)).",
}


@dataclass(frozen=True)
class Row:
    """One baseline of one size. ``error`` and ``margin`` are None where the standard error is not known."""

    workload: str
    size: str
    name: str
    value: float
    error: float | None
    margin: float | None


def rows(results: Path = RESULTS, part: str = "baselines") -> Iterator[Row]:
    """Every measured baseline, the best of a size first; ``part`` "attainable": those that are told the rule of the data."""
    for workload, each in sorted(load_descriptors().items()):
        for size, card in each.card().sizes.items():
            found = measured(workload, results).get(size, {}).get(part, {})
            sign = -1 if card.direction == "min" else 1
            for name, entry in sorted(found.items(), key=lambda item: -sign * item[1]["value"]):
                value, error = entry["value"], entry["standard_error"]
                margin = sign * (card.threshold - value) / error if error else None
                yield Row(workload, size, name, value, error, margin)


def measured(workload: str, results: Path) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The sizes in the newest file of a workload. Empty if there is none."""
    files = sorted(results.glob(f"*-baselines_{workload}.json"))
    sizes: dict[str, dict[str, dict[str, dict[str, float]]]] = (
        json.loads(files[-1].read_text())["sizes"] if files else {}
    )
    return sizes


def page(results: Path = RESULTS) -> str:
    """The text of the page."""
    parts = [HEAD]
    every, told = list(rows(results)), list(rows(results, "attainable"))
    known = [row for row in every if row.margin is not None]
    if known:
        least = min(known, key=lambda row: row.margin or 0.0)
        parts.append(f"\nThe smallest margin is {least.margin:+.1f}: {least.name} of {least.workload} `{least.size}`.")
        met = dict.fromkeys(f"{row.workload} `{row.size}`" for row in known if (row.margin or 0.0) <= 0)
        parts.append(f"Baselines meet the target of {', '.join(met) or 'no size'}.")
    for workload, each in sorted(load_descriptors().items()):
        parts += [f"\n## {each.card().title}\n", "| size | target | baseline | value | standard error | margin |"]
        parts.append("| --- | --- | --- | --- | --- | --- |")
        unmeasured = []
        for size, card in each.card().sizes.items():
            own = [row for row in every if (row.workload, row.size) == (workload, size)]
            parts += [_line(card, row) for row in own]
            if not own:
                unmeasured.append(f"`{size}` ({card.metric_name} {_target(card)})")
        if unmeasured:
            parts.append(f"\nNot measured: {', '.join(unmeasured)}.")
        if apart := [row for row in told if row.workload == workload]:
            parts.append(ATTAINABLE)
            parts += [_line(each.card().sizes[row.size], row, margin=False) for row in apart]
            parts += [f"\n{NOTES[workload]}"] if workload in NOTES else []
    return "\n".join(parts) + "\n"


def _line(card: SizeCard, row: Row, *, margin: bool = True) -> str:
    error = "not known" if row.error is None else f"{row.error:.4f}"
    last = "" if not margin else f" {row.margin:+.1f} |" if row.margin is not None else " not known |"
    target = f"{card.metric_name} {_target(card)}"
    return f"| `{row.size}` | {target} | {row.name} | {row.value:.4f} | {error} |{last}"


def _target(card: SizeCard) -> str:
    return f"{'at most' if card.direction == 'min' else 'at least'} {card.threshold:g}"
