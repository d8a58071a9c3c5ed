"""Makes the weights that OpenFold's small sizes start from: smoke, trained from random weights until it leaves lDDT-CA 0.5.

    python -m benchmarks.openfold_start -o workloads/openfold/start.npz

Chance decides in which epoch that is (benchmarks/results/2026-11-28-openfold_plateau.txt). The averaged weights are written after
the first epoch that ends above --above. --seed is the seed of the data and of the run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.block import open_workload, train_epochs, trainer
from benchmarks.planted_faults import generate
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.world import World
from mlhpc.workloads.openfold.checkpoint import save_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--above", type=float, default=0.6, help="lDDT-CA")
    parser.add_argument("--epochs", type=int, default=20, help="at most")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data set")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    world = World.create(None)
    # the rate of smoke before it had this file
    settings = ("init_checkpoint=null", "learning_rate=0.005")
    overrides = ["choices.measure=false", *(f"hyperparameters.{setting}" for setting in settings)]
    workload, config = open_workload("openfold", "smoke", overrides, world)
    root = generate("openfold", "smoke", arguments.seed, arguments.data)
    train, validation = (workload.dataset(split, root) for split in ("train", "validation"))
    loop = trainer(workload, config, world, EventLog(None), train, validation, seed=arguments.seed)
    for epoch, value in enumerate(train_epochs(loop, arguments.epochs), 1):
        print(f"epoch {epoch}: lDDT-CA {value:.3f}", flush=True)
        if value > arguments.above:
            with loop.state.evaluated() as model:
                save_checkpoint(model, arguments.output)
            return 0
    print(f"no epoch ended above {arguments.above:g}; try another --seed", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
