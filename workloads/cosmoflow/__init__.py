"""CosmoFlow: a 3-D CNN predicts four cosmological parameters from counts of dark matter particles. No torch."""

from pathlib import Path

from suite.descriptor import Descriptor
from workloads.cosmoflow.config import CosmoFlowConfig

DESCRIPTOR = Descriptor(
    name="cosmoflow",
    folder=Path(__file__).parent,
    hyperparameters=CosmoFlowConfig,
    implementation="workloads.cosmoflow.workload:CosmoFlow",
    generator="workloads.cosmoflow.generate",
)
