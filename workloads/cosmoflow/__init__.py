"""CosmoFlow: a 3-D CNN predicts four cosmological parameters from counts of dark matter particles. No torch."""

from pathlib import Path

from mlhpc.suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="cosmoflow",
    folder=Path(__file__).parent,
    hyperparameters="mlhpc.workloads.cosmoflow.config:CosmoFlowConfig",
    implementation="mlhpc.workloads.cosmoflow.workload:CosmoFlow",
    generator="mlhpc.workloads.cosmoflow.generate",
    no_stages="its activations shrink from layer to layer, so stages would not be equal",
)
