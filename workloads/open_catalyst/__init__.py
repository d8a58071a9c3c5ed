"""OpenCatalyst: a graph neural network predicts forces on an adsorbate and a metal slab (OC20 S2EF). No torch."""

from pathlib import Path

from mlhpc.suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="open_catalyst",
    folder=Path(__file__).parent,
    hyperparameters="mlhpc.workloads.open_catalyst.config:OpenCatalystConfig",
    implementation="mlhpc.workloads.open_catalyst.workload:OpenCatalyst",
    generator="mlhpc.workloads.open_catalyst.generate",
    no_stages="its forces are derivatives of the energy, which the forward pass takes through all blocks",
)
