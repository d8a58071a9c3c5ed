"""DeepCAM: segmentation of tropical cyclones and atmospheric rivers in 16-channel climate fields. No torch."""

from pathlib import Path

from mlhpc.suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="deepcam",
    folder=Path(__file__).parent,
    hyperparameters="mlhpc.workloads.deepcam.config:DeepCamConfig",
    implementation="mlhpc.workloads.deepcam.workload:DeepCam",
    generator="mlhpc.workloads.deepcam.generate",
    no_stages="its decoder reads activations of its encoder, which lies on other stages",
)
