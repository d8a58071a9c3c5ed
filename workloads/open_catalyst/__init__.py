"""OpenCatalyst: a graph neural network predicts forces on an adsorbate and a metal slab (OC20 S2EF). No torch."""

from pathlib import Path

from suite.descriptor import Descriptor
from workloads.open_catalyst.config import OpenCatalystConfig

DESCRIPTOR = Descriptor(
    name="open_catalyst",
    folder=Path(__file__).parent,
    hyperparameters=OpenCatalystConfig,
    implementation="workloads.open_catalyst.workload:OpenCatalyst",
    generator="workloads.open_catalyst.generate",
)
