"""The command `mlhpc offload`: which policy of a cache finds how many experts there?"""

from __future__ import annotations

from pathlib import Path

import click

from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import JSON, FiniteRange, IntegerRange, PercentRange, format_option
from mlhpc.suite.documents import render_json
from mlhpc.suite.files import align_columns, print_line


@click.group(cls=Subcommands)
def offload() -> None:
    """Simulate caches of experts that lie in a slower memory.

    \b
    Example:
      mlhpc offload simulate runs/moe/result_0.txt --cache 25%
    """


@offload.command(
    epilog="""\b
Examples:
  mlhpc offload simulate runs/moe/result_0.txt
  mlhpc offload simulate --zipf 1.2 --layers 4 --experts 64 --ranks 2048
"""
)
@click.argument("log", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--zipf", type=FiniteRange(0, 10), default=1.0, show_default=True, help="Without a log: Zipf's exponent.")
@click.option("--layers", type=IntegerRange(1, 1000), default=8, show_default=True, help="Without a log: MoE layers.")
@click.option("--experts", type=IntegerRange(1, 4096), default=64, show_default=True, help="Without a log: of a layer.")
@click.option(
    "--choices",
    type=IntegerRange(1, 10**9),
    default=65_536,
    show_default=True,
    help="Without a log: tokens of a step times experts of a token.",
)
@click.option(
    "--cache",
    "caches",
    type=PercentRange(1e-3, 100),
    multiple=True,
    default=("10%", "25%", "50%"),
    show_default=True,
    metavar="PERCENT",
    help="Share of all experts that a cache holds; repeatable.",
)
@click.option("--ranks", type=IntegerRange(1, 2048), default=1, show_default=True, help="Ranks that share a step.")
@click.option(
    "--requests", type=IntegerRange(1, 10**7), default=20_000, show_default=True, help="Requests of each rank."
)
@click.option("--seed", type=IntegerRange(0, 2**31), default=0, show_default=True, help="Seed of the tokens.")
@format_option()
def simulate(
    log: Path | None,
    zipf: float,
    layers: int,
    experts: int,
    choices: int,
    caches: tuple[float, ...],
    ranks: int,
    requests: int,
    seed: int,
    style: str,
) -> None:
    """Simulate how many requests for experts find them in a cache, for four policies.

    The popularity of experts is that of a run's LOG, or follows Zipf's law. Each rank has a cache. The more ranks share
    a step, the fewer experts each of them needs. Belady's policy knows the future: it is the bound of all others.
    """
    from mlhpc.plugins.offload import simulate as simulation

    popularity = simulation.read_popularity(log) if log else simulation.make_zipf(zipf, layers, experts, choices, seed)
    rows = list(simulation.simulate(popularity, caches, ranks, requests, seed))
    if style == JSON:
        print_line(render_json({"kind": "simulation", "source": popularity.source, "rows": rows}))
        return
    drawn = min(ranks, simulation.DRAWN_RANKS)
    print_line(
        f"simulation, nothing is measured: {popularity.source}; {len(popularity.shares)} layers, "
        f"{popularity.experts:,} experts, {popularity.choices:,} choices in a step; {drawn} of {ranks:,} ranks, "
        f"{requests:,} requests each"
    )
    head = ("cache", "experts", *simulation.POLICIES)
    table = [head]
    for share in dict.fromkeys(caches):
        mine = [row for row in rows if row.cache == share]
        shown = (f"{row.mean:.1f} % (least {row.least:.1f})" if ranks > 1 else f"{row.mean:.1f} %" for row in mine)
        table.append((f"{100 * share:g} %", str(mine[0].entries), *shown))
    for line in align_columns(table, right=range(len(head))):
        print_line(line)
