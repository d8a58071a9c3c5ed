"""Keep what the baselines of a workload reach on generated data: benchmarks/results/<date>-baselines_<workload>.json.

    pip install 'lightgbm>=4.5'
    python -m benchmarks.baselines cosmoflow                       its smoke and mini, generated under data/ where they are missing
    python -m benchmarks.baselines openfold --size mini --seed 7   one size of other data; the file keeps its other entries

The command prints the lines of each size's entry `baselines` in the workload's card. `make docs` makes a page of the cards.
A predictor that knows the rule of the data is an oracle baseline. The file keeps these apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.files import print_line, write_file_atomically

RESULTS = Path(__file__).resolve().parents[1] / "results"
VERSION = 2  # 1 called the oracle baselines "attainable"
ORACLES = {"known_language"}


def measure(workload: str, size: str, seed: int, ranks: int, root: Path) -> dict[str, Any]:
    """Generate the data set under ``root`` (a complete one is kept) and measure its baselines."""
    options = ["--size", size, "--seed", str(seed), "--ranks", str(ranks), "-o", str(root)]
    subprocess.run([sys.executable, "-P", "-m", "mlhpc", "data", "generate", workload, *options], check=True)
    manifest = read_manifest(root)
    found = import_module(f"benchmarks.baselines.{workload}").measure_baselines(root)
    entries = {name: {"value": float(each), "standard_error": each.standard_error} for name, each in found.items()}
    return {
        "seed": seed,
        "data_manifest": manifest.sha256,
        "eval_samples": manifest.samples("validation"),
        "metric": load_descriptor(workload).card().size(size).metric,
        "baselines": {name: entry for name, entry in entries.items() if name not in ORACLES},
        "oracle_baselines": {name: entry for name, entry in entries.items() if name in ORACLES},
    }


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """Read the measured sizes of a table."""
    sizes: dict[str, dict[str, Any]] = json.loads(path.read_text())["sizes"]
    for entry in sizes.values():
        entry.setdefault("oracle_baselines", entry.pop("attainable", {}))  # as version 1 called them
    return sizes


def card_lines(table: str, measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a size in a card that quote its entry of a table (`mlhpc.suite.card.Baselines`)."""
    yield "    baselines:"
    yield f"      table: {table}"
    yield f"      seed: {measured['seed']}"
    yield f"      samples: {measured['eval_samples']}"
    for part, key in (("values", "baselines"), ("oracle", "oracle_baselines")):
        if measured[key]:
            yield f"      {part}:"
        for name, entry in measured[key].items():
            error = entry["standard_error"]
            more = "" if error is None else f", standard_error: {error:.6g}"
            yield f"        {name}: {{value: {entry['value']:.6g}{more}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--size", action="append", help="once per size; default: smoke and mini")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    name, sizes = load_descriptor(arguments.workload).name, arguments.size or ["smoke", "mini"]
    path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-baselines_{name}.json"
    earlier = sorted(RESULTS.glob(f"*-baselines_{name}.json"))
    kept = read_table(earlier[-1]) if earlier else {}
    for size in sizes:
        root = Path("data") / (f"{name}-{size}" if arguments.seed == 0 else f"{name}-{size}-seed{arguments.seed}")
        kept[size] = measure(name, size, arguments.seed, arguments.ranks, root)
        print_line("\n".join([f"  {size}:", *card_lines(path.name, kept[size])]))
    document = {"version": VERSION, "workload": name, "sizes": kept}
    write_file_atomically(path, json.dumps(document, indent=1) + "\n")
    print_line(str(path))


if __name__ == "__main__":
    main()
