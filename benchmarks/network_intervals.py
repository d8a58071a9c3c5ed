"""How often the intervals of `mlhpc moe fit` hold the truth, on networks whose laws the fitted model does not have.

    python benchmarks/network_intervals.py [--laws 40] [--first-seed 0]

A law is LogGP with an eager limit, a fat tree with taper, a dragonfly or nodes that share a port, drawn from a seed
(tests/plugins/network/hidden_networks.py), measured with noise to 64 or 128 ranks. Judged are all numbers on the largest grid (1x)
and on all ranks that the data are said to carry: seconds of both all-to-alls and their ratio at 17 sizes, the layer, the
crossover. Beyond 2x only lower ends of times are stated, and judged. `extrapolation_rates.py` judges single kinds of
networks at the sizes that are printed. The constants of plugins/network were chosen on seeds 1000 to 1159.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not installed

from tests.plugins.network.hidden_networks import FAMILIES, hidden_network
from tests.plugins.network.network_outcomes import Outcome, outcomes

QUANTITIES = ("linear", "2dh", "ratio", "layer")


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage of the intervals of mlhpc moe fit.")
    parser.add_argument("--laws", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=0)
    chosen = parser.parse_args()
    began = time.process_time()
    found = [
        o for seed in range(chosen.first_seed, chosen.first_seed + chosen.laws) for o in outcomes(hidden_network(seed))
    ]
    print(f"{chosen.laws} laws from seed {chosen.first_seed}, {time.process_time() - began:.1f} s of CPU")
    print(
        "held: share of 90 % intervals that hold the truth, beyond 2x of lower ends; width: median of high over low, beyond "
        "2x of the prediction over the lower end; error: predicted against true"
    )
    numbers = [outcome for outcome in found if outcome.quantity != "crossover"]
    growths = sorted({outcome.growth for outcome in found})
    header(["quantity", *(f"{growth}x" for growth in growths)])
    for name in QUANTITIES:
        line(name, [cell(o for o in numbers if o.quantity == name and o.growth == growth) for growth in growths])
    header(["family", *(f"{growth}x" for growth in growths)])
    for family in FAMILIES:
        line(family, [cell(o for o in numbers if o.family == family and o.growth == growth) for growth in growths])
    line("all", [cell(o for o in numbers if o.growth == growth) for growth in growths])
    print(f"\nall numbers beyond the measured ranks: {cell(o for o in numbers if o.growth > 1)}")
    header(["crossover", "cases", "right", "wrong", "inconclusive", "verdicts"])
    for growth in growths:
        own = [o for o in found if o.quantity == "crossover" and o.growth == growth]
        told = [o for o in own if o.verdict != "inconclusive"]
        right = sum(o.held for o in told)
        verdicts = ", ".join(f"{name} {n}" for name, n in sorted(Counter(o.verdict for o in told).items()))
        line(f"{growth}x", [len(own), right, len(told) - right, len(own) - len(told), verdicts])


def cell(outcomes_of: Iterable[Outcome]) -> str:
    own = list(outcomes_of)
    if not own:
        return "–"
    held = 100 * statistics.mean(o.held for o in own)
    width, errors = statistics.median(o.width for o in own), sorted(abs(o.error) for o in own)
    laws = len({o.seed for o in own})
    return (
        f"{held:.1f} % held, width {width:.2f}x, error median {100 * statistics.median(errors):.1f} %, "
        f"largest {100 * errors[-1]:.0f} % ({laws} laws)"
    )


def header(names: Sequence[str]) -> None:
    print()
    line(names[0], names[1:])
    line("---", ["---"] * (len(names) - 1))


def line(first: str, rest: Sequence[object]) -> None:
    print(f"| {first} | " + " | ".join(map(str, rest)) + " |")


if __name__ == "__main__":
    main()
