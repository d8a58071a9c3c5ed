"""OpenFold: AlphaFold 2's network predicts a protein's structure from its sequence and its relatives. No torch."""

from pathlib import Path

from mlhpc.suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="openfold",
    folder=Path(__file__).parent,
    hyperparameters="mlhpc.workloads.openfold.config:OpenFoldConfig",
    implementation="mlhpc.workloads.openfold.workload:OpenFold",
    generator="mlhpc.workloads.openfold.generate",
    no_stages="its recycling runs all blocks several times in one forward pass",
)
