"""DeepCAM: segmentation of tropical cyclones and atmospheric rivers in 16-channel climate fields. No torch."""

from pathlib import Path

from suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="deepcam",
    folder=Path(__file__).parent,
    hyperparameters="workloads.deepcam.config:DeepCamConfig",
    implementation="workloads.deepcam.workload:DeepCam",
    generator="workloads.deepcam.generate",
    no_stages="its decoder reads activations of its encoder, which lies on other stages",
)
