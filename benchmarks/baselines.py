"""Keep what the baselines of a workload reach on generated data: benchmarks/results/<date>-baselines_<workload>.json.

    python benchmarks/baselines.py cosmoflow                       its smoke and mini, generated under data/ where they are missing
    python benchmarks/baselines.py openfold --size mini --seed 7   one size of other data; the file keeps its other entries

The values are those that `mlhpc data generate` measures and prints; `make docs` makes the page of them.
Predictors that are told the rule of the data are kept apart, as what is attainable.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from mlhpc.suite.data.baselines import BASELINES_NAME
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.files import print_line, write_file_atomically

RESULTS = Path(__file__).resolve().parent / "results"
VERSION = 1


def measure(workload: str, size: str, seed: int, ranks: int, root: Path) -> dict[str, object]:
    """Generate the data set under ``root`` (a complete one is kept) and read its baselines."""
    options = ["--size", size, "--seed", str(seed), "--ranks", str(ranks), "-o", str(root)]
    subprocess.run([sys.executable, "-P", "-m", "mlhpc", "data", "generate", workload, *options], check=True)
    manifest = read_manifest(root)
    found = json.loads((root / BASELINES_NAME).read_text())
    return {
        "seed": seed,
        "data_manifest": manifest.sha256,
        "eval_samples": manifest.samples("validation"),
        "metric": found["metric"],
        **{
            part: {
                name: {"value": value, "standard_error": found["standard_errors"][name]}
                for name, value in found[key].items()
            }
            for part, key in (("baselines", "values"), ("attainable", "attainable"))
        },
    }


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
    document = json.loads(earlier[-1].read_text()) if earlier else {"version": VERSION, "workload": name, "sizes": {}}
    for size in sizes:
        root = Path("data") / (f"{name}-{size}" if arguments.seed == 0 else f"{name}-{size}-seed{arguments.seed}")
        document["sizes"][size] = measure(name, size, arguments.seed, arguments.ranks, root)
    write_file_atomically(path, json.dumps(document, indent=1) + "\n")
    print_line(str(path))


if __name__ == "__main__":
    main()
