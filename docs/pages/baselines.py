"""The page of baselines, from the cards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlhpc.suite.card import Card, SizeCard
from mlhpc.suite.descriptor import load_descriptors

HEAD = """# Baselines and targets

What predictors without a network reach on the validation split of generated data, next to the target. The numbers are those of the
cards, which runs log. The standard error is the baseline's, over the evaluation samples. The margin is
(target - baseline) / standard error, with the sign turned so that more is better. Where it is negative, the baseline meets the
target: a target tells broken trainings from healthy ones, not networks from regressions.
`python -m benchmarks.baselines WORKLOAD` measures anew; it needs LightGBM.
"""
ORACLE = """
### Oracle baselines

These predictors know the rule that made the data. They show that the target can be met.

| size | target | predictor | value | standard error |
| --- | --- | --- | --- | --- |"""
NOTES = {
    "moe_lm": "`known_language` knows which words may follow a word in each topic, and their odds ([moe.md](moe.md)).",
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


def rows(cards: dict[str, Card], *, oracle: bool = False) -> Iterator[Row]:
    """Yield every baseline of the cards, or every oracle baseline, the best of a size first."""
    for workload, each in sorted(cards.items()):
        for size, card in each.sizes.items():
            stated = card.baselines
            found = {} if stated is None else stated.oracle if oracle else stated.values
            sign = -1 if card.direction == "min" else 1
            for name, entry in sorted(found.items(), key=lambda item: -sign * item[1].value):
                error = entry.standard_error
                margin = sign * (card.threshold - entry.value) / error if error else None
                yield Row(workload, size, name, entry.value, error, margin)


def read_cards() -> dict[str, Card]:
    """Return the card of each workload."""
    return {workload: each.card() for workload, each in load_descriptors().items()}


def page() -> str:
    """Return the text of the page."""
    parts, cards = [HEAD], read_cards()
    every, oracle = list(rows(cards)), list(rows(cards, oracle=True))
    known = [row for row in every if row.margin is not None]
    least = min(known, key=lambda row: row.margin or 0.0)
    parts.append(f"\nThe smallest margin is {least.margin:+.1f}: {least.name} of {least.workload} `{least.size}`.")
    met = dict.fromkeys(f"{row.workload} `{row.size}`" for row in known if (row.margin or 0.0) <= 0)
    parts.append(f"Baselines meet the target of {', '.join(met) or 'no size'}.")
    for workload, each in sorted(cards.items()):
        parts += [f"\n## {each.title}\n", "| size | target | baseline | value | standard error | margin |"]
        parts.append("| --- | --- | --- | --- | --- | --- |")
        parts += [_line(each.sizes[row.size], row) for row in every if row.workload == workload]
        tables = dict.fromkeys(card.baselines.table for card in each.sizes.values() if card.baselines)
        parts += [f"\nMeasured: `benchmarks/results/{table}`." for table in tables]
        unmeasured = [
            f"`{size}` ({card.metric_name} {_target(card)})" for size, card in each.sizes.items() if not card.baselines
        ]
        if unmeasured:
            parts.append(f"\nNot measured: {', '.join(unmeasured)}.")
        if apart := [row for row in oracle if row.workload == workload]:
            parts.append(ORACLE)
            parts += [_line(each.sizes[row.size], row, margin=False) for row in apart]
            parts += [f"\n{NOTES[workload]}"] if workload in NOTES else []
    return "\n".join(parts) + "\n"


def _line(card: SizeCard, row: Row, *, margin: bool = True) -> str:
    error = "not known" if row.error is None else f"{row.error:.4f}"
    last = "" if not margin else f" {row.margin:+.1f} |" if row.margin is not None else " not known |"
    target = f"{card.metric_name} {_target(card)}"
    return f"| `{row.size}` | {target} | {row.name} | {row.value:.4f} | {error} |{last}"


def _target(card: SizeCard) -> str:
    return f"{'at most' if card.direction == 'min' else 'at least'} {card.threshold:g}"
