"""Tournaments on the page: what `mlhpc tournament rank` wrote, as a verdict and a table each. Nothing is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from analysis.page.cells import HtmlTable, html_table
from analysis.roofline.inputs import kind_of, validated

KIND = "tournament"
LONGEST = 300  # characters of a finding


class _Lenient(Struct, frozen=True, kw_only=True):
    """The base class of the parts of the document."""


class _Finding(_Lenient, frozen=True, kw_only=True):
    rule: str
    where: str
    message: str


class _Ratio(_Lenient, frozen=True, kw_only=True):
    value: float | None
    low: float | None
    high: float | None


class _Entry(_Lenient, frozen=True, kw_only=True):
    entry: str
    state: str
    dropped_after_block: int | None
    runs: int
    finished: int
    mean: float | None
    spread_factor: float | None
    ratio_to_leader: _Ratio | None
    front: str


class Ranking(_Lenient, frozen=True, kw_only=True):
    """The document of one tournament."""

    version: Literal[1]
    kind: Literal["tournament"]
    name: str
    settings: dict[str, Any]
    objective: str
    verdict: str
    blocks: int
    runs: int
    error: float
    findings: tuple[_Finding, ...]
    entries: Annotated[tuple[_Entry, ...], Meta(max_length=1000)]


@dataclass(frozen=True)
class Section:
    """One tournament as the template takes it."""

    title: str
    verdict: str
    remarks: tuple[str, ...]
    table: HtmlTable


def is_ranking(path: Path) -> bool:
    """True for a JSON file that `mlhpc tournament rank -o` wrote. InputError for a JSON file that is none."""
    return path.is_file() and path.suffix == ".json" and kind_of(path) == KIND


def read_rankings(paths: Sequence[Path]) -> tuple[Section, ...]:
    """Read rankings. InputError, one line, for a file that is damaged."""
    return tuple(_section(validated(path, KIND, Ranking)) for path in paths)


def _section(ranking: Ranking) -> Section:
    entries, stated = ranking.entries, ranking.settings
    columns: dict[str, Sequence[Any]] = {
        "entry": [each.entry for each in entries],
        "state": [_state(each) for each in entries],
        "finished runs": [f"{each.finished} of {each.runs}" for each in entries],
        f"mean {ranking.objective}": [each.mean for each in entries],
        "spread, factor": [each.spread_factor for each in entries],
        "time / leader, median [95 %]": [_ratio(each.ratio_to_leader) for each in entries],
        "Pareto front": [each.front for each in entries],
    }
    counted = f"{ranking.runs} runs, {ranking.blocks} complete blocks; error at most {100 * ranking.error:g} %"
    return Section(
        title=f"{ranking.name}: {stated.get('workload')} {stated.get('size')} on {stated.get('system')}",
        verdict=ranking.verdict,
        remarks=(counted, *(f"{each.where}: {each.message} ({each.rule})"[:LONGEST] for each in ranking.findings)),
        table=html_table(columns, f"Entries of {ranking.name}"),
    )


def _state(entry: _Entry) -> str:
    return entry.state if entry.dropped_after_block is None else f"dropped after block {entry.dropped_after_block}"


def _ratio(ratio: _Ratio | None) -> str:
    if ratio is None:
        return "1"
    if ratio.value is None:
        return "not known"
    ends = "unknown" if not ratio.low or ratio.high is None else f"{ratio.low:.3g}, {ratio.high:.3g}"
    return f"{ratio.value:.3g} [{ends}]"
