"""SwinV2-MoE: a SwinV2 with MoE layers classifies images by the regime that made their pattern. No torch."""

from pathlib import Path

from mlhpc.suite.descriptor import Descriptor

DESCRIPTOR = Descriptor(
    name="swinv2_moe",
    folder=Path(__file__).parent,
    hyperparameters="mlhpc.workloads.swinv2_moe.config:SwinV2MoEConfig",
    implementation="mlhpc.workloads.swinv2_moe.workload:SwinV2MoEWorkload",
    generator="mlhpc.workloads.swinv2_moe.generate",
    no_stages="its maps shrink between blocks, so stages would not be equal",
)
