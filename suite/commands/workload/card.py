"""`mlhpc workload card`: counts what a workload's card says of its sizes, and fills in what is not counted yet."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlhpc.suite.card import SizeCard
from mlhpc.suite.cli.options import output_option, size_option
from mlhpc.suite.config import RunConfig, choose_default_data_root, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, write_file_atomically

if TYPE_CHECKING:
    from mlhpc.suite.performance.card_counts import CardCounts
    from mlhpc.suite.workload import Work

EXACT_KEYS = ("train_samples", "eval_samples", "model_parameters")  # counted, so equal or wrong
FORWARD, TRAINING = "forward_flops_per_sample", "training_flops_per_sample"
COUNTED_KEYS = (*EXACT_KEYS, FORWARD, TRAINING, "sample_bytes")
REL_TOLERANCE = 0.01  # the checker allows as much between the FLOPs of a log and those of the card


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
    """Count the FLOPs, parameters and bytes of WORKLOAD by running one step. Fill in or check the counts of its card.

    Counts that are 0 in the card are filled in; the others are compared. A size is counted with its own settings and
    data set, which is generated if there is none. Comments in the card stay.

    A card states the FLOPs of the model for a sample of mean size. The code also executes the FLOPs of losses, padding
    and recomputation. So the counted FLOPs are compared with the workload's formula for executed FLOPs. The card is
    compared with its formula for the model.

    Exit code 0: filled in, or every count is right (FLOPs and bytes within 1 %). Exit code 1: a count is wrong, and was
    not changed. Exit code 2: usage.
    """
    chosen = load_descriptor(workload)
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
        counts = _count_size(chosen, load_config(chosen, name))
        wrong |= not _compare_counts(f"{workload} {name}", entry, counts)
        for key in COUNTED_KEYS:
            if not getattr(entry, key):
                text = _fill_in(text, source, ("sizes", name, key), _select_card_value(key, counts))
    target = output or chosen.card_path
    if output is not None or text != before:
        write_file_atomically(target, text)
        print_line(f"{target}: written")
    if wrong:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _is_incomplete(entry: SizeCard) -> bool:
    return not all(getattr(entry, key) for key in COUNTED_KEYS)


def _compare_counts(title: str, entry: SizeCard, counts: CardCounts) -> bool:
    """Print each count of a size next to what card or configuration state. Return True if all are right."""
    fine = True
    for key in COUNTED_KEYS:
        verdict, right = _judge_count(key, getattr(entry, key), counts)
        fine = fine and right
        print_line(f"{title}: {key} {getattr(counts, key):,.0f}: {verdict}")
    for mean, (stated, found) in counts.means.items():
        right = not _differs(stated, found)
        fine = fine and right
        verdict = "as the configuration says" if right else f"the configuration says {stated:,.6g}: WRONG"
        print_line(f"{title}: {mean} of the data {found:,.6g}: {verdict}")
    if counts.uncovered:
        print_line(f"{title}: operators without a formula, not counted: {', '.join(counts.uncovered)}")
    return fine


def _judge_count(key: str, stated: float, counts: CardCounts) -> tuple[str, bool]:
    """Compare a count with the card's: a text, and whether it is right. A ``stated`` 0 was filled in.

    Counted FLOPs are compared with the workload's formula for executed FLOPs on the same samples. FLOPs of the card are
    compared with its formula for the model on a sample of mean size.
    """
    counted = getattr(counts, key)
    if key in (FORWARD, TRAINING):
        executed, model = (
            _select_closed_form_flops(key, counts.counted_form)[0],
            _select_closed_form_flops(key, counts.closed_form)[1],
        )
        if _differs(counted, executed):
            return f"the closed form says that {executed:,.0f} are executed: WRONG", False
        if stated and _differs(stated, model):
            return f"the card says {stated:,.0f}, the closed form of the model {model:,.0f}: WRONG", False
        if stated and _differs(counted, stated):
            return f"executed, as the closed form says; of the model {stated:,.0f}, as the card says", True
        return "as the card says" if stated else "filled in", True
    if not stated:
        return "filled in", True
    right = counted == stated if key in EXACT_KEYS else not _differs(counted, stated)
    return "as the card says" if right else f"the card says {stated:,.0f}: WRONG", right


def _select_closed_form_flops(key: str, form: Work) -> tuple[float, float]:
    """Return executed and model FLOPs of a closed form, for the forward pass or for training by ``key``."""
    if key == TRAINING:
        return form.executed_flops, form.model_flops
    return form.forward_flops + form.forward_extra_flops, form.forward_flops


def _select_card_value(key: str, counts: CardCounts) -> float:
    """Choose what the card states.

    Of FLOPs the model's, if the formula for executed FLOPs is right; else as counted.
    """
    counted = float(getattr(counts, key))
    if key not in (FORWARD, TRAINING) or _differs(counted, _select_closed_form_flops(key, counts.counted_form)[0]):
        return counted
    return _select_closed_form_flops(key, counts.closed_form)[1]


def _differs(one: float, other: float) -> bool:
    return abs(one - other) > REL_TOLERANCE * other


def _count_size(chosen: Descriptor, config: RunConfig) -> CardCounts:
    """Count with the data set at its usual place, or with one generated for this."""
    from mlhpc.suite.data.build import find_data
    from mlhpc.suite.data.manifest import MANIFEST_NAME
    from mlhpc.suite.performance.card_counts import count_size
    from mlhpc.suite.world import World

    root = config.data or choose_default_data_root(config.workload, config.size)
    # The manifest is written last, so only a whole data set has one.
    if (root / MANIFEST_NAME).exists():
        find_data(root, config.workload, config.size)
        return count_size(chosen, config, root)
    with tempfile.TemporaryDirectory(prefix="mlhpc-card-") as folder:
        chosen.load_generator().generate(Path(folder), config.size, seed=0, world=World.create())
        return count_size(chosen, config, Path(folder))


def _fill_in(text: str, source: YamlSource, key: Sequence[str], value: float) -> str:
    """Return the text of a card with one 0 replaced. InputError if it does not stand on a line of its own."""
    number = source.lines.get(tuple(key))
    lines = text.splitlines(keepends=True)
    pattern = rf"(\s*{re.escape(key[-1])}:\s*)0(?:\.0*)?(\s*(?:#.*)?\n?)"
    # The text is edited, not written anew: comments of the card stay.
    match = re.fullmatch(pattern, lines[number - 1]) if number is not None else None
    if match is None or number is None:
        raise InputError(
            f"{source.where(*key)}: {'.'.join(key)} cannot be filled in: write '{key[-1]}: 0' on a line of its own"
        )
    lines[number - 1] = f"{match[1]}{_render_number(value)}{match[2]}"
    return "".join(lines)


def _render_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
