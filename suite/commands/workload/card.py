"""`mlhpc workload card`: counts what a workload's card says of its sizes, and fills in what is not counted yet."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from suite.card import SizeCard
from suite.cli.options import output_option, size_option
from suite.config import RunConfig, default_data_root, load_config
from suite.descriptor import Descriptor, descriptor
from suite.documents import YamlSource
from suite.errors import InputError
from suite.exit_codes import ExitCode
from suite.files import print_line, write_whole

if TYPE_CHECKING:
    from suite.performance.card_counts import Counts
    from suite.workload import Work

EXACT = ("train_samples", "eval_samples", "model_parameters")  # counted, so equal or wrong
FORWARD, TRAINING = "forward_flops_per_sample", "training_flops_per_sample"
FILLED = (*EXACT, FORWARD, TRAINING, "sample_bytes")
CLOSE = 0.01  # the checker allows as much between the FLOPs of a log and those of the card


@click.command(
    epilog="""\b
Example:
  mlhpc workload card myworkload --size smoke
"""
)
@click.argument("workload")
@size_option(None, "Count only this size. [every size with a count of 0]")
@output_option("Card file to write.", "the workload's own, in place")
def card(workload: str, size: str | None, output: Path | None) -> None:
    """Count the FLOPs, parameters and bytes of WORKLOAD by running one step; fill in or check the counts of its card.

    Counts that are 0 in the card are filled in; the others are compared. A size is counted with its own settings and
    data set, which is generated if there is none. Comments in the card stay.

    A card states the FLOPs of the model for a sample of mean size. The code also executes the FLOPs of losses, padding
    and recomputation. So the counted FLOPs are compared with the workload's formula for executed FLOPs, and the card
    with its formula for the model.

    Exit code 0: filled in, or every count is right (FLOPs and bytes within 1 %); 1: a count is wrong, and was not
    changed; 2: usage.
    """
    chosen = descriptor(workload)
    chosen.code()
    if size is not None:
        wanted = {size: chosen.card().size(size)}
    else:
        wanted = {name: entry for name, entry in chosen.card().sizes.items() if _is_incomplete(entry)}
    if not wanted:
        print_line(
            f"{chosen.card_path}: every count is there; --size NAME counts that size again; a count of 0 is filled in"
        )
        return
    source = YamlSource.read(chosen.card_path)
    before = text = chosen.card_path.read_text(encoding="utf-8")
    wrong = False
    for name, entry in wanted.items():
        counts = _count(chosen, load_config(chosen, name))
        wrong |= not _compare(f"{workload} {name}", entry, counts)
        for key in FILLED:
            if not getattr(entry, key):
                text = _filled(text, source, ("sizes", name, key), _model_part(key, counts))
    target = output or chosen.card_path
    if output is not None or text != before:
        write_whole(target, text)
        print_line(f"{target}: written")
    if wrong:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _is_incomplete(entry: SizeCard) -> bool:
    return not all(getattr(entry, key) for key in FILLED)


def _compare(title: str, entry: SizeCard, counts: Counts) -> bool:
    """Print each count of a size and what the card or the configuration states; True if all are right."""
    fine = True
    for key in FILLED:
        verdict, right = _judged(key, getattr(entry, key), counts)
        fine = fine and right
        print_line(f"{title}: {key} {getattr(counts, key):,.0f}: {verdict}")
    for mean, (stated, found) in counts.means.items():
        right = not _far(stated, found)
        fine = fine and right
        verdict = "as the configuration says" if right else f"the configuration says {stated:,.6g}: WRONG"
        print_line(f"{title}: {mean} of the data {found:,.6g}: {verdict}")
    if counts.uncovered:
        print_line(f"{title}: operators without a formula, not counted: {', '.join(counts.uncovered)}")
    return fine


def _judged(key: str, stated: float, counts: Counts) -> tuple[str, bool]:
    """Compare a count with the card's: a text, and whether it is right. A ``stated`` 0 was filled in.

    FLOPs that were counted are compared with the closed form of what is executed on the same samples, those of the card
    with the closed form of the model on a sample of mean size.
    """
    counted = getattr(counts, key)
    if key in (FORWARD, TRAINING):
        executed, model = _closed(key, counts.counted_form)[0], _closed(key, counts.closed_form)[1]
        if _far(counted, executed):
            return f"the closed form says that {executed:,.0f} are executed: WRONG", False
        if stated and _far(stated, model):
            return f"the card says {stated:,.0f}, the closed form of the model {model:,.0f}: WRONG", False
        if stated and _far(counted, stated):
            return f"executed, as the closed form says; of the model {stated:,.0f}, as the card says", True
        return "as the card says" if stated else "filled in", True
    if not stated:
        return "filled in", True
    right = counted == stated if key in EXACT else not _far(counted, stated)
    return "as the card says" if right else f"the card says {stated:,.0f}: WRONG", right


def _closed(key: str, form: Work) -> tuple[float, float]:
    """The FLOPs that a closed form says are executed, and those of the model."""
    if key == TRAINING:
        return form.executed_flops, form.model_flops
    return form.forward_flops + form.forward_extra_flops, form.forward_flops


def _model_part(key: str, counts: Counts) -> float:
    """What a card says of a count: of FLOPs the model's, if the closed form of those executed is right."""
    counted = float(getattr(counts, key))
    if key not in (FORWARD, TRAINING) or _far(counted, _closed(key, counts.counted_form)[0]):
        return counted
    return _closed(key, counts.closed_form)[1]


def _far(one: float, other: float) -> bool:
    return abs(one - other) > CLOSE * other


def _count(chosen: Descriptor, config: RunConfig) -> Counts:
    """Count with the data set at its usual place, or with one generated for this."""
    from suite.data.build import find_data
    from suite.data.manifest import MANIFEST_NAME
    from suite.performance.card_counts import count_size
    from suite.world import World

    root = config.data or default_data_root(config.workload, config.size)
    if (root / MANIFEST_NAME).exists():
        find_data(root, config.workload, config.size)
        return count_size(chosen, config, root)
    with tempfile.TemporaryDirectory(prefix="mlhpc-card-") as folder:
        chosen.load_generator().generate(Path(folder), config.size, seed=0, world=World.create())
        return count_size(chosen, config, Path(folder))


def _filled(text: str, source: YamlSource, key: Sequence[str], value: float) -> str:
    """The text of a card with one 0 replaced. InputError if it does not stand on a line of its own."""
    number = source.lines.get(tuple(key))
    lines = text.splitlines(keepends=True)
    pattern = rf"(\s*{re.escape(key[-1])}:\s*)0(?:\.0*)?(\s*(?:#.*)?\n?)"
    # The text is edited, not written anew: comments of the card stay.
    match = re.fullmatch(pattern, lines[number - 1]) if number is not None else None
    if match is None or number is None:
        raise InputError(
            f"{source.where(*key)}: {'.'.join(key)} cannot be filled in: write '{key[-1]}: 0' on a line of its own"
        )
    lines[number - 1] = f"{match[1]}{_plain(value)}{match[2]}"
    return "".join(lines)


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
