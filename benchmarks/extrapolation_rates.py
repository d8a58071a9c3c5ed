"""How often extrapolations hold on unfriendly truths: of networks (`mlhpc moe fit`) and of scaling (`mlhpc report`).

    python benchmarks/extrapolation_rates.py [--draws 200]

A row is a truth, a size that is printed and a reach: ranks or units over the largest measured ones. "said" is how many draws
were extrapolated; of the others the text says that the largest size does not follow the smaller ones. "lower end" is the
share of truths at or above it (95 % stated), "interval" the share between both ends (90 % stated); "none": no upper end is
stated there, and "excluded": the text excludes this truth. "width" is the median of high over low, "value / low" of the
prediction over the lower end. Truths are in tests/plugins/network/hidden_networks.py and scaling_laws.py; the fast form of
the table is in tests/plugins/network/test_intervals.py and tests/analysis/results/test_scaling.py.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.verdict_rates import wilson
from tests.fixtures import scaling_laws
from tests.plugins.network import hidden_networks
from tests.plugins.network.network_outcomes import printed

Said = tuple[float, float, float, float]  # truth, value, low, high


def rate(held: list[bool]) -> str:
    low, high = wilson(sum(held), len(held))
    return f"{100 * sum(held) / len(held):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def row(truth: str, what: str, reach: float, said: list[Said], draws: int, *, excluded: bool) -> None:
    """Print the rates of one truth, size and reach."""
    if not said:
        print(f"| {truth} | {what} | {reach:g} | 0 of {draws} | - | - | - | - |", flush=True)
        return
    lower = rate([true >= low for true, _, low, _ in said])
    margin = statistics.median(value / low for _, value, low, _ in said)
    both, width = "none", "none"
    if math.isfinite(said[0][3]):
        both = "excluded" if excluded else rate([low <= true <= high for true, _, low, high in said])
        width = f"{statistics.median(high / low for _, _, low, high in said):.2f}"
    print(
        f"| {truth} | {what} | {reach:g} | {len(said)} of {draws} | {lower} | {both} | {width} | {margin:.2f} |",
        flush=True,
    )


def scaling(truth: str, draws: int) -> None:
    """Print the rows of one law of seconds per epoch."""
    found: dict[float, list[Said]] = defaultdict(list)
    for seed in range(draws):
        for one in scaling_laws.extrapolations(truth, seed):
            found[one.reach].append((one.true, one.value, one.low, one.high))
    for reach in (2.0, 4.0):
        row(truth, "seconds per epoch", reach, found[reach], draws, excluded=truth in scaling_laws.UNSEEN)


def network(truth: str, draws: int) -> None:
    """Print the rows of one kind of network."""
    found: dict[tuple[str, float], list[Said]] = defaultdict(list)
    for seed in range(draws):
        for one in printed(hidden_networks.truth_network(truth, seed)):
            what = f"{one.quantity}, {one.size_mib:g} MiB"
            found[what, one.growth].append((one.true, one.found.value, one.found.low, one.found.high))
    for (what, reach), said in sorted(found.items()):
        row(truth, what, reach, said, draws, excluded=truth in hidden_networks.UNSEEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--networks", type=int, help="draws of each network [as --draws]")
    parser.add_argument("--truth", action="append", metavar="TEXT", help="only truths that begin so; repeatable [all]")
    given = parser.parse_args()
    print(f"{platform.node()}, {given.draws} draws of each truth; Wilson's 95 % intervals in parentheses")
    print("| truth | what | reach | said | lower end | interval | width | value / low |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, truths in ((scaling, scaling_laws.TRUTHS), (network, hidden_networks.TRUTHS)):
        for truth in truths:
            if given.truth is None or truth.startswith(tuple(given.truth)):
                kind(truth, given.networks or given.draws if kind is network else given.draws)


if __name__ == "__main__":
    main()
