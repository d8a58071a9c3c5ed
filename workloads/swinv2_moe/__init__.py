"""SwinV2 with mixture-of-experts layers tells the processes apart that made an image. No torch."""

from pathlib import Path

from suite.descriptor import Descriptor
from workloads.swinv2_moe.config import SwinV2MoEConfig

DESCRIPTOR = Descriptor(
    name="swinv2_moe",
    folder=Path(__file__).parent,
    hyperparameters=SwinV2MoEConfig,
    implementation="workloads.swinv2_moe.workload:SwinV2MoEWorkload",
    generator="workloads.swinv2_moe.generate",
)
