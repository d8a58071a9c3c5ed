"""Builds the sections of A/B contests from what `mlhpc ab runs show` wrote. Nothing is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlhpc.analysis.page.cells import HtmlTable, build_html_table
from mlhpc.suite.performance.ab.ranking import Ranking, render_ratio, render_verdict

LONGEST_FINDING = 300  # characters


@dataclass(frozen=True)
class ContestSection:
    """Holds one contest as the template takes it."""

    title: str
    verdict: str
    remarks: tuple[str, ...]
    table: HtmlTable


def build_contest_section(ranking: Ranking) -> ContestSection:
    """Return the verdict, remarks and table of one contest."""
    entries, stated = ranking.entries, ranking.settings
    columns: dict[str, list[Any]] = {
        "entry": [each.entry for each in entries],
        "verdict": [render_verdict(each) for each in entries],
        "finished runs": [f"{each.finished} of {each.runs}" for each in entries],
        f"mean {ranking.objective}": [each.mean for each in entries],
        "spread, factor": [each.spread_factor for each in entries],
        "score: fastest and slowest dropped": [each.score for each in entries],
        "time / leader, median [95 %]": [render_ratio(each.ratio_to_leader) for each in entries],
    }
    counted = f"{ranking.runs} runs, {ranking.blocks} complete blocks; error at most {100 * ranking.error:g} %"
    return ContestSection(
        title=f"{ranking.name}: {stated.get('workload')} {stated.get('size')} on {stated.get('system')}",
        verdict=ranking.verdict,
        remarks=(
            counted,
            *([ranking.by_score] if ranking.by_score else []),
            *(str(each)[:LONGEST_FINDING] for each in ranking.findings),
        ),
        table=build_html_table(columns, f"Entries of {ranking.name}"),
    )
