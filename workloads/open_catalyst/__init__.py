"""OpenCatalyst: forces on the atoms of an adsorbate on a metal slab by a graph neural network (OC20 S2EF). No torch."""

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
