"""DeepCAM: segmentation of tropical cyclones and atmospheric rivers in 16-channel climate fields. No torch."""

from pathlib import Path

from suite.descriptor import Descriptor
from workloads.deepcam.config import DeepCamConfig

DESCRIPTOR = Descriptor(
    name="deepcam",
    folder=Path(__file__).parent,
    hyperparameters=DeepCamConfig,
    implementation="workloads.deepcam.workload:DeepCam",
    generator="workloads.deepcam.generate",
)
