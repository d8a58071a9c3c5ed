"""CosmoFlow: a 3-D CNN predicts four cosmological parameters from counts of dark matter particles. No torch."""

from pathlib import Path

from suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="cosmoflow",
    folder=Path(__file__).parent,
    hyperparameters="workloads.cosmoflow.config:CosmoFlowConfig",
    implementation="workloads.cosmoflow.workload:CosmoFlow",
    generator="workloads.cosmoflow.generate",
    no_stages="its activations shrink from layer to layer, so stages would not be equal",
)
