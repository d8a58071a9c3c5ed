"""The verdicts for a terminal: a table of levels, the first cause, and what differs."""

from __future__ import annotations

from collections.abc import Iterator

from suite.package.reproduction.document import Difference, Reproduction, ResultVerdict, Verdict

_SHOWN = 12


def render_table(document: Reproduction) -> str:
    """All results, each with a line for each level."""
    return "\n".join(line for result in document.results for line in _lines(result))


def _lines(result: ResultVerdict) -> Iterator[str]:
    yield f"{result.result}: {result.workload or 'unknown workload'} {result.size or ''}".rstrip()
    for level in result.levels:
        yield f"  {level.level} {level.name:<12} {level.verdict:<15} {level.reason}"
        if level.cause is not None and level.verdict == Verdict.NOT_REPRODUCED:
            yield f"    first cause: {_text(level.cause)}"
    if result.differences:
        yield f"  what differs from {result.against or 'the package'}, the likeliest cause first:"
        yield from (f"    {_text(each)}" for each in result.differences[:_SHOWN])
        if len(result.differences) > _SHOWN:
            yield f"    and {len(result.differences) - _SHOWN} more"
    yield from (f"  not followed: {text}" for text in result.left_out)


def _text(each: Difference) -> str:
    return f"{each.kind}: {each.what}: {each.was} in the package, {each.now} here"
