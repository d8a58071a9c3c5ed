"""OpenFold: AlphaFold 2's network predicts a protein's structure from its sequence and its relatives. No torch."""

from pathlib import Path

from suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="openfold",
    folder=Path(__file__).parent,
    hyperparameters="workloads.openfold.config:OpenFoldConfig",
    implementation="workloads.openfold.workload:OpenFold",
    generator="workloads.openfold.generate",
    no_stages="its recycling runs all blocks several times in one forward pass",
)
